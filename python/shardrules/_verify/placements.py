"""Findings about the shardings and memory kinds of an executable's inputs and outputs.

Read from `Compiled.input_shardings` and `Compiled.output_shardings`. Costs a comparison for each
pair of shardings. Must not know how findings are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._correction import in_memory
from shardrules._mesh.memory import memory_apart
from shardrules._plan.findings import Finding, VerifyKind
from shardrules._plan.fold import fold
from shardrules._text import bytes_shown, counted, printable
from shardrules._verify.executable import sharding_shown

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding, FindingKind, Level
    from shardrules._verify.calls import Library
    from shardrules._verify.executable import Side
    from shardrules._verify.inputs import Wanted


class _Placing(NamedTuple):
    """What places arrays as planned, in words."""

    arguments: str
    results: str
    states: str


PLACING: Final[dict[Library, _Placing]] = {
    "jax": _Placing(
        "lower the function with arrays or shapes that are sharded as planned (plan.abstract()), "
        "or give jit in_shardings=plan.shardings()",
        "give jit out_shardings=plan.shardings(), or constrain the result inside the function",
        "give jit out_shardings that are the shardings of the arguments, or constrain the new "
        "state to them inside the function",
    ),
    "nnx": _Placing(
        "lower the function with modules that are sharded as planned, or give nnx.jit "
        "in_shardings=nnx.StateSharding(plan.shardings())",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()) for what is updated, and "
        "out_shardings for what is returned, or constrain it inside the function",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()), which count for the "
        "updated module too, or constrain the new state inside the function",
    ),
    "equinox": _Placing(
        "lower the function with arrays that are sharded as planned",
        "constrain the result inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
        "constrain the arrays of the new state inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
    ),
}
"""By whose function compiles."""


def finding_of(
    level: Level,
    kind: FindingKind,
    message: str,
    fix: str,
    *,
    side: Side | None = None,
    leaves: Sequence[int] = (),
    bytes: int = 0,
) -> Finding:
    """A finding about leaves of a side, with their paths folded."""
    paths = [] if side is None else [side.paths[leaf] for leaf in leaves]
    folded = fold(paths, np.zeros(len(paths), np.int32))
    patterns = tuple(one.pattern for one in folded)
    return Finding(level, kind, message, patterns, len(leaves), None, bytes, fix)


class ObjectPairs:
    """Two lists of as many objects, many of which are the same; None is like anything."""

    def __init__(self, firsts: Sequence[Any], seconds: Sequence[Any]) -> None:
        self._firsts = firsts
        self._seconds = seconds
        # A list of None says that nothing is planned.
        is_planned = firsts.count(None) < len(firsts)
        count = len(firsts) if is_planned else 0
        self._position_of = dict(zip(self._ids(), range(count), strict=False))

    def unlike(self, alike: Callable[[Any, Any, int], bool]) -> list[list[int]]:
        """The positions of what is not alike, those of the same two objects together.

        Args:
            alike: Called once for each pair of the same objects, with them and one of its
                positions.
        """
        differ = {key for key, i in self._position_of.items() if not self._is_like(i, alike)}
        positions = defaultdict(list)
        for i, key in enumerate(self._ids()) if differ else ():
            if key in differ:
                positions[key].append(i)
        return list(positions.values())

    def _is_like(self, position: int, alike: Callable[[Any, Any, int], bool]) -> bool:
        first, second = self._firsts[position], self._seconds[position]
        if first is None or second is None:
            return True
        return alike(first, second, position)

    def _ids(self) -> Iterator[tuple[int, int]]:
        return zip(map(id, self._firsts), map(id, self._seconds), strict=True)


def is_same(one: Any, other: Any, rank: int) -> bool:
    """Whether two shardings cut arrays of this rank alike, in whatever memory."""
    if one == other:
        return True
    one, other = one.with_memory_kind(None), other.with_memory_kind(None)
    return bool(one == other or one.is_equivalent_to(other, rank))


def together(groups: Iterable[list[int]], key: Callable[[int], Any]) -> list[list[int]]:
    """Groups whose first members have equal keys, as one group each, ascending."""
    merged: dict[Any, list[int]] = defaultdict(list)
    for group in groups:
        merged[key(group[0])] += group
    return [sorted(group) for group in merged.values()]


class _Said(NamedTuple):
    """The words of a finding about a side."""

    kind: VerifyKind
    verb: str
    cost: str


_SAID: Final = {
    "inputs": _Said(
        "input",
        "takes",
        "it refuses arrays as planned, and jit compiles again for them",
    ),
    "outputs": _Said(
        "output",
        "returns",
        "what needs them as planned moves them first",
    ),
}


def placements(side: Side, wanted: Sequence[Wanted | None], library: Library) -> Iterator[Finding]:
    """Where the inputs or outputs are not as planned."""
    pairs = ObjectPairs(wanted, side.shardings)
    fix = PLACING[library].arguments if side.name == "inputs" else PLACING[library].results
    yield from _misplaced(side, wanted, pairs, fix)
    yield from _in_other_memory(side, wanted, pairs, fix)


def _misplaced(
    side: Side, wanted: Sequence[Wanted | None], pairs: ObjectPairs, fix: str
) -> Iterator[Finding]:
    """Leaves whose sharding in the executable is not equivalent to the planned one."""
    said = _SAID[side.name]

    def alike(planned: Wanted, has: Any, leaf: int) -> bool:
        if planned.sharding == has:
            return True
        _check_fits(planned, side, leaf)
        return is_same(planned.sharding, has, len(side.shapes[leaf]))

    def texts(leaf: int) -> tuple[str, str]:
        _check_fits(wanted[leaf], side, leaf)
        return sharding_shown(_sharding(wanted[leaf])), sharding_shown(side.shardings[leaf])

    for leaves in together(pairs.unlike(alike), texts):
        meant, has = texts(leaves[0])
        planned = sum(side.bytes_of(leaf, _sharding(wanted[leaf])) for leaf in leaves)
        held = sum(map(side.bytes_of, leaves))
        others = ", on the devices in another order," if meant == has else ""
        yield finding_of(
            "error",
            said.kind,
            f"{counted(len(leaves), 'leaf')} planned {meant}, but the executable {said.verb} "
            f"{has}{others} with {bytes_shown(held)} on each device instead of "
            f"{bytes_shown(planned)}: {said.cost}",
            fix,
            side=side,
            leaves=leaves,
            bytes=held,
        )


def _in_other_memory(
    side: Side, wanted: Sequence[Wanted | None], pairs: ObjectPairs, fix: str
) -> Iterator[Finding]:
    """Leaves that are planned in a memory kind other than the executable's."""

    def alike(planned: Wanted, has: Any, _: int) -> bool:
        if planned.memory_kind is None:
            return True
        kind = memory_apart(has)
        return kind is None if planned.memory_kind == "device" else kind == planned.memory_kind

    def texts(leaf: int) -> tuple[str | None, str | None]:
        planned = wanted[leaf]
        return planned and planned.memory_kind, side.shardings[leaf].memory_kind

    said = _SAID[side.name]
    for leaves in together(pairs.unlike(alike), texts):
        meant, has = texts(leaves[0])
        held = sum(map(side.bytes_of, leaves))
        yield finding_of(
            "error",
            "memory-kind",
            f"{counted(len(leaves), 'leaf')} planned in {meant} memory, but the executable "
            f"{said.verb} them in {has} memory: {bytes_shown(held)} on each device",
            f"{fix}; specs alone say nothing about memory",
            side=side,
            leaves=leaves,
            bytes=held,
        )


