"""A model that is trained, a case of it with a fault, and how its step is compiled.

A step is right as its row of the table says. A fault changes constraints by name, comes before the rules, or is a slip
that the step knows by its name.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.steps.table import Built, Places, Row, Rules


@dataclass(frozen=True)
class Case:
    """A step as it is compiled: its mesh, where arrays are constrained to be, and what is wrong."""

    mesh: Mesh
    places: Places
    wrong: tuple[str, ...] = ()
    told: str = ""
    edits: frozenset[str] = frozenset()
    """Names of places that a fault changes."""
    asked: set[str] = field(default_factory=set)
    """Names of places, and slips, that the step has asked for."""

    def place(self, *names: str) -> Any:
        """Return the place of the first of the names that the case has, or None."""
        self.asked.update(names)
        return next((self.places[name] for name in names if name in self.places), None)

    def cut(self, x: Any, *names: str) -> Any:
        """Constrain x as the first of the names that the case has; None leaves it to XLA."""
        spec = self.place(*names)
        if spec is None:
            return x
        # Inside of shard_map, and with Explicit axes, the mesh is that of the context.
        is_in_context = not jax.sharding.get_abstract_mesh().empty
        place = spec if is_in_context else NamedSharding(self.mesh, spec)
        return jax.lax.with_sharding_constraint(x, place)

    def cut_all(self, tree: Any, name: str, dimensions: int = 0) -> Any:
        """Constrain the leaves of a tree that have so many dimensions."""
        self.asked.add(name)
        return jax.tree.map(lambda x: self.cut(x, name) if x.ndim >= dimensions else x, tree)

    def has(self, slip: str) -> bool:
        """Return whether this is wrong."""
        self.asked.add(slip)
        return slip in self.wrong

    def recomputed(self, function: Any, **options: Any) -> Any:
        """Return a function whose values are computed again in the backward pass."""
        if self.has("remat that saves everything"):
            options["policy"] = jax.checkpoint_policies.everything_saveable
        return function if self.has("no remat") else jax.checkpoint(function, **options)

    def keep(self, x: Any, name: str) -> Any:
        """Return x if it is to be told, else None."""
        self.asked.add(name)
        return x if self.told == name else None

    def built(self, compiled: Any, inputs: tuple[Any, ...], outputs: Any) -> Built:
        """Return the step; a fault that it knows nothing of would pass for a clean one."""
        unknown = {*self.edits, *self.wrong, self.told} - self.asked - {""}
        assert not unknown, f"the step does not know {unknown}"
        return Built(compiled, inputs, outputs)


@dataclass(frozen=True)
class Model:
    """A model that is trained."""

    loss: Callable[..., tuple[Any, Mapping[str, Any]]]
    """loss(case, params, batch, *constants), with what may be told beside it."""
    shapes: Callable[[Case], Any] | None = None
    """Makes the parameters, where the row does not have them."""
    rules: Callable[[Rules, Rules], Rules] = lambda own, edits: [*edits, *own]
    """Makes those for `plan` of the table's and of a fault's."""
    optimizer: Callable[[Case, sr.Plan], optax.GradientTransformation] = lambda case, plan: optax.adamw(1e-3)
    gradients: Callable[..., Any] = lambda case, plan, value_and_grad, *args: value_and_grad(*args)
    constants: Callable[[Case, Rules], tuple[sr.Plan, ...]] = lambda case, rules: ()
    """Plans of arguments that are not trained."""
    is_averaged: bool = False
    """Whether an average of the parameters is in the state."""
    is_explicit: bool = False
    """Whether the axes of the mesh are Explicit."""
    in_context: bool = False
    """Whether the mesh is set around jit."""

    def __call__(self, row: Row, *, rules: Rules = (), **fault: Any) -> Built:
        """Compile the step; without a fault it is right."""
        case = case_of(row, **fault, is_explicit=self.is_explicit)
        shapes, told = self.shapes(case) if self.shapes else row.shapes, case.told
        plan = sr.plan(shapes, self.rules(row.rules, rules), case.mesh)
        tx = self.optimizer(case, plan)
        if self.is_averaged:
            tx = optax.chain(tx, _averages(case))

        def loss(params: Any, *rest: Any) -> Any:
            *constants, batch = rest
            value, kept = self.loss(case, params, batch, *constants)
            case.asked.update(kept)
            return value, kept.get(told)

        differentiate = jax.value_and_grad(loss, has_aux=True)

        def step(params: Any, state: Any, *rest: Any) -> Any:
            (value, kept), grads = self.gradients(case, plan, differentiate, params, *rest)
            grads = _clipped(case, case.cut_all(grads, "gradients"))
            updates, state = tx.update(grads, state, params)
            moments = case.cut_all(state[0] if self.is_averaged else state, "moments")
            state = (moments, state[1]) if self.is_averaged else moments
            params = optax.apply_updates(params, updates)
            case.asked.update(("evaluation", "average", "norms", "norm", "distance"))
            if told == "evaluation":
                kept = loss(state[1] if self.is_averaged else params, *rest)[0]
            elif told == "average":
                kept = case.cut_all(jax.tree.map(lambda p: 0.99 * p, params), "average")
            elif told == "norms":
                kept = jax.tree.map(jnp.linalg.norm, (grads, params, updates))
            elif told == "norm":
                kept = optax.global_norm(grads)
            elif told == "distance":
                kept = optax.global_norm(jax.tree.map(jnp.subtract, params, state[1]))
            return params, _cast(case, state), (value, kept)

        batch = {name: _input(case, *_array(of)) for name, of in row.batch.items()}
        is_in_context = self.in_context or self.is_explicit
        with jax.set_mesh(case.mesh) if is_in_context else contextlib.nullcontext():
            state, constants = jax.eval_shape(tx.init, shapes), self.constants(case, rules)
            plans = plan, constants
            return _training_step(case, step, plans, shapes, state, batch, self.is_averaged)


def case_of(
    row: Row,
    *,
    wrong: str | Iterable[str] = (),
    told: str = "",
    mesh: Mapping[str, int] | None = None,
    is_explicit: bool = False,
    **places: P | None,
) -> Case:
    """Return a case on a mesh of the first devices; places are what a fault changes of those of the row."""
    axes = mesh or row.mesh
    sizes, kind = tuple(axes.values()), AxisType.Explicit if is_explicit else AxisType.Auto
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    on = Mesh(devices, tuple(axes), axis_types=(kind,) * len(sizes))
    slips = (wrong,) if isinstance(wrong, str) else tuple(wrong)
    return Case(on, {**row.places, **places}, slips, told, frozenset(places))


def arrays(tree: Any, dtype: Any = "float32") -> Any:
    """Return abstract arrays, for shapes."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype), tree, is_leaf=lambda node: isinstance(node, tuple)
    )


