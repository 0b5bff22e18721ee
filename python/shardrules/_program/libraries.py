"""Reads how a compiled function is called: what `jax.jit`, `flax.nnx.jit` and `filter_jit` keep.

`StoredProgram` stands for the `jax.stages.Compiled` that a child did not come to.

`flax.nnx.jit` splits modules into graph definitions and states, and returns those that the
function may have changed; `equinox.filter_jit` flattens arguments. Their private names are here
alone, also those by which a step of `equinox.filter_jit` is lowered for shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import version
from inspect import Signature
from itertools import accumulate, chain, pairwise
from typing import Any, Final

import numpy as np
from jax import Array, ShapeDtypeStruct, tree_util
from jax.sharding import PartitionSpec, Sharding
from jax.stages import Compiled

from shardrules._base.specs import is_partition_spec
from shardrules._base.text import counted, printable, shown
from shardrules._plan.plan import Plan
from shardrules._program.executable import Call, Library
from shardrules._program.hlo import check_hlo
from shardrules._program.memory import LiveRanges

PLANNED: Final = "a Plan, a tree of PartitionSpecs or shardings, or None for what is not looked at"
_EXPECTED: Final = "jax.jit(f).lower(...).compile()"


def call_of(compiled: Any, inputs: Any) -> Call:
    """Read how a compiled function is called.

    Args:
        compiled: What `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` have compiled.
        inputs: The plans of the arguments; equinox keeps no structure but theirs.

    Raises:
        TypeError: It is something else, or of a version of a library that has other private names.
        ValueError: The plans fit no arguments that equinox has flattened.
    """
    executable = getattr(compiled, "compiled", compiled)
    box = compiled.lowered if isinstance(compiled, StoredProgram) else compiled
    is_known = _package_of(box) in {"jax", *_LIBRARIES}  # a box may change the arguments
    if not isinstance(executable, Compiled | StoredProgram) or not is_known:
        raise TypeError(
            f"compiled is {shown(compiled)}; give a compiled function, {_EXPECTED}, or the same of "
            "flax.nnx.jit or equinox.filter_jit"
        )
    return call_behind(box, executable, inputs)


def call_behind(box: Any, inner: Any, inputs: Any) -> Call:
    """Read how a function is called, of what a library has lowered or compiled, and JAX in it."""
    library = _LIBRARIES.get(_package_of(box))
    if library is None:  # JAX's own
        infos, in_tree = tree_util.tree_flatten(inner.args_info)
        out_tree = inner.out_tree
        sides = (range(len(infos)), range(out_tree.num_leaves))
        return Call(inner, infos, in_tree, sides[0], out_tree, sides[1])
    name, read = library
    arguments, returned, changes = read(box, inner, inputs)
    in_leaves, in_tree = tree_util.tree_flatten(arguments)
    out_leaves, out_tree = tree_util.tree_flatten(returned)
    place_of = {number: place for place, number in enumerate(in_leaves)}
    updates = [(place_of[before], after) for before, after in changes if before in place_of]
    infos = tree_util.tree_leaves(inner.args_info)
    return Call(inner, infos, in_tree, in_leaves, out_tree, out_leaves, updates, name)


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def check_entries(plans: Any, count: int) -> None:
    """Check that `inputs` is a tuple, or a list: of entries for `count` arguments."""
    if isinstance(plans, tuple | list) and not is_partition_spec(plans):
        return
    is_one = isinstance(plans, Plan | PartitionSpec | Sharding)
    entries = ", ".join(["plan", *["None"] * (count - 1)]) + ("," if count == 1 else "")
    raise TypeError(
        f"inputs is {f'one {type(plans).__name__}' if is_one else shown(plans)}; give a tuple with "
        f"an entry for each positional argument, such as ({entries}): {PLANNED}"
    )


_Trees = tuple[Any, Any, Sequence[tuple[int, int]]]
"""Arguments and result as trees of leaf numbers; (input, output) of what changes in place."""


@contextmanager
def _reading(package: str) -> Iterator[None]:
    """Raise a TypeError that names the version of a library which has other private names."""
    try:
        yield
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise TypeError(
            printable(
                f"compiled is of {package} {version(package)}, whose compiled functions shardrules "
                f"cannot read ({type(error).__name__}: {error}); compile the function by jax.jit, "
                f"and give {_EXPECTED}"
            )
        ) from error


def _numbered_leaves(treedef: Any) -> Any:
    return treedef.unflatten(range(treedef.num_leaves))


# flax.nnx: modules are their states, and come back changed.


def _nnx_call(compiled: Any, inner: Any, _: Any) -> _Trees:
    with _reading("flax"):
        read = _nnx_of_trees if type(compiled).__name__.startswith("Simple") else _nnx_of_graphs
        return read(*map(_numbered_leaves, (inner.in_tree, inner.out_tree)))


def _nnx_of_graphs(args: Any, out: Any) -> _Trees:
    """Read a call for which modules are split into graphs and states."""
    extract = import_module("flax.nnx.extract")
    merge = import_module("flax.nnx.transforms.compilation")._jit_merge_fn
    args, (*states, returned) = (
        _with_states(extract.from_tree(tree, merge_fn=merge, is_inner=False))
        for tree in (args, out)
    )
    leaves = (tree_util.tree_flatten_with_path(tree)[0] for tree in (args, tuple(states)))
    return args, returned, _at_same_paths(*leaves)


def _nnx_of_trees(args: Any, out: Any) -> _Trees:
    """Read a call for which modules are trees of JAX; only changed variables come back."""
    extract, variable_type = import_module("flax.nnx.extract"), import_module("flax.nnx").Variable
    returned, updates = out
    nodes = tree_util.tree_flatten_with_path(
        extract.labeled(args=args[0], kwargs=args[1]),
        is_leaf=lambda node: isinstance(node, variable_type),
    )[0]
    before, after = (
        [(path, node.get_raw_value()) for path, node in pairs if isinstance(node, variable_type)]
        for pairs in (nodes, chain(*updates))
    )
    states = map(_with_states, map(extract.from_tree2, (args, returned)))
    return *states, _at_same_paths(before, after)


def _with_states(tree: Any) -> Any:
    """Replace modules by their states."""
    nnx = import_module("flax.nnx")

    def is_module(node: Any) -> bool:
        # A variable is a node of a graph as well.
        return nnx.graphlib.is_graph_node(node) and not isinstance(node, nnx.Variable)

    return tree_util.tree_map(
        lambda node: nnx.state(node) if is_module(node) else node, tree, is_leaf=is_module
    )


def _at_same_paths(before: Iterable[Any], after: Iterable[Any]) -> list[tuple[int, int]]:
    """Pair the leaf numbers that have the same path on both sides."""
    number_at = {tree_util.keystr(path): number for path, number in before}
    named = ((tree_util.keystr(path), number) for path, number in after)
    return [(number_at[name], number) for name, number in named if name in number_at]


# equinox: arguments are flat, with the structure of their plans.


def _equinox_call(compiled: Any, inner: Any, inputs: Any) -> _Trees:
    with _reading("equinox"):
        groups, _ = _numbered_leaves(inner.in_tree)
        _, returned, _ = _numbered_leaves(inner.out_tree)
        flat = {key: tree_util.tree_leaves(group[key]) for group in groups for key in group}
        first, rest, signature = flat["first"], flat["rest"], compiled.info[0]
    positional, keywords = _split_keywords(inputs, signature)
    names, count = sorted(keywords), len(positional)
    shapes = [info.shape for info in tree_util.tree_leaves(inner.args_info)]
    trees = [*_trees(positional[:1], first, shapes)]
    trees += _trees([*positional[1:], *map(keywords.get, names)], rest, shapes)
    return (tuple(trees[:count]), dict(zip(names, trees[count:], strict=True))), returned, ()


def _split_keywords(inputs: Any, signature: Signature) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Split plans into those of positional arguments and a dict of keyword-only ones.

    Those without default need no entry: they are there, and nobody looks at them.
    """
    parameters = signature.parameters.values()
    check_entries(
        inputs, sum(parameter.kind <= parameter.VAR_POSITIONAL for parameter in parameters)
    )
    needed = (parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    keywords: dict[str, Any] = {
        parameter.name: None for parameter in needed if parameter.default is parameter.empty
    }
    try:
        signature.bind(*inputs, **keywords)
    except TypeError as error:
        with suppress(TypeError, IndexError):
            keywords |= {**inputs[-1]}
            signature.bind(*inputs[:-1], **keywords)
            return inputs[:-1], keywords
        entries = counted(len(inputs), "entry")
        raise ValueError(f"inputs has {entries}, and the function takes others: {error}") from None
    return inputs, keywords


def _trees(
    plans: Sequence[Any], numbers: list[int], shapes: list[tuple[int, ...]]
) -> Iterator[Any]:
    """Yield each argument as a tree of its leaves' numbers, by the structure of its plan.

    What has no structure is an array each; or all the rest is of one, or of Nones side by side.
    """
    trees = [_planned_tree(plan) for plan in plans]
    loose = [place for place, tree in enumerate(trees) if tree is None]
    widths = [len(tree_util.tree_leaves(tree)) for tree in trees]
    rest = len(numbers) - sum(widths)
    nones = [place for place in loose if plans[place] is None]
    if rest == len(loose):
        for place in loose:
            widths[place] = 1
    elif len(loose) == 1 or (loose and loose == nones == [*range(loose[0], loose[-1] + 1)]):
        widths[loose[0]] = max(rest, 0)
    parts = [numbers[begin:end] for begin, end in pairwise(accumulate(widths, initial=0))]
    if sum(map(len, parts)) != len(numbers) or not all(
        getattr(leaf, "shape", None) in (None, shapes[number])
        for tree, part in zip(trees, parts, strict=True)
        for leaf, number in zip(tree_util.tree_leaves(tree), part, strict=False)
    ):
        raise ValueError(
            f"inputs: what is planned does not say which of {counted(len(numbers), 'array')} are "
            "of which argument, or has other shapes; equinox.filter_jit keeps no structure of "
            "arguments. Give each argument that has arrays a Plan of these, or a tree with a Plan "
            "or a spec for each, and () to one without arrays"
        )
    for tree, part in zip(trees, parts, strict=True):
        if tree is not None:
            yield tree_util.tree_unflatten(tree_util.tree_structure(tree), part)
        else:
            yield part[0] if len(part) == 1 else tuple(part)


def _planned_tree(plan: Any) -> Any:
    """Return a tree with a leaf for each array that is planned; None if the structure is open."""
    if plan is None or is_partition_spec(plan) or isinstance(plan, Sharding):
        return None
    return tree_util.tree_map(
        lambda node: node.abstract() if isinstance(node, Plan) else node, plan
    )


def is_filter_jit(step: Any) -> bool:
    """Return whether a step is what `equinox.filter_jit` makes."""
    return hasattr(step, "lower") and type(step).__module__.startswith("equinox.")


def lowered_by_equinox(
    step: Any,
    args: Sequence[Any],
    place: Callable[[Any], Any],
    lower: Callable[..., Any],
) -> Any:
    """Lower a step of `equinox.filter_jit` for shapes, which it takes for constants itself."""
    with _reading("equinox"):
        jit = import_module("equinox._jit")
        functions = (jit._preprocess, jit._postprocess)
        info = (step._signature, step._dynamic_fun, step._static_fun)
        is_donated = {"first": step.donate_first, "rest": step.donate_rest}
        jitted, split, wrap = step._cached, jit.hashable_partition, jit.Lowered
    bound = step._signature.bind(*args)
    leading = (*bound.args, None)  # equinox has this None at the end
    parts, static = {"fun": place(info[1])}, [info[2]]
    for name, tree in (("first", leading[0]), ("rest", (leading[1:], bound.kwargs))):
        parts[name], constants = split(tree, _is_array_or_shape)
        static.append(constants)
    groups: list[dict[str, Any]] = [{}, {}]
    for name, leaves in parts.items():
        groups[not is_donated.get(name, is_donated["rest"])][name] = leaves
    return wrap(lower(jitted, *groups, tuple(static)), (*info, *is_donated.values()), *functions)


def _is_array_or_shape(leaf: Any) -> bool:
    return isinstance(leaf, Array | ShapeDtypeStruct | np.ndarray | np.generic)


_LIBRARIES: Final[Mapping[str, tuple[Library, Callable[[Any, Any, Any], _Trees]]]] = {
    "flax": ("nnx", _nnx_call),
    "equinox": ("equinox", _equinox_call),
}
"""By the package of a compiled function: the library, and what reads its box, given that, JAX's own
in it, and the plans."""


class StoredProgram:
    """What is read of a `jax.stages.Compiled`, where XLA has written it before code.

    Args:
        lowered: JAX's own, or that of flax or equinox: structure, shapes and donation.
        inputs: The sharding of each leaf of the arguments; None of those that jit has dropped.
        outputs: The same of the results.
        text: The optimized module.
        peak: Bytes of the device's memory that the compiler assigns.
        live: What XLA writes of that memory.
    """

    def __init__(
        self,
        lowered: Any,
        inputs: list[Any],
        outputs: list[Any],
        text: str,
        *,
        peak: int,
        live: LiveRanges,
    ) -> None:
        check_hlo(text)
        inner: Any = inner_of(lowered)
        self.lowered = lowered
        self.in_tree, self.out_tree = inner.in_tree, inner.out_tree
        self.args_info, self.out_info = inner.args_info, inner.out_info
        self.input_shardings = self.in_tree.unflatten(inputs)
        self.output_shardings = self.out_tree.unflatten(outputs)
        self._text = text
        self.totals = live.totals(peak)
        self.live = live

    def as_text(self) -> str:
        """Return the optimized module."""
        return self._text


def inner_of(lowered: Any) -> Any:
    """Return JAX's own Lowered, also behind one of flax or equinox."""
    return getattr(lowered, "lowered", lowered)
