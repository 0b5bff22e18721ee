"""Every private name of JAX and flax that the layer reads, each with its public fallback.

No other module imports `jax._src`, or reads an attribute of these libraries that begins with an
underscore, but `_program/jax_names.py`, which has those of programs. A function whose private name
is missing answers by public names, which take longer or know less; its docstring says what is lost.
Imports JAX only when a function is called.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple


def private(owner: Any, name: str) -> Any:
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

    concrete = private("jax._src.mesh", "get_concrete_mesh")
    threads = private("jax._src.mesh", "thread_resources")
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
    check: Callable[[], bool] | None = private("jax._src.core", "trace_state_clean")
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
    state = private("jax._src.distributed", "global_state")
    client = getattr(state, "client", None)
    return None if client is None else CoordinationState(client, state.process_id)


def is_coordinated() -> bool:
    """Return whether this process has joined others, without importing JAX."""
    return "jax._src.distributed" in sys.modules and coordination_state() is not None


def weakly_typed(array: Any) -> Any:
    """Give an array the weak type of a Python number, inside jit.

    Fallback: the array as it is, beside which other arrays are promoted as beside any array.
    """
    convert = private("jax._src.lax.lax", "_convert_element_type")
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


def flax_axis_rules() -> Any:
    """Return flax's own record of the logical axis rules in force, if flax is loaded.

    Fallback: None, so that flax's functions do not see rules that ours have set.
    """
    module = sys.modules.get("flax.core.spmd")
    return None if module is None else private(module, "_axis_rules")


def registered_unflatten(node_type: type) -> Callable[..., Any] | None:
    """Return the function that rebuilds the nodes of a registered pytree type.

    Fallback: None; the registry is then asked node by node, which takes longer.
    """
    registry = private("jax._src.tree_util", "_registry") or {}
    return getattr(registry.get(node_type), "from_iter", None)


def node_flattener() -> Callable[[Any], Any]:
    """Return the function that takes a node apart: ((key, child) pairs, auxiliary data).

    For a leaf it gives None. `default_registry` is public; its methods are undocumented.
    """
    from jax import tree_util

    registry: Any = tree_util.default_registry
    return registry.flatten_one_level_with_keys  # type: ignore[no-any-return]
