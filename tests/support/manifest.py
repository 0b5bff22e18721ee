"""Manifests: the arrays of a real model as records, in the forms that tests and benchmarks want.

Made of what `read_arrays` reads. Must not know about rules.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from shardrules._base.dtypes import bits_of
from shardrules._plan.files.models import read_arrays

__all__ = ["Manifest", "Parameter", "read_manifest"]


class Parameter(NamedTuple):
    """One array of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the whole array."""
        return prod(self.shape) * bits_of(self.dtype) // 8


class Manifest(NamedTuple):
    """All arrays of a model. Names are dotted checkpoint names or slashed tree paths."""

    model: str
    parameters: tuple[Parameter, ...]
    separator: str
    """What separates the components of the names."""

    def flat(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        """{name: leaf(parameter)}."""
        return {p.name: leaf(p) for p in self.parameters}

    def nested(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Dicts in dicts, one level for each component of the names."""
        tree: dict[str, Any] = {}
        for parameter in self.parameters:
            *outer, last = parameter.name.split(self.separator)
            node = tree
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = leaf(parameter)
        return tree


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file that `read_arrays` reads."""
    arrays = read_arrays(str(path))
    parameters = tuple(Parameter(name, a.shape, a.dtype) for name, a in arrays.leaves.items())
    return Manifest(arrays.name, parameters, arrays.separator)
