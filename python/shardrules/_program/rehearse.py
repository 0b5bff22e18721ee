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
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.sharding import AbstractMesh, Mesh

from shardrules._base.arguments import check_share, check_type
from shardrules._base.text import (
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    printable_lines,
    shown,
)
from shardrules._place.mesh import as_mesh
from shardrules._plan.answers import Answer, Column, Table
from shardrules._plan.findings import Finding, Findings, Level
from shardrules._plan.plan import Plan
from shardrules._program import rehearse_child
from shardrules._program.child import FAILED
from shardrules._program.compared import RehearsedLeaf, compared, rounding_of
from shardrules._program.compiler import LIMIT, Child, crash_text
from shardrules._program.executable import Executable
from shardrules._program.jax_names import compiler_input, kept_arguments, lowered_shardings
from shardrules._program.libraries import StoredProgram, boxed, call_of, inner_of
from shardrules._program.lowering import check_step, lowering_on, step_parts
from shardrules._program.memory import LiveRanges
from shardrules._program.rehearse_child import read, write

_RUNS: Final = ("the arguments", "the arguments moved once", "the arguments moved twice")
_FLOATS: Final = re.compile(r"[<x]b?f(?:16|32|64)>")
_NAMES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_LAST_WORDS: Final = 2000
_SMALLER: Final = (
    "let step_on take its sizes, such as layers, width and rows, as arguments whose defaults are "
    "small"
)


class Rehearsal(Answer[RehearsedLeaf]):
    """A row for each result that is not the same to the bit, the most different first."""

    summary: str = ""
    """What was compared."""
    findings: Findings = Findings()
    """What rounding does not explain."""

    def raise_for(self, level: Level = "error") -> None:
        """Raise `FindingsError` if a finding has at least this level."""
        self.findings.raise_for(level)

    def _json(self) -> dict[str, Any]:
        findings = [finding._asdict() for finding in self.findings]
        return {"summary": self.summary, "findings": findings}

    def _body(self) -> list[Table | str]:
        return [*([rehearsal_table(self)] if self else []), *self.findings._parts()]


def rehearsal_table(rows: Sequence[RehearsedLeaf]) -> Table:
    """Return a row for each result that is not the same to the bit."""
    columns = [Column("result"), *(Column(name, is_right=True) for name in _COLUMNS)]
    cells = ([printable(row.path), *(f"{part:.1e}" for part in row[1:3])] for row in rows)
    return Table(columns, cells)


_COLUMNS: Final = ("difference", "rounding, at most")


