"""Every private name of JAX and flax that this package reads, each with its public fallback.

No other module imports `jax._src`, or reads an attribute of these libraries that begins with an
underscore. A function whose private name is missing answers by public names, which take longer or
know less; its docstring says what is lost. Imports JAX only when a function is called.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
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


def dumped_specs(module: bytes, mesh: Any) -> list[Any] | None:
    """Return the PartitionSpecs of the results of a module as XLA writes it, as leaves.

    Fallback: None, so that only those are known which `out_shardings` names.
    """
    hlo = _private("jaxlib._hlo", "HloModule.from_serialized_hlo_module_proto")
    of_proto = _private("jaxlib._hlo", "HloSharding.from_proto")
    in_tiles = _private("jaxlib._hlo", "HloSharding.v3_to_v2_sharding")
    parse = _private("jax._src.sharding_impls", "parse_flatten_op_sharding")
    if None in (hlo, of_proto, in_tiles, parse):
        return None
    try:
        sharding = of_proto(hlo(module).spmd_output_sharding)
        leaves = sharding.tuple_elements() or [sharding]
        return [spec for leaf in leaves for spec in parse(in_tiles(leaf), mesh)]
    except Exception:  # of another form than these versions write
        return None


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
    libraries = _library_folders()
    for frame in frames:
        if not frame.file_name.startswith(libraries):
            return Place(frame.file_name, frame.line_num)
    return None


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("jax", "jaxlib", "flax", "equinox", "optax", "shardrules", "functools", "contextlib")
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return tuple(
        f"{Path(file).parent}{os.sep}" if file.endswith("__init__.py") else file
        for file in files
        if file
    )
