"""Findings about states: what goes in and comes out, and what is donated.

An output stands for an argument if both have the same structure and shapes, and further: the
argument is donated; or the same plan or tree is given for both; or, less surely, the dtypes are
the same too. `flax.nnx.jit` says itself which modules come back. Donation is read from
`Compiled.args_info`, its effect from input_output_alias in the HLO. Costs a comparison of
structures per argument and output. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._specs import is_partition_spec
from shardrules._text import bytes_shown, counted
from shardrules._verify.dataflow import is_made_from
from shardrules._verify.placements import (
    PLACING,
    ObjectPairs,
    finding_of,
    is_same,
    placement_text,
    together,
)

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding, Level
    from shardrules._verify.executable import Executable, Side

Evidence = Literal["updated", "donated", "planned", "alike"]
_SAID: Final = {
    "updated": ("a module, which comes back from the call", "the next step"),
    "donated": ("a donated state", "the next step"),
    "planned": ("a state, for which the same is planned on both sides", "the next step"),
    "alike": (
        "an argument that a result has the structure, shapes and dtypes of",
        "if that is passed back, the next call",
    ),
}
"""By what tells that something is a state: what it is called, and when it matters."""


class State(NamedTuple):
    """Leaves of the inputs, and as many of the outputs that stand for them."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    evidence: Evidence
    """What tells so: of likeness alone nobody has said it."""


class _Part(NamedTuple):
    """An argument, or a child of the output."""

    treedef: Any
    leaves: range
    given: Any
    """What is planned for it."""


def states(executable: Executable, given_inputs: Any, given_outputs: Any) -> list[State]:
    """The states of a step: of the output as a whole, or else of its children."""
    updated = _updated(executable)
    taken = {leaf for state in updated for leaf in state.inputs}
    arguments = {
        place: part
        for place, part in enumerate(_arguments(executable.inputs, given_inputs))
        if taken.isdisjoint(part.leaves)
    }
    return updated + _returned(executable, arguments, given_outputs)


def _updated(executable: Executable) -> list[State]:
    """The arguments that the call changes in place."""
    updates = executable.call.updates
    first = len(executable.outputs.leaves) - len(updates)
    output_of = {leaf: first + number for number, (leaf, _) in enumerate(updates)}
    parts = ([leaf for leaf in part if leaf in output_of] for part in executable.inputs.parts)
    return [State(part, [output_of[leaf] for leaf in part], "updated") for part in parts if part]


def _returned(
    executable: Executable, arguments: Mapping[int, _Part], given_outputs: Any
) -> list[State]:
    """The states that the function returns: all of its result, or its children."""
    outputs = executable.outputs
    whole = _Part(outputs.treedef, range(outputs.treedef.num_leaves), given_outputs)
    if found := _matched(executable, arguments, [whole]):
        return found
    entries = _children(given_outputs, outputs.treedef)
    pairs = zip(outputs.subtrees, entries, strict=True)
    return _matched(executable, arguments, [_Part(*subtree, given) for subtree, given in pairs])


def _children(given: Any, treedef: Any) -> Sequence[Any]:
    """What is planned for the children of the output, as far as each has an entry of its own."""
    if isinstance(given, Mapping):
        return [given.get(key) for key in treedef.node_data()[1]]
    if isinstance(given, tuple | list) and not is_partition_spec(given):
        return given
    return [None] * len(treedef.children())


def changed(executable: Executable, found: Sequence[State]) -> Iterator[Finding]:
    """States that come out otherwise than they go in."""
    for state in found:
        yield from _resharded(executable, state)
        yield from _of_other_dtype(executable, state)


