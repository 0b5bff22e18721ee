"""Reads a compiled function: inputs and outputs in its caller's order, its HLO, and its states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import is_partition_spec, spec_shown
from shardrules._place.mesh import AnyMesh, has_devices
from shardrules._plan.findings import Finding, FindingKind, Level
from shardrules._plan.fold import fold_paths
from shardrules._plan.kinds import axes_used
from shardrules._program.facts import Facts, Variation
from shardrules._program.hlo import Hlo, check_hlo
from shardrules._program.jax_names import argument_shardings, argument_values, compiled_outputs
from shardrules._program.values import Values

Library = Literal["jax", "nnx", "equinox"]


class Call(NamedTuple):
    """Compiled function as its caller knows it, with the executable's leaves behind it."""

    compiled: Any
    """A `jax.stages.Compiled`, or a `StoredProgram`."""
    infos: list[Any]
    """Leaves of its `args_info`, which JAX flattens anew at each question."""
    in_tree: Any
    """Structure of (positional, keyword) arguments."""
    in_leaves: Sequence[int]
    """Position of each of its leaves among the executable's inputs."""
    out_tree: Any
    out_leaves: Sequence[int]
    updates: Sequence[tuple[int, int]] = ()
    """Leaves of arguments that the call changes in place: (place in `in_leaves`, output)."""
    library: Library = "jax"

    def paths(self, name: Literal["inputs", "outputs"]) -> list[str]:
        """Return the paths of leaves, such as inputs/0/w or, of a keyword argument, inputs/batch.

        Those of outputs end with the arguments that the call changes in place.
        """
        treedef, updated = self.in_tree, list[str]()
        if name == "outputs":
            paths, treedef = self.paths("inputs") if self.updates else [], self.out_tree
            updated = [paths[place].replace("inputs", "updates", 1) for place, _ in self.updates]
        numbers = treedef.unflatten(range(treedef.num_leaves))
        # Of inputs the first key tells positional from keyword arguments, whose keys are names.
        skipped = name == "inputs"
        return [
            "/".join([name, *map(_key_text, keys[skipped:])])
            for keys, _ in tree_util.tree_flatten_with_path(numbers)[0]
        ] + updated


def _key_text(key: Any) -> str:
    """Return a key of JAX's paths as text: of a dict, a sequence, a field, or a flattened index."""
    names = (name for name in ("key", "idx", "name") if hasattr(key, name))
    return str(next((getattr(key, name) for name in names), key))


