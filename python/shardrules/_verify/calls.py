"""How a compiled function is called: its arguments and results as trees of leaf numbers.

`jax.jit` compiles a function as it is called. What wraps it has another signature: `flax.nnx.jit`
splits modules into graph definitions and states, and returns those that the function may have
changed; `equinox.filter_jit` hands on flat tuples of arrays. Private names of these libraries are
read here and nowhere else. Costs a walk over the arguments. Must not know about HLO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from inspect import Parameter
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._plan.plan import Plan
from shardrules._specs import is_partition_spec
from shardrules._text import counted, printable, shown

if TYPE_CHECKING:
    from jax.stages import Compiled

_EXPECTED: Final = "jax.jit(f).lower(...).compile()"
Library = Literal["jax", "nnx", "equinox"]


class Call(NamedTuple):
    """A compiled function as its caller knows it, with the executable's leaves behind it."""

    compiled: Compiled
    in_tree: Any
    """The structure of (positional, keyword) arguments."""
    in_leaves: Sequence[int]
    """Per leaf of it, which of the executable's inputs it is."""
    out_tree: Any
    """The structure of what is returned."""
    out_leaves: Sequence[int]
    """Per leaf of it, which of the executable's outputs it is."""
    updates: Sequence[tuple[int, int]] = ()
    """Leaves of arguments that the call changes in place: (place in `in_leaves`, output)."""
    library: Library = "jax"
    """Whose function compiles it."""


def call_of(compiled: Any, inputs: Any) -> Call:
    """How a compiled function is called.

    Args:
        compiled: What `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` have compiled.
        inputs: What is planned for the arguments; equinox keeps no structure but this.

    Raises:
        TypeError: It is something else, or of a version of a library that has other private names.
        ValueError: The plans fit no arguments that equinox has flattened.
    """
    from jax.stages import Compiled

    if isinstance(compiled, Compiled):
        in_tree: Any = compiled.in_tree
        out_tree: Any = compiled.out_tree
        return Call(
            compiled, in_tree, range(in_tree.num_leaves), out_tree, range(out_tree.num_leaves)
        )
    library = type(compiled).__module__.partition(".")[0]
    inner = getattr(compiled, "compiled", None)
    if library not in _READERS or not isinstance(inner, Compiled):
        raise TypeError(
            f"compiled is {shown(compiled)}; give a compiled function, {_EXPECTED}, or the same of "
            "flax.nnx.jit or equinox.filter_jit"
        )
    return _READERS[library](compiled, inner, inputs)


@contextmanager
def _reading(library: str) -> Iterator[None]:
    """Raises a TypeError that names the version of a library which has other private names."""
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


# flax.nnx


def _nnx_call(compiled: Any, inner: Compiled, _: Any) -> Call:
    """Of `flax.nnx.jit`: modules are their states, and come back changed."""
    from jax import tree_util

    read = _nnx_of_trees if type(compiled).__name__.startswith("Simple") else _nnx_of_graphs
    with _reading("flax"):
        args, returned, changed = read(_numbered(inner.in_tree), _numbered(inner.out_tree))
        in_leaves, in_tree = tree_util.tree_flatten(args)
        out_leaves, out_tree = tree_util.tree_flatten(returned)
        place_of = {number: place for place, number in enumerate(in_leaves)}
        updates = [(place_of[before], after) for before, after in changed if before in place_of]
    return Call(inner, in_tree, in_leaves, out_tree, out_leaves, updates, "nnx")


def _nnx_of_graphs(args: Any, out: Any) -> tuple[Any, Any, Iterator[tuple[int, int]]]:
    """Arguments, result and changes where each module is split into a graph and its states."""
    extract = import_module("flax.nnx.extract")
    merge = import_module("flax.nnx.transforms.compilation")._jit_merge_fn
    args, (*after, returned) = (
        _with_states(extract.from_tree(tree, merge_fn=merge, is_inner=False))
        for tree in (args, out)
    )
    return args, returned, _at_same_paths(args, tuple(after))


def _nnx_of_trees(args: Any, out: Any) -> tuple[Any, Any, Iterator[tuple[int, int]]]:
    """The same where modules are trees of JAX, and only changed variables come back."""
    from jax import tree_util

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
    changed = (
        (variable.get_raw_value(), after[tree_util.keystr(path)])
        for path, variable in paths
        if tree_util.keystr(path) in after
    )
    return *map(_with_states, map(extract.from_tree2, (args, returned))), changed


def _with_states(tree: Any) -> Any:
    """A tree whose modules are replaced by their states."""
    from jax import tree_util

    nnx = import_module("flax.nnx")

    def is_module(node: Any) -> bool:
        # A variable is a node of a graph as well.
        return nnx.graphlib.is_graph_node(node) and not isinstance(node, nnx.Variable)

    return tree_util.tree_map(
        lambda node: nnx.state(node) if is_module(node) else node, tree, is_leaf=is_module
    )


def _at_same_paths(before: Any, after: Any) -> Iterator[tuple[int, int]]:
    """(leaf, leaf) of two trees with the same path."""
    from jax import tree_util

    leaves = dict(tree_util.tree_flatten_with_path(before)[0])
    for path, number in tree_util.tree_flatten_with_path(after)[0]:
        if path in leaves:
            yield leaves[path], number


# equinox


