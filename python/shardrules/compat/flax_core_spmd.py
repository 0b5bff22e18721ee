"""`flax.core.spmd` of flax 0.12: logical axis rules, and arrays sharded by logical axis names.

The same signatures and results, without flax. If flax is loaded, both share the rules in force. The
differences are in docs/guides/linen.md.
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
from shardrules._rules.names import last_wins, logical_names, spec_of_names
from shardrules._rules.resolver import resolve_core

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


__all__ = [
    "apply_rules",
    "composite_rules",
    "from_sharding_rules",
    "get_logical_axis_rules",
    "get_mesh",
    "get_pspec",
    "logical_axis_rules",
    "map_sharding",
    "set_logical_axis_rules",
    "shard_value",
]


def get_pspec(sharding: Any, sharding_rules: LogicalRules | None = None) -> Any:
    """Replace the logical axis names in a sharding by mesh axes.

    The rules are those in force (`logical_axis_rules`) and `sharding_rules`. The last rule for a
    name wins. A name without a rule stays. Semantics of flax.core.spmd.get_pspec, 0.12.

    Args:
        sharding: A tuple or list of names, a PartitionSpec, a NamedSharding or a Format.
        sharding_rules: (logical name, mesh axes) pairs.

    Returns:
        A PartitionSpec; or, for a NamedSharding or Format, one with the same mesh, memory kind and
        layout.

    Raises:
        ValueError: The two lists of rules disagree, or a rule is not a pair.
        TypeError: `sharding` is something else.

    Example:
        >>> rules = [("embed", "fsdp"), ("batch", "dp")]
        >>> tuple(get_pspec(("batch", None, "embed", "heads"), rules))
        ('dp', None, 'fsdp', 'heads')
    """
    return apply_rules(sharding, sharding_rules)


def apply_rules(sharding: Any, sharding_rules: LogicalRules | None) -> Any:
    """Return the same as `get_pspec`. Semantics of flax.core.spmd.apply_rules, 0.12.

    Example:
        >>> tuple(apply_rules(("embed",), [("embed", ("fsdp", "tp"))]))
        (('fsdp', 'tp'),)
    """
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return _with_spec(lambda names: resolve_core(names, rules), sharding)


def map_sharding(f: Callable[[Any], Any], sharding: Any) -> Any:
    """Call `f` on each entry of the spec of a sharding.

    Semantics of flax.core.spmd.map_sharding, 0.12.

    Args:
        f: From an entry (a name, a tuple of names, or None) to an entry.
        sharding: As in `get_pspec`. If it is None, the result is None.

    Returns, Raises:
        As `get_pspec`.

    Example:
        >>> tuple(map_sharding(lambda name: name and name.upper(), ("dp", None)))
        ('DP', None)
    """

    def mapped(names: Any) -> PartitionSpec:
        return spec_of_names(names, [f(entry) for entry in logical_names(names)])

    return _with_spec(mapped, sharding)


def get_mesh(sharding: Any) -> AnyMesh | None:
    """Return the mesh of a NamedSharding or of a Format; None for names and PartitionSpecs.

    Semantics of flax.core.spmd.get_mesh, 0.12.

    Example:
        >>> get_mesh(("batch", None)) is None
        True
    """
    if _is_format(sharding):
        return get_mesh(sharding.sharding)
    return sharding.mesh if _is_named_sharding(sharding) else None


def shard_value(
    value: Any, out_sharding: Any, sharding_rules: LogicalRules | None, mesh: AnyMesh | None
) -> Any:
    """Shard a value at once, as nnx does when it creates a Variable (eager sharding).

    Semantics of flax.core.spmd.shard_value, 0.12. Axes of type Auto become a sharding constraint,
    and Explicit axes a `jax.sharding.reshard`. Nothing is corrected: JAX refuses a spec that does
    not fit.

    Args:
        value: An array or a pytree of arrays.
        out_sharding: As in `get_pspec`. If it is None or empty, the value is returned unchanged.
        sharding_rules: As in `get_pspec`.
        mesh: The mesh for names and PartitionSpecs. None for the context's.

    Raises:
        ValueError: As `get_pspec`; there is no mesh; its axes have several types; or JAX refuses.
        AssertionError: The mesh of `out_sharding` is not the given mesh or the context's.

    Example:
        >>> import jax
        >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("fsdp",))
        >>> placed = shard_value(jax.numpy.ones(4), ("embed",), [("embed", "fsdp")], mesh)
        >>> wanted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
        >>> placed.sharding.is_equivalent_to(wanted, placed.ndim)
        True
    """
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
    """Combine two lists of rules. Semantics of flax.core.spmd.composite_rules, 0.12.

    Args:
        rule1: Rules. The last one for a name wins.
        rule2: More rules, which must contradict neither `rule1` nor each other.

    Returns:
        One rule per name. If one list is empty, the other list unchanged.

    Raises:
        ValueError: Two rules give a name different mesh axes, or a rule is not a pair.

    Example:
        >>> composite_rules([("embed", "fsdp")], [("mlp", "tp")])
        (('embed', 'fsdp'), ('mlp', 'tp'))
    """
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
    """Replace names by these rules only, without the rules in force.

    Names are looked up as strings. None and empty names stay. Semantics of
    flax.core.spmd.from_sharding_rules, 0.12.

    Args:
        sharding: A tuple or list of names, or a PartitionSpec.
        sharding_rules: (logical name, mesh axes) pairs. The last one for a name wins.

    Raises:
        TypeError: `sharding` is something else.
        ValueError: A rule is not a pair.

    Example:
        >>> from_sharding_rules(("batch", None, "embed"), [("embed", "fsdp")])
        ('batch', None, 'fsdp')
    """
    rules = last_wins(sharding_rules)
    return tuple(
        rules[str(name)] if name and str(name) in rules else name
        for name in logical_names(sharding)
    )


def _apply_sharding(value: Any, sharding: Any, mesh: AnyMesh) -> Any:
    """Apply a NamedSharding or Format by the operation for the types of the mesh's axes.

    Calls JAX directly, because flax corrects nothing and turns numbers into arrays, unlike
    shardrules.with_sharding_constraint. Semantics of flax.core.spmd._apply_sharding, 0.12.
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
