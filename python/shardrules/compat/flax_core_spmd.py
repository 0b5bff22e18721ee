"""`flax.core.spmd` of flax 0.12: logical axis rules, and arrays sharded by logical axis names.

The same signatures and results, without flax, except that

- both libraries share the rules in force, if flax is loaded;
- rules that are no pairs, or contradict each other, are a ValueError that says which;
- what is no sharding is a TypeError; docs/guides/linen.md has the other differences.

Example:
    >>> rules = [("embed", "fsdp"), ("batch", "dp")]
    >>> tuple(get_pspec(("batch", None, "embed", "heads"), rules))  # a name without a rule stays
    ('dp', None, 'fsdp', 'heads')
    >>> composite_rules(rules, [("mlp", "tp")])
    (('embed', 'fsdp'), ('batch', 'dp'), ('mlp', 'tp'))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardrules._base.specs import is_partition_spec
from shardrules._base.text import mesh_shown, shown
from shardrules._place.boxes import loaded
from shardrules._place.mesh import AnyMesh, axes_of_type, context_mesh
from shardrules._rules.logical_rules import LogicalRulesLike as LogicalRules
from shardrules._rules.logical_rules import (
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from shardrules._rules.resolver import last_wins, logical_names, resolve_core, spec_of_names

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


__all__ = [
    "apply_rules", "composite_rules", "from_sharding_rules", "get_logical_axis_rules",
    "get_mesh", "get_pspec", "logical_axis_rules", "map_sharding", "set_logical_axis_rules",
    "shard_value",
]  # fmt: skip


def get_pspec(sharding: Any, sharding_rules: LogicalRules | None = None) -> Any:
    """Semantics of flax.core.spmd.get_pspec, also for a NamedSharding and a Format."""
    return apply_rules(sharding, sharding_rules)


def apply_rules(sharding: Any, sharding_rules: LogicalRules | None) -> Any:
    """Semantics of flax.core.spmd.apply_rules; the same as `get_pspec`."""
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return _with_spec(lambda names: resolve_core(names, rules), sharding)


def map_sharding(f: Callable[[Any], Any], sharding: Any) -> Any:
    """Semantics of flax.core.spmd.map_sharding."""

    def mapped(names: Any) -> PartitionSpec:
        return spec_of_names(names, [f(entry) for entry in logical_names(names)])

    return _with_spec(mapped, sharding)


def get_mesh(sharding: Any) -> AnyMesh | None:
    """Semantics of flax.core.spmd.get_mesh."""
    if _is_format(sharding):
        return get_mesh(sharding.sharding)
    return sharding.mesh if _is_named_sharding(sharding) else None


def shard_value(
    value: Any, out_sharding: Any, sharding_rules: LogicalRules | None, mesh: AnyMesh | None
) -> Any:
    """Semantics of flax.core.spmd.shard_value; nothing is corrected."""
    if not out_sharding:
        return value
    sharding = apply_rules(out_sharding, sharding_rules)
    on_mesh = context_mesh() if mesh is None else mesh
    own_mesh = get_mesh(sharding)
    if own_mesh is not None:
        if on_mesh is not None and on_mesh != own_mesh:
            raise AssertionError(
                f"out_sharding is on the mesh {mesh_shown(own_mesh.shape)}, but the mesh given or "
                f"in force is {mesh_shown(on_mesh.shape)}"
                + (", with other devices or axis types" if on_mesh.shape == own_mesh.shape else "")
            )
        on_mesh = own_mesh
    if on_mesh is None:
        raise ValueError(
            f"a value with the sharding {shown(out_sharding)} needs a mesh: create it inside `with "
            "jax.set_mesh(mesh):`, or give the mesh with it"
        )
    if is_partition_spec(sharding):
        from jax.sharding import NamedSharding

        sharding = NamedSharding(on_mesh, sharding)
    return _apply_sharding(value, sharding, on_mesh)


def composite_rules(rule1: LogicalRules | None, rule2: LogicalRules | None) -> LogicalRules:
    """Semantics of flax.core.spmd.composite_rules."""
    if not rule1 or not rule2:
        return rule1 or rule2 or ()
    rules = last_wins(rule1)
    for index, rule in enumerate(rule2):
        ((alias, value),) = last_wins([rule]).items()
        if rules.setdefault(alias, value) != value:
            raise ValueError(
                f"contradictory logical axis rules for {alias!r}: {shown(rules[alias])}, and "
                f"{shown(value)} in rule {index} of the second list; leave one of them out"
            )
    return tuple(rules.items())


def from_sharding_rules(sharding: Any, sharding_rules: LogicalRules) -> tuple[Any, ...]:
    """Semantics of flax.core.spmd.from_sharding_rules: these rules only, names by their text."""
    rules = last_wins(sharding_rules)
    return tuple(
        rules[str(name)] if name and str(name) in rules else name
        for name in logical_names(sharding)
    )


def _apply_sharding(value: Any, sharding: Any, mesh: AnyMesh) -> Any:
    """Apply a NamedSharding or Format by JAX's operation for the types of the mesh's axes.

    flax corrects nothing and turns numbers into arrays, unlike `with_sharding_constraint`.
    """
    import jax

    axes = frozenset(mesh.axis_names)
    if _is_format(sharding) or axes_of_type(mesh, "Auto") == axes:
        return jax.lax.with_sharding_constraint(value, sharding)
    if axes_of_type(mesh, "Explicit") == axes:
        return jax.sharding.reshard(value, sharding)
    raise ValueError(
        f"the axes of the mesh {mesh_shown(mesh.shape)} have the types {mesh.axis_types}; a value "
        "can be sharded where they are all Auto or all Explicit "
        "(shardrules.with_sharding_constraint takes mixed ones)"
    )


def _with_spec(replace: Callable[[Any], PartitionSpec], sharding: Any) -> Any:
    """Return the sharding with `replace` called on its spec or names."""
    if sharding is None:
        return None
    if isinstance(sharding, tuple):  # the common case
        return replace(sharding)
    if _is_named_sharding(sharding):
        from jax.sharding import NamedSharding

        return NamedSharding(
            sharding.mesh, replace(sharding.spec), memory_kind=sharding.memory_kind
        )
    if _is_format(sharding):
        return type(sharding)(sharding.layout, _with_spec(replace, sharding.sharding))
    return replace(sharding)


def _is_named_sharding(sharding: Any) -> bool:
    named = loaded("jax.sharding", "NamedSharding")
    return named is not None and isinstance(sharding, named)


def _is_format(sharding: Any) -> bool:
    format_type = loaded("jax.experimental.layout", "Format")
    return format_type is not None and isinstance(sharding, format_type)
