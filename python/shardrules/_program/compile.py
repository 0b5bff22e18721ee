"""Compiles a step for devices that need not be there: `compile`."""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np
from jax import dtypes, tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from shardrules._base.arguments import check_choice, check_real, check_type
from shardrules._base.mistakes import kind_of
from shardrules._base.text import (
    and_more,
    brief,
    bytes_shown,
    mesh_shown,
    printable,
    printable_lines,
    shown,
)
from shardrules._place.memory import memory_apart, sharding_in_memory
from shardrules._place.mesh import as_mesh, has_devices, in_force
from shardrules._plan.plan import Plan
from shardrules._program.buffers import Buffer, table_of
from shardrules._program.computation import with_elements
from shardrules._program.dump import XlaDump, compiled_within
from shardrules._program.hlo import Hlo
from shardrules._program.libraries import is_filter_jit, lowered_by_equinox
from shardrules._program.liveness import alive_at_peak
from shardrules._program.memory import buffers_of
from shardrules._program.topologies.topology import Topology, is_described, topology_shown

Effort = Literal["full", "fast"]
# "Ran out of memory on HBM, the total memory required for HLO temporaries (18.14G) exceeds
# available HBM (15.75G)."; older ones: "Used 18.14G of 15.75G hbm." Arguments are counted, too.
_REFUSALS: Final = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MODULE: Final = "*oom_intermediate_module.txt"
_PACKAGE: Final = str(Path(__file__).parent)
_KEPT: Final = 0.5
_NOTED: Final = 4
_NAMED: Final = 3
_STATIC: Final = (
    "A plan stands for arrays alone: let the step take the arrays, and equinox.combine(arrays, "
    "static) inside, where static has the tree's leaves that are no arrays; or give "
    "equinox.combine(plan.abstract(), static) in its place, and prove the plan itself in inputs="
)
_LEVELS: Final = {"full": None, "fast": "O1"}
OF_FAST: Final = (
    'compiled at O1, as effort="fast" is: the program that will run may need more memory, or less; '
    "compile in full what is near the memory of a device"
)
"""What a refusal and a proof say of such a program."""
"""JAX's `jax_optimization_level` by effort."""


class OutOfMemory(MemoryError):  # noqa: N818
    """The compiler's refusal of a step that needs more memory than a device has.

    Attributes:
        required: Bytes that the step needs on a device, its arguments included.
        available: Bytes that the compiler lets it use.
        buffers: The largest arrays that are alive at the peak, with their lines; () if XLA does
            not tell.

    Example:
        >>> import shardrules as sr
        >>> refusal = sr.OutOfMemory(required=20 * 10**9, available=16 * 10**9, buffers=())
        >>> str(refusal).partition(",")[0]
        'the step needs 20.0 GB on each device'
    """

    def __init__(self, required: int, available: int, buffers: tuple[Buffer, ...]) -> None:
        self.required = required
        self.available = available
        self.buffers = buffers
        super().__init__(self._message())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.required, self.available, self.buffers)

    def _message(self) -> str:
        head = (
            f"the step needs {bytes_shown(self.required)} on each device, its arguments included, "
            f"and the compiler has {bytes_shown(self.available)}"
        )
        if not self.buffers:
            return f"{head}; XLA does not say for which arrays"
        lines = [
            f"{head}. The largest arrays at the peak:",
            *table_of(self.buffers).lines(),
            self._fix(),
        ]
        return printable_lines(lines)

    def _fix(self) -> str:
        """Say what would mend it."""
        largest = self.buffers[0]
        kept = sum(buffer.bytes for buffer in self.buffers if buffer.is_saved)
        of_arguments = sum(buffer.bytes for buffer in self.buffers if buffer.is_argument)
        total = sum(buffer.bytes for buffer in self.buffers)
        line = "" if largest.place is None else f" at {largest.place}"
        if kept > _KEPT * total and any("/checkpoint" in row.what for row in self.buffers):
            return (
                "most of it is the inputs of layers that are computed again: shard them by "
                f"another axis too{line}, keep them in the host's memory by a policy of "
                "jax.checkpoint, or take a smaller batch"
            )
        if kept > _KEPT * total:
            return (
                "most of it is kept for the backward pass: recompute it by jax.checkpoint around "
                "the layer, or take a smaller batch"
            )
        if of_arguments > _KEPT * total:
            return "most of it is arguments: shard them over more devices, and donate the state"
        return (
            f"shard {largest.shape}{line} by the axes of the batch or of the model, by "
            "jax.lax.with_sharding_constraint; or take a smaller batch"
        )


