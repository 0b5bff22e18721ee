"""`Suggestion`: rules, the plan under them, the reason of each rule, and their text.

Patterns have names in them that come from files, so what a terminal or a parser would act upon is
escaped.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import Fsdp, RuleSpec, plain_spec
from shardrules._base.specs import spec_shown
from shardrules._base.text import (
    and_more,
    answer,
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    record,
)
from shardrules._plan.answers import Section
from shardrules._plan.check_context import CheckContext
from shardrules._plan.codec import DIALECTS, rule_data, short
from shardrules._plan.findings import NOTHING, Declared, Findings
from shardrules._plan.kinds import DEFAULT_LARGE
from shardrules._rules.patterns import pattern_shown
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._plan.report import Page
    from shardrules._rules.patterns import Pattern

_MOST_SHOWN: Final = 3
_OTHER_MESH: Final = "give a mesh of which an axis divides a dimension of them"


@record
class CutReason(NamedTuple):
    """Mesh axes that shard a dimension, and the role by which they were chosen."""

    dim: int
    size: int
    """Size in the first of the leaves."""
    role: str
    """Role of the dimension: "layers", "experts", "vocabulary", "residual", "hidden", "heads",
    "head", "fused", "window", "vector" or "other"."""
    axes: tuple[str, ...]
    """Mesh axes that shard it."""

    def __str__(self) -> str:
        cut = f" by {'*'.join(self.axes)}" if self.axes else ""
        return f"{self.role} {self.size}{cut}"


@record
class Reason(NamedTuple):
    """Leaves of a suggested rule, and the roles of their dimensions."""

    rule: int
    pattern: Pattern
    """Pattern of the rule."""
    leaves: int
    bytes: int
    """Bytes of its leaves, unsharded."""
    paths: tuple[str, ...]
    """Folded paths of its leaves."""
    dims: tuple[CutReason, ...]
    """Dimensions of the first leaf."""
    is_understood: bool
    """True if shapes and names tell the roles of all dimensions."""
    assumed_head: int | None = None
    """Size of a head that nothing tells, and that is assumed; None if none is."""

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims)) or "no dimension"
        doubt = "" if self.is_understood else "; not understood: cut where that is safe"
        if self.assumed_head:
            doubt += f"; heads of {self.assumed_head} are assumed: give head_dim"
        return printable(
            f"rule {self.rule} {pattern_shown(self.pattern)}: {counted(self.leaves, 'leaf')} of "
            f"{bytes_shown(self.bytes)}: {dims}{doubt}"
        )


@answer
@dataclass(frozen=True, eq=False)
class Suggestion:
    """Rules for a model on a mesh; from `shardrules.suggest`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
        >>> print(sr.suggest(tree, {"fsdp": 2, "tp": 4}))
        1 rule for 1 leaf on fsdp=2,tp=4: 8.19 kB on the fullest device
        rule 0 up/kernel: 1 leaf of 65.5 kB: residual 64 by fsdp, hidden 256 by tp
        >>> sr.suggest(tree, {"dp": 4, "fsdp": 2}).declared["data_axes"]
        ('dp',)
    """

    plan: Plan
    """Plan of the model under the rules."""
    reasons: tuple[Reason, ...]
    """Leaves of each rule, and the roles of their dimensions."""
    declared: Declared
    """Declarations for `Plan.check`: leaves that are replicated, and axes for data only.

    Replicated on purpose are, over tensor axes, routers, keys and values of fewer heads than
    devices, and projections to a latent space. The plan knows it."""

    @property
    def rules(self) -> Rules:
        """Suggested rules."""
        rules = self.plan.rules
        assert isinstance(rules, Rules)
        return rules

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes of the mesh that was given or chosen."""
        return self.plan.axis_sizes

    @property
    def unknown(self) -> tuple[str, ...]:
        """Folded paths of leaves whose dimensions have no clear roles."""
        return tuple(
            path for reason in self.reasons if not reason.is_understood for path in reason.paths
        )

    @cached_property
    def warnings(self) -> Findings:
        """Warnings of `check` about these rules, such as kernels that no mesh axis divides."""
        findings = self.plan.check().at_least("warning")
        return Findings(
            finding._replace(fix=_OTHER_MESH) if finding.kind == "replicated" else finding
            for finding in findings
        )

    def _section(self, page: Page) -> Section:
        """Return the rules, with the reasons for them."""
        mine, other = page.plan, self.plan
        if (len(other), other.total_bytes) != (len(mine), mine.total_bytes):
            raise ValueError(
                f"suggestion: it is for other leaves (number {len(other):,}, bytes "
                f"{other.total_bytes:,}) than the plan (number {len(mine):,}, bytes "
                f"{mine.total_bytes:,}): suggest for the same model"
            )
        try:
            text = self.to_toml()
        except ValueError:  # of a dialect of one's own
            text = self.to_python()
        return Section("Suggested rules", (self, text))

    def to_toml(self) -> str:
        """Write a rule file, for `shardrules check --rules` and `read_rules`.

        Raises:
            ValueError: The dialect is one of your own, which files cannot name.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
            >>> print(sr.suggest(tree, {"fsdp": 2, "tp": 4}).to_toml())
            # 1 rule for 1 leaf on fsdp=2,tp=4: 8.19 kB on the fullest device
            dialect = "eformer"
            <BLANKLINE>
            # residual 64 by fsdp, hidden 256 by tp
            [[rules]]
            pattern = 'up/kernel'
            spec = ["fsdp", "tp"]
            <BLANKLINE>
        """
        return _toml_text(self.rules, self.declared, self._heading, self._notes)

    def to_python(self) -> str:
        """Write the rules as Python code.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
            >>> print(sr.suggest(tree, {"fsdp": 2, "tp": 4}).to_python())
            # 1 rule for 1 leaf on fsdp=2,tp=4: 8.19 kB on the fullest device
            import shardrules as sr
            from jax.sharding import PartitionSpec as P
            <BLANKLINE>
            rules = [
                # residual 64 by fsdp, hidden 256 by tp
                (r'up/kernel', P('fsdp', 'tp')),
            ]
            <BLANKLINE>
        """
        return _python_text(self.rules, self._heading, self._notes)

    @property
    def _heading(self) -> str:
        most = self.plan.bytes_per_device().max
        return printable(
            f"{counted(len(self.rules), 'rule')} for {counted(len(self.plan), 'leaf')} on "
            f"{mesh_shown(self.mesh)}: {bytes_shown(most)} on the fullest device"
        )

    @property
    def _notes(self) -> list[str]:
        """Comments above the rules."""
        notes = []
        for reason in self.reasons:
            text = ", ".join(map(str, reason.dims))
            if not reason.is_understood:
                paths = ", ".join(reason.paths[:_MOST_SHOWN])
                count = "".join(and_more(len(reason.paths), _MOST_SHOWN, "pattern"))
                text = f"not understood: {paths} {count}".rstrip()
            notes.append(printable(text))
        return notes

    def __str__(self) -> str:
        return "\n".join([self._heading, *map(str, self.reasons), *map(str, self.warnings)])