def rehearse(
    step_on: Callable[..., Any],
    /,
    mesh: Mapping[str, int] | Mesh | AbstractMesh,
    *,
    rtol: float | None = None,
    args: tuple[Any, ...] | None = None,
) -> Rehearsal:
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
            arrays, and else random ones. Floats are around 0, and positive where the results are
            not finite else, as of variances; integers are rows of every table.

    Returns:
        A `Rehearsal`: what differs, and its findings.

    Raises:
        TypeError: `step_on` returns no step.
        ValueError: The step is too large for this machine; or it is another step for one device.
        RuntimeError: XLA for CPU refuses the step, or crashes.
        TimeoutError: It has not ended after 20 minutes.

    Example:
        >>> import jax, shardrules as sr
        >>> def step_on(mesh):
        ...     plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "tp")], mesh)
        ...     return jax.jit(lambda params: params["w"].sum(0)), (plan,)
        >>> sr.rehearse(step_on, {"tp": 2}).raise_for("warning")
    """
    if not callable(step_on):
        raise TypeError(f"step_on is {shown(step_on)}; it must be a function of a mesh")
    if rtol is not None:
        check_share("rtol", rtol, "1e-5")
    if args is not None:
        check_type("args", args, tuple, "the arguments of the step, as a tuple")
    asked = as_mesh(mesh, "mesh")
    sizes, types = dict(asked.shape), asked.axis_types
    whole = _Lowered("whole", step_on, dict.fromkeys(sizes, 1), types)
    sharded = _Lowered("sharded", step_on, sizes, types)
    other = {
        "its arguments have other shapes or dtypes": whole.avals != sharded.avals,
        "it has more results, or fewer": whole.result_count != sharded.result_count,
    }
    for what, is_other in other.items():
        if is_other:
            raise ValueError(
                f"step_on builds another step for {mesh_shown(sizes)} than for one device: {what}; "
                "let it use the mesh for shardings alone"
            )
    values, random = _values(sharded, args)
    moved = (_moved(values, sharded.rounding, seed) for seed in range(1, len(_RUNS)))
    arguments = [values, *moved]
    arrays, answer = _run(whole, sharded, arguments, random)
    for given in arguments:
        given[:] = [abs(x) if i in answer["positive"] else x for i, x in enumerate(given)]
    rows, findings = [], []
    for place, path in enumerate(sharded.output_paths(answer["text"])):
        row, finding = compared(
            path, [results[place] for results in arrays], [*arguments, values], rtol
        )
        rows.append(row)
        findings += [finding, _differs(path, answer["unlike"][place])]
    summary = f"{counted(len(rows), 'result')} on {mesh_shown(sizes)} and on one device"
    return Rehearsal(
        sorted(filter(None, rows), key=lambda row: row.allowed / row.difference),
        summary=summary,
        findings=Findings(filter(None, findings), summary),
    )


class _Lowered:
    """A step that is lowered for a mesh, to be run elsewhere."""

    def __init__(
        self, name: str, step_on: Callable[..., Any], sizes: dict[str, int], types: tuple[Any, ...]
    ) -> None:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)
        step, self.args, *_ = step_parts(step_on(mesh), "step_on")
        check_step(step, self.args)
        self.name, self._sizes = name, sizes
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
        self.asked, self.kept = asked, kept
        infos = tree_util.tree_leaves(self._inner.args_info)
        self.count, self.result_count = len(infos), self._inner.out_tree.num_leaves
        self.avals = [_stored(infos[leaf]) for leaf in kept]
        """Dtype and shape of the arguments that it uses, as they are stored."""
        self._specs = [[*s.spec] if (s := shardings[0][leaf]) else [] for leaf in kept]

    @property
    def rounding(self) -> float:
        """Rounding of the coarsest floats that it computes with."""
        names = {name.strip("<x>") for name in _FLOATS.findall(self._inner.as_text())}
        return max((rounding_of(_NAMES[name]) for name in names), default=0.0)

    def request(self, random: Sequence[int], runs: Sequence[str]) -> dict[str, Any]:
        """Return what the child is asked."""
        return {
            "name": self.name, "mesh": self._sizes, "overrides": self.asked.overrides,
            "specs": self._specs, "avals": self.avals, "random": random, "runs": runs,
        }  # fmt: skip

    def output_paths(self, text: str) -> list[str]:
        """Return the path of each result of the program."""
        inner, count = self._inner, self.result_count
        inputs: list[Any] = [None] * inner.in_tree.num_leaves
        live = LiveRanges("", "")  # of which nothing is asked
        stored = StoredProgram(inner, inputs, [None] * count, text, peak=0, live=live)
        plans = tuple(arg if isinstance(arg, Plan) else None for arg in self.args)
        call = call_of(boxed(self._lowered, stored), plans)
        places = [*call.out_leaves, *(after for _, after in call.updates)]
        path_of = dict(zip(places, Executable(call).outputs.paths, strict=True))
        return [path_of.get(place, f"outputs[{place}]") for place in range(count)]


def _stored(info: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and shape in which an array is stored; random keys are integers."""
    if jnp.issubdtype(info.dtype, jax.dtypes.prng_key):
        info = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(info.shape, info.dtype))
    return np.dtype(info.dtype).name, tuple(info.shape)


