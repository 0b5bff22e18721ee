"""What MaxText's script `run_sharding_dump` wrote for models on meshes: tests/data/maxtext-dumps."""

from __future__ import annotations

import ast
import gzip
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax

import shardrules as sr
from tests.support.folders import DATA

DUMPS = sorted((DATA / "maxtext-dumps").glob("*.json.gz"))
_ACTIVATION = re.compile(r"(?P<dtype>\w+)\[(?P<dims>[0-9,]*)\]")


class Dumped(NamedTuple):
    """Arrays by path: abstract, with their logical names and the spec's entries of MaxText."""

    arrays: dict[str, jax.ShapeDtypeStruct]
    names: dict[str, tuple[Any, ...]]
    specs: dict[str, tuple[Any, ...]]


class Dump(NamedTuple):
    mesh: dict[str, int]
    rules: sr.LogicalRules
    leaves: Dumped
    """Parameters and optimizer state; their dtypes are not in a dump."""
    activations: Dumped
    """Those that have names, by place, dtype and shape."""
    unnamed: int
    """The number of other activations."""


def read_dump(path: Path) -> Dump:
    content = json.loads(gzip.decompress(path.read_bytes()))
    leaves = {
        name: (line["shape"], "float32", line["logical"], line["spec"])
        for name, line in content["leaves"].items()
    }
    lines = content["activations"]
    named = {line["name"]: _activation(line) for line in lines if line["logical"] != "Unknown"}
    return Dump(
        content["mesh"],
        sr.LogicalRules(content["logical_axis_rules"], sr.dialects.MAXTEXT),
        _dumped(leaves),
        _dumped(named),
        len(lines) - len(named),
    )


def _dumped(rows: dict[str, tuple[Any, str, Any, Any]]) -> Dumped:
    return Dumped(
        {path: jax.ShapeDtypeStruct(row[0], row[1]) for path, row in rows.items()},
        {path: _entries(row[2]) for path, row in rows.items()},
        {path: _entries(row[3]) for path, row in rows.items()},
    )


def _activation(line: dict[str, str]) -> tuple[Any, str, Any, Any]:
    """Names and spec are Python literals; shape and dtype are at the end of the name."""
    match = _ACTIVATION.fullmatch(line["name"].rpartition(": ")[2])
    assert match is not None
    shape = [int(size) for size in match["dims"].split(",") if size]
    names, spec = (
        ast.literal_eval(line["logical"]),
        ast.literal_eval(line["spec"].removeprefix("P")),
    )
    return shape, match["dtype"], names, spec


def _entries(written: Any) -> tuple[Any, ...]:
    entries = written if isinstance(written, list | tuple) else (written,)
    return tuple(tuple(entry) if isinstance(entry, list) else entry for entry in entries)
