"""Mistakes behind calls that fail: swapped arguments, and what is no tree of arrays."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from types import ModuleType
from typing import Any, Final, Literal, TypeAlias, TypeVar

from shardrules._base.text import brief, counted, shown

Kind: TypeAlias = Literal["tree", "rules", "mesh", "plan", "path", "shape", "compiled"]

Tree = TypeVar("Tree")
"""The type of a tree, of what returns one of the same structure."""

_ARRAYS: Final = (
    "a pytree of arrays, or of abstract ones as jax.eval_shape gives; shardrules.read_model reads "
    "those of a file"
)
_RETURNED: Final = "what it returns, as jax.eval_shape(function, *arguments) does"
_STATE: Final = "the optimizer's state, jax.eval_shape(optimizer.init, params)"
_INSTEAD: Final = {
    "flax.linen.module.Module": "its parameters, jax.eval_shape(model.init, key, inputs)['params']",
    "flax.nnx.module.Module": "its state, nnx.state(model)",
    "torch.nn.modules.module.Module": "its state_dict()",
    "keras.src.models.model.Model": "{v.path: v.value for v in model.variables}",
    "optax._src.base.GradientTransformation": _STATE,
}
"""By the full name of a class: what to give instead of one of its objects."""
_DESCRIBED: Final = (
    "the devices of the mesh are only described: they hold no arrays; use jax.make_mesh on devices "
    "that are there; to plan for it: plan.on_mesh(...)"
)
_KINDS: Final[dict[str, Kind]] = {
    "Plan": "plan", "Rules": "rules", "LogicalRules": "rules", "Compiled": "compiled",
}  # fmt: skip
"""What an object of a class of this name seems to be."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def in_order(*kinds: Kind) -> Callable[[_Function], _Function]:
    """Make a call that fails say so if its arguments are swapped, or JAX has no such arrays.

    Args:
        kinds: What the function's first parameters are, in their order.
    """

    def decorator(function: _Function) -> _Function:
        names = function.__code__.co_varnames[: len(kinds)]

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            try:
                return function(*arguments, **named)
            except (TypeError, ValueError, RuntimeError, re.error) as error:
                by_name = named | dict(zip(names, arguments, strict=False))
                values = list(map(by_name.get, names))
                check_order(function.__name__.lstrip("_"), kinds, values)
                if "tree" in kinds:
                    place = kinds.index("tree")
                    if isinstance(error, TypeError) and argument_kind(values[place]) != "plan":
                        check_arrays(names[place], values[place])
                    if " JAX " in str(error):
                        _check_dtypes(values[place])
                if _is_of_described_devices(str(error)):
                    raise TypeError(_DESCRIBED) from error
                raise

        return call  # type: ignore[return-value]

    return decorator


def _is_of_described_devices(message: str) -> bool:
    """Say whether JAX has refused to put arrays on devices that nobody has."""
    if "represents addressable devices" in message:
        import jax

        return bool(jax.process_count() == 1)  # else they may be another process's
    return "compile-only client" in message


def check_order(name: str, kinds: tuple[Kind, ...], arguments: Iterable[Any]) -> None:
    """Check whether a function has refused arguments, None for none, because of their order."""
    pairs = zip(kinds, arguments, strict=False)
    places = [(kind, argument_kind(argument)) for kind, argument in pairs if argument is not None]
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


def argument_kind(argument: Any) -> Kind | Literal["specs", "other"]:
    """Return what an argument seems to be; "specs" may be rules or a tree."""
    if isinstance(argument, str | os.PathLike):
        return "path"
    sizes = argument.items() if isinstance(argument, Mapping) else ()
    is_sizes = bool(sizes) and all(isinstance(k, str) and type(v) is int for k, v in sizes)
    if is_sizes or hasattr(argument, "axis_names"):
        return "mesh"
    if isinstance(argument, list | tuple) and argument:
        if all(type(size) is int for size in argument):
            return "shape"
        if _is_rule(argument[0]):
            return "rules"
    return _KINDS.get(type(argument).__name__) or _kind_of_tree(argument)


def _kind_of_tree(node: Any) -> Literal["specs", "tree", "other"]:
    """Return what a tree seems to be, by its first leaf."""
    jax = sys.modules.get("jax.sharding")
    parent = None
    for _ in range(100):  # a list may be inside itself
        if not isinstance(node, dict | list | tuple) or not node:
            break
        parent, node = node, next(iter(dict.values(node) if isinstance(node, dict) else node))
    if jax and isinstance(node, jax.PartitionSpec | jax.Sharding):
        return "specs"
    # A dict of strings may be rules, in vain.
    return "other" if isinstance(parent, dict) and isinstance(node, str | None) else "tree"


