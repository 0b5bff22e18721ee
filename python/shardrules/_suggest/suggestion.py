"""Holds the results of `suggest`: rules, the plan under them, and the reason of each rule."""

from __future__ import annotations

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
from shardrules._plan.findings import Declared, Findings
from shardrules._rules.patterns import pattern_shown
from shardrules._writer.texts import python_text, toml_text

if TYPE_CHECKING:
    from shardrules._place.decider import RulesLike
    from shardrules._plan.diff import PlanDiff
    from shardrules._plan.plan import Plan
    from shardrules._rules.logical_rules import LogicalRules
    from shardrules._rules.patterns import Pattern
    from shardrules._rules.rules import Rules

_MOST_SHOWN: Final = 3
_OF_STEPS: Final = ("how activations are sharded", "what each choice costs in time and memory")
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
    """Pattern of paths, or a logical axis name."""
    leaves: int
    bytes: int
    """Bytes of its leaves, unsharded."""
    paths: tuple[str, ...]
    """Folded paths of its leaves."""
    dims: tuple[CutReason, ...]
    """Dimensions of the first leaf; for a name, one for each size and role that it has."""
    is_understood: bool
    """True if shapes and names tell the roles of all dimensions."""

    def __str__(self) -> str:
        dims = ", ".join(map(str, self.dims)) or "no dimension"
        doubt = "" if self.is_understood else "; not understood: cut where that is safe"
        return printable(
            f"rule {self.rule} {pattern_shown(self.pattern)}: {counted(self.leaves, 'leaf')} of "
            f"{bytes_shown(self.bytes)}: {dims}{doubt}"
        )


@answer
class Comparison(NamedTuple):
    """Difference of suggested rules from others for the same leaves and mesh; `str` words it."""

    diff: PlanDiff
    """Changes from the other rules to the suggested ones."""
    rules: tuple[int, int]
    """Numbers of other rules and of suggested ones."""
    sent: tuple[int, int] | None
    """Bytes that each device sends in a training step, under both; None without tokens."""

    def __str__(self) -> str:
        before, after = self.rules
        lines = [str(self.diff), f"{counted(before, 'rule')} -> {counted(after, 'rule')}"]
        if self.sent is not None:
            sent = " -> ".join(map(bytes_shown, self.sent))
            lines.append(f"{sent} sent by each device in a step")
        return "\n".join(lines)


