"""Reads a compiled function: inputs and outputs in its caller's order, its HLO and its memory.

`flax.nnx.jit` splits modules into graph definitions and states, and returns those that the
function may have changed; `equinox.filter_jit` flattens arguments. Their private names are read
here only, also those to lower a step of `equinox.filter_jit` for shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from inspect import Parameter
from itertools import accumulate, chain, islice, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jax import Array, ShapeDtypeStruct, tree_util
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled

from shardrules._base.dtypes import bits_of
from shardrules._base.jax_names import compiled_inputs, compiled_outputs
from shardrules._base.specs import is_partition_spec, spec_shown
from shardrules._base.text import counted, printable, shown
from shardrules._plan.align import key_text
from shardrules._plan.findings import Finding, FindingKind, Level, finding_of
from shardrules._plan.fold import fold_paths
from shardrules._plan.plan import Plan
from shardrules._program.dataflow import Value, output_values
from shardrules._program.hlo import Hlo, check_hlo
from shardrules._program.stored import StoredProgram

Library = Literal["jax", "nnx", "equinox"]


class Call(NamedTuple):
    """Compiled function as its caller knows it, with the executable's leaves behind it."""

    compiled: Any
    """A `jax.stages.Compiled`, or a `StoredProgram`."""
    in_tree: Any
    """Structure of (positional, keyword) arguments."""
    in_leaves: Sequence[int]
    """Position of each of its leaves among the executable's inputs."""
    out_tree: Any
    out_leaves: Sequence[int]
    updates: Sequence[tuple[int, int]] = ()
    """Leaves of arguments that the call changes in place: (place in `in_leaves`, output)."""
    library: Library = "jax"


class Side:
    """Leaves of the inputs, or of the outputs, of an executable.

    Args:
        name: "inputs" or "outputs".
        treedef: The structure: of inputs that of (positional, keyword) arguments.
        shardings: None for an argument that jit has dropped.
        leaves: Anything with shape and dtype.
        updated: Paths of the last outputs, which the structure lacks: arguments that the call
            changes in place.
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
        """Paths of the leaves, such as inputs/0/w or, of a keyword argument, inputs/batch."""
        numbers = self.treedef.unflatten(range(self.treedef.num_leaves))
        # Of inputs the first key tells positional from keyword arguments, whose keys are names.
        skipped = self.name == "inputs"
        paths = [
            "/".join([self.name, *map(key_text, keys[skipped:])])
            for keys, _ in tree_util.tree_flatten_with_path(numbers)[0]
        ]
        return paths + self._updated()

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
        mend: str = "",
    ) -> Finding:
        """Make a finding about leaves, with their paths folded."""
        patterns = tuple(fold_paths([self.paths[leaf] for leaf in leaves]))
        count = len(leaves)
        return finding_of(
            level, kind, message, fix, paths=patterns, leaves=count, bytes=bytes, mend=mend
        )


class Executable:
    """Compiled function in the order of its caller's arguments and results."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self._compiled: Any = call.compiled

    @cached_property
    def inputs(self) -> Side:
        """Arguments, with those that jit has dropped, since the function does not use them."""
        call = self.call
        shardings, leaves = (at(items, call.in_leaves) for items in self._arguments)
        return Side("inputs", call.in_tree, shardings, leaves)

    @cached_property
    def _arguments(self) -> tuple[list[Any], list[Any]]:
        return compiled_inputs(self._compiled)

    @cached_property
    def _results(self) -> tuple[list[Any], list[Any]]:
        return compiled_outputs(self._compiled)

    @cached_property
    def outputs(self) -> Side:
        """Results; behind them, the arguments that the call changes in place."""
        call = self.call
        shardings, leaves = (at(items, self._out_leaves) for items in self._results)

        def updated() -> list[str]:
            paths = self.inputs.paths
            return [paths[before].replace("inputs", "updates", 1) for before, _ in call.updates]

        return Side("outputs", call.out_tree, shardings, leaves, updated)

    @cached_property
    def donated(self) -> list[bool]:
        """True for each leaf of the inputs that is donated."""
        infos: list[Any] = tree_util.tree_leaves(self.call.compiled.args_info)
        return list(map(attrgetter("donated"), at(infos, self.call.in_leaves)))

    @cached_property
    def hlo(self) -> Hlo | None:
        """Optimized module; None where the backend does not show it."""
        text = self._compiled.as_text()
        if not text:
            return None
        check_hlo(text)
        return Hlo(text)

    @cached_property
    def mesh(self) -> Mesh | None:
        """Mesh of the first input or output that has one of devices."""
        for sharding in chain(self.inputs.shardings, self.outputs.shardings):
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                return sharding.mesh
        return None

    @cached_property
    def kept(self) -> list[int]:
        """Leaves of the inputs that jit has not dropped."""
        return _not_none(self.inputs.shardings)

    @cached_property
    def parameter_of(self) -> dict[int, int]:
        """Number of the module's parameter for each leaf of the inputs.

        Constants and tokens, which JAX passes as well, come first.
        """
        assert self.hlo is not None
        passed = _not_none(self._arguments[0])
        first = self.hlo[self.hlo.entry].counts[0] - len(passed)
        number_of = {leaf: first + number for number, leaf in enumerate(passed)}
        return {leaf: number_of[self.call.in_leaves[leaf]] for leaf in self.kept}

    @cached_property
    def leaf_of(self) -> dict[int, int]:
        """Leaf of the inputs for each of the module's parameters."""
        return {number: leaf for leaf, number in self.parameter_of.items()}

    @cached_property
    def sources(self) -> list[Value]:
        """Value that each leaf of the outputs is a copy of."""
        assert self.hlo is not None
        values = list(output_values(self.hlo))
        # Tokens, which JAX returns as well, come first.
        first = len(values) - len(self._results[1])
        return [values[first + leaf] for leaf in self._out_leaves]

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
    if isinstance(compiled, Compiled | StoredProgram):
        in_tree, out_tree = compiled.in_tree, compiled.out_tree
        sides = (range(in_tree.num_leaves), range(out_tree.num_leaves))
        return Call(compiled, in_tree, sides[0], out_tree, sides[1])
    library = type(compiled).__module__.partition(".")[0]
    inner: Any = getattr(compiled, "compiled", None)
    is_boxed = isinstance(inner, Compiled | StoredProgram)
    if library not in _READERS or not is_boxed:
        raise TypeError(
            f"compiled is {shown(compiled)}; give a compiled function, {_EXPECTED}, or the same of "
            "flax.nnx.jit or equinox.filter_jit"
        )
    return _READERS[library](compiled, inner, inputs)


