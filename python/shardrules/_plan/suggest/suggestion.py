"""Holds the results of `suggest`: rules, the plan under them, and the reason of each rule."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

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
from shardrules._plan.findings import Declared, Findings
from shardrules._plan.suggest.texts import python_text, toml_text
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
        return Section("Suggested rules", (self, self._text))

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
        return toml_text(self.rules, self.declared, self._heading, self._notes)

    def to_python(self) -> str:
        """Write the rules as Python code.

        Raises:
            ValueError: A rule of `like` has more than a pattern, a spec and units.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
            >>> print(sr.suggest(tree, {"fsdp": 2, "tp": 4}).to_python())
            # 1 rule for 1 leaf on fsdp=2,tp=4: 8.19 kB on the fullest device
            from jax.sharding import PartitionSpec as P
            <BLANKLINE>
            rules = [
                # residual 64 by fsdp, hidden 256 by tp
                (r"up/kernel", P("fsdp", "tp")),
            ]
            <BLANKLINE>
        """
        return python_text(self.rules, self._heading, self._notes)

    @property
    def _text(self) -> str:
        """Rules to copy: a file, or code where files cannot say them, or else their list."""
        for write in (self.to_toml, self.to_python):
            with suppress(ValueError):
                return write()
        return str(self.rules)

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
