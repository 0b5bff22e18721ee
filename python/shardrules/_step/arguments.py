"""Arguments and results of a step: which leaves are inputs, and the mesh axes that cut them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shardrules._plan.plan import Plan
from shardrules._specs import entries_of, entry_axes

if TYPE_CHECKING:
    from shardrules._step.equations import Equations
    from shardrules._step.spread import Cuts


def cuts_of(arg: Any, function: Any) -> Iterator[Cuts | None]:
    """Yield the mesh axes of each dimension, for each leaf of a function's argument."""
    for leaf in inputs_of(arg.abstract() if isinstance(arg, Plan) else arg, function):
        spec = getattr(getattr(leaf, "sharding", None), "spec", None)
        yield None if spec is None else tuple(map(entry_axes, entries_of(spec)))


def inputs_of(tree: Any, function: Any, values: Iterable[Any] | None = None) -> list[Any]:
    """Return the leaves that are inputs, or these values of leaves: of equinox the arrays alone."""
    from jax import Array, ShapeDtypeStruct, tree_util

    leaves = tree_util.tree_leaves(tree)
    is_filtered = type(function).__module__.startswith("equinox.")
    pairs = zip(leaves, leaves if values is None else values, strict=True)
    kinds = Array | ShapeDtypeStruct
    return [value for leaf, value in pairs if not is_filtered or isinstance(leaf, kinds)]


def only_call(closed: Any) -> Any:
    """Return the equation of the jitted function that a jaxpr consists of; None without one."""
    eqns = closed.jaxpr.eqns
    is_call = len(eqns) == 1 and eqns[0].primitive.name in ("jit", "pjit")
    return eqns[0] if is_call and list(eqns[0].invars) == list(closed.jaxpr.invars) else None


def result_cuts(call: Any, equations: Equations) -> list[Cuts | None]:
    """Return the cuts of results by `out_shardings`; None where nothing says."""
    outputs = equations.body.outputs
    shardings = () if call is None else call.params.get("out_shardings", ())
    if len(shardings) != len(outputs):
        return [None] * len(outputs)
    specs = (getattr(sharding, "spec", None) for sharding in shardings)
    return [None if spec is None else tuple(map(entry_axes, entries_of(spec))) for spec in specs]
