"""Reads equations of jaxprs by names that JAX has had: what runs inside, which indices count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
Cuts = tuple[tuple[str, ...], ...]
"""The mesh axes that cut each dimension of an array."""
CONSTRAINTS: Final = frozenset({"sharding_constraint", "reshard"})
# What changes no element of an index.
_UNCHANGED: Final = frozenset({"convert_element_type", "copy"})
BODIES: Final = {"scan": "jaxpr", "while": "body_jaxpr"}
"""The parameter that has the jaxpr of a loop."""


def open_jaxpr(closed: Any) -> Any:
    """Return a jaxpr without its constants."""
    return getattr(closed, "jaxpr", closed)


def without_dead(closed: Any) -> Any:
    """Leave out the equations whose results nothing reads, as XLA does; all inputs stay."""
    from jax.interpreters.partial_eval import dce_jaxpr

    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return closed.replace(jaxpr=jaxpr)


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


def cuts_of_specs(params: Any, side: str) -> Iterable[Cuts]:
    """Yield the cuts of each array of a shard_map's "in" or "out"."""
    return (tuple(map(entry_axes, entries_of(spec))) for spec in params[f"{side}_specs"])


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


class Counted:
    """Arrays of a step whose elements are their own places along a dimension, as an iota's are.

    `x[jnp.arange(n)[:, None], i]` leaves rows in place.
    """

    def __init__(self) -> None:
        self._along: dict[int | None, int] = {}
        """By array, the dimension along which it counts from 0."""
        self._sums: dict[int | None, int | None] = {}
        """By array that is another one plus a number, the other one."""
        self._columns: dict[int | None, dict[int, int]] = {}

    def columns(self, indices: int | None) -> dict[int, int]:
        """Return {column of an array of indices: the dimension along which it counts}."""
        if indices in self._along:
            return {0: self._along[indices]}
        return self._columns.get(indices, {})

    def see(self, eqn: Any, read: Sequence[int | None], output: int) -> None:
        """Note whether the result of an equation counts."""
        name, along = eqn.primitive.name, [self._along.get(number) for number in read]
        dim = along[0] if along else None
        if name == "iota":
            self._along[output] = eqn.params["dimension"]
        elif name == "concatenate":
            self._columns[output] = _columns_of(eqn, along)
        elif name == "add" and along.count(None) == 1:
            self._sums[output] = next(n for n in read if n in self._along)
        elif name == "select_n" and len(read) == 3:
            # Below 0 an index has the size added to it: none of these is.
            if along[1] is not None and self._sums.get(read[2]) == read[1]:
                self._along[output] = along[1]
        elif dim is not None and name == "broadcast_in_dim":
            self._along[output] = eqn.params["broadcast_dimensions"][dim]
        elif dim is not None and (name in _UNCHANGED or (name == "reshape" and _is_kept(eqn, dim))):
            self._along[output] = dim


def _columns_of(eqn: Any, along: Sequence[int | None]) -> dict[int, int]:
    """Return the columns that count of arrays that are put side by side in the last dimension."""
    columns: dict[int, int] = {}
    if eqn.params["dimension"] == len(eqn.outvars[0].aval.shape) - 1:
        place = 0
        for dim, atom in zip(along, eqn.invars, strict=True):
            if dim is not None and atom.aval.shape[-1] == 1:
                columns[place] = dim
            place += atom.aval.shape[-1]
    return columns


def _is_kept(eqn: Any, dim: int) -> bool:
    """Say whether a reshape leaves the dimensions up to one as they are."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return bool(before[: dim + 1] == after[: dim + 1])
