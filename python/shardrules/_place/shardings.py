"""NamedShardings from rules of paths and a mesh: one walk, one object per sharding.

Leaves without a sharding are listed in one form, here for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from shardrules._base.mistakes import check_arrays
from shardrules._base.rule_specs import (
    Correction,
    Fsdp,
    MemoryKind,
    RuleSpec,
    has_axes,
    memory_kind_of,
    plain_spec,
    rule_spec,
)
from shardrules._base.specs import (
    as_partition_spec,
    entries_of,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_entries,
    without_axes,
)
from shardrules._base.text import and_more, counted, mesh_shown, printable_lines, shown
from shardrules._core import ShardingTable
from shardrules._place.mesh import AnyMesh, axes_of_type, sharding_in_memory
from shardrules._place.spec_on_mesh import NO_OTHERS, LostAxes, SpecByShape, SpecOnMesh
from shardrules._rules.matcher import Matcher, tree_of_walk
from shardrules._rules.patterns import Pattern

if TYPE_CHECKING:
    from jax.sharding import NamedSharding, PartitionSpec

_MOST_LISTED: Final = 20
_FEW: Final = 10


class LeafError(NamedTuple):
    """Leaf, or several that are alike, without a sharding."""

    path: str
    shape: Sequence[int] | None
    decided_by: str
    """The rule, spec or names, as people write them."""
    reasons: list[str]
    """Message and fix, a line each."""
    leaves: int = 1


def leaf_errors(
    rows: Sequence[LeafError],
    axis_sizes: Mapping[str, int] | None,
    *,
    said_by: str = "rules",
    count: int | None = None,
) -> str:
    """Return a message: how many leaves; path, shape, what decides, why, the fix of the first.

    Args:
        rows: The leaves, or the first of them.
        axis_sizes: The mesh's; None if there are several meshes.
        said_by: What decides the leaves.
        count: How many leaves there are. Default: those of the rows.
    """
    rows_shown = rows[:_MOST_LISTED]
    total = sum(row.leaves for row in rows) if count is None else count
    mesh = "their meshes" if axis_sizes is None else f"the mesh {mesh_shown(axis_sizes)}"
    lines = [f"{counted(total, 'leaf')} cannot be sharded as the {said_by} say, on {mesh}:"]
    for path, shape, decided_by, reasons, _ in rows_shown:
        size = "" if shape is None else f"  shape {tuple(shape)}"
        lines.append(f"    {path or '(the tree)'}{size}  {decided_by}")
        lines += [f"        {reason}" for reason in reasons]
    count_shown = sum(row.leaves for row in rows_shown)
    lines += [f"    {line}" for line in and_more(total, count_shown, "leaf")]
    return printable_lines(lines)


def listing(heading: str, lines: Iterable[str], count: int, noun: str) -> str:
    """Return a message with the first lines of so many, one for each leaf or path."""
    rows = [*islice(lines, _FEW), *and_more(count, _FEW, noun)]
    return printable_lines([f"{heading}:", *(f"    {row}" for row in rows)])


class Shardings(NamedTuple):
    """Shardings of the leaves of a tree; None for leaves that stay unchanged."""

    tree: Callable[[], Any]
    """Returns the tree of the shardings."""
    leaves: Callable[[], list[tuple[Any, bool]]]
    """Returns each leaf's sharding, in JAX's order, and whether what decides the leaf says in which
    memory it is to be. The sharding alone does not tell: JAX has no NamedSharding of devices
    without a memory kind. Walking them takes longer than deciding, which few need."""


def shardings_by_rules(tree: Any, matcher: Matcher, mesh: AnyMesh) -> Shardings:
    """Return the shardings of the leaves of a tree by their rules on the mesh."""
    from jax import tree_util

    on_mesh = matcher.remembered(mesh, lambda: _bind(matcher, mesh))
    walk = matcher.decide(tree, on_mesh.table, on_mesh.replicated)
    if not walk.has_dimensions:
        check_arrays("tree", tree)
    decided = tree_of_walk(matcher, walk, functools.partial(_misfits_message, on_mesh))

    def leaves() -> list[tuple[Any, bool]]:
        with_memory = on_mesh.with_memory
        return [
            (sharding, id(sharding) in with_memory) for sharding in tree_util.tree_leaves(decided)
        ]

    return Shardings(lambda: decided, leaves)


@functools.lru_cache(maxsize=4096)
def sharding_or_reasons(
    spec: PartitionSpec | Fsdp,
    shape: tuple[int, ...],
    mesh: AnyMesh,
    correction: Correction,
    dtype: Any = None,
    *,
    optional_axes: frozenset[str] = frozenset(),
) -> NamedSharding | list[str]:
    """Return the NamedSharding of an array with this spec, or why the correction forbids it."""
    from jax.sharding import NamedSharding

    on_mesh = _spec_on_mesh(spec, mesh, correction, optional_axes)
    corrected = on_mesh.corrected_for(shape, dtype)
    return list(on_mesh.errors(shape)) if corrected is None else NamedSharding(mesh, corrected)


def corrected_sharding(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh, correction: Correction
) -> NamedSharding:
    """Return the NamedSharding of one array whose spec is known."""
    result = sharding_or_reasons(spec, shape, mesh, correction)
    if not isinstance(result, list):
        return result
    what = (
        f"an array of shape {shape} cannot be sharded as {spec_shown(spec)} on the mesh "
        f"{mesh_shown(mesh.shape)}:"
    )
    raise ValueError(printable_lines([what, *(f"  {reason}" for reason in result)]))


def correction_losses(
    spec: PartitionSpec, shape: tuple[int, ...], mesh: AnyMesh, correction: Correction
) -> list[LostAxes]:
    """Return the axes of its spec that an array of this shape loses."""
    on_mesh, _ = _spec_on_mesh(spec, mesh, correction).for_array(shape, None)
    return list(on_mesh.lost(len(shape), on_mesh.corrector.kept(shape)))


@functools.lru_cache(maxsize=1024)
def _spec_on_mesh(
    spec: PartitionSpec | Fsdp,
    mesh: AnyMesh,
    correction: Correction,
    optional_axes: frozenset[str] = frozenset(),
) -> SpecOnMesh | SpecByShape:
    manual = manual_axes(mesh)
    sizes = dict(mesh.shape)
    return bound_spec(RuleSpec(spec), sizes, correction, manual, optional_axes=optional_axes)


class ManualAxes(NamedTuple):
    """Manual axes of a mesh, over which a shard_map runs. Shapes inside it are local."""

    axes: frozenset[str] = frozenset()
    emptied: Any = None
    """The entry of a dimension that only manual axes cut. With axes of type Auto it is
    UNCONSTRAINED, because None would replicate the dimension over them. With Explicit axes it is
    None, because JAX allows nothing else."""


_NO_MANUAL_AXES: Final = ManualAxes()


def local_sizes(axis_sizes: Mapping[str, int], manual: ManualAxes) -> dict[str, int]:
    """Return devices along each mesh axis that shapes are not local to: 1 for manual axes."""
    return {axis: 1 if axis in manual.axes else size for axis, size in axis_sizes.items()}


def manual_axes(mesh: AnyMesh) -> ManualAxes:
    """Return the manual axes of the mesh of the traced code."""
    from jax.sharding import PartitionSpec

    has_auto = axes_of_type(mesh, "Auto")
    emptied = PartitionSpec.UNCONSTRAINED if has_auto else None
    return ManualAxes(axes_of_type(mesh, "Manual"), emptied)


def _inside_shard_map(
    spec: Any, correction: Correction, manual: ManualAxes
) -> tuple[Any, Correction]:
    """Return the spec and the correction for local arrays."""
    if not manual.axes:
        return spec, correction
    if correction.unconstrained == "drop":  # only what the user wrote
        written = (None if is_unconstrained(entry) else entry for entry in entries_of(spec))
        spec, correction = with_entries(spec, written), replace(correction, unconstrained="keep")
    return without_axes(spec, manual.axes, manual.emptied), correction


class _OnMesh(NamedTuple):
    """Rule list bound to a mesh."""

    table: ShardingTable
    replicated: NamedSharding
    """That of leaves that need no rule."""
    with_memory: set[int]
    """The ids of the table's shardings whose rules have a memory kind. None has both kinds."""
    specs: list[SpecOnMesh | SpecByShape]
    spec_of: list[int]
    mesh: AnyMesh


