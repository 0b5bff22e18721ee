"""Writes rules for a model that has none: `suggest`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.arguments import as_tuple, check_type, integer, strings
from shardrules._base.mistakes import in_order
from shardrules._base.rule_specs import plain_spec
from shardrules._base.specs import Entries, entry_axes
from shardrules._base.text import brief, bytes_shown, mesh_shown
from shardrules._plan.findings import Declared
from shardrules._plan.kinds import axes_named
from shardrules._plan.memory import hbm_bytes
from shardrules._plan.path_words import AxisUse, projections, uses_of
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._plan.suggest.draft import Draft, draft
from shardrules._plan.suggest.patterns import TIGHTEST, Unit, units_of
from shardrules._plan.suggest.suggestion import CutReason, Reason, Suggestion
from shardrules._rules.dialects import EFORMER, NNX, Dialect, LogicalDialect
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._place.mesh import MeshLike

_AXES: Final = ("fsdp", "tp")
_ADAM: Final = ("float32", "float32")
_NO_TABLES: Final = (
    "suggest writes rules of paths. For logical axis names, libraries ship a table, such as "
    "MaxText's base.yml, which shardrules.read_rules reads"
)


@in_order("tree", "mesh")
def suggest(
    model: Any,
    mesh: MeshLike | None = None,
    *,
    devices: int | None = None,
    axes: Iterable[str] | None = None,
    hbm: float | str | None = None,
    optimizer: Iterable[Any] | None = _ADAM,
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
        hbm: Bytes of memory of a device, into which parameters, gradients and optimizer must fit.
            Default: any.
        optimizer: The dtypes of the optimizer's moments. Default: Adam's two of float32.
        head_dim: Size of an attention head; heads are not split. Default: that of a `q_norm` or
            `k_norm` beside the projections, or of a dimension of its own; for keys and values of
            fewer heads than queries, 128, or 64 if the model is narrower than 2,048.
        dialect: The dialect of the rules. Default: that of the Plan; `NNX` for states of flax nnx,
            whose paths all end in `value`, or else `EFORMER`.

    Raises:
        ValueError: There is neither a mesh nor `devices`, both are given, the memory does not
            suffice, the paths have too many names, or the dialect cannot tell them apart.
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
    moments = (
        None
        if optimizer is None
        else as_tuple("optimizer", optimizer, "dtypes such as ('float32', 'float32')")
    )
    if axes is not None and devices is None:
        raise ValueError("axes are for devices, of which a mesh is chosen: give devices as well")
    is_free = dialect is None and not isinstance(model, Plan)
    dialect = _dialect_for(model, dialect)
    bare = _bare_plan(model, mesh, devices, dialect)
    if is_free and len(bare) and all(path.endswith("/value") for path in bare.paths):
        dialect = NNX
        bare = _bare_plan(model, mesh, devices, dialect)
    heads = {
        row: projection.head
        for projection in projections(bare, size)
        if projection.head is not None
        for row in projection.folded.rows.tolist()
    }
    units = units_of(bare, heads)
    if devices is not None:
        over = _default_axes(units) if axes is None else strings("axes", axes)
        # Rules that use all axes, whatever their sizes will be.
        on_any = bare.with_rules(Rules((), dialect)).on_mesh(dict.fromkeys(over, 2))
        on_any = bare.with_rules(draft(on_any, units).rules)
        best, *_ = on_any.sweep(
            devices=devices, axes=over, hbm=hbm, gradients=True, optimizer=moments
        )
        bare = bare.on_mesh(best.mesh)
    uses = uses_of(bare.axis_sizes)
    rules, result = _decided_rows(model, bare.with_rules(Rules((), dialect)), units)
    data_axes = tuple(axis for axis, use in uses.items() if use == "data")
    spared = _spared(result, units, uses)
    declared = Declared(replicated=spared, data_axes=data_axes)
    _check_room(result, hbm_bytes(hbm), moments)
    return Suggestion(result._declaring(declared), tuple(_rule_reasons(rules)), declared)


def _dialect_for(model: Any, dialect: Any) -> Dialect:
    """Return the dialect of the rules: that which is given, or the plan's."""
    planned = model.rules.dialect if isinstance(model, Plan) else None
    if isinstance(dialect, LogicalDialect):
        raise TypeError(f"dialect: {dialect.name} is for logical axis names, and {_NO_TABLES}")
    if isinstance(planned, LogicalDialect):
        raise TypeError(
            f"model: the plan has rules for logical axis names, and {_NO_TABLES}; for rules of "
            "paths give the tree itself"
        )
    check_type("dialect", dialect, Dialect | None, "a Dialect, such as shardrules.dialects.EASYLM")
    return dialect or planned or EFORMER


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


def _decided_rows(model: Any, current: Plan, units: list[Unit]) -> tuple[Draft, Plan]:
    """Write rules, and plan the leaves under them so that each is decided by its own."""
    for tightness in (0, TIGHTEST):
        written = draft(current, units, tightness)
        # The tree itself decides: paths as texts may hide where a key ends.
        is_plan, rules = isinstance(model, Plan), written.rules
        result = current.with_rules(rules) if is_plan else plan(model, rules, current.mesh)
        strays = written.strays(result.rule)
        if not strays:
            return written, result
    raise ValueError(
        f"{brief(result.paths[strays[0]])}: no pattern of the dialect {rules.dialect.name} tells "
        "it from other paths: rename it, or choose another dialect"
    )


def _default_axes(units: Iterable[Unit]) -> tuple[str, ...]:
    has_experts = any("experts" in unit.dims.sides for unit in units)
    return (*_AXES, "ep") if has_experts else _AXES


def _check_room(result: Plan, hbm: int | None, moments: tuple[Any, ...] | None) -> None:
    """Check that parameters, gradients and the optimizer's moments fit."""
    has_state = len(result._leaves.rows_by_role.optimizer)
    needed = result.bytes_per_device(gradients=True, optimizer=None if has_state else moments)
    if hbm is not None and needed.max > hbm:
        raise ValueError(
            f"hbm: on {mesh_shown(result.axis_sizes)} there is no room: a device needs {needed}, "
            f"and has {bytes_shown(hbm)}: give more devices, or fewer moments in optimizer"
        )


def _spared(result: Plan, units: list[Unit], uses: Mapping[str, AxisUse]) -> tuple[str, ...]:
    """List patterns of the paths that tensor axes are kept from, such as those of routers.

    A leaf is not among them if there are other axes for weights, and these do not shard it, either.
    """
    several = {axis: use for axis, use in uses.items() if result.axis_sizes[axis] > 1}
    others = {"fsdp", "experts"}.intersection(several.values())
    patterns = []
    for unit in units if "tensor" in several.values() else ():
        spec = result.kinds[int(result.kind_of[unit.folded.rows[0]])].spec
        used = {several[axis] for axis in axes_named(spec) if axis in several}
        if unit.dims.tensor != "any" and "tensor" not in used and (used or not others):
            patterns.append(r"\d+".join(map(re.escape, unit.folded.parts[::2])))
    return tuple(dict.fromkeys(patterns))


def _rule_reasons(rules: Draft) -> Iterator[Reason]:
    """Yield the reason of each rule: the roles in the first of its leaves."""
    for number, ((pattern, value), units) in enumerate(zip(rules.rules, rules.units, strict=True)):
        spec, first = plain_spec(value), units[0]
        axes = [entry_axes(entry) for entry in spec] if isinstance(spec, Entries) else []
        axes += [()] * (len(first.shape) - len(axes))
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
