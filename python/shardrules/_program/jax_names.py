"""Every private name of JAX that programs need, each with its public fallback, as in `_base`.

How JAX lowers and compiles, what a compiled function takes and returns, and where an equation is
from.
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

from shardrules._base.jax_names import private
from shardrules._base.text import Place


def compiled_in_tree(compiled: Any) -> Any:
    """Return the structure of a compiled function's arguments.

    Fallback: its public property, which flattens the tree of arguments again.
    """
    return private(compiled, "_params.in_tree") or compiled.in_tree


def compiled_inputs(compiled: Any) -> tuple[list[Any], list[Any], list[bool]]:
    """Return a compiled function's arguments: shardings, shaped values, and which are donated.

    A dropped argument, which the function does not use, has the sharding None. Fallback: its public
    trees, of which JAX makes new ones at each call, and the infos' own shapes and dtypes.
    """
    from jax import tree_util

    infos, structure = tree_util.tree_flatten(compiled.args_info)
    treedef: Any = structure
    # Constants of the function come first, and dropped arguments are missing.
    shardings = private(compiled, "_executable._in_shardings")
    has_constants = private(compiled, "_params.const_args")
    if shardings is None or has_constants or len(shardings) != len(infos):
        shardings = treedef.flatten_up_to(compiled.input_shardings)
    values = infos
    with contextlib.suppress(AttributeError):
        values = list(map(attrgetter("_aval"), infos))
    return list(shardings), values, list(map(attrgetter("donated"), infos))


def compiled_outputs(compiled: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings and the shaped values of a compiled function's results, as leaves.

    Fallback: `out_info`, which takes 10 microseconds longer for each leaf.
    """
    from jax import tree_util

    shardings = private(compiled, "_executable._out_shardings")
    if shardings is None:
        shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    values = private(compiled, "_executable.out_avals")
    if values is None:
        values = tree_util.tree_leaves(compiled.out_info)
    return list(shardings), list(values)


_COMPILED_WITH = ("in_shardings", "out_shardings", "kept_var_idx", "num_devices", "host_callbacks")


def calls_python(lowered: Any) -> bool:
    """Say whether a lowered function calls Python: its text has addresses in this process.

    Fallback: True, so that it is kept in no cache.
    """
    arguments = _compile_arguments(lowered)
    return arguments is None or bool(arguments["host_callbacks"])


def _compile_arguments(lowered: Any) -> dict[str, Any] | None:
    arguments = private(lowered, "_lowering.compile_args") or {}
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
    if len(of_kept) != len(inputs) or max(of_kept, default=-1) >= count:  # constants among them
        return None
    return [of_kept.get(i) for i in range(count)], outputs


def kept_arguments(lowered: Any) -> list[int] | None:
    """Return the arguments of a lowered function that it uses, as leaves.

    Fallback: None, so that it cannot be run elsewhere.
    """
    arguments = _compile_arguments(lowered)
    return None if arguments is None else sorted(arguments["kept_var_idx"])


def _module_class() -> Any:
    """Return jaxlib's HloModule, which has moved."""
    return private("jaxlib._hlo", "HloModule") or private("jaxlib._jax", "HloModule")


def _sharding_class() -> Any:
    """Return jaxlib's HloSharding, which has moved."""
    return private("jaxlib._hlo", "HloSharding") or private("jaxlib._jax", "HloSharding")


def module_in(proto: bytes) -> bytes | None:
    """Return the first field of a serialized HloProto, the module; None if it is cut."""
    size = shift = 0
    for end, byte in enumerate(proto[1:11], 2):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return proto[end : end + size] if end + size <= len(proto) else None
    return None


