"""`rule_patch`: what turns a rule file into the suggested list, as a patch for `patch` and git.

The file with the patch is read again, and must have the suggested rules exactly; otherwise there is
no patch. Costs a second reading of the rules. Must not know how rules are found.
"""

from __future__ import annotations

import difflib
import io
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from shardrules._correction import rule_spec
from shardrules._files.modules import is_module_form
from shardrules._files.rule_places import after_separators, json_spans
from shardrules._files.rules import RuleFile, read_rules
from shardrules._io import FileError
from shardrules._plan.findings import Declared
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules
from shardrules._specs import Fsdp, entries_of, entry_axes
from shardrules._suggest.suggest import suggest
from shardrules._suggest.texts import plain_pattern, toml_list, toml_rule
from shardrules._text import printable

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._rules.dialects import Dialect
    from shardrules._rules.patterns import Pattern
    from shardrules._suggest.suggestion import Suggestion

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


_WRITERS: Final = {".toml": toml_changed, ".json": json_changed}
_NO_LINE_END: Final = "\n\\ No newline at end of file\n"


def rule_patch(
    source: str, loaded: RuleFile, plan: Plan, *, dialect: Dialect | None, head_dim: int | None
) -> str:
    """The unified diff from a rule file to the same with its rules mended; "" if they stay.

    Args:
        source: The rule file.
        loaded: What it has.
        plan: The model under these rules.
        dialect: That in which the file is read, if not in its own.
        head_dim: As in `suggest`.

    Raises:
        FileError: The rules are of a module, logical or with companions; or the file is in a form
            in which its rules cannot be changed one by one.
        ValueError: As `suggest`.
    """
    rules = loaded.rules
    if isinstance(rules, LogicalRules):
        raise _refused(source, "its rules are for logical axis names", "write the missing names")
    if is_module_form(source):
        raise _refused(source, "rules of a module are code", _whole(source, "python"))
    if loaded.companions:
        raise _refused(
            source, "some leaves follow others", "leave out its companions, and mend that"
        )
    found = suggest(plan, like=rules, dialect=rules.dialect, head_dim=head_dim)
    if found.rules == rules:
        return ""
    change = _change(rules, found, loaded.declared)
    before = _text(source)
    write = _WRITERS.get(Path(source).suffix, json_changed)
    after = write(before, change)
    if after is None or not _is_read_as(source, after, dialect, found.rules, change):
        why = "its rules cannot be changed one by one; they can where each has a [[rules]] table"
        if write is json_changed:
            why = 'it has no place for what must be said; write {"replicated": [], "rules": [...]}'
        raise _refused(source, why, _whole(source, "toml"))
    return _diff(source, before, after)


def _refused(source: str, why: str, fix: str) -> FileError:
    return FileError(printable(f"{source}: --fix: there is no patch for it, since {why}: {fix}"))


def _whole(source: str, form: str) -> str:
    return (
        f"shardrules suggest MODEL --mesh MESH --like {source} --format {form} writes a whole list"
    )


def _change(rules: Rules, found: Suggestion, declared: Declared) -> Amendment:
    wanted, kept = list(found.rules), list[int]()
    for number, rule in enumerate(rules):
        if len(kept) < len(wanted) and rule == wanted[len(kept)]:
            kept.append(number)
    notes = found._notes
    added = [(*wanted[rule], notes[rule]) for rule in range(len(kept), len(wanted))]
    new = {pattern for pattern, _, _ in added}
    used = {
        axis
        for kind in found.plan.kinds
        for entry in kind._counted or ()
        for axis in entry_axes(entry)
    }
    more: dict[str, list[Any]] = {
        "replicated": [
            one
            for one in found.declared["replicated"]
            if one in new and one not in declared["replicated"]
        ],
        "data_axes": [
            one
            for one in found.declared["data_axes"]
            if one not in used and one not in declared["data_axes"]
        ],
    }
    return Amendment(len(rules), kept, added, more)


def _text(source: str) -> str:
    path = Path(source)
    if not path.is_file() or not printable(source) == source or "\t" in source:
        raise _refused(source, "it is no file that a patch can name", _whole(source, "toml"))
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise _refused(source, "it is no plain text", _whole(source, "toml")) from None


def _is_read_as(
    source: str, text: str, dialect: Dialect | None, wanted: Rules | LogicalRules, change: Amendment
) -> bool:
    """Whether the text is a rule file with these rules and what is declared."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, Path(source).name)
        path.write_bytes(text.encode())
        try:
            read = read_rules(str(path), dialect)
        except FileError:
            return False
    has = dict(read.declared.items())
    return read.rules == wanted and all(
        set(values) <= set(cast(Sequence[Any], has[key])) for key, values in change.declared.items()
    )


def _diff(source: str, before: str, after: str) -> str:
    name = _name(source)
    lines = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else line + _NO_LINE_END for line in lines)


def _name(source: str) -> str:
    """The file's name for patches: from the working directory, or from the root."""
    path = Path(os.path.abspath(source))
    here = Path.cwd()
    name = path.relative_to(here if path.is_relative_to(here) else path.anchor).as_posix()
    # Without a tab, a space would end it.
    return f"{name}\t" if " " in name else name