def stacked(layers: int, shapes: Mapping[str, tuple[int, ...]], dtype: Any = "float32") -> Any:
    """Return abstract arrays of all layers, for shapes of one."""
    return arrays({name: (layers, *shape) for name, shape in shapes.items()}, dtype)


def abstract(mesh: Mesh, spec: P, shape: Sequence[int], dtype: Any = "int32") -> Any:
    """Return an abstract array with a sharding."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))


def _array(of: Any) -> tuple[Any, Any]:
    dtype, shape = of if isinstance(of[0], str) else ("int32", of)
    return shape, jax.eval_shape(lambda: jax.random.key(0)).dtype if dtype == "key" else dtype


def _input(case: Case, shape: tuple[int, ...], dtype: Any) -> Any:
    return abstract(case.mesh, (case.place("batch") or P()) if shape else P(), shape, dtype)


def _averages(case: Case) -> optax.GradientTransformation:
    """Return what has an average of the parameters for its state."""

    def update(updates: Any, kept: Any, params: Any = None) -> Any:
        new, old = optax.apply_updates(params, updates), case.cut_all(kept, "old_averages")
        mixed = jax.tree.map(lambda a, b: 0.999 * a + 0.001 * b, old, new)
        return updates, case.cut_all(mixed, "averages")

    return optax.GradientTransformation(lambda params: params, update)


def _cast(case: Case, state: Any) -> Any:
    if not case.has("averages come out in another dtype"):
        return state
    return state[0], jax.tree.map(lambda x: x.astype("bfloat16"), state[1])


def _clipped(case: Case, grads: Any) -> Any:
    if case.has("gradients are clipped as one vector"):
        flat, unravel = ravel_pytree(grads)
        return unravel(flat / jnp.maximum(1, jnp.linalg.norm(flat)))
    if case.has("gradients are clipped by their norm"):
        return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]
    return grads


def _training_step(
    case: Case,
    step: Callable[..., Any],
    plans: tuple[sr.Plan, tuple[sr.Plan, ...]],
    shapes: Any,
    state: Any,
    batch: Any,
    is_averaged: bool,
) -> Built:
    """Compile step(params, state, *constants, batch) -> (params, state, metrics)."""
    plan, constants = plans
    moments = plan.for_optimizer(state)
    shardings = (plan.shardings(), moments.shardings(), None)
    jitted = jax.jit(
        step,
        donate_argnums=() if case.has("not donated") else (0, 1),
        out_shardings=None if case.has("no out_shardings") else shardings,
    )
    given, whole = _like(state, moments), _whole(case.mesh, state)
    if case.has("averages come in whole"):
        given = given[0], whole[1]
    if case.has("moments come in whole"):
        given = (whole[0], given[1]) if is_averaged else whole
    arguments = (_like(shapes, plan), given, *(plan.abstract() for plan in constants), batch)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, batch)
    inputs = (plan, moments, *constants, specs)
    return case.built(jitted.lower(*arguments).compile(), inputs, (plan, moments, None))


def serving_step(
    case: Case, step: Callable[..., Any], weights: sr.Plan, cache: sr.Plan, batch: Any, results: int
) -> Built:
    """Compile step(weights, cache, batch) -> (cache, and other results)."""
    rest = (None,) * results
    jitted = jax.jit(
        step,
        donate_argnums=() if case.has("the cache is not donated") else 1,
        out_shardings=None if case.has("no out_shardings") else (cache.shardings(), *rest),
    )
    compiled = jitted.lower(weights.abstract(), cache.abstract(), batch).compile()
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, batch)
    return case.built(compiled, (weights, cache, specs), (cache, *rest))


def _like(tree: Any, plan: sr.Plan) -> Any:
    """Return what is planned in a tree: of a named array the plan has a leaf without names."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(plan.abstract()))


def _whole(mesh: Mesh, tree: Any) -> Any:
    """Return abstract arrays that are replicated."""
    return jax.tree.map(lambda leaf: abstract(mesh, P(), leaf.shape, leaf.dtype), tree)
