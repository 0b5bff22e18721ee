"""The real manifests and rule sets that tests and benchmarks run on."""

import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from examples import demo
from shardrules._plan.files.models import read_arrays
from tests.support.folders import DATA

DEEPSEEK = "flaxpath-deepseek-v3"
# Tens of thousands of arrays, of layers and experts that are alike.
LARGEST = {"deepseek-v3", "deepseek-v3-bf16", DEEPSEEK}

Rule = tuple[str, PartitionSpec]


class Parameter(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str


class Manifest(NamedTuple):
    """All arrays of a model. Names are dotted checkpoint names or slashed tree paths."""

    model: str
    parameters: tuple[Parameter, ...]
    separator: str
    """What separates the components of the names."""

    def flat(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        return {p.name: leaf(p) for p in self.parameters}

    def nested(self, leaf: Callable[[Parameter], Any]) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for parameter in self.parameters:
            *outer, last = parameter.name.split(self.separator)
            node = tree
            for key in outer:
                node = node.setdefault(key, {})
            node[last] = leaf(parameter)
        return tree


def manifest_names() -> list[str]:
    """All manifests; the largest one ships with the package, for the demo."""
    files = (DATA / "manifests").glob("*.json.gz")
    return sorted([DEEPSEEK, *(f.name.removesuffix(".json.gz") for f in files)])


def manifest_path(name: str) -> Path:
    return demo.MODEL if name == DEEPSEEK else DATA / "manifests" / f"{name}.json.gz"


@cache
def manifest(name: str) -> Manifest:
    arrays = read_arrays(str(manifest_path(name)))
    parameters = tuple(Parameter(name, a.shape, a.dtype) for name, a in arrays.leaves.items())
    return Manifest(arrays.name, parameters, arrays.separator)


@cache
def _rule_files() -> dict[str, Any]:
    with gzip.open(DATA / "rules.json.gz") as file:
        return dict(json.load(file))


def rule_file(name: str) -> dict[str, Any]:
    return dict(_rule_files()[name])


def rule_sets(kind: str) -> list[str]:
    return [name for name, content in _rule_files().items() if content["kind"] == kind]


def regex_rule_sets() -> list[str]:
    return rule_sets("regex")


def rules(name: str) -> list[Rule]:
    """(pattern, spec) pairs; a spec may be None."""
    return [(pattern, _spec(spec)) for pattern, spec in _rule_files()[name]["rules"]]


def logical_rules(name: str) -> list[tuple[str, Any]]:
    """(logical name, mesh axes) pairs; in the file the mesh axes are a spec of one entry."""
    return [
        (axis, None if mesh_axes is None else _spec(mesh_axes)[0]) for axis, mesh_axes in _rule_files()[name]["rules"]
    ]


@cache
def logical_axes(name: str) -> dict[str, list[str | None]]:
    """The logical axis names of each parameter of a MaxText model."""
    with gzip.open(DATA / "manifests" / f"{name}.json.gz") as file:
        return dict(json.load(file)["logical_axes"])


def abstract(parameter: Parameter) -> jax.ShapeDtypeStruct:
    """A leaf with the parameter's shape; all dtypes are one, since matching reads none."""
    return jax.ShapeDtypeStruct(parameter.shape, "bfloat16")


def with_dtype(parameter: Parameter) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(parameter.shape, parameter.dtype)


def _spec(entries: list[Any] | None) -> PartitionSpec:
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries or ()))