class _Entry(NamedTuple):
    """What is planned for an argument whose structure equinox has not kept."""

    at: str
    is_planned: bool
    tree: Any
    """A tree with a leaf for each array of the argument; None if that is not known."""
    shapes: tuple[tuple[int, ...], ...] | None
    """The shapes of a plan's arrays."""

    @property
    def treedef(self) -> Any:
        from jax import tree_util

        return tree_util.tree_structure(self.tree)


def _equinox_call(compiled: Any, inner: Compiled, inputs: Any) -> Call:
    """Of `equinox.filter_jit`: arguments are flat tuples, whose structure the plans have."""
    from jax import tree_util

    with _reading("equinox"):
        (groups, _), (_, returned, _) = _numbered(inner.in_tree), _numbered(inner.out_tree)
        flat = {key: tree_util.tree_leaves(group[key]) for group in groups for key in group}
        first, rest = flat["first"], flat["rest"]
        parameters = dict(compiled.info[0].parameters)
    positional, keywords = _split_keywords(inputs, parameters)
    count, names = len(positional), sorted(keywords)
    entries = [_entry(f"inputs[{i}]", entry) for i, entry in enumerate(positional)]
    entries += [_entry(f"inputs[{count}][{name!r}]", keywords[name]) for name in names]
    shapes = [tuple(info.shape) for info in tree_util.tree_leaves(inner.args_info)]
    begin = min(count, 1)
    arguments = [
        *_shared_out(entries[:begin], first, shapes),
        *_shared_out(entries[begin:], rest, shapes),
    ]
    called = (tuple(arguments[:count]), dict(zip(names, arguments[count:], strict=True)))
    in_leaves, in_tree = tree_util.tree_flatten(called)
    out_leaves, out_tree = tree_util.tree_flatten(returned)
    return Call(inner, in_tree, in_leaves, out_tree, out_leaves, (), "equinox")


def _split_keywords(
    inputs: Any, parameters: Mapping[str, Parameter]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What is planned for positional arguments, and for those that are keywords only."""
    if not isinstance(inputs, tuple | list):
        raise TypeError(
            f"inputs is {shown(inputs)}; give a tuple with an entry for each positional argument"
        )
    kinds = [parameter.kind for parameter in parameters.values()]
    # Those that `**names` takes are one argument here.
    only = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
    unplanned = dict.fromkeys(
        name for name, kind in zip(parameters, kinds, strict=True) if kind in only
    )
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


def _entry(at: str, planned: Any) -> _Entry:
    from jax import tree_util
    from jax.sharding import Sharding

    if planned is None or is_partition_spec(planned) or isinstance(planned, Sharding):
        return _Entry(at, planned is not None, None, None)
    if not isinstance(planned, Plan):
        return _Entry(at, True, planned, None)
    columns = planned._columns
    shape_of = [columns.kinds[kind].shape for kind in columns.kind_of.tolist()]
    tree = tree_util.tree_map(
        lambda row: None if shape_of[row] is None else row, columns.leaves.tree
    )
    shapes = tuple(shape_of[row] or () for row in tree_util.tree_leaves(tree))
    return _Entry(at, True, tree, shapes)


def _shared_out(
    entries: Sequence[_Entry], numbers: list[int], shapes: list[tuple[int, ...]]
) -> Iterator[Any]:
    """Each argument as a tree of its leaves' numbers.

    Plans are found by the shapes of their arrays; what is between them is of the others.

    Args:
        entries: What is planned for the arguments.
        numbers: Of their leaves.
        shapes: By number.
    """
    ways = list(islice(_ways(entries, [shapes[number] for number in numbers]), 2))
    if len(ways) != 1:
        listed = ", ".join(entry.at for entry in entries) or "inputs"
        raise ValueError(
            printable(
                f"{listed}: what is planned does not say which of "
                f"{counted(len(numbers), 'array')} are of which argument, or has other shapes; "
                "equinox.filter_jit keeps no structure of arguments. Give each argument that has "
                "arrays a Plan of these, or a tree with a spec for each"
            )
        )
    rest = iter(numbers)
    for entry, width in zip(entries, ways[0], strict=True):
        own = list(islice(rest, width))
        if entry.tree is not None:
            yield entry.treedef.unflatten(own)
        else:
            yield own[0] if width == 1 else tuple(own)


def _ways(entries: Sequence[_Entry], shapes: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """How many arrays each entry has, in each way that they fit."""
    known = next((i for i, entry in enumerate(entries) if entry.tree is not None), None)
    if known is None:
        if (widths := _loose_widths(entries, len(shapes))) is not None:
            yield widths
        return
    width, planned = entries[known].treedef.num_leaves, entries[known].shapes
    for before in range(len(shapes) - width + 1):
        loose = _loose_widths(entries[:known], before)
        end = before + width
        if loose is not None and planned in (None, tuple(shapes[before:end])):
            for after in _ways(entries[known + 1 :], shapes[end:]):
                yield (*loose, width, *after)


def _loose_widths(entries: Sequence[_Entry], count: int) -> tuple[int, ...] | None:
    """How many of these arrays each of several entries has that do not say it; None if unclear."""
    planned = [entry.is_planned for entry in entries]
    if count == len(entries):
        return (1,) * count
    if count == sum(planned):
        return tuple(map(int, planned))
    if len(entries) == 1 or (entries and not any(planned)):
        return (count, *[0] * (len(entries) - 1))
    return None


def _numbered(treedef: Any) -> Any:
    return treedef.unflatten(range(treedef.num_leaves))


_READERS: Final[Mapping[str, Callable[[Any, Compiled, Any], Call]]] = {
    "flax": _nnx_call,
    "equinox": _equinox_call,
}
