"""`infer_sharding` of big_vision's `sharding`, as of 2026, with its tactics; without big_vision.

It has the dialect `sr.dialects.BIG_VISION`. `rules` makes rules of a strategy, for plans, locks and
files.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from shardrules._base.dtypes import given_bits
from shardrules._base.rule_specs import fsdp as fsdp_spec
from shardrules._base.rule_specs import largest_dim
from shardrules._base.specs import entry_axes, partition_spec
from shardrules._base.text import shown
from shardrules._place.mesh import resolve_mesh
from shardrules._rules.dialects import BIG_VISION
from shardrules._rules.rules import Rules, remembered_rules

__all__ = ["fsdp", "infer_sharding", "replicate", "rules", "shard_dim"]

Tactic = Callable[..., tuple[Any, ...]]
"""tactic(current spec, mesh, name, array): the entries of the new spec."""
_MIB: Final = 2**20


def infer_sharding(params: Any, strategy: Iterable[tuple[str, str]], mesh: Any) -> Any:
    """Replace each leaf of a tree by the NamedSharding that the strategy gives it.

    Semantics of big_vision.sharding.infer_sharding. The first pattern that matches a leaf's whole
    path counts; a leaf that none matches is replicated.

    Args:
        params: Any pytree of arrays or abstract arrays. Fields of named tuples have their names in
            paths, where big_vision counts them.
        strategy: (regex, tactics) pairs. Tactics are calls such as `fsdp(axis="data")`, joined by
            "|", each of which adds to the spec: `replicate`, `fsdp`, `shard_dim`.
        mesh: A Mesh, an AbstractMesh, or a dict of axis sizes.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: A tactic does not exist, or cannot be applied to a leaf; the message has the
            leaf's path.

    Example:
        >>> import jax
        >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32")}
        >>> strategy = [(".*/bias", "replicate"), (".*", 'fsdp(axis="data")')]
        >>> tuple(infer_sharding(params, strategy, {"data": 8})["kernel"].spec)
        (None, 'data')
    """
    import jax

    on_mesh = resolve_mesh(mesh)
    parsed = [(pattern, _parsed_tactic(tactics)) for pattern, tactics in strategy]
    numbers = [(pattern, number) for number, (pattern, _) in enumerate(parsed)]
    specs = remembered_rules(numbers, BIG_VISION).match(params)
    memo: dict[Any, Any] = {}

    def sharding(path: Any, leaf: Any, rule: Any) -> Any:
        key = rule, getattr(leaf, "shape", ()), getattr(leaf, "dtype", None)
        if key not in memo:
            entries: tuple[Any, ...] = (None,) * len(key[1])
            for tactic in parsed[rule][1] if isinstance(rule, int) else ():
                entries = tactic(entries, on_mesh, jax.tree_util.keystr(path), leaf)
            memo[key] = jax.sharding.NamedSharding(on_mesh, partition_spec(*entries))
        return memo[key]

    return jax.tree_util.tree_map_with_path(sharding, params, specs)


def rules(strategy: Iterable[tuple[str, str]]) -> Rules:
    """Return the strategy as rules, for `shardrules.plan`, `named_shardings` and others.

    Args:
        strategy: As in `infer_sharding`. Of the tactics of one pattern, `fsdp` comes last, and
            `shard_dim` counts dimensions from the front.

    Raises:
        ValueError: A tactic does not exist, or has no form as a rule's spec.

    Example:
        >>> [str(spec) for _, spec in rules([("wo", 'shard_dim("model", 0)|fsdp("data")')])]
        ["fsdp('data', min_bytes=4194305, within=P('model'))"]
    """
    pairs = [(pattern, _tactic_spec(tactics)) for pattern, tactics in strategy]
    return remembered_rules(pairs, BIG_VISION)


@dataclass(frozen=True)
class _Replicate:
    """See `replicate`."""

    def __call__(self, spec: tuple[Any, ...], mesh: Any, name: str, x: Any) -> tuple[Any, ...]:
        if any(entry is not None for entry in spec):
            raise ValueError(f"{name}: replicate comes after tactics that shard it as {spec}")
        return spec


@dataclass(frozen=True)
class _Fsdp:
    """See `fsdp`."""

    axis: str | tuple[str, ...]
    min_bytes: int

    def __call__(self, spec: tuple[Any, ...], mesh: Any, name: str, x: Any) -> tuple[Any, ...]:
        absent = [axis for axis in entry_axes(self.axis) if axis not in mesh.shape]
        if absent:
            raise ValueError(f"{name}: the mesh {dict(mesh.shape)} has no axis {absent[0]!r}")
        item_bytes = -(-given_bits("dtype", x.dtype) // 8)
        free = [dim for dim, entry in enumerate(spec) if entry is None]
        if prod(x.shape) * item_bytes < self.min_bytes or not free:
            return spec
        parts = prod(mesh.shape[axis] for axis in entry_axes(self.axis))
        dim, is_divided = largest_dim(free, tuple(x.shape), parts)
        return (*spec[:dim], self.axis, *spec[dim + 1 :]) if is_divided else spec


@dataclass(frozen=True)
class _ShardDim:
    """See `shard_dim`."""

    axis: Any
    dim: int
    ignore_ndim_error: bool

    def __call__(self, spec: tuple[Any, ...], mesh: Any, name: str, x: Any) -> tuple[Any, ...]:
        if abs(self.dim) >= len(spec):
            message = f"{name}: shard_dim({self.axis!r}, {self.dim}) for {len(spec)} dimensions"
            if not self.ignore_ndim_error:
                raise ValueError(f"{message}; ignore_ndim_error=True leaves such an array alone")
            warnings.warn(message, stacklevel=2)
            return spec
        dim = self.dim % len(spec)
        if spec[dim] is not None:
            raise ValueError(f"{name}: shard_dim({self.axis!r}, {self.dim}) after {spec}")
        return (*spec[:dim], self.axis, *spec[dim + 1 :])


def replicate() -> Tactic:
    """Return the tactic that replicates an array, and refuses one that others have sharded.

    Example:
        >>> replicate()((None, None), {}, "w", None)
        (None, None)
    """
    return _Replicate()


def fsdp(axis: str | Sequence[str], min_size_to_shard_mb: float = 4) -> Tactic:
    """Return the tactic that shards the largest dimension that is free and divisible.

    Args:
        axis: The mesh axis, or several for one dimension.
        min_size_to_shard_mb: Arrays of at most so many MiB stay as they are. Default: 4.

    Example:
        >>> import jax
        >>> from types import SimpleNamespace
        >>> x, mesh = jax.ShapeDtypeStruct((64, 32), "float32"), SimpleNamespace(shape={"data": 8})
        >>> fsdp("data", min_size_to_shard_mb=0)((None, None), mesh, "w", x)
        ('data', None)
    """
    return _Fsdp(
        axis if isinstance(axis, str) else tuple(axis), int(min_size_to_shard_mb * _MIB) + 1
    )


def shard_dim(axis: Any, dim: int, ignore_ndim_error: bool = False) -> Tactic:
    """Return the tactic that shards one dimension.

    Args:
        axis: The mesh axis, or a tuple of several.
        dim: The dimension, from the front or, if negative, from the end. As in big_vision, the
            first one cannot be given from the end.
        ignore_ndim_error: Whether arrays without that dimension stay as they are, with a warning.

    Example:
        >>> shard_dim("model", -1)((None, None), {}, "w", None)
        (None, 'model')
    """
    return _ShardDim(tuple(axis) if isinstance(axis, list) else axis, dim, ignore_ndim_error)


_TACTICS: Final[dict[str, Callable[..., Tactic]]] = {
    "replicate": replicate,
    "fsdp": fsdp,
    "shard_dim": shard_dim,
}


def _parsed_tactic(tactics: str) -> tuple[Any, ...]:
    return tuple(_tactic(text) for text in tactics.split("|"))


def _tactic(text: str) -> Any:
    """Return the tactic that a call such as `fsdp(axis="data")` makes; arguments are literals."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        name = call.func if isinstance(call, ast.Call) else call
        make = _TACTICS[name.id if isinstance(name, ast.Name) else ""]
        if not isinstance(call, ast.Call):
            return make()
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return make(*map(ast.literal_eval, call.args), **named)
    except (KeyError, SyntaxError, TypeError, ValueError) as error:
        raise ValueError(
            f"the tactic {shown(text)} is none of replicate, fsdp(axis, min_size_to_shard_mb=4) "
            "and shard_dim(axis, dim), or its arguments are wrong; for arrays with logical axis "
            "names take shardrules.LogicalRules"
        ) from error


def _tactic_spec(tactics: str) -> Any:
    """Return the tactics of one pattern as a rule's spec."""
    entries: list[Any] = []
    parsed = _parsed_tactic(tactics)
    for tactic in parsed:
        if isinstance(tactic, _Fsdp) and tactic is parsed[-1]:
            return fsdp_spec(tactic.axis, min_bytes=tactic.min_bytes, within=tuple(entries))
        if isinstance(tactic, _ShardDim) and tactic.dim >= 0 and not tactic.ignore_ndim_error:
            entries += [None] * (tactic.dim + 1 - len(entries))
            if entries[tactic.dim] is None:
                entries[tactic.dim] = tactic.axis
                continue
        if not isinstance(tactic, _Replicate) or entries:
            raise ValueError(
                f"the tactics {tactics!r} have no form as a spec: there, fsdp comes last, each "
                "dimension is sharded once and counted from the front, and ignore_ndim_error is "
                "not known; infer_sharding may take them"
            )
    return tuple(entries)
