"""Checks of arguments of public functions; the errors name the parameter.

A check costs an `isinstance` or two, and nothing for each leaf of a tree.
"""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from math import inf
from numbers import Number, Real
from types import ModuleType, UnionType
from typing import (
    Any,
    Final,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from shardrules._base.text import brief, counted, shown

Kind: TypeAlias = Literal["tree", "rules", "mesh", "plan", "path", "shape", "compiled"]

Tree = TypeVar("Tree")
"""The type of a tree, of what returns one of the same structure."""

MOST: Final = 2**63 - 1
"""The largest number that the core and numpy's int64 hold."""

_TEXTS: Final = ("strings", "patterns", "words")
_NODES: Final = (dict, list, tuple)
_PLAIN: Final = (str, bytes, bytearray, os.PathLike, Iterator)
# Nobody nests deeper by hand, and a list may be inside itself.
_DEEPEST: Final = 100
# What is put beside a model's arrays by mistake stands near the root.
_LOOKED_AT: Final = 32
_ARRAYS: Final = (
    "a pytree of arrays, or of abstract ones as jax.eval_shape gives; shardrules.read_model reads "
    "those of a file"
)
_RETURNED: Final = "what it returns, as jax.eval_shape(function, *arguments) does"
_OPTIMIZER: Final = "the optimizer's state, jax.eval_shape(optimizer.init, params)"
_INSTEAD: Final = {
    "flax.linen.module.Module": "its parameters, jax.eval_shape(model.init, key, inputs)['params']",
    "flax.nnx.module.Module": "its state, nnx.state(model)",
    "torch.nn.modules.module.Module": "its state_dict()",
    "keras.src.models.model.Model": "{v.path: v.value for v in model.variables}",
    "optax._src.base.GradientTransformation": _OPTIMIZER,
}
"""By the full name of a class: what to give instead of one of its objects."""
_KINDS: Final[dict[str, Kind]] = {
    "Plan": "plan",
    "Rules": "rules",
    "LogicalRules": "rules",
    "Compiled": "compiled",
}
"""By the name of a class: what its objects seem to be. Equinox and flax have a Compiled as well."""


def check_type(name: str, value: object, types: type | UnionType, what: str) -> None:
    """Check that the value is of one of the types; `what` says in the message what it must be."""
    if not isinstance(value, types):
        raise TypeError(f"{name} is {shown(value)}; it must be {what}")


def check_choice(name: str, choice: object, choices: tuple[object, ...]) -> None:
    # What cannot be hashed may have an == that gives no bool, as arrays have.
    if not isinstance(choice, Hashable) or choice not in choices:
        names = ", ".join(map(repr, choices))
        raise ValueError(f"{name} is {brief(choice)}; it must be one of {names}")


def check_choices(record: Any) -> None:
    """Check that each field of a dataclass has a value that its annotation, a Literal, lists."""
    for name, choices in _choices_of(record.__class__).items():
        value = getattr(record, name)
        if type(value) is not str or value not in choices:
            check_choice(name, value, choices)


@functools.cache
def _choices_of(record_type: type) -> dict[str, tuple[object, ...]]:
    hints = get_type_hints(record_type)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def boolean(name: str, value: object) -> bool:
    """Return the value, a bool of Python or numpy, as Python's."""
    if not isinstance(value, Hashable) or value not in (True, False):
        raise TypeError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def integer(name: str, value: Any, least: int = 0, most: int = MOST, what: str = "") -> int:
    """Return the value, an integer of Python or numpy, as an int."""
    needed = what or "an integer"
    if isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; it must be {needed}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; it must be {needed}") from None
    if not least <= number <= most:
        largest = "2**63 - 1" if most == MOST else f"{most:,}"
        raise ValueError(
            f"{name} is {shown(number)}; it must be {needed} from {least} to {largest}"
        )
    return number


def check_real(name: str, value: object) -> None:
    """Check that the value is a real number, which others can be compared with."""
    check_type(name, value, Real, "a number")


def check_bytes(name: str, value: object) -> None:
    check_type(name, value, Real, "a number of bytes, such as 95e9")


def memory_bytes(name: str, value: Any) -> int:
    """Return the bytes of a device's memory: at least one, and not without end."""
    check_bytes(name, value)
    if isinstance(value, bool) or not 1 <= value < inf:
        raise ValueError(f"{name} is {shown(value)}; it must be a number of bytes, such as 95e9")
    return int(value)


def check_file(name: str, value: object) -> None:
    check_type(name, value, str | os.PathLike | None, "the path of a file")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a sequence of strings, as a tuple.

    A single string is refused: its items are its letters.
    """
    if type(value) is tuple and not value:
        return value
    items = listed(name, value, "strings")
    return each(name, items, str, "a string")


def listed(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """Return the items of an iterable, as a tuple. A string or a mapping is refused."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        is_item = isinstance(value, str) and what.startswith(_TEXTS)
        hint = f": write [{brief(value)}]" if is_item else ""
        raise TypeError(f"{name} is {shown(value)}; it must be a sequence of {what}{hint}")
    return tuple(value)


def each(name: str, values: tuple[Any, ...], types: type | UnionType, what: str) -> tuple[Any, ...]:
    """Return the same values, each checked to be of one of the types."""
    for position, value in enumerate(values):
        if not isinstance(value, types):
            check_type(f"{name}[{position}]", value, types, what)
    return values


def checked_shape(name: str, value: Any) -> tuple[Any, ...]:
    """Return a shape, as a tuple. Symbolic dimensions and the like are for the caller to check."""
    shape = listed(name, value, "integers")
    for position, size in enumerate(shape):
        if isinstance(size, int | float | str | bytes | None):
            integer(f"{name}[{position}]", size)
    return shape


def check_tree(name: str, tree: object) -> None:
    """Check that it may be a tree of arrays, by a look at its leaves up to the first array.

    Beside arrays there may be functions and texts, as in equinox modules, but no optimizer, model,
    path or generator among the first nodes.

    Raises:
        TypeError: It is a path, an optimizer, a model, a generator or the like, or has one in it,
            or has no array; the message says where, and what to give.
    """
    if (refusal := _never_an_array(tree)) is not None:
        node, instead = refusal
        keys = _keys_of(node, tree)
        raise TypeError(_no_arrays(name, keys, node, "where an array is expected", instead))
    first = None
    for keys, leaf in _keyed_leaves(tree):
        if leaf is None:
            continue
        if _may_be_array(leaf):
            return
        first = first or (keys, leaf)
    if first is None:
        return
    if hasattr(first[1], "shape") and _is_without_leaves(first[1]):
        check_shapes(name, tree, None)
    instead = _RETURNED if callable(first[1]) and not first[0] else _ARRAYS
    raise TypeError(_no_arrays(name, *first, "and no array anywhere", instead))


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Function: TypeAlias = Callable[_Parameters, _Result]


def in_order(
    *kinds: Kind, renamed: str = ""
) -> Callable[[_Function[_Parameters, _Result]], _Function[_Parameters, _Result]]:
    """Make a function tell arguments that are swapped, once it has refused them.

    Args:
        kinds: What its first parameters are, in their order.
        renamed: What its parameter `rules` was called in 0.2.
    """

    def decorator(function: _Function[_Parameters, _Result]) -> _Function[_Parameters, _Result]:
        @functools.wraps(function)
        def call(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            try:
                return function(*arguments, **named)
            except (TypeError, ValueError, re.error):
                if renamed in named:
                    again: Any = call
                    return again(*arguments, **_with_rules(function.__name__, renamed, named))  # type: ignore[no-any-return]
                check_order(function.__name__, kinds, _by_parameter(function, arguments, named))
                raise

        return call

    return decorator


def _with_rules(name: str, renamed: str, named: Mapping[str, Any]) -> Any:
    """Return the keywords of a call with the name `rules`, with a warning."""
    import warnings

    message = f"{name}: the parameter {renamed} is now called rules; the old name goes in 0.5"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return {"rules" if key == renamed else key: value for key, value in named.items()}


def _by_parameter(
    function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> list[Any]:
    """Return what each parameter of a function got; None for nothing."""
    from inspect import signature

    parameters = signature(function)
    try:
        got = parameters.bind_partial(*arguments, **named).arguments
    except TypeError:  # too many, or of another name
        return []
    return list(map(got.get, parameters.parameters))


def check_order(name: str, kinds: tuple[Kind, ...], arguments: Iterable[Any]) -> None:
    """Check arguments that a function has refused: they may be in another order.

    Args:
        name: The function's name.
        kinds: What its first parameters are, in their order.
        arguments: What they got; None for a parameter that got nothing.
    """
    pairs = zip(kinds, arguments, strict=False)
    places = [(kind, kind_of(argument)) for kind, argument in pairs if argument is not None]
    expected = [kind for kind, _ in places]
    # A plan decides as rules do, where no plan of its own is expected.
    also = {} if "plan" in expected else {"plan": "rules"}
    seem = [also.get(kind, kind) for _, kind in places]
    absent = [kind for kind in expected if kind not in seem]
    if "specs" in seem and absent in (["rules"], ["tree"]):
        seem[seem.index("specs")] = absent[0]
    if seem != expected and sorted(seem) == sorted(expected):
        raise TypeError(
            f"{name}: the arguments are in another order, {', '.join(seem)}: write "
            f"{name}({', '.join(expected)})"
        ) from None


def kind_of(argument: Any) -> Kind | Literal["specs", "other"]:
    """Return what an argument seems to be; "specs" may be rules or a tree."""
    if isinstance(argument, str | os.PathLike):
        return "path"
    if hasattr(argument, "axis_names") or _has_axis_sizes(argument):
        return "mesh"
    if isinstance(argument, list | tuple) and argument:
        if all(type(size) is int for size in argument):
            return "shape"
        if _is_rule(argument[0]):
            return "rules"
    return _KINDS.get(type(argument).__name__) or _kind_of_tree(argument)


def _has_axis_sizes(argument: Any) -> bool:
    return (
        isinstance(argument, Mapping)
        and bool(argument)
        and all(isinstance(name, str) and type(size) is int for name, size in argument.items())
    )


def _is_rule(item: Any) -> bool:
    """Tell if it is a (pattern, spec) pair, and not a name with its array, or with its arrays."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    pattern, spec = item
    is_node = isinstance(spec, Mapping) or hasattr(spec, "shape")
    return isinstance(pattern, str | re.Pattern) and not is_node


def _kind_of_tree(node: Any) -> Literal["specs", "tree", "other"]:
    """Return what a tree seems to be, by its first leaf.

    A dict of strings may be rules, in vain.
    """
    jax = sys.modules.get("jax.sharding")
    parent = None
    for _ in range(_DEEPEST):
        if jax and isinstance(node, jax.PartitionSpec | jax.Sharding):
            return "specs"
        if not isinstance(node, _NODES) or not node:
            break
        parent, node = node, next(iter(dict.values(node) if isinstance(node, dict) else node))
    return "other" if isinstance(parent, dict) and isinstance(node, str | None) else "tree"


def check_shapes(name: str, tree: object, path: str | None) -> None:
    """Check a tree none of whose leaves has a shape: it has no leaf, and no array but these."""
    if path is not None:
        raise TypeError(
            f"{name}: no leaf has a shape; the first is at {brief(path)}. Numbers are no arrays, "
            "a tuple of them is no shape of one, and JAX sees no leaves inside of types that it "
            f"does not know: give {_ARRAYS}"
        )
    jax = sys.modules.get("jax.tree_util")
    if jax and (meant := jax.tree_leaves(tree, is_leaf=lambda node: hasattr(node, "shape"))):
        kind = type(meant[0]).__name__
        raise TypeError(
            f"{name}: it has {counted(len(meant), 'node')} such as {brief(meant[0])}, in which JAX "
            f"sees no leaf, since {kind} is registered without data: give jax.ShapeDtypeStruct("
            "x.shape, x.dtype) for each such x, by jax.tree.map(..., is_leaf=lambda x: "
            f"isinstance(x, {kind})); logical names, if it has any, likewise as names="
        )
    if any(leaf is None for _, leaf in _keyed_leaves(tree)):
        raise TypeError(f"{name}: it has None alone, and no leaf; give {_ARRAYS}")


_Keyed: TypeAlias = tuple[tuple[Any, ...], object]


def _keyed_leaves(tree: object) -> Iterator[_Keyed]:
    """Yield the leaves with their keys, and nodes of other types than Python's own as leaves."""
    ways: list[Iterator[_Keyed]] = [iter([((), tree)])]
    while ways:
        for keys, node in ways[-1]:
            if isinstance(node, dict | list | tuple) and len(keys) < _DEEPEST:
                ways.append(_keyed_children(keys, node))
                break
            yield keys, node
        else:
            ways.pop()


def _keyed_children(
    keys: tuple[Any, ...], node: dict[Any, Any] | list[Any] | tuple[Any, ...]
) -> Iterator[_Keyed]:
    for key, child in dict.items(node) if isinstance(node, dict) else enumerate(node):
        yield (*keys, key), child


def _may_be_array(leaf: object) -> bool:
    if isinstance(leaf, type | ModuleType | str | bytes):
        return False
    if isinstance(leaf, Number):
        return True
    if hasattr(leaf, "shape"):
        return _is_leaf(leaf) or not _is_without_leaves(leaf)
    return not (isinstance(leaf, _PLAIN) or _is_leaf(leaf))


def _no_arrays(name: str, keys: tuple[Any, ...], node: object, inside: str, instead: str) -> str:
    if not keys:
        return f"{name} is {shown(node)}, which is no tree of arrays; give {instead}"
    return f"{name} has {shown(node)} at {'/'.join(map(str, keys))}, {inside}; give {instead}"


def _never_an_array(tree: object) -> tuple[object, str] | None:
    """(node, what to give instead) of the first node that certainly has no array in it.

    Looks at the nodes nearest to the root, level by level.
    """
    nodes: list[Any] = [tree]
    for node in nodes:  # which grows
        node_type: Any = type(node)
        # A class in itself may be anything, such as a dtype; a model's is one by mistake.
        cls = node if issubclass(node_type, type) else node_type
        if (instead := _instead_of_objects(cls)) is not None:
            if cls is node or issubclass(node_type, tuple) or _is_leaf(node):
                return node, instead
        elif issubclass(node_type, _NODES) and (room := _LOOKED_AT - len(nodes)) > 0:
            children: Any = dict.values(node) if isinstance(node, dict) else node
            nodes += islice(children, room)
    return None


def _keys_of(target: object, tree: object) -> tuple[Any, ...]:
    nodes: list[_Keyed] = [((), tree)]
    for keys, node in nodes:  # which grows
        if node is target:
            return keys
        if isinstance(node, _NODES):
            nodes += _keyed_children(keys, node)
    return ()


@functools.lru_cache(maxsize=256)
def _instead_of_objects(of_type: Any) -> str | None:
    """Return what to give instead of objects of a class that are neither arrays nor nodes."""
    for base in type.mro(of_type):
        if instead := _INSTEAD.get(f"{base.__module__}.{base.__qualname__}"):
            return instead
    if callable(getattr(of_type, "init", None)) and callable(getattr(of_type, "update", None)):
        return _OPTIMIZER
    never: Any = ModuleType, os.PathLike, Iterator
    return _ARRAYS if issubclass(of_type, never) else None


def _is_without_leaves(node: object) -> bool:
    jax = sys.modules.get("jax.tree_util")
    return jax is not None and not jax.tree_leaves(node)


def _is_leaf(node: object) -> bool:
    # Without JAX in the process nobody can have told it of a type.
    jax = sys.modules.get("jax.tree_util")
    if jax is None:
        return node is not None and not isinstance(node, _NODES)
    return bool(jax.all_leaves([node]))
