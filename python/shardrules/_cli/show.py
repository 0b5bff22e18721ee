"""Plans, findings, sweeps and reports as output, in the colours and width of a terminal."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click

from shardrules._base.text import and_more, brief, is_command, printable
from shardrules._cli.inputs import Planned, dialect_of
from shardrules._cli.process import hint, working
from shardrules._plan.findings import finding_lines, github_command, github_commands
from shardrules._plan.kinds import DEFAULT_LARGE, Kind, is_replicated
from shardrules._plan.show import heading, plan_table
from shardrules._plan.tables import Table
from shardrules._rules.logical_rules import LogicalRules

if TYPE_CHECKING:
    from types import SimpleNamespace as Args

    from shardrules._plan.findings import Findings, Level
    from shardrules._plan.memory import Room
    from shardrules._plan.plan import Plan
    from shardrules._plan.suggest.suggestion import Suggestion
    from shardrules._plan.sweep import Sweep
    from shardrules._program.verify.sweep import StepSweep

_STYLES: Final[dict[str, dict[str, Any]]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
}
_DECLARED: Final = re.compile(r"\b(optional|data)_axes=\[([^]]*)\]")
"""Arguments in the fixes of findings that are options here."""
_MOST_BARS: Final = 40
_MOST_LINES: Final = 20
_ADDED: Final = frozenset({"unmatched", "catch-all"})
"""Kinds of findings that --fix writes rules for."""
# Set by the runners of GitHub, Azure and TeamCity, which take commands from a job's output.
_RUNNERS: Final = ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")


def _print(text: str) -> None:
    """Print lines, with their colours where the stream or --color has them."""
    click.echo(text, file=sys.stdout)


def show_plan(plan: Plan) -> None:
    """Print the heading and all folded paths."""
    print(heading(plan))
    kinds = [plan.kinds[row.group] for row in plan.folded]
    alarming = [_is_alarming(kind, plan.axis_sizes) for kind in kinds]
    _print_table(plan_table(plan, plan.folded), alarming)


def _is_alarming(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    is_large = kind.bytes >= DEFAULT_LARGE and is_replicated(kind, axis_sizes)
    return kind.status != "placed" or is_large


def _print_table(table: Table, alarming: Sequence[bool]) -> None:
    """Print a table, on a terminal within its width; the head is bold and some rows are red."""
    heads = [column.head for column in table.columns]
    width = shutil.get_terminal_size().columns
    if sys.stdout.isatty():
        table = table.narrow(width)
    head, *rows = table.lines()
    lines = [click.style(head, bold=True)]
    lines += (
        click.style(row, fg="red") if is_red else row
        for row, is_red in zip(rows, alarming, strict=True)
    )
    if gone := [head for head in heads if head not in {column.head for column in table.columns}]:
        lines.append(click.style(f"... without {', '.join(gone)}, in {width} columns", dim=True))
    _print("\n".join(lines))


def show_sweep(rows: Sweep, most: int) -> None:
    """Print the first `most` rows, how many more there are, and the notes."""
    from shardrules._plan.sweep import sweep_table

    _print_table(sweep_table(rows[:most]), [row.fits is False for row in rows[:most]])
    for line in (*and_more(len(rows), most, "mesh"), *rows.notes):
        print(printable(line))


def show_step_sweep(rows: StepSweep, most: int) -> None:
    """Print the heading, the first `most` rows, and how many more there are."""
    from shardrules._program.verify.sweep import step_sweep_table

    shown = rows[:most]
    print(printable(rows.heading))
    _print_table(step_sweep_table(shown), [row.fits is False for row in shown])
    for line in and_more(len(rows), most, "program"):
        print(line)


def show_findings(args: Args, findings: Findings, planned: Planned | None = None) -> int:
    """Show findings in the format of the options, and returns the exit code."""
    if args.format == "json":
        print(findings.to_json())
    elif args.format == "github":
        commands = github_commands(findings, *_rule_lines(args, planned), _page_title(args))
        print(commands or findings.notes[0])
    else:
        for finding in findings:
            label, message, *lines = finding_lines(finding)
            _print(f"{click.style(label, **_STYLES[finding.level])}: {message}")
            text = _DECLARED.sub(_as_option, "\n".join(lines))
            _print(click.style(text, dim=True) if finding.level == "info" else text)
        if not args.quiet:
            _print(click.style(findings.notes[0], bold=True))
            kinds = {finding.kind for finding in findings.at_least("warning")}
            if planned and args.rules and not planned.rules.companions and kinds & _ADDED:
                print("--fix prints the missing rules")
    return exit_code(args, findings)


def _as_option(match: re.Match[str]) -> str:
    axes = match[2].replace("'", "").replace(" ", "")
    return f"--{match[1]}-axes {axes}"


def exit_code(args: Args, findings: Findings) -> int:
    """Return 1 if there are findings of at least the level --fail-on."""
    return 1 if args.fail_on != "never" and findings.at_least(cast("Level", args.fail_on)) else 0


def _rule_lines(args: Args, planned: Planned | None) -> tuple[str | None, Sequence[int]]:
    """Return the rule file from the root of the checkout, and the lines of its rules."""
    from shardrules._plan.files.rule_places import rule_places

    if planned is None or args.rules is None:
        return None, ()
    file, lines = rule_places(args.rules, len(planned.plan.rules))
    return _from_root(file), lines


def annotation(args: Args, lines: Sequence[str]) -> str:
    """Return a warning of `diff` for GitHub about the rules, or else the file that comes after."""
    file = args.rules or args.after
    shown = [*lines[:_MOST_LINES], *and_more(len(lines), _MOST_LINES, "line")]
    place = _from_root(file if Path(file).is_file() else None)
    return github_command("warning", f"{_page_title(args)} diff", shown, place)


def _page_title(args: Args) -> str:
    return " ".join(filter(None, [getattr(args, "job", None), "shardrules"]))


def _from_root(file: str | None) -> str | None:
    """Return a file from the root of GitHub's checkout, or of the repository."""
    if file:
        path = Path(file).resolve()
        root = os.environ.get("GITHUB_WORKSPACE") or next(
            (folder for folder in path.parents if (folder / ".git").exists()), None
        )
        if root and path.is_relative_to(top := Path(root).resolve()):
            file = path.relative_to(top).as_posix()
    return file