def _is_rule(item: Any) -> bool:
    """True if it is a (pattern, spec) pair, and not a name with its array, or with its arrays."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    pattern, spec = item
    is_node = isinstance(spec, Mapping) or hasattr(spec, "shape")
    return isinstance(pattern, str | re.Pattern) and not is_node


def check_arrays(name: str, tree: Any, needs_shape: bool = False) -> None:
    """Check a tree in which a walk has found no array, or of a call that has failed.

    It may be, or have in it, a model or an optimizer in place of its arrays, a path in place of
    what is in the file, or a function in place of what it returns. Numbers and None are a tree,
    unless it `needs_shape`.
    """
    from jax.tree_util import keystr

    path_of = functools.partial(keystr, simple=True, separator="/")
    leaves = _leaves(tree, lambda node: isinstance(node, tuple) and _instead_of_class(type(node)))
    if any(_is_array(leaf) for _, leaf in leaves):
        return
    # No property may run while JAX walks: one that changes a list would have it read freed memory.
    shaped = _leaves(tree, lambda node: inspect.getattr_static(node, "shape", None) is not None)
    if nodes := [node for _, node in shaped if _is_array(node)]:
        kind = type(nodes[0]).__name__
        raise TypeError(
            f"{name}: it has {counted(len(nodes), 'node')} such as {brief(nodes[0])}, in which JAX "
            f"sees no leaf, since {kind} is registered without data: give jax.ShapeDtypeStruct("
            "x.shape, x.dtype) for each such x, by jax.tree.map(..., is_leaf=lambda x: "
            f"isinstance(x, {kind})); logical names, if it has any, likewise as names="
        )
    if leaves and not any(isinstance(leaf, Number) for _, leaf in leaves):
        # An optimizer's functions say less than the optimizer.
        keys, leaf = next((item for item in leaves if _instead_of(item[1])), leaves[0])
        instead = _instead_of(leaf) or (_RETURNED if callable(leaf) and not keys else _ARRAYS)
        if not keys:
            raise TypeError(f"{name} is {shown(leaf)}, which is no tree of arrays; give {instead}")
        where = f"at {path_of(keys)}, and no array anywhere that JAX sees"
        raise TypeError(f"{name} has {shown(leaf)} {where}; give {instead}")
    if needs_shape and leaves:
        raise TypeError(
            f"{name}: no leaf has a shape; the first is at {brief(path_of(leaves[0][0]))}. "
            "Numbers are no arrays, a tuple of them is no shape of one, and JAX sees no leaves "
            f"inside of types that it does not know: give {_ARRAYS}"
        )
    if needs_shape and _leaves(tree, lambda node: node is None):
        raise TypeError(f"{name}: it has None alone, and no leaf; give {_ARRAYS}")


def _check_dtypes(tree: Any) -> None:
    """Check a tree that JAX has refused for the numpy arrays that it does not hold."""
    import jax
    import numpy as np

    for keys, leaf in _leaves(tree):
        if not isinstance(leaf, np.ndarray | np.generic):
            continue
        try:
            jax.typeof(leaf)
        except (TypeError, ValueError) as error:
            native = leaf.dtype.newbyteorder("=")
            instead = "take it out of the tree, or give numbers for it, such as ids"
            if isinstance(leaf, np.ma.MaskedArray):
                instead = "give array.filled(value), or its .data and .mask"
            elif native.kind in "iufc":
                dtype = {"float128": "float64", "complex256": "complex128"}.get(str(native), native)
                instead = f"give array.astype('{dtype}')"
            raise TypeError(
                f"the leaf {jax.tree_util.keystr(keys) or '(the tree)'} is a {type(leaf).__name__} "
                f"of dtype {brief(str(leaf.dtype))}, which JAX does not hold: {instead}"
            ) from error


def _leaves(tree: Any, ends: Callable[[Any], object] = lambda _: False) -> list[tuple[Any, Any]]:
    """Return (keys, leaf) pairs, down to nodes of which `ends` is true."""
    from jax import tree_util

    try:
        return tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda node: bool(ends(node)) or not _can_be_walked(node)
        )[0]
    except Exception:  # JAX cannot walk it, which the error that is being explained says
        return []


def _can_be_walked(node: Any) -> bool:
    """True unless JAX cannot sort its keys, an error that costs the thread depth for ever."""
    try:
        return type(node) not in (dict, defaultdict) or sorted(node) is not None
    except Exception:  # whatever a key raises
        return False


def _is_array(node: Any) -> bool:
    return hasattr(node, "shape") and not isinstance(node, type | ModuleType)


def _instead_of(leaf: Any) -> str | None:
    """Return what to give instead of a model or an optimizer, or of the class of one."""
    leaf_type = leaf if isinstance(leaf, type) else type(leaf)
    is_optimizer = callable(getattr(leaf, "init", None)) and callable(getattr(leaf, "update", None))
    return _instead_of_class(leaf_type) or (_STATE if is_optimizer else None)


def _instead_of_class(cls: Any) -> str | None:
    names = (f"{base.__module__}.{base.__qualname__}" for base in type.mro(cls))
    return next((_INSTEAD[name] for name in names if name in _INSTEAD), None)
