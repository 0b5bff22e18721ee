"""`flax.core.spmd` of flax 0.12: logical axis rules, and arrays sharded by logical axis names.

The same signatures and results, without flax; where flax is loaded, the rules in force are the same
for both. A few dict look-ups per array beyond what JAX does. Must not know about boxes;
docs/migration/flax.md lists the differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardrules._logical.context import (
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
)
from shardrules._logical.flax import loaded
from shardrules._logical.names import last_wins, logical_names, spec_of_names
from shardrules._logical.rules import resolve_core
from shardrules._sharding.mesh import axes_of_type, context_mesh
from shardrules._specs import is_partition_spec
from shardrules._words import mesh_shown, shown

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._logical.context import LogicalRulesLike as LogicalRules
    from shardrules._sharding.mesh import AnyMesh

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
    """The sharding with logical axis names replaced as the rules say.

    The rules are those in force (`logical_axis_rules`) together with `sharding_rules`; of several
    for a name the last wins, and a name without a rule stays. Semantics of
    flax.core.spmd.get_pspec, 0.12.

    Args:
        sharding: A tuple or list of names, a PartitionSpec, a NamedSharding or a Format.
        sharding_rules: (logical name, mesh axes) pairs.

    Returns:
        A PartitionSpec; for a NamedSharding or Format one of the same mesh, memory kind and layout.

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
    """As `get_pspec`. Semantics of flax.core.spmd.apply_rules, 0.12.

    Example:
        >>> tuple(apply_rules(("embed",), [("embed", ("fsdp", "tp"))]))
        (('fsdp', 'tp'),)
    """
    rules = composite_rules(get_logical_axis_rules(), sharding_rules)
    return _with_spec(lambda names: resolve_core(names, rules), sharding)


def map_sharding(f: Callable[[Any], Any], sharding: Any) -> Any:
    """The sharding with `f` called on each entry of its spec.

    Semantics of flax.core.spmd.map_sharding, 0.12.

    Args:
        f: From an entry (a name, a tuple of names, or None) to an entry.
        sharding: As in `get_pspec`; None gives None.

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
    """The mesh of a NamedSharding, or of the one in a Format; None for names and PartitionSpecs.

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
    """The value, sharded at once: what nnx does to a Variable when it is made (eager sharding).

    Semantics of flax.core.spmd.shard_value, 0.12. Axes of type Auto get a sharding constraint,
    Explicit ones a `jax.sharding.reshard`; nothing is corrected, JAX refuses what does not fit.

    Args:
        value: An array, or a pytree of them.
        out_sharding: As in `get_pspec`; if None or empty, the value is left alone.
        sharding_rules: As in `get_pspec`.
        mesh: For names and PartitionSpecs; the context's if None.

    Raises:
        ValueError: As `get_pspec`; no mesh; a mesh with axes of several types; or JAX refuses.
        AssertionError: `out_sharding` has a mesh, and it is not the given one or the context's.

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
    """Two lists of rules as one. Semantics of flax.core.spmd.composite_rules, 0.12.

    Args:
        rule1: Rules; of several for a name the last wins.
        rule2: More rules, which must not contradict these, nor each other.

    Returns:
        One rule per name; or, if one of the two is empty, the other as it is.

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
    """The names replaced as the rules say, and nothing else: the rules in force are not looked at.

    Names are looked up as strings; None and empty ones stay. Semantics of
    flax.core.spmd.from_sharding_rules, 0.12.

    Args:
        sharding: A tuple or list of names, or a PartitionSpec.
        sharding_rules: (logical name, mesh axes) pairs; the last one for a name wins.

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
    """The value with a NamedSharding or Format, by the operation that the mesh's axes want.

    Straight to JAX: unlike shardrules.with_sharding_constraint, flax corrects nothing and turns
    numbers into arrays. Semantics of flax.core.spmd._apply_sharding, 0.12.
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
    """The sharding with its spec or its names replaced."""
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
