"""Steps of models as tests/data/steps.toml has them: their meshes, constraints, rules and batches, and their faults."""

from __future__ import annotations

import importlib
import pkgutil
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

from tests.support.folders import DATA

Places = Mapping[str, P | None]
Rules = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Built:
    """A compiled step, and what is planned for it."""

    compiled: Any
    """What jit, nnx.jit or eqx.filter_jit compiles."""
    inputs: tuple[Any, ...]
    """For `verify`: a Plan, specs or None for each argument."""
    outputs: Any


class Row(NamedTuple):
    """What the table says of a step as it is right."""

    mesh: Mapping[str, int]
    places: Places
    """Of constraints by name, and of the batch."""
    rules: Rules
    batch: Mapping[str, Any]
    """Shapes of integers, or dtypes and shapes."""
    shapes: Mapping[str, Any]
    """Abstract parameters, float32; those of a scan in "layers". Empty where the step makes them."""


class Step(NamedTuple):
    """A step as people write it, and what they do wrong."""

    name: str
    build: Callable[..., Built]
    """Compiles it; without arguments the step is clean."""
    faults: Mapping[str, Mapping[str, Any]] = {}
    """What is wrong, and the arguments of `build` that make it so."""
    group: str = ""
    """"tuned": `verify` was tuned on it. "fresh", "blind" or "small": it was written afterwards."""
    missed: frozenset[str] = frozenset()
    """Costly faults that are not told."""


def steps(*groups: str) -> list[Step]:
    """Return the steps of groups, such as "tuned"."""
    package, rows = __package__ or "", _rows()
    names = (module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))
    modules = [importlib.import_module(f"{package}.{name}") for name in names if not name.startswith(("__", "test"))]
    makers = {name: make for module in modules for name, make in getattr(module, "STEPS", {}).items()}
    assert makers.keys() == rows.keys() - {"usual"}
    return [_step(name, make, rows[name]) for name, make in makers.items() if rows[name]["group"] in groups]


@cache
def _rows() -> dict[str, Any]:
    return tomllib.loads((DATA / "steps.toml").read_text("utf-8"))


def _step(name: str, make: Callable[..., Built], row: Mapping[str, Any]) -> Step:
    shapes = _arrays(row.get("params", {})) | ({"layers": _arrays(row["layers"])} if "layers" in row else {})
    right = Row(row["mesh"], _places(row["places"]), _rules(row["rules"]), _by_name(row.get("batch", {})), shapes)
    faults: dict[str, Mapping[str, Any]] = {}
    for key, value in row["faults"].items():
        if isinstance(value, list):
            faults |= {slip: _fault(_rows()["usual"].get(slip, {"wrong": slip})) for slip in value}
        else:
            faults[key] = _fault(value)
    return Step(name, partial(make, right), faults, row["group"], frozenset(row.get("missed", ())))


def _fault(row: Mapping[str, Any]) -> dict[str, Any]:
    """Constraints by name; beside them "rules", "mesh", "wrong" (slips), and "told" (what is returned)."""
    others = {key: row[key] for key in ("mesh", "wrong", "told") if key in row}
    rules = {"rules": _rules(row["rules"])} if "rules" in row else {}
    return others | rules | _places({key: text for key, text in row.items() if key not in {*others, *rules}})


def _by_name(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for names, value in row.items() for name in names.split()}


def _arrays(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(tuple(shape), "float32") for name, shape in _by_name(row).items()}


def _places(row: Mapping[str, str]) -> dict[str, P | None]:
    return {name: _spec(text) for name, text in _by_name(row).items()}


def _rules(rows: Sequence[Sequence[str]]) -> Rules:
    return [(pattern, _spec(text)) for pattern, text in rows]


def _spec(text: str) -> P | None:
    if text == "free":
        return None
    entries = () if text == "whole" else text.split()
    return P(*(None if one == "-" else tuple(one.split("+")) if "+" in one else one for one in entries))
