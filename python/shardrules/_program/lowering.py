"""Lowers a step for its arguments on a mesh, whose devices need not be there: `lowered_on`.

A step may choose by `jax.devices()[0].platform`, or leave out its constraints on a CPU: it would be
proved as another program than the one that runs. While `answered` is entered, JAX's public
functions tell this thread of the mesh; other threads, and JAX itself, are answered as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Any, Final, TypeAlias

import jax
import numpy as np
from jax import dtypes, tree_util
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from shardrules._base.arguments import check_type
from shardrules._base.mistakes import argument_kind
from shardrules._base.text import (
    Place,
    and_more,
    brief,
    mesh_shown,
    printable,
    printable_lines,
    shown,
)
from shardrules._place.mesh import (
    AnyMesh,
    as_mesh,
    has_devices,
    in_force,
    memory_apart,
    sharding_in_memory,
)
from shardrules._plan.plan import Plan
from shardrules._program.jax_names import is_library, legacy_contexts, lowered_without_devices
from shardrules._program.libraries import is_filter_jit, lowered_by_equinox
from shardrules._program.topologies.topology import Topology, topology_shown

On: TypeAlias = "Topology | str | Mesh | AbstractMesh | Mapping[str, int]"
"""Devices to compile for."""

_NAMED: Final = 3
"""Leaves, and calls, that a note names."""
_STATIC: Final = (
    "give equinox.combine(plan.abstract(), static), where static has the tree's leaves that are no "
    "arrays, and the plan itself in inputs="
)
_FIXES: Final = {
    "lowering_platforms": (
        "the plans and shardings of the arguments are for a mesh without devices, and nothing says "
        "which these are: give on=shardrules.Topology('v5p:8x8x8'), or on= a jax.sharding.Mesh"
    ),
    "only interpret mode is supported": (
        "the step has a Pallas kernel, which XLA for CPU has none of: give on= a Topology of TPUs, "
        "whose compiler has them; or call it with interpret=True"
    ),
    "require devices": (
        "the step has an operation that JAX lowers for devices alone, such as custom_partitioning: "
        "give on= a Topology, or a mesh of devices"
    ),
    "incompatible devices": (
        "the step names other devices than those that it is compiled for: let its constraints and "
        "shardings be of the mesh of on=, made once by Topology.mesh; or give them as "
        "PartitionSpecs, for which that mesh is in force"
    ),
}
"""What to do, by a part of what JAX says of a step that it does not lower."""


def check_step_on(step_on: Any) -> None:
    """Check that it may be a function that makes the step for a mesh, and is not the step."""
    if not callable(step_on) or hasattr(step_on, "lower"):
        raise TypeError(
            f"step_on is {shown(step_on)}; it must be a function of a mesh that makes the step: "
            "def step_on(mesh), which ends with return step, (plan, batch), plan"
        )


def step_parts(result: Any, source: str) -> tuple[Any, ...]:
    """Return (step, arguments, outputs) or (step, arguments) of what a user's function gives."""
    is_tuple = isinstance(result, tuple) and len(result) in (2, 3)
    if not is_tuple or not isinstance(result[1], tuple):
        kinds = ", ".join(type(part).__name__ for part in result) if type(result) is tuple else ""
        raise TypeError(
            f"{source}: this gives {f'({kinds})' if kinds else shown(result)}; it must be (step, "
            "arguments, outputs) or (step, arguments), where arguments is a tuple: write "
            "return step, (plan, batch), plan"
        )
    return tuple(result)


def check_step(step: Any, args: tuple[Any, ...]) -> None:
    """Check that a step is a function, and that no argument is what another parameter takes."""
    of_mesh = "step, arguments, outputs = step_on(mesh), and step, *arguments, outputs=outputs"
    if not callable(step) or isinstance(step, Compiled):
        hint = "; the step comes first, and then its arguments" if any(map(callable, args)) else ""
        if isinstance(step, tuple):
            hint = f": write {of_mesh}"
        raise TypeError(
            f"step is {shown(step)}; give the function, or what jax.jit makes of it{hint}"
        )
    for place, arg in enumerate(args):
        hint, kind = "", argument_kind(arg)
        if isinstance(arg, Topology | Mesh):
            hint = "; write it as on=..."
        elif isinstance(arg, dict) and kind == "mesh":
            hint = f", a mesh: write on=...; of a function that takes one {of_mesh}"
        elif kind == "rules":
            hint = ", which are rules; give their plan, shardrules.plan(tree, rules, mesh)"
        elif not isinstance(arg, Plan) and any(map(_is_plan, tree_util.tree_leaves(arg))):
            hint = (
                f", a Plan in a {type(arg).__name__}, and a plan is a whole argument: write the "
                "arguments one by one, as in prove(step, plan, batch), or plan the tree of both"
            )
        if hint:
            raise TypeError(f"argument {place} of the step is {shown(arg)}{hint}")


