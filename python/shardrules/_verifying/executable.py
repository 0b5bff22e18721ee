"""What is known of a compiled function: its inputs and outputs as lists, its HLO, its memory.

Costs some microseconds per leaf, and XLA's time for its text. Private names of JAX are read where
there is no public one in every version. Must not know about plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from shardrules._dtypes import bits_of
from shardrules._jax import compiled_inputs, compiled_outputs
from shardrules._specs import spec_shown
from shardrules._verifying.hlo import Hlo

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["Executable", "Side", "sharding_shown"]


class Side:
    """The inputs or the outputs of an executable, in the order of their leaves.

    Args:
        name: "inputs" or "outputs".
        treedef: The structure: of inputs that of (positional, keyword) arguments.
        shardings: Per leaf; None for an argument that jit has dropped.
        leaves: Per leaf, something that has its shape and dtype.
    """

    def __init__(
        self,
        name: Literal["inputs", "outputs"],
        treedef: Any,
        shardings: list[Any],
        leaves: list[Any],
    ) -> None:
        self.name = name
        self.treedef = treedef
        self.shardings = shardings
        self.leaves = leaves

    @cached_property
    def paths(self) -> list[str]:
        """Per leaf its path, such as inputs/0/w or, of a keyword argument, inputs/batch."""
        from jax import tree_util

        numbers = self.treedef.unflatten(range(len(self.leaves)))
        # Of inputs the first key tells positional from keyword arguments, whose keys are names.
        skipped = self.name == "inputs"
        return [
            "/".join([self.name, *map(_key_shown, keys[skipped:])])
            for keys, _ in tree_util.tree_flatten_with_path(numbers)[0]
        ]

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
    """A `jax.stages.Compiled`, read."""

    def __init__(self, compiled: Any) -> None:
        from jax import tree_util

        self._compiled = compiled
        infos, treedef = tree_util.tree_flatten(compiled.args_info)
        self._infos: list[Any] = infos
        self._in_tree: Any = treedef

    @cached_property
    def inputs(self) -> Side:
        """The arguments, with those that jit has dropped, since the function does not use them."""
        return Side("inputs", self._in_tree, *compiled_inputs(self._compiled))

    @cached_property
    def outputs(self) -> Side:
        """The results."""
        return Side("outputs", self._compiled.out_tree, *compiled_outputs(self._compiled))

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
        shardings = self.inputs.shardings
        if type(None) not in set(map(type, shardings)):
            return list(range(len(shardings)))
        return [i for i, one in enumerate(shardings) if one is not None]

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """By leaf of the inputs, the number of the module's parameter that it is.

        Constants and tokens, which JAX passes as well, come first.
        """
        assert self.hlo is not None
        first = self.hlo.counts[0] - len(self.kept)
        return {leaf: first + number for number, leaf in enumerate(self.kept)}

    @cached_property
    def aliased(self) -> dict[int, int]:
        """By leaf of the inputs, the leaf of the outputs that takes its memory."""
        assert self.hlo is not None
        first = self.hlo.counts[1] - len(self.outputs.leaves)
        outputs = {parameter: output - first for output, parameter in self.hlo.aliases.items()}
        of_leaf = self.parameter_of.items()
        return {leaf: outputs[number] for leaf, number in of_leaf if number in outputs}

    def _shardings(self) -> Iterator[Any]:
        yield from self.inputs.shardings
        yield from self.outputs.shardings


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
