"""Every private name of JAX that programs need: how it lowers and compiles, and lines of equations.

As in `_base`, a name has a public fallback; without one that is `required`, no compiler is asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from shardrules._base.jax_names import private
from shardrules._base.text import Place


def argument_values(infos: list[Any]) -> list[Any]:
    """Return the shaped values of arguments' infos.

    Fallback: the infos, whose shapes and dtypes take twice as long, and which equal no results.
    """
    with contextlib.suppress(AttributeError):
        return [info._aval for info in infos]
    return infos


def argument_shardings(compiled: Any, count: int) -> list[Any]:
    """Return the shardings of a compiled function's arguments, None for those that it dropped.

    Fallback: their public tree, of which JAX makes a new one at each call.
    """
    shardings = private(compiled, "_executable._in_shardings") or ()
    # Constants of the function would come first, and dropped arguments are missing.
    if len(shardings) != count or private(compiled, "_params.const_args"):
        return list(compiled.in_tree.flatten_up_to(compiled.input_shardings))
    return list(shardings)


def compiled_outputs(compiled: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings and the shaped values of a compiled function's results, as leaves.

    Fallback: their public trees, which take 10 microseconds longer for each leaf.
    """
    from jax import tree_util

    shardings = private(compiled, "_executable._out_shardings")
    if shardings is None:
        shardings = compiled.out_tree.flatten_up_to(compiled.output_shardings)
    values = private(compiled, "_executable.out_avals") or tree_util.tree_leaves(compiled.out_info)
    return list(shardings), list(values)


def required(owner: Any, name: str) -> Any:
    """Read a private name without which no compiler can be asked.

    Raises:
        RuntimeError: This version of JAX has none of this name.
    """
    value = private(owner, name)
    if value is None:
        raise RuntimeError(
            f"this version of JAX has no {name}, by which its compiler is asked: compile the step "
            "yourself, and give shardrules.verify what JAX has compiled"
        )
    return value