def _toml_text(rules: Rules, declared: Declared, heading: str, notes: Sequence[str]) -> str:
    """Write a rule file, as `Suggestion.to_toml` documents."""
    dialect = rules.dialect
    if DIALECTS.get(dialect.name.lower()) != dialect:
        raise ValueError(
            f"to_toml: the dialect {dialect.name} is one of your own, which a rule file cannot "
            "name; use to_python"
        )
    lines = [f"# {heading}", f"dialect = {_toml(dialect.name)}"]
    lines += [f"{name} = {_toml_value(values)}" for name, values in declared.items() if values]
    if not len(rules):
        lines.append("rules = []")
    for (pattern, value), note in zip(rules, notes, strict=True):
        lines += ["", *_toml_rule(pattern, value, note)]
    return "\n".join(lines) + "\n"


def _toml_rule(pattern: Pattern, value: Any, note: str) -> list[str]:
    """Write the lines of a rule, with a note above it."""
    data = rule_data(pattern, value)
    if "units" in data:
        data["units"] = [unit or 1 for unit in data["units"]]  # TOML has no null
    pairs = [f"{key} = {_toml_value(value)}" for key, value in data.items()]
    return [f"# {note}", "[[rules]]", *pairs]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _toml(value) if isinstance(value, str) else str(value).lower()


def _toml(text: str) -> str:
    """Write a TOML string: literally, if it can stand between apostrophes."""
    if text.isprintable() and printable(text) == text:
        if "\\" not in text and '"' not in text and text.replace("_", "").isalnum():
            return f'"{text}"'
        if "'" not in text:
            return f"'{text}'"
    return '"' + "".join(map(_toml_character, text)) + '"'


def _toml_character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    # A runner of a CI system would obey ##[name].
    if character.isprintable() and character != "#":
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _python_text(rules: Rules, heading: str, notes: Sequence[str]) -> str:
    """Write Python code, as `Suggestion.to_python` documents."""
    lines = [f"# {heading}", "import shardrules as sr"]
    lines += ["from jax.sharding import PartitionSpec as P", "", "rules = ["]
    for rule, note in zip(rules, notes, strict=True):
        lines += [f"    # {note}", f"    {_python_rule(*rule)},"]
    return "\n".join([*lines, "]"]) + "\n"


def _python_rule(pattern: Pattern, value: Any) -> str:
    """Write a rule as Python code."""
    spec = plain_spec(value)
    text = f"sr.{spec!r}" if isinstance(spec, Fsdp) else spec_shown(spec)
    if isinstance(value, RuleSpec) and value.units:
        text = f"sr.RuleSpec({text}, units={value.units!r})"
    return printable(f"({_python(str(pattern))}, {text})")


def _python(pattern: str) -> str:
    """Write a string as people write patterns, if that is the same."""
    raw = f"r'{pattern}'"
    with suppress(SyntaxError, ValueError):
        if ast.literal_eval(raw) == pattern and printable(raw) == raw:
            return raw
    return ascii(pattern).replace("#", "\\x23")


def missing_text(source: str, plan: Plan, suggestion: Suggestion) -> str:
    """Write the rules, of those suggested for a plan, for leaves that have none of its own.

    "" if there are none. They are to stand before the catch-all that decides these leaves now;
    `source` has the plan's rules.
    """
    catch_alls = sorted(CheckContext(plan, DEFAULT_LARGE, NOTHING).silent_catch_alls)
    bare = np.isin(plan.rule, catch_alls) | (plan.rule < 0)
    added = [rule for rule in np.unique(suggestion.plan.rule[bare]).tolist() if rule >= 0]
    where = f"before rule {catch_alls[0]}" if catch_alls else "at the end of the list"
    lines = [printable(f"# {source}: {counted(len(added), 'rule')} to paste {where}:")]
    suffix = Path(source).suffix
    for (pattern, value), note in ((suggestion.rules[n], suggestion._notes[n]) for n in added):
        if suffix == ".toml":
            lines += [*_toml_rule(pattern, value, note), ""]
        elif suffix in (".json", ".gz"):
            lines.append(json.dumps(short(rule_data(pattern, value))).replace("#", "\\u0023") + ",")
        else:
            lines += [f"# {note}", f"{_python_rule(pattern, value)},"]
    return "\n".join([*lines, ""]) if added else ""
