"""Texts of messages: near names at a bounded cost; names are anybody's: none reaches a terminal raw, or is a command."""

import difflib
import json
import pickle
import random
import re
import sys
import unicodedata

import jax
import pytest

import shardrules as sr
from shardrules._base.text import SLIP, near_names, near_shown, nearest, printable, printable_json
from tests.support.hostile_names import COMMANDS, HOSTILE, assert_safe

WORDS = ("attention", "mlp", "query", "key", "value", "gate_proj", "up_proj", "kernel", "norm")


def some_paths(count):
    choose = random.Random(7)
    return [f"layers/{i}/{'/'.join(choose.sample(WORDS, 3))}" for i in range(count)]


def test_only_few_paths_are_compared_in_full(monkeypatch):
    compared = []

    class Counted(difflib.SequenceMatcher):
        def ratio(self):
            compared.append(max(len(self.a), len(self.b)))
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    paths = some_paths(20_000)
    assert paths[77] in near_names(paths[77][:-2], [*paths, paths[77] + "x" * 10**6])
    # A slip, and that the end of a path is enough.
    assert paths[5] in near_names(paths[5].replace("a", "", 1), paths)
    assert near_names("embeding/table", [*paths, "model/embedding/table"])[0] == "model/embedding/table"
    assert len(compared) <= 300
    assert max(compared) <= 100


def test_what_is_shown_is_printable_and_short():
    assert near_shown("a\x1b[2Jb", ["a\x1b[2Jc", "a" * 10**6]) == "; near it: a\\u001b[2Jc"
    assert len(near_shown("a" * 300, ["a" * 10**6])) < 300
    for path in ("", "%%%%%", "\0"):
        assert near_names(path, some_paths(50)) == []
        assert near_shown(path, []) == ""


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("v5", ["v4", "v5e"], "v5e"),
        ("H-100", ["A100", "H100"], "H100"),
        ("fsdp_axis", ["fsdp"], "fsdp"),
        ("sp", ["tp"], None),
        ("pt", ["tp"], "tp"),
        ("", ["tp"], None),
        ("a" * 130, ["a" * 131], "a" * 131),  # names were compared by their first 100 letters, and told cut to them
    ],
)
def test_a_short_name(name, names, meant):
    assert nearest(name, names) == meant


@pytest.mark.parametrize(
    ("name", "near"), [("exp", "exp_with_fsdp"), ("moe_layers", "layers"), ("layers", "moe_layers")]
)
def test_a_part_of_a_name_is_no_slip(name, near):
    assert nearest(name, [near], SLIP) is None
    assert nearest("fsdpp", ["fsdp", near], SLIP) == "fsdp"


def test_what_is_escaped_is_what_python_calls_not_printable():
    for code in (*range(0x30000), *range(0xE0000, 0xE0200), sys.maxunicode):
        kept = chr(code) == " " or unicodedata.category(chr(code))[0] not in "CZ"
        assert (printable(chr(code)) == chr(code)) == kept, hex(code)
    assert printable("\x1b\u202e\U000e0041") == r"\u001b\u202e\U000e0041"


def test_names_of_models_and_patterns_stay_as_they_are():
    for name in [
        r"layers/\d+/(wq|wk)\.kernel$", r"['params']['layers'][0].kernel", "a::b", "x #1", "## x", "model##2",
        "模型/层/权重", "é/ü/ñ", "{{a}}/{0..3}", "P(('fsdp', 'sp'), None)", "%0A", "<b>&amp;", "🦙",
    ]:  # fmt: skip
        assert printable(name) == name


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_json_says_the_same_without_commands(name):
    text = printable_json({"path": name, name: ["#", "##", "####["]})
    assert json.loads(text) == {"path": name, name: ["#", "##", "####["]}
    assert text.isascii()
    assert not COMMANDS.search(text)


LEAF = jax.ShapeDtypeStruct((8, 8), "float32")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_what_objects_say_of_themselves(name):
    """In a notebook or a program's log, without the command line."""
    tree = {name: LEAF, "w": LEAF}
    plan = sr.plan(tree, [(re.escape(name), (name, "fsdp")), (".*", ())], {"fsdp": 4, name: 2})
    other = sr.plan({f"{name}/x": LEAF}, [(".*", ())], {f"{name}y": 8})
    harmless = sr.plan({"v": LEAF, "w": LEAF}, [("v", ("z", "fsdp")), (".*", ())], {"fsdp": 4, "z": 2})
    for text in (
        plan, plan.check(), plan.explain(name), plan.diff(other), plan.sweep([{name: 8}]), plan.on_mesh({"fsdp": 3}).explain(name),
        plan._repr_html_(), plan.check().to_github(f"{name}.py").replace("::error ", "").replace("::warning ", "").replace("::notice ", ""),
    ):  # fmt: skip
        assert_safe(str(text))
    assert repr(plan).count("\n") == repr(harmless).count("\n")
    assert str(plan.explain(name)).count("\n") == str(harmless.explain("v")).count("\n")


def errors_of_the_library(name):
    tree = {name: LEAF, f"{name}{name}": LEAF}
    strict = sr.RuleSpec((name, name), sr.Correction())
    for wrong in (
        lambda: sr.match_partition_rules([("nothing", None)], tree),
        lambda: sr.Rules([("(?s).*", None), ("(?s).+", None)], sr.dialects.KERAS).match(tree),
        lambda: sr.Rules([("(?s).*", (name, None, "tp"))], sr.dialects.KERAS).match(tree),
        lambda: sr.named_shardings(tree, [("", strict)], {"tp": 2}),
        lambda: sr.plan(tree, [("nothing", None)], {"tp": 2}).specs(),
        lambda: sr.Rules([(f"(?P<{name}", None)]),
    ):
        with pytest.raises((ValueError, re.error)) as caught:
            wrong()
        yield str(caught.value)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_errors_of_the_library_name_leaves_in_one_line_each(name):
    pairs = zip(errors_of_the_library(name), errors_of_the_library("harmless"), strict=True)
    for text, harmless in pairs:
        assert_safe(text)
        assert text.count("\n") == harmless.count("\n"), text


def test_the_caret_stands_where_it_stood():
    with pytest.raises(re.error) as caught:
        sr.Rules([("a\x1bb(", None)])
    message, pattern, caret = str(caught.value).split("\n")
    assert message == "rule 0: missing ), unterminated subpattern at position 3"
    assert (pattern, caret) == (r"    a\u001bb(", "            ^")


def test_an_error_of_a_file_has_one_line_and_those_of_its_own():
    error = sr.FileError("a\nb.json: wrong", "    (x", "    ^")
    assert str(error) == "a\\u000ab.json: wrong\n    (x\n    ^"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
