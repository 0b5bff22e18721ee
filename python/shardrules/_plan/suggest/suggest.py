"""Writes rules for a model that has none: `suggest`; `Suggestion`, its answer.

Patterns have names in them that come from files, so what a terminal or a parser would act upon is
escaped.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import check_type, integer, strings
from shardrules._base.mistakes import in_order
from shardrules._base.rule_specs import plain_spec
from shardrules._base.specs import Entries, entry_axes, spec_shown
from shardrules._base.text import (
    and_more,
    answer,
    brief,
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
from shardrules._plan.kinds import DEFAULT_LARGE, axes_named
from shardrules._plan.path_words import AxisUse, uses_of
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._plan.suggest.draft import Draft, draft
from shardrules._plan.suggest.patterns import Unit, units_of
from shardrules._rules.dialects import EFORMER, NNX, Dialect, LogicalDialect
from shardrules._rules.patterns import pattern_shown
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._place.mesh import MeshLike
    from shardrules._plan.report import Page
    from shardrules._rules.patterns import Pattern

_AXES: Final = ("fsdp", "tp")
_NO_TABLES: Final = (
    "suggest writes rules of paths: give the tree itself, and a dialect of paths. For logical axis "
    "names, libraries ship a table, such as MaxText's base.yml, which shardrules.read_rules reads"
)


@in_order("tree", "mesh")
def suggest(
    model: Any,
    mesh: MeshLike | None = None,
    *,
    devices: int | None = None,
    axes: Iterable[str] | None = None,
    head_dim: int | None = None,
    dialect: Dialect | None = None,
) -> Suggestion:
    r"""Write rules for a model: from its shapes and paths, in the words of its paths.

    Each leaf is decided by a rule that was written for it; no rule is a catch-all, none is dead.
    The role of each dimension follows from shapes: the residual width is the size that arrays
    inside and outside of the layers share; the other side of a kernel is sharded by tensor axes;
    names only break ties. Of the ways to lay the mesh axes along the dimensions that they divide,
    `suggest` takes those with the fewest bytes on a device, and among them the one that experts
    would choose: tensor axes shard hidden units, heads and the vocabulary, fsdp the residual side,
    expert axes stacks of experts. Biases and norms are replicated if that costs hardly anything;
    `Suggestion.warnings` lists kernels that no axis divides. Axes are used by their names: data, dp
    and sp shard no leaf.

    Args:
        model: Any pytree of arrays or abstract arrays, such as `read_model` gives; or a Plan, of
            whose rules only the dialect counts. Logical axis names are not looked at.
        mesh: A Mesh, AbstractMesh or dict of axis sizes. Default: that of the Plan or the context,
            or the first of a `Plan.sweep` over those of `devices`.
        devices: How many devices the mesh is to have, if none is given.
        axes: The axes of that mesh, the slowest first. Default: fsdp and tp, and ep if there are
            stacks of experts.
        head_dim: Size of an attention head; heads are not split. Default: that of a `q_norm` or
            `k_norm` beside the projections, or of a dimension of its own; for keys and values of
            fewer heads than queries, 128, or 64 if the model is narrower than 2,048.
        dialect: The dialect of the rules. Default: that of the Plan; `NNX` for states of flax nnx,
            whose paths all end in `value`, or else `EFORMER`.

    Raises:
        ValueError: There is neither a mesh nor `devices`, both are given, the paths have too many
            names, or the dialect cannot tell them apart.
        TypeError: The model is not a tree of arrays; or the plan, or dialect, is of logical names.

    Example:
        >>> import jax, shardrules as sr
        >>> def kernel(*shape):
        ...     return {"kernel": jax.ShapeDtypeStruct(shape, "bfloat16")}
        >>> mlp = {"gate": kernel(64, 256), "up": kernel(64, 256), "down": kernel(256, 64)}
        >>> suggestion = sr.suggest({"layers": [{"mlp": mlp}] * 4}, {"fsdp": 2, "tp": 4})
        >>> for pattern, spec in suggestion.rules:
        ...     print(pattern, tuple(spec))
        mlp/(gate|up)/kernel ('fsdp', 'tp')
        mlp/down/kernel ('tp', 'fsdp')
    """
    size = None if head_dim is None else integer("head_dim", head_dim, least=1)
    if axes is not None and devices is None:
        raise ValueError("axes are for devices, of which a mesh is chosen: give devices as well")
    is_free = dialect is None and not isinstance(model, Plan)
    dialect = _dialect_for(model, dialect)
    bare = _bare_plan(model, mesh, devices, dialect)
    if is_free and len(bare) and all(path.endswith("/value") for path in bare.paths):
        dialect = NNX
        bare = _bare_plan(model, mesh, devices, dialect)
    units = units_of(bare, size)
    if devices is not None:
        has_experts = any("experts" in unit.dims.sides for unit in units)
        default = (*_AXES, "ep") if has_experts else _AXES
        over = default if axes is None else strings("axes", axes)
        # Rules that use all axes, whatever their sizes will be.
        on_any = bare.with_rules(Rules((), dialect)).on_mesh(dict.fromkeys(over, 2))
        on_any = on_any.with_rules(draft(on_any, units).rules)
        best, *_ = on_any.sweep(devices=devices, axes=over)
        bare = bare.on_mesh(best.mesh)
    uses = uses_of(bare.axis_sizes)
    rules, result = _with_draft(model, bare.with_rules(Rules((), dialect)), units)
    data_axes = tuple(axis for axis, use in uses.items() if use == "data")
    spared = _spared(result, units, uses)
    declared = Declared(replicated=spared, data_axes=data_axes)
    return Suggestion(result._declaring(declared), tuple(rule_reasons(rules)), declared)


def _dialect_for(model: Any, dialect: Any) -> Dialect:
    """Return the dialect of the rules: that which is given, or the plan's."""
    default = model.rules.dialect if isinstance(model, Plan) else EFORMER
    if isinstance(default, LogicalDialect) or isinstance(dialect, LogicalDialect):
        raise TypeError(_NO_TABLES)
    check_type("dialect", dialect, Dialect | None, "a Dialect, such as shardrules.dialects.EASYLM")
    return dialect or default


