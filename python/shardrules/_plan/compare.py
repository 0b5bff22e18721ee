"""Plans compared: whether they are alike, `PlanDiff` of what differs, `Transfer` of what moves."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import unified_diff
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import MOST
from shardrules._base.dtypes import bits_of
from shardrules._base.rule_specs import Fsdp, has_axes, in_memory_shown, is_on_host, rule_spec
from shardrules._base.specs import (
    Entries,
    as_placed,
    as_written,
    entries_of,
    entry_axes,
    is_unconstrained,
    spec_shown,
)
from shardrules._base.text import and_more, bytes_shown, counted, mesh_shown, printable, record
from shardrules._place.mesh import has_devices
from shardrules._place.shardings import listing
from shardrules._plan.align import check_distinct, placement_errors
from shardrules._plan.answers import Answer, Column, Table
from shardrules._plan.fold import fold
from shardrules._plan.kinds import (
    Kind,
    dtype_shown,
    kind_json,
    placement_shown,
    problem_shown,
)
from shardrules._plan.leaves import grouped
from shardrules._rules.patterns import with_inline_flags
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    from shardrules._plan.plan import Plan
    from shardrules._rules.logical_rules import LogicalRules

    AnyRules = Rules | LogicalRules


def plan_fingerprint(plan: Plan) -> str:
    """Digest what each leaf gets on which mesh, whatever the order of the leaves."""
    texts = [f"\t{kind_text(kind)}\n" for kind in plan.kinds]
    rows = map(texts.__getitem__, plan.kind_of.tolist())
    # With its tabs and newlines escaped no path can pass for a row of something else.
    ordered = sorted(map(operator.add, map(ascii, plan.paths), rows))
    text = "".join([ascii(plan.axis_sizes), *ordered])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def kind_text(kind: Kind) -> str:
    """Return the shape, dtype and place of leaves: equal for specs that are alike as written."""
    spec = "" if kind._counted is None else spec_shown(as_written(kind._counted))
    place = in_memory_shown(spec, kind.memory_kind)
    return f"{kind.shape}\t{dtype_shown(kind)}\t{place}{problem_shown(kind) or ''}"


class Pairs(NamedTuple):
    """The leaves of two plans: those of the first, then those of the second alone."""

    paths: list[str]
    group_of: npt.NDArray[np.int32]
    """Per leaf an index of `groups`."""
    groups: list[tuple[Kind | None, Kind | None]]
    """The kinds of such leaves in the first plan and the second; None where it has none."""


def pairs_of(before: Plan, after: Plan) -> Pairs:
    """Return the leaves of both plans, paired by their paths."""
    for plan in (before, after):
        check_distinct(plan.paths, "plans are compared by paths")
    old, new = (
        dict(zip(plan.paths, plan.kind_of.tolist(), strict=True)) for plan in (before, after)
    )
    paths = [*old, *(path for path in new if path not in old)]
    numbers, group_of = grouped((old.get(path, -1), new.get(path, -1)) for path in paths)
    # A kind of -1 stands for a leaf that is not there.
    kinds = (*before.kinds, None), (*after.kinds, None)
    return Pairs(
        paths, group_of, [(kinds[0][first], kinds[1][second]) for first, second in numbers]
    )


@record
class Change(NamedTuple):
    """Leaves that changed alike."""

    path: str
    """Folded path pattern."""
    leaves: int
    before: Kind | None
    """None for leaves that are new."""
    after: Kind | None
    """None for leaves that are gone."""
    moves: bool | None = None
    """Whether devices hold other parts now; None for leaves that are new, gone or other arrays."""

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            sign, kind = ("-", self.before) if self.before is not None else ("+", self.after)
            return printable(f"{sign} {self.path}  {'  '.join(_aspects(kind))}")
        pairs = zip(_aspects(self.before), _aspects(self.after), strict=True)
        changes = "  ".join(f"{a} -> {b}" for a, b in pairs if a != b)
        delta = (_on_device(self.after) - _on_device(self.before)) * self.leaves
        sign = "+" if delta >= 0 else "-"
        still = "; nothing moves" if self.moves is False else ""
        cost = f"({sign}{bytes_shown(abs(delta))} on each device{still})"
        return printable(f"~ {self.path}  {changes}  {cost}")


def _on_device(kind: Kind) -> int:
    """Bytes of one leaf in the memory of the device that holds most of it."""
    return 0 if is_on_host(kind.memory_kind) else kind.device_bytes


def _aspects(kind: Kind | None) -> tuple[str, ...]:
    """Return a leaf's shape, dtype, and its place or problem, as texts."""
    if kind is None:
        return ()
    return str(kind.shape), dtype_shown(kind), problem_shown(kind) or placement_shown(kind)


