"""Findings about planned arrays of which the program makes copies that are cut less.

Read from the all-gathers of the optimized HLO whose result is large, and from where their operands
come and their results go. Costs a search of the text, and a trace per large gather. Must not know
how findings are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._dtypes import bits_of
from shardrules._plan.axis_uses import expert_axes_among
from shardrules._plan.roles import experts_dim
from shardrules._plan.table import axes_used
from shardrules._specs import entry_axes
from shardrules._text import bytes_shown, counted
from shardrules._verify.dataflow import (
    PRODUCTS,
    Value,
    Variation,
    held_by_loops,
    origin_of,
    source_of,
    uses_of,
)
from shardrules._verify.executable import sharding_shown
from shardrules._verify.hlo import axes_of_groups
from shardrules._verify.placements import finding_of, is_same

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding, Level
    from shardrules._verify.executable import Executable
    from shardrules._verify.hlo import Collective, Hlo
    from shardrules._verify.inputs import Wanted
    from shardrules._verify.states import State

_PARTS: Final = {"argument": 1, "output": 1, "temp": 1, "alias": -1, "generated_code": 1}
"""By name in XLA's numbers, whether it is added. What is aliased is an argument and an output."""


def peak(executable: Executable, hbm: int | None) -> Iterator[Finding]:
    """More bytes on a device than it has."""
    if hbm is None:
        return
    memory = executable.memory
    if memory is None:
        yield finding_of(
            "warning",
            "peak",
            "this backend does not tell the memory that executables need: whether it fits is not "
            "known",
            "verify the same function on another backend",
        )
        return
    parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in _PARTS}
    total = sum(sign * parts[name] for name, sign in _PARTS.items())
    if total > hbm:
        listed = ", ".join(
            f"{name.replace('_', ' ')} {bytes_shown(size)}" for name, size in parts.items() if size
        )
        yield finding_of(
            "error",
            "peak",
            f"{bytes_shown(total)} on each device ({listed}), which has {bytes_shown(hbm)}",
            "cut more of the arguments or activations, rematerialize, donate the state, or take a "
            "smaller batch",
            bytes=total - hbm,
        )


# Bits of the numbers of quantized arrays, at most.
_NARROW: Final = 8
# What backends without collectives of narrower numbers gather for them.
_CARRIERS: Final = frozenset({"f16", "s8", "u8"})


class _UseWords(NamedTuple):
    """What a gathered copy is for."""

    level: Level
    message: str
    fix: str


_USES: Final = {
    "loop": _UseWords(
        "warning",
        "before a loop, which holds them whole while it runs",
        "gather within the loop, a layer at a time: constrain the layer's slice inside its body, "
        "and keep XLA from moving the gather out",
    ),
    "model axis": _UseWords(
        "warning",
        "though what it is multiplied by is not cut by all of these axes: devices along them do "
        "the same work",
        "constrain the activations so that they are cut by these axes, and the product is computed "
        "in parts; or cut the batch by them",
    ),
    "wide": _UseWords(
        "warning",
        "converted or scaled first: the copies are of a wider dtype than what is stored",
        "gather what is stored: constrain the stored values, and their scales, to be whole along "
        "these axes before they are converted",
    ),
    "experts": _UseWords(
        "warning",
        "which cut experts: each device gets all experts",
        "send tokens to their experts instead: by jax.lax.all_to_all in a shard_map, or constrain "
        "what experts get to be cut as they are; if the axes are for FSDP, cut another dimension",
    ),
    "slice": _UseWords(
        "info", "a slice at a time, such as a layer, in a loop", "no change: as in FSDP"
    ),
    "step": _UseWords(
        "info",
        "inside the function",
        "no change if this is FSDP; stacked layers in a scan are gathered one at a time",
    ),
}
"""By what a gathered copy is for, the words of the finding, the first that applies."""


class _Gather(NamedTuple):
    """An all-gather with a large result."""

    collective: Collective
    number: int
    """Which of its results."""

    @property
    def bytes(self) -> int:
        return self.collective.results[self.number].bytes

    @property
    def value(self) -> Value:
        """Its result."""
        is_tuple = len(self.collective.results) > 1
        name = self.collective.instruction.name
        return Value(self.collective.computation, name, self.number if is_tuple else None)

    @property
    def operand(self) -> Value:
        """What it gathers."""
        name = self.collective.instruction.operands[self.number]
        return Value(self.collective.computation, name)


class _Copy(NamedTuple):
    """A gathered copy of a planned argument."""

    leaf: int
    axes: tuple[str, ...]
    """The axes that are planned to cut the array, and do not cut the copy."""
    is_slice: bool
    is_wide: bool
    """Whether it is of a wider dtype than the argument, whose numbers have a byte or less."""