def _bare_plan(
    model: Any,
    mesh: MeshLike | None,
    devices: int | None,
    dialect: Dialect,
) -> Plan:
    """Plan the model without rules, on the mesh; or on any, if one is to be chosen."""
    if mesh is not None and devices is not None:
        raise ValueError("give mesh or devices, not both: a mesh has its own number of devices")
    # Skip only leaves that need no rule in any dialect.
    none = Rules((), replace(dialect, unmatched="error"))
    on = mesh if devices is None else {_AXES[0]: integer("devices", devices, 1)}
    if not isinstance(model, Plan):
        return plan(model, none, on)
    bare = model.with_rules(none)
    return bare if on is None else bare.on_mesh(on)


def _with_draft(model: Any, bare: Plan, units: list[Unit]) -> tuple[Draft, Plan]:
    """Write rules, and plan the leaves under them: each is decided by the rule meant for it."""
    rules = draft(bare, units)
    # The tree itself decides: paths as texts may hide where a key ends.
    is_plan = isinstance(model, Plan)
    result = bare.with_rules(rules.rules) if is_plan else plan(model, rules.rules, bare.mesh)
    if strays := rules.strays(result.rule):
        raise ValueError(
            f"{brief(result.paths[strays[0]])}: no pattern of the dialect "
            f"{rules.rules.dialect.name} tells it from other paths: rename it, or choose another "
            "dialect"
        )
    return rules, result


def _spared(result: Plan, units: list[Unit], uses: Mapping[str, AxisUse]) -> tuple[str, ...]:
    """List patterns of the paths that tensor axes are kept from, such as those of routers.

    A leaf is not among them if there are other axes for weights, and these do not shard it, either.
    """
    use_of_axis = {axis: use for axis, use in uses.items() if result.axis_sizes[axis] > 1}
    other_uses = {"fsdp", "experts"}.intersection(use_of_axis.values())
    patterns = []
    for unit in units if "tensor" in use_of_axis.values() else ():
        spec = result.kinds[int(result.kind_of[unit.folded.rows[0]])].spec
        uses_of_cut = {use_of_axis[axis] for axis in axes_named(spec) if axis in use_of_axis}
        if (
            unit.dims.tensor != "any"
            and "tensor" not in uses_of_cut
            and (uses_of_cut or not other_uses)
        ):
            patterns.append(r"\d+".join(map(re.escape, unit.folded.parts[::2])))
    return tuple(dict.fromkeys(patterns))


def rule_reasons(rules: Draft) -> Iterator[Reason]:
    """Yield the reason of each rule: the roles in the first of its leaves."""
    for number, ((pattern, value), units) in enumerate(zip(rules.rules, rules.units, strict=True)):
        first, spec = units[0], plain_spec(value)
        assert isinstance(spec, Entries)  # as it was written
        axes = [*map(entry_axes, spec), *[()] * (len(first.shape) - len(spec))]
        sides = zip(first.shape, first.dims.sides, axes, strict=True)
        yield Reason(
            number,
            pattern,
            leaves=sum(unit.leaves for unit in units),
            bytes=sum(unit.bytes for unit in units),
            paths=tuple(unit.folded.pattern for unit in units),
            dims=tuple(CutReason(dim, *cut) for dim, cut in enumerate(sides)),
            is_understood=all(unit.dims.is_known for unit in units),
            assumed_head=next((unit.dims.unit for unit in units if unit.dims.is_assumed), None),
        )


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