class PlanDiff(Answer[Change]):
    """The differences of two plans, a row for leaves that changed alike. False without any."""

    mesh: tuple[dict[str, int], dict[str, int]]
    """Before and after."""
    bytes: tuple[int, int]
    """On the device that holds most, before and after."""
    rules: tuple[str, ...]
    """What differs in the rules, as the lines of a diff, even if each leaf gets the same."""
    host_bytes: tuple[int, int]
    """In the host's memory for the device that has most there, before and after."""

    _rows_key = "changes"

    def __bool__(self) -> bool:
        return bool(len(self)) or bool(self.rules) or self._meshes_differ

    @property
    def _meshes_differ(self) -> bool:
        return list(self.mesh[0].items()) != list(self.mesh[1].items())

    @property
    def heading(self) -> str:
        """The meshes and the lines of the rules that differ."""
        meshes = [f"mesh {' -> '.join(map(mesh_shown, self.mesh))}"] if self._meshes_differ else []
        return "\n".join([*meshes, *(["rules:"] if self.rules else []), *self.rules])

    @property
    def notes(self) -> list[str]:
        """How many leaves changed, and the bytes before and after."""
        if not self:
            return ["no differences"]
        leaves = counted(sum(change.leaves for change in self), "leaf")
        before, after = map(bytes_shown, self.bytes)
        host = " -> ".join(map(bytes_shown, self.host_bytes)) if any(self.host_bytes) else ""
        return [
            f"{leaves} changed; {before} -> {after} on the fullest device"
            + (f"; {host} in the host's memory" if host else "")
        ]

    def _json(self) -> dict[str, Any]:
        names = ("mesh", "bytes", "host_bytes", "rules")
        return {name: getattr(self, name) for name in names}

    def _row_json(self, row: Change) -> dict[str, Any]:
        kinds = {"before": row.before, "after": row.after}
        return row._asdict() | {
            name: None if kind is None else kind_json(kind) for name, kind in kinds.items()
        }


def plan_diff(before: Plan, after: Plan) -> PlanDiff:
    paths, group_of, groups = pairs_of(before, after)
    changed = {
        number: (old, new)
        for number, (old, new) in enumerate(groups)
        if old is None or new is None or kind_text(old) != kind_text(new)
    }
    kept = np.flatnonzero(np.isin(group_of, list(changed)))
    folded = fold([paths[row] for row in kept], group_of[kept])
    device_bytes = before.bytes_per_device(), after.bytes_per_device()
    return PlanDiff(
        (
            Change(each.pattern, len(each.rows), *pair, _is_moved(pair, before, after))
            for each in folded
            for pair in [changed[each.group]]
        ),
        mesh=(before.axis_sizes, after.axis_sizes),
        bytes=(device_bytes[0].max, device_bytes[1].max),
        rules=tuple(_rule_changes(before.rules, after.rules)),
        host_bytes=(device_bytes[0].host, device_bytes[1].host),
    )


def _is_moved(pair: tuple[Kind | None, Kind | None], before: Plan, after: Plan) -> bool | None:
    """Tell whether devices hold other parts of leaves, as far as they are the same arrays."""
    a, b = pair
    if a is None or b is None or a.spec is None or b.spec is None:
        return None
    if (a.shape, dtype_shown(a)) != (b.shape, dtype_shown(b)):
        return None
    meshes = [
        [(axis, size) for axis, size in plan.axis_sizes.items() if size > 1]
        for plan in (before, after)
    ]
    specs = as_placed(a.spec, before.axis_sizes), as_placed(b.spec, after.axis_sizes)
    return meshes[0] != meshes[1] or specs[0] != specs[1] or a.memory_kind != b.memory_kind


_MOST_LINES: Final = 40


