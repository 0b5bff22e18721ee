"""Values, checks, texts and files that all floors share, and public names imported at first use."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Final

_EXPORT: Final = re.compile(r"^from (shardrules[\w.]*) import (\w+) as \2$", re.MULTILINE)


def lazy(module: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return (`__getattr__`, the names that it knows) of a module.

    Args:
        module: The module's name.
        file: Its file. The stub beside it has a line `from MODULE import NAME as NAME` for each.
    """
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        sources = {name: source for source, name in _EXPORT.findall(stub.read())}

    def get(name: str) -> object:
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if sources[name] == module:  # a module of the package itself
            value: object = import_module(f"{module}.{name}")
        else:
            value = getattr(import_module(sources[name]), name)
        vars(sys.modules[module])[name] = value
        return value

    return get, sorted(sources)
