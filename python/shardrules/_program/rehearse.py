"""Runs a step small, once whole and once sharded, and compares what it returns: `rehearse`.

Both programs run to their end in a child process, with the same arguments. What rounding may do is
measured, and not modelled: the whole program runs again with its arguments moved by one rounding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardrules._base.arguments import check_share, check_type
from shardrules._base.text import counted, mesh_shown, printable_lines
from shardrules._place.mesh import as_mesh
from shardrules._plan.findings import Finding, Findings
from shardrules._plan.plan import Plan
from shardrules._program import rehearse_child
from shardrules._program.child import FAILED
from shardrules._program.compiler import LIMIT, Child, crash_text
from shardrules._program.executable import Executable
from shardrules._program.jax_names import compiler_input, kept_arguments, lowered_shardings
from shardrules._program.libraries import StoredProgram, boxed, call_of, inner_of
from shardrules._program.lowering import check_step, check_step_on, lowering_on, step_parts
from shardrules._program.memory import LiveRanges
from shardrules._program.rehearse_child import read, write

_RUNS: Final = ("the arguments", "the arguments moved once", "the arguments moved twice")
# Threads of a process: XLA for CPU has some for each device.
_MOST_DEVICES: Final = 512
_ROUNDINGS: Final = 8
"""How many times as much as one rounding of the arguments a sharded program may change a result."""
_STATE: Final = 4
"""A result that is nearer to an argument than this part of its largest value is its next state."""
_FLOATS: Final = re.compile(r"[<x](b?f(?:16|32|64))>")
_NARROW: Final = re.compile(r"[<x](?:u?i[24]|f4\w+)>")
_NAMES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_LAST_WORDS: Final = 2000
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
            arrays, and else random ones: small floats of both signs, then positive
            ones, and integers that are rows of
            every table.

    Returns:
        What rounding does not explain.

    Raises:
        TypeError: `step_on` returns no step, or `args` has floats where the step takes integers.
        ValueError: It is another step for one device.
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
    asked = as_mesh(mesh, "mesh")
    sizes, types = dict(asked.shape), asked.axis_types
    if asked.size > _MOST_DEVICES:
        raise ValueError(
            f"mesh: {mesh_shown(sizes)} are {asked.size:,} devices, and a rehearsal has at most "
            f"{_MOST_DEVICES}: give a small mesh with the same axes"
        )
    single = _Lowered("whole", step_on, dict.fromkeys(sizes, 1), types)
    sharded = _Lowered("sharded", step_on, sizes, types)
    pairs = {
        "arguments": (single.avals, sharded.avals),
        "results": (single.results, sharded.results),
    }
    for what, (of_single, of_sharded) in pairs.items():
        if of_single != of_sharded:
            raise ValueError(
                f"step_on builds another step for {mesh_shown(sizes)} than for one device, whose "
                f"{what} are others, or of other shapes or dtypes; let it use the mesh for "
                "shardings alone, and make no dimension of a device's own rows"
            )
    # Sums of positive values hide what is not linear, and roots of others are no numbers.
    signed, positive = (_values(sharded, args, is_signed=one) for one in (True, False))
    is_random = not all(map(np.array_equal, signed, positive))
    rounding = sharded.rounding
    draws = [
        [values, *(_moved_by_rounding(values, rounding, seed) for seed in (1, 2)), values]
        for values in ([signed, positive] if is_random else [signed])
    ]
    paths = sharded.output_paths()
    summary = f"{counted(len(paths), 'result')} on {mesh_shown(sizes)} and on one device"
    findings = Findings((), summary)
    for arguments, (arrays, copies) in zip(draws, _run(single, sharded, draws), strict=True):
        if arguments is not draws[-1] and not all(map(_is_finite, arrays[0])):
            continue
        compared = [
            _compared(path, results, arguments, rtol)
            for path, *results in zip(paths, *arrays, strict=True)
        ]
        of_copies = [
            _finding_of_copies(path, *place)
            for path, place in zip(paths, copies, strict=True)
            if place is not None
        ]
        findings = Findings(filter(None, [*compared, *of_copies]), summary)
        if findings.at_least("warning"):
            break
    return findings


def _is_finite(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jnp.inexact) or bool(np.isfinite(array).all())


class _Lowered:
    """A step that is lowered for a mesh, to be run elsewhere."""

    def __init__(
        self, name: str, step_on: Callable[..., Any], sizes: dict[str, int], types: tuple[Any, ...]
    ) -> None:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        step, self.args, *_ = step_parts(step_on(mesh), "step_on")
        check_step(step, self.args)
        self._lowered = lowering_on(mesh, step, self.args).lowered
        self._inner = inner_of(self._lowered)
        asked, shardings = compiler_input(self._inner), lowered_shardings(self._inner)
        kept = kept_arguments(self._inner)
        if asked is None or shardings is None or kept is None:
            raise RuntimeError("this version of JAX does not say how a lowered step is compiled")
        if len(asked.device_ids) != mesh.size:
            raise ValueError(
                f"the step needs no array on {mesh_shown(sizes)}; give it an argument that it uses"
            )
        if jax.__version_info__ < (0, 8) and _NARROW.search(self._inner.as_text()):
            raise RuntimeError("XLA for CPU of JAX 0.7 spoils arrays of 2 and 4 bits: take JAX 0.8")
        self.asked, self.kept = asked, kept
        infos = tree_util.tree_leaves(self._inner.args_info)
        self.count = len(infos)
        self.avals = [_stored_form(infos[leaf]) for leaf in kept]
        """Dtype and shape of the arguments that it uses, as they are stored."""
        self.results = [_stored_form(info) for info in tree_util.tree_leaves(self._inner.out_info)]
        specs = [[*s.spec] if (s := shardings[0][leaf]) else [] for leaf in kept]
        self.request = {"name": name, "mesh": sizes, "overrides": asked.overrides, "specs": specs}

    @property
    def rounding(self) -> float:
        """Rounding of the coarsest floats that it computes with."""
        names = set(_FLOATS.findall(self._inner.as_text()))
        return max((_rounding_of(_NAMES[name]) for name in names), default=0.0)

    def output_paths(self) -> list[str]:
        """Return the path of each result of the program."""
        inner, count = self._inner, len(self.results)
        inputs: list[Any] = [None] * inner.in_tree.num_leaves
        stored = StoredProgram(  # of which the structure alone is read
            inner, inputs, [None] * count, "HloModule {}", peak=0, live=LiveRanges("", "")
        )
        plans = tuple(arg if isinstance(arg, Plan) else None for arg in self.args)
        call = call_of(boxed(self._lowered, stored), plans)
        places = [*call.out_leaves, *(after for _, after in call.updates)]
        path_of = dict(zip(places, Executable(call).outputs.paths, strict=True))
        return [path_of.get(place, f"outputs[{place}]") for place in range(count)]


def _stored_form(info: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape in which an array is stored; random keys are integers."""
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        info = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(info.shape, info.dtype))
    return np.dtype(info.dtype).name, tuple(info.shape)


