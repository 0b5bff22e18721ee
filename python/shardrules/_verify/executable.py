"""What is known of a compiled function: its inputs and outputs as lists, its HLO, its memory.

Costs some microseconds per leaf, and XLA's time for its text. Private names of JAX are read where
there is no public one in every version. Must not know about plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from shardrules._dtypes import bits_of
from shardrules._jax import compiled_inputs, compiled_outputs
from shardrules._specs import spec_shown
from shardrules._verify.dataflow import Value, returned
from shardrules._verify.hlo import Hlo

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._verify.calls import Call


class Side:
    """The inputs or the outputs of an executable, in the order of their leaves.

    Args:
        name: "inputs" or "outputs".
        treedef: The structure: of inputs that of (positional, keyword) arguments.
        shardings: Per leaf; None for an argument that jit has dropped.
        leaves: Per leaf, something that has its shape and dtype.
        updated: Of outputs, the paths of the last leaves, which the structure does not have: those
            of arguments that the call changes in place.
    """

    def __init__(
        self,
        name: Literal["inputs", "outputs"],
        treedef: Any,
        shardings: list[Any],
        leaves: list[Any],
        updated: Callable[[], list[str]] = list,
    ) -> None:
        self.name = name
        self.treedef = treedef
        self.shardings = shardings
        self.leaves = leaves
        self._updated = updated

    @cached_property
    def paths(self) -> list[str]:
        """Per leaf its path, such as inputs/0/w or, of a keyword argument, inputs/batch."""
        from jax import tree_util

        numbers = self.treedef.unflatten(range(self.treedef.num_leaves))
        # Of inputs the first key tells positional from keyword arguments, whose keys are names.
        skipped = self.name == "inputs"
        own = [
            "/".join([self.name, *map(_key_shown, keys[skipped:])])
            for keys, _ in tree_util.tree_flatten_with_path(numbers)[0]
        ]
        return own + self._updated()

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Per leaf its shape."""
        return list(map(attrgetter("shape"), self.leaves))

    @cached_property
    def dtypes(self) -> list[Any]:
        """Per leaf its dtype."""
        return list(map(attrgetter("dtype"), self.leaves))

    @cached_property
    def parts(self) -> list[range]:
        """The leaves of each argument, those of keywords last; of outputs those of each child."""
        return [leaves for _, leaves in self.subtrees]

    @cached_property
    def subtrees(self) -> list[tuple[Any, range]]:
        """The structure and the leaves of each argument, or of each child of the output."""
        children = self._children
        if self.name == "inputs":
            children = [one for of_calls in children for one in of_calls.children()]
        ends = list(accumulate((one.num_leaves for one in children), initial=0))
        return [(one, range(*ends)) for one, ends in zip(children, pairwise(ends), strict=True)]

    @cached_property
    def keywords(self) -> tuple[str, ...]:
        """Of inputs, the names of the keyword arguments, which are the last subtrees."""
        return tuple(self._children[1].node_data()[1])

    @cached_property
    def _children(self) -> list[Any]:
        """Of the structure; JAX copies it for them."""
        children: list[Any] = self.treedef.children()
        return children

    def bytes_of(self, leaf: int, sharding: Any = None) -> int:
        """Bytes of a leaf on a device, with its own sharding or another one."""
        shape = (sharding or self.shardings[leaf]).shard_shape(self.shapes[leaf])
        count = bits_of(self.dtypes[leaf])
        for size in shape:
            count *= size
        return -(-count // 8)


class Executable:
    """A compiled function, read in the order of its caller's arguments and results."""

    def __init__(self, call: Call) -> None:
        from jax import tree_util

        self.call = call
        self._compiled: Any = call.compiled
        infos: list[Any] = tree_util.tree_leaves(call.compiled.args_info)
        self._infos = _at(infos, call.in_leaves)

    @cached_property
    def inputs(self) -> Side:
        """The arguments, with those that jit has dropped, since the function does not use them."""
        shardings, values = self._arguments
        leaves = _at(values, self.call.in_leaves)
        return Side("inputs", self.call.in_tree, _at(shardings, self.call.in_leaves), leaves)

    @cached_property
    def _arguments(self) -> tuple[list[Any], list[Any]]:
        return compiled_inputs(self._compiled)

    @cached_property
    def _results(self) -> tuple[list[Any], list[Any]]:
        return compiled_outputs(self._compiled)

    @cached_property
    def outputs(self) -> Side:
        """The results; behind them, what arguments become that the call changes in place."""
        call = self.call
        shardings, leaves = (_at(every, self._out_leaves) for every in self._results)

        def updated() -> list[str]:
            paths = self.inputs.paths
            return [paths[before].replace("inputs", "updates", 1) for before, _ in call.updates]

        return Side("outputs", call.out_tree, shardings, leaves, updated)

    @cached_property
    def donated(self) -> list[bool]:
        """Per leaf of the inputs, whether it is donated."""
        return list(map(attrgetter("donated"), self._infos))

    @cached_property
    def hlo(self) -> Hlo | None:
        """The optimized module; None where the backend does not show it."""
        text = self._compiled.as_text()
        return Hlo(text) if text else None

    @cached_property
    def memory(self) -> Any:
        """XLA's numbers of bytes; None where the backend does not have them."""
        return self._compiled.memory_analysis()

    @cached_property
    def mesh(self) -> Mesh | None:
        """The mesh of the first input or output that has one of devices."""
        from jax.sharding import Mesh, NamedSharding

        for sharding in self._shardings():
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                return sharding.mesh
        return None

    @cached_property
    def kept(self) -> list[int]:
        """The leaves of the inputs that jit has not dropped."""
        return _not_none(self.inputs.shardings)

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """By leaf of the inputs, the number of the module's parameter that it is.

        Constants and tokens, which JAX passes as well, come first.
        """
        assert self.hlo is not None
        passed = _not_none(self._arguments[0])
        first = self.hlo.counts[0] - len(passed)
        number_of = {leaf: first + number for number, leaf in enumerate(passed)}
        return {leaf: number_of[self.call.in_leaves[leaf]] for leaf in self.kept}

    @cached_property
    def aliased(self) -> set[int]:
        """The leaves of the inputs whose memory an output takes."""
        assert self.hlo is not None
        numbers = set(self.hlo.aliases.values())
        return {leaf for leaf, number in self.parameter_of.items() if number in numbers}

    @cached_property
    def sources(self) -> list[Value]:
        """Per leaf of the outputs, the value that it is a copy of."""
        assert self.hlo is not None
        values = list(returned(self.hlo))
        # Tokens, which JAX returns as well, come first.
        first = len(values) - len(self._results[1])
        return [values[first + leaf] for leaf in self._out_leaves]

    @cached_property
    def _out_leaves(self) -> list[int]:
        """Per leaf of the outputs, which of the executable's it is."""
        return [*self.call.out_leaves, *(after for _, after in self.call.updates)]

    def _shardings(self) -> Iterator[Any]:
        yield from self.inputs.shardings
        yield from self.outputs.shardings


def _at(every: list[Any], leaves: Sequence[int]) -> list[Any]:
    """Those of all leaves that a caller knows, in the caller's order."""
    return every if leaves == range(len(every)) else [every[leaf] for leaf in leaves]


def _not_none(shardings: list[Any]) -> list[int]:
    """The places at which there is a sharding."""
    if type(None) not in set(map(type, shardings)):
        return list(range(len(shardings)))
    return [i for i, sharding in enumerate(shardings) if sharding is not None]


def sharding_shown(sharding: Any) -> str:
    """A sharding for a message: its spec if it has one."""
    spec = getattr(sharding, "spec", None)
    return type(sharding).__name__ if spec is None else spec_shown(spec)


def _key_shown(key: Any) -> str:
    """A key of a path of JAX: of a dict, a sequence, an attribute, or a flattened index."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
