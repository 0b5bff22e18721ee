"""The text of a rule file with rules taken out and others put in; all else stays as it is written.

Only where rules begin and end is searched in the text, so whoever calls must read the outcome again
and compare. Costs what the file's length costs. Must not know why rules go or come.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._correction import rule_spec
from shardrules._files.rule_places import after_separators, json_spans
from shardrules._shape_specs import Fsdp
from shardrules._specs import entries_of, entry_axes
from shardrules._suggesting.texts import plain_pattern, toml_list, toml_rule

if TYPE_CHECKING:
    from shardrules._matching.match_modes import Pattern

__all__ = ["Amendment", "json_changed", "lines_of", "toml_changed"]

# Other tables, such as [rules.spec], belong to the rule above them.
_HEADER: Final = re.compile(r"\s*\[(?:(?P<rule>\[\s*rules\s*\])|\s*correction\s*)\]\s*(?:#|$)")


class Amendment(NamedTuple):
    """What becomes of a rule file."""

    rules: int
    """How many rules the file has."""
    kept: list[int]
    """Those that stay."""
    added: list[tuple[Pattern, Any, str]]
    """(pattern, spec, note) of the rules that come after them."""
    declared: Mapping[str, Sequence[str]]
    """Top-level lists, by their keys, and what they are to have beside what they have."""


def lines_of(text: str) -> list[str]:
    """The lines with their ends; only a line feed ends one, as in TOML and in patches."""
    return list(io.StringIO(text, newline="\n"))


def toml_changed(text: str, change: Amendment) -> str | None:
    """The TOML with the change; None if its rules are not all `[[rules]]` tables."""
    lines = lines_of(text)
    start, blocks = _blocks(lines)
    if len(blocks) != change.rules or not blocks:
        return None
    inserted: dict[int, list[str]] = {}
    for key, values in change.declared.items():
        if values and not _extended(lines, start, key, values):
            place = _last(lines, 0, start)
            line = f"{key} = {toml_list(values)}"
            inserted.setdefault(place or start, []).extend([line] if place else [line, ""])
    at = blocks[change.kept[-1]][1] if change.kept else blocks[0][0]
    for rule in change.added:
        block = toml_rule(*rule)
        inserted.setdefault(at, []).extend(["", *block] if change.kept else [*block, ""])
    dropped = {
        line
        for rule, (start, end) in enumerate(blocks)
        if rule not in change.kept
        for line in range(start, _after_blanks(lines, end))
    }
    return _put_together(lines, inserted, dropped)


def _put_together(lines: list[str], inserted: dict[int, list[str]], dropped: set[int]) -> str:
    """The lines without those that are dropped, and with others before them."""
    new_line = "\r\n" if lines[0].endswith("\r\n") else "\n"
    parts: list[str] = []
    for n, line in enumerate([*lines, ""]):
        if n in inserted and parts and not parts[-1].endswith("\n"):
            parts.append(new_line)
        parts += [one + new_line for one in inserted.get(n, ())]
        parts += [] if n in dropped else [line]
    text = "".join(parts)
    if not lines[-1].strip():
        return text
    return text.rstrip("\r\n") + (new_line if lines[-1].endswith("\n") else "")


def _blocks(lines: list[str]) -> tuple[int, list[tuple[int, int]]]:
    """Where the first table begins, and where each rule begins and ends, with its comments."""
    headers = [(n, found) for n, line in enumerate(lines) if (found := _HEADER.match(line))]
    starts = [_with_comments(lines, n) for n, _ in headers]
    following = [*starts[1:], len(lines)]
    blocks = [
        (start, _last(lines, n, end))
        for (n, found), start, end in zip(headers, starts, following, strict=False)
        if found["rule"]
    ]
    return min(starts, default=0), blocks


def _with_comments(lines: list[str], n: int) -> int:
    """Where the comments begin that stand right above a line."""
    while n and lines[n - 1].lstrip().startswith("#"):
        n -= 1
    return n


def _last(lines: list[str], start: int, stop: int) -> int:
    """One after the last line between these that is neither empty nor a comment; or `start`."""
    while stop > start and (not (text := lines[stop - 1].strip()) or text.startswith("#")):
        stop -= 1
    return stop


def _after_blanks(lines: list[str], n: int) -> int:
    while n < len(lines) and not lines[n].strip():
        n += 1
    return n


def _extended(lines: list[str], stop: int, key: str, values: Sequence[str]) -> bool:
    """Puts the values first into the list of this key above line `stop`, if there is one."""
    opening = re.compile(rf"\s*{key}\s*=\s*\[(?P<rest>\s*\])?")
    for n in range(stop):
        if found := opening.match(lines[n]):
            end = lines[n].index("[") + 1
            comma = "" if found["rest"] else ", "
            lines[n] = f"{lines[n][:end]}{toml_list(values)[1:-1]}{comma}{lines[n][end:]}"
            return True
    return False


def json_changed(text: str, change: Amendment) -> str | None:
    """The JSON with the change; None if it is a list alone, which has no place for a declaration.

    Each rule that stays is written as it was, and what stands between two rules separates the new
    ones.
    """
    start = after_separators(text, 0)
    keys: dict[str, int] = {}
    at = start
    if text[start] == "{":
        spans = json_spans(text, start)
        keys = {
            json.loads(text[key[0] : key[1]]): value[0]
            for key, value in zip(spans[::2], spans[1::2], strict=True)
        }
        at = keys["rules"]
    elif any(change.declared.values()):
        return None
    rules = json_spans(text, at)
    if len(rules) != change.rules or not rules:
        return None
    first, last = rules[0][0], rules[-1][1]
    edits = [(first, last, _rules_text(text, at, rules, change))]
    for key, values in change.declared.items():
        listed = _json(list(values))
        if values and key in keys:
            place = keys[key] + 1
            comma = "" if text[after_separators(text, place)] == "]" else ", "
            edits.append((place, place, listed[1:-1] + comma))
        elif values:
            space = text[start + 1 : after_separators(text, start + 1)] or " "
            place = after_separators(text, start + 1)
            edits.append((place, place, f'"{key}": {listed},{space}'))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text


def _rules_text(text: str, at: int, rules: list[tuple[int, int]], change: Amendment) -> str:
    """All rules, without the brackets."""
    usual = text[rules[0][1] : rules[1][0]] if rules[1:] else "," + text[at + 1 : rules[0][0]]
    written = []
    for rule in change.kept:
        begin, end = rules[rule]
        written.append((text[rules[rule - 1][1] : begin] if rule else usual, text[begin:end]))
    written += ((usual, _json_rule(pattern, value)) for pattern, value, _ in change.added)
    return "".join(before + rule for before, rule in written)[
        len(written[0][0]) if written else 0 :
    ]


def _json_rule(pattern: Pattern, value: Any) -> str:
    wanted = rule_spec(value)
    if isinstance(wanted.spec, Fsdp):
        spec: Any = {"fsdp": list(wanted.spec.axes)}
    else:
        cuts = [list(entry_axes(entry)) for entry in entries_of(wanted.spec)]
        spec = [axes[0] if len(axes) == 1 else axes for axes in cuts]
    if not wanted.units:
        return _json([plain_pattern(pattern), spec])
    units = [unit or 1 for unit in wanted.units]
    return _json({"pattern": plain_pattern(pattern), "spec": spec, "units": units})


def _json(value: Any) -> str:
    # A runner of a CI system would obey ##[name].
    return json.dumps(value).replace("#", "\\u0023")