def _module_of(proto: bytes) -> Any:
    """Return the module of a serialized HloProto; None if it is cut."""
    module, reader = module_in(proto), _module_class()
    if module is None or reader is None:
        return None
    return reader.from_serialized_hlo_module_proto(module)


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
    module, of_proto = _module_of(proto), private(_sharding_class(), "from_proto")
    parse = private("jax._src.sharding_impls", "parse_flatten_op_sharding")
    if None in (module, of_proto, parse):
        return None
    in_tiles = private(_sharding_class(), "v3_to_v2_sharding")
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
    calls = [eqn for eqn in _equations(inner.jaxpr) if eqn.primitive.name in _CALLBACKS]
    parameters = private("jax._src.interpreters.mlir", "LoweringParameters")
    dispatch = private("jax._src.dispatch", "jaxpr_has_prim_requiring_devices")
    if not calls or parameters is None or dispatch is None:
        return traced.lower(lowering_platforms=(platform,)), []
    rules = tuple((primitive, _left_out) for primitive in {eqn.primitive for eqn in calls})
    replaced = parameters(override_lowering_rules=rules)

    def lower(lowering_platforms: Any = None) -> Any:
        with _devices_not_asked():
            return inner.lower(lowering_platforms=lowering_platforms, _private_parameters=replaced)

    texts = []
    for eqn in calls:
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
    options: bytes
    """What JAX gives to the compiler beside it, as `compile_dumped` reads it."""
    overrides: list[tuple[str, Any]]
    """Of it the `compiler_options` of `jax.jit`, which the rest has in no order."""
    device_ids: list[int]
    """Numbers of the devices, in the order of the mesh."""


def compiler_input(lowered: Any) -> CompilerInput | None:
    """Return what `Lowered.compile` would give to XLA.

    Fallback: None, so that the function is compiled in this process, to its end.
    """
    import io

    import numpy as np

    arguments = _compile_arguments(lowered)
    named = private(lowered, "_lowering._compiler_options_kvs")
    left_open = private("jax._src.interpreters.pxla", "get_prop_to_input_output")
    options_of = private("jax._src.compiler", "get_compile_options")
    in_child = [private(*name) for name in NAMES_IN_CHILD]
    if arguments is None or None in (named, left_open, options_of, *in_child):
        return None
    devices = private(lowered, "_lowering._device_list") or ()
    ids = [device.id for device in devices if device.platform != "cpu"]
    ids = ids or [*range(arguments["num_devices"])]  # of host devices those of the child
    options: Any = options_of(
        num_replicas=1,
        num_partitions=len(ids),
        device_assignment=np.array([ids]),
        env_options_overrides=dict(named),
    )
    overrides, options.env_option_overrides = sorted(options.env_option_overrides), []
    options.parameter_is_tupled_arguments = bool(arguments.get("tuple_args", False))
    sides = (arguments[name] for name in _COMPILED_WITH[:2])
    inputs, outputs = left_open(*sides, len(arguments.get("ordered_effects", ())))
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = list(inputs)
    build.allow_spmd_sharding_propagation_to_output = list(outputs)
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return CompilerInput(bytecode.getvalue(), options.SerializeAsString(), overrides, ids)


NAMES_IN_CHILD = (
    ("jaxlib.xla_client", "make_cpu_client"),
    ("jaxlib.xla_client", "load_pjrt_plugin_dynamically"),
    ("jaxlib.xla_client", "initialize_pjrt_plugin"),
    ("jaxlib.xla_client", "make_tfrt_tpu_c_api_device_topology"),
    ("jaxlib.xla_client", "CompileOptions.ParseFromString"),
    ("jaxlib.xla_client", "DeviceList"),
    ("jaxlib.mlir._mlir_libs._jax_mlir_ext", "register_dialects"),
    ("jaxlib.mlir.dialects.chlo", "register_dialect"),
    ("jaxlib.mlir.dialects.mhlo", "register_mhlo_dialect"),
    ("jaxlib.mlir.dialects.sdy", "register_dialect"),
    ("jaxlib.mlir.dialects.stablehlo", "register_dialect"),
)
"""Modules and names that the child reads."""


def devices_without_jax(
    topology: tuple[str, dict[str, Any]] | None, library: str | None, count: int
) -> list[Any]:
    """Return described TPUs, or so many host devices, by jaxlib alone: `import jax` takes longer.

    Here and in `compile_dumped` there is no fallback: `compiler_input` has looked for the names.
    """
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    if topology is None:
        return list(xla_client.make_cpu_client(num_devices=count).devices())
    name, options = topology
    xla_client.load_pjrt_plugin_dynamically("tpu", library)
    xla_client.initialize_pjrt_plugin("tpu")
    described = xla_client.make_tfrt_tpu_c_api_device_topology(name, **options)
    return list(described._make_compile_only_devices())


