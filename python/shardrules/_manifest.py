"""Manifests: the names, shapes and dtypes of a real model's parameters, as data without arrays.

Read from gzipped JSON, which is parsed and never executed. Must not know about rules.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

# Bytes of one element, by the dtype names of safetensors.
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1,
    "U8": 1, "BOOL": 1,
}  # fmt: skip


class Parameter(NamedTuple):
    """One array of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the whole array."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


class Manifest(NamedTuple):
    """All arrays of a model. Names are dotted checkpoint names or slashed tree paths."""

    model: str
    parameters: tuple[Parameter, ...]

    @property
    def separator(self) -> str:
        """What separates the components of the names."""
        return "/" if any("/" in p.name for p in self.parameters) else "."

    def flat(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        """{name: leaf(parameter)}."""
        return {p.name: leaf(p) for p in self.parameters}

    def nested(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Dicts in dicts, one level for each component of the names."""
        tree: dict[str, Any] = {}
        separator = self.separator
        for parameter in self.parameters:
            *outer, last = parameter.name.split(separator)
            node = tree
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = leaf(parameter)
        return tree


def read_manifest(path: Path) -> Manifest:
    """The manifest in a gzipped JSON file.

    Its content: `{"model": name, "params": [[name, [dim, ...], dtype], ...]}`.
    """
    with gzip.open(path) as file:
        content = json.load(file)
    parameters = tuple(Parameter(n, tuple(s), d) for n, s, d in content["params"])
    return Manifest(content["model"], parameters)