class Side:
    """Leaves of the inputs, or of the outputs, of an executable.

    Args:
        name: "inputs" or "outputs".
        call: The call; its structure of inputs is that of (positional, keyword) arguments.
        shardings: None for an argument that jit has dropped.
        leaves: Anything with shape and dtype.
    """

    def __init__(
        self,
        name: Literal["inputs", "outputs"],
        call: Call,
        shardings: list[Any],
        leaves: list[Any],
    ) -> None:
        self.name: Literal["inputs", "outputs"] = name
        self.treedef = call.in_tree if name == "inputs" else call.out_tree
        self.shardings = shardings
        self.leaves = leaves
        self._call = call

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the leaves."""
        return self._call.paths(self.name)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return list(map(attrgetter("shape"), self.leaves))

    @cached_property
    def dtypes(self) -> list[Any]:
        return list(map(attrgetter("dtype"), self.leaves))

    @cached_property
    def subtrees(self) -> list[tuple[Any, range]]:
        """Structure and leaves of each argument, keywords last; or of each child of the output."""
        children = self._children
        if self.name == "inputs":
            children = [child for arguments in children for child in arguments.children()]
        ends = list(accumulate((child.num_leaves for child in children), initial=0))
        return [
            (child, range(*bounds)) for child, bounds in zip(children, pairwise(ends), strict=True)
        ]

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Names of the keyword arguments, which are the last subtrees of inputs."""
        return tuple(self._children[1].node_data()[1])

    def plans_of(self, plans: Sequence[Any]) -> list[Any]:
        """List the plan of each argument; behind positional ones, there may be a dict."""
        count = len(self.subtrees) - len(self.keywords)
        by_name = plans[count] if len(plans) > count else {}
        return [*plans[:count], *map(by_name.get, self.keywords)]

    @cached_property
    def _children(self) -> list[Any]:
        children: list[Any] = self.treedef.children()  # which JAX copies at each call
        return children

    def bytes_of(self, leaf: int, sharding: Any = None) -> int:
        """Compute the bytes of a leaf on a device, with its sharding or another one."""
        shape: tuple[int, ...] = (sharding or self.shardings[leaf]).shard_shape(self.shapes[leaf])
        return -(-prod(shape) * bits_of(self.dtypes[leaf]) // 8)

    def finding(
        self,
        level: Level,
        kind: FindingKind,
        message: str,
        fix: str,
        leaves: Sequence[int],
        *,
        bytes: int = 0,
    ) -> Finding:
        """Make a finding about leaves, with their paths folded."""
        patterns = tuple(fold_paths([self.paths[leaf] for leaf in leaves]))
        count = len(leaves)
        return Finding(level, kind, message, fix, paths=patterns, leaves=count, bytes=bytes)


class Executable:
    """Compiled function in the order of its caller's arguments and results."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._compiled: Any = call.compiled

    @cached_property
    def inputs(self) -> Side:
        """Arguments, with those that jit has dropped, since the function does not use them."""
        call = self.call
        shardings, leaves = (at(items, call.in_leaves) for items in self._arguments[:2])
        return Side("inputs", call, shardings, leaves)

    @cached_property
    def _arguments(self) -> tuple[list[Any], list[Any], list[bool]]:
        """Shardings, None of what is dropped; values of a shape and dtype; which are donated."""
        infos = self.call.infos
        shardings = argument_shardings(self._compiled, len(infos))
        return shardings, argument_values(infos), list(map(attrgetter("donated"), infos))

    @cached_property
    def _results(self) -> tuple[list[Any], list[Any]]:
        return compiled_outputs(self._compiled)

    @cached_property
    def outputs(self) -> Side:
        """Results; behind them, the arguments that the call changes in place."""
        call = self.call
        shardings, leaves = (at(items, self._out_leaves) for items in self._results)
        return Side("outputs", call, shardings, leaves)

    @cached_property
    def donated(self) -> list[bool]:
        """True for each leaf of the inputs that is donated."""
        return at(self._arguments[2], self.call.in_leaves)

    @cached_property
    def hlo(self) -> Hlo:
        """Optimized module.

        Raises:
            ValueError: The backend does not show it.
        """
        text = self._compiled.as_text()
        if not text:
            raise ValueError(
                "this backend does not show the text of executables, so what they send is not "
                "known; compile the same function for another backend, such as CPU devices"
            )
        check_hlo(text)
        return Hlo(text)

    @cached_property
    def mesh(self) -> AnyMesh | None:
        """Mesh of the first input or output that has one, with devices if one of them has any."""

        def meshes() -> Iterator[AnyMesh]:
            shardings = chain(self.inputs.shardings, self.outputs.shardings)
            return (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))

        return next(filter(has_devices, meshes()), next(meshes(), None))

    @property
    def device_kind(self) -> str:
        """Kind of its devices; "cpu" of a mesh without devices, for which XLA for CPU is asked."""
        if self.mesh is None or not has_devices(self.mesh):
            return "cpu"
        return str(self.mesh.devices.flat[0].device_kind)

    @cached_property
    def kept(self) -> list[int]:
        """Leaves of the inputs that jit has not dropped."""
        return _not_none(self.inputs.shardings)

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """Number of the module's parameter for each leaf of the inputs.

        Constants and tokens, which JAX passes as well, come first.
        """
        passed = _not_none(self._arguments[0])
        first = self.hlo[self.hlo.entry].parameter_count - len(passed)
        number_of = {leaf: first + number for number, leaf in enumerate(passed)}
        return {leaf: number_of[self.call.in_leaves[leaf]] for leaf in self.kept}

    @cached_property
    def leaf_of(self) -> dict[int, int]:
        """Leaf of the inputs for each of the module's parameters."""
        return {number: leaf for leaf, number in self.parameter_of.items()}

    @cached_property
    def values(self) -> Values:
        """Graph of the module's values."""
        return Values(self.hlo)

    @cached_property
    def facts(self) -> Facts:
        """What is known of the module's values."""
        return Facts(self.values)

    @cached_property
    def variation(self) -> Variation:
        """Axes of the mesh along which values differ between devices."""
        assert self.mesh is not None
        axes = {number: self.axes_of(leaf) for number, leaf in self.leaf_of.items()}
        return Variation(self.values, dict(self.mesh.shape), axes)

    def axes_of(self, leaf: int) -> frozenset[str]:
        """Return the axes of the mesh that shard a leaf of the inputs."""
        spec = getattr(self.inputs.shardings[leaf], "spec", None)
        if spec is None or self.mesh is None:
            return frozenset()
        return axes_used(spec, self.mesh.shape)

    @cached_property
    def results(self) -> list[int]:
        """Node of the graph that each leaf of the outputs is."""
        outputs = self.values.outputs
        # Tokens, which JAX returns as well, come first.
        first = len(outputs) - len(self._results[1])
        return [outputs[first + leaf] for leaf in self._out_leaves]

    @cached_property
    def _out_leaves(self) -> Sequence[int]:
        """Position of each leaf of the outputs among the executable's."""
        call = self.call
        updates = [after for _, after in call.updates]
        return [*call.out_leaves, *updates] if updates else call.out_leaves


def at(items: list[Any], leaves: Sequence[int]) -> list[Any]:
    """Return the items of these leaves, in their order."""
    if isinstance(leaves, range):
        return items[leaves.start : leaves.stop]
    return [items[leaf] for leaf in leaves]


def _not_none(shardings: list[Any]) -> list[int]:
    if type(None) not in set(map(type, shardings)):
        return list(range(len(shardings)))
    return [i for i, sharding in enumerate(shardings) if sharding is not None]


def sharding_shown(sharding: Any) -> str:
    """Format a sharding for a message: as its spec if it has one."""
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else spec_shown(spec)


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
    in_place = list(_states_in_place(executable))
    leaves = {leaf for state in in_place for leaf in state.inputs}
    plans = executable.inputs.plans_of(inputs)
    pairs = zip(executable.inputs.subtrees, plans, strict=True)
    subtrees = enumerate(_Subtree(*subtree, plan) for subtree, plan in pairs)
    arguments = {
        place: tree for place, tree in subtrees if not leaves or leaves.isdisjoint(tree.leaves)
    }
    side = executable.outputs
    output = _Subtree(side.treedef, range(side.treedef.num_leaves), outputs)
    if returned := _matched(executable, arguments, [output]):
        return in_place + returned
    pairs = zip(side.subtrees, _state_children(outputs, side.treedef), strict=True)
    children = [_Subtree(*subtree, plan) for subtree, plan in pairs]
    return in_place + _matched(executable, arguments, children)


def _states_in_place(executable: Executable) -> Iterator[State]:
    """Yield the arguments that the call changes in place."""
    updates = executable.call.updates
    if not updates:
        return
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
    # JAX has the same value for arrays of a shape and dtype, and compares it in no time.
    has_dtypes = at(inputs.leaves, argument.leaves) == at(outputs.leaves, output.leaves)
    if not has_dtypes:
        if at(inputs.shapes, argument.leaves) != at(outputs.shapes, output.leaves):
            return None
        has_dtypes = at(inputs.dtypes, argument.leaves) == at(outputs.dtypes, output.leaves)
    # The structure of an array alone says nothing.
    is_tree = argument.treedef.num_nodes > 1
    if (is_tree or has_dtypes) and any(at(executable.donated, argument.leaves)):
        return "donated"
    if is_tree and argument.plan is not None and _are_same(argument.plan, output.plan):
        return "planned"
    return "alike" if is_tree and has_dtypes else None


def _are_same(first: Any, second: Any) -> bool:
    """Say whether the same plan or tree is given twice, or containers of the same ones."""
    (parts, structure), (twins, of_twins) = map(tree_util.tree_flatten, (first, second))
    treedef: Any = structure
    is_alike = bool(parts) and treedef == of_twins
    return is_alike and all(part is twin for part, twin in zip(parts, twins, strict=True))