def compile_dumped(asked: CompilerInput, devices: list[Any], folder: str) -> None:
    """Compile a module for some of these devices, and have XLA write what it makes to a folder."""
    dumps = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True, "xla_dump_hlo_as_text": True}
    _compiled_from_input(asked, devices, dumps)


class LoadedModule(NamedTuple):
    """A module that is compiled to be run in this process."""

    execute: Callable[[list[Any]], list[list[Any]]]
    """Takes placed arrays, and returns for each result what each device has."""
    text: str
    """Optimized."""
    bytes: int
    """That a device needs."""
    specs: list[Any] | None
    """PartitionSpecs of the results; None on one device."""


def run_module(asked: CompilerInput, mesh: Any) -> LoadedModule:
    """Compile a module for the devices of a mesh. There is no fallback, as in `compile_dumped`."""
    parse = importlib.import_module("jax._src.sharding_impls").parse_flatten_op_sharding
    loaded = _compiled_from_input(asked, list(mesh.devices.flat), {})
    memory, shardings = loaded.get_compiled_memory_stats(), loaded.get_output_shardings()
    sizes = (getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "temp"))

    def execute(arrays: list[Any]) -> list[list[Any]]:
        results: Any = loaded.execute_sharded(arrays)
        return list(results.disassemble_into_single_device_arrays())

    return LoadedModule(
        execute,
        text=loaded.hlo_modules()[0].to_string(),
        bytes=sum(sizes),
        specs=shardings and [spec for sharding in shardings for spec in parse(sharding, mesh)],
    )


def _compiled_from_input(asked: CompilerInput, devices: list[Any], dumps: dict[str, Any]) -> Any:
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    options = xla_client.CompileOptions.ParseFromString(asked.options)
    # Nothing else is dumped: what the user's process dumps, this one has no flags for.
    others = xla_client.CompileOptions()  # which is kept, as its parts do not keep it
    flags, own = (each.executable_build_options.debug_options for each in (options, others))
    for name in dir(own):
        if name.startswith("xla_dump"):
            setattr(flags, name, getattr(own, name))
    options.env_option_overrides = [*asked.overrides, *dumps.items()]
    device_of = {device.id: device for device in devices}
    targets = xla_client.DeviceList(tuple(device_of[number] for number in asked.device_ids))
    client, is_host = devices[0].client, devices[0].platform == "cpu"
    compiles = client.compile_and_load if is_host else client.compile
    try:
        return compiles(_parsed(asked.module), executable_devices=targets, compile_options=options)
    except TypeError:  # JAX 0.7 takes the bytes
        return compiles(asked.module, executable_devices=targets, compile_options=options)


def _parsed(module: bytes) -> Any:
    """Return StableHLO as a module of MLIR, in a context like JAX's own."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, sdy, stablehlo

    registry, context = ir.DialectRegistry(), ir.Context()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    mhlo.register_mhlo_dialect(context)
    for dialect in (chlo, sdy, stablehlo):
        dialect.register_dialect(context)
    with context:
        return ir.Module.parse(module)


def device_order(sharding: Any) -> tuple[Any, ...]:
    """Return the devices of a sharding without a mesh, in its order.

    Fallback: in the order of their numbers.
    """
    devices = private(sharding, "_device_assignment")
    return tuple(devices or sorted(sharding.device_set, key=attrgetter("id")))


def user_line(eqn: Any) -> Place | None:
    """Return the file and line of the program that makes an equation of a jaxpr.

    It is the innermost frame that is not of JAX or a library of layers on it. Fallback: None.
    """
    frames: Any = private(eqn, "source_info.traceback.frames") or ()
    for frame in frames:
        if not is_library(frame.file_name):
            return Place(frame.file_name, frame.line_num)
    return None


def legacy_contexts() -> Any:
    """Return the contexts of `with mesh:` by thread, whose `env` is this thread's; or None."""
    return private("jax._src.mesh", "thread_resources")


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
