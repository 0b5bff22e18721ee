"""Findings about the shardings and memory kinds of an executable's inputs and outputs.

Read from `Compiled.input_shardings` and `Compiled.output_shardings`. Costs a comparison for each
pair of shardings. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._format import bytes_shown, counted
from shardrules._memory_kinds import in_memory
from shardrules._planning.asking.findings import VerifyKind
from shardrules._printable import printable
from shardrules._sharding.memory import memory_apart
from shardrules._verifying.executable import sharding_shown
from shardrules._verifying.words import PLACING, ObjectPairs, finding_of, is_same, together

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import Finding
    from shardrules._verifying.calls import Library
    from shardrules._verifying.executable import Side
    from shardrules._verifying.wanted import Wanted

__all__ = ["dropped", "placement_text", "placements"]


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
