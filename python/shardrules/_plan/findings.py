"""`Finding` and `Findings` of check, verify and audit: text, JSON and GitHub annotations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypedDict, get_args

from shardrules._base.arguments import as_tuple, check_choice, check_file, integer
from shardrules._base.text import and_more, bytes_shown, counted, printable, printable_lines, record
from shardrules._plan.answers import Answer, Section

if TYPE_CHECKING:
    from shardrules._plan.report import Page


class Declared(TypedDict):
    """Properties of a rule list that are intended: arguments of `Plan.check`, by their names."""

    replicated: tuple[str | re.Pattern[str], ...]
    """Patterns of leaves that are replicated on purpose, searched in the paths."""
    data_axes: tuple[str, ...]
    """Mesh axes that shard only batches and sequences."""


NOTHING: Final = Declared(replicated=(), data_axes=())


def all_declared(first: Declared, second: Declared) -> Declared:
    """Return the declarations of both."""
    return Declared(
        replicated=first["replicated"] + second["replicated"],
        data_axes=first["data_axes"] + second["data_axes"],
    )


Level = Literal["error", "warning", "info"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""The worst first."""
CheckKind = Literal[
    "companion", "memory", "unpinned", "catch-all", "replicated", "half-head", "unknown-name",
    "unnamed", "nnx-value", "dead", "shadowed", "uncut", "unused-axis", "unmatched", "misfit",
    "correction", "unknown-axis",
]  # fmt: skip
"""The kinds in `KINDS` of check_context.py; docs/findings.md says what they are."""
VerifyKind = Literal[
    "input", "output", "fixed-point", "memory-kind", "donation", "gathered", "unexpected",
    "differs", "batch", "remat", "budget", "peak", "devices", "structure", "unplanned", "type",
    "deleted", "unknown", "unplaced", "sharding", "unequal", "nan",
]  # fmt: skip
"""In the order of docs/findings.md, which says what they are."""
FindingKind = CheckKind | VerifyKind
_MOST_PATHS: Final = 5
_GITHUB_COMMANDS: Final = {"error": "error", "warning": "warning", "info": "notice"}


@record
class Finding(NamedTuple):
    """One finding of `Plan.check`, `verify` or `audit`."""

    level: Level
    kind: FindingKind
    """What was found: a section of the page "Findings"."""
    message: str
    fix: str
    paths: tuple[str, ...] = ()
    """Folded path patterns of the leaves, those with most bytes first."""
    leaves: int = 0
    rule: int | None = None
    """Index of the rule that is the reason; None if none is, or several are."""
    bytes: int = 0
    """Bytes at stake on the fullest device; 0 if it is not about bytes."""

    def __str__(self) -> str:
        label, message, *lines = finding_lines(self)
        return "\n".join([f"{label}: {message}", *lines])


def finding_lines(finding: Finding) -> list[str]:
    """Return the label of a finding, its message, and the lines below: paths and the fix."""
    rest = and_more(len(finding.paths), _MOST_PATHS, "pattern")
    paths = [f"    {line}" for line in (*finding.paths[:_MOST_PATHS], *rest)]
    label = f"{finding.level}[{finding.kind}]"
    return [printable(line) for line in (label, finding.message, *paths, f"  {finding.fix}")]


class FindingsError(Exception):
    """Findings that are not accepted, by `Findings.raise_for`; its text lists them.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [], {"tp": 2})
        >>> try:
        ...     plan.check().raise_for("error")
        ... except sr.FindingsError as error:
        ...     [finding.kind for finding in error.findings]
        ['unmatched']
    """

    def __init__(self, findings: Findings) -> None:
        super().__init__(findings)
        self.findings: Final = findings


