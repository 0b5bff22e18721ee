"""The public API as text, a line for each name: what tests/packaging/test_api.py pins and `make api` writes.

Public is what `__all__` of `shardrules` and of the modules of `shardrules.compat` names, what
`shardrules.dialects` and `types` import, and of classes what has no underscore.
"""

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from typing import get_origin

from shardrules import compat

# Of a default without a text of its own.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Public modules beside the root, `compat` left out.
BESIDE_ROOT = ("shardrules.dialects", "shardrules.types")


def public_names(module: str) -> list[str]:
    """The public names of a public module."""
    names = vars(importlib.import_module(module))
    return sorted(names.get("__all__") or [name for name in names if not name.startswith("_")])


def public() -> dict[str, object]:
    """The public names of `shardrules` and of what it offers in modules, without `compat`."""
    return {
        name: getattr(importlib.import_module(module), name)
        for module in ("shardrules", *BESIDE_ROOT)
        for name in public_names(module)
    }


def callables() -> dict[str, list[str]]:
    """The parameters of each public class, function and method that has any, without `compat`."""
    parameters: dict[str, list[str]] = {}
    for name, value in public().items():
        methods = inspect.getmembers(value, inspect.isroutine) if inspect.isclass(value) else []
        functions = {name: value, **{f"{name}.{method}": of for method, of in methods if method[0] != "_"}}
        for path, function in functions.items():
            if callable(function) and (getattr(function, "__module__", None) or "").startswith("shardrules"):
                names = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
                parameters |= {path: names} if names else {}
    return parameters


def modules() -> list[str]:
    """The public modules."""
    return [
        "shardrules",
        *BESIDE_ROOT,
        *sorted(
            f"shardrules.compat.{m.name}" for m in pkgutil.iter_modules(compat.__path__) if not m.name.startswith("_")
        ),
    ]


def api() -> str:
    """Every public name with its signature, as of now."""
    lines = []
    for name in modules():
        module = importlib.import_module(name)
        for offered in public_names(name):
            lines += _described(f"{name}.{offered}", getattr(module, offered))
    return "\n".join(lines) + "\n"


def _described(name: str, thing: object) -> Iterator[str]:
    if get_origin(thing) is not None:  # as X | Y, whose own type depends on the version of Python
        yield f"{name}: type"
    elif inspect.isclass(thing):
        # The signatures of enums, and of other libraries' classes, differ between versions.
        is_ours = thing.__module__.startswith("shardrules") and not issubclass(thing, enum.Enum)
        yield f"class {name}{_signature(thing) if is_ours else ''}"
        # What a class inherits from outside of this package is not ours to promise.
        ours = [base for base in thing.__mro__ if base.__module__.startswith("shardrules")]
        members = {key: value for base in reversed(ours) for key, value in vars(base).items()}
        fields = {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
        for member in sorted(members.keys() | fields):
            if not member.startswith("_"):
                yield from _member(f"{name}.{member}", members.get(member))
    elif callable(thing):
        yield f"def {name}{_signature(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def _member(name: str, value: object) -> Iterator[str]:
    if isinstance(value, (classmethod, staticmethod)):
        yield f"{type(value).__name__} {name}{_signature(value.__func__)}"
    elif inspect.isfunction(value):
        yield f"def {name}{_signature(value)}"
    else:
        yield name


def _signature(thing: object) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return "(...)"
    # Annotations are the type checkers' part: tests/typing.
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    # A constructor that takes what is private is ours.
    if any(p.name.startswith("_") and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        return ""
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return _ADDRESS.sub("", str(plain))


if __name__ == "__main__":
    print(api(), end="")