def _rule_changes(before: AnyRules, after: AnyRules) -> Iterator[str]:
    """Yield the differences of the rules: lines of a diff."""
    if type(before) is not type(after):
        yield "paths or logical axis names decide"
        return
    texts = [_rules_text(rules) for rules in (before, after)]
    lines = list(unified_diff(texts[0], texts[1], n=0, lineterm=""))[2:]
    changes = [f"{line[0]} {line[1:]}" for line in lines if not line.startswith("@@")]
    yield from changes[:_MOST_LINES]
    yield from and_more(len(changes), _MOST_LINES, "line")


def _rules_text(rules: AnyRules) -> list[str]:
    """Return a line for each policy and each rule: equal for rules that mean the same."""
    policies = {item.name: getattr(rules.dialect, item.name) for item in fields(rules.dialect)}
    for name in ("optional_axes", "min_size"):  # logical rules have no min_size
        policies[name] = getattr(rules, name, 0)
    head = [f"{name} = {value!r}" for name, value in policies.items()]
    if isinstance(rules, Rules):
        pairs = ((with_inline_flags(pattern), _value_text(value)) for pattern, value in rules)
    else:
        pairs = ((name, repr(axes)) for name, axes in rules)
    return [*head, *(f"{what!r} -> {asked}" for what, asked in pairs)]


def _value_text(value: Any) -> str:
    """Return what a rule asks for, with its spec in normal form."""
    rule = rule_spec(value)
    asked: Any = rule.spec
    if has_axes(asked) and not isinstance(asked, Fsdp):
        asked = as_written(asked)
    names = ("correction", "units", "memory_kind", "optional_axes")
    options = [f"{name}={getattr(rule, name)!r}" for name in names if getattr(rule, name)]
    return ", ".join([spec_shown(asked), *options])


_MOST_ROWS: Final = 60
_COLUMNS: Final = (
    Column("path"),
    Column("leaves", is_right=True),
    Column("shape"),
    Column("dtype"),
    Column("spec"),
    Column("received", is_right=True),
    Column("most by a device", is_right=True),
)


@record
class TransferRow(NamedTuple):
    """Leaves that move alike; a row of `Transfer`.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8,), "float32")}, [("w", "dp")], {"dp": 4})
        >>> (row,) = plan.transfer(plan.on_mesh({"dp": 2}))
        >>> row.path, row.received, row.most
        ('w', 24, 16)
    """

    path: str
    """Folded path pattern."""
    leaves: int
    before: Kind
    after: Kind
    received: int
    """Bytes of these leaves that all devices receive together."""
    most: int
    """Bytes of these leaves that the device which receives most of them receives."""


class Transfer(Answer[TransferRow]):
    """The bytes that devices receive between two plans: a row for each folded path.

    False if nothing moves.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((8,), "float32")}, [("w", "dp")], {"dp": 4})
        >>> moved = plan.transfer(plan.on_mesh({"dp": 2}))
        >>> moved.received, moved.total
        (array([ 8, 16]), 24)
    """

    mesh: tuple[dict[str, int], dict[str, int]]
    """Before and after."""
    shared: int
    """The number of devices that are in both meshes."""
    received: npt.NDArray[np.int64]
    """Bytes that each device of the new mesh must receive, with a dimension for each axis of that
    mesh: those of its new shards that it does not hold already in the same memory, its own or its
    host's. No way to move the leaves needs fewer. It cannot be written to."""

    @property
    def total(self) -> int:
        """Bytes that all devices receive together, the least that can be sent.

        Of elements of less than 8 bits, what a device receives of a leaf is rounded up to bytes.
        """
        return int(self.received.sum(dtype=object))

    def __bool__(self) -> bool:
        return bool(self.received.any())

    @property
    def heading(self) -> str:
        """The meshes, and the bytes in all."""
        meshes = " -> ".join(map(mesh_shown, self.mesh))
        summary = (
            f"{bytes_shown(self.total)} received in all; at most "
            f"{bytes_shown(int(self.received.max()))} by a device"
        )
        shared = f"{meshes}: {counted(self.shared, 'device')} in both"
        return f"{shared}\n{summary if self else 'nothing moves'}"

    @property
    def notes(self) -> list[str]:
        """How many more rows move than are shown."""
        return and_more(len(self._moving()), _MOST_ROWS, "row")

    def _moving(self) -> list[TransferRow]:
        return [row for row in self if row.received]

    def _json(self) -> dict[str, Any]:
        return {"mesh": self.mesh, "shared": self.shared, "received": self.received.tolist()}

    def _row_json(self, row: TransferRow) -> dict[str, Any]:
        specs = {"before": placement_shown(row.before), "after": placement_shown(row.after)}
        return row._asdict() | specs

    def _body(self) -> list[Table | str]:
        moving = self._moving()[:_MOST_ROWS]
        return [Table(_COLUMNS, map(_transfer_cells, moving))] if moving else []


