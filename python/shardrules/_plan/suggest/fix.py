"""Rules that a rule file lacks: as a patch of TOML, or as text to paste into any other form.

Rules are only added. A patch is printed only if the patched file reads as the rules with these.
"""

from __future__ import annotations

import difflib
import io
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.io import FileError
from shardrules._base.text import counted, printable
from shardrules._plan.codec import rule_data, short
from shardrules._plan.files.modules import is_module_form
from shardrules._plan.files.rules import RuleFile, read_rule_source, rule_places
from shardrules._plan.suggest.suggest import suggest
from shardrules._plan.suggest.texts import python_rule, toml_rule
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules, rules_like

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._rules.dialects import Dialect, LogicalDialect

_TABLE: Final = re.compile(r"""^\s*\[\[\s*["']?rules\b""", re.MULTILINE)
# [rules.spec] belongs to the rule above.
_OTHER_TABLE: Final = re.compile(r"\s*\[(?!\[?\s*rules\b)")
_NO_LINE_END: Final = "\n\\ No newline at end of file\n"


class _Addition(NamedTuple):
    """Rules that are to stand before a rule of a list, with the note of each."""

    place: int
    rules: list[tuple[Any, Any, str]]


def fix(
    source: str,
    file: RuleFile,
    plan: Plan,
    *,
    dialect: Dialect | LogicalDialect | None,
    head_dim: int | None,
) -> str:
    """Write rules for leaves that have none, or a catch-all's; "" if there are no such leaves.

    `dialect` is that in which the file is read, if not in its own.
    """
    if file.companions:
        raise _refused(source, "some leaves follow others: leave out its companions, and fix that")
    rules = file.rules
    if isinstance(rules, LogicalRules):
        raise _refused(
            source, "it is for logical axis names, whose axes only you know: add a line for each"
        )
    addition = _added_rules(source, rules, plan, head_dim)
    if not addition.rules:
        return ""
    _, lines = rule_places(source, len(rules))
    patched = _patched(source, rules, lines, addition, dialect)
    return patched or _pasted(source, rules, lines, addition)


def _refused(source: str, why: str) -> FileError:
    return FileError(printable(f"{source}: --fix: it writes no rules for this file, since {why}"))


def _added_rules(source: str, rules: Rules, plan: Plan, head_dim: int | None) -> _Addition:
    """Return the rules that `suggest` adds, before the catch-all that decides their leaves now."""
    suggestion = suggest(plan, like=rules, dialect=rules.dialect, head_dim=head_dim)
    kept: list[int] = []
    pairs = [*suggestion.rules]
    for number, rule in enumerate(rules):
        if len(kept) < len(pairs) and rule == pairs[len(kept)]:
            kept.append(number)
    added = [(*pair, note) for pair, note in zip(pairs, suggestion._notes, strict=True)]
    wins = plan.coverage.won
    catch_alls = (number for number in range(len(rules)) if wins[number] and number not in kept)
    place = next(catch_alls, len(rules))
    if place < len(rules) and len(kept) < len(pairs) and rules.dialect.precedence == "only":
        raise _refused(
            source, f"rule {place} matches all, and only one rule may: leave it out, and fix that"
        )
    return _Addition(place, added[len(kept) :])


def _patched(
    source: str,
    rules: Rules,
    lines: tuple[int, ...],
    addition: _Addition,
    dialect: Dialect | LogicalDialect | None,
) -> str:
    """Return the patch of a TOML file with a `[[rules]]` table for each rule; "" for others."""
    path = Path(source)
    if path.suffix != ".toml" or not lines or printable(source) != source or "\t" in source:
        return ""
    text = path.read_bytes().decode()
    tables = [line for rule in addition.rules for line in (*toml_rule(*rule), "")]
    patched = _with_tables(_lines(text), lines, addition.place, tables)
    pairs = [*rules]
    pairs[addition.place : addition.place] = [rule[:2] for rule in addition.rules]
    expected = rules_like(rules, pairs)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, path.name)
        copy.write_bytes(patched.encode())
        try:
            is_right = [*read_rule_source(str(copy), dialect).rules] == [*expected]
        except FileError:  # such as for a list of rules in one value
            is_right = False
    return _diff(source, text, patched) if is_right else ""


def _lines(text: str) -> list[str]:
    """Return the lines with their ends; only a line feed ends one, as in TOML and in patches."""
    return list(io.StringIO(text, newline="\n"))


def _with_tables(old: list[str], starts: tuple[int, ...], place: int, tables: list[str]) -> str:
    """Return the lines of a file with tables before that of a rule, or behind the last one."""
    new_line = "\r\n" if old[0].endswith("\r\n") else "\n"
    if place < len(starts):
        at = starts[place] - 1
        while at and old[at - 1].lstrip().startswith("#"):
            at -= 1
    else:
        others = (n for n in range(starts[-1], len(old)) if _OTHER_TABLE.match(old[n]))
        at = next(others, len(old))
        while not old[at - 1].strip() or old[at - 1].lstrip().startswith("#"):
            at -= 1
        old[at - 1] = old[at - 1].rstrip("\r\n") + new_line
        tables = ["", *tables[:-1]]
    return "".join([*old[:at], *(line + new_line for line in tables), *old[at:]])


def _diff(source: str, before: str, after: str) -> str:
    """Return the unified diff, for `patch` and git in the working directory or the root."""
    path, here = Path(source).absolute(), Path.cwd()
    name = path.relative_to(here if path.is_relative_to(here) else path.anchor).as_posix()
    name += "\t" if " " in name else ""  # else a space would end it
    lines = difflib.unified_diff(_lines(before), _lines(after), f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else line + _NO_LINE_END for line in lines)


def _pasted(source: str, rules: Rules, lines: tuple[int, ...], addition: _Addition) -> str:
    """Return where to paste the rules, and their text as the file has them."""
    place, count = addition.place, counted(len(addition.rules), "rule")
    where = f"before rule {place}" if place < len(rules) else "at the end of the list"
    if lines:
        begins = lines[min(place, len(lines) - 1)]
        where += f" (line {begins})" if place < len(lines) else f" (its last at line {begins})"
    suffix = "" if is_module_form(source) else Path(source).suffix
    has_tables = suffix == ".toml" and _TABLE.search(Path(source).read_text("utf-8"))
    pasted = [printable(f"{source}: {count} to paste {where}:")]
    for pattern, value, note in addition.rules:
        if has_tables:
            pasted += [*toml_rule(pattern, value, note), ""]
        elif is_module_form(source):
            pasted += [f"# {note}", f"{python_rule(pattern, value)},"]
        elif suffix in (".yml", ".yaml"):
            pasted += [f"# {note}", f"- {_json_rule(pattern, value)}"]
        else:
            pasted.append(f"{_json_rule(pattern, value)},")
    return "\n".join([*pasted, ""])


def _json_rule(pattern: Any, value: Any) -> str:
    # A runner of a CI system would obey ##[name].
    return json.dumps(short(rule_data(pattern, value))).replace("#", "\\u0023")
