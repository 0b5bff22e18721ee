"""`Sweep`: one rule list on many meshes, the bytes on each, and what fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.arguments import as_tuple, check_type, integer, strings
from shardrules._base.mesh_sizes import check_bounds, checked_sizes, mesh_shapes
from shardrules._base.rule_specs import MemoryKind
from shardrules._base.text import (
    brief,
    bytes_shown,
    counted,
    mesh_shown,
    nearest,
    printable,
    record,
)
from shardrules._plan.answers import Answer, Column, Section, Table
from shardrules._plan.axis_uses import data_axes_among
from shardrules._plan.kinds import axes_used
from shardrules._plan.memory import (
    DTYPES,
    DeviceBytes,
    Room,
    Training,
    by_class,
    guesses_shown,
    room_of,
)
from shardrules._plan.resolve import sized_mesh
from shardrules._program.topologies.topology import Topology

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._plan.report import Page

_MOST_MESHES: Final = 10_000
_SIZES: Final = "a dict of axis sizes"
# Bytes that differ by less than this part are a tie, and so are those that differ by less than this
# part of a device's memory: activations take more.
_TIE: Final = 0.05
_COLUMNS: Final = (
    Column("mesh"),
    Column("devices", is_right=True, is_optional=True),
    Column("per device", is_right=True),
    Column("replicated", is_right=True, is_optional=True),
    Column("corrections", is_right=True, is_optional=True),
    Column("memory"),
    Column("largest replicated leaf", is_elided=True),
)


@record
class SweepRow(NamedTuple):
    """Bytes and corrections on one mesh."""

    mesh: dict[str, int]
    devices: int
    bytes: int
    """Bytes on the device that holds most."""
    replicated: int
    """Of these, bytes of the arrays that no mesh axis cuts."""
    largest_replicated: str | None
    """Folded path of the largest leaf that no mesh axis cuts."""
    largest_replicated_bytes: int
    corrections: int
    """The number of leaves that lose axes of their rule's spec."""
    problems: int
    """The number of leaves that get no spec. They count as replicated; or, where the mesh lacks
    axes of their rule, as if it did not name them."""
    fits: bool | None
    """Whether the bytes fit into the memory of the device and of its host; None if neither was
    given."""
    host_bytes: int = 0
    """Bytes in the host's memory for the device that has most there."""