def _call(
    inner: Compiled,
    arguments: Any,
    returned: Any,
    library: Library,
    changes: Iterator[tuple[int, int]],
) -> Call:
    """Make a call from trees of leaf numbers."""
    in_leaves, in_tree = tree_util.tree_flatten(arguments)
    out_leaves, out_tree = tree_util.tree_flatten(returned)
    place_of = {number: place for place, number in enumerate(in_leaves)}
    updates = [(place_of[before], after) for before, after in changes if before in place_of]
    return Call(inner, in_tree, in_leaves, out_tree, out_leaves, updates, library)


@contextmanager
def _reading(library: str) -> Iterator[None]:
    """Raise a TypeError that names the version of a library which has other private names."""
    try:
        yield
    except (AttributeError, ImportError, LookupError, TypeError, ValueError) as error:
        raise TypeError(
            printable(
                f"compiled is of {library} {version(library)}, whose compiled functions shardrules "
                f"cannot read ({type(error).__name__}: {error}); compile the function by jax.jit, "
                f"and give {_EXPECTED}"
            )
        ) from error


def _numbered_leaves(treedef: Any) -> Any:
    return treedef.unflatten(range(treedef.num_leaves))


def _nnx_call(compiled: Any, inner: Compiled, _: Any) -> Call:
    """Read a call of `flax.nnx.jit`: modules are their states, and come back changed."""
    read = _nnx_of_trees if type(compiled).__name__.startswith("Simple") else _nnx_of_graphs
    with _reading("flax"):
        arguments, returned, changes = read(
            _numbered_leaves(inner.in_tree), _numbered_leaves(inner.out_tree)
        )
        return _call(inner, arguments, returned, "nnx", changes)


def _nnx_of_graphs(args: Any, out: Any) -> tuple[Any, Any, Iterator[tuple[int, int]]]:
    """Return arguments, result and changes where modules are split into graphs and states."""
    extract = import_module("flax.nnx.extract")
    merge = import_module("flax.nnx.transforms.compilation")._jit_merge_fn
    args, (*after, returned) = (
        _with_states(extract.from_tree(tree, merge_fn=merge, is_inner=False))
        for tree in (args, out)
    )
    return args, returned, _at_same_paths(args, tuple(after))


