"""`spec_for`: the spec of one array, without a tree.

Costs what a tree of one leaf costs. Must not know how a spec is made to fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardrules._arguments import check_type, in_order, shape_of, texts
from shardrules._correction import Correction, check_correction
from shardrules._dtypes import given_bits
from shardrules._logical.rules import LogicalRules
from shardrules._matching.rules import Rules, matcher_of, specs_by_rules
from shardrules._sharding.leaf_shardings import named_shardings
from shardrules._sharding.mesh import context_mesh, resolve_mesh
from shardrules._sharding.rules_like import RulesLike, as_decider
from shardrules._sharding.shardings import shardings_by_rules

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._sharding.mesh import MeshLike

__all__ = ["spec_for"]


@in_order("path", "shape", "rules", "mesh")
def spec_for(
    path: str,
    shape: Sequence[int],
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    dtype: Any = None,
    optional_axes: Iterable[str] = (),
) -> PartitionSpec:
    """The PartitionSpec of one array.

    It is the spec of `named_shardings`. Without a mesh, neither given nor in the context, it is the
    spec of `match_partition_rules`.

    Args:
        path: The array's path.
        shape: The array's shape.
        rules: As in `named_shardings`; specs and shardings are the array's own. `LogicalRules` are
            for `logical_to_mesh`.
        mesh: As in `named_shardings`.
        min_size: As in `match_partition_rules`.
        correction: As in `named_shardings`.
        dtype: The array's dtype, or its name; only specs that go by bytes need it, as `fsdp`.
        optional_axes: As in `named_shardings`.

    Raises:
        ValueError, TypeError: As `named_shardings`.

    Example:
        >>> mesh = {"fsdp": 8, "tp": 4}
        >>> tuple(spec_for("layers/0/wk", (512, 30), [("wk", ("fsdp", "tp"))], mesh))
        ('fsdp', None)
    """
    check_correction(correction)
    if dtype is not None:
        given_bits("dtype", dtype)
    policy: Any = {
        "correction": correction,
        "optional_axes": frozenset(texts("optional_axes", optional_axes)),
    }
    array = SimpleNamespace(shape=shape_of("shape", shape), dtype=dtype)
    decider = as_decider("rules", rules)
    if isinstance(decider, LogicalRules):
        raise TypeError(
            "rules: LogicalRules decide by the names of dimensions, which one path does not have; "
            "give shardrules.logical_to_mesh(names, rules)"
        )
    if not isinstance(decider, Rules):
        check_type("path", path, str, "a string")
        if decider is not None and dtype is None:
            array.dtype = "uint8"  # a plan decides by path and shape, whatever the dtype
        found = named_shardings({path: array}, rules, mesh, min_size=min_size, **policy)
        return found[path].spec  # type: ignore[no-any-return]
    matcher = matcher_of(decider).for_whole_paths()
    key = matcher.joined(path)
    tree = {key: array}
    if mesh is None and context_mesh() is None:
        return specs_by_rules(matcher, tree, min_size)[key]  # type: ignore[no-any-return]
    on_mesh = resolve_mesh(mesh)
    shardings = shardings_by_rules(tree, matcher, on_mesh, min_size=min_size, **policy)
    return shardings[key].spec  # type: ignore[no-any-return]
