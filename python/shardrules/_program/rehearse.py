"""Runs a step small, once whole and once sharded, and compares what it returns: `rehearse`.

Both programs run to their end in a child process, `rehearse_child`, with the same arguments. What
rounding may do is measured, and not modelled: the whole program runs again with its arguments moved
by one rounding.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
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
from shardrules._program.compiler import Child
from shardrules._program.executable import Executable
from shardrules._program.jax_names import compiler_input, kept_arguments, lowered_shardings
from shardrules._program.libraries import StoredProgram, boxed, call_of, inner_of
from shardrules._program.lowering import check_step, check_step_on, lowering_on, step_parts
from shardrules._program.memory import LiveRanges

# Threads of a process: XLA for CPU has some for each device.
_MOST_DEVICES: Final = 512
_FLOATS: Final = re.compile(r"[<x](b?f(?:16|32|64))>")
_NARROW: Final = re.compile(r"[<x](?:u?i[24]|f4\w+)>")
_ROUNDINGS: Final = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 2.0**-23, "f64": 2.0**-52}
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
    asked = as_mesh(mesh, "mesh")
    sizes, types = dict(asked.shape), asked.axis_types
    if asked.size > _MOST_DEVICES:
        raise ValueError(
            f"mesh: {mesh_shown(sizes)} are {asked.size:,} devices, of at most {_MOST_DEVICES}: "
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
    values, is_random = _values(sharded, args)
    paths = sharded.output_paths()
    request = {"is_random": is_random, "rounding": sharded.rounding, "rtol": rtol}
    rows = zip(paths, _asked(single, sharded, values, request), strict=True)
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
        self._lowered = lowering_on(mesh, step, self.args).lowered
        self._inner = inner_of(self._lowered)
        asked, shardings = compiler_input(self._inner), lowered_shardings(self._inner)
        kept = kept_arguments(self._inner)
        if len(asked.device_ids) != mesh.size:
            raise ValueError(
                f"the step needs no array on {mesh_shown(sizes)}; give it an argument that it uses"
            )
        if jax.__version_info__ < (0, 8) and _NARROW.search(self._inner.as_text()):
            raise RuntimeError("XLA for CPU of JAX 0.7 spoils arrays of 2 and 4 bits: take JAX 0.8")
        self.asked, self.kept = asked, kept
        infos = tree_util.tree_leaves(self._inner.args_info)
        self.count = len(infos)
        self.arguments = [_stored_form(infos[leaf]) for leaf in kept]
        """Dtype and shape of the arguments that it uses, as they are stored."""
        self.results = [_stored_form(info) for info in tree_util.tree_leaves(self._inner.out_info)]
        specs = [[*s.spec] if (s := shardings[0][leaf]) else [] for leaf in kept]
        self.request = {"mesh": sizes, "overrides": asked.overrides, "specs": specs}

    @property
    def rounding(self) -> float:
        """Rounding of the coarsest floats that it computes with."""
        names = set(_FLOATS.findall(self._inner.as_text()))
        return max((_ROUNDINGS[name] for name in names), default=0.0)

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


def _values(lowered: _Lowered, args: tuple[Any, ...] | None) -> tuple[list[Any], list[bool]]:
    """Return the arguments that a step uses, and which of them are random."""
    arrays = (
        arg.abstract() if isinstance(arg, Plan) else arg
        for arg in (lowered.args if args is None else args)
    )
    leaves = tree_util.tree_leaves([*arrays])
    if len(leaves) != lowered.count:  # such as of modules, which their library splits
        if args is not None:
            raise ValueError(f"args has {counted(len(leaves), 'array')}, not {lowered.count:,}")
        leaves = [None] * lowered.count
    generator = np.random.default_rng(0)
    floats = (shape for name, shape in lowered.arguments if "float" in name and len(shape) > 1)
    rows = min((size for shape in floats for size in shape if size > 1), default=2)
    values, is_random = [], []
    for leaf, (name, shape) in zip(lowered.kept, lowered.arguments, strict=True):
        dtype: Any = jnp.dtype(name)
        value = leaves[leaf]
        is_random.append(value is None or isinstance(value, jax.ShapeDtypeStruct))
        if is_random[-1]:
            values.append(_random(dtype, shape, rows, generator).astype(dtype))
            continue
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        is_cut = jnp.issubdtype(array.dtype, jnp.inexact) > jnp.issubdtype(dtype, jnp.inexact)
        if array.shape != shape or is_cut:
            raise ValueError(
                f"args has {array.dtype.name}{[*array.shape]} where the step takes {name}{[*shape]}"
            )
        values.append(array.astype(dtype))
    return values, is_random


def _random(dtype: Any, shape: tuple[int, ...], rows: int, generator: np.random.Generator) -> Any:
    """Return random values, of which sums are small; integers are tokens, and counts of steps."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return generator.normal(size=shape) / max([10, *(size / 8 for size in shape[-2:-1])])
    if dtype == np.bool_:
        return generator.random(shape) < 0.5
    if dtype == np.uint32:  # of keys
        return generator.integers(0, 2**32, shape, dtype)
    return generator.integers(0, rows, shape) if shape else np.int64(1)


def _asked(
    single: _Lowered, sharded: _Lowered, values: Sequence[Any], request: dict[str, Any]
) -> list[list[Any]]:
    """Let a child run both programs, and return its findings about each result."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(sharded.asked.device_ids))}
    # With 64 bits arrays keep their dtypes, whatever those are.
    settings = {"JAX_ENABLE_X64": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with closing(Child(os.environ | devices | settings)) as child:
        (child.folder / "values").write_bytes(b"".join(value.tobytes() for value in values))
        for name, lowered in (("whole", single), ("sharded", sharded)):
            (child.folder / f"{name}.bc").write_bytes(lowered.asked.module)
            (child.folder / f"{name}.pb").write_bytes(lowered.asked.options)
            request[name] = lowered.request
        child.ask(rehearse_child, arguments=single.arguments, results=single.results, **request)
        if error := child.error("the step"):
            words = error[-_LAST_WORDS:]
            fix = f": {_SMALLER}" if words.startswith("MemoryError") else ""
            raise RuntimeError(
                printable_lines(["the step cannot be run here:", *f"{words}{fix}".splitlines()])
            )
        return json.loads(child.text("findings.json"))  # type: ignore[no-any-return]