def _nnx_of_trees(args: Any, out: Any) -> tuple[Any, Any, Iterator[tuple[int, int]]]:
    """Return the same where modules are trees of JAX, and only changed variables come back."""
    extract, variable_type = import_module("flax.nnx.extract"), import_module("flax.nnx").Variable
    before = extract.labeled(args=args[0], kwargs=args[1])
    returned, updates = out
    after = {
        tree_util.keystr(path): variable.get_raw_value()
        for group in updates
        for path, variable in group
    }
    paths, _ = tree_util.tree_flatten_with_path(
        before, is_leaf=lambda node: isinstance(node, variable_type)
    )
    changes = (
        (variable.get_raw_value(), after[tree_util.keystr(path)])
        for path, variable in paths
        if tree_util.keystr(path) in after
    )
    return *map(_with_states, map(extract.from_tree2, (args, returned))), changes


def _with_states(tree: Any) -> Any:
    """Replace modules by their states."""
    nnx = import_module("flax.nnx")

    def is_module(node: Any) -> bool:
        # A variable is a node of a graph as well.
        return nnx.graphlib.is_graph_node(node) and not isinstance(node, nnx.Variable)

    return tree_util.tree_map(
        lambda node: nnx.state(node) if is_module(node) else node, tree, is_leaf=is_module
    )


def _at_same_paths(before: Any, after: Any) -> Iterator[tuple[int, int]]:
    """Yield the leaves of two trees that have the same path."""
    leaves = dict(tree_util.tree_flatten_with_path(before)[0])
    for path, number in tree_util.tree_flatten_with_path(after)[0]:
        if path in leaves:
            yield leaves[path], number


class _FlatArgument(NamedTuple):
    """Plan of an argument whose structure equinox has not kept."""

    name: str
    is_planned: bool
    tree: Any = None
    """Tree with a leaf for each array of the argument; None if that is not known."""
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Shapes of a plan's arrays."""

    @property
    def treedef(self) -> Any:
        return tree_util.tree_structure(self.tree)


def _equinox_call(compiled: Any, inner: Compiled, inputs: Any) -> Call:
    """Read a call of `equinox.filter_jit`: arguments are flat, with the structure of plans."""
    with _reading("equinox"):
        groups, _ = _numbered_leaves(inner.in_tree)
        _, returned, _ = _numbered_leaves(inner.out_tree)
        flat = {key: tree_util.tree_leaves(group[key]) for group in groups for key in group}
        first, rest = flat["first"], flat["rest"]
        parameters = dict(compiled.info[0].parameters)
    positional, keywords = _split_keywords(inputs, parameters)
    count, names = len(positional), sorted(keywords)
    entries = [_call_entry(f"inputs[{i}]", plan) for i, plan in enumerate(positional)]
    entries += [_call_entry(f"inputs[{count}][{name!r}]", keywords[name]) for name in names]
    shapes = [tuple(info.shape) for info in tree_util.tree_leaves(inner.args_info)]
    begin = min(count, 1)
    trees = [*_trees(entries[:begin], first, shapes), *_trees(entries[begin:], rest, shapes)]
    arguments = (tuple(trees[:count]), dict(zip(names, trees[count:], strict=True)))
    return _call(inner, arguments, returned, "equinox", iter(()))


def is_filter_jit(step: Any) -> bool:
    """Return whether a step is what `equinox.filter_jit` makes."""
    return hasattr(step, "lower") and type(step).__module__.startswith("equinox.")


def lowered_by_equinox(step: Any, args: Sequence[Any], place: Callable[[Any], Any]) -> Any:
    """Lower a step of `equinox.filter_jit` for shapes, which it takes for constants itself."""
    with _reading("equinox"):
        jit = import_module("equinox._jit")
        functions = (jit._preprocess, jit._postprocess)
        info = (step._signature, step._dynamic_fun, step._static_fun)
        is_donated = {"first": step.donate_first, "rest": step.donate_rest}
        lower, split, wrap = step._cached.lower, jit.hashable_partition, jit.Lowered
    bound = step._signature.bind(*args)
    leading = (*bound.args, None)  # equinox has this None at the end
    parts, static = {"fun": place(info[1])}, [info[2]]
    for name, tree in (("first", leading[0]), ("rest", (leading[1:], bound.kwargs))):
        parts[name], constants = split(tree, _is_array_or_shape)
        static.append(constants)
    groups: list[dict[str, Any]] = [{}, {}]
    for name, leaves in parts.items():
        groups[not is_donated.get(name, is_donated["rest"])][name] = leaves
    return wrap(lower(*groups, tuple(static)), (*info, *is_donated.values()), *functions)


