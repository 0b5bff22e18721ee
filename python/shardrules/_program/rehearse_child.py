"""Runs a step whole and sharded on host devices, and compares: in the child of `rehearse`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.text import bytes_shown
from shardrules._plan.findings import Finding
from shardrules._program.jax_names import CompilerInput, run_module

_ROUNDINGS: Final = 8
"""How many times as much as one rounding of the arguments a sharded program may change a result."""
_STATE: Final = 4
"""A result that is nearer to an argument than this part of its largest value is its next state."""


def main(folder: Path, request: dict[str, Any]) -> None:
    """Run both programs, and write the findings about each result to findings.json.

    Their messages are those behind the path of the result.
    """
    run_sharded, run_whole = (_program(folder, name, request) for name in ("sharded", "whole"))
    data, values, begin = (folder / "values").read_bytes(), [], 0
    for name, shape in request["arguments"]:
        dtype: Any = jnp.dtype(name)
        values.append(np.frombuffer(data, dtype, prod(shape), begin).reshape(shape))
        begin += values[-1].nbytes
    # Sums of positive values hide what is not linear, and roots of others are no numbers.
    is_signed = [
        flag and _is_inexact(x) for x, flag in zip(values, request["is_random"], strict=True)
    ]
    pairs = zip(values, is_signed, strict=True)
    positive = [abs(x).astype(x.dtype) if flag else x for x, flag in pairs]
    draws = [values, positive] if any(is_signed) else [values]
    findings: list[list[Finding]] = [[] for _ in request["results"]]
    is_compared = False
    for drawn in draws:
        arguments = [drawn, *(_moved_by_rounding(drawn, request["rounding"], i) for i in (1, 2))]
        expected = [run_whole(each) for each in arguments]
        is_finite = all(jnp.isfinite(array).all() for array in expected[0] if _is_inexact(array))
        if not is_finite and (is_compared or drawn is not draws[-1]):
            continue  # the other values are what the step is made for
        is_compared = True
        rows = zip(*expected, run_sharded(drawn), strict=True)
        arguments.append(drawn)
        for of_result, row in zip(findings, rows, strict=True):
            if not of_result:
                arrays = [*map(np.asarray, row)]
                of_result.extend(
                    _unlike(arrays, arguments, request["rtol"]) + _unlike_copies(row[-1])
                )
    (folder / "findings.json").write_text(json.dumps(findings), "utf-8")


def _program(folder: Path, name: str, request: dict[str, Any]) -> Any:
    """Compile a program for host devices; what is returned runs it on arrays of numpy."""
    asked = request[name]
    sizes, count = asked["mesh"], prod(asked["mesh"].values())
    devices = np.array(jax.devices("cpu")[:count]).reshape(tuple(sizes.values()))
    mesh = Mesh(devices, tuple(sizes))
    module, options = ((folder / f"{name}.{end}").read_bytes() for end in ("bc", "pb"))
    asked_of = CompilerInput(module, options, asked["overrides"], [*range(count)])
    execute, bytes_each, of_results = run_module(asked_of, mesh)
    needed, free = bytes_each * count, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise MemoryError(f"it needs {bytes_shown(needed)}, of {bytes_shown(free)}")
    specs = [[tuple(axes) if type(axes) is list else axes for axes in s] for s in asked["specs"]]
    shardings = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs]

    def run(arrays: Sequence[Any]) -> list[jax.Array]:
        placed = [
            jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            for array, sharding in zip(arrays, shardings, strict=True)
        ]
        results = execute(placed)
        targets = [NamedSharding(mesh, s) for s in of_results or [PartitionSpec()] * len(results)]
        rows = zip(request["results"], targets, results, strict=True)
        return [
            jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)
            for (_, shape), sharding, shards in rows
        ]

    return run


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _moved_by_rounding(values: Sequence[Any], rounding: float, seed: int) -> list[Any]:
    """Return floats that are moved by one rounding, up or down."""
    random = np.random.default_rng(seed)
    return [
        (value * (1 + rounding * random.choice([-1, 1], value.shape))).astype(value.dtype)
        if _is_inexact(value)
        else value
        for value in values
    ]


def _unlike(
    results: Sequence[Any], arguments: Sequence[Sequence[Any]], rtol: float | None
) -> list[Finding]:
    """Compare a result of the sharded program, the last, with those of the whole one."""
    expected, actual = results[0], results[-1]

    def at_first(is_there: Any) -> str:
        place = tuple(map(int, np.argwhere(is_there)[0]))
        return f"{[*place]} is {actual[place]} sharded, and {expected[place]} whole"

    if not _is_inexact(expected):
        if not (is_unlike := expected != actual).any():
            return []
        message = f"{at_first(is_unlike)}; {is_unlike.mean():.0%} of the values differ"
        fix = "rounding may decide such a choice; if it does not, look where it is made"
        return [Finding("info", "unequal", message, fix)]
    if np.isnan(expected).any():
        message = " has NaNs in the whole program, too: it is not compared"
        fix = "give args=, with values that the step is made for"
        return [Finding("warning", "nan", message, fix)]
    if (is_nan := np.isnan(actual)).any():
        fix = "look for what a device divides by, such as a count of its own rows"
        return [Finding("error", "nan", at_first(is_nan), fix)]
    before = _state_before(expected, arguments[0])
    finfo: Any = jnp.finfo
    wide = [x.astype("complex128" if np.iscomplexobj(x) else "float64") for x in results]
    if before is not None:
        pairs = zip(wide, arguments, strict=True)
        wide = [_change(x, taken[before].astype(x.dtype)) for x, taken in pairs]
    size, changes = _largest(wide[0]), [np.abs(_change(x, wide[0])) for x in wide[1:]]
    *by_rounding, by_shards = (float(change.max(initial=0.0)) for change in changes)
    # No measure is finer than the result's own last digit.
    least = finfo(expected.dtype).eps * _largest(expected)
    allowed = max(_ROUNDINGS * max(by_rounding), least * (_ROUNDINGS if before is None else 1))
    allowed = allowed if rtol is None else rtol * size
    if by_shards <= allowed:
        return []
    part, least_part = (x / size if size else np.inf for x in (by_shards, allowed))
    of_change = "" if before is None else " of its change"
    message = (
        f"{at_first(changes[-1] == by_shards)}: a difference of {part:.1g}{of_change}, where "
        f"rounding may do {least_part:.1g}"
    )
    fix = "look for a sum or a mean over a mesh axis that is missing, or taken twice"
    return [Finding("error", "unequal", message, fix)]


def _state_before(result: Any, arguments: Sequence[Any]) -> int | None:
    """Return the argument that a result is the next state of; None if it is of none."""
    changes = {
        number: _largest(_change(result.astype("complex128"), value.astype("complex128")))
        for number, value in enumerate(arguments)
        if (value.shape, value.dtype) == (result.shape, result.dtype)
    }
    number = min(changes, key=changes.__getitem__, default=None)
    is_state = number is not None and changes[number] < _largest(result) / _STATE
    return number if is_state else None


def _change(new: Any, old: Any) -> Any:
    """Subtract; infinities that are the same, such as those of a mask, have not changed."""
    with np.errstate(invalid="ignore"):
        return np.where(new == old, 0, new - old)


def _largest(values: Any) -> float:
    """Return the largest finite value."""
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _unlike_copies(array: Any) -> list[Finding]:
    """Find the first element of which two copies differ, and the axes between their devices."""
    mesh, firsts = array.sharding.mesh, dict[str, Any]()
    for shard in array.addressable_shards:
        first = firsts.setdefault(str(shard.index), shard)
        values = [np.asarray(copy.data) for copy in (first, shard)]
        bits = [np.frombuffer(x.tobytes(), f"V{x.itemsize}") for x in values]
        if (is_unlike := bits[0] != bits[1]).any():
            inner = np.unravel_index(int(np.argmax(is_unlike)), shard.data.shape)
            starts = [part.start or 0 for part in shard.index]
            place = [int(a + b) for a, b in zip(inner, starts, strict=True)]
            devices = (np.argwhere(mesh.devices == copy.device)[0] for copy in (first, shard))
            axes = [axis for axis, a, b in zip(mesh.axis_names, *devices, strict=True) if a != b]
            names, call = " and ".join(axes), ", ".join(f'"{axis}"' for axis in axes)
            message = f"{place} has other values in its copies along {names}"
            fix = f"sum it there, jax.lax.psum(x, {call}), or let {names} cut it by its spec"
            return [Finding("error", "differs", message, fix)]
    return []
