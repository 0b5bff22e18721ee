"""Every private name of JAX and flax that this package reads, each with its public fallback.

No other module imports `jax._src`, or reads an attribute of these libraries that begins with an
underscore. A function whose private name is missing answers by public names, which take longer or
know less; its docstring says what is lost. Imports JAX only when a function is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from shardrules._base.text import Place


def _private(owner: Any, name: str) -> Any:
    """Read a private name of a module or an object; None where it is missing."""
    try:
        target = importlib.import_module(owner) if isinstance(owner, str) else owner
        return attrgetter(name)(target)
    except (ImportError, AttributeError):
        return None


class MeshContexts(NamedTuple):
    """Functions that read the meshes in force; each gives None, or an empty mesh, for none."""

    abstract: Callable[[], Any]
    """The mesh of `jax.set_mesh` or `jax.sharding.use_abstract_mesh`, without devices."""
    concrete: Callable[[], Any]
    """The mesh of `jax.set_mesh`, with its devices."""
    legacy: Callable[[], Any]
    """The mesh of `with mesh:`."""


@functools.cache
def mesh_contexts() -> MeshContexts:
    """Return the functions that read JAX's mesh contexts.

    Fallback: `jax.sharding.get_mesh`, which newer versions have; and no mesh of `with mesh:`.
    """
    import jax

    concrete = _private("jax._src.mesh", "get_concrete_mesh")
    threads = _private("jax._src.mesh", "thread_resources")
    return MeshContexts(
        jax.sharding.get_abstract_mesh,
        concrete or _public_concrete_mesh,
        _no_mesh if threads is None else lambda: threads.env.physical_mesh,
    )


def _no_mesh() -> None:
    return None


def _public_concrete_mesh() -> Any:
    import jax

    try:
        return getattr(jax.sharding, "get_mesh", _no_mesh)()
    except ValueError:  # inside jit, where the abstract mesh says all
        return None


@functools.cache
def trace_state_check() -> Callable[[], bool]:
    """Return the function that says whether no transformation, such as jit, is being traced.

    Fallback: an array made here is a tracer inside jit. Inside vmap and grad alone it is none; the
    tracers among a function's arguments tell of those.
    """
    check: Callable[[], bool] | None = _private("jax._src.core", "trace_state_clean")
    return check or _makes_arrays


def _makes_arrays() -> bool:
    from jax.core import Tracer
    from jax.numpy import zeros

    return not isinstance(zeros(()), Tracer)


class CoordinationState(NamedTuple):
    """The client of JAX's coordination service, and the number of this process in the job."""

    client: Any
    process_id: int


def coordination_state() -> CoordinationState | None:
    """Return the state of `jax.distributed.initialize`; None before it. Starts no backend.

    Fallback: None. JAX has no public name for its coordination service.
    """
    state = _private("jax._src.distributed", "global_state")
    client = getattr(state, "client", None)
    return None if client is None else CoordinationState(client, state.process_id)


def is_coordinated() -> bool:
    """Return whether this process has joined others, without importing JAX."""
    return "jax._src.distributed" in sys.modules and coordination_state() is not None


def weakly_typed(array: Any) -> Any:
    """Give an array the weak type of a Python number, inside jit.

    Fallback: the array as it is, beside which other arrays are promoted as beside any array.
    """
    convert = _private("jax._src.lax.lax", "_convert_element_type")
    return array if convert is None else convert(array, weak_type=True)


_SPACES = {"device": "Device", "pinned_host": "Host"}
"""By memory kind, the name in `jax.memory.Space`."""


def transfer_target(memory_kind: str) -> Any:
    """Return what `jax.device_put` takes for a memory kind inside jit.

    Raises:
        ValueError: JAX does not move arrays to this kind inside jit.
    """
    import jax

    if memory_kind not in _SPACES:
        raise ValueError(
            f"an array cannot be moved to {memory_kind!r} memory inside jit, where JAX has "
            f"{' and '.join(map(repr, _SPACES))}; move it outside of jit"
        )
    return getattr(jax.memory.Space, _SPACES[memory_kind])


