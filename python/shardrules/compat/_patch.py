"""`patch` and `unpatch`: put functions of compat in the place of another library's, in all modules.

They answer alone, so each error of ours is seen. What differs is in docs/guides/dialects.md.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any, Final

from shardrules._base.arguments import check_items
from shardrules.compat import eformer, flax_linen_spmd

_Functions = dict[Callable[..., Any], Callable[..., Any]]

# The module, ours, and the versions that are known: from the first to before the second.
_LIBRARIES: Final = {
    "eformer": ("eformer.escale.partition.constraints", eformer, "0.0.95", "0.2"),
    "flax": ("flax.linen.spmd", flax_linen_spmd, "0.12.3", "0.13"),
}
# Those that are faster. docs/guides/dialects.md has the reasons for the others.
_FUNCTIONS: Final = {
    "eformer": "create_pattern_based_partition_spec get_corrected_named_sharding "
    "make_shard_and_gather_fns match_partition_rules",
    "flax": "logical_to_mesh logical_to_mesh_axes logical_to_mesh_sharding",
}

_lock = threading.RLock()
# Every replacement ever made, by its original: a module may still hold one.
_replacements: _Functions = {}


class Patch:
    """Context manager that at its end restores the functions that one call of `patch` replaced."""

    def __init__(self, replacements: _Functions) -> None:
        self._replacements = replacements
        self.replaced = tuple(f"{f.__module__}.{f.__qualname__}" for f in replacements)
        """Their full names."""

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        _swap({new: original for original, new in self._replacements.items()})


def patch(*libraries: str) -> Patch:
    """Put the faster functions of compat in the place of another library's.

    A function is replaced wherever a loaded module has it as a global; not inside other objects,
    such as a functools.partial. It keeps its name, signature and documentation, and does what its
    namesake in compat does: docs/guides/dialects.md says what differs.

    Args:
        libraries: "eformer" or "flax", which it imports. What is patched already stays so.

    Returns:
        A context manager that at its end restores what this call replaced; `unpatch` restores all.

    Raises:
        ValueError: The library is unknown.
        ModuleNotFoundError: The library is not installed.
        RuntimeError: patch does not know the library's version or a function's parameters, or
            somebody else has replaced the function. As with the other errors, nothing is replaced.

    Example:
        >>> patch("keras")
        Traceback (most recent call last):
        ValueError: patch does not know the library 'keras'; it knows 'eformer', 'flax'
    """
    check_items("libraries", libraries, str, "a string")
    with _lock:
        new = {old: ours for name in libraries for old, ours in _replacements_in(name).items()}
        _replacements.update(new)
        _swap(new)
        return Patch(new)


def unpatch() -> None:
    """Restore all functions that `patch` replaced, also in modules that imported one since then.

    Example:
        >>> unpatch()
    """
    _swap({new: original for original, new in _replacements.items()})


def _replacements_in(name: str) -> _Functions:
    """Return {function: its replacement} for the functions of a library that are not replaced."""
    if name not in _LIBRARIES:
        libraries = ", ".join(map(repr, _LIBRARIES))
        raise ValueError(f"patch does not know the library {name!r}; it knows {libraries}")
    module, ours, first, end = _LIBRARIES[name]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"{name} is not installed: nothing to patch", name=name) from None
    theirs = importlib.import_module(module)
    numbers = [tuple(map(int, re.findall(r"\d+", text))) for text in (first, version, end)]
    is_known = numbers[0] <= numbers[1] < numbers[2]
    new: _Functions = {}
    for function in _FUNCTIONS[name].split():
        original: Any = getattr(theirs, function, None)
        replacement: Any = getattr(ours, function)
        if original in _replacements.values():
            continue
        if not (is_known and _is_like(original, replacement)):
            raise RuntimeError(
                f"patch does not know this {function} of {name} {version}, but that of {first} to "
                f"before {end} with the parameters {inspect.signature(replacement)}, unless it is "
                f"wrapped. Nothing is patched; import it from {ours.__name__}"
            )
        new[original] = _replacements.get(original) or _renamed(replacement, original)
    return new


def _is_like(original: Any, ours: Any) -> bool:
    """Return whether it is a function that nobody has wrapped, with the parameters of ours."""
    if not isinstance(original, FunctionType) or hasattr(original, "__wrapped__"):
        return False
    codes = original.__code__, ours.__code__
    names = [code.co_varnames[: code.co_argcount] for code in codes]
    return names[0] == names[1] and original.__defaults__ == ours.__defaults__


def _renamed(ours: Any, original: Any) -> Any:
    """Return a copy under the name of the original; a wrapper would hide the caller's line."""
    parts = ours.__code__, ours.__globals__, None, ours.__defaults__, ours.__closure__
    return functools.wraps(original)(FunctionType(*parts))


def _swap(new_of: _Functions) -> None:
    """Replace functions wherever they are globals of a module."""
    new_by_id = {id(old): new for old, new in new_of.items()}
    with _lock:
        for module in list(sys.modules.values()):
            # isinstance, vars and getattr would load modules that are loaded lazily.
            if issubclass(type(module), ModuleType):
                names = object.__getattribute__(module, "__dict__")
                changed = {name: id(f) for name, f in list(names.items()) if id(f) in new_by_id}
                names.update((name, new_by_id[old]) for name, old in changed.items())
