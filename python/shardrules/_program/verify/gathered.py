"""Finds planned arrays that the program gathers, by tracing large all-gathers in the HLO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import entry_axes
from shardrules._base.text import bytes_shown, counted
from shardrules._plan.axis_uses import expert_axes_among
from shardrules._plan.findings import Finding, Level, finding_of
from shardrules._plan.kinds import axes_used
from shardrules._plan.roles import experts_dim
from shardrules._program.executable import Executable, sharding_shown
from shardrules._program.facts import PRODUCTS, SLICES, copies_of, layers_of, whole_source_of
from shardrules._program.reasons import CONSTRAINT
from shardrules._program.values import Values
from shardrules._program.verify.placements import is_same

if TYPE_CHECKING:
    from shardrules._program.hlo import CollectiveOp
    from shardrules._program.inputs import PlannedSharding
    from shardrules._program.states import State

    _Targets = Sequence[PlannedSharding | None]

# Bits of the numbers of quantized arrays, at most.
_NARROW: Final = 8
# Dtypes that backends without collectives of narrower numbers gather for them.
_CARRIERS: Final = frozenset({"f16", "s8", "u8"})

_USES: Final[dict[str, tuple[Level, str, str]]] = {
    "returned": (
        "error",
        "and returned so: {size} on each device, in each call",
        "give jit the planned out_shardings, or constrain the results inside the function",
    ),
    "loop": (
        "warning",
        "to {size} on each device, before a loop, which holds them whole while it runs",
        "gather within the loop, a layer at a time: constrain the layer's slice inside its body, "
        "and keep XLA from moving the gather out",
    ),
    "model axis": (
        "warning",
        "to {size} on each device, though what it is multiplied by is not cut by all of these "
        "axes: devices along them do the same work",
        "constrain the activations so that they are cut by these axes, and the product is computed "
        "in parts; or cut the batch by them",
    ),
    "wide": (
        "warning",
        "to {size} on each device, converted or scaled first: the copies are of a wider dtype than "
        "what is stored",
        "gather what is stored: constrain the stored values, and their scales, to be whole along "
        "these axes before they are converted",
    ),
    "experts": (
        "warning",
        "to {size} on each device, which cut experts: each device gets all experts",
        "send tokens to their experts instead: by jax.lax.all_to_all in a shard_map, or constrain "
        "what experts get to be cut as they are; if the axes are for FSDP, cut another dimension",
    ),
    "slice": (
        "info",
        "to {size} on each device, a slice at a time, such as a layer, in a loop",
        "no change: as in FSDP",
    ),
    "step": (
        "info",
        "to {size} on each device, inside the function",
        "no change if this is FSDP; stacked layers in a scan are gathered one at a time",
    ),
}
"""Level, message and fix of a use of gathered copies, the first that applies."""


class _Gather(NamedTuple):
    """All-gather with a large result."""

    collective: CollectiveOp
    number: int
    """Index of the result."""
    operand: int
    """Node of what is gathered."""
    value: int
    """Node of the copy."""

    @property
    def bytes(self) -> int:
        return self.collective.results[self.number].bytes

    def axes(
        self, target: PlannedSharding, shape: tuple[int, ...], layers: int = 1
    ) -> tuple[str, ...]:
        """List the axes that are planned to shard an array, and do not shard the gathered copy."""
        mesh = getattr(target.sharding, "mesh", None)
        size = layers * prod(self.collective.results[self.number].dims)
        if mesh is None or size <= prod(target.sharding.shard_shape(shape)):
            return ()
        planned = axes_used(target.sharding.spec, mesh.shape)
        axes = mesh.axis_names if size >= prod(shape) else self.collective.groups.axes(mesh.shape)
        return tuple(axis for axis in axes if axis in planned)


class _Copy(NamedTuple):
    """Gathered copy of a planned argument."""

    leaf: int
    axes: tuple[str, ...]
    """Axes that are planned to shard the array, and do not shard the copy."""
    is_slice: bool
    is_wide: bool
    """True if its dtype is wider than the argument's, whose numbers have a byte or less."""


class GatherFinding(NamedTuple):
    """Finding about gathered arrays, with the axes over which they are gathered."""

    finding: Finding
    axes: tuple[str, ...] = ()
    is_same_work: bool = False
    """True if devices along the axes multiply the same with them."""