def _values(lowered: _Lowered, args: tuple[Any, ...] | None, *, is_signed: bool) -> list[Any]:
    """Return the arguments that a step uses, as they are leaves or random."""
    leaves = tree_util.tree_leaves(
        [
            arg.abstract() if isinstance(arg, Plan) else arg
            for arg in (lowered.args if args is None else args)
        ]
    )
    if len(leaves) != lowered.count:  # such as of modules, which their library splits
        if args is not None:
            raise ValueError(f"args has {counted(len(leaves), 'array')}, not {lowered.count:,}")
        leaves = [None] * lowered.count
    generator = np.random.default_rng(0)
    floats = (shape for name, shape in lowered.avals if "float" in name and len(shape) > 1)
    rows = min((size for shape in floats for size in shape if size > 1), default=2)

    def value_of(value: Any, name: str, shape: tuple[int, ...]) -> Any:
        dtype: Any = jnp.dtype(name)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if value is None or isinstance(value, jax.ShapeDtypeStruct):
            return _random(dtype, shape, rows, generator, is_signed=is_signed)
        if np.shape(value) != shape:
            raise ValueError(f"args has an array of {np.shape(value)} where the step takes {shape}")
        array = np.asarray(value)
        if jnp.issubdtype(array.dtype, jnp.inexact) > jnp.issubdtype(dtype, jnp.inexact):
            raise TypeError(f"args has {array.dtype.name} where the step takes {name}")
        return array.astype(dtype)

    return [
        value_of(leaves[leaf], *aval)
        for leaf, aval in zip(lowered.kept, lowered.avals, strict=True)
    ]