def gathered(
    executable: Executable,
    inputs: Sequence[Wanted | None],
    outputs: Sequence[Wanted | None],
    found: Sequence[State],
    large: int,
) -> Iterator[Finding]:
    """Planned arrays that are gathered, and are then large."""
    if executable.hlo is None:
        yield finding_of(
            "warning",
            "gathered",
            "this backend does not show the text of executables: what they gather is not known",
            "verify the same function on another backend, such as CPU devices",
        )
        return
    gathers = [
        _Gather(one, index)
        for one in executable.hlo.of_kind("all-gather", large)
        for index, result in enumerate(one.results)
        if result.bytes >= large
    ]
    if gathers:
        sources = executable.sources
        yield from _returned(executable, _meant(inputs, outputs, found), sources, gathers)
        # What is gathered again, or returned, is told of where it ends.
        passed_on = {*sources, *(source_of(executable.hlo, one.operand) for one in gathers)}
        ending = [gather for gather in gathers if gather.value not in passed_on]
        yield from _of_arguments(executable, inputs, found, ending)


def _of_arguments(
    executable: Executable,
    inputs: Sequence[Wanted | None],
    found: Sequence[State],
    gathers: list[_Gather],
) -> Iterator[Finding]:
    """Planned arguments that are gathered, by their spec, the axes and what the copy is for."""
    assert executable.hlo is not None
    leaf_of = {number: leaf for leaf, number in executable.parameter_of.items()}
    computations = {gather.value.computation for gather in gathers}
    held = set().union(*(held_by_loops(executable.hlo, name) for name in computations))
    work = _Work(executable, found)
    copies: dict[tuple[str, tuple[str, ...], str], dict[int, int]] = defaultdict(dict)
    for gather in gathers:
        copy = _copy(executable, inputs, leaf_of, gather)
        if copy is None:
            continue
        if gather.value in held and _is_taken_apart(executable.hlo, gather.value):
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
        of_leaf = copies[spec, copy.axes, use]
        of_leaf[copy.leaf] = max(gather.bytes, of_leaf.get(copy.leaf, 0))
    for (spec, axes, use), of_leaf in copies.items():
        size = sum(of_leaf.values())
        yield finding_of(
            _USES[use].level,
            "gathered",
            f"{counted(len(of_leaf), 'leaf')} planned {spec} gathered over {', '.join(axes)} to "
            f"{bytes_shown(size)} on each device, {_USES[use].message}",
            _USES[use].fix,
            side=executable.inputs,
            leaves=sorted(of_leaf),
            bytes=size,
        )


def _is_taken_apart(hlo: Hlo, value: Value) -> bool:
    """Whether a slice of a value is used at a time, such as a layer."""
    return any(use.is_layer for use in uses_of(hlo, value))


def _copy(
    executable: Executable,
    inputs: Sequence[Wanted | None],
    leaf_of: Mapping[int, int],
    gather: _Gather,
) -> _Copy | None:
    """What a gather's result is a copy of, if that is a planned argument, cut as planned."""
    assert executable.hlo is not None
    origin = origin_of(executable.hlo, gather.operand)
    leaf = None if origin is None else leaf_of.get(origin.parameter)
    planned = None if leaf is None else inputs[leaf]
    if origin is None or leaf is None or planned is None:
        return None
    shape = executable.inputs.shapes[leaf]
    if not is_same(planned.sharding, executable.inputs.shardings[leaf], len(shape)):
        return None  # which is a finding of its own
    stored = bits_of(executable.inputs.dtypes[leaf])
    if origin.is_scaled and stored > _NARROW:
        return None  # a value of its own, as an activation is
    result = gather.collective.results[gather.number]
    is_wide = stored <= _NARROW and result.bits > stored
    if not origin.is_scaled and result.dtype in _CARRIERS:
        is_wide = False
    axes = _axes(gather, planned, shape, origin.layers)
    return _Copy(leaf, axes, origin.layers > 1, is_wide) if axes else None


def _are_for_experts(executable: Executable, planned: Wanted | None, copy: _Copy) -> bool:
    """Whether the axes cut experts for their own sake, and not as FSDP cuts anything.

    Their names say so, or that they cut nothing else of the argument that the leaf is in.
    """
    side = executable.inputs
    dim = experts_dim(side.paths[copy.leaf], side.shapes[copy.leaf])
    if dim is None or planned is None:
        return False
    cutting = chain(*map(entry_axes, planned.sharding.spec[dim : dim + 1]))
    axes = set(copy.axes).intersection(cutting)
    if not axes or expert_axes_among(axes):
        return bool(axes)
    part = next(part for part in side.parts if copy.leaf in part)
    others = (
        _axes_cutting(side.shardings[leaf])
        for leaf in part
        if side.shardings[leaf] is not None
        and experts_dim(side.paths[leaf], side.shapes[leaf]) is None
    )
    return all(cut is not None and cut.isdisjoint(axes) for cut in others)