def undonated(executable: Executable, found: Sequence[State]) -> Iterator[Finding]:
    """Leaves that are donated, and whose memory no output takes."""
    side = executable.inputs
    if not any(executable.donated):
        return
    donated = [leaf for leaf in executable.kept if executable.donated[leaf]]
    if executable.hlo is None:
        yield finding_of(
            "warning",
            "donation",
            f"{counted(len(donated), 'leaf')} donated, but this backend does not show the text of "
            "executables: whether outputs take their memory is not known",
            "compare memory_analysis().alias_size_in_bytes with their bytes",
            side=side,
            leaves=donated,
        )
        return
    if executable.hlo.alias_count == len(donated):
        return
    lost = [leaf for leaf in donated if leaf not in executable.aliased]
    of_states = {leaf for state in found for leaf in state.inputs}
    # equinox donates all arguments, the batch as well, or all but the first.
    for is_state in (True, False) if executable.call.library != "equinox" else (True,):
        leaves = [leaf for leaf in lost if (leaf in of_states) == is_state]
        if leaves:
            held = sum(map(side.bytes_of, leaves))
            yield _not_aliased(side, leaves, held, is_state=is_state)


def not_donated(executable: Executable, found: Sequence[State], large: int) -> Iterator[Finding]:
    """States that are large and not donated: the old one stays beside the new one."""
    side = executable.inputs
    for evidence, (what, _) in _SAID.items():
        states = [state for state in found if state.evidence == evidence]
        leaves = [leaf for state in states for leaf in _kept_twice(executable, state, large)]
        held = sum(map(side.bytes_of, leaves))
        if leaves and held >= large:
            yield finding_of(
                "warning",
                "donation",
                f"{counted(len(leaves), 'leaf')} of {what}: not donated, so the old and the new "
                f"ones take {bytes_shown(held)} each on each device",
                _how_to_donate(executable, leaves),
                side=side,
                leaves=leaves,
                bytes=held,
            )


def _kept_twice(executable: Executable, state: State, large: int) -> list[int]:
    """The leaves of a state that are not donated, and that the new ones are made from."""
    side = executable.inputs
    pairs = [
        (before, after)
        for before, after in zip(state.inputs, state.outputs, strict=True)
        if side.shardings[before] is not None and not executable.donated[before]
    ]
    if executable.hlo is None or sum(side.bytes_of(before) for before, _ in pairs) < large:
        return []
    if state.evidence == "updated":
        return [before for before, _ in pairs]
    # What is only like an argument, such as its gradient, is not made from it.
    sources, number_of = executable.sources, executable.parameter_of
    return [
        before
        for before, after in pairs
        if is_made_from(executable.hlo, sources[after], number_of[before])
    ]


def _how_to_donate(executable: Executable, leaves: Sequence[int]) -> str:
    library = executable.call.library
    if library == "equinox":
        return (
            'give filter_jit donate="all", or donate="all-except-first" with all that is used '
            "again in the first argument"
        )
    side = executable.inputs
    count = len(side.parts) - len(side.keywords)
    chosen = set(leaves)
    places = [i for i, part in enumerate(side.parts) if not chosen.isdisjoint(part)]
    numbers = [i for i in places if i < count]
    names = [side.keywords[i - count] for i in places if i >= count]
    asked: list[tuple[str, list[Any]]] = [("donate_argnums", numbers), ("donate_argnames", names)]
    options = [
        f"{option}={tuple(values) if len(values) > 1 else values[0]!r}"
        for option, values in asked
        if values
    ]
    fix = f"give {library}.jit {' and '.join(options)}, if the old ones are not used again"
    if library == "nnx":
        fix += "; a function that only reads the module needs graph_updates=False instead"
    return fix


def _not_aliased(side: Side, leaves: list[int], held: int, *, is_state: bool) -> Finding:
    what = f"{counted(len(leaves), 'leaf')} donated, but no output takes their memory"
    if is_state:
        return finding_of(
            "error",
            "donation",
            f"{what}: the old and the new ones take {bytes_shown(held)} each on each device",
            "let each come out with the shape, dtype and sharding with which it goes in; one that "
            "does not may leave another without a place",
            side=side,
            leaves=leaves,
            bytes=held,
        )
    return finding_of(
        "warning",
        "donation",
        f"{what}: {bytes_shown(held)} on each device; none is like them",
        "do not donate them",
        side=side,
        leaves=leaves,
        bytes=held,
    )


def _arguments(side: Side, given: Sequence[Any]) -> list[_Part]:
    keywords = side.keywords
    count = len(side.subtrees) - len(keywords)
    named = given[count] if len(given) > count else {}
    entries = [*given[:count], *map(named.get, keywords)]
    return [_Part(*subtree, one) for subtree, one in zip(side.subtrees, entries, strict=True)]


