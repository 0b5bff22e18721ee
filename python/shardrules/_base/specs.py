"""PartitionSpecs and their entries: how they are read, made, changed, compared and written."""

from __future__ import annotations

import functools
import sys
from collections.abc import Container, Iterable, Mapping
from math import gcd
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

from shardrules._base.arguments import check_type, strings
from shardrules._base.text import counted, nearest, printable_lines, shown

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


def partition_spec(*entries: Any) -> PartitionSpec:
    """Return a `jax.sharding.PartitionSpec` of these entries."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*entries)


def normalize_spec(index: int, spec: object) -> object:
    """Return the spec of rule `index`, as a hashable object.

    None, a string, and a tuple or list of axis names become tuples of PartitionSpec entries; they
    are made a PartitionSpec when the first leaf needs one. Any other object is kept.

    Raises:
        TypeError: An entry is not an axis name, or the spec cannot be hashed.
    """
    if spec is None:
        return Entries(())
    if isinstance(spec, str):
        return Entries((spec,))
    if isinstance(spec, (tuple, list)) and not hasattr(type(spec), "_fields"):
        return Entries([_checked_entry(index, position, e) for position, e in enumerate(spec)])
    try:
        hash(spec)
    except TypeError as error:
        raise TypeError(
            f"rule {index}: the spec {shown(spec)} cannot be hashed ({error}); give a "
            "PartitionSpec, None, an axis name, a tuple of axis names, or a hashable object"
        ) from None
    return spec


class Entries(tuple[Any, ...]):
    """Entries of a PartitionSpec that has not been made yet."""

    __slots__ = ()


_Spec = TypeVar("_Spec", "PartitionSpec", Entries, "PartitionSpec | Entries")
Dim = int | str | tuple[str, ...] | None
RankPolicy = Literal["truncate", "replicate", "keep", "error"]
"""The policies for a spec that is longer than a leaf's rank."""


def spec_length(spec: object) -> int:
    """Return the number of a spec's entries. A leaf of at least this rank gets the spec whole."""
    return len(spec) if isinstance(spec, Entries) or is_partition_spec(spec) else 0


def spec_for_rank(spec: object, rank: int, too_long: RankPolicy) -> object:
    """Return the spec for a leaf of that rank; None if it is longer and that is an error."""
    entries = as_partition_spec(spec) if isinstance(spec, Entries) else spec
    if too_long == "keep" or not is_partition_spec(entries) or rank >= len(entries):
        return entries
    if too_long == "truncate":
        return with_entries(entries, entries_of(entries)[:rank])
    return partition_spec() if too_long == "replicate" else None


def as_entries(name: str, spec: Any) -> Entries:
    """Return the entries of a spec that a user gives as the parameter `name`."""
    if is_partition_spec(spec) and not tags_of(spec):
        return Entries(entries_of(spec))
    try:
        entries = normalize_spec(0, spec)
    except TypeError:
        entries = None
    if not isinstance(entries, Entries):
        raise TypeError(
            f"{name} is {shown(spec)}; it must be a PartitionSpec without unreduced axes, an axis "
            "name, or a tuple of axis names and None"
        )
    return entries


def as_partition_spec(spec: PartitionSpec | Entries) -> PartitionSpec:
    """Return the PartitionSpec of these entries, or that one itself."""
    return _remembered_spec(spec) if isinstance(spec, Entries) else spec


@functools.lru_cache(maxsize=1024)
def _remembered_spec(entries: tuple[Any, ...]) -> PartitionSpec:
    # Thousands of rules have a handful of specs.
    return partition_spec(*entries)


def is_partition_spec(spec: object) -> TypeGuard[PartitionSpec]:
    # Without JAX in the process nobody can have made one.
    sharding = sys.modules.get("jax.sharding")
    return sharding is not None and isinstance(spec, sharding.PartitionSpec)


def _checked_entry(index: int, position: int, entry: object) -> object:
    if entry is None or isinstance(entry, str) or is_unconstrained(entry):
        return entry
    if isinstance(entry, (tuple, list)) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise TypeError(
        f"rule {index}: entry {position} of the spec is {shown(entry)}; an entry is None, an axis "
        "name, or a tuple of axis names"
    )


def entries_of(spec: PartitionSpec | Entries) -> tuple[Any, ...]:
    """Return the entries; a spec with unreduced axes refuses to be iterated over."""
    return tuple(getattr(spec, "partitions", spec))