def _meant(
    inputs: Sequence[Wanted | None], outputs: Sequence[Wanted | None], found: Sequence[State]
) -> list[Wanted | None]:
    """What is planned for each output; for those of states, else what is for their arguments."""
    meant = list(outputs)
    for state in found:
        for before, after in zip(state.inputs, state.outputs, strict=True):
            meant[after] = meant[after] or inputs[before]
    return meant


def _returned(
    executable: Executable,
    meant: Sequence[Wanted | None],
    sources: Sequence[Value],
    gathers: list[_Gather],
) -> Iterator[Finding]:
    """Outputs that are meant to be cut, and are copies of a gather's result."""
    of_value = {gather.value: gather for gather in gathers}
    copies: dict[tuple[str, tuple[str, ...]], dict[int, int]] = defaultdict(dict)
    for leaf, (planned, source) in enumerate(zip(meant, sources, strict=True)):
        gather = of_value.get(source)
        if planned is None or gather is None:
            continue
        if axes := _axes(gather, planned, executable.outputs.shapes[leaf]):
            copies[sharding_shown(planned.sharding), axes][leaf] = gather.bytes
    for (spec, axes), of_leaf in copies.items():
        held = sum(of_leaf.values())
        yield finding_of(
            "error",
            "gathered",
            f"{counted(len(of_leaf), 'leaf')} planned {spec} gathered over {', '.join(axes)} and "
            f"returned so: {bytes_shown(held)} on each device, in each call",
            "give jit the planned out_shardings, or constrain the results inside the function",
            side=executable.outputs,
            leaves=sorted(of_leaf),
            bytes=held,
        )


def _axes(
    gather: _Gather, planned: Wanted, shape: tuple[int, ...], layers: int = 1
) -> tuple[str, ...]:
    """The axes that are planned to cut an array, and do not cut the gathered copy of it.

    Args:
        gather: The gather, of some results of which a device has more than planned.
        planned: What is planned for the array.
        shape: Its shape.
        layers: How many slices it has such as the one that is gathered.
    """
    mesh = getattr(planned.sharding, "mesh", None)
    if mesh is None:
        return ()
    size = prod(gather.collective.results[gather.number].dims)
    cut = axes_used(planned.sharding.spec, mesh.shape)
    if size * layers <= prod(planned.sharding.shard_shape(shape)):
        return ()
    axes = axes_of_groups(gather.collective.groups, mesh.shape)
    is_whole = size * layers >= prod(shape)
    return tuple(axis for axis in mesh.axis_names if axis in cut and (is_whole or axis in axes))


class _Work:
    """Whether the devices along axes do the same work with an array that is whole on each."""

    def __init__(self, executable: Executable, found: Sequence[State]) -> None:
        self._executable = executable
        of_states = {leaf for state in found for leaf in state.inputs}
        self._axes: dict[range, frozenset[str] | None] = {}
        for part in executable.inputs.parts:
            kept = [executable.inputs.shardings[leaf] for leaf in part if leaf not in of_states]
            cut = [_axes_cutting(sharding) for sharding in kept if sharding is not None]
            if cut:
                known = [one for one in cut if one is not None]
                self._axes[part] = frozenset(chain(*known)) if len(known) == len(cut) else None

    def is_the_same_with(self, copy: _Copy, value: Value) -> bool:
        """Whether what a gathered copy is multiplied by is the same along some of its axes.

        It differs where the batch comes in cut. Else it is asked of the program, which may cut the
        batch, or what it makes of it. Rows that are looked up are in no product.
        """
        others = [cut for part, cut in self._axes.items() if copy.leaf not in part]
        known = [cut for cut in others if cut is not None]
        if not others or len(known) < len(others) or frozenset(chain(*known)).issuperset(copy.axes):
            return False
        products = [use for use in uses_of(self._hlo, value) if use.opcode in PRODUCTS]
        differing: frozenset[str] = frozenset()
        for use in products:
            computation, name, operand = use.site
            operands = self._hlo.instruction(computation, name).operands
            factors = [factor for factor in operands if factor != operand]
            differing |= self._variation.of(computation, factors)
        return bool(products) and not differing.issuperset(copy.axes)

    @property
    def _hlo(self) -> Hlo:
        assert self._executable.hlo is not None
        return self._executable.hlo

    @cached_property
    def _variation(self) -> Variation:
        side, mesh = self._executable.inputs, self._executable.mesh
        assert mesh is not None
        cut = {
            number: _axes_cutting(side.shardings[leaf]) or frozenset()
            for leaf, number in self._executable.parameter_of.items()
        }
        return Variation(self._hlo, dict(mesh.shape), cut)


def _axes_cutting(sharding: Any) -> frozenset[str] | None:
    """The axes that a sharding names; None if it has no mesh."""
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is None else axes_used(sharding.spec, mesh.shape)
