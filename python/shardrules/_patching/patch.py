"""`patch` and `unpatch`: replace functions of other libraries by ours, in all loaded modules.

Each call looks at every global of every loaded module, which takes milliseconds.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Final, TypeGuard

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.arguments import each
from shardrules._place.boxes import loaded
from shardrules._place.shardings import corrected_sharding
from shardrules._rules.matcher import logs_moves
from shardrules.compat import eformer as ours

_LEFT_OUT: Final = ("annotation", "returns", "type_comment", "type_params", "kind")


def code_digest(function: FunctionType) -> str:
    """16 hex digits of the code that a function runs in its library.

    Functions that differ only in comments, docstrings, annotations or layout have the same digest.

    Example:
        >>> len(code_digest(code_digest))
        16
    """
    library = function.__module__.partition(".")[0]
    parts: list[Any] = [function]
    written: dict[str, str] = {}
    while parts:
        part = parts.pop()
        name = f"{part.__module__}.{part.__qualname__}"
        if name in written:
            continue
        written[name], names = _parsed(part)
        memo = vars(sys.modules[part.__module__])
        parts += [_code_of(memo[used]) for used in names if _is_of(memo.get(used), library)]
    return hashlib.sha256(repr(sorted(written.items())).encode()).hexdigest()[:16]


def _is_of(value: object, library: str) -> bool:
    return getattr(_code_of(value), "__module__", "").partition(".")[0] == library


def _code_of(value: Any) -> Any:
    """Return the function or class itself, or the class of any other object."""
    return value if isinstance(value, (FunctionType, type)) else type(value)


@functools.lru_cache(maxsize=256)
def _parsed(part: Any) -> tuple[str, frozenset[str]]:
    """Return the syntax of a function or class, and the names that it uses."""
    # The code's source is that of the wrapper where a function has been wrapped.
    source = inspect.getsource(getattr(part, "__code__", part))
    names: set[str] = set()
    return _source_of(ast.parse(textwrap.dedent(source)), names), frozenset(names)


def _source_of(node: Any, names: set[str]) -> str:
    """Return the syntax tree as text that is the same on all Pythons.

    Adds the names that it uses.
    """
    if isinstance(node, list):
        return f"[{', '.join(_source_of(item, names) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Name):
        names.add(node.id)
    fields = [
        f"{name}={_source_of(value, names)}"
        for name, value in ast.iter_fields(node)
        if name not in _LEFT_OUT and value not in (None, [])
    ]
    return f"{type(node).__name__}({', '.join(fields)})"


def _is_docstring(node: object) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class LeftToEformerError(Exception):
    """Our function would treat this input differently from eformer's."""


def match_partition_rules(
    rules: Any, tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """Eformer's function. It handles rules whose specs are not PartitionSpecs itself."""
    _leave_if_logging()
    if not isinstance(rules, (list, tuple)) or not all(map(_is_plain_code, rules)):
        raise LeftToEformerError
    least = _eformers("MIN_SHARDING_SIZE") if min_size is None else min_size
    return ours.match_partition_rules(rules, tree, least, strict)


def get_corrected_named_sharding(
    shape: tuple[int, ...], partition_spec: Any, raise_mesh_error: bool = True
) -> NamedSharding:
    """Eformer's function, on the mesh that eformer uses: that of `with mesh:`."""
    mesh = _eformers("get_incontext_mesh")(raise_mesh_error)
    if mesh.empty or _eformers("LOG_SHARDING_MOVE"):
        return _warning_the_caller(shape, partition_spec, raise_mesh_error)
    if len(partition_spec) == 0:
        return NamedSharding(mesh, PartitionSpec())
    return corrected_sharding(partition_spec, tuple(shape), mesh, ours._CORRECTION)


def make_shard_and_gather_fns(partition_specs: Any, mesh: Any = None) -> tuple[Any, Any]:
    """Eformer's function, without compiling. It handles several processes itself."""
    _leave_if_logging()
    if jax.process_count() > 1:
        raise LeftToEformerError
    on_mesh = _eformers("get_incontext_mesh")() if mesh is None else mesh
    _, gather_fn = ours.make_shard_and_gather_fns(PartitionSpec(), on_mesh)
    original = _original("make_shard_and_gather_fns")

    def shard_fn(spec: Any) -> Callable[..., Any]:
        sharding = NamedSharding(on_mesh, spec)
        # Unlike in our own, numpy arrays and arrays with PartitionSpec() stay in place.
        return _or_eformers(
            lambda tensor: ours.with_sharding_constraint(tensor, sharding),
            lambda: original(spec, on_mesh)[0],
        )

    def gathering(spec: Any) -> Callable[..., Any]:
        return _or_eformers(gather_fn, lambda: original(spec, on_mesh)[1])

    return (
        jax.tree_util.tree_map(shard_fn, partition_specs),
        jax.tree_util.tree_map(gathering, partition_specs),
    )


def create_pattern_based_partition_spec(
    pattern: str, mesh: Any = None, default_spec: Any = None
) -> Callable[..., Any]:
    """Eformer's function. It handles an invalid regex, which no name may ever reach, itself."""
    on_mesh = _eformers("get_incontext_mesh")() if mesh is None else mesh
    original = _original("create_pattern_based_partition_spec")
    return _or_eformers(
        ours.create_pattern_based_partition_spec(pattern, on_mesh, default_spec),
        lambda: original(pattern, on_mesh, default_spec),
    )


def _eformers(name: str) -> Any:
    return loaded("eformer.escale.partition.constraints", name)


def _original(name: str) -> Any:
    return inspect.unwrap(_eformers(name))


def _or_eformers(
    function: Callable[..., Any], make_eformers: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Our function; inputs that it refuses go to the function that eformer would make."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            return function(*args, **kwargs)
        return make_eformers()(*args, **kwargs)

    return answer


def _warning_the_caller(*args: Any) -> NamedSharding:
    """Eformer's result, with its warnings at the caller's line instead of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharding: NamedSharding = _original("get_corrected_named_sharding")(*args)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=4)
    return sharding


def _leave_if_logging() -> None:
    # eformer reads the environment at import, our functions at each call.
    if _eformers("LOG_SHARDING_MOVE") or logs_moves():
        raise LeftToEformerError


def _is_plain_code(rule: Any) -> bool:
    return isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)


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
        ours="shardrules._patching.patch",
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
        originals = [modules for name in dict.fromkeys(libraries) for modules in _originals(name)]
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
    """Return (function, our function) pairs of a library for functions not replaced yet."""
    library = _LIBRARIES.get(name)
    if library is None:
        accepted = ", ".join(map(repr, _LIBRARIES))
        raise ValueError(f"patch does not know the library {name!r}; it knows {accepted}")
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


def _is_known(function: object, accepted: tuple[str, ...]) -> TypeGuard[FunctionType]:
    try:
        return isinstance(function, FunctionType) and code_digest(function) in accepted
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
    """Replace functions wherever they are globals of a module."""
    new_by_id = {id(old): new for old, new in new_of.items()}
    for module in list(sys.modules.values()):
        # isinstance, vars and getattr would load modules that are loaded lazily.
        if not issubclass(type(module), ModuleType):
            continue
        names = object.__getattribute__(module, "__dict__")
        for name, value in list(names.items()):
            if id(value) in new_by_id:
                names[name] = new_by_id[id(value)]
