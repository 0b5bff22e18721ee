"""Texts that the regexes of renames need, against what `re` finds."""

from __future__ import annotations

import re

import pytest

from shardrules._checkpoint.patterns import needed_text, tokens_of

NEEDED = {
    r"^lm_head\.weight$": "lm_head.weight",
    r"^model\.layers\.(\d+)\.self_attn\.([qk]_norm)\.weight$": "model.layers.",
    r"layers\.\d+\.w": "layers.",
    r"ab+c": "a",
    r"abc?": "ab",
    r"xy{2,3}zz": "zz",
    r"(abc)*d": "d",
    r"a|bcd": "",
    r"(?i)weight": "",
    r"(?:abc)d": "d",
    r"(?=abcdef)ab": "ab",
    r"[]abc]x": "x",
    r"[^]abc]x[|(]": "x",
    r"a\.b\\c": "a.b\\c",
    r"(?P<layer>\d+(x|y))w": "w",
    r"a*?bc+?d": "b",
    "": "",
}


@pytest.mark.parametrize("pattern", NEEDED)
def test_the_text_that_each_name_has_in_it(pattern):
    assert needed_text(pattern) == NEEDED[pattern]


def test_it_is_in_whatever_re_finds(rng):
    pieces = [
        "a",
        "b",
        r"\.",
        "(a|b)",
        "(?P<x>ab)",
        "[ab]",
        ".",
        "a?",
        "b*",
        "a{0,1}",
        r"\d",
        "^",
        "$",
        "(?:ab)?",
        r"\Ba",
    ]
    for _ in range(2000):
        pattern = "".join(rng.choices(pieces, k=5))
        try:
            compiled = re.compile(pattern)
        except re.error:
            continue
        name = "".join(rng.choices("ab.1", k=8))
        if compiled.search(name):
            assert needed_text(pattern) in name, (pattern, name)


def test_tokens():
    tokens = tokens_of(r"^a\.(\d+)\.(?P<part>[qk])_proj$")
    assert [(token.kind, token.text, token.name) for token in tokens] == [
        ("anchor", "^", ""),
        ("text", "a.", ""),
        ("group", r"\d+", ""),
        ("text", ".", ""),
        ("group", "[qk]", "part"),
        ("text", "_proj", ""),
        ("anchor", "$", ""),
    ]
    assert tokens_of(re.compile("a", re.IGNORECASE)) is None