def _is_plan(leaf: Any) -> bool:
    return isinstance(leaf, Plan)


def target_mesh(on: On, args: Iterable[Any]) -> AnyMesh:
    """Return the mesh to compile for: with a topology, of the axes of the arguments."""
    what = (
        "such as shardrules.Topology('v5p:8x8x8'), its name, a jax.sharding.Mesh of devices, or a "
        "dict of sizes such as {'fsdp': 64, 'tp': 8}, for which XLA for CPU is asked"
    )
    check_type("on", on, Topology | str | Mesh | AbstractMesh | Mapping, what)
    if isinstance(on, str):
        on = Topology(on)
    if not isinstance(on, Topology):
        return as_mesh(on, "on")
    meshes = list(dict.fromkeys(meshes_of(args)))
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
    return on.mesh(dict(items), axis_types=meshes[0].axis_types)


def mesh_of(args: Iterable[Any]) -> Mesh | None:
    """Return the mesh of devices that arguments are on; None if no argument is on any."""
    return next((mesh for mesh in meshes_of(args) if has_devices(mesh)), None)


def meshes_of(args: Iterable[Any]) -> Iterator[Any]:
    """Yield the meshes of plans and shardings among the arguments."""
    for arg in args:
        if isinstance(arg, Plan):
            yield as_mesh(arg.mesh)
            continue
        for leaf in tree_util.tree_leaves(arg):
            mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
            if mesh is not None:
                yield mesh


def lowered_on(
    mesh: AnyMesh | None, step: Any, args: tuple[Any, ...]
) -> tuple[Any, tuple[str, ...]]:
    """Lower a step for its arguments on a mesh, which is the context's for the specs in it.

    On a mesh without devices it is lowered for CPUs, and what calls Python is left out. What asks
    JAX for its devices while it is traced is answered for the mesh.

    Returns:
        What JAX, flax or equinox has lowered; and what is not quite as it will run.
    """
    check_static(step, args)
    left_out: list[str] = []
    has_none = mesh is not None and not has_devices(mesh)

    def lower(jitted: Any, *args: Any) -> Any:
        if not has_none:
            return jitted.lower(*args)
        lowered, names = lowered_without_devices(jitted.trace(*args))
        left_out.extend(names)
        return lowered

    def run(context: AnyMesh | None, *, is_free: bool = False) -> Any:
        placed = placed_on(args, mesh, is_free=is_free)
        with in_force(context):
            if is_filter_jit(step):
                return lowered_by_equinox(
                    step, placed, lambda tree: placed_on((tree,), mesh)[0], lower
                )
            return lower(step if hasattr(step, "lower") else jax.jit(step), *placed)

    with answered(mesh) as notes:
        try:
            with noted(step, args):
                try:
                    lowered = run(mesh)
                except ValueError as error:
                    if "does not match the sharding on the respective arg" in str(error):
                        lowered = run(mesh, is_free=True)  # in_shardings: what nothing else places
                    elif "use_abstract_mesh cannot change" in str(error):
                        lowered = run(None)  # a library keeps arrays that it made for another mesh
                    else:
                        raise
        except ValueError as error:
            fix = next((fix for part, fix in _FIXES.items() if part in str(error).lower()), None)
            if fix is None:
                raise
            raise ValueError(f"{fix}. JAX says: {error}") from error
        except (AttributeError, TypeError) as error:
            if is_filter_jit(step) and "'NoneType'" in str(error):
                error.add_note(f"If a leaf that is no array is None here: {_STATIC}")
            raise
    if left_out:
        names = ", ".join([*left_out[:_NAMED], *and_more(len(left_out), _NAMED, "call")])
        notes[f"left out, as it is lowered without devices: {names}"] = None
    return lowered, tuple(notes)


