"""What `patch` puts into eformer: ours, kept to what eformer 0.0.101 does, its faults included.

An input for which that cannot be promised is refused, which leaves it to eformer. Costs a look at
each rule. Must not know how functions are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._logical.flax import loaded
from shardrules._matching.rules import logs_moves
from shardrules._matching.rules import match_partition_rules as _match_partition_rules
from shardrules._sharding.placement import gather
from shardrules._sharding.shardings import corrected_sharding
from shardrules.compat import eformer as ours

__all__ = [
    "LeftToEformerError",
    "create_pattern_based_partition_spec",
    "get_corrected_named_sharding",
    "make_shard_and_gather_fns",
    "match_partition_rules",
]

create_pattern_based_partition_spec = ours.create_pattern_based_partition_spec


class LeftToEformerError(Exception):
    """Ours would do this otherwise than eformer."""


def match_partition_rules(
    rules: Any, tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """eformer's; rules whose specs are no PartitionSpecs are left to it."""
    _leave_if_logging()
    if not isinstance(rules, (list, tuple)) or not all(map(_is_plain, rules)):
        raise LeftToEformerError
    least = _eformers("MIN_SHARDING_SIZE") if min_size is None else min_size
    return _match_partition_rules(rules, tree, least, strict)


def get_corrected_named_sharding(
    shape: tuple[int, ...], partition_spec: Any, raise_mesh_error: bool = True
) -> NamedSharding:
    """eformer's, on the mesh that eformer sees: that of `with mesh:`; without one left to it."""
    _leave_if_logging()
    mesh = _eformers("get_incontext_mesh")()
    if len(partition_spec) == 0:
        return NamedSharding(mesh, PartitionSpec())
    return corrected_sharding(partition_spec, tuple(shape), mesh, ours._CORRECTION)


def make_shard_and_gather_fns(partition_specs: Any, mesh: Any = None) -> tuple[Any, Any]:
    """eformer's, without a program to compile for each leaf; left to it in several processes."""
    _leave_if_logging()
    if jax.process_count() > 1:
        raise LeftToEformerError
    on_mesh = _eformers("get_incontext_mesh")() if mesh is None else mesh

    def shard_fn(spec: Any) -> Callable[[Any], Any]:
        sharding = NamedSharding(on_mesh, spec)
        # Unlike our own, numpy arrays, and arrays with PartitionSpec(), stay where they are.
        return lambda tensor: ours.with_sharding_constraint(tensor, sharding)

    return (
        jax.tree_util.tree_map(shard_fn, partition_specs),
        jax.tree_util.tree_map(lambda _: _gather, partition_specs),
    )


def _gather(tensor: Any) -> Any:
    return gather(jax.numpy.asarray(tensor))


def _eformers(name: str) -> Any:
    return loaded("eformer.escale.partition.constraints", name)


def _leave_if_logging() -> None:
    # eformer reads the environment when it is imported, ours at each call.
    if _eformers("LOG_SHARDING_MOVE") or logs_moves():
        raise LeftToEformerError


def _is_plain(rule: Any) -> bool:
    return isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)
