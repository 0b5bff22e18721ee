"""Compares the shardings, memory kinds and donation of inputs, outputs and states with the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardrules._base.rule_specs import in_memory_shown
from shardrules._base.text import bytes_shown, counted, printable
from shardrules._place.mesh import memory_apart
from shardrules._plan.findings import Finding, Level, VerifyKind
from shardrules._program.executable import (
    Evidence,
    Executable,
    Library,
    Side,
    State,
    at,
    sharding_shown,
)
from shardrules._program.inputs import PlannedSharding

_NNX: Final = "in_shardings=nnx.StateSharding(plan.shardings())"
_PLACING: Final[dict[Library, tuple[str, str]]] = {
    "jax": ("in_shardings=plan.shardings()", "out_shardings=plan.shardings()"),
    "nnx": (_NNX, _NNX),
    "equinox": ("", ""),
}
"""Arguments of each library's jit that place what it takes, and what it returns; "" for none."""
_SIDE_WORDS: Final[dict[str, tuple[VerifyKind, str, str]]] = {
    "inputs": ("input", "takes", "it refuses arrays as planned, and jit compiles again for them"),
    "outputs": ("output", "returns", "what needs them as planned moves them first"),
}
_STATE_WORDS: Final[dict[Evidence, tuple[str, str]]] = {
    "updated": ("a module, which comes back from the call", "the next step"),
    "donated": ("a donated state", "the next step"),
    "planned": ("a state, for which the same is planned on both sides", "the next step"),
    "alike": (
        "an argument that a result has the structure, shapes and dtypes of",
        "if that is passed back, the next call",
    ),
}
"""Names a state by its evidence, and says when it matters."""
_SMALL: Final = 2**16
"""Bytes below which constants of a function need no word."""
_RETURNED: Final = 0.01
"""Share of the states' bytes, above which other results are told."""
_Texts = tuple[Any, Any]
_Rows = npt.NDArray[np.int64]


def nothing_planned(targets: Sequence[PlannedSharding | None]) -> Iterator[Finding]:
    """Yield a finding if no argument and no result is planned, so that nothing is compared."""
    if targets and not any(targets):
        message = "nothing is compared: no argument and no result is planned"
        fix = (
            "give plans: shardrules.prove(step, plan, batch) in the place of plan.abstract(), or "
            "inputs=(plan, None) and outputs=plan; or a budget, to compare bytes alone"
        )
        yield Finding("warning", "input", message, fix)


def placements(
    side: Side, targets: Sequence[PlannedSharding | None], library: Library
) -> Iterator[Finding]:
    """Yield findings about leaves that are not sharded or kept in memory as planned."""
    if not any(targets):
        return
    unlike: dict[_Texts, list[int]] = defaultdict(list)
    elsewhere: dict[_Texts, list[int]] = defaultdict(list)
    for target, sharding, rows in _pairs(targets, side.shardings):
        planned, shape = target.sharding, side.shapes[rows[0]]
        if planned != sharding:
            _check_fits(planned, side.paths[rows[0]], shape)
            if not is_same(planned, sharding, len(shape)):
                unlike[sharding_shown(planned), sharding_shown(sharding)] += rows.tolist()
        memory = memory_apart(sharding) or "device"
        if target.memory_kind not in (None, memory):
            elsewhere[target.memory_kind, sharding.memory_kind] += rows.tolist()
    kind, verb, cost = _SIDE_WORDS[side.name]
    fix = _placed_by(library, "inputs" if side.name == "inputs" else "the result")
    for (planned, actual), leaves in unlike.items():
        planned_size = sum(side.bytes_of(i, t.sharding) for i in leaves if (t := targets[i]))
        size = sum(map(side.bytes_of, leaves))
        order = ", on the devices in another order," if planned == actual else ""
        instead = "" if size == planned_size else f" instead of {bytes_shown(planned_size)}"
        message = (
            f"{counted(len(leaves), 'leaf')} planned {planned}, but the executable {verb} "
            f"{actual}{order} with {bytes_shown(size)} on each device{instead}: {cost}"
        )
        yield side.finding("error", kind, message, fix, sorted(leaves), bytes=size)
    fix += "; specs alone say nothing about memory"
    for (planned, actual), leaves in elsewhere.items():
        size = sum(map(side.bytes_of, leaves))
        message = (
            f"{counted(len(leaves), 'leaf')} planned in {planned} memory, but the executable "
            f"{verb} them in {actual} memory: {bytes_shown(size)} on each device"
        )
        yield side.finding("error", "memory-kind", message, fix, sorted(leaves), bytes=size)