def _is_array_or_shape(leaf: Any) -> bool:
    return isinstance(leaf, Array | ShapeDtypeStruct | np.ndarray | np.generic)


def _split_keywords(
    inputs: Any, parameters: Mapping[str, Parameter]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Split plans into those of positional arguments and of keyword-only ones."""
    if not isinstance(inputs, tuple | list):
        raise TypeError(
            f"inputs is {shown(inputs)}; give a tuple with an entry for each positional argument"
        )
    kinds = [parameter.kind for parameter in parameters.values()]
    # Those that `**names` takes are one argument here.
    only = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    unplanned = dict.fromkeys(name for name, of in parameters.items() if of.kind in only)
    last = inputs[-1] if inputs else None
    keywords = (
        last if isinstance(last, Mapping) and last and unplanned.keys() >= last.keys() else {}
    )
    positional = inputs[:-1] if keywords else inputs
    defaults = [
        parameter.default is not Parameter.empty
        for parameter in parameters.values()
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    is_open = Parameter.VAR_POSITIONAL in kinds
    least = defaults.count(False)
    if len(positional) < least or (len(positional) > len(defaults) and not is_open):
        raise ValueError(
            f"inputs has {counted(len(positional), 'entry')} for positional arguments; the "
            f"function has {counted(len(defaults), 'positional argument')}, {least} of them "
            "without default"
        )
    return positional, {**unplanned, **keywords}


def _call_entry(name: str, planned: Any) -> _FlatArgument:
    if planned is None or is_partition_spec(planned) or isinstance(planned, Sharding):
        return _FlatArgument(name, planned is not None)
    if not isinstance(planned, Plan):
        return _FlatArgument(name, True, planned)
    shape_of = [planned.kinds[kind].shape for kind in planned.kind_of.tolist()]
    tree = tree_util.tree_map(
        lambda row: None if shape_of[row] is None else row, planned._leaves.tree
    )
    shapes = tuple(shape_of[row] or () for row in tree_util.tree_leaves(tree))
    return _FlatArgument(name, True, tree, shapes)


def _trees(
    entries: Sequence[_FlatArgument], numbers: list[int], shapes: list[tuple[int, ...]]
) -> Iterator[Any]:
    """Yield each argument as a tree of its leaves' numbers.

    Plans are recognized by the shapes of their arrays; those between them are of the others.
    """
    splits = list(islice(_splits(entries, [shapes[number] for number in numbers]), 2))
    if len(splits) != 1:
        names = ", ".join(entry.name for entry in entries) or "inputs"
        raise ValueError(
            printable(
                f"{names}: what is planned does not say which of "
                f"{counted(len(numbers), 'array')} are of which argument, or has other shapes; "
                "equinox.filter_jit keeps no structure of arguments. Give each argument that has "
                "arrays a Plan of these, or a tree with a spec for each"
            )
        )
    rest = iter(numbers)
    for entry, width in zip(entries, splits[0], strict=True):
        leaves = list(islice(rest, width))
        if entry.tree is not None:
            yield entry.treedef.unflatten(leaves)
        else:
            yield leaves[0] if width == 1 else tuple(leaves)


def _splits(
    entries: Sequence[_FlatArgument], shapes: list[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Yield the array counts of the entries, for each way in which plans fit the shapes."""
    first = next((i for i, entry in enumerate(entries) if entry.tree is not None), None)
    if first is None:
        if (widths := _loose_widths(entries, len(shapes))) is not None:
            yield widths
        return
    width, planned = entries[first].treedef.num_leaves, entries[first].shapes
    for before in range(len(shapes) - width + 1):
        loose = _loose_widths(entries[:first], before)
        end = before + width
        if loose is not None and planned in (None, tuple(shapes[before:end])):
            for after in _splits(entries[first + 1 :], shapes[end:]):
                yield (*loose, width, *after)


def _loose_widths(entries: Sequence[_FlatArgument], count: int) -> tuple[int, ...] | None:
    """Share arrays out among entries that do not say how many they have; None if unclear."""
    planned = [entry.is_planned for entry in entries]
    if count == len(entries):
        return (1,) * count
    if count == sum(planned):
        return tuple(map(int, planned))
    if len(entries) == 1 or (entries and not any(planned)):
        return (count, *[0] * (len(entries) - 1))
    return None


_READERS: Final[Mapping[str, Callable[[Any, Compiled, Any], Call]]] = {
    "flax": _nnx_call,
    "equinox": _equinox_call,
}
