"""How values look at a prompt, in a notebook and in `help`.

A prompt calls `repr` for what was asked for, and a list for each of its items, so a class is one of
two things: an answer, such as the findings of a check, shows its text; a record, such as one
finding, is a short line. Costs nothing until something is shown. Must not know what a text says.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, Final, TypeVar

from shardrules._format import and_more, brief

__all__ = ["answer", "readable", "record", "without_defaults"]

_T = TypeVar("_T")
# A screen or two: an answer may stand in a list after all.
_MOST_LINES: Final = 60


def answer(cls: type[_T]) -> type[_T]:
    """Makes `repr` and notebooks show the first lines of `str`; `print` shows all of them."""
    cls.__repr__ = _first_lines  # type: ignore[method-assign]
    return _shown_in_notebooks(readable(cls))


def record(cls: type[_T]) -> type[_T]:
    """Makes the `repr` of a NamedTuple one short line; notebooks show its text, if it has one."""
    cls.__repr__ = _line  # type: ignore[method-assign]
    has_text = "__str__" in vars(cls)
    made = readable(cls)
    return _shown_in_notebooks(made) if has_text else made


def without_defaults(self: Any) -> str:
    """The `repr` of a dataclass, without the fields that have their defaults."""
    named = ((field, getattr(self, field.name)) for field in fields(self))
    given = (f"{field.name}={value!r}" for field, value in named if not _is_default(field, value))
    return f"{type(self).__name__}({', '.join(given)})"


def _is_default(field: Field[Any], value: object) -> bool:
    made = field.default if field.default_factory is MISSING else field.default_factory()
    return type(value) is type(made) and bool(value == made)


def _first_lines(self: object) -> str:
    lines = str(self).split("\n")
    more = (f"{line}; print shows them" for line in and_more(len(lines), _MOST_LINES, "line"))
    return "\n".join([*lines[:_MOST_LINES], *more])


def _line(self: Any) -> str:
    named = (f"{name}={brief(value)}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({', '.join(named)})"


def _html(self: object) -> str:
    from html import escape

    return f"<pre>{escape(_first_lines(self), quote=False)}</pre>"


def _shown_in_notebooks(cls: type[_T]) -> type[_T]:
    cls._repr_html_ = _html  # type: ignore[attr-defined]
    return cls


def readable(cls: type[_T]) -> type[_T]:
    # A NamedTuple's are ForwardRefs, which `help` would show as such.
    if hasattr(cls, "_fields"):
        found = cls.__annotations__
        plain = {name: getattr(of, "__forward_arg__", of) for name, of in found.items()}
        cls.__annotations__ = cls.__new__.__annotations__ = plain
    return cls