def is_same(first: Any, second: Any, rank: int) -> bool:
    """Say whether two shardings shard arrays of this rank equally, in whatever memory."""
    if first == second:
        return True
    first, second = first.with_memory_kind(None), second.with_memory_kind(None)
    return bool(first == second or first.is_equivalent_to(second, rank))


def _pairs(firsts: Sequence[Any], seconds: Sequence[Any]) -> Iterator[tuple[Any, Any, _Rows]]:
    """Yield pairs of objects without None, most of which are the same few, and where they are."""
    # By address: `id` is slow once anybody, such as filelock, listens to audit events.
    sides = (np.fromiter(side, object, len(side)).tobytes() for side in (firsts, seconds))
    addresses = [np.frombuffer(side, np.uintp) for side in sides]
    order = np.lexsort(addresses)
    changes = sum(np.diff(numbers[order]) != 0 for numbers in addresses)
    groups = np.split(order, np.flatnonzero(changes) + 1) if firsts else []
    for rows in sorted(groups, key=lambda rows: int(rows[0])):
        first, second = firsts[rows[0]], seconds[rows[0]]
        if first is not None and second is not None:
            yield first, second, rows


def _placed_by(library: Library, what: str) -> str:
    """Write how "inputs", or what is returned, are placed as planned."""
    taken, returned = _PLACING[library]
    if what == "inputs":
        fix = (
            "lower the function with arrays or shapes that are sharded as planned (plan.abstract())"
        )
        return f"{fix}, or give {library}.jit {taken}" if taken else fix
    inside = f"constrain {what} inside the function"
    if returned:
        return f"give {library}.jit {returned}, or {inside}"
    return f"{inside}, as by jax.lax.with_sharding_constraint(arrays, plan.shardings())"


def _check_fits(planned: Any, path: str, shape: tuple[int, ...]) -> None:
    if len(getattr(planned, "spec", ())) <= len(shape):
        with suppress(ValueError):
            planned.shard_shape(shape)
            return
    raise ValueError(
        printable(
            f"{path}: {sharding_shown(planned)} is planned for the shape {shape}, and cannot cut "
            "it; give the specs of Plan.specs, which fit"
        )
    )


def without_sharding(
    executable: Executable,
    targets: Sequence[PlannedSharding | None],
    unplaced: Sequence[Sequence[bool]],
    large: int,
) -> Iterator[Finding]:
    """Yield a finding about arrays that nothing places, so that each device has them whole.

    A warning if they are large, or nothing beside what is planned is sharded, as a batch is.
    """
    side = executable.inputs
    pairs = zip(side.subtrees, unplaced, strict=False)
    whole = [
        leaf
        for (_, leaves), flags in pairs
        if len(leaves) == len(flags)
        for leaf, is_unplaced in zip(leaves, flags, strict=True)
        if is_unplaced and side.shapes[leaf] and targets[leaf] is None and _is_whole(side, leaf)
    ]
    if not whole:
        return
    others = (leaf for leaf, target in enumerate(targets) if target is None)
    is_sharded = any(side.shardings[leaf] and not _is_whole(side, leaf) for leaf in others)
    size = sum(map(side.bytes_of, whole))
    message = (
        f"{counted(len(whole), 'array')} given without a sharding: compiled as whole on each "
        f"device, {bytes_shown(size)}"
    )
    fix = (
        "say how each is sharded, with P() for one that is meant to be whole: jax.ShapeDtypeStruct("
        "x.shape, x.dtype, sharding=NamedSharding(plan.mesh, P("
        f"{next(iter(side.shardings[whole[0]].mesh.shape))!r})))"
    )
    level: Level = "info" if is_sharded and size < large else "warning"
    yield side.finding(level, "input", message, fix, whole, bytes=size)


def _is_whole(side: Side, leaf: int) -> bool:
    sharding = side.shardings[leaf]
    is_on_mesh = getattr(sharding, "mesh", None) is not None
    return is_on_mesh and sharding.num_devices > 1 and sharding.is_fully_replicated