def compile(
    step: Any,
    *args: Any,
    on: Topology | Mesh | None = None,
    effort: Effort = "full",
    timeout: float | None = None,
) -> Compiled:
    """Compile a step for the devices of a mesh, which may be described ones, and run nothing.

    Args:
        step: A function, or what `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit` makes of one;
            give the jitted one for donation and `out_shardings`.
        *args: Its arguments: arrays, ShapeDtypeStructs with shardings, or a Plan in the place of
            the tree that it plans. What has no sharding is on all devices.
        on: The devices. With a Topology the mesh is `Topology.mesh` of the axes of the arguments'
            mesh; with a Mesh it is that one. Default: the arguments' own devices.
        effort: "fast" compiles at JAX's optimization level O1: the collectives are the same in
            number, the memory is near, and the estimated times are not.
        timeout: Seconds that the compiler may take; None for no limit. It cannot be stopped: it
            goes on in a thread of its own until the process ends.

    Returns:
        What `jax.jit(step).lower(*args).compile()` gives; for `verify` and `inspect`.

    Raises:
        OutOfMemory: The compiler refuses the step, as it does not fit. That for GPUs refuses
            none: `prove` compares the memory.
        ImportError: The compiler is not installed, as for `Topology`.
        TimeoutError: The compiler has not ended by then; `prove` gives what is known of the step.
        TypeError: The step is no function.
        ValueError: Nothing says what mesh the arguments are on; the step names another mesh; this
            JAX has no "fast"; or a plan stands for the constants of a step of
            `equinox.filter_jit`.

    Example:
        >>> import jax, shardrules as sr
        >>> mesh = jax.make_mesh((1,), ("fsdp",))
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "fsdp")], mesh)
        >>> compiled = sr.compile(lambda params: params["w"] * 2, plan, on=mesh)
        >>> compiled.memory_analysis().argument_size_in_bytes
        256
    """
    check_step(step, args, effort)
    mesh = None if on is None else target_mesh(on, args)
    check_timeout(timeout)
    with options_for(mesh, effort):
        result = result_of(lowered_on(mesh, step, args), timeout)
    if isinstance(result, Refusal):
        raise result.error(effort)
    if isinstance(result, XlaDump):
        raise result.error()
    return result


class Refusal(NamedTuple):
    """What the compiler says of a step that does not fit."""

    required: int
    available: int
    text: str
    """The module at the peak; "" if XLA does not write it."""

    def error(self, effort: Effort) -> OutOfMemory:
        """Return it as the error to raise; of "fast" with a note that another program will run."""
        buffers: Iterable[Buffer] = ()
        if self.text:
            hlo = Hlo(with_elements(self.text))
            buffers = buffers_of(hlo, alive_at_peak(hlo)[:10], lambda _: None)
        error = OutOfMemory(self.required, self.available, tuple(buffers))
        if effort == "fast":
            error.add_note(OF_FAST)
        return error


def result_of(lowered: Any, timeout: float | None = None) -> Compiled | Refusal | XlaDump:
    """Compile a lowered step, within `options_for` its mesh."""
    if timeout is not None:
        return compiled_within(partial(_compiled_or_refusal, lowered), timeout)
    level = getattr(jax.config, "jax_optimization_level", None)
    # With options, JAX neither takes nor keeps the executable of the same step at another level.
    return _compiled_or_refusal(
        lowered, {"xla_dump_hlo_as_text": False} if level == _LEVELS["fast"] else None
    )


def _compiled_or_refusal(lowered: Any, options: Mapping[str, Any] | None) -> Compiled | Refusal:
    try:
        return lowered.compile(compiler_options=options)  # type: ignore[no-any-return]
    except Exception as error:
        numbers = _refusal(str(error))
        if numbers is None:
            error.add_note("shardrules compiled the step, and this is what XLA says of it")
            raise
    return Refusal(*numbers, _module_at_peak(lowered))


def target_mesh(on: Topology | Mesh, args: Iterable[Any]) -> Mesh:
    """Return the mesh of devices to compile for: with a topology, of the axes of the arguments."""
    what = "such as shardrules.Topology('v5p:8x8x8'), or a jax.sharding.Mesh of devices"
    check_type("on", on, Topology | Mesh, what)
    if not isinstance(on, Topology):
        return on
    meshes = list(dict.fromkeys(_meshes_of(args)))
    for mesh in meshes:
        if has_devices(mesh) and set(on.devices).issuperset(mesh.devices.flat):
            return mesh
    sizes = {tuple(mesh.shape.items()) for mesh in meshes}
    if len(sizes) != 1:
        text = "; ".join(mesh_shown(dict(items)) for items in sizes) or "none"
        raise ValueError(
            f"the meshes of the arguments are {text}: nothing says the axes on "
            f"{topology_shown(on)}; give on=topology.mesh(fsdp=64, tp=8)"
        )
    (items,) = sizes
    return on.mesh(dict(items))


