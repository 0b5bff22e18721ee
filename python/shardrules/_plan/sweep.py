"""`Sweep`: one rule list on many meshes, the bytes on each, and what fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.arguments import (
    check_bounds,
    check_items,
    check_type,
    checked_sizes,
    integer,
    mesh_shapes,
    strings,
)
from shardrules._base.text import brief, bytes_shown, mesh_shown, nearest, printable, record
from shardrules._plan.answers import Answer, Column, Section, Table
from shardrules._plan.memory import Training
from shardrules._plan.path_words import data_axes_among
from shardrules._program.topologies.topology import Topology

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._plan.report import Page

_MOST_MESHES: Final = 10_000
# Bytes that differ by less than this part are a tie, and so are those that differ by less than this
# part of a device's memory: activations take more.
_TIE: Final = 0.05
_COLUMNS: Final = (
    Column("mesh"),
    Column("devices", is_right=True),
    Column("per device", is_right=True),
    Column("replicated", is_right=True),
    Column("corrections", is_right=True),
    Column("memory"),
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
    corrections: int
    """The number of leaves that lose axes of their rule's spec."""
    problems: int
    """The number of leaves that get no spec. They count as replicated; or, where the mesh lacks
    axes of their rule, as if it did not name them."""
    fits: bool | None
    """Whether the bytes fit into the memory of the device; None if it was not given."""
    host_bytes: int = 0
    """Bytes in the host's memory for the device that has most there."""