@answer
class Suggestion:
    """Rules for a model on a mesh; from `shardrules.suggest`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
        >>> print(sr.suggest(tree, {"fsdp": 2, "tp": 4}))
        1 rule for 1 leaf on fsdp=2,tp=4: 8.19 kB on the fullest device
        rule 0 up/kernel: 1 leaf of 65.5 kB: residual 64 by fsdp, hidden 256 by tp
    """

    def __init__(
        self,
        _plan: Plan,
        _reasons: tuple[Reason, ...],
        _declared: Declared,
        _tokens: int | None = None,
        _experts_per_token: int | None = None,
        _doubts: tuple[str, ...] | None = None,
    ) -> None:
        self._plan = _plan
        self._reasons = _reasons
        self._declared = _declared
        self._tokens = _tokens
        self._experts_per_token = _experts_per_token
        self._doubts = _doubts

    @property
    def rules(self) -> Rules | LogicalRules:
        """Suggested rules; for arrays with logical axis names, a table of these."""
        return self._plan.rules

    @property
    def plan(self) -> Plan:
        """Plan of the model under the rules."""
        return self._plan

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes of the mesh that was given or chosen."""
        return self._plan.axis_sizes

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Leaves of each rule, and the roles of their dimensions."""
        return self._reasons

    @property
    def unknown(self) -> tuple[str, ...]:
        """Folded paths of leaves whose dimensions have no clear roles."""
        return tuple(
            path for reason in self._reasons if not reason.is_understood for path in reason.paths
        )

    @property
    def untold(self) -> tuple[str, ...]:
        """What `suggest(..., step=)` would know, and shapes and paths do not tell.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
            >>> sr.suggest(tree, {"fsdp": 2, "tp": 4}).untold
            ('how activations are sharded', 'what each choice costs in time and memory')
        """
        return () if self._doubts is None else (*self._doubts, *_OF_STEPS)

    @cached_property
    def warnings(self) -> Findings:
        """Warnings of `check` about these rules, such as kernels that no axis of the mesh divides.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((4096, 8192), "float32")}}
            >>> [one.kind for one in sr.suggest(tree, {"fsdp": 3}).warnings]
            ['replicated']
            >>> len(sr.suggest(tree, {"fsdp": 4}).warnings)
            0
        """
        findings = self._plan.check().at_least("warning")
        return Findings(
            finding._replace(fix=_OTHER_MESH) if finding.kind == "replicated" else finding
            for finding in findings
        )

    @property
    def declared(self) -> Declared:
        """Declarations for `Plan.check`: leaves that are replicated, and axes for data only.

        Replicated on purpose are norms, biases and scalars; and over tensor axes routers, keys and
        values of fewer heads than devices, and projections to a latent space. The plan knows it.

        Example:
            >>> import jax, shardrules as sr
            >>> def leaf(*shape):
            ...     return jax.ShapeDtypeStruct(shape, "float32")
            >>> tree = {"up": {"kernel": leaf(64, 256)}, "norm": {"scale": leaf(64)}}
            >>> suggestion = sr.suggest(tree, {"dp": 4, "fsdp": 2})
            >>> suggestion.declared["replicated"], suggestion.declared["data_axes"]
            (('scale',), ('dp',))
            >>> suggestion.plan.check().summary
            '0 errors, 0 warnings, 0 info'
        """
        return self._declared

    def compare(self, rules: RulesLike) -> Comparison:
        """Compare the suggested rules with others: the leaves that differ, bytes and traffic.

        Args:
            rules: Rules such as those that the model has: `LogicalRules` if these are.

        Raises:
            ValueError: The rules' dialect has other paths; or tokens were given to `suggest`, and
                not how many of the model's experts they meet.
            TypeError: Of both rules, one is for logical axis names.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((64, 256), "float32")}}
            >>> print(sr.suggest(tree, {"tp": 4}).compare([("kernel", ()), ("bias", ())]))
            rules: 1 added (0), 2 removed (0, 1)
            ~ up/kernel  P() -> P(None, 'tp')  (-49.2 kB on each device)
            1 leaf changed; 65.5 kB -> 16.4 kB on the fullest device
            2 rules -> 1 rule
        """
        current, sent = self._plan.with_rules(rules), None
        if self._tokens is not None:
            before, after = (
                plan.traffic(tokens=self._tokens, experts_per_token=self._experts_per_token).sent
                for plan in (current, self._plan)
            )
            sent = (before, after)
        return Comparison(current.diff(self._plan), (len(current.rules), len(self.rules)), sent)

    def to_toml(self) -> str:
        """Write a rule file, for `shardrules check --rules` and `read_rules`.

        Raises:
            ValueError: The dialect is one of your own, which files cannot name; or a rule of `like`
                has more than a pattern, a spec and units.

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
        return toml_text(self.rules, self._declared, self._heading, self._notes)

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
    def _heading(self) -> str:
        most = self._plan.bytes_per_device().max
        return printable(
            f"{counted(len(self.rules), 'rule')} for {counted(len(self._plan), 'leaf')} on "
            f"{mesh_shown(self.mesh)}: {bytes_shown(most)} on the fullest device"
        )

    @property
    def _notes(self) -> list[str]:
        """Comments above the rules."""
        notes = []
        for reason in self._reasons:
            text = ", ".join(map(str, reason.dims))
            if not reason.is_understood:
                paths = ", ".join(reason.paths[:_MOST_SHOWN])
                count = "".join(and_more(len(reason.paths), _MOST_SHOWN, "pattern"))
                text = f"not understood: {paths} {count}".rstrip()
            notes.append(printable(text))
        return notes

    def __str__(self) -> str:
        lines = [self._heading, *map(str, self._reasons), *map(str, self.warnings)]
        if self._doubts:
            lines.append(printable(f"step= would tell {'; '.join(self._doubts)}"))
        return "\n".join(lines)
