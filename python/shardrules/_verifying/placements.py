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
from shardrules._verifying.words import finding_of, is_same, together, unlike

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import Finding
    from shardrules._verifying.executable import Side
    from shardrules._verifying.wanted import Wanted

__all__ = ["dropped", "misplaced", "other_memory", "placement_text"]


class _Said(NamedTuple):
    """The words of a finding about a side."""

    kind: VerifyKind
    verb: str
    cost: str
    fix: str


_SAID: Final = {
    "inputs": _Said(
        "input",
        "takes",
        "it refuses arrays as planned, and jit compiles again for them",
        "lower the function with arrays or shapes that are sharded as planned (plan.abstract()), "
        "or give jit in_shardings=plan.shardings()",
    ),
    "outputs": _Said(
        "output",
        "returns",
        "what needs them as planned moves them first",
        "give jit out_shardings=plan.shardings(), or constrain the result inside the function",
    ),
}


def misplaced(side: Side, wanted: Sequence[Wanted | None]) -> Iterator[Finding]:
    """Leaves whose sharding in the executable is not equivalent to the planned one."""
    said = _SAID[side.name]

    def alike(planned: Wanted | None, has: Any, leaf: int) -> bool:
        if planned is None or has is None:
            return True
        shape = side.leaves[leaf].shape
        _check_fits(planned, shape, side, leaf)
        return is_same(planned.sharding, has, len(shape))

    def texts(leaf: int) -> tuple[str, str]:
        return sharding_shown(_sharding(wanted[leaf])), sharding_shown(side.shardings[leaf])

    for leaves in together(unlike(wanted, side.shardings, alike), texts):
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
            said.fix,
            side=side,
            leaves=leaves,
            bytes=held,
        )


def other_memory(side: Side, wanted: Sequence[Wanted | None]) -> Iterator[Finding]:
    """Leaves that are planned in a memory kind other than the executable's."""

    def alike(planned: Wanted | None, has: Any, _: int) -> bool:
        if planned is None or has is None or planned.memory_kind is None:
            return True
        kind = memory_apart(has)
        return kind is None if planned.memory_kind == "device" else kind == planned.memory_kind

    def texts(leaf: int) -> tuple[str | None, str | None]:
        planned = wanted[leaf]
        return planned and planned.memory_kind, side.shardings[leaf].memory_kind

    said = _SAID[side.name]
    for leaves in together(unlike(wanted, side.shardings, alike), texts):
        meant, has = texts(leaves[0])
        held = sum(map(side.bytes_of, leaves))
        yield finding_of(
            "error",
            "memory-kind",
            f"{counted(len(leaves), 'leaf')} planned in {meant} memory, but the executable "
            f"{said.verb} them in {has} memory: {bytes_shown(held)} on each device",
            f"{said.fix}; specs alone say nothing about memory",
            side=side,
            leaves=leaves,
            bytes=held,
        )


def dropped(side: Side, wanted: Sequence[Wanted | None]) -> Iterator[Finding]:
    """Planned leaves that the executable does not have."""
    leaves = [
        i
        for i, (planned, has) in enumerate(zip(wanted, side.shardings, strict=True))
        if has is None and planned is not None
    ]
    if leaves:
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


def _check_fits(planned: Wanted, shape: tuple[int, ...], side: Side, leaf: int) -> None:
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
