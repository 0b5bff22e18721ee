"""A mesh, constraints, abstract arguments and compiled train steps, for the fresh steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.score import Built

__all__ = ["abstract", "cutter", "mesh_of", "rms_norm", "train_step"]


def mesh_of(**axes: int) -> Mesh:
    """Return a mesh of the first devices, all of its axes Auto."""
    sizes = tuple(axes.values())
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(axes))


def cutter(mesh: Mesh) -> Callable[[Any, P | None], Any]:
    """Return what constrains arrays to a spec on the mesh; None leaves them to XLA."""

    def cut(x: Any, spec: P | None) -> Any:
        return x if spec is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return cut


def abstract(mesh: Mesh, spec: P, shape: Sequence[int], dtype: Any = "int32") -> Any:
    """Return an abstract array with a sharding."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))


def rms_norm(x: Any, scale: Any) -> Any:
    """Return x over its root mean square."""
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def train_step(
    step: Callable[..., Any],
    plan: sr.Plan,
    state: Any,
    batch: Any,
    *,
    donate: bool = True,
    returned: bool = True,
    given: tuple[Any, Any] | None = None,
    constants: Sequence[sr.Plan] = (),
) -> Built:
    """Compile step(params, state, *constants, batch) -> (params, state, metrics).

    Args:
        step: The function.
        plan: The plan of the parameters.
        state: The optimizer's state, abstract, without shardings.
        batch: Abstract arrays with shardings.
        donate: Whether parameters and state are donated.
        returned: Whether jit has out_shardings.
        given: Abstract parameters and state, instead of those of the plans.
        constants: Plans of arguments that are not trained.
    """
    moments = plan.for_optimizer(state)
    trained = (plan, moments)
    shardings = (plan.shardings(), moments.shardings(), None) if returned else None
    jitted = jax.jit(step, donate_argnums=(0, 1) if donate else (), out_shardings=shardings)
    arguments = given or (plan.abstract(), moments.abstract())
    compiled = jitted.lower(*arguments, *(c.abstract() for c in constants), batch).compile()
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, batch)
    return Built(compiled, (*trained, *constants, specs), (*trained, None))
