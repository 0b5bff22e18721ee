"""Reads equations of jaxprs: what runs inside of them, by names that JAX has had."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any, Final

from shardrules._base.specs import entries_of, entry_axes

# What holds one jaxpr that runs once, and the names of the parameter that has it.
_CALLS: Final = frozenset((
    "jit", "pjit", "closed_call", "core_closed_call", "core_call", "checkpoint", "remat",
    "remat2", "run_state", "eval_jaxpr", "composite", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_vmap_call", "remat_opt", "linear_call",
))  # fmt: skip
_INNER: Final = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee")
CONSTRAINTS: Final = frozenset({"sharding_constraint", "reshard"})
BODIES: Final = {"scan": "jaxpr", "while": "body_jaxpr"}
"""The parameter that has the jaxpr of a loop."""


def open_jaxpr(closed: Any) -> Any:
    """Return a jaxpr without its constants."""
    return getattr(closed, "jaxpr", closed)


def inner_jaxpr(eqn: Any) -> Any:
    """Return the jaxpr that an equation runs once; None if it is no such call."""
    if eqn.primitive.name not in _CALLS:
        return None
    return next((eqn.params[name] for name in _INNER if name in eqn.params), None)


def only_call(closed: Any) -> Any:
    """Return the equation of the jitted function that a jaxpr consists of; None without one."""
    eqns = closed.jaxpr.eqns
    is_call = len(eqns) == 1 and eqns[0].primitive.name in ("jit", "pjit")
    return eqns[0] if is_call and list(eqns[0].invars) == list(closed.jaxpr.invars) else None


def is_barred(eqn: Any) -> bool:
    """Say whether an equation is what `jax.checkpoint` recomputes, behind a barrier."""
    barred = eqn.params.get("prevent_cse", False)
    is_any = any(barred) if isinstance(barred, tuple) else bool(barred)
    return is_any and bool(eqn.params.get("differentiated", False))


def constrains(eqn: Any) -> bool:
    """Say whether an equation fixes a sharding: a `reshard` onto Auto axes changes a type alone."""
    if eqn.primitive.name == "reshard":
        mesh = getattr(eqn.params.get("dst_sharding"), "mesh", None)
        return any("Auto" not in str(kind) for kind in getattr(mesh, "axis_types", ("",)))
    return bool(eqn.primitive.name == "sharding_constraint")


def bodies_of(eqn: Any) -> list[tuple[str, Any]]:
    """Return (name of the parameter, jaxpr) of what a loop or branch runs."""
    name = eqn.primitive.name
    if name == "cond":
        return [("branches", branch) for branch in eqn.params["branches"]]
    return [(BODIES[name], eqn.params[BODIES[name]])] if name in BODIES else []


def devices_of(eqn: Any) -> int:
    """Return on how many devices code by device runs, each with its part; 1 of other equations."""
    if eqn.primitive.name != "shard_map":
        return 1
    sizes = dict(eqn.params["mesh"].shape)
    return prod(sizes[axis] for axis in eqn.params.get("manual_axes", sizes))


def axes_by_dim(params: Any, side: str) -> Iterable[dict[int, tuple[str, ...]]]:
    """Yield for each array of a shard_map's "in" or "out" its mesh axes by dimension."""
    for spec in params[f"{side}_specs"]:
        axes = map(entry_axes, entries_of(spec))
        yield {dim: names for dim, names in enumerate(axes) if names}


def scan_counts(params: Any) -> tuple[int, int]:
    """Return how many constants and how many carried arrays a scan begins with."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(consts), len(carries)


def inputs_of(tree: Any, function: Any, values: Iterable[Any] | None = None) -> list[Any]:
    """Return the leaves that are inputs, or these values of leaves: of equinox the arrays alone."""
    from jax import Array, ShapeDtypeStruct, tree_util

    leaves = tree_util.tree_leaves(tree)
    is_filtered = type(function).__module__.startswith("equinox.")
    pairs = zip(leaves, leaves if values is None else values, strict=True)
    kinds = Array | ShapeDtypeStruct
    return [value for leaf, value in pairs if not is_filtered or isinstance(leaf, kinds)]
