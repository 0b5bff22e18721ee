"""A digest of a function's code, by which `patch` recognises the functions that tests compared.

It covers the function's own syntax and all that the function reaches in its library: functions,
classes, and the classes of objects. Comments, docstrings, annotations and layout do not count.
Parses a few hundred lines. Must not know what is replaced.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import FunctionType
from typing import Any, Final

__all__ = ["code_digest"]

_LEFT_OUT: Final = ("annotation", "returns", "type_comment", "type_params", "kind")


def code_digest(function: FunctionType) -> str:
    """16 hex digits of the code that a function runs in its library.

    Functions that differ only in comments, docstrings, annotations or layout have the same digest.

    Raises:
        OSError: There is no source to read.

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
        known = vars(sys.modules[part.__module__])
        parts += [_code_of(known[used]) for used in names if _is_of(known.get(used), library)]
    return hashlib.sha256(repr(sorted(written.items())).encode()).hexdigest()[:16]


def _is_of(value: object, library: str) -> bool:
    return getattr(_code_of(value), "__module__", "").partition(".")[0] == library


def _code_of(value: Any) -> Any:
    """The function or class itself, or the class of any other object."""
    return value if isinstance(value, (FunctionType, type)) else type(value)


@functools.lru_cache(maxsize=256)
def _parsed(part: Any) -> tuple[str, frozenset[str]]:
    """The syntax of a function or class, and the names that it uses."""
    # The code's source is that of the wrapper where a function has been wrapped.
    source = inspect.getsource(getattr(part, "__code__", part))
    names: set[str] = set()
    return _written(ast.parse(textwrap.dedent(source)), names), frozenset(names)


def _written(node: Any, names: set[str]) -> str:
    """The syntax tree as text that is the same on all Pythons; adds the names that it uses."""
    if isinstance(node, list):
        return f"[{', '.join(_written(item, names) for item in node if not _is_docstring(item))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Name):
        names.add(node.id)
    fields = [
        f"{name}={_written(value, names)}"
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