class Sweep(Answer[SweepRow]):
    """A row for each mesh, the best first; `Plan.sweep` says which that is."""

    _guessed: Mapping[str, tuple[str, ...]] = {}
    """As `DeviceBytes.guessed`."""

    @property
    def notes(self) -> list[str]:
        """Lines with what names alone tell of the bytes."""
        return [printable(line) for line in guesses_shown(self._guessed)]

    def _json(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def _body(self) -> list[Table | str]:
        return [sweep_table(self)]

    def _section(self, page: Page) -> Section:
        mine = page.bytes.max, page.bytes.max_host
        for row in self:
            if page.plan._is_on(row.mesh) and (row.bytes, row.host_bytes) != mine:
                raise ValueError(
                    f"the sweep counts {row.bytes:,} bytes on the fullest device of this plan's "
                    f"mesh and {row.host_bytes:,} on the host, the report {mine[0]:,} and "
                    f"{mine[1]:,}: give both the same gradients=, optimizer= and "
                    "optimizer_memory_kind="
                )
        return Section("Meshes", (self,))


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """Return a row for each mesh, without the columns that no row has."""
    if not rows:
        return Table([Column("no meshes")], [])
    has_verdicts = any(row.fits is not None for row in rows)
    kept = [n for n, column in enumerate(_COLUMNS) if has_verdicts or column.head != "memory"]
    cells = map(_sweep_cells, rows)
    return Table([_COLUMNS[n] for n in kept], ([line[n] for n in kept] for line in cells))


def _sweep_cells(row: SweepRow) -> tuple[str, ...]:
    host = f" + {bytes_shown(row.host_bytes)} on the host" if row.host_bytes else ""
    largest = row.largest_replicated
    return (
        printable(mesh_shown(row.mesh)),
        f"{row.devices:,}",
        bytes_shown(row.bytes) + host,
        bytes_shown(row.replicated),
        f"{row.corrections:,}",
        {None: "", True: "fits", False: "does not fit"}[row.fits],
        printable(f"{largest}  {bytes_shown(row.largest_replicated_bytes)}") if largest else "-",
    )


def sweep_meshes(
    plan: Plan,
    meshes: Iterable[Mapping[str, int]] | None,
    *,
    devices: int | str | Topology | None,
    axes: Iterable[str] | None,
    fixed: Mapping[str, int] | None,
    hbm: float | str | None,
    host_memory: float | str | None,
    gradients: Any,
    optimizer: Iterable[Any] | None,
    optimizer_memory_kind: MemoryKind | None,
) -> Sweep:
    """See `Plan.sweep`."""
    if isinstance(devices, str):
        try:
            devices = Topology(devices)
        except ValueError as error:
            raise ValueError(f"devices: {error}") from error
    if isinstance(devices, Topology):
        if meshes is not None or fixed is not None:
            name = "fixed" if meshes is None else "meshes"
            raise ValueError(f"{name}: the meshes are those of the topology, so leave it out")
        hbm = devices.hardware.memory_bytes if hbm is None else hbm
        meshes = devices.meshes(tuple(plan.axis_sizes) if axes is None else strings("axes", axes))
    elif meshes is None:
        meshes = _factorizations(plan, devices, axes, fixed)
    else:
        check_type("fixed", fixed, Mapping | None, _SIZES)
        if isinstance(meshes, Mapping):
            raise TypeError(f"meshes is one mesh: write sweep([{brief(meshes)}])")
        check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")
    room = room_of(hbm, host_memory)
    moments = None if optimizer is None else as_tuple("optimizer", optimizer, DTYPES)
    training = Training(gradients, moments, optimizer_memory_kind)
    tried = list(itertools.islice(meshes, _MOST_MESHES + 1))
    if len(tried) > _MOST_MESHES:
        raise ValueError(f"a sweep covers at most {_MOST_MESHES:,} meshes; give fewer axes")
    may_lack = frozenset(axis for mesh in tried if isinstance(mesh, Mapping) for axis in mesh)
    may_lack |= plan.axis_sizes.keys()
    rows = []
    guessed: Mapping[str, tuple[str, ...]] = {}
    for mesh in tried:
        there = plan._on(sized_mesh(mesh)._replace(may_lack=may_lack))
        device_bytes = by_class(there, training)
        whole = by_class(there, training, only_whole=True)
        rows.append(_sweep_row(there, device_bytes, whole.max, room))
        guessed = device_bytes.guessed
    return Sweep(_best_first(rows, _TIE * (room.hbm or 0)), _guessed=guessed)


def _factorizations(
    plan: Plan,
    devices: int | None,
    axes: Iterable[str] | None,
    fixed: Mapping[str, int] | None,
) -> Iterator[dict[str, int]]:
    """Return the meshes of so many devices over axes of the plan, or others."""
    check_type("fixed", fixed, Mapping | None, _SIZES)
    sizes = checked_sizes(fixed) if fixed else {}
    names = tuple(axis for axis in plan.axis_sizes if axis not in sizes)
    names = names if axes is None else strings("axes", axes)
    missing = plan.axis_sizes.keys() - {*names, *sizes}
    for axis in {*names, *sizes} - plan.axis_sizes.keys():
        if meant := nearest(axis, missing):
            raise ValueError(
                f"the plan's mesh has no axis {axis!r}; did you mean {meant!r}? Its axes are "
                f"{', '.join(plan.axis_sizes)}"
            )
    count = plan.devices if devices is None else integer("devices", devices, 1)
    return factorizations(count, names, sizes)


def _best_first(rows: list[SweepRow], margin: float) -> Iterator[SweepRow]:
    """Yield rows without problems and that fit first, then those with the fewest bytes.

    Bytes that differ by less than `_TIE`, or than the margin among those that fit, are a tie.
    """
    best = sorted(rows, key=lambda row: (*_usable(row), _held_bytes(row), row.devices))
    for _, alike in itertools.groupby(best, key=_usable):
        remaining = [*alike]
        while remaining:
            least = _held_bytes(remaining[0])
            most = least + max(_TIE * least, margin if remaining[0].fits else 0)
            tied = [row for row in remaining if _held_bytes(row) <= most]
            remaining = remaining[len(tied) :]
            yield from sorted(tied, key=_preference)


def _usable(row: SweepRow) -> tuple[int, bool]:
    return row.problems, row.fits is False


def _held_bytes(row: SweepRow) -> int:
    return row.bytes + row.host_bytes


def _preference(row: SweepRow) -> tuple[float, ...]:
    """Return of equal costs: less tensor parallelism, fewer corrections, less memory."""
    # By how much axes that do not split tokens cut the arrays.
    tensor_devices = row.devices // prod(row.mesh[axis] for axis in data_axes_among(row.mesh))
    return tensor_devices, row.corrections, _held_bytes(row)


def factorizations(
    devices: int, axes: tuple[str, ...], fixed: Mapping[str, int]
) -> Iterator[dict[str, int]]:
    """Return all meshes of that many devices with these axes, in order, and then the fixed ones."""
    names = (*axes, *fixed)
    if not axes or len(set(names)) < len(names):
        raise ValueError(f"the axes of a mesh are names, each once, not {names}")
    check_bounds({"devices": devices})
    if devices < 1:
        raise ValueError(f"a mesh has at least 1 device, not {devices}")
    each, rest = divmod(devices, prod(fixed.values()))
    if each < 1 or rest:
        raise ValueError(
            f"{counted(devices, 'device')} cannot make a mesh with {mesh_shown(fixed) or axes}; "
            f"give sizes whose product divides {devices}"
        )
    shapes = mesh_shapes(each, len(axes))
    return ({**dict(zip(axes, shape, strict=True)), **fixed} for shape in shapes)


def _sweep_row(plan: Plan, device_bytes: DeviceBytes, replicated: int, room: Room) -> SweepRow:
    counted = list(zip(plan.kinds, plan.counts.tolist(), strict=True))
    is_whole = [not axes_used(kind._counted, plan.axis_sizes) for kind in plan.kinds]
    folded = [part for part in plan.folded if is_whole[part.group]]
    largest = max(folded, key=lambda part: plan.kinds[part.group].device_bytes, default=None)
    return SweepRow(
        mesh=plan.axis_sizes,
        devices=plan.devices,
        bytes=device_bytes.max,
        replicated=replicated,
        largest_replicated=largest.pattern if largest else None,
        largest_replicated_bytes=plan.kinds[largest.group].device_bytes if largest else 0,
        corrections=sum(count for kind, count in counted if kind.losses),
        problems=sum(count for kind, count in counted if kind.status != "placed"),
        fits=room.fits(device_bytes),
        host_bytes=device_bytes.max_host,
    )
