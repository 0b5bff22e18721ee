"""`Transfer`: bytes that move, device by device, from one plan's shardings to another's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.arguments import MOST
from shardrules._base.dtypes import SAFETENSORS, bits_of
from shardrules._base.rule_specs import is_on_host
from shardrules._base.specs import Entries, as_placed, entries_of, entry_axes, is_unconstrained
from shardrules._base.text import (
    and_more,
    bytes_shown,
    counted,
    mesh_shown,
    printable,
    record,
)
from shardrules._place.mesh import has_devices
from shardrules._place.shardings import listing
from shardrules._plan.align import placement_errors
from shardrules._plan.answers import Answer, Column, Table
from shardrules._plan.diff import Pairs, paired
from shardrules._plan.fold import fold
from shardrules._plan.kinds import Kind, dtype_shown, placement_shown

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    from shardrules._plan.plan import Plan

_MOST_ROWS: Final = 60
# Pairs of kinds times devices; so many take some ten seconds.
_MOST_WORK: Final = 2**27
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
        return {
            "mesh": self.mesh,
            "shared": self.shared,
            "received": self.received.tolist(),
        }

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


def _places(before: Plan, after: Plan) -> npt.NDArray[np.int64]:
    """Return per device of the new mesh its place in the old one, in row-major order, or -1.

    Without devices in both, those of one place are taken for the same.
    """
    if has_devices(before.mesh) and has_devices(after.mesh):
        place_of = {device: place for place, device in enumerate(before.mesh.devices.flat)}
        return np.array([place_of.get(device, -1) for device in after.mesh.devices.flat], np.int64)
    places = np.arange(after.devices)
    return np.where(places < before.devices, places, -1)


def transfer(before: Plan, after: Plan) -> Transfer:
    """See `Plan.transfer`."""
    pairs = paired(before, after)
    of_groups = _same_leaves(pairs)
    for whose, plan in (("this plan", before), ("other", after)):
        _check_placed(whose, plan)
    _check_countable(before, after, len(of_groups))
    places = _places(before, after)
    counts = np.bincount(pairs.group_of, minlength=len(of_groups)).tolist()
    old, new = DevicesOfMesh(before.axis_sizes), DevicesOfMesh(after.axis_sizes)
    received = np.zeros(new.count, np.int64)
    of_leaf = []
    for (kind, target), count in zip(of_groups, counts, strict=True):
        shape, bits = kind.shape or (), 0 if kind.shape is None else bits_of(kind.dtype)
        shards = new.shards(shape, as_placed(target.spec or Entries(), after.axis_sizes))
        missing = elements(shards)
        if is_on_host(kind.memory_kind) == is_on_host(target.memory_kind):
            of_old = old.shards(shape, as_placed(kind.spec or Entries(), before.axis_sizes))
            missing = missing - np.where(
                places >= 0, elements(_overlaps(of_old, shards, places)), 0
            )
        # In whole bytes; a shift is ten times as fast as a division.
        needed = np.broadcast_to(((missing * bits - 1) >> 3) + 1, received.shape)
        received += needed * count
        of_leaf.append((int(needed.sum(dtype=object)), int(needed.max())))
    rows = (
        TransferRow(
            siblings.pattern,
            len(siblings.rows),
            *of_groups[siblings.group],
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
    alike = [(a, b) for a, b in pairs.groups if a and b and _type_shown(a) == _type_shown(b)]
    if len(alike) == len(pairs.groups):
        return alike
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
    dtype = dtype_shown(kind)
    shape = "not an array" if kind.shape is None else list(kind.shape)
    return f"{shape} {SAFETENSORS.get(dtype, dtype)}".removesuffix(" -")


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


def _check_countable(before: Plan, after: Plan, kinds: int) -> None:
    devices = before.devices + after.devices
    if kinds * devices > _MOST_WORK:
        raise ValueError(
            f"{counted(kinds, 'kind')} of leaves on {devices:,} devices are too many to count what "
            "each device receives: plan some of the leaves, or fewer devices"
        )
    if before.total_bytes > MOST:
        raise ValueError(f"{before.total_bytes:,} bytes are too many to count where they go")
