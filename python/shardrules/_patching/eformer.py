"""The functions that `patch` puts into eformer: they behave exactly as eformer's, faults included.

They refuse an input for which this is not certain, which leaves it to eformer. Costs a look at each
rule. Must not know how functions are replaced.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._logical.flax import loaded
from shardrules._matching.environment import logs_moves
from shardrules._sharding.shardings import corrected_sharding
from shardrules.compat import eformer as ours

__all__ = [
    "LeftToEformerError",
    "create_pattern_based_partition_spec",
    "get_corrected_named_sharding",
    "make_shard_and_gather_fns",
    "match_partition_rules",
]


class LeftToEformerError(Exception):
    """Our function would treat this input differently from eformer's."""


def match_partition_rules(
    rules: Any, tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """Eformer's function. It handles rules whose specs are not PartitionSpecs itself."""
    _leave_if_logging()
    if not isinstance(rules, (list, tuple)) or not all(map(_is_plain, rules)):
        raise LeftToEformerError
    least = _eformers("MIN_SHARDING_SIZE") if min_size is None else min_size
    return ours.match_partition_rules(rules, tree, least, strict)


def get_corrected_named_sharding(
    shape: tuple[int, ...], partition_spec: Any, raise_mesh_error: bool = True
) -> NamedSharding:
    """Eformer's function, on the mesh that eformer uses: that of `with mesh:`."""
    mesh = _eformers("get_incontext_mesh")(raise_mesh_error)
    if mesh.empty or _eformers("LOG_SHARDING_MOVE"):
        return _warning_the_caller(shape, partition_spec, raise_mesh_error)
    if len(partition_spec) == 0:
        return NamedSharding(mesh, PartitionSpec())
    return corrected_sharding(partition_spec, tuple(shape), mesh, ours._CORRECTION)


def make_shard_and_gather_fns(partition_specs: Any, mesh: Any = None) -> tuple[Any, Any]:
    """Eformer's function, without compiling. It handles several processes itself."""
    _leave_if_logging()
    if jax.process_count() > 1:
        raise LeftToEformerError
    on_mesh = _eformers("get_incontext_mesh")() if mesh is None else mesh
    _, gather_fn = ours.make_shard_and_gather_fns(PartitionSpec(), on_mesh)
    original = _original("make_shard_and_gather_fns")

    def shard_fn(spec: Any) -> Callable[..., Any]:
        sharding = NamedSharding(on_mesh, spec)
        # Unlike in our own, numpy arrays and arrays with PartitionSpec() stay in place.
        return _or_eformers(
            lambda tensor: ours.with_sharding_constraint(tensor, sharding),
            lambda: original(spec, on_mesh)[0],
        )

    def gathering(spec: Any) -> Callable[..., Any]:
        return _or_eformers(gather_fn, lambda: original(spec, on_mesh)[1])

    return (
        jax.tree_util.tree_map(shard_fn, partition_specs),
        jax.tree_util.tree_map(gathering, partition_specs),
    )


def create_pattern_based_partition_spec(
    pattern: str, mesh: Any = None, default_spec: Any = None
) -> Callable[..., Any]:
    """Eformer's function. It handles an invalid regex, which no name may ever reach, itself."""
    on_mesh = _eformers("get_incontext_mesh")() if mesh is None else mesh
    original = _original("create_pattern_based_partition_spec")
    return _or_eformers(
        ours.create_pattern_based_partition_spec(pattern, on_mesh, default_spec),
        lambda: original(pattern, on_mesh, default_spec),
    )


def _eformers(name: str) -> Any:
    return loaded("eformer.escale.partition.constraints", name)


def _original(name: str) -> Any:
    return inspect.unwrap(_eformers(name))


def _or_eformers(
    function: Callable[..., Any], make_eformers: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Our function; inputs that it refuses go to the function that eformer would make."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        with suppress(Exception):
            return function(*args, **kwargs)
        return make_eformers()(*args, **kwargs)

    return answer


def _warning_the_caller(*args: Any) -> NamedSharding:
    """Eformer's result, with its warnings at the caller's line instead of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sharding: NamedSharding = _original("get_corrected_named_sharding")(*args)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=4)
    return sharding


def _leave_if_logging() -> None:
    # eformer reads the environment at import, our functions at each call.
    if _eformers("LOG_SHARDING_MOVE") or logs_moves():
        raise LeftToEformerError


def _is_plain(rule: Any) -> bool:
    return isinstance(rule, (list, tuple)) and len(rule) == 2 and isinstance(rule[1], PartitionSpec)