def placed_on(
    args: tuple[Any, ...], mesh: AnyMesh | None, *, is_free: bool = False
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
        kinds = zip(plan.paths, plan.kind_of.tolist(), strict=True) if _is_plan(plan) else ()
        if lost := [path for path, kind in kinds if plan.kinds[kind].shape is None]:
            names = ", ".join([*lost[:_NAMED], *and_more(len(lost), _NAMED, "leaf")])
            raise ValueError(
                printable(
                    f"argument {i} is a plan of a tree with leaves that are no arrays, which a "
                    f"plan does not keep: {names}: {_STATIC}"
                )
            )


@contextmanager
def noted(step: Any, args: tuple[Any, ...]) -> Iterator[None]:
    """Note beside an error of a step which line raises it, and what the step was called with."""
    try:
        yield
    except Exception as error:
        frames = ((frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__))
        places = [f"{file}:{line}" for file, line in frames if not is_library(file)]
        name = getattr(step, "__name__", type(step).__name__)
        where = f", which raises at {places[-1]}," if places else ""
        rows = (f"  {place}: {_argument_shown(arg)}" for place, arg in enumerate(args))
        lines = [f"shardrules called {name}{where} with these arguments, as it would be called:"]
        error.add_note(printable_lines([*lines, *rows]))
        raise


def _argument_shown(arg: Any) -> str:
    """Return an argument in a line: a plan by its tree, arrays by dtype and shape."""

    def line(leaf: Any) -> str:
        has_shape = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        return f"{leaf.dtype}{[*leaf.shape]}" if has_shape else brief(leaf)

    kind, tree = ("the tree of a plan, ", arg.abstract()) if isinstance(arg, Plan) else ("", arg)
    pairs = tree_util.tree_flatten_with_path(tree)[0]
    texts = [f"{tree_util.keystr(path)} {line(leaf)}".strip() for path, leaf in pairs[:_NAMED]]
    return kind + ", ".join([*texts, *and_more(len(pairs), _NAMED, "leaf")])


# What a step asks of JAX while it is traced.

_NAMES: Final = (
    "default_backend", "device_count", "devices", "local_device_count", "local_devices",
    "process_count",
)  # fmt: skip
_lock = threading.RLock()


def _answers(mesh: AnyMesh) -> dict[str, Any]:
    """Return what JAX's functions say on the devices of a mesh, by name."""
    if not has_devices(mesh):
        return {"default_backend": "cpu", "device_count": mesh.size}
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    platform = devices[0].platform
    return {"default_backend": platform, "device_count": len(devices), "devices": devices}


@contextmanager
def answered(mesh: AnyMesh | None) -> Iterator[dict[str, None]]:
    """Answer JAX's questions of this thread for a mesh, and note those of the program.

    Other threads that lower a step wait.
    """
    notes: dict[str, None] = {}
    if mesh is None:
        yield notes
        return
    answers, threads, thread = _answers(mesh), legacy_contexts(), threading.get_ident()

    def ask(name: str, frame: FrameType, *, is_answered: bool) -> bool:
        """Note a question of the program; False if it is JAX's own, or of another thread."""
        place = _asker(frame) if threading.get_ident() == thread else None
        if place is not None:
            end = "on the devices of the mesh"
            end = end if is_answered else "here: the program may be another"
            notes[f"the step asks {name} at {place}: answered as {end}"] = None
        return place is not None

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            backend = next(iter((*args, *kwargs.values())), None)
            is_known = name in answers and backend in (None, answers["default_backend"])
            is_asked = ask(f"jax.{name}()", sys._getframe(1), is_answered=is_known)
            if not is_asked or not is_known:
                return function(*args, **kwargs)
            return [*answers[name]] if isinstance(answers[name], list) else answers[name]

        return answer

    with _lock:
        functions = {name: getattr(jax, name) for name in _NAMES}
        context = getattr(threads, "env", None)
        for name, function in functions.items():
            setattr(jax, name, watched(name, function))
        if context is not None:
            threads.env = _WatchedContext(context, mesh, ask)
        try:
            yield notes
        finally:
            for name, function in functions.items():
                setattr(jax, name, function)
            if context is not None:
                threads.env = context


class _WatchedContext:
    """JAX's context of `with mesh:` in this thread, of which some libraries read the mesh.

    So does JAX 0.7 for the specs of constraints, where the mesh in force has no devices.
    """

    def __init__(self, context: Any, mesh: AnyMesh, ask: Callable[..., bool]) -> None:
        self._context, self._mesh, self._ask = context, mesh, ask

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._context, name)
        if name != "physical_mesh" or not value.empty:
            return value
        frame, is_answered = sys._getframe(1), has_devices(self._mesh)
        if not self._ask("the mesh of `with mesh:`", frame, is_answered=is_answered):
            is_answered = frame.f_code.co_name == "with_sharding_constraint"
        return self._mesh if is_answered else value


def _asker(frame: FrameType) -> Place | None:
    """Return the line that asks; None if JAX itself does."""
    if frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "shardrules"):
        return None
    line: FrameType | None = frame
    while line is not None and is_library(line.f_code.co_filename):
        line = line.f_back
    line = line or frame
    return Place(line.f_code.co_filename, line.f_lineno)