def compiled_inputs(compiled: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings and the shaped values of a compiled function's arguments, as leaves.

    A dropped argument, which the function does not use, has the sharding None.
    """
    from jax import tree_util

    infos, structure = tree_util.tree_flatten(compiled.args_info)
    treedef: Any = structure
    return treedef.flatten_up_to(compiled.input_shardings), infos


def compiled_outputs(compiled: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings and the shaped values of a compiled function's results, as leaves.

    Fallback: `out_info`, which takes 10 microseconds longer for each leaf.
    """
    from jax import tree_util

    shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    values = _private(compiled, "_executable.out_avals")
    return shardings, tree_util.tree_leaves(compiled.out_info) if values is None else list(values)


_COMPILED_WITH = ("in_shardings", "out_shardings", "in_layouts", "out_layouts", "kept_var_idx")


def lowered_options(lowered: Any) -> tuple[Any, ...] | None:
    """Return what a lowered function is compiled with beside its text; None if it is not known.

    These are shardings and layouts, which arguments are not dropped, and the `compiler_options` of
    `jax.jit`. Fallback: None, so that the result is kept in no cache. None also for a function that
    calls Python, whose text has addresses in this process.
    """
    options = _private(lowered, "_lowering._compiler_options_kvs")
    arguments = _compile_arguments(lowered)
    if options is None or arguments is None or arguments.get("host_callbacks", True):
        return None
    return options, *(arguments[name] for name in _COMPILED_WITH)


def _compile_arguments(lowered: Any) -> dict[str, Any] | None:
    arguments = _private(lowered, "_lowering.compile_args") or {}
    return arguments if arguments.keys() >= set(_COMPILED_WITH) else None


def lowered_shardings(lowered: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the shardings of a lowered function's arguments and results, as leaves.

    That of an argument which is dropped, or of one that nothing says, is None. Fallback: None, so
    that nothing is read of a compiler that has not ended.
    """
    from jax.sharding import NamedSharding

    arguments = _compile_arguments(lowered)
    if arguments is None:
        return None
    inputs, outputs = (
        [value if isinstance(value, NamedSharding) else None for value in arguments[name]]
        for name in _COMPILED_WITH[:2]
    )
    of_kept = dict(zip(sorted(arguments["kept_var_idx"]), inputs, strict=False))
    count = lowered.in_tree.num_leaves
    if len(of_kept) != len(inputs) or max(of_kept, default=0) >= count:  # constants among them
        return None
    return [of_kept.get(i) for i in range(count)], outputs


def _module_class() -> Any:
    """Return jaxlib's HloModule, which has moved."""
    return _private("jaxlib._hlo", "HloModule") or _private("jaxlib._jax", "HloModule")


def _sharding_class() -> Any:
    """Return jaxlib's HloSharding, which has moved."""
    return _private("jaxlib._hlo", "HloSharding") or _private("jaxlib._jax", "HloSharding")


def _module_of(proto: bytes) -> Any:
    """Return the module of a serialized HloProto, whose first field it is; None if cut."""
    size = shift = 0
    for end, byte in enumerate(proto[1:11], 2):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            reader = _module_class()
            if reader is None or end + size > len(proto):
                return None
            return reader.from_serialized_hlo_module_proto(proto[end : end + size])
    return None


def module_text(proto: bytes) -> str:
    """Return the text of an HloProto that XLA has dumped, as `Compiled.as_text` prints it.

    Fallback: "", so that programs are compiled to their end instead.
    """
    module = _module_of(proto)
    return "" if module is None else module.to_string()


def dumped_specs(proto: bytes, mesh: Any) -> list[Any] | None:
    """Return the PartitionSpecs of the results of an HloProto that XLA has dumped, as leaves.

    Fallback: None, so that only those are known which `out_shardings` names.
    """
    module, of_proto = _module_of(proto), _private(_sharding_class(), "from_proto")
    parse = _private("jax._src.sharding_impls", "parse_flatten_op_sharding")
    if None in (module, of_proto, parse):
        return None
    in_tiles = _private(_sharding_class(), "v3_to_v2_sharding")
    try:
        sharding = of_proto(module.spmd_output_sharding)
        leaves = sharding.tuple_elements() or [sharding]
        tiles = leaves if in_tiles is None else map(in_tiles, leaves)
        return [spec for leaf in tiles for spec in parse(leaf, mesh)]
    except Exception:  # of another form than these versions write
        return None


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, and of those in their parameters."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                    yield from _equations(inner)


_CALLBACKS = {
    "debug_callback": "jax.debug.callback",
    "debug_print": "jax.debug.print",
    "inspect_sharding": "jax.debug.inspect_array_sharding",
    "io_callback": "io_callback",
    "pure_callback": "jax.pure_callback",
}
"""Operations that call Python, which JAX does not lower without devices, by primitive."""


def lowered_without_devices(traced: Any, platform: str) -> tuple[Any, list[str]]:
    """Lower a traced function for a mesh without devices, its calls of Python left out.

    Args:
        traced: JAX's own `Traced`, or that of flax.
        platform: The platform of the compiler.

    Returns:
        What it lowers to, and what was left out, such as "jax.debug.print at train.py:12".
        Fallback: nothing is left out, and JAX refuses such functions.
    """
    inner = getattr(traced, "traced", traced)
    found = [eqn for eqn in _equations(inner.jaxpr) if eqn.primitive.name in _CALLBACKS]
    parameters = _private("jax._src.interpreters.mlir", "LoweringParameters")
    dispatch = _private("jax._src.dispatch", "jaxpr_has_prim_requiring_devices")
    if not found or parameters is None or dispatch is None:
        return traced.lower(lowering_platforms=(platform,)), []
    rules = tuple((primitive, _left_out) for primitive in {eqn.primitive for eqn in found})
    replaced = parameters(override_lowering_rules=rules)

    def lower(lowering_platforms: Any = None) -> Any:
        with _devices_not_asked():
            return inner.lower(lowering_platforms=lowering_platforms, _private_parameters=replaced)

    texts = []
    for eqn in found:
        place = user_line(eqn)
        texts.append(_CALLBACKS[eqn.primitive.name] + (f" at {place}" if place else ""))
    box = traced if inner is traced else dataclasses.replace(traced, traced=_Lowers(lower))
    lowered = lower((platform,)) if inner is traced else box.lower(lowering_platforms=(platform,))
    return lowered, list(dict.fromkeys(texts))


class _Lowers(NamedTuple):
    """Stands for a `Traced` in the box that flax has around it."""

    lower: Callable[..., Any]


def _left_out(ctx: Any, *_: Any, **__: Any) -> list[Any]:
    """Lower a call of Python to zeros that XLA does not fold into what reads them."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    if getattr(ctx, "tokens_in", None) is not None:
        ctx.set_tokens_out(ctx.tokens_in)
    zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]
    return list(stablehlo.OptimizationBarrierOp(zeros).results) if zeros else []


_lock = threading.Lock()


@contextlib.contextmanager
def _devices_not_asked() -> Iterator[None]:
    """Let this thread lower a function whose operations would ask for devices."""
    dispatch = importlib.import_module("jax._src.dispatch")
    name = "jaxpr_has_prim_requiring_devices"
    with _lock:
        asks = getattr(dispatch, name)
        me = threading.get_ident()
        setattr(dispatch, name, lambda jaxpr: threading.get_ident() != me and asks(jaxpr))
        try:
            yield
        finally:
            setattr(dispatch, name, asks)


class CompilerInput(NamedTuple):
    """What XLA needs to compile a lowered function elsewhere."""

    module: bytes
    """StableHLO as bytecode."""
    device_count: int
    device_ids: list[int] | None
    """Devices in the order of the mesh; None of a mesh without devices."""
    options: dict[str, Any]
    """As JSON has it, for `compile_dumped`."""


_CONFIG = (
    "jax_optimization_level", "jax_memory_fitting_level", "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort", "jax_use_shardy_partitioner", "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations", "jax_xla_profile_version",
)  # fmt: skip
"""JAX's settings that reach the compiler beside the module."""


def compiler_input(lowered: Any) -> CompilerInput | None:
    """Return what `Lowered.compile` would give to XLA, as far as it can be written down.

    Fallback: None, so that the function is compiled in this process, to its end.
    """
    import io

    import jax

    arguments = _private(lowered, "_lowering.compile_args") or {}
    options = _private(lowered, "_lowering._compiler_options_kvs")
    left_open = _private("jax._src.interpreters.pxla", "get_prop_to_input_output")
    shardings = arguments.keys() >= set(_COMPILED_WITH)
    if options is None or left_open is None or not shardings or "num_devices" not in arguments:
        return None
    sides = (arguments[name] for name in _COMPILED_WITH[:2])
    effects = len(arguments.get("ordered_effects", ()))
    inputs, outputs = left_open(*sides, effects)
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    devices = _private(lowered, "_lowering._device_list")
    return CompilerInput(
        bytecode.getvalue(),
        arguments["num_devices"],
        None if devices is None else [device.id for device in devices],
        {
            "inputs": list(inputs),
            "outputs": list(outputs),
            "is_tupled": bool(arguments.get("tuple_args", False)),
            "options": dict(options),
            "config": {
                name: value
                for name in _CONFIG
                if (value := jax.config.values.get(name)) is not None
            },
        },
    )


def compile_dumped(module: bytes, devices: Any, options: Any, folder: str) -> None:
    """Compile a module as `CompilerInput.options` say, and have XLA write what it makes.

    There is no fallback: it runs in a process of its own, where an error is told.
    """
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jaxlib._jax import DeviceList  # type: ignore[import-not-found]
    from jaxlib.mlir import ir

    for name, value in options["config"].items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    asked: Any = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([device.id for device in devices]).reshape(1, -1),
        env_options_overrides=options["options"],
    )
    build = asked.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = options["inputs"]
    build.allow_spmd_sharding_propagation_to_output = options["outputs"]
    asked.parameter_is_tupled_arguments = options["is_tupled"]
    dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
    asked.env_option_overrides = [*asked.env_option_overrides, *dumps.items()]
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
    client = devices[0].client
    compiler.backend_compile_and_load(client, parsed, DeviceList(tuple(devices)), asked, [])


def device_order(sharding: Any) -> tuple[Any, ...]:
    """Return the devices of a sharding without a mesh, in its order.

    Fallback: in the order of their numbers.
    """
    devices = _private(sharding, "_device_assignment")
    return tuple(devices or sorted(sharding.device_set, key=attrgetter("id")))


def flax_axis_rules() -> Any:
    """Return flax's own record of the logical axis rules in force, if flax is loaded.

    Fallback: None, so that flax's functions do not see rules that ours have set.
    """
    module = sys.modules.get("flax.core.spmd")
    return None if module is None else _private(module, "_axis_rules")


def registered_unflatten(node_type: type) -> Callable[..., Any] | None:
    """Return the function that rebuilds the nodes of a registered pytree type.

    Fallback: None; the registry is then asked node by node, which takes longer.
    """
    registry = _private("jax._src.tree_util", "_registry") or {}
    return getattr(registry.get(node_type), "from_iter", None)


def node_flattener() -> Callable[[Any], Any]:
    """Return the function that takes a node apart: ((key, child) pairs, auxiliary data).

    For a leaf it gives None. `default_registry` is public; its methods are undocumented.
    """
    from jax import tree_util

    registry: Any = tree_util.default_registry
    return registry.flatten_one_level_with_keys  # type: ignore[no-any-return]


def user_line(eqn: Any) -> Place | None:
    """Return the file and line of the program that makes an equation of a jaxpr.

    It is the innermost frame that is not of JAX or a library of layers on it. Fallback: None.
    """
    frames: Any = _private(eqn, "source_info.traceback.frames") or ()
    for frame in frames:
        if not is_library(frame.file_name):
            return Place(frame.file_name, frame.line_num)
    return None


def is_library(file_name: str) -> bool:
    """Say whether a file is of JAX, or of a library of layers on it."""
    return file_name.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("jax", "jaxlib", "flax", "equinox", "optax", "shardrules", "functools", "contextlib")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return tuple(
        f"{Path(file).parent}{os.sep}" if file.endswith("__init__.py") else file
        for file in files
        if file
    )
