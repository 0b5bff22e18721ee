"""Regexes of renames as texts and groups: what each name must have."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

# What may stand after an atom and makes it optional or repeated.
_QUANTIFIERS: Final = "*+?{"
_TOKEN: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[\s\S]", re.DOTALL)


class Token(NamedTuple):
    """A text, a group with its source, an anchor, or anything else."""

    kind: str
    """"text", "group", "anchor" or "other"."""
    text: str
    name: str = ""
    """The group's name."""


def tokens_of(pattern: str | re.Pattern[str]) -> list[Token] | None:
    """Take a regex apart; None if it has flags or alternatives."""
    compiled = re.compile(pattern)
    if compiled.flags != re.UNICODE or not isinstance(compiled.pattern, str):
        return None
    tokens: list[Token] = []
    rest = _TOKEN.findall(compiled.pattern)[::-1]
    while rest:
        atom = rest.pop()
        if atom == "|":
            return None
        token = _group(rest) if atom == "(" else _atom(atom)
        if rest and rest[-1] in _QUANTIFIERS:
            token = Token("other", token.text + rest.pop())
            if token.text.endswith("{"):
                while not token.text.endswith("}") and rest:
                    token = Token("other", token.text + rest.pop())
            if rest and rest[-1] in "?+":
                token = Token("other", token.text + rest.pop())
        if token.kind == "text" and tokens and tokens[-1].kind == "text":
            token = Token("text", tokens.pop().text + token.text)
        tokens.append(token)
    return tokens


def _group(rest: list[str]) -> Token:
    """Return the group whose parenthesis has been opened."""
    text, depth = "", 1
    while depth:
        atom = rest.pop()
        depth += (atom == "(") - (atom == ")")
        text += atom
    named = re.fullmatch(r"\?P<(\w+)>(.*)\)", text, re.DOTALL)
    if named is not None:
        return Token("group", named[2], named[1])
    return Token("other", f"({text}") if text.startswith("?") else Token("group", text[:-1])


def _atom(atom: str) -> Token:
    if atom in "^$":
        return Token("anchor", atom)
    if atom == "." or atom.startswith("["):
        return Token("other", atom)
    if atom.startswith("\\"):
        return Token("other", atom) if atom[1].isalnum() else Token("text", atom[1])
    return Token("text", atom)


def needed_text(pattern: str | re.Pattern[str]) -> str:
    """Return the longest text that each name has in it that the pattern finds."""
    tokens = tokens_of(pattern) or []
    return max((token.text for token in tokens if token.kind == "text"), key=len, default="")