def _transfer_cells(row: TransferRow) -> tuple[str, ...]:
    before, after = placement_shown(row.before), placement_shown(row.after)
    return (
        printable(row.path),
        f"{row.leaves:,}",
        str(list(row.after.shape or ())),
        printable(dtype_shown(row.after)),
        printable(before if before == after else f"{before} -> {after}"),
        bytes_shown(row.received),
        bytes_shown(row.most),
    )


def transfer(before: Plan, after: Plan) -> Transfer:
    """See `Plan.transfer`."""
    pairs = pairs_of(before, after)
    kinds = _same_leaves(pairs)
    for whose, plan in (("this plan", before), ("other", after)):
        _check_placed(whose, plan)
    if before.total_bytes > MOST:
        raise ValueError(f"{before.total_bytes:,} bytes are too many to count where they go")
    places = _places(before, after)
    counts = np.bincount(pairs.group_of, minlength=len(kinds)).tolist()
    old, new = DevicesOfMesh(before.axis_sizes), DevicesOfMesh(after.axis_sizes)
    received = np.zeros(new.count, np.int64)
    of_leaf = []
    for (kind, target), count in zip(kinds, counts, strict=True):
        shape, bits = kind.shape or (), 0 if kind.shape is None else bits_of(kind.dtype)
        shards = new.shards(shape, as_placed(target.spec or Entries(), after.axis_sizes))
        missing = elements(shards)
        if is_on_host(kind.memory_kind) == is_on_host(target.memory_kind):
            old_shards = old.shards(shape, as_placed(kind.spec or Entries(), before.axis_sizes))
            missing = missing - np.where(
                places >= 0, elements(_overlaps(old_shards, shards, places)), 0
            )
        # In whole bytes; a shift is ten times as fast as a division.
        needed = np.broadcast_to(((missing * bits - 1) >> 3) + 1, received.shape)
        received += needed * count
        of_leaf.append((int(needed.sum(dtype=object)), int(needed.max())))
    rows = (
        TransferRow(
            siblings.pattern,
            len(siblings.rows),
            *kinds[siblings.group],
            *(len(siblings.rows) * size for size in of_leaf[siblings.group]),
        )
        for siblings in fold(pairs.paths, pairs.group_of)
    )
    received = received.reshape(tuple(after.axis_sizes.values()))
    received.flags.writeable = False
    return Transfer(
        rows,
        mesh=(before.axis_sizes, after.axis_sizes),
        shared=int((places >= 0).sum()),
        received=received,
    )


def _places(before: Plan, after: Plan) -> npt.NDArray[np.int64]:
    """Return per device of the new mesh its place in the old one, in row-major order, or -1.

    Without devices in both, those of one place are taken for the same.
    """
    if has_devices(before.mesh) and has_devices(after.mesh):
        place_of = {device: place for place, device in enumerate(before.mesh.devices.flat)}
        return np.array([place_of.get(device, -1) for device in after.mesh.devices.flat], np.int64)
    places = np.arange(after.devices)
    return np.where(places < before.devices, places, -1)


_Interval = tuple[Any, Any]
"""Start and stop of each device's part of a dimension; numbers, where they are the same for all."""