def mesh_of(args: Iterable[Any]) -> Mesh | None:
    """Return the mesh of devices that arguments are on; None if no argument is on any."""
    return next((mesh for mesh in _meshes_of(args) if has_devices(mesh)), None)


def _meshes_of(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the meshes of plans and shardings among the arguments."""
    for arg in args:
        if isinstance(arg, Plan):
            yield as_mesh(arg._mesh)
            continue
        for leaf in tree_util.tree_leaves(arg):
            mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
            if mesh is not None:
                yield mesh


def placed_on(
    args: tuple[Any, ...], mesh: Mesh | None, *, is_free: bool = False
) -> tuple[Any, ...]:
    """Return the arguments as shapes that are sharded on the mesh by the same axes.

    An array that nothing places is whole on each device, be it of numpy, JAX or abstract; with
    `is_free`, what jit says of it decides.
    """
    devices = mesh_of(args) if mesh is None else mesh

    def on_mesh(leaf: Any) -> Any:
        if is_unplaced(leaf) and devices is not None:
            sharding = None if is_free else NamedSharding(devices, PartitionSpec())
            dtype = dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
        if mesh is None or not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        target = NamedSharding(mesh, PartitionSpec())
        if isinstance(leaf.sharding, NamedSharding):
            kind = memory_apart(leaf.sharding)
            target = sharding_in_memory(mesh, leaf.sharding.spec, kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=target)

    return tuple(
        (arg if mesh is None else arg.on_mesh(mesh)).abstract()
        if isinstance(arg, Plan)
        else tree_util.tree_map(on_mesh, arg)
        for arg in args
    )


def is_unplaced(leaf: Any) -> bool:
    """Say whether nothing says where an array is: it is numpy's, abstract, or where JAX chose."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind in "biufcV"
    if isinstance(leaf, jax.Array):
        return not leaf.committed
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def check_step(step: Any, args: tuple[Any, ...], effort: Effort = "full") -> None:
    """Check that a step is a function, and that no argument is what another parameter takes."""
    check_choice("effort", effort, tuple(_LEVELS))
    if not callable(step) or isinstance(step, Compiled):
        first = any(map(callable, args))
        hint = "; the step comes first, and then its arguments" if first else ""
        raise TypeError(
            f"step is {shown(step)}; give the function, or what jax.jit makes of it{hint}"
        )
    for place, arg in enumerate(args):
        if isinstance(arg, Topology | Mesh):
            raise TypeError(f"argument {place} of the step is {shown(arg)}; write it as on=...")
        if kind_of(arg) == "rules":
            raise TypeError(
                f"argument {place} of the step is {shown(arg)}, which are rules; give their plan, "
                "shardrules.plan(tree, rules, mesh)"
            )
        if not isinstance(arg, Plan) and any(
            isinstance(x, Plan) for x in tree_util.tree_leaves(arg)
        ):
            raise TypeError(
                f"argument {place} of the step has a Plan in a {type(arg).__name__}, and a plan is "
                "a whole argument: write the arguments one by one, as in prove(step, plan, batch); "
                "or plan the tree that has both"
            )


@contextmanager
def noted(step: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """Note beside an error of a step what the step was called with."""
    try:
        yield
    except Exception as error:
        rows = (f"  {place}: {_argument_shown(arg)}" for place, arg in enumerate(args))
        name = getattr(step, "__name__", type(step).__name__)
        where = _raised_at(error)
        lines = [f"shardrules called {name}{where} with these arguments, as it would be called:"]
        error.add_note(printable_lines([*lines, *rows]))
        raise


def _raised_at(error: BaseException) -> str:
    """Return the innermost line of an error that is the user's, or else of no JAX and not ours."""
    libraries = tuple(f"{Path(module).parent}{os.sep}" for module in (jax.__file__, _PACKAGE))
    frames = [
        f", which raises at {frame.filename}:{frame.lineno},"
        for frame in extract_tb(error.__traceback__)
        if not frame.filename.startswith((*libraries, "<")) and frame.name != "__exit__"
    ]
    own = [frame for frame in frames if "site-packages" not in frame]
    return (own or frames or [""])[-1]


def _argument_shown(arg: Any) -> str:
    """Return an argument in a line: a plan by its tree, arrays by dtype and shape."""

    def line(leaf: Any) -> str:
        has_shape = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        return f"{leaf.dtype}{[*leaf.shape]}" if has_shape else brief(leaf)

    tree = arg.abstract() if isinstance(arg, Plan) else arg
    kind = "the tree of a plan, " if isinstance(arg, Plan) else ""
    pairs = tree_util.tree_flatten_with_path(tree)[0]
    texts = [f"{tree_util.keystr(path)} {line(leaf)}".strip() for path, leaf in pairs[:_NOTED]]
    return kind + ", ".join([*texts, *and_more(len(pairs), _NOTED, "leaf")])


def lowered_on(mesh: Mesh | None, step: Any, args: tuple[Any, ...]) -> Any:
    """Lower a step for its arguments on a mesh, which is the context's for the specs in it."""
    check_static(step, args)

    def lower(*, is_free: bool = False) -> Any:
        placed = placed_on(args, mesh, is_free=is_free)
        if is_filter_jit(step):
            return lowered_by_equinox(step, placed, lambda tree: placed_on((tree,), mesh)[0])
        jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
        return jitted.lower(*placed)

    with in_force(mesh):
        try:
            with noted(step, args):
                try:
                    return lower()
                except ValueError as error:
                    if "does not match the sharding on the respective arg" not in str(error):
                        raise
                    return lower(is_free=True)  # jit has in_shardings for what nothing else places
        except (AttributeError, TypeError) as error:
            if "'NoneType'" not in str(error) or not is_filter_jit(step):
                raise
            raise TypeError(
                f"the step fails on a None: {error}. {_STATIC}, if one of its leaves is meant"
            ) from error
        except ValueError as error:
            if "lowering_platforms" in str(error):
                raise ValueError(
                    "the plans and shardings of the arguments are for a mesh without devices, and "
                    "nothing says which these are: give on=shardrules.Topology('v5p:8x8x8'), or "
                    "on= a jax.sharding.Mesh"
                ) from error
            if "incompatible devices" not in str(error).lower():
                raise
            raise ValueError(
                "the step names other devices than those that it is compiled for: let its "
                "constraints and shardings be of the mesh of on=, made once by Topology.mesh; or "
                f"give them as PartitionSpecs, for which that mesh is in force. JAX says: {error}"
            ) from error


def check_static(step: Any, args: Iterable[Any]) -> None:
    """Check that a step of `equinox.filter_jit` gets all its leaves, also for a plan.

    Raises:
        ValueError: A tree that is planned has leaves that are no arrays: the step is another with
            None for them.
        TypeError: The step is a method of a module, which takes the module itself.
    """
    if is_filter_jit(getattr(step, "func", None)):
        raise TypeError(
            f"step is {shown(step)}, a method of a module; give the class's, and the module as the "
            "first argument: Model.train, model"
        )
    for i, plan in enumerate(args if is_filter_jit(step) else ()):
        if not isinstance(plan, Plan):
            continue
        lost = [
            path
            for path, kind in zip(plan.paths, plan.kind_of.tolist(), strict=True)
            if plan.kinds[kind].shape is None
        ]
        if lost:
            names = ", ".join([*lost[:_NAMED], *and_more(len(lost), _NAMED, "leaf")])
            raise ValueError(
                printable(
                    f"argument {i} is a plan of a tree with leaves that are no arrays, which a "
                    f"plan does not keep: {names}. {_STATIC}; or give plan.abstract(), if the step "
                    "takes None for them"
                )
            )


@contextmanager
def options_for(mesh: Mesh | None, effort: Effort) -> Iterator[None]:
    """Set JAX's level of optimization, and whether it caches what it compiles, for a while."""
    config: Any = jax.config
    level = _LEVELS[effort]
    if level is not None and not hasattr(config, "jax_optimization_level"):
        raise ValueError('effort: this JAX has no levels of optimization; leave out effort="fast"')
    values: dict[str, Any] = {} if level is None else {"jax_optimization_level": level}
    # What is compiled for described devices, JAX can write to its cache and cannot read.
    if mesh is not None and is_described(mesh):
        values["jax_enable_compilation_cache"] = False
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            config.update(name, value)


def check_timeout(timeout: object) -> None:
    """Check that a time limit is None, or a positive number of seconds."""
    if timeout is not None:
        check_real("timeout", timeout)
        if isinstance(timeout, bool) or not 0 < timeout < math.inf:  # type: ignore[operator]
            raise ValueError(f"timeout is {timeout}; it must be a number of seconds, such as 600")


def _refusal(message: str) -> tuple[int, int] | None:
    """Read the bytes that are required and available, if XLA says that a step does not fit."""
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            required, unit, available, limit = match.groups()
            return int(float(required) * _UNITS[unit]), int(float(available) * _UNITS[limit])
    return None


def _module_at_peak(lowered: Any) -> str:
    """Return the module that XLA writes of a step that does not fit; "" if it writes none."""
    with tempfile.TemporaryDirectory(prefix="shardrules-") as folder:
        options: Mapping[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        with suppress(Exception):  # the same refusal
            lowered.compile(compiler_options=options)
            return ""
        texts = [file.read_text("utf-8", "replace") for file in Path(folder).glob(_MODULE)]
    return texts[0] if texts else ""