def dropped(
    side: Side, targets: Sequence[PlannedSharding | None], kept: Sequence[int]
) -> Iterator[Finding]:
    """Yield a finding about planned leaves that the executable does not have."""
    absent = sorted({*range(len(targets))}.difference(kept)) if len(kept) < len(targets) else []
    # optax's adafactor has arrays of shape (1,) for the moments that a parameter does not need.
    if leaves := [leaf for leaf in absent if targets[leaf] and side.shapes[leaf] != (1,)]:
        message = (
            f"{counted(len(leaves), 'leaf')} not used by the function: jit has dropped them, and "
            "the executable has no sharding to compare"
        )
        fix = "leave them out of the arguments; jit(keep_unused=True) keeps them"
        yield side.finding("info", "input", message, fix, leaves)


def closed_over(executable: Executable, large: int) -> Iterator[Finding]:
    """Yield a finding about large arrays that the function has without being given them."""
    entry = executable.hlo[executable.hlo.entry]
    lines = list(entry.of_opcode("constant"))
    if entry.parameter_count > len(executable.kept):
        lines += [line for line in entry.parameters if line.parameter not in executable.leaf_of]
    size = sum(shape.bytes for line in lines for shape in line.results)
    if size >= max(large, _SMALL):
        message = (
            f"the function closes over arrays of {bytes_shown(size)} on each device, which no plan "
            "and no sharding of an argument decides"
        )
        fix = "give them as arguments, which are planned"
        yield Finding("warning", "input", message, fix, bytes=size)


def large_results(
    side: Side, targets: Sequence[PlannedSharding | None], states: Sequence[State], large: int
) -> Iterator[Finding]:
    """Yield a finding about large results of a step that are neither its state nor planned."""
    if not states or all(targets):
        return
    of_states = {leaf for state in states for leaf in state.outputs}
    others = [i for i, target in enumerate(targets) if target is None and i not in of_states]
    least = max(large, _RETURNED * sum(map(side.bytes_of, of_states)))
    if leaves := [leaf for leaf in others if side.bytes_of(leaf) >= least]:
        size = sum(map(side.bytes_of, leaves))
        message = (
            f"{counted(len(leaves), 'leaf')} of the result, {bytes_shown(size)} on each device, "
            "not planned and no new state: the memory is taken until the caller drops them"
        )
        fix = "return what is needed of them, such as a sum; or plan them"
        yield side.finding("info", "output", message, fix, leaves, bytes=size)


def changed(executable: Executable, states: Sequence[State]) -> Iterator[Finding]:
    """Yield findings about states that come out with another sharding, memory or dtype."""
    side, outputs = executable.inputs, executable.outputs
    placing_fix = _placed_by(executable.call.library, "the arrays of the new state")
    casting_fix = "cast the new state to the dtypes of the old one"
    for state in states:
        changes: dict[tuple[bool, Any, Any], list[int]] = defaultdict(list)
        before, after = at(side.shardings, state.inputs), at(outputs.shardings, state.outputs)
        for old, new, rows in _pairs(before, after) if before != after else ():
            rank = len(side.shapes[state.inputs[rows[0]]])
            if not is_same(old, new, rank) or old.memory_kind != new.memory_kind:
                key = True, _with_memory(old), _with_memory(new)
                changes[key] += [state.inputs[i] for i in rows]
        before, after = at(side.leaves, state.inputs), at(outputs.leaves, state.outputs)
        pairs = zip(state.inputs, before, after, strict=True) if before != after else ()
        for leaf, old, new in pairs:
            if old.dtype != new.dtype:
                changes[False, old.dtype, new.dtype].append(leaf)
        name, when = _STATE_WORDS[state.evidence]
        for (is_moved, old, new), leaves in changes.items():
            size = sum(map(side.bytes_of, leaves))
            cost = f", or moves them back, {bytes_shown(size)} to each device" if is_moved else ""
            message = (
                f"{counted(len(leaves), 'leaf')} of {name}: in as {old}, out as {new}: {when} "
                f"compiles again{cost}"
            )
            fix = placing_fix if is_moved else casting_fix
            level: Level = "warning" if is_moved and state.evidence == "alike" else "error"
            yield side.finding(level, "fixed-point", message, fix, sorted(leaves), bytes=size)


def _with_memory(sharding: Any) -> str:
    """Format a sharding with its memory kind, if that is not the default."""
    kind: Any = memory_apart(sharding)
    return in_memory_shown(sharding_shown(sharding), kind)


