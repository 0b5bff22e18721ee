"""Arrays of types on meshes of the first devices, and steps that are lowered or compiled to their end."""

from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._program import lowering
from shardrules._program.compiler import compile_whole


def devices(**sizes: int) -> Mesh:
    """Return a mesh of the first devices, such as devices(fsdp=4, tp=2)."""
    return Mesh(np.array(jax.devices()[: prod(sizes.values())]).reshape(*sizes.values()), tuple(sizes))


def array(mesh: Any, shape: tuple[int, ...], *spec: Any, dtype: Any = "float32") -> Any:
    """Return the type of an array that lies so on a mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))


def constrained(mesh: Any, x: Any, *spec: Any) -> Any:
    """Return what is to lie so within a step."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def lowered_on(mesh: Any, step: Any, *args: Any) -> Any:
    """Return a step lowered for the devices of a mesh, which need not be there."""
    return lowering.lowered_on(mesh, step, args)[0]


def compiled_on(step: Any, *args: Any, on: Any = None) -> Any:
    """Return what JAX compiles, for `verify` and `inspect`."""
    mesh = None if on is None else lowering.target_mesh(on, args)
    return compile_whole(lowered_on(mesh, step, *args), mesh)