def dropped(side: Side, wanted: Sequence[Wanted | None], kept: Sequence[int]) -> Iterator[Finding]:
    """Planned leaves that the executable does not have."""
    if len(kept) == len(wanted):
        return
    lacking = set(range(len(wanted))).difference(kept)
    # Such as optax's adafactor has for the moments that a parameter does not need.
    lacking = {leaf for leaf in lacking if side.shapes[leaf] != (1,)}
    if leaves := [leaf for leaf in sorted(lacking) if wanted[leaf] is not None]:
        yield finding_of(
            "info",
            "input",
            f"{counted(len(leaves), 'leaf')} not used by the function: jit has dropped them, and "
            "the executable has no sharding to compare",
            "leave them out of the arguments; jit(keep_unused=True) keeps them",
            side=side,
            leaves=leaves,
        )


def placement_text(sharding: Any) -> str:
    """A sharding with its memory kind, if that is not the default."""
    kind: Any = memory_apart(sharding)
    return in_memory(sharding_shown(sharding), kind)


def _sharding(planned: Wanted | None) -> Any:
    return planned and planned.sharding


def _check_fits(planned: Wanted | None, side: Side, leaf: int) -> None:
    assert planned is not None
    shape = side.shapes[leaf]
    if len(getattr(planned.sharding, "spec", ())) <= len(shape):
        with suppress(ValueError):
            planned.sharding.shard_shape(shape)
            return
    raise ValueError(
        printable(
            f"{side.paths[leaf]}: {sharding_shown(planned.sharding)} is planned for the shape "
            f"{shape}, and cannot cut it; give the specs of Plan.specs, which fit"
        )
    )