def _random(
    dtype: Any,
    shape: tuple[int, ...],
    rows: int,
    generator: np.random.Generator,
    *,
    is_signed: bool,
) -> Any:
    """Return random values, of which sums are small; positive floats, as variances must be."""
    if jnp.issubdtype(dtype, jnp.inexact):
        value = generator.normal(size=shape) / max([10, *(size / 8 for size in shape[-2:-1])])
        return (value if is_signed else abs(value)).astype(dtype)
    if dtype == np.bool_:
        return generator.random(shape) < 0.5
    if dtype == np.uint32:  # of keys
        return generator.integers(0, 2**32, shape, dtype)
    number = generator.integers(0, rows, shape) if shape else np.int64(1)  # tokens; counts of steps
    return number.astype(dtype)


def _moved_by_rounding(values: Sequence[Any], rounding: float, seed: int) -> list[Any]:
    """Return floats that are moved by one rounding, up or down."""
    random = np.random.default_rng(seed)
    return [
        (value * (1 + rounding * random.choice([-1, 1], value.shape))).astype(value.dtype)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for value in values
    ]


def _run(
    single: _Lowered, sharded: _Lowered, draws: Sequence[Sequence[Sequence[Any]]]
) -> list[tuple[list[list[Any]], list[Any]]]:
    """Run the programs in a child: the whole one on all of a draw but the last, the other on that.

    Returns:
        Of each draw the results of each run, and where copies of the sharded ones differ.
    """
    runs_of = [[f"{run} of draw {number}" for run in _RUNS] for number in range(len(draws))]
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(sharded.asked.device_ids))}
    with closing(Child(os.environ | devices | {"TF_CPP_MIN_LOG_LEVEL": "2"})) as child:
        for runs, arguments in zip(runs_of, draws, strict=True):
            for run, arrays in zip(runs, arguments, strict=False):
                write(child.folder / run, arrays)
        programs = []
        for lowered, runs in (
            (single, [*chain(*runs_of)]),
            (sharded, [run for run, *_ in runs_of]),
        ):
            name = lowered.request["name"]
            (child.folder / f"{name}.bc").write_bytes(lowered.asked.module)
            (child.folder / f"{name}.pb").write_bytes(lowered.asked.options)
            programs.append({**lowered.request, "runs": runs})
        child.ask(rehearse_child, programs=programs, avals=single.avals, results=single.results)
        try:
            code = child.exit_code()
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the step has not ended in {LIMIT:g} s: {_SMALLER}") from None
        if code not in (0, FAILED):
            raise RuntimeError(crash_text("the step", code, child.text("stderr.txt")))
        if code:
            words = child.text("error.txt")[-_LAST_WORDS:]
            fix = f": {_SMALLER}" if words.startswith("MemoryError") else ""
            raise RuntimeError(
                printable_lines(["the step cannot be run here:", *f"{words}{fix}".splitlines()])
            )
        copies = json.loads(child.text("copies.json"))
        read_all = []
        for runs in runs_of:
            files = [*(f"whole of {run}" for run in runs), f"sharded of {runs[0]}"]
            results = [list(read(child.folder / file, single.results)) for file in files]
            read_all.append((results, copies[runs[0]]))
        return read_all