def _values(lowered: _Lowered, args: tuple[Any, ...] | None) -> tuple[list[Any], list[int]]:
    """Return the arguments that a step uses, as they are given or random; and which are random."""
    given = tree_util.tree_leaves(
        [
            arg.abstract() if isinstance(arg, Plan) else arg
            for arg in (lowered.args if args is None else args)
        ]
    )
    if len(given) != lowered.count:  # such as of modules, which their library splits
        if args is not None:
            raise ValueError(f"args has {counted(len(given), 'array')}, not {lowered.count:,}")
        given = [None] * lowered.count
    generator = np.random.default_rng(0)
    floats = (shape for name, shape in lowered.avals if "float" in name and len(shape) > 1)
    rows = min((size for shape in floats for size in shape if size > 1), default=2)
    values, random = [], []
    for place, (leaf, (name, shape)) in enumerate(zip(lowered.kept, lowered.avals, strict=True)):
        value, dtype = given[leaf], jnp.dtype(name)
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        if value is None or isinstance(value, jax.ShapeDtypeStruct):
            value = _random(dtype, shape, rows, generator)
            random += [place] if jnp.issubdtype(dtype, jnp.floating) else []
        elif np.shape(value) != shape:
            raise ValueError(f"args has an array of {np.shape(value)} where the step takes {shape}")
        values.append(np.asarray(value, dtype))
    return values, random


def _random(dtype: Any, shape: tuple[int, ...], rows: int, generator: np.random.Generator) -> Any:
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (generator.normal(size=shape) + 1j * generator.normal(size=shape)) / 10
    if jnp.issubdtype(dtype, jnp.inexact):
        return generator.normal(size=shape) / 10
    if dtype == np.bool_:
        return generator.random(shape) < 0.5
    if dtype == np.uint32:  # of keys
        return generator.integers(0, 2**32, shape)
    return generator.integers(0, rows, shape) if shape else 1  # such as tokens; counts of steps


def _moved(values: Sequence[Any], rounding: float, seed: int) -> list[Any]:
    """Return floats that are moved by one rounding, up or down."""
    random = np.random.default_rng(seed)
    return [
        (value * (1 + rounding * random.choice([-1, 1], value.shape))).astype(value.dtype)
        if jnp.issubdtype(value.dtype, jnp.inexact)
        else value
        for value in values
    ]


def _run(
    whole: _Lowered, sharded: _Lowered, arguments: Sequence[Sequence[Any]], random: list[int]
) -> tuple[list[list[Any]], dict[str, Any]]:
    """Run the programs in a child.

    Returns:
        The results: whole, of each of the arguments, and sharded; and what the child says of the
        sharded program.
    """
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(sharded.asked.device_ids))}
    with closing(Child(os.environ | devices | {"TF_CPP_MIN_LOG_LEVEL": "2"})) as asked:
        for run, arrays in zip(_RUNS, arguments, strict=True):
            write(asked.folder / run, arrays)
        for lowered in (whole, sharded):
            (asked.folder / f"{lowered.name}.bc").write_bytes(lowered.asked.module)
            (asked.folder / f"{lowered.name}.pb").write_bytes(lowered.asked.options)
        programs = [whole.request(random, _RUNS), sharded.request(random, _RUNS[:1])]
        asked.ask(rehearse_child, programs=programs)
        results = _answers(asked)
        files = [(0, f"whole of {run}") for run in _RUNS] + [(1, f"sharded of {_RUNS[0]}")]
        arrays = [list(read(asked.folder / file, results[i]["outputs"])) for i, file in files]
        return arrays, results[1]


def _answers(asked: Child) -> list[Any]:
    """Wait for the child."""
    try:
        code = asked.exit_code()
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the step has not ended in {LIMIT:g} s: {_SMALLER}") from None
    if code not in (0, FAILED):
        raise RuntimeError(crash_text("the step", code, asked.text("stderr.txt")))
    if code:
        words = asked.text("error.txt")[-_LAST_WORDS:]
        raise RuntimeError(printable_lines(["the step cannot be run here:", *words.splitlines()]))
    results: list[Any] = json.loads(asked.text("results.json"))
    for result in results:
        if "needed" in result:
            needed, free = bytes_shown(result["needed"]), bytes_shown(result["free"])
            raise ValueError(f"the step needs {needed} to run here, of {free}: {_SMALLER}")
    return results


def _differs(path: str, unlike: Any) -> Finding | None:
    """Say where copies of a result differ, if they do."""
    if unlike is None:
        return None
    index, axes = unlike
    names = " and ".join(axes)
    text = (
        f"{path}{index} has another value on other devices along {names}, which have copies of it"
    )
    call = ", ".join(f'"{axis}"' for axis in axes)
    fix = f"sum it there, jax.lax.psum(x, {call}), or give the result a spec that {names} cuts"
    return Finding("error", "differs", text, fix, paths=(path,), leaves=1)