def show_fix(args: Args, planned: Planned, findings: Findings) -> int:
    """Print the rules that a rule file lacks, and returns the exit code."""
    from shardrules._plan.suggest.fix import fix

    text = fix(
        args.rules, planned.rules, planned.plan, dialect=dialect_of(args), head_dim=args.head_dim
    )
    if not text:
        if findings.at_least("warning"):
            hint(args, f"no rule is to be added; check without --fix: {findings.summary}")
        return exit_code(args, findings)
    _check_obeyed(text)
    # As bytes: a file's line ends and characters, whatever those of standard output are.
    sys.stdout.buffer.write(text.encode())
    return 0 if args.fail_on == "never" else 1


def _check_obeyed(patch: str) -> None:
    """Check that a CI runner, which reads the output, obeys no line of a patch."""
    if not any(name in os.environ for name in _RUNNERS):
        return
    with suppress(OSError):  # a stream without a number
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            return
    if line := next(filter(is_command, patch.splitlines()), ""):
        raise ValueError(
            f"--fix: the CI's runner would obey a line of the patch, {brief(line)}; write the "
            "patch to a file: shardrules check ... --fix > fix.patch"
        )


def report(args: Args, planned: Planned, room: Room, training: dict[str, Any]) -> str:
    """Return the HTML report: the plan, its findings, meshes and suggested rules to compare."""
    plan = planned.plan
    sections: list[Any] = [plan.check(**planned.rules.declared)]
    memory = {"hbm": room.hbm, "host_memory": room.host, **training}
    fixed = {axis: size for axis, size in plan.axis_sizes.items() if size == 1}
    with working(args, "trying meshes"):
        if plan.devices > 1:
            sections.append(plan.sweep(fixed=fixed, **memory)[:_MOST_BARS])
        if suggestion := _suggestion_text(args, planned):
            sections.append(suggestion)
    return plan.to_html(sections=sections, title=planned.model, **memory)


def _suggestion_text(args: Args, planned: Planned) -> Suggestion | None:
    """Write rules for the same arrays and mesh; None, with a note, if it cannot."""
    from shardrules._plan.suggest.suggest import suggest

    rules = planned.rules.rules
    if isinstance(rules, LogicalRules):
        return None
    try:
        return suggest(planned.plan, dialect=rules.dialect)
    except ValueError as error:
        hint(args, f"note: the report has no suggested rules: {error}")
        return None
