"""`patch` and `unpatch`: our functions in the place of other libraries', in all loaded modules.

One look at every global of every loaded module, some milliseconds, on each call. Must not know what
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
    """Functions of a module, and the module where ours have the same names."""

    module: str
    ours: str
    instead: str
    """Where ours can be imported from, whatever the library does."""
    versions: str
    """Where the functions are as tests have compared them with ours."""
    functions: Mapping[str, tuple[str, ...]]
    """By name, the digests of their code."""


# Only functions that are equal and faster: docs/patch.md says why the others are not here.
_LIBRARIES: Final[dict[str, _Library]] = {
    "eformer": _Library(
        module="eformer.escale.partition.constraints",
        ours="shardrules._patching.eformer",
        instead="shardrules.compat.eformer",
        versions="0.0.95 to 0.1.0",
        functions={
            "create_pattern_based_partition_spec": ("57d9529d7c7c04ed",),
            "get_corrected_named_sharding": ("5f2deeb9c5a9f3c5",),
            # Up to 0.0.99.1 its constraints swallowed other exceptions than now.
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
# By the original, every replacement ever made: a module may still hold one.
_replacements: dict[_Function, _Function] = {}


class Patch:
    """What a call of `patch` has replaced; as a context manager, until the context is left."""

    def __init__(self, replaced: Mapping[_Function, _Function]) -> None:
        self._replaced = dict(replaced)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The full names of the functions that this call has replaced."""
        return tuple(f"{f.__module__}.{f.__qualname__}" for f in self._replaced)

    def __enter__(self) -> Patch:
        """Itself; the functions are replaced already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Restores what this call has replaced, and nothing else."""
        with _lock:
            _restore(self._replaced.items())


def patch(*libraries: str) -> Patch:
    """Replace other libraries' functions by ours where those are equal and faster.

    They are replaced where they are defined and in every loaded module that has imported them,
    under whatever name; not inside of other objects, such as a functools.partial. Results and
    errors stay the library's own: what ours refuses is left to the original. docs/patch.md lists
    the functions.

    Args:
        libraries: "eformer", "flax"; they are imported if need be. Those that are patched already
            stay so.

    Returns:
        A context manager that restores, when it is left, what this very call has replaced. Without
        it `unpatch` restores all.

    Raises:
        ValueError: A library that is not among these.
        ModuleNotFoundError: It is not installed.
        RuntimeError: One of its functions is not as in the versions that ours were compared with;
            what decides is the source, not the version's number. Like the others, before anything
            is replaced.

    Example:
        Not run as a test, as eformer may not be there:

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
    """Restore every function that `patch` has replaced, in all modules.

    Also where one was imported by name meanwhile. Without a patch nothing happens.

    Example:
        >>> unpatch()
    """
    with _lock:
        _restore(_replacements.items())


def _originals(name: str) -> list[tuple[_Function, _Function]]:
    """The library's functions that are not replaced yet, each with ours."""
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
    """Ours, with the name, documentation and signature of the original."""
    if original in _replacements:
        return _replacements[original]

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            return ours(*args, **kwargs)
        # The program is to meet what it met before, errors included.
        return original(*args, **kwargs)

    return _replacements.setdefault(original, replacement)


def _restore(replaced: Iterable[tuple[_Function, _Function]]) -> None:
    _swap({replacement: original for original, replacement in replaced})


def _swap(new_of: Mapping[_Function, _Function]) -> None:
    """Each function replaced by another one, wherever it is a global of a module."""
    new_by_id = {id(old): new for old, new in new_of.items()}
    for module in list(sys.modules.values()):
        # Not isinstance, vars or getattr: they would load modules that load themselves when used.
        if not issubclass(type(module), ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")
        for name, value in list(names.items()):
            if id(value) in new_by_id:
                names[name] = new_by_id[id(value)]