_Copies = dict[tuple[str, tuple[str, ...], str], dict[int, int]]
"""Bytes on a device of each leaf that is gathered, by planned spec, axes and use."""


def gather_findings(
    executable: Executable,
    inputs: _Targets,
    outputs: _Targets,
    carried: Sequence[State],
    large: int,
) -> Iterator[GatherFinding]:
    """Yield findings about planned arrays that are gathered, and are then large."""
    if executable.hlo is None:
        message = (
            "this backend does not show the text of executables: what they gather is not known"
        )
        fix = "verify the same function on another backend, such as CPU devices"
        yield GatherFinding(finding_of("warning", "gathered", message, fix))
        return
    collectives = [
        (collective, index)
        for collective in executable.hlo.of_kind("all-gather", large)
        for index, result in enumerate(collective.results)
        if result.bytes >= large
    ]
    if not collectives:
        return
    values = executable.values
    gathers = [
        _Gather(op, index, values.operand(op, index), values.results(op)[index])
        for op, index in collectives
        if values.results(op)
    ]
    targets = list(outputs)
    for state in carried:
        for before, after in zip(state.inputs, state.outputs, strict=True):
            targets[after] = targets[after] or inputs[before]
    # Copies that are gathered again, or returned, are reported where they end.
    operands = {whole_source_of(values, gather.operand) for gather in gathers}
    passed_on = operands.union(whole_source_of(values, node) for node in executable.results)
    ending = [gather for gather in gathers if gather.value not in passed_on]
    returned = _returned_copies(executable, targets, gathers)
    used = _uses(executable, inputs, carried, ending)
    for side, copies in ((executable.outputs, returned), (executable.inputs, used)):
        for (spec, axes, use), sizes in copies.items():
            level, words, fix = _USES[use]
            size = sum(sizes.values())
            message = (
                f"{counted(len(sizes), 'leaf')} planned {spec} gathered over {', '.join(axes)} "
                + words.format(size=bytes_shown(size))
            )
            mend = CONSTRAINT if use != "returned" else "out_shardings=plan.shardings()"
            leaves = sorted(sizes)
            finding = side.finding(level, "gathered", message, fix, leaves, bytes=size, mend=mend)
            yield GatherFinding(finding, axes, use == "model axis")


def _returned_copies(executable: Executable, targets: _Targets, gathers: list[_Gather]) -> _Copies:
    """Collect outputs that are planned to be sharded, and are copies of a gather's result."""
    of_value = {gather.value: gather for gather in gathers}
    copies: _Copies = defaultdict(dict)
    for leaf, (target, source) in enumerate(zip(targets, executable.results, strict=True)):
        gather = of_value.get(whole_source_of(executable.values, source))
        if target is None or gather is None:
            continue
        if axes := gather.axes(target, executable.outputs.shapes[leaf]):
            copies[sharding_shown(target.sharding), axes, "returned"][leaf] = gather.bytes
    return copies


def _uses(
    executable: Executable, inputs: _Targets, carried: Sequence[State], gathers: list[_Gather]
) -> _Copies:
    """Collect planned arguments that are gathered, by the first use that applies."""
    values = executable.values
    in_loops = _held_by_loops(values)
    work = _Work(executable, carried)
    copies: _Copies = defaultdict(dict)
    for gather in gathers:
        copy = _copy(executable, inputs, gather)
        if copy is None:
            continue
        if gather.value in in_loops and any(
            values.opcodes[node] in SLICES and layers_of(values, values.made_of[node][0], node) > 1
            for node in copies_of(values, gather.value)
        ):
            use = "loop"
        elif work.is_the_same_with(copy, gather.value):
            use = "model axis"
        elif copy.is_wide:
            use = "wide"
        elif _are_for_experts(executable, inputs[copy.leaf], copy):
            use = "experts"
        else:
            use = "slice" if copy.is_slice else "step"
        spec = sharding_shown(executable.inputs.shardings[copy.leaf])
        sizes = copies[spec, copy.axes, use]
        sizes[copy.leaf] = max(gather.bytes, sizes.get(copy.leaf, 0))
    return copies


