"""`rule_patch`: what turns a rule file into the suggested list, as a patch for `patch` and git.

The file with the patch is read again, and must have the suggested rules exactly; otherwise there is
no patch. Costs a second reading of the rules. Must not know how rules are found.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from shardrules._declared import Declared
from shardrules._file_error import FileError
from shardrules._files.modules import is_module_form
from shardrules._files.rules import RuleFile, read_rules
from shardrules._logical.rules import LogicalRules
from shardrules._matching.rules import Rules
from shardrules._printable import printable
from shardrules._specs import entry_axes
from shardrules._suggesting.rule_texts import Amendment, json_changed, lines_of, toml_changed
from shardrules._suggesting.suggest import suggest

if TYPE_CHECKING:
    from shardrules._matching.dialects import Dialect
    from shardrules._planning.plan import Plan
    from shardrules._suggesting.suggestion import Suggestion

__all__ = ["rule_patch"]

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
