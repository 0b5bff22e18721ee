"""`fsdp_sharding` of openpi's `training.sharding`, as of 2026, without openpi.

It is one rule, `shardrules.fsdp` on the axis "fsdp", which plans, locks and rule files take too.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from shardrules._arguments import boolean, integer
from shardrules._mesh.mesh import resolve_mesh
from shardrules._place.decider import RulesLike
from shardrules._place.named_shardings import named_shardings
from shardrules._rules.dialects import EFORMER
from shardrules._rules.rules import Rules, remembered_rules
from shardrules._specs import fsdp

__all__ = ["FSDP_AXIS", "fsdp_sharding", "rules"]

FSDP_AXIS: Final = "fsdp"
"""The mesh axis that cuts arrays."""
_REPLICATED: Final = [("", ())]


def fsdp_sharding(pytree: Any, mesh: Any, *, min_size_mbytes: int = 4, log: bool = False) -> Any:
    """Replace each leaf of a tree by its NamedSharding for fully sharded data parallelism.

    Semantics of openpi.training.sharding.fsdp_sharding. Of an array of two or more dimensions, the
    largest one that the axis "fsdp" divides is sharded; of equal ones, the last.

    Args:
        pytree: Any pytree of arrays or abstract arrays. Leaves without a shape are replicated.
        mesh: A Mesh, an AbstractMesh, or a dict of axis sizes, with the axis "fsdp". If that has
            one device, everything is replicated.
        min_size_mbytes: Arrays of fewer MiB are replicated. Default: 4.
        log: Whether the plan is logged, as a table.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: The mesh has no such axis.

    Example:
        >>> import jax
        >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32")}
        >>> tuple(fsdp_sharding(params, {"batch": 2, "fsdp": 8})["kernel"].spec)
        (None, 'fsdp')
    """
    on_mesh = resolve_mesh(mesh)
    if FSDP_AXIS not in on_mesh.shape:
        raise ValueError(f"mesh: its axes are {on_mesh.axis_names}; one must be {FSDP_AXIS!r}")
    is_cut = on_mesh.shape[FSDP_AXIS] > 1
    chosen: RulesLike = rules(min_size_mbytes=min_size_mbytes) if is_cut else _REPLICATED
    if boolean("log", log):
        from shardrules._plan.plan import plan

        logging.getLogger(__name__).info("%s", plan(pytree, chosen, on_mesh))
    return named_shardings(pytree, chosen, on_mesh)


def rules(*, min_size_mbytes: int = 4) -> Rules:
    """Return the rule of `fsdp_sharding`, for `shardrules.plan`, `named_shardings` and others.

    Example:
        >>> rules()[0]
        ('', fsdp('fsdp', min_bytes=4194304, min_rank=2))
    """
    least = integer("min_size_mbytes", min_size_mbytes) * 2**20
    return remembered_rules([("", fsdp(FSDP_AXIS, min_bytes=least, min_rank=2))], EFORMER)