@functools.lru_cache(maxsize=1024)
def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a PartitionSpec names."""
    if entry is None or is_unconstrained(entry):
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def entry_of(axes: tuple[str, ...]) -> Any:
    """Return the plainest entry of these mesh axes."""
    return axes[0] if len(axes) == 1 else axes or None


def trimmed(entries: Iterable[Any]) -> list[Any]:
    """Return entries without the last ones that are None."""
    kept = list(entries)
    while kept and kept[-1] is None:
        kept.pop()
    return kept


def entries_of_cuts(cuts: Iterable[tuple[str, ...]]) -> Entries:
    """Return the plainest entries for the mesh axes that cut each dimension."""
    return Entries(trimmed(map(entry_of, cuts)))


def with_entries(spec: _Spec, entries: Iterable[Any]) -> _Spec:
    """Return a spec of these entries, with the type and (un)reduced axes of `spec`."""
    if isinstance(spec, Entries):
        return Entries(entries)  # pyright: ignore[reportReturnType]
    if tags_of(spec):
        partitions = tuple(entries)
        # An axis that cuts the array is not one along which it is whole.
        cutting = frozenset(axis for entry in partitions for axis in entry_axes(entry))
        reduced = frozenset(tags_of(spec).get("reduced", ())) - cutting
        return spec.update(partitions=partitions, reduced=reduced)  # type: ignore[no-any-return]
    return _remembered_spec(tuple(entries))  # pyright: ignore[reportReturnType]


def tags_of(spec: object) -> dict[str, Any]:
    """Return what a PartitionSpec says beside its entries, as plain data; nothing for most.

    `unreduced` and `reduced` are lists of mesh axes, and `unreduced_kind` is a name: that of the
    reduction, if it is not a sum.
    """
    tags: dict[str, Any] = {
        name: sorted(axes)
        for name in ("unreduced", "reduced")
        if (axes := getattr(spec, name, None))
    }
    kind = getattr(getattr(spec, "unreduced_kind", None), "name", "sum")
    return tags if kind == "sum" else {**tags, "unreduced_kind": kind}


def axes_in_tags(spec: object) -> dict[str, list[str]]:
    """Return the mesh axes of a spec that cut no dimension: its unreduced and reduced ones."""
    return {name: axes for name, axes in tags_of(spec).items() if name != "unreduced_kind"}


def tags_shown(spec: object) -> list[str]:
    """Return these tags as people write them."""
    return [f"{name}={value}" for name, value in tags_of(spec).items()]


def with_tags(spec: PartitionSpec | Entries, tags: Mapping[str, Any]) -> PartitionSpec | Entries:
    """Return the spec with these tags alone."""
    if not tags and not tags_of(spec):
        return spec
    from jax import sharding

    kinds: Any = getattr(sharding, "UnreducedKind", {})
    try:
        named = {
            name: kinds[value] if name == "unreduced_kind" else frozenset(value)
            for name, value in tags.items()
        }
        return sharding.PartitionSpec(*entries_of(spec), **named)
    except (KeyError, TypeError) as error:
        names = " and ".join(f"{name}={value}" for name, value in tags.items())
        raise ValueError(f"this version of JAX has no {names} in a PartitionSpec") from error


def with_dims(spec: _Spec, dims: Iterable[Dim]) -> _Spec:
    """Return the spec of an array that is made from another one, which has `spec`.

    Args:
        spec: The other array's spec.
        dims: For each dimension of the new array: the number of the other array's dimension whose
            entry it gets; None if it is not sharded; or the mesh axes that shard it.

    Example:
        >>> with_dims(Entries(("fsdp", "tp")), (None, 1))
        (None, 'tp')
    """
    entries = entries_of(spec)
    taken = [
        (entries[dim] if dim < len(entries) else None) if isinstance(dim, int) else dim
        for dim in dims
    ]
    return with_entries(spec, taken)


def without_axes(spec: _Spec, axes: frozenset[str], emptied: Any = None) -> _Spec:
    """Return the spec without these mesh axes.

    An entry that has lost all its axes becomes `emptied`.
    """
    if not axes or axes.isdisjoint(axis for e in entries_of(spec) for axis in entry_axes(e)):
        return spec

    def left(entry: Any) -> Any:
        if axes.isdisjoint(entry_axes(entry)):
            return entry
        kept = tuple(axis for axis in entry_axes(entry) if axis not in axes)
        return entry_of(kept) if kept else emptied

    return with_entries(spec, map(left, entries_of(spec)))


def split_axes(axes: Iterable[str], parts: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes, each by the axes that it is made of."""
    return tuple(part for axis in axes for part in parts.get(axis, (axis,)))