def _compared(
    path: str, results: Sequence[Any], arguments: Sequence[Sequence[Any]], rtol: float | None
) -> Finding | None:
    """Compare a result of the sharded program, the last, with those of the whole one."""
    expected, actual = results[0], results[-1]
    if not jnp.issubdtype(expected.dtype, jnp.inexact):
        if not (unlike := expected != actual).any():
            return None
        text = (
            f"{_at_first(path, unlike, expected, actual)}; {unlike.mean():.0%} of the values differ"
        )
        fix = "rounding may decide such a choice; if it does not, look where it is made"
        return Finding("info", "unequal", text, fix, (path,), 1)
    if np.isnan(expected).any():
        text = f"{path} has NaNs in the whole program, too: it is not compared"
        fix = "give args=, with values that the step is made for"
        return Finding("warning", "nan", text, fix, (path,), 1)
    if (is_nan := np.isnan(actual)).any():
        fix = "look for what a device divides by, such as a count of its own rows"
        text = _at_first(path, is_nan, expected, actual)
        return Finding("error", "nan", text, fix, (path,), 1)
    wide = [x.astype("complex128" if np.iscomplexobj(x) else "float64") for x in results]
    before = _state_before(wide[0], arguments[0])
    if before is not None:
        wide = [
            _change_of_values(x, taken[before].astype(x.dtype))
            for x, taken in zip(wide, arguments, strict=True)
        ]
    size = _largest_finite(wide[0])
    changes = [np.abs(_change_of_values(x, wide[0])) for x in wide[1:]]
    *by_rounding, by_shards = (float(change.max(initial=0.0)) for change in changes)
    # No measure is finer than the result's own last digit.
    least = _rounding_of(expected.dtype) * _largest_finite(expected)
    allowed = max(_ROUNDINGS * max(by_rounding), least * (_ROUNDINGS if before is None else 1))
    if by_shards <= (allowed := allowed if rtol is None else rtol * size):
        return None
    suffix = "" if before is None else " of its change"
    part, least_part = (x / size if size else np.inf for x in (by_shards, allowed))
    text = (
        f"{_at_first(path, changes[-1] == by_shards, expected, actual)}: a difference of {part:.1g}"
        f"{suffix}, where rounding may do {least_part:.1g}"
    )
    fix = "look for a sum or a mean over a mesh axis that is missing, or taken twice"
    return Finding("error", "unequal", text, fix, (path,), 1)


def _at_first(path: str, is_there: Any, expected: Any, actual: Any) -> str:
    """Say what values are at the first place where an array is True."""
    place = tuple(map(int, np.argwhere(is_there)[0]))
    return f"{path}{[*place]} is {actual[place]} sharded, and {expected[place]} whole"


def _rounding_of(dtype: Any) -> float:
    """Return how much one rounding changes a number, as a part of it."""
    info: Any = jnp.finfo
    return float(info(dtype).eps)


def _state_before(result: Any, arguments: Sequence[Any]) -> int | None:
    """Return the argument that a result is the next state of; None if it is of none."""
    changes = {
        number: float(
            np.abs(_change_of_values(result, value.astype(result.dtype))).max(initial=0.0)
        )
        for number, value in enumerate(arguments)
        if value.shape == result.shape
        and jnp.issubdtype(value.dtype, jnp.inexact)
        and np.iscomplexobj(value) == np.iscomplexobj(result)
    }
    number = min(changes, key=changes.__getitem__, default=None)
    is_state = number is not None and changes[number] < _largest_finite(result) / _STATE
    return number if is_state else None


def _change_of_values(new: Any, old: Any) -> Any:
    """Subtract; infinities that are the same, such as those of a mask, have not changed."""
    with np.errstate(invalid="ignore"):
        return np.where(new == old, 0, new - old)


def _largest_finite(values: Any) -> float:
    return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def _finding_of_copies(path: str, place: list[int], axes: list[str]) -> Finding:
    """Say where copies of a result differ."""
    names, call = " and ".join(axes), ", ".join(f'"{axis}"' for axis in axes)
    text = (
        f"{path}{place} has another value on other devices along {names}, which have copies of it"
    )
    fix = f"sum it there, jax.lax.psum(x, {call}), or give the result a spec that {names} cuts"
    return Finding("error", "differs", text, fix, paths=(path,), leaves=1)