def specs_on_mesh(
    rules: Iterable[tuple[Pattern, Any]],
    axis_sizes: Mapping[str, int],
    correction: Correction,
    *,
    manual: ManualAxes = _NO_MANUAL_AXES,
    as_specs: bool = True,
    optional_axes: frozenset[str] = frozenset(),
) -> tuple[list[SpecOnMesh | SpecByShape], list[int]]:
    """Return (the distinct specs of the rules, bound to a mesh; the index of each rule's spec).

    Args:
        rules: (pattern, spec) pairs, as `Rules` has them.
        axis_sizes: Devices along each mesh axis.
        correction: The correction of rules without their own.
        manual: Manual axes, which are left out because shapes are local.
        as_specs: Whether Entries become PartitionSpecs. Otherwise they stay Entries.
        optional_axes: Axes that the mesh may lack, beside those of each rule.

    Raises:
        TypeError: The spec of a rule cannot become a PartitionSpec.
        ValueError: A spec that is made from shapes names manual axes.
    """
    index_of: dict[RuleSpec, int] = {}
    spec_of = []
    for index, (_, spec) in enumerate(rules):
        rule = rule_spec(spec)
        if not has_axes(rule.spec):
            raise TypeError(
                f"rule {index}: the spec {shown(rule.spec)} cannot be put on a mesh: it is no "
                "PartitionSpec, axis name, tuple of axis names or None"
            )
        spec_of.append(index_of.setdefault(rule, len(index_of)))
    options: Any = {"as_specs": as_specs, "optional_axes": optional_axes}
    specs = [
        bound_spec(rule, axis_sizes, rule.correction or correction, manual, **options)
        for rule in index_of
    ]
    return specs, spec_of


