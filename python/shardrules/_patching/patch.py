"""`patch` and `unpatch`: replace functions of other libraries by ours, in all loaded modules.

Each call looks at every global of every loaded module, which takes milliseconds. Must not know what
the functions do.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final, TypeGuard

from shardrules._arguments import each
from shardrules._patching.code_digest import code_digest

__all__ = ["Patch", "patch", "unpatch"]

_Function = Callable[..., Any]


@dataclass(frozen=True)
class _Library:
    """Functions of a module, and our module with functions of the same names."""

    module: str
    ours: str
    instead: str
    """The module to import ours from if a function cannot be patched."""
    versions: str
    """The versions whose functions the tests compared with ours."""
    functions: Mapping[str, tuple[str, ...]]
    """Digests of the compared functions' code, by name."""


# Only functions that are equal and faster. docs/guides/patch.md has the reasons for the others.
_LIBRARIES: Final[dict[str, _Library]] = {
    "eformer": _Library(
        module="eformer.escale.partition.constraints",
        ours="shardrules._patching.eformer",
        instead="shardrules.compat.eformer",
        versions="0.0.95 to 0.1.0",
        functions={
            "create_pattern_based_partition_spec": ("57d9529d7c7c04ed",),
            "get_corrected_named_sharding": ("5f2deeb9c5a9f3c5",),
            # Up to 0.0.99.1 its constraints swallowed other exceptions.
            "make_shard_and_gather_fns": ("66607a899a950d48", "86fbaf671dcbe98a"),
            "match_partition_rules": ("e52b2595e538dc16",),
        },
    ),
    "flax": _Library(
        module="flax.linen.spmd",
        ours="shardrules.compat.flax_linen_spmd",
        instead="shardrules.compat.flax_linen_spmd",
        versions="0.12.3 to 0.12.12",
        functions={
            "logical_to_mesh": ("e46715bb68e66a77",),
            "logical_to_mesh_axes": ("c96fd851bc10019f",),
            "logical_to_mesh_sharding": ("5ab3064120abdb5c",),
        },
    ),
}

_lock = threading.RLock()
# Every replacement ever made, by its original: a module may still hold one.
_replacements: dict[_Function, _Function] = {}


class Patch:
    """The result of `patch`: a context manager that restores the functions at its end."""

    def __init__(self, replaced: Mapping[_Function, _Function]) -> None:
        self._replaced = dict(replaced)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The full names of the functions that this call replaced."""
        return tuple(f"{f.__module__}.{f.__qualname__}" for f in self._replaced)

    def __repr__(self) -> str:
        return f"<Patch of {', '.join(self.replaced) or 'nothing'}>"

    def __enter__(self) -> Patch:
        """Return the patch. The functions are replaced already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restore only the functions that this call replaced."""
        with _lock:
            _restore(self._replaced.items())


def patch(*libraries: str) -> Patch:
    """Replace functions of other libraries by ours, if ours are equal and faster.

    A function is replaced in the module that defines it, and in every loaded module that imported
    it under any name. It is not replaced inside other objects, such as a functools.partial. Results
    and errors stay the same: the original handles inputs that ours refuses. docs/guides/patch.md
    lists the functions.

    Args:
        libraries: "eformer" or "flax". They are imported if they are not yet. Libraries that are
            patched already stay patched.

    Returns:
        A context manager that at its end restores the functions that this call replaced. `unpatch`
        restores all functions.

    Raises:
        ValueError: The library is unknown.
        ModuleNotFoundError: The library is not installed.
        RuntimeError: The source of a function differs from that in the versions that the tests
            compared. As with the other errors, nothing is replaced.

    Example:
        Not run as a test, because eformer may not be installed:

        >>> with patch("eformer"):  # doctest: +SKIP
        ...     model = easydel.AutoEasyDeLModelForCausalLM.from_pretrained(...)

        >>> patch("keras")
        Traceback (most recent call last):
        ValueError: patch does not know the library 'keras'; it knows 'eformer', 'flax'
    """
    each("libraries", libraries, str, "a string")
    with _lock:
        originals = [found for name in dict.fromkeys(libraries) for found in _originals(name)]
        replaced = {original: _replacement(original, ours) for original, ours in originals}
        _swap(replaced)
        return Patch(replaced)


def unpatch() -> None:
    """Restore all functions that `patch` replaced, in all modules.

    Modules that imported a replacement in the meantime are included. Without a patch nothing
    happens.

    Example:
        >>> unpatch()
    """
    with _lock:
        _restore(_replacements.items())


def _originals(name: str) -> list[tuple[_Function, _Function]]:
    """(function, our function) pairs of a library, for functions that are not replaced yet."""
    library = _LIBRARIES.get(name)
    if library is None:
        known = ", ".join(map(repr, _LIBRARIES))
        raise ValueError(f"patch does not know the library {name!r}; it knows {known}")
    module = _imported(library.module)
    ours = importlib.import_module(library.ours)
    originals: list[tuple[_Function, _Function]] = []
    for function, digests in library.functions.items():
        original = getattr(module, function, None)
        if original in _replacements.values():
            continue
        if not _is_known(original, digests):
            raise RuntimeError(
                f"patch does not know this {function} of {name}: its source is not that of {name} "
                f"{library.versions}, and it may do something else. Nothing is patched; install "
                "one of these or a newer shardrules, or import the function from "
                f"{library.instead}"
            )
        originals.append((original, getattr(ours, function)))
    return originals


def _imported(module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed, so there is nothing to patch in it", name=error.name
        ) from None


def _is_known(function: object, known: tuple[str, ...]) -> TypeGuard[FunctionType]:
    try:
        return isinstance(function, FunctionType) and code_digest(function) in known
    except (OSError, TypeError):  # no source to read
        return False


def _replacement(original: _Function, ours: _Function) -> _Function:
    """Our function, with the name, documentation and signature of the original."""
    if original in _replacements:
        return _replacements[original]

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            return ours(*args, **kwargs)
        # The program gets the same results as before, and the same errors.
        return original(*args, **kwargs)

    return _replacements.setdefault(original, replacement)


def _restore(replaced: Iterable[tuple[_Function, _Function]]) -> None:
    _swap({replacement: original for original, replacement in replaced})


def _swap(new_of: Mapping[_Function, _Function]) -> None:
    """Replaces functions wherever they are globals of a module."""
    new_by_id = {id(old): new for old, new in new_of.items()}
    for module in list(sys.modules.values()):
        # isinstance, vars and getattr would load modules that are loaded lazily.
        if not issubclass(type(module), ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")
        for name, value in list(names.items()):
            if id(value) in new_by_id:
                names[name] = new_by_id[id(value)]
