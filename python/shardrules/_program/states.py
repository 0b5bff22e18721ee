"""Finds which outputs of an executable are the next states of its arguments.

An output stands for an argument, as its next state, if both have the same structure and shapes, and
further: the argument is donated; or the same plan or tree is given for both; or, as a guess, the
dtypes are the same too. `flax.nnx.jit` itself says which modules come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shardrules._base.specs import is_partition_spec
from shardrules._program.executable import Executable, at

Evidence = Literal["updated", "donated", "planned", "alike"]


class State(NamedTuple):
    """Leaves of the inputs, and as many of the outputs that stand for them."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    evidence: Evidence
    """Reason to take them for a state; "alike" is a guess."""


class _Subtree(NamedTuple):
    """Argument, or child of the output."""

    treedef: Any
    leaves: range
    plan: Any


def states(executable: Executable, inputs: Any, outputs: Any) -> list[State]:
    """Find the states of a step: the output as a whole, or else its children."""
    updated = list(_updated_state(executable))
    taken = {leaf for state in updated for leaf in state.inputs}
    plans = executable.inputs.plans_of(inputs)
    pairs = zip(executable.inputs.subtrees, plans, strict=True)
    subtrees = enumerate(_Subtree(*subtree, plan) for subtree, plan in pairs)
    arguments = {place: tree for place, tree in subtrees if taken.isdisjoint(tree.leaves)}
    side = executable.outputs
    output = _Subtree(side.treedef, range(side.treedef.num_leaves), outputs)
    if returned := _matched(executable, arguments, [output]):
        return updated + returned
    pairs = zip(side.subtrees, _state_children(outputs, side.treedef), strict=True)
    children = [_Subtree(*subtree, plan) for subtree, plan in pairs]
    return updated + _matched(executable, arguments, children)


def _updated_state(executable: Executable) -> Iterator[State]:
    """Yield the arguments that the call changes in place."""
    updates = executable.call.updates
    first = len(executable.outputs.leaves) - len(updates)
    output_of = {leaf: first + number for number, (leaf, _) in enumerate(updates)}
    for _, argument in executable.inputs.subtrees:
        if leaves := [leaf for leaf in argument if leaf in output_of]:
            yield State(leaves, [output_of[leaf] for leaf in leaves], "updated")


def _state_children(plans: Any, treedef: Any) -> Sequence[Any]:
    """List the plans of the output's children, as far as each has an entry of its own."""
    if isinstance(plans, Mapping):
        return [plans.get(key) for key in treedef.node_data()[1]]
    if isinstance(plans, tuple | list) and not is_partition_spec(plans):
        return plans
    return [None] * len(treedef.children())


def _matched(
    executable: Executable, arguments: Mapping[int, _Subtree], outputs: list[_Subtree]
) -> list[State]:
    """Match each output with the argument at the same place, or else the first that fits."""
    matches: list[State] = []
    rest = dict(arguments)
    for place, output in enumerate(outputs):
        for i in sorted(rest, key=lambda i: (i != place, i)):
            if evidence := _evidence(executable, rest[i], output):
                matches.append(State(rest.pop(i).leaves, output.leaves, evidence))
                break
    return matches


def _evidence(executable: Executable, argument: _Subtree, output: _Subtree) -> Evidence | None:
    """Say how we know that an output stands for an argument; None if it does not."""
    if not argument.leaves or argument.treedef != output.treedef:
        return None
    inputs, outputs = executable.inputs, executable.outputs
    if at(inputs.shapes, argument.leaves) != at(outputs.shapes, output.leaves):
        return None
    # The structure of an array alone says nothing.
    is_tree = argument.treedef.num_nodes > 1
    has_dtypes = at(inputs.dtypes, argument.leaves) == at(outputs.dtypes, output.leaves)
    if (is_tree or has_dtypes) and any(at(executable.donated, argument.leaves)):
        return "donated"
    if is_tree and argument.plan is not None and _are_same(argument.plan, output.plan):
        return "planned"
    return "alike" if is_tree and has_dtypes else None


def _are_same(first: Any, second: Any) -> bool:
    """Say whether the same plan or tree is given twice, or containers of the same ones."""
    if first is second:
        return True
    if type(first) is not type(second) or not isinstance(first, tuple | list | dict):
        return False
    keys = list(first) if isinstance(first, dict) else range(len(first))
    others = list(second) if isinstance(second, dict) else range(len(second))
    return bool(keys) and keys == others and all(_are_same(first[k], second[k]) for k in keys)