def lowered_shardings(lowered: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings of a lowered function's arguments and results, as leaves.

    That of an argument which is dropped, or of one that nothing says, is None.
    """
    from jax.sharding import NamedSharding

    arguments = required(lowered, "_lowering.compile_args")
    inputs, outputs = (
        [value if isinstance(value, NamedSharding) else None for value in arguments[name]]
        for name in ("in_shardings", "out_shardings")
    )
    count, kept = lowered.in_tree.num_leaves, kept_arguments(lowered)
    if len(kept) != len(inputs) or max(kept, default=-1) >= count:
        raise RuntimeError(
            "JAX passes arrays that the step closes over as arguments: let the step take them"
        )
    of_kept = dict(zip(kept, inputs, strict=True))
    return [of_kept.get(i) for i in range(count)], outputs


def kept_arguments(lowered: Any) -> list[int]:
    """Return the arguments of a lowered function that it uses, as leaves."""
    return sorted(required(lowered, "_lowering.compile_args")["kept_var_idx"])


def _of_jaxlib(name: str) -> Any:
    """Return a class of jaxlib that has moved in JAX 0.8."""
    return private("jaxlib._hlo", name) or required("jaxlib._jax", name)


def module_in(proto: bytes) -> bytes | None:
    """Return the first field of a serialized HloProto, the module; None if it is cut."""
    size = shift = 0
    for end, byte in enumerate(proto[1:11], 2):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return proto[end : end + size] if end + size <= len(proto) else None
    return None


def module_of(proto: bytes) -> Any:
    """Return the module of an HloProto that XLA has dumped; None if it is cut.

    Its `to_string` is the text that `Compiled.as_text` prints.
    """
    module = module_in(proto)
    return module and _of_jaxlib("HloModule").from_serialized_hlo_module_proto(module)


def result_specs(module: Any, mesh: Any) -> list[Any]:
    """Return the PartitionSpecs of the results of a module, as leaves; one alone is for all.

    Fallback: [], so that only those are known which `out_shardings` names.
    """
    sharding_type = _of_jaxlib("HloSharding")
    parse = required("jax._src.sharding_impls", "parse_flatten_op_sharding")
    # Before JAX 0.10 there is one form.
    in_tiles = getattr(sharding_type, "v3_to_v2_sharding", lambda leaf: leaf)
    try:
        sharding = sharding_type.from_proto(module.spmd_output_sharding)
        leaves = sharding.tuple_elements() or [sharding]
        return [spec for leaf in leaves for spec in parse(in_tiles(leaf), mesh)]
    except Exception:  # of another form than these versions write
        return []


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


def lowered_without_devices(traced: Any) -> tuple[Any, list[str]]:
    """Lower a traced function for CPUs that are not there, its calls of Python left out.

    Args:
        traced: JAX's own `Traced`, or that of flax. No other thread of ours lowers meanwhile.

    Returns:
        What it lowers to, and what was left out, such as "jax.debug.print at train.py:12".
    """
    inner = getattr(traced, "traced", traced)
    calls = [eqn for eqn in _equations(inner.jaxpr) if eqn.primitive.name in _CALLBACKS]
    if not calls:
        return traced.lower(lowering_platforms=("cpu",)), []
    rules = tuple((primitive, _left_out) for primitive in {eqn.primitive for eqn in calls})
    parameters = required("jax._src.interpreters.mlir", "LoweringParameters")
    dispatch = importlib.import_module("jax._src.dispatch")
    asks = required(dispatch, "jaxpr_has_prim_requiring_devices")
    me = threading.get_ident()

    def lower(**options: Any) -> Any:
        return inner.lower(**options, _private_parameters=parameters(override_lowering_rules=rules))

    stand_in: Any = SimpleNamespace(lower=lower)
    if inner is not traced:  # the box that flax has around it
        stand_in = dataclasses.replace(traced, traced=stand_in)
    dispatch.jaxpr_has_prim_requiring_devices = (  # type: ignore[attr-defined]
        lambda jaxpr: threading.get_ident() != me and asks(jaxpr)
    )
    try:
        lowered = stand_in.lower(lowering_platforms=("cpu",))
    finally:
        dispatch.jaxpr_has_prim_requiring_devices = asks  # type: ignore[attr-defined]
    names = ((_CALLBACKS[eqn.primitive.name], user_line(eqn)) for eqn in calls)
    texts = (f"{name} at {place}" if place else name for name, place in names)
    return lowered, list(dict.fromkeys(texts))


def _left_out(ctx: Any, *_: Any, **__: Any) -> list[Any]:
    """Lower a call of Python to zeros that XLA does not fold into what reads them."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir.dialects import stablehlo

    if getattr(ctx, "tokens_in", None) is not None:
        ctx.set_tokens_out(ctx.tokens_in)
    zeros = [mlir.full_like_aval(ctx, 0, aval) for aval in ctx.avals_out]
    return list(stablehlo.OptimizationBarrierOp(zeros).results) if zeros else []


class CompilerInput(NamedTuple):
    """What XLA needs to compile a lowered function elsewhere."""

    module: bytes
    """StableHLO as bytecode."""
    options: bytes
    """What JAX gives to the compiler beside it."""
    overrides: list[tuple[str, Any]]
    """Of it the `compiler_options` of `jax.jit`, which the rest has in no order."""
    device_ids: list[int]
    """Numbers of the devices, in the order of the mesh."""


def compiler_input(lowered: Any) -> CompilerInput:
    """Return what `Lowered.compile` would give to XLA."""
    import io

    import numpy as np

    arguments = required(lowered, "_lowering.compile_args")
    devices = private(lowered, "_lowering._device_list") or ()
    ids = [device.id for device in devices if device.platform != "cpu"]
    ids = ids or [*range(arguments["num_devices"])]  # of host devices those of the child
    options: Any = required("jax._src.compiler", "get_compile_options")(
        num_replicas=1,
        num_partitions=len(ids),
        device_assignment=np.array([ids]),
        env_options_overrides=dict(required(lowered, "_lowering._compiler_options_kvs")),
    )
    overrides, options.env_option_overrides = sorted(options.env_option_overrides), []
    options.parameter_is_tupled_arguments = bool(arguments.get("tuple_args", False))
    left_open = required("jax._src.interpreters.pxla", "get_prop_to_input_output")
    sides = (arguments["in_shardings"], arguments["out_shardings"])
    inputs, outputs = left_open(*sides, len(arguments.get("ordered_effects", ())))
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = list(inputs)
    build.allow_spmd_sharding_propagation_to_output = list(outputs)
    bytecode = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(bytecode)
    return CompilerInput(bytecode.getvalue(), options.SerializeAsString(), overrides, ids)


def devices_without_jax(
    topology: tuple[str, dict[str, Any]] | None, library: str | None, count: int
) -> list[Any]:
    """Return described TPUs, or so many host devices, by jaxlib alone: `import jax` takes longer.

    The child that calls it fails with the name that jaxlib lacks.
    """
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    if topology is None:
        return list(xla_client.make_cpu_client(num_devices=count).devices())
    name, options = topology
    xla_client.load_pjrt_plugin_dynamically("tpu", library)
    xla_client.initialize_pjrt_plugin("tpu")
    described = xla_client.make_tfrt_tpu_c_api_device_topology(name, **options)
    return list(described._make_compile_only_devices())


def run_module(
    program: CompilerInput, mesh: Any, shapes: Sequence[tuple[int, ...]]
) -> tuple[Callable[[list[Any]], list[Any]], int]:
    """Compile a module for the devices of a mesh, to be run in this process.

    Returns:
        What takes arrays of numpy, and returns those of these shapes; and the bytes that a device
        needs.
    """
    import jax

    parse = required("jax._src.sharding_impls", "parse_flatten_op_sharding")
    loaded = compile_input(program, list(mesh.devices.flat))
    memory = loaded.get_compiled_memory_stats()
    sizes = (getattr(memory, f"{name}_size_in_bytes") for name in ("argument", "output", "temp"))

    def shardings(of_leaves: Any) -> list[Any]:
        specs = (spec for sharding in of_leaves or () for spec in parse(sharding, mesh))
        return [jax.NamedSharding(mesh, spec) for spec in specs]

    whole = jax.NamedSharding(mesh, jax.P())  # of a program for one device, which has none
    inputs = shardings(loaded.get_parameter_shardings()) or whole
    outputs = shardings(loaded.get_output_shardings()) or [whole] * len(shapes)

    def run(arrays: list[Any]) -> list[Any]:
        placed = jax.device_put(arrays, inputs)
        parts = loaded.execute_sharded(placed).disassemble_into_single_device_arrays()
        rows = zip(shapes, outputs, parts, strict=True)
        return [jax.make_array_from_single_device_arrays(*row) for row in rows]

    return run, sum(sizes)


def compile_input(program: CompilerInput, devices: list[Any], **dumps: Any) -> Any:
    """Compile a module for some of these devices; `dumps` say what XLA writes meanwhile."""
    xla_client: Any = importlib.import_module("jaxlib.xla_client")
    options = xla_client.CompileOptions.ParseFromString(program.options)
    # Nothing else is dumped: what the user's process dumps, this one has no flags for.
    others = xla_client.CompileOptions()  # which is kept, as its parts do not keep it
    flags, defaults = (each.executable_build_options.debug_options for each in (options, others))
    for name in dir(defaults):
        if name.startswith("xla_dump"):
            setattr(flags, name, getattr(defaults, name))
    options.env_option_overrides = [*program.overrides, *dumps.items()]
    device_of = {device.id: device for device in devices}
    targets = xla_client.DeviceList(tuple(device_of[number] for number in program.device_ids))
    client = devices[0].client
    settings = {"executable_devices": targets, "compile_options": options}
    if devices[0].platform == "cpu":
        return client.compile_and_load(program.module, **settings)
    return client.compile(_parsed(program.module), **settings)  # libtpu's client takes no bytes


def _parsed(module: bytes) -> Any:
    """Return StableHLO as a module of MLIR, in a context like JAX's own."""
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    registry, context = ir.DialectRegistry(), ir.Context()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    for dialect in (chlo, sdy, stablehlo):
        dialect.register_dialect(context)
    with context:
        return ir.Module.parse(module)


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
