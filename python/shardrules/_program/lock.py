"""Locks of programs: bytes sent by mesh axes and kind, and the peak, as JSON; what has grown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, get_args

from msgspec import Meta

from shardrules._base.arguments import check_choice, check_share, checked_sizes, integer
from shardrules._base.io import parse_json
from shardrules._base.text import and_more, bytes_shown, counted, mesh_shown, shown
from shardrules._plan.codec import FileTable, Listed, Texts, naming, naming_place, record_of
from shardrules._plan.findings import Finding, Findings, Level
from shardrules._plan.lock import lines_of
from shardrules._program.executable import Executable
from shardrules._program.hlo import Collective, CollectiveOpcode
from shardrules._program.libraries import StoredProgram
from shardrules._program.memory import totals_of

KINDS: Final = get_args(CollectiveOpcode)
_PER_ITERATION: Final = " per iteration"
"""Behind the kind of collectives in a loop of unknown trip count, which counts once."""
_FORMAT: Final = "shardrules program lock 1"
_FIX: Final = "make the lock again: Program.lock, or shardrules prove --update-lock"
_GROWN: Final = "look at what has changed there; or, if it is meant, make the lock again"
_NAMED: Final = 3

Key = tuple[tuple[str, ...], str]
"""Mesh axes and kind of collectives, such as "all-gather" or "all-gather per iteration"."""


class Costs(NamedTuple):
    """What a step costs a device: the content of a lock."""

    versions: Mapping[str, str]
    mesh: Mapping[str, int]
    peak: int | None
    peak_by: str
    """By which of `COUNTS` the peak is counted."""
    sent: Mapping[Key, int]
    """Bytes that a device sends in a step."""


COUNTS: Final = ("assigned", "memory_analysis")
"""The compiler's own bytes, of `prove`; and those of `Compiled.memory_analysis`, which adds a TPU's
on-chip memory."""


class _LockTable(FileTable, kw_only=True):
    format: str
    versions: Annotated[dict[str, str], Meta(description="a table of texts")]
    mesh: Annotated[dict[str, Any], Meta(description="a table of axes and their sizes")]
    peak: Any
    peak_by: Any = COUNTS[1]
    sent: Listed


class _SentTable(FileTable):
    axes: Texts
    kind: Any
    bytes: Any


def costs_of(executable: Executable, rows: Sequence[Collective]) -> Costs:
    """Sum up the collectives of a program."""
    import jax
    from jaxlib.version import __version__ as jaxlib_version

    mesh = executable.mesh
    versions = {"jax": jax.__version__, "jaxlib": jaxlib_version}
    if mesh is not None:
        versions["devices"] = executable.device_kind
    sent: Counter[Key] = Counter()
    for row in rows:
        sent[_key_of(row)] += row.sent_at_least
    sizes = {} if mesh is None else dict(mesh.shape)
    totals = totals_of(executable)
    is_assigned = isinstance(executable.call.compiled, StoredProgram)
    return Costs(versions, sizes, totals and totals.peak, COUNTS[not is_assigned], sent)


def _key_of(row: Collective) -> Key:
    return row.axes, row.kind + _PER_ITERATION * (row.times is None)


def program_lock_text(costs: Costs) -> str:
    """Return the text of a lock."""
    entries = [
        {"axes": axes, "kind": kind, "bytes": size}
        for (axes, kind), size in sorted(costs.sent.items())
    ]
    head = {"format": _FORMAT} | {name: getattr(costs, name) for name in Costs._fields[:4]}
    return lines_of(head, sent=map(json.dumps, entries))


def read_program_lock(data: bytes, name: str) -> Costs:
    """Read a lock."""
    content = parse_json(Path(name), data)
    with naming(name, f"; {_FIX}"):
        form = content.get("format") if isinstance(content, dict) else None
        if isinstance(form, str) and form.startswith("shardrules lock"):
            raise ValueError("not a lock of a program, but of a plan, which Plan.diff compares")
        if form != _FORMAT:
            raise ValueError(f"not a lock of a program: its format is {shown(form)}, not {_FORMAT}")
        table = record_of("", content, _LockTable, "it")
        mesh = checked_sizes(table.mesh) if table.mesh else {}
        peak = None if table.peak is None else integer("peak", table.peak)
        check_choice("peak_by", table.peak_by, COUNTS)
        sent: dict[Key, int] = {}
        for number, entry in enumerate(table.sent):
            where = f"sent[{number}]: "
            cost = record_of(where, entry, _SentTable)
            with naming_place(where):
                key = _key_in_lock(cost, mesh)
                if key in sent:
                    raise ValueError(f"{_key_label(key)} stands there twice")
                sent[key] = integer("bytes", cost.bytes)
    return Costs(table.versions, mesh, peak, table.peak_by, sent)


def _key_in_lock(cost: _SentTable, mesh: Mapping[str, int]) -> Key:
    if cost.axes != tuple(axis for axis in mesh if axis in cost.axes):
        axes = ", ".join(cost.axes)
        raise ValueError(
            f"its axes are {axes}, of {', '.join(mesh)}: each stands there once, in mesh order"
        )
    check_choice("kind", cost.kind, (*KINDS, *(kind + _PER_ITERATION for kind in KINDS)))
    return cost.axes, cost.kind


def compared(
    now: Costs, before: Costs, rows: Sequence[Collective], tolerance: float, name: str
) -> Findings:
    """Find what has grown, and what has shrunk."""
    check_share("tolerance", tolerance, "0.02")
    findings = list(_changes(now, before, rows, tolerance, name))
    versions = ((key, before.versions.get(key, "?"), new) for key, new in now.versions.items())
    changed = [f"{key} {old} -> {new}" for key, old, new in versions if old != new]
    if findings and changed:
        message = f"{name} was made with other versions: {', '.join(changed)}"
        findings.append(budget_finding("info", message, 0, "versions may explain what has changed"))
    peak = "the peak" if now.peak is not None else "no peak, which the backend does not tell,"
    sums = counted(len(now.sent.keys() | before.sent.keys()), "sum")
    return Findings(findings, f"{sums} of bytes and {peak} compared with {name}")


def _changes(
    now: Costs, before: Costs, rows: Sequence[Collective], tolerance: float, name: str
) -> Iterator[Finding]:
    if list(now.mesh.items()) != list(before.mesh.items()):
        meshes = f"{mesh_shown(before.mesh)} -> {mesh_shown(now.mesh)}"
        message = f"{name} is of another mesh, {meshes}: nothing else is compared"
        yield budget_finding("error", message, 0, _FIX)
        return
    for key in sorted(now.sent.keys() | before.sent.keys()):
        new, old = now.sent.get(key, 0), before.sent.get(key, 0)
        what = f"{_key_label(key)}: each device sends {bytes_shown(new)} in a step"
        of_key = [row for row in rows if _key_of(row) == key]
        yield from _change_of_bytes(what, new, old, tolerance, most_sent(of_key))
    if now.peak and before.peak and now.peak_by != before.peak_by:
        message = (
            f"the peak is counted by {now.peak_by}, and in {name} by {before.peak_by}: these are "
            "not compared"
        )
        yield budget_finding("warning", message, 0, _FIX)
    elif now.peak is not None and before.peak is not None:
        what = f"peak: each device needs {bytes_shown(now.peak)}"
        yield from _change_of_bytes(what, now.peak, before.peak, tolerance, "")
    elif now.peak != before.peak:
        where = "now, as this backend does not tell it" if now.peak is None else f"in {name}"
        message = f"the peak is not known {where}: it is not compared"
        yield budget_finding("warning", message, 0, _FIX)


def _change_of_bytes(
    what: str, new: int, old: int, tolerance: float, rows: str
) -> Iterator[Finding]:
    if abs(new - old) <= tolerance * old:
        return
    share = f" ({100 * (new - old) / old:+.3g} %)" if old else ""
    message = f"{what}, {bytes_shown(old)} before{share}{rows and f': {rows}'}"
    if new > old:
        yield budget_finding("error", message, new - old, _GROWN)
    else:
        yield budget_finding("info", message, 0, f"to keep it so, {_FIX}")


def _key_label(key: Key) -> str:
    axes, kind = key
    return f"{kind} over {','.join(axes) or 'an unknown axis'}"


def budget_finding(level: Level, message: str, size: int, fix: str) -> Finding:
    """Make a finding about the bytes of a program."""
    return Finding(level, "budget", message, fix, bytes=size)


def most_sent(rows: Sequence[Collective]) -> str:
    """Name the collectives that send most, with their bytes and lines."""
    names = [f"{bytes_shown(row.sent_at_least)} by {row}" for row in rows[:_NAMED]]
    return "; ".join([*names, *and_more(len(rows), _NAMED, "collective")])