class DevicesOfMesh:
    """Devices of a mesh in row-major order, and the parts of arrays that they hold."""

    def __init__(self, axis_sizes: Mapping[str, int]) -> None:
        self._axis_sizes = axis_sizes
        self.count = prod(axis_sizes.values())
        self._positions: dict[tuple[str, ...], npt.NDArray[np.int64]] = {}

    def shards(self, shape: Sequence[int], spec: PartitionSpec | Entries) -> list[_Interval]:
        """Return the part of each dimension by device, as in XLA.

        Parts are rounded up; the last ones are smaller, or empty.
        """
        entries = [*entries_of(spec), *[None] * len(shape)]
        return [
            self._interval(size, entry_axes(entry))
            for size, entry in zip(shape, entries, strict=False)
        ]

    def _interval(self, size: int, axes: tuple[str, ...]) -> _Interval:
        if not axes:
            return 0, size
        part = -(-size // prod(self._axis_sizes[axis] for axis in axes))
        start = np.minimum(self._position(axes) * part, size)
        return start, np.minimum(start + part, size)

    def _position(self, axes: tuple[str, ...]) -> npt.NDArray[np.int64]:
        """Return per device its position among the parts that these axes make."""
        if axes not in self._positions:
            sizes = tuple(self._axis_sizes.values())
            coordinates = dict(zip(self._axis_sizes, np.indices(sizes, np.int64), strict=True))
            position = np.zeros(sizes, np.int64)
            for axis in axes:
                position = position * self._axis_sizes[axis] + coordinates[axis]
            self._positions[axes] = position.ravel()
        return self._positions[axes]


def elements(shards: Iterable[_Interval]) -> Any:
    """Return how many elements these parts have, by device or for all."""
    count: Any = 1
    for start, stop in shards:
        count = count * np.maximum(stop - start, 0)
    return count


def _overlaps(
    before: list[_Interval], after: list[_Interval], places: npt.NDArray[np.int64]
) -> Iterator[_Interval]:
    """Yield by new device, what it held of each dimension of its new part."""

    def there(value: Any) -> Any:
        return value[places] if isinstance(value, np.ndarray) else value

    for (start, stop), (new_start, new_stop) in zip(before, after, strict=True):
        yield np.maximum(there(start), new_start), np.minimum(there(stop), new_stop)


def _same_leaves(pairs: Pairs) -> list[tuple[Kind, Kind]]:
    """Return the kinds of the pairs, if both plans have the same leaves."""
    types = [tuple(map(_type_shown, pair)) for pair in pairs.groups]
    kinds = [(a, b) for a, b in pairs.groups if a and b and _type_shown(a) == _type_shown(b)]
    if len(kinds) == len(pairs.groups):
        return kinds
    differ = [number for number, (before, after) in enumerate(types) if before != after]
    rows = np.flatnonzero(np.isin(pairs.group_of, differ))
    folded = fold([pairs.paths[row] for row in rows], pairs.group_of[rows])
    raise ValueError(
        listing(
            f"other: {counted(len(rows), 'leaf')} of the two plans are not the same, and leaves "
            "move as they are: plan the same tree on the other mesh, as "
            "plan.transfer(plan.on_mesh(mesh)) does",
            (
                f"{leaf.pattern}: {before} in this plan, {after} in other"
                for leaf in folded
                for before, after in [types[leaf.group]]
            ),
            len(folded),
            "path",
        )
    )


def _type_shown(kind: Kind | None) -> str:
    if kind is None:
        return "no leaf"
    return "not an array" if kind.shape is None else f"{[*kind.shape]} {dtype_shown(kind)}"


def _check_placed(whose: str, plan: Plan) -> None:
    """Check that it is known what the devices hold of each leaf."""
    if errors := placement_errors(plan):
        raise ValueError(f"{whose}: leaves get no sharding\n{errors}")
    for folded in plan.folded:
        if why := _reason_unknown(kind := plan.kinds[folded.group]):
            spec = placement_shown(kind)
            raise ValueError(printable(f"{whose}: {folded.pattern} has {spec}: {why}"))


def _reason_unknown(kind: Kind) -> str | None:
    """Return why it is not known what devices hold of a leaf that is placed; None if it is."""
    if kind.spec is not None and any(map(is_unconstrained, entries_of(kind.spec))):
        return "XLA chooses how to cut its unconstrained dimensions; give them axes, or None"
    if getattr(kind.spec, "unreduced", None):
        return (
            "devices hold terms of a sum along its unreduced axes, and these are added, not moved; "
            "plan without them"
        )
    return None