def _held_by_loops(values: Values) -> set[int]:
    """Find the values that loops keep in memory while they run."""
    loops = (node for node, opcode in enumerate(values.opcodes) if opcode == "while")
    return {whole_source_of(values, values.made_of[node][0]) for node in loops}


def _copy(executable: Executable, inputs: _Targets, gather: _Gather) -> _Copy | None:
    """Trace a gather back to a planned argument that is sharded as planned."""
    side = executable.inputs
    origin = executable.origins[gather.operand]
    leaf = None if origin is None else executable.leaf_of.get(origin.parameter)
    target = None if leaf is None else inputs[leaf]
    if origin is None or leaf is None or target is None:
        return None
    shape, stored = side.shapes[leaf], bits_of(side.dtypes[leaf])
    if not is_same(target.sharding, side.shardings[leaf], len(shape)):
        return None  # which is a finding of its own
    if origin.is_scaled and stored > _NARROW:
        return None  # a value of its own, as an activation is
    result = gather.collective.results[gather.number]
    is_carrier = not origin.is_scaled and result.dtype in _CARRIERS
    is_wide = stored <= _NARROW and result.bits > stored and not is_carrier
    axes = gather.axes(target, shape, origin.layers)
    return _Copy(leaf, axes, origin.layers > 1, is_wide) if axes else None


def _are_for_experts(executable: Executable, target: PlannedSharding | None, copy: _Copy) -> bool:
    """Say whether the axes shard experts for their own sake, and not as FSDP shards anything.

    Their names say so, or that they shard nothing else of the argument that the leaf is in.
    """
    side = executable.inputs
    dim = experts_dim(side.paths[copy.leaf], side.shapes[copy.leaf])
    if dim is None or target is None:
        return False
    of_dim = chain(*map(entry_axes, target.sharding.spec[dim : dim + 1]))
    axes = set(copy.axes).intersection(of_dim)
    if not axes or expert_axes_among(axes):
        return bool(axes)
    argument = next(leaves for _, leaves in side.subtrees if copy.leaf in leaves)
    others = (
        _sharding_axes(side.shardings[leaf])
        for leaf in argument
        if side.shardings[leaf] is not None
        and experts_dim(side.paths[leaf], side.shapes[leaf]) is None
    )
    return all(used is not None and used.isdisjoint(axes) for used in others)


class _Work:
    """Tests whether devices along axes do the same work with an array that is whole on each."""

    def __init__(self, executable: Executable, carried: Sequence[State]) -> None:
        self._executable = executable
        side = executable.inputs
        of_states = {leaf for state in carried for leaf in state.inputs}
        self._axes: dict[range, frozenset[str] | None] = {}
        for _, argument in side.subtrees:
            shardings = [side.shardings[leaf] for leaf in argument if leaf not in of_states]
            axes = [_sharding_axes(sharding) for sharding in shardings if sharding is not None]
            if axes:
                self._axes[argument] = _union_of_axes(axes)

    def is_the_same_with(self, copy: _Copy, value: int) -> bool:
        """Say whether what a copy is multiplied by is equal along some of its axes.

        It differs where the batch comes in sharded. Otherwise the program decides, which may shard
        the batch itself. Rows that are looked up are in no product.
        """
        others = [axes for argument, axes in self._axes.items() if copy.leaf not in argument]
        batch = _union_of_axes(others)
        if not others or batch is None or batch.issuperset(copy.axes):
            return False
        values = self._executable.values
        copies = copies_of(values, value)
        products = {
            user
            for node in copies
            for user in values.used_by[node]
            if values.opcodes[user] in PRODUCTS
        }
        factors = {factor for node in products for factor in values.made_of[node]}
        differing = self._executable.variation.of(factors - copies)
        return bool(products) and not differing.issuperset(copy.axes)


def _sharding_axes(sharding: Any) -> frozenset[str] | None:
    """Return the axes that a sharding names; None if it has no mesh."""
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None else axes_used(sharding.spec, mesh.shape)


def _union_of_axes(axes: list[frozenset[str] | None]) -> frozenset[str] | None:
    """Join the axes of several shardings; None if one has no mesh."""
    named = [names for names in axes if names is not None]
    return frozenset(chain(*named)) if len(named) == len(axes) else None