def bound_spec(
    rule: RuleSpec,
    axis_sizes: Mapping[str, int],
    correction: Correction,
    manual: ManualAxes,
    *,
    as_specs: bool = True,
    optional_axes: frozenset[str] = frozenset(),
    named_with: Mapping[str, frozenset[str]] = NO_OTHERS,
) -> SpecOnMesh | SpecByShape:
    """Return one of the specs of `specs_on_mesh`."""
    by_shape = rule.spec if isinstance(rule.spec, Fsdp) else None
    entries: Any = rule.spec if by_shape is None else by_shape.within
    spec = as_partition_spec(entries) if as_specs else entries
    local, inside = _inside_shard_map(spec, correction, manual)
    on_mesh = SpecOnMesh(
        local,
        axis_sizes,
        inside,
        rule.units,
        optional_axes=optional_axes.union(rule.optional_axes),
        named_with=named_with,
    )
    if by_shape is None:
        return on_mesh
    if not by_shape.named.isdisjoint(manual.axes):
        raise ValueError(
            f"{by_shape} goes by whole shapes, and inside a shard_map over "
            f"{', '.join(sorted(by_shape.named & manual.axes))} they are local: apply it outside, "
            "or write the spec out"
        )
    return SpecByShape(by_shape, on_mesh)


def check_memory_of_rules(rules: Iterable[tuple[Pattern, Any]], mesh: AnyMesh) -> None:
    """Check that the mesh's devices have the memory kind of each rule."""
    first: dict[MemoryKind | None, str] = {}
    for index, (pattern, spec) in enumerate(rules):
        first.setdefault(memory_kind_of(spec), f"rule {index} {pattern!r}")
    for kind, rule in first.items():
        check_memory_on_mesh(rule, kind, mesh)


def check_memory_on_mesh(name: str, kind: MemoryKind | None, mesh: AnyMesh) -> None:
    """Check that the mesh's devices have this memory kind; `name` is what says so, for errors."""
    try:
        sharding_in_memory(mesh, partition_spec(), kind)
    except ValueError as error:
        raise ValueError(f"{name}: memory_kind={kind!r} is not on this mesh: {error}") from None


def _bind(matcher: Matcher, mesh: AnyMesh) -> _OnMesh:
    rules, manual = matcher.pairs, manual_axes(mesh)
    specs, spec_of = specs_on_mesh(
        rules,
        dict(mesh.shape),
        matcher.dialect.correction,
        manual=manual,
        optional_axes=frozenset(matcher.optional_axes),
    )
    check_memory_of_rules(rules, mesh)
    memory_of = {spec: memory_kind_of(rule) for spec, (_, rule) in zip(spec_of, rules, strict=True)}

    with_memory: set[int] = set()

    @functools.cache  # which keeps them, and so their ids
    def sharding(spec: PartitionSpec, memory: MemoryKind | None) -> NamedSharding:
        result = sharding_in_memory(mesh, spec, memory)
        if memory is not None:
            with_memory.add(id(result))
        return result

    def sharded(spec: int, corrected: PartitionSpec | None) -> NamedSharding | None:
        with suppress(ValueError):  # of JAX; `_misfits_message` tells it
            return None if corrected is None else sharding(corrected, memory_of[spec])
        return None

    # These must not refer to the table, because the table refers to them.
    def make(spec: int, rank: int, kept: int) -> object:
        return sharded(spec, cast(SpecOnMesh, specs[spec]).corrected(rank, kept))

    def make_for_shape(spec: int, shape: tuple[Any, ...], dtype: Any) -> object:
        return sharded(spec, specs[spec].corrected_for(shape, dtype))

    table = ShardingTable([spec.corrector for spec in specs], spec_of, make, make_for_shape)
    replicated = sharding(partition_spec(), None)
    return _OnMesh(table, replicated, with_memory, specs, spec_of, mesh)


def _refused_by_jax(mesh: AnyMesh, spec: PartitionSpec) -> list[str]:
    """Return why JAX makes no sharding of a spec that fits, as of unreduced axes of type Auto."""
    from jax.sharding import NamedSharding

    try:
        NamedSharding(mesh, spec)
    except ValueError as error:
        return str(error).splitlines()[:1]
    return []


def _misfits_message(
    on_mesh: _OnMesh, matcher: Matcher, count: int, leaves: list[tuple[str, tuple[int, Any]]]
) -> str:
    rows = []
    for path, (rule, shape) in leaves:
        pattern, spec = matcher.pairs[rule][0], on_mesh.specs[on_mesh.spec_of[rule]]
        rule_spec = plain_spec(matcher.pairs[rule][1])
        written = rule_spec if isinstance(rule_spec, Fsdp) else spec.spec
        # A leaf without a shape has no dimensions.
        reasons = list(spec.errors(tuple(shape or ()))) or _refused_by_jax(on_mesh.mesh, spec.spec)
        decided_by = f"rule {rule}: {pattern!r} -> {spec_shown(written)}"
        rows.append(LeafError(path, shape, decided_by, reasons))
    return leaf_errors(rows, on_mesh.mesh.shape, count=count)