class Sweep(Answer[SweepRow]):
    """A row for each mesh, the best first; `Plan.sweep` says which that is."""

    _heads: tuple[str, ...] = ()
    """As `few_heads_notes`."""

    @property
    def notes(self) -> list[str]:
        """Lines on axes of more devices than heads."""
        return [*map(printable, self._heads)]

    def _json(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def _body(self) -> list[Table | str]:
        return [Table(_COLUMNS, map(_sweep_cells, self))] if self else ["no meshes"]

    def _section(self, page: Page) -> Section:
        mine = page.bytes.max, page.bytes.host
        here = _apart(page.plan.axis_sizes)
        for row in self:
            if _apart(row.mesh) == here and (row.bytes, row.host_bytes) != mine:
                raise ValueError(
                    f"the sweep counts {row.bytes:,} bytes on the fullest device of this plan's "
                    f"mesh and {row.host_bytes:,} on the host, the report {mine[0]:,} and "
                    f"{mine[1]:,}: give both the same gradients= and optimizer="
                )
        return Section("Meshes", (self,))


def _apart(mesh: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the axes of the mesh that tell devices apart."""
    return [(axis, size) for axis, size in mesh.items() if size > 1]


def _sweep_cells(row: SweepRow) -> tuple[str, ...]:
    host = f" + {bytes_shown(row.host_bytes)} on the host" if row.host_bytes else ""
    return (
        printable(mesh_shown(row.mesh)),
        f"{row.devices:,}",
        bytes_shown(row.bytes) + host,
        bytes_shown(row.replicated),
        f"{row.corrections:,}",
        {None: "-", True: "fits", False: "does not fit"}[row.fits],
    )


def sweep_meshes(
    plan: Plan,
    meshes: Iterable[Mapping[str, int]] | None,
    *,
    devices: int | str | Topology | None,
    axes: Iterable[str] | None,
    hbm: int | None,
    training: Training,
) -> Sweep:
    """See `Plan.sweep`."""
    if isinstance(devices, str):
        try:
            devices = Topology(devices)
        except ValueError as error:
            raise ValueError(f"devices: {error}") from error
    names = tuple(plan.axis_sizes) if axes is None else strings("axes", axes)
    if isinstance(devices, Topology):
        if meshes is not None:
            raise ValueError("meshes: they are those of the topology, so leave it out")
        hbm = devices.hardware.memory_bytes if hbm is None else hbm
        meshes = devices.meshes(names)
    elif meshes is None:
        _check_axis_names(plan, names)
        count = plan.devices if devices is None else integer("devices", devices, 1)
        meshes = factorizations(count, names)
    else:
        if isinstance(meshes, Mapping):
            raise TypeError(f"meshes is one mesh: write sweep([{brief(meshes)}])")
        check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")
    candidates = tuple(itertools.islice(meshes, _MOST_MESHES + 1))
    if len(candidates) > _MOST_MESHES:
        raise ValueError(f"a sweep covers at most {_MOST_MESHES:,} meshes; give fewer axes")
    check_items("meshes", candidates, Mapping, "a dict of axis sizes")
    sizes = list(map(checked_sizes, candidates))
    # Where rules name an axis that a mesh lacks, one device along it is what is meant.
    ones = dict.fromkeys([axis for mesh in (plan.axis_sizes, *sizes) for axis in mesh], 1)
    full = [{**mesh, **{axis: 1 for axis in ones if axis not in mesh}} for mesh in sizes]
    plans = [(plan.on_mesh(mesh), training.on(mesh)) for mesh in full]
    rows = [_sweep_row(*pair, hbm) for pair in plans]
    heads = few_heads_notes(on_mesh for on_mesh, _ in plans)
    best = _best_first(rows, _TIE * (hbm or 0))
    return Sweep(best, _heads=heads)


def few_heads_notes(plans: Iterable[Plan]) -> tuple[str, ...]:
    """Say for axes of more devices than an array has heads what to sweep in their place."""
    notes: dict[str, tuple[int, str]] = {}  # of the smallest size of the axis
    for plan in plans:
        for loss in (loss for kind in plan.kinds for loss in kind.losses if loss.few_heads):
            (axis,) = loss.axes
            devices = plan.axis_sizes[axis]
            note = devices, f"few heads on {axis}={devices}: {loss.few_heads}"
            notes[axis] = min(note, notes.get(axis, note))
    return tuple(f"{note}; then sweep these axes" for _, note in notes.values())


def _check_axis_names(plan: Plan, names: tuple[str, ...]) -> None:
    """Refuse an axis that is a misspelling of one of the plan's, which is not among them."""
    missing = plan.axis_sizes.keys() - set(names)
    for axis in set(names) - plan.axis_sizes.keys():
        if meant := nearest(axis, missing):
            raise ValueError(
                f"the plan's mesh has no axis {axis!r}; did you mean {meant!r}? Its axes are "
                f"{', '.join(plan.axis_sizes)}"
            )


def _best_first(rows: list[SweepRow], margin: float) -> Iterator[SweepRow]:
    """Yield rows without problems and that fit first, then those with the fewest bytes.

    Bytes that differ by less than `_TIE`, or than the margin among those that fit, are a tie.
    """
    best = sorted(rows, key=lambda row: (*_usable(row), _held_bytes(row), row.devices))
    for _, group in itertools.groupby(best, key=_usable):
        remaining = [*group]
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


def factorizations(devices: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Return all meshes of that many devices with these axes, in order."""
    if not axes or len(set(axes)) < len(axes):
        raise ValueError(f"the axes of a mesh are names, each once, not {axes}")
    check_bounds({"devices": devices})
    return (dict(zip(axes, shape, strict=True)) for shape in mesh_shapes(devices, len(axes)))


def _sweep_row(plan: Plan, training: Training, hbm: int | None) -> SweepRow:
    size = training.bytes_with(plan)
    leaves = list(zip(plan.kinds, plan.counts.tolist(), strict=True))
    return SweepRow(
        mesh=plan.axis_sizes,
        devices=plan.devices,
        bytes=size.max,
        replicated=training.bytes_with(plan, only_whole=True).max,
        corrections=sum(count for kind, count in leaves if kind.losses),
        problems=sum(count for kind, count in leaves if kind.status != "placed"),
        fits=size._fits(hbm),
        host_bytes=size.host,
    )