def with_axes_split(spec: _Spec, parts: Mapping[str, tuple[str, ...]]) -> _Spec:
    """Return the spec, each axis by the axes that it is made of."""

    def split(entry: Any) -> Any:
        axes = entry_axes(entry)
        return entry if parts.keys().isdisjoint(axes) else entry_of(split_axes(axes, parts))

    tags = {
        name: value if name == "unreduced_kind" else split_axes(value, parts)
        for name, value in tags_of(spec).items()
    }
    entries: Any = Entries(map(split, entries_of(spec)))
    return with_tags(entries, tags) if tags else with_entries(spec, entries)  # type: ignore[return-value]


def few_heads_advice(heads: int, axis: str, devices: int) -> str:
    """Return how so few heads are shared along an axis; "" if they cannot be shared evenly.

    Of more heads than that it would be no head any more, but a vocabulary or a width.
    """
    parts = gcd(heads, devices)
    if parts in (1, devices) or heads > 2 * devices:
        return ""
    return (
        f"put kv={parts}, rep={devices // parts} in the mesh in place of {axis}={devices}: "
        f"rules.with_axes({{{axis!r}: ('kv', 'rep')}}) and Correction(indivisible='prefix')"
    )


def checked_parts(axes: Mapping[str, Any], named: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the axes that others are made of, for `with_axes` of rules that name axes."""
    check_type("axes", axes, Mapping, "a dict such as {'tp': ('kv', 'rep')}")
    names = set(named)
    for axis in axes:
        if axis not in names:
            near = nearest(axis, sorted(names)) if isinstance(axis, str) else None
            hint = f"did you mean {near!r}?" if near else f"they name {', '.join(sorted(names))}"
            raise ValueError(f"axes: the rules name no axis {axis!r}; {hint}")
    return {
        axis: (value,) if isinstance(value, str) else strings(f"axes[{axis!r}]", value)
        for axis, value in axes.items()
    }


def axes_present(axes: list[str], present: Container[str], absent: str) -> list[str]:
    """Return the axes of an entry that a policy for absent axes leaves."""
    if absent in ("keep", "error") or all(axis in present for axis in axes):
        return axes
    if absent == "drop":
        return []
    return [axis for axis in axes if axis in present]


def is_unconstrained(entry: object) -> bool:
    sharding = sys.modules.get("jax.sharding")
    return sharding is not None and entry is sharding.PartitionSpec.UNCONSTRAINED


def plain_entries(spec: PartitionSpec | Entries) -> list[Any]:
    """Return the entries, equal for equal specs: ("tp",) is "tp", as in JAX."""
    return [e if is_unconstrained(e) else entry_of(entry_axes(e)) for e in entries_of(spec)]


def as_written(spec: PartitionSpec | Entries) -> PartitionSpec | Entries:
    """Return the spec in normal form: specs that are written otherwise and mean the same are equal.

    ("tp",) is "tp", and there is no None at the end. Fingerprints, locks and diffs compare this.

    Example:
        >>> as_written(Entries((("fsdp",), "tp", None)))
        ('fsdp', 'tp')
    """
    entries: Any = Entries(trimmed(plain_entries(spec)))
    return with_tags(entries, tags_of(spec))


def as_placed(
    spec: PartitionSpec | Entries, axis_sizes: Mapping[str, int]
) -> PartitionSpec | Entries:
    """Return the spec in normal form without axes of one device: those placed alike are equal.

    What verifies, audits and transfers compares this.

    Example:
        >>> as_placed(Entries((("fsdp", "sp"), "tp")), {"fsdp": 2, "sp": 1, "tp": 1})
        ('fsdp',)
    """
    single = frozenset(axis for axis, size in axis_sizes.items() if size == 1)
    return as_written(without_axes(spec, single))


def spec_shown(spec: Any) -> str:
    """Return a spec as people write it, PartitionSpec or not: P('fsdp', None); - for None."""
    if spec is None:
        return "-"
    if not is_partition_spec(spec) and not isinstance(spec, Entries):
        return repr(spec)
    texts = ("UNCONSTRAINED" if is_unconstrained(e) else repr(e) for e in plain_entries(spec))
    return f"P({', '.join([*texts, *tags_shown(spec)])})"


def constraint_line(spec: str, array: str = "x") -> str:
    """Return the line of a program that gives an array this spec."""
    return f"{array} = jax.lax.with_sharding_constraint({array}, {spec})"


def rules_shown(policy: str, pairs: Iterable[tuple[Any, Any]]) -> str:
    """Return a line for the dialect and the policy, and one for each rule."""
    lines = [
        f"rule {index}: {pattern!r} -> {spec_shown(spec)}"
        for index, (pattern, spec) in enumerate(pairs)
    ]
    return printable_lines([f"{counted(len(lines), 'rule')}, dialect {policy}", *lines])
