"""Compares the shardings and memory kinds of inputs and outputs with the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._correction import in_memory
from shardrules._mesh.memory import memory_apart
from shardrules._text import bytes_shown, counted, printable
from shardrules._verify.executable import sharding_shown

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding, VerifyKind
    from shardrules._verify.calls import Library
    from shardrules._verify.executable import Side
    from shardrules._verify.inputs import PlannedSharding


class _Fixes(NamedTuple):
    """Calls that place arrays as planned."""

    inputs: str
    outputs: str
    states: str


FIXES: Final[dict[Library, _Fixes]] = {
    "jax": _Fixes(
        "lower the function with arrays or shapes that are sharded as planned (plan.abstract()), "
        "or give jit in_shardings=plan.shardings()",
        "give jit out_shardings=plan.shardings(), or constrain the result inside the function",
        "give jit out_shardings that are the shardings of the arguments, or constrain the new "
        "state to them inside the function",
    ),
    "nnx": _Fixes(
        "lower the function with modules that are sharded as planned, or give nnx.jit "
        "in_shardings=nnx.StateSharding(plan.shardings())",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()) for what is updated, and "
        "out_shardings for what is returned, or constrain it inside the function",
        "give nnx.jit in_shardings=nnx.StateSharding(plan.shardings()), which count for the "
        "updated module too, or constrain the new state inside the function",
    ),
    "equinox": _Fixes(
        "lower the function with arrays that are sharded as planned",
        "constrain the result inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
        "constrain the arrays of the new state inside the function, as by "
        "jax.lax.with_sharding_constraint(arrays, plan.shardings())",
    ),
}


class ObjectPairs:
    """Pairs of objects, most of which are the same few; None is equal to anything."""

    def __init__(self, firsts: Sequence[Any], seconds: Sequence[Any]) -> None:
        self._firsts = firsts
        self._seconds = seconds
        # A list of None says that nothing is planned.
        count = len(firsts) if firsts.count(None) < len(firsts) else 0
        self._position_of = dict(zip(self._ids(), range(count), strict=False))

    def differences(
        self, are_equal: Callable[[Any, Any, int], bool], texts: Callable[[int], _Texts]
    ) -> Iterator[tuple[_Texts, list[int]]]:
        """Yields the positions of pairs that differ, those with the same texts together.

        Args:
            are_equal: Called once for each pair of the same objects, with one of its positions.
            texts: Formats both objects at a position.
        """
        differ = {key for key, i in self._position_of.items() if not self._is_equal(i, are_equal)}
        positions = defaultdict(list)
        for i, key in enumerate(self._ids()) if differ else ():
            if key in differ:
                positions[key].append(i)
        merged: dict[_Texts, list[int]] = defaultdict(list)
        for group in positions.values():
            merged[texts(group[0])] += group
        return ((pair, sorted(group)) for pair, group in merged.items())

    def _is_equal(self, position: int, are_equal: Callable[[Any, Any, int], bool]) -> bool:
        first, second = self._firsts[position], self._seconds[position]
        return first is None or second is None or are_equal(first, second, position)

    def _ids(self) -> Iterator[tuple[int, int]]:
        return zip(map(id, self._firsts), map(id, self._seconds), strict=True)


_Texts = tuple[str | None, str | None]


def is_same(first: Any, second: Any, rank: int) -> bool:
    """Says whether two shardings shard arrays of this rank equally, in whatever memory."""
    if first == second:
        return True
    first, second = first.with_memory_kind(None), second.with_memory_kind(None)
    return bool(first == second or first.is_equivalent_to(second, rank))


class _SideWords(NamedTuple):
    """Words of findings about a side."""

    kind: VerifyKind
    verb: str
    cost: str


_WORDS: Final = {
    "inputs": _SideWords(
        "input", "takes", "it refuses arrays as planned, and jit compiles again for them"
    ),
    "outputs": _SideWords("output", "returns", "what needs them as planned moves them first"),
}


def placements(
    side: Side, targets: Sequence[PlannedSharding | None], library: Library
) -> Iterator[Finding]:
    """Yields findings about leaves that are not sharded or kept in memory as planned."""
    pairs = ObjectPairs(targets, side.shardings)
    yield from _shardings(side, targets, pairs, getattr(FIXES[library], side.name))
    yield from _memory_kinds(side, targets, pairs, getattr(FIXES[library], side.name))


def _shardings(
    side: Side, targets: Sequence[PlannedSharding | None], pairs: ObjectPairs, fix: str
) -> Iterator[Finding]:
    words = _WORDS[side.name]

    def are_equal(target: PlannedSharding, sharding: Any, leaf: int) -> bool:
        if target.sharding == sharding:
            return True
        _check_fits(target, side, leaf)
        return is_same(target.sharding, sharding, len(side.shapes[leaf]))

    def texts(leaf: int) -> tuple[str, str]:
        _check_fits(targets[leaf], side, leaf)
        return sharding_shown(_sharding(targets[leaf])), sharding_shown(side.shardings[leaf])

    for (planned, actual), leaves in pairs.differences(are_equal, texts):
        budget = sum(side.bytes_of(leaf, _sharding(targets[leaf])) for leaf in leaves)
        size = sum(map(side.bytes_of, leaves))
        order = ", on the devices in another order," if planned == actual else ""
        message = (
            f"{counted(len(leaves), 'leaf')} planned {planned}, but the executable {words.verb} "
            f"{actual}{order} with {bytes_shown(size)} on each device instead of "
            f"{bytes_shown(budget)}: {words.cost}"
        )
        yield side.finding("error", words.kind, message, fix, leaves, bytes=size)


def _memory_kinds(
    side: Side, targets: Sequence[PlannedSharding | None], pairs: ObjectPairs, fix: str
) -> Iterator[Finding]:
    def are_equal(target: PlannedSharding, sharding: Any, _: int) -> bool:
        if target.memory_kind is None:
            return True
        kind = memory_apart(sharding)
        return kind is None if target.memory_kind == "device" else kind == target.memory_kind

    def texts(leaf: int) -> tuple[str | None, str | None]:
        target = targets[leaf]
        return target and target.memory_kind, side.shardings[leaf].memory_kind

    fix = f"{fix}; specs alone say nothing about memory"
    for (planned, actual), leaves in pairs.differences(are_equal, texts):
        size = sum(map(side.bytes_of, leaves))
        message = (
            f"{counted(len(leaves), 'leaf')} planned in {planned} memory, but the executable "
            f"{_WORDS[side.name].verb} them in {actual} memory: {bytes_shown(size)} on each device"
        )
        yield side.finding("error", "memory-kind", message, fix, leaves, bytes=size)


def dropped(
    side: Side, targets: Sequence[PlannedSharding | None], kept: Sequence[int]
) -> Iterator[Finding]:
    """Yields a finding about planned leaves that the executable does not have."""
    if len(kept) == len(targets):
        return
    lacking = sorted(set(range(len(targets))).difference(kept))
    # optax's adafactor has arrays of shape (1,) for the moments that a parameter does not need.
    if leaves := [leaf for leaf in lacking if targets[leaf] and side.shapes[leaf] != (1,)]:
        message = (
            f"{counted(len(leaves), 'leaf')} not used by the function: jit has dropped them, and "
            "the executable has no sharding to compare"
        )
        fix = "leave them out of the arguments; jit(keep_unused=True) keeps them"
        yield side.finding("info", "input", message, fix, leaves)


def placement_text(sharding: Any) -> str:
    """Formats a sharding with its memory kind, if that is not the default."""
    kind: Any = memory_apart(sharding)
    return in_memory(sharding_shown(sharding), kind)


def _sharding(target: PlannedSharding | None) -> Any:
    return target and target.sharding


def _check_fits(target: PlannedSharding | None, side: Side, leaf: int) -> None:
    assert target is not None
    shape = side.shapes[leaf]
    if len(getattr(target.sharding, "spec", ())) <= len(shape):
        with suppress(ValueError):
            target.sharding.shard_shape(shape)
            return
    raise ValueError(
        printable(
            f"{side.paths[leaf]}: {sharding_shown(target.sharding)} is planned for the shape "
            f"{shape}, and cannot cut it; give the specs of Plan.specs, which fit"
        )
    )
