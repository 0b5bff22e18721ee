"""How a compiled function is called: its arguments and results as trees of leaf numbers.

`jax.jit` compiles a function as it is called. What wraps it has another signature: `flax.nnx.jit`
splits modules into graph definitions and states, and returns those that the function may have
changed; `equinox.filter_jit` hands on flat tuples of arrays. Private names of these libraries are
read here and nowhere else. Costs a walk over the arguments. Must not know about HLO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._format import counted, shown
from shardrules._planning.plan import Plan
from shardrules._printable import printable
from shardrules._specs import is_partition_spec

if TYPE_CHECKING:
    import inspect

    from jax.stages import Compiled

__all__ = ["Call", "Library", "call_of"]

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
    try:
        return _READERS[library](compiled, inner, inputs)
    except (AttributeError, ImportError, KeyError) as error:
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

    args, out = (_numbered(tree) for tree in (inner.in_tree, inner.out_tree))
    if type(compiled).__name__.startswith("Simple"):
        in_tree, returned, changed = _nnx_of_trees(args, out)
    else:
        in_tree, returned, changed = _nnx_of_graphs(args, out)
    numbers, structure = tree_util.tree_flatten(in_tree)
    out_numbers, out_structure = tree_util.tree_flatten(returned)
    place_of = {number: place for place, number in enumerate(numbers)}
    updates = [(place_of[before], after) for before, after in changed if before in place_of]
    return Call(inner, structure, numbers, out_structure, out_numbers, updates, "nnx")


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

    extract = import_module("flax.nnx.extract")
    before = extract.labeled(args=args[0], kwargs=args[1])
    returned, updates = out
    after = {tree_util.keystr(path): one.get_raw_value() for some in updates for path, one in some}
    paths, _ = tree_util.tree_flatten_with_path(before, is_leaf=_is_variable)
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
        return bool(nnx.graphlib.is_graph_node(node))

    return tree_util.tree_map(
        lambda node: nnx.state(node) if is_module(node) else node,
        tree,
        is_leaf=lambda node: is_module(node) or _is_variable(node),
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, import_module("flax.nnx").Variable)


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

    (groups, _), (_, returned, _) = _numbered(inner.in_tree), _numbered(inner.out_tree)
    flat = {key: tree_util.tree_leaves(group[key]) for group in groups for key in group}
    infos = tree_util.tree_leaves(inner.args_info)
    positional, keywords = _split_keywords(inputs, compiled.info[0])
    count, names = len(positional), sorted(keywords)
    entries = [_entry(f"inputs[{i}]", entry) for i, entry in enumerate(positional)]
    entries += [_entry(f"inputs[{count}][{name!r}]", keywords[name]) for name in names]
    arguments: list[Any] = []
    for some, numbers in (
        (entries[:count][:1], flat["first"]),
        (entries[:count][1:] + entries[count:], flat["rest"]),
    ):
        arguments += _shared_out(some, numbers, [tuple(infos[i].shape) for i in numbers])
    called = (tuple(arguments[:count]), dict(zip(names, arguments[count:], strict=True)))
    in_leaves, in_tree = tree_util.tree_flatten(called)
    out_leaves, out_tree = tree_util.tree_flatten(returned)
    return Call(inner, in_tree, in_leaves, out_tree, out_leaves, (), "equinox")


def _split_keywords(
    inputs: Any, signature: inspect.Signature
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What is planned for positional arguments, and for those that are keyword-only."""
    if not isinstance(inputs, tuple | list):
        raise TypeError(
            f"inputs is {shown(inputs)}; give a tuple with an entry for each positional argument"
        )
    parameters = signature.parameters.values()
    names = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    last = inputs[-1] if inputs else None
    keywords = last if isinstance(last, Mapping) and last and set(names) >= last.keys() else {}
    positional = inputs[:-1] if keywords else inputs
    kinds = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
    most = [one for one in kinds if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    least = sum(one.default is one.empty for one in most)
    if not least <= len(positional) or (most == kinds and len(positional) > len(most)):
        raise ValueError(
            f"inputs has {counted(len(positional), 'entry')} for positional arguments; the "
            f"function has {counted(len(most), 'positional argument')}, {least} of them without "
            "default"
        )
    return positional, {**dict.fromkeys(names), **keywords}


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
    """
    ways = list(islice(_ways(entries, shapes), 2))
    if len(ways) != 1:
        listed = ", ".join(entry.at for entry in entries) or "inputs"
        fits = "fits in several ways" if ways else "does not fit"
        raise ValueError(
            printable(
                f"{listed}: what is planned here {fits} the {counted(len(shapes), 'array')} of "
                "these arguments, whose structure equinox.filter_jit does not keep; give each "
                "argument that has arrays a Plan of these, or a tree with a spec for each"
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