def _matched(
    executable: Executable, arguments: Mapping[int, _Part], outputs: list[_Part]
) -> list[State]:
    """For each output the argument that it stands for: that at the same place, or the first."""
    found: list[State] = []
    left = dict(arguments)
    for place, output in enumerate(outputs):
        for i in sorted(left, key=lambda i: (i != place, i)):
            if state := _state(executable, left[i], output):
                found.append(state)
                del left[i]
                break
    return found


def _state(executable: Executable, argument: _Part, output: _Part) -> State | None:
    """The state if an output stands for an argument."""
    if not argument.leaves or argument.treedef != output.treedef:
        return None
    inputs, outputs = executable.inputs, executable.outputs
    before, after = slice_of(argument.leaves), slice_of(output.leaves)
    if inputs.shapes[before] != outputs.shapes[after]:
        return None
    # The structure of an array alone says nothing.
    is_tree = argument.treedef.num_nodes > 1
    has_dtypes = inputs.dtypes[before] == outputs.dtypes[after]
    is_donated = any(executable.donated[before])
    evidence: Evidence
    if is_donated and (is_tree or has_dtypes):
        evidence = "donated"
    elif is_tree and argument.given is not None and argument.given is output.given:
        evidence = "planned"
    elif is_tree and has_dtypes:
        evidence = "alike"
    else:
        return None
    return State(argument.leaves, output.leaves, evidence)


def slice_of(leaves: range) -> slice:
    """The slice of a list with these elements."""
    return slice(leaves.start, leaves.stop)


def _among(every: list[Any], leaves: Sequence[int]) -> list[Any]:
    """Those of all leaves that are of a state."""
    if isinstance(leaves, range):
        return every[slice_of(leaves)]
    return [every[leaf] for leaf in leaves]


def _resharded(executable: Executable, state: State) -> Iterator[Finding]:
    inputs, outputs = executable.inputs, executable.outputs
    before = _among(inputs.shardings, state.inputs)
    after = _among(outputs.shardings, state.outputs)
    # The same objects, as a rule.
    if before == after:
        return

    def alike(one: Any, other: Any, row: int) -> bool:
        if one == other:
            return True
        rank = len(inputs.shapes[state.inputs[row]])
        return is_same(one, other, rank) and one.memory_kind == other.memory_kind

    def texts(i: int) -> tuple[str, str]:
        return placement_text(before[i]), placement_text(after[i])

    level: Level = "warning" if state.evidence == "alike" else "error"
    what, when = _SAID[state.evidence]
    for rows in together(ObjectPairs(before, after).unlike(alike), texts):
        was, becomes = texts(rows[0])
        leaves = [state.inputs[i] for i in rows]
        moved = sum(map(inputs.bytes_of, leaves))
        yield finding_of(
            level,
            "fixed-point",
            f"{counted(len(rows), 'leaf')} of {what}: in as {was}, out as {becomes}: {when} "
            f"compiles again, or moves them back, {bytes_shown(moved)} to each device",
            PLACING[executable.call.library].states,
            side=inputs,
            leaves=leaves,
            bytes=moved,
        )


def _of_other_dtype(executable: Executable, state: State) -> Iterator[Finding]:
    inputs, outputs = executable.inputs, executable.outputs
    before = _among(inputs.dtypes, state.inputs)
    after = _among(outputs.dtypes, state.outputs)
    if before == after:
        return
    what, when = _SAID[state.evidence]
    rows = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    for some in together([[row] for row in rows], lambda i: (str(before[i]), str(after[i]))):
        leaves = [state.inputs[i] for i in some]
        yield finding_of(
            "error",
            "fixed-point",
            f"{counted(len(leaves), 'leaf')} of {what}: in as {before[some[0]]}, out as "
            f"{after[some[0]]}: {when} compiles again",
            "cast the new state to the dtypes of the old one",
            side=inputs,
            leaves=leaves,
            bytes=sum(map(inputs.bytes_of, leaves)),
        )