_MOST_SHOWN: Final = 3


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

    @cached_property
    def warnings(self) -> Findings:
        """Warnings of `check` about these rules, such as kernels that no mesh axis divides."""
        return self.plan.check().at_least("warning")

    def _section(self, page: Page) -> Section:
        """Return the rules, with the reasons for them."""
        mine, other = page.plan, self.plan
        if (len(other), other.total_bytes) != (len(mine), mine.total_bytes):
            raise ValueError(
                f"suggestion: it is for {counted(len(other), 'leaf')} of {other.total_bytes:,} "
                f"bytes, the plan for {len(mine):,} of {mine.total_bytes:,}: suggest for the same"
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
        dialect = self.rules.dialect
        if DIALECTS.get(dialect.name.lower()) != dialect:
            raise ValueError(
                f"to_toml: the dialect {dialect.name} is one of your own, which a rule file cannot "
                "name; use to_python"
            )
        declared = [(name, values) for name, values in self.declared.items() if values]
        lines = [f"# {self._heading}", f"dialect = {_toml(dialect.name)}"]
        lines += [f"{name} = {_toml_value(values)}" for name, values in declared]
        for rule, note in zip(self.rules, self._notes, strict=True):
            lines += ["", *_toml_rule(*rule, note)]
        return "\n".join([*lines, *([] if len(self.rules) else ["rules = []"]), ""])

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
        lines = [f"# {self._heading}", "import shardrules as sr"]
        lines += ["from jax.sharding import PartitionSpec as P", "", "rules = ["]
        for rule, note in zip(self.rules, self._notes, strict=True):
            lines += [f"    # {note}", f"    {_python_rule(*rule)},"]
        return "\n".join([*lines, "]", ""])

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


def _toml_rule(pattern: Pattern, value: Any, note: str) -> list[str]:
    """Write the lines of a rule, with a note above it."""
    data = rule_data(pattern, value)
    pairs = [f"{key} = {_toml_value(value)}" for key, value in data.items()]
    return [f"# {note}", "[[rules]]", *pairs]


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml_value(item)}' for key, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return _toml(value) if isinstance(value, str) else str(value).lower()


def _toml(text: str) -> str:
    """Write a TOML string: literally, if backslashes or quotes would have to be escaped."""
    if printable(text) != text or "'" in text or text.replace("_", "").isalnum():
        escaped = text.replace("\\", r"\\").replace('"', r"\"")
        return f'"{printable(escaped)}"'
    return f"'{text}'"


def _python_rule(pattern: Pattern, value: Any) -> str:
    """Write a rule as Python code."""
    return printable(f"({_python(str(pattern))}, {spec_shown(plain_spec(value))})")


def _python(pattern: str) -> str:
    """Write a string as people write patterns, if that is the same."""
    raw = f"r'{pattern}'"
    with suppress(SyntaxError, ValueError):
        if ast.literal_eval(raw) == pattern and printable(raw) == raw:
            return raw
    return ascii(pattern).replace("#", "\\x23")


def missing_text(source: str, plan: Plan, suggestion: Suggestion, *, is_of_tables: bool) -> str:
    """Write the rules, of those suggested for a plan, for leaves that have none of its own.

    "" if there are none. They are to stand before the catch-all that decides these leaves now;
    `source` has the plan's rules, of which `is_of_tables` says whether they are TOML's `[[rules]]`.
    """
    catch_alls = sorted(CheckContext(plan, DEFAULT_LARGE, NOTHING).silent_catch_alls)
    bare = np.isin(plan.rule, catch_alls) | (plan.rule < 0)
    missing = [rule for rule in np.unique(suggestion.plan.rule[bare]).tolist() if rule >= 0]
    where = f"before rule {catch_alls[0]}" if catch_alls else "at the end of the list"
    lines = [printable(f"# {source}: {counted(len(missing), 'rule')} to paste {where}:")]
    for number in missing:
        rule, note = suggestion.rules[number], suggestion._notes[number]
        if is_of_tables:
            lines += [*_toml_rule(*rule, note), ""]
        elif Path(source).suffix in (".toml", ".json", ".gz"):
            lines.append(json.dumps(short(rule_data(*rule))).replace("#", "\\u0023") + ",")
        else:
            lines += [f"# {note}", f"{_python_rule(*rule)},"]
    return "\n".join([*lines, ""]) if missing else ""