def undonated(executable: Executable, states: Sequence[State]) -> Iterator[Finding]:
    """Yield findings about donated leaves whose memory no output takes."""
    side, hlo = executable.inputs, executable.hlo
    donated, kept = executable.donated, executable.kept
    count = sum(donated if len(kept) == len(donated) else map(donated.__getitem__, kept))
    if hlo.alias_count == count:
        return
    aliased, number_of = set(hlo.aliases.values()), executable.parameter_of
    wasted = [leaf for leaf in kept if donated[leaf] and number_of[leaf] not in aliased]
    of_states = {leaf for state in states for leaf in state.inputs}
    others = [leaf for leaf in wasted if leaf not in of_states]
    if executable.call.library == "equinox":
        others = []  # it donates all arguments, the batch as well, or all but the first
    rows: tuple[tuple[Level, list[int], str, str], ...] = (
        (
            "error",
            [leaf for leaf in wasted if leaf in of_states],
            "the old and the new ones take {} each on each device",
            "let each come out with the shape, dtype and sharding with which it goes in; one that "
            "does not may leave another without a place",
        ),
        ("warning", others, "{} on each device; none is like them", "do not donate them"),
    )
    for level, leaves, cost, fix in rows:
        if leaves:
            size = sum(map(side.bytes_of, leaves))
            message = (
                f"{counted(len(leaves), 'leaf')} donated, but no output takes their memory: "
                f"{cost.format(bytes_shown(size))}"
            )
            yield side.finding(level, "donation", message, fix, leaves, bytes=size)


def not_donated(executable: Executable, states: Sequence[State], large: int) -> Iterator[Finding]:
    """Yield findings about states whose old arrays stay in memory beside the new ones.

    What only looks like a state is told if it is large, and so is one that comes back unchanged.
    """
    side = executable.inputs
    for evidence, (name, _) in _STATE_WORDS.items():
        copies = [
            state
            for state in states
            if state.evidence == evidence and not all(at(executable.donated, state.inputs))
        ]
        is_certain = evidence != "alike" and any(_is_changed(executable, state) for state in copies)
        least = 1 if is_certain else large
        leaves = [leaf for state in copies for leaf in _kept_twice(executable, state, least)]
        size = sum(map(side.bytes_of, leaves))
        if leaves and size >= least:
            message = (
                f"{counted(len(leaves), 'leaf')} of {name}: not donated, so the old and the new "
                f"ones take {bytes_shown(size)} each on each device"
            )
            fix = _donation(executable, leaves)
            level: Level = "warning" if size >= large else "info"
            yield side.finding(level, "donation", message, fix, leaves, bytes=size)


def _is_changed(executable: Executable, state: State) -> bool:
    """Say whether an array of a state comes out otherwise than it goes in."""
    entry = executable.hlo[executable.hlo.entry]
    results = entry.root.operands if entry.root.opcode == "tuple" else ()
    if results and {line.name for line in entry.parameters}.issuperset(results):
        return False  # without the graph of many arguments
    parameters = frozenset(executable.values.parameters)
    sources = (executable.facts.source_of(executable.results[i]) for i in state.outputs)
    return not all(source in parameters for source in sources)


def _kept_twice(executable: Executable, state: State, least: int) -> list[int]:
    """List the leaves of a state that are not donated, and that the new ones are made from."""
    side = executable.inputs
    pairs = [
        (before, after)
        for before, after in zip(state.inputs, state.outputs, strict=True)
        if side.shardings[before] is not None and not executable.donated[before]
    ]
    if sum(side.bytes_of(before) for before, _ in pairs) < least:
        return []
    # What is only like an argument, such as its gradient, is not made from it.
    parameters, number_of = executable.values.parameters, executable.parameter_of
    return [
        before
        for before, after in pairs
        if state.evidence == "updated"
        or executable.results[after] in executable.facts.results([parameters[number_of[before]]])
    ]


def _donation(executable: Executable, leaves: Sequence[int]) -> str:
    """Write how leaves are donated."""
    library, side, changes = executable.call.library, executable.inputs, set(leaves)
    if library == "equinox":
        return (
            'give filter_jit donate="all", or donate="all-except-first" with all that is used '
            "again in the first argument"
        )
    places = [i for i, (_, part) in enumerate(side.subtrees) if not changes.isdisjoint(part)]
    count = len(side.subtrees) - len(side.keywords)
    options: dict[str, list[Any]] = {
        "donate_argnums": [i for i in places if i < count],
        "donate_argnames": [side.keywords[i - count] for i in places if i >= count],
    }
    words = " and ".join(
        f"{name}={tuple(donated) if len(donated) > 1 else donated[0]!r}"
        for name, donated in options.items()
        if donated
    )
    fix = f"give {library}.jit {words}, if the old ones are not used again"
    if library == "nnx":
        fix += "; a function that only reads the module needs graph_updates=False instead"
    return fix