class Findings(Answer[Finding]):
    """All findings together, the worst first; `str` lists them, and how many there are.

    If there are none, it says so, and what was looked at.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("k", "tp")], {"tp": 2})
        >>> findings = plan.check()
        >>> [(finding.level, finding.kind) for finding in findings.at_least("warning")]
        [('error', 'unmatched'), ('warning', 'dead')]
        >>> findings.summary
        '1 error, 1 warning, 1 info'
        >>> plan.with_rules([("w", "tp")]).check()
        nothing found: 1 leaf, 1 rule, on tp=2
    """

    scope: str
    """What was looked at, in words: "12 leaves, 3 rules, on tp=2"; and what was not."""

    _rows_key = "findings"

    def __new__(cls, findings: Iterable[Finding] = (), scope: str = "") -> Self:
        """Sorted by level, then by bytes at stake."""
        worst_first = sorted(
            findings, key=lambda finding: (LEVELS.index(finding.level), -finding.bytes)
        )
        return super().__new__(cls, worst_first, scope=scope)

    def at_least(self, level: Level) -> Findings:
        """Return the findings of this level and worse."""
        check_choice("level", level, LEVELS)
        most = LEVELS.index(level)
        findings = [finding for finding in self if LEVELS.index(finding.level) <= most]
        omitted = len(self) - len(findings)
        left_out = f"{counted(omitted, 'finding')} below {level} left out" if omitted else ""
        return Findings(findings, "; ".join(filter(None, [self.scope, left_out])))

    def raise_for(self, level: Level = "error") -> None:
        """Raise an error if there are findings of this level or worse: a line for a test.

        Args:
            level: The level from which on findings are not accepted. Default: "error".

        Raises:
            FindingsError: With these findings.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> plan.check().raise_for("warning")
        """
        if refused := self.at_least(level):
            raise FindingsError(refused)

    @property
    def notes(self) -> list[str]:
        """How many findings there are, or what they are not in."""
        if self:
            return [self.summary]
        return [printable(f"nothing found: {self.scope}" if self.scope else "nothing found")]

    def _json(self) -> dict[str, Any]:
        return {"scope": self.scope}

    @property
    def summary(self) -> str:
        """The number of findings of each level, in a line."""
        error, warning, info = map([finding.level for finding in self].count, LEVELS)
        return f"{counted(error, 'error')}, {counted(warning, 'warning')}, {info} info"

    def _section(self, page: Page) -> Section:
        return Section("Findings", (self,))

    def to_github(self, file: str | None = None, lines: Sequence[int] = ()) -> str:
        """Workflow commands, which GitHub shows as annotations.

        Args:
            file: The rules' file, for the annotations to stand at.
            lines: Per rule the line of the file on which it begins, from 1 on. Default: not known.

        Raises:
            ValueError: There is no line for the rule of a finding.
        """
        check_file("file", file)
        numbers = as_tuple("lines", lines, "line numbers")
        first_lines = [integer(f"lines[{i}]", line, 1) for i, line in enumerate(numbers)]
        return github_commands(self, file, first_lines)


def github_commands(
    findings: Findings, file: str | None, lines: Sequence[int], title: str = "shardrules"
) -> str:
    """Return the text of `Findings.to_github`, with this title before the kind of each."""
    commands = []
    for finding in findings:
        rule = finding.rule if lines else None
        if rule is not None and rule >= len(lines):
            raise ValueError(
                f"lines: there are {len(lines)}, and a finding is about rule {rule}; give one for "
                "each rule"
            )
        line = None if rule is None or not file else str(lines[rule])
        properties = {"file": file, "line": line, "title": f"{title} {finding.kind}"}
        fields = [f"{name}={_percent_escaped(t, ':,')}" for name, t in properties.items() if t]
        text = printable_lines([finding.message, *finding.paths[:_MOST_PATHS], finding.fix])
        annotation = printable(f"{','.join(fields)}::{_percent_escaped(text)}")
        commands.append(f"::{_GITHUB_COMMANDS[finding.level]} {annotation}")
    return "\n".join(commands)


def _percent_escaped(text: str, reserved: str = "") -> str:
    # As GitHub's toolkit escapes data, and properties with what is `reserved` there.
    return "".join(f"%{ord(c):02X}" if c in f"%\r\n{reserved}" else c for c in text)


def at_stake(count: int) -> str:
    """Bytes per device, for a message."""
    return f"{bytes_shown(count)} on each device"
