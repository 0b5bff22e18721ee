"""Runs a step small, once whole and once sharded, and compares what it returns: `rehearse`.

Both programs run to their end in a child process, `main`, with the same arguments. What rounding
may do is measured, and not modelled: the whole program runs again with its arguments moved by one
rounding.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardrules._base.arguments import check_share, check_type
from shardrules._base.text import bytes_shown, counted, mesh_shown, printable_lines
from shardrules._place.mesh import as_mesh
from shardrules._plan.findings import Finding, Findings
from shardrules._plan.plan import Plan
from shardrules._program.compiler import Child
from shardrules._program.jax_names import (
    CompilerInput,
    compiler_input,
    kept_arguments,
    run_module,
)
from shardrules._program.libraries import call_behind, inner_of
from shardrules._program.lowering import check_step, check_step_on, lowered_on, step_parts

# Threads of a process: XLA for CPU has some for each device.
_MOST_DEVICES: Final = 512
_FLOATS: Final = re.compile(r"[<x](b?f(?:16|32|64))>")
_NARROW: Final = re.compile(r"[<x](?:u?i[24]|f4\w+)>")
_ROUNDING_OF: Final = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 2.0**-23, "f64": 2.0**-52}
_ROUNDINGS: Final = 8
"""How many times as much as one rounding of the arguments a sharded program may change a result."""
_STATE: Final = 4
"""A result that is nearer to an argument than this part of its largest value is its next state."""
_LARGEST: Final = 2 * 10**9
"""Bytes of values that are given for an argument: marshal takes 2 GiB."""
_Form = tuple[str, tuple[int, ...]]
"""Dtype and shape of an array, as it is stored."""
_Argument = tuple[str, tuple[int, ...], bytes | None]
"""Its form, and its values; None of an argument that is to be random."""
_Program = tuple[tuple[Any, ...], dict[str, int]]
"""A `CompilerInput`, and the mesh."""
_SMALLER: Final = (
    "let step_on take its sizes, such as layers, width and rows, as arguments whose defaults are "
    "small"
)


def rehearse(
    step_on: Callable[..., Any],
    /,
    mesh: Mapping[str, int] | Mesh | AbstractMesh,
    *,
    rtol: float | None = None,
    args: tuple[Any, ...] | None = None,
) -> Findings:
    """Run a small step whole and sharded, on this machine's processors, and compare the results.

    All of it happens in a child process, which has as many devices as the mesh. A result that is
    an argument's next state is compared by its change.

    | you have | it looks |
    |---|---|
    | rules, and a tree of shapes | `plan.check()` |
    | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
    | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
    | live arrays | `sr.audit(params, plan)` |
    | a small step, and this machine | `sr.rehearse(step_on, {"fsdp": 4, "tp": 2})` |

    Args:
        step_on: A function that takes a mesh, and returns (step, arguments, outputs) or (step,
            arguments), as `prove` takes them. It is asked for the mesh, and for one of the same
            axes with one device each: shapes must not depend on it.
        mesh: The mesh, such as {"fsdp": 4, "tp": 2}.
        rtol: The largest difference of a result that is accepted, by its largest value. Default:
            eight times what one rounding of the arguments does to it.
        args: The step's arguments with their values. Default: those that `step_on` gives as
            arrays, and else random ones: small floats of both signs, and then positive ones, unless
            those give NaNs, and integers that are rows of every table.

    Returns:
        What rounding does not explain.

    Raises:
        TypeError: `step_on` returns no step.
        ValueError: It is another step for one device, or `args` do not fit the step.
        RuntimeError: The step is too large for this machine, or XLA for CPU refuses it.
        TimeoutError: It has not ended after 20 minutes.

    Example:
        >>> import jax, shardrules as sr
        >>> def step_on(mesh):
        ...     plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "tp")], mesh)
        ...     return jax.jit(lambda params: params["w"].sum(0)), (plan,)
        >>> sr.rehearse(step_on, {"tp": 2}).raise_for("warning")
    """
    check_step_on(step_on)
    if rtol is not None:
        check_share("rtol", rtol, "1e-5")
    if args is not None:
        check_type("args", args, tuple, "the arguments of the step, as a tuple")
    target = as_mesh(mesh, "mesh")
    sizes, types = dict(target.shape), target.axis_types
    if target.size > _MOST_DEVICES:
        raise ValueError(
            f"mesh: {mesh_shown(sizes)} are {target.size:,} devices, of at most {_MOST_DEVICES}: "
            "give a small mesh with the same axes"
        )
    single = _Lowered(step_on, dict.fromkeys(sizes, 1), types)
    sharded = _Lowered(step_on, sizes, types)
    for what in ("arguments", "results"):
        if getattr(single, what) != getattr(sharded, what):
            raise ValueError(
                f"step_on builds another step for {mesh_shown(sizes)} than for one device, whose "
                f"{what} are others, or of other shapes or dtypes; let it use the mesh for "
                "shardings alone, and make no dimension of a device's own rows"
            )
    # Before XLA for CPU is asked, which has been seen to crash at such sizes.
    needed = sum(jnp.dtype(name).itemsize * prod(shape) for name, shape in sharded.arguments)
    if missing := _missing_memory(needed):
        raise RuntimeError(f"the step cannot be run here: for its arguments {missing}: {_SMALLER}")
    arguments, paths = list(_arguments(sharded, args)), sharded.output_paths()
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(target.size)}
    # With 64 bits arrays keep their dtypes, whatever those are.
    settings = {"JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    child = Child(
        __name__,
        os.environ | devices | settings,
        single=single.program,
        sharded=sharded.program,
        arguments=arguments,
        results=sharded.results,
        rounding=sharded.rounding,
        rtol=None if rtol is None else float(rtol),
    )
    with closing(child):
        if error := child.error("the step"):
            fix = f": {_SMALLER}" if error.startswith("MemoryError") else ""
            lines = f"{error}{fix}".splitlines()
            raise RuntimeError(printable_lines(["the step cannot be run here:", *lines]))
        rows = zip(paths, json.loads(child.text("findings.json")), strict=True)
    findings = (
        Finding(level, kind, f"{path}{message}", fix, (path,), 1)
        for path, of_result in rows
        for level, kind, message, fix, *_ in of_result
    )
    scope = f"{counted(len(paths), 'result')} on {mesh_shown(sizes)} and on one device"
    return Findings(findings, scope)


class _Lowered:
    """A step that is lowered for a mesh, to be run elsewhere."""

    def __init__(
        self, step_on: Callable[..., Any], sizes: dict[str, int], types: tuple[Any, ...]
    ) -> None:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        step, self.args, *_ = step_parts(step_on(mesh), "step_on")
        check_step(step, self.args)
        self._lowered, _ = lowered_on(mesh, step, self.args)
        self._inner = inner_of(self._lowered)
        program = compiler_input(self._inner)
        if len(program.device_ids) != mesh.size:
            raise ValueError(
                f"the step needs no array on {mesh_shown(sizes)}; give it an argument that it uses"
            )
        if jax.__version_info__ < (0, 8) and _NARROW.search(self._inner.as_text()):
            raise RuntimeError("XLA for CPU of JAX 0.7 spoils arrays of 2 and 4 bits: take JAX 0.8")
        infos = tree_util.tree_leaves(self._inner.args_info)
        self.count = len(infos)
        """How many arrays the step takes."""
        self.leaves = kept_arguments(self._inner)
        """Numbers of those that it uses."""
        self.arguments = [_stored_form(infos[leaf]) for leaf in self.leaves]
        self.results = [_stored_form(info) for info in tree_util.tree_leaves(self._inner.out_info)]
        # Of an enum they are not known to the child.
        names = {str.__str__(axis): size for axis, size in sizes.items()}
        self.program: _Program = (tuple(program), names)

    @property
    def rounding(self) -> float:
        """Rounding of the coarsest floats that it computes with."""
        names = set(_FLOATS.findall(self._inner.as_text()))
        return max((_ROUNDING_OF[name] for name in names), default=0.0)

    def output_paths(self) -> list[str]:
        """Return the path of each result of the program."""
        plans = tuple(arg if isinstance(arg, Plan) else None for arg in self.args)
        call = call_behind(self._lowered, self._inner, plans)
        places = [*call.out_leaves, *(after for _, after in call.updates)]
        path_of = dict(zip(places, call.paths("outputs"), strict=True))
        return [path_of.get(place, f"outputs[{place}]") for place in range(len(self.results))]


def _stored_form(info: Any) -> _Form:
    """Return the dtype and shape in which an array is stored; random keys are integers."""
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        info = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(info.shape, info.dtype))
    return np.dtype(info.dtype).name, tuple(info.shape)


def _arguments(lowered: _Lowered, args: tuple[Any, ...] | None) -> Iterator[_Argument]:
    """Yield the arguments that a step uses, with the values of those that have some."""
    arrays = (
        arg.abstract() if isinstance(arg, Plan) else arg
        for arg in (lowered.args if args is None else args)
    )
    leaves = tree_util.tree_leaves([*arrays])
    if len(leaves) != lowered.count:  # such as of modules, which their library splits
        if args is not None:
            raise ValueError(f"args has {counted(len(leaves), 'array')}, not {lowered.count:,}")
        leaves = [None] * lowered.count
    for leaf, (name, shape) in zip(lowered.leaves, lowered.arguments, strict=True):
        value, dtype = leaves[leaf], jnp.dtype(name)
        if value is None or isinstance(value, jax.ShapeDtypeStruct):
            yield name, shape, None
            continue
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        loses = jnp.issubdtype(array.dtype, jnp.inexact) > jnp.issubdtype(dtype, jnp.inexact)
        if array.shape != shape or loses:
            raise ValueError(
                f"args has {array.dtype.name}{[*array.shape]} where the step takes {name}{[*shape]}"
            )
        if array.nbytes > _LARGEST:
            raise ValueError(
                f"args has an array of {bytes_shown(array.nbytes)}, of at most "
                f"{bytes_shown(_LARGEST)}: {_SMALLER}"
            )
        yield name, shape, array.astype(dtype).tobytes()


# In the child.


def main(
    folder: Path,
    *,
    single: _Program,
    sharded: _Program,
    arguments: Sequence[_Argument],
    results: Sequence[_Form],
    rounding: float,
    rtol: float | None,
) -> None:
    """Run both programs, and write the findings about each result to findings.json.

    Their messages are those behind the path of the result.
    """
    run_sharded, run_whole = (_runner(program, results) for program in (sharded, single))
    # Sums of positive values hide what is not linear, those of both signs what large values show;
    # and roots of others are no numbers.
    dtypes = (jnp.dtype(name) for name, _, data in arguments if data is None)
    has_signs = any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
    findings: list[list[Finding]] = [[] for _ in results]
    is_compared = False
    for is_positive in (False, True) if has_signs else (True,):
        values = _argument_values(arguments, is_positive=is_positive)
        variants = [values, *(_moved_by_rounding(values, rounding, seed) for seed in (1, 2))]
        expected = [run_whole(each) for each in variants]
        is_finite = all(jnp.isfinite(array).all() for array in expected[0] if _is_inexact(array))
        if not is_finite and (is_compared or not is_positive):
            continue  # the other values are what the step is made for
        is_compared = True
        rows = zip(*expected, run_sharded(values), strict=True)
        variants.append(values)
        for of_result, row in zip(findings, rows, strict=True):
            if not of_result:
                arrays = [*map(np.asarray, row)]
                of_result.extend(_unlike(arrays, variants, rtol) + _unlike_copies(row[-1]))
    (folder / "findings.json").write_text(json.dumps(findings), "utf-8")


def _runner(program: _Program, results: Sequence[_Form]) -> Callable[[list[Any]], list[Any]]:
    """Compile a program for host devices; what is returned runs it on arrays of numpy."""
    compiled_from, sizes = program
    devices = np.array(jax.devices("cpu")[: prod(sizes.values())])
    mesh = Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))
    shapes = [shape for _, shape in results]
    run, bytes_each = run_module(CompilerInput(*compiled_from), mesh, shapes)
    if missing := _missing_memory(bytes_each * mesh.size):
        raise MemoryError(missing)
    return run


def _missing_memory(needed: int) -> str:
    """Say that so many bytes are not free; "" if they are, or if the system does not say."""
    if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", {}):  # macOS, Windows
        return ""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"it needs {bytes_shown(needed)}, of {bytes_shown(free)}" if needed > free else ""


def _argument_values(arguments: Sequence[_Argument], *, is_positive: bool) -> list[Any]:
    """Return the values of arguments: as they are given, or random, and the same at each call.

    Sums of random floats are small; random integers are tokens, counts of steps, or of keys.
    """
    random, values = np.random.default_rng(0), list[Any]()
    floats = (shape for name, shape, _ in arguments if "float" in name and len(shape) > 1)
    rows = min((size for shape in floats for size in shape if size > 1), default=2)
    for name, shape, data in arguments:
        dtype = jnp.dtype(name)
        if data is not None:
            array: Any = np.frombuffer(data, dtype).reshape(shape)
        elif jnp.issubdtype(dtype, jnp.inexact):
            array = random.normal(size=shape) / max([10, *(size / 8 for size in shape[-2:-1])])
            array = abs(array) if is_positive else array
        elif dtype == np.bool_:
            array = random.random(shape) < 0.5
        elif dtype == np.uint32:
            array = random.integers(0, 2**32, shape, dtype)
        else:
            array = random.integers(0, rows, shape) if shape else np.int64(1)
        values.append(array.astype(dtype))
    return values


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
        wide = [_change(x, values[before].astype(x.dtype)) for x, values in pairs]
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
