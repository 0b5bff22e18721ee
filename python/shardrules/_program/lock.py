"""Locks of programs: bytes sent by mesh axes and kind, and the peak, as JSON; what has grown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, get_args

import jax
import msgspec
from msgspec import Meta

from shardrules._base.arguments import check_share
from shardrules._base.io import parse_json
from shardrules._base.text import and_more, bytes_shown, counted, mesh_shown, shown
from shardrules._plan.codec import FileTable, naming, record_of
from shardrules._plan.findings import Finding, Findings, Level
from shardrules._program.executable import Executable
from shardrules._program.hlo import Collective, CollectiveOpcode
from shardrules._program.libraries import StoredProgram
from shardrules._program.memory import totals_of

KINDS: Final = get_args(CollectiveOpcode)
_FORMAT: Final = "shardrules program lock 2"
_FIX: Final = "make the lock again: Program.lock, or shardrules prove --update-lock"
_GROWN: Final = "look at what has changed there; or, if it is meant, make the lock again"
_NAMED: Final = 3


_Size = Annotated[int, Meta(ge=1, description="a table of axes and their sizes")]
_Bytes = Annotated[int, Meta(ge=0, description="numbers of bytes")]


class Costs(FileTable, kw_only=True):
    """What a step costs a device: the content of a lock."""

    format: str = _FORMAT
    versions: dict[str, str]
    mesh: dict[str, _Size]
    peak: _Bytes | None
    peak_by: Literal["assigned", "memory_analysis"]
    """Whether the peak is the compiler's own, of `prove`; or that of `Compiled.memory_analysis`,
    which adds a TPU's on-chip memory."""
    sent: dict[str, _Bytes]
    """Bytes that a device sends in a step, by kind of collective and mesh axes, as `_key_of`."""


def costs_of(executable: Executable, rows: Sequence[Collective]) -> Costs:
    """Sum up the collectives of a program."""
    mesh, totals = executable.mesh, totals_of(executable.call.compiled)
    versions = {"jax": jax.__version__}
    if mesh is not None:
        versions["devices"] = executable.device_kind
    sent: Counter[str] = Counter()
    for row in rows:
        sent[_key_of(row)] += row.sent_at_least
    is_assigned = isinstance(executable.call.compiled, StoredProgram)
    return Costs(
        versions=versions,
        mesh={} if mesh is None else dict(mesh.shape),
        peak=totals and totals.peak,
        peak_by="assigned" if is_assigned else "memory_analysis",
        sent=dict(sorted(sent.items())),
    )


def _key_of(row: Collective) -> str:
    """Name a sum, such as "all-gather over fsdp,tp"; in a loop of unknown length it counts once."""
    loop = " per iteration" * (row.times is None)
    return f"{row.kind}{loop} over {','.join(row.axes) or 'an unknown axis'}"


def program_lock_text(costs: Costs) -> str:
    """Return the text of a lock: a line for each number."""
    return json.dumps(msgspec.to_builtins(costs), indent=1) + "\n"


def read_program_lock(data: bytes, name: str) -> Costs:
    """Read a lock."""
    content = parse_json(Path(name), data)
    with naming(name, f"; {_FIX}"):
        form = content.get("format") if isinstance(content, dict) else None
        if form != _FORMAT:
            raise ValueError(f"not a lock of a program: its format is {shown(form)}, not {_FORMAT}")
        return record_of("", content, Costs, "it")


def compared(
    now: Costs, before: Costs, rows: Sequence[Collective], tolerance: float, name: str
) -> Findings:
    """Find what has grown, and what has shrunk."""
    check_share("tolerance", tolerance, "0.02")
    findings = list(_changes(now, before, rows, tolerance, name))
    versions = ((key, before.versions.get(key, "?"), new) for key, new in now.versions.items())
    others = [f"{key} {old} -> {new}" for key, old, new in versions if old != new]
    if findings and others:
        message = f"{name} was made with other versions: {', '.join(others)}"
        findings.append(_finding("info", message, "versions may explain what has changed"))
    peak = "the peak" if now.peak is not None else "no peak, which the backend does not tell,"
    sums = counted(len(now.sent.keys() | before.sent.keys()), "sum")
    return Findings(findings, f"{sums} of bytes and {peak} compared with {name}")


def _changes(
    now: Costs, before: Costs, rows: Sequence[Collective], tolerance: float, name: str
) -> Iterator[Finding]:
    if list(now.mesh.items()) != list(before.mesh.items()):
        meshes = f"{mesh_shown(before.mesh)} -> {mesh_shown(now.mesh)}"
        message = f"{name} is of another mesh, {meshes}: nothing else is compared"
        yield _finding("error", message)
        return
    numbers = [
        (f"{key}: each device sends", now.sent.get(key, 0), before.sent.get(key, 0), key)
        for key in sorted(now.sent.keys() | before.sent.keys())
    ]
    if now.peak is not None and before.peak is not None and now.peak_by == before.peak_by:
        numbers.append(("peak: each device needs", now.peak, before.peak, ""))
    elif now.peak != before.peak:
        here, there = (f"{costs.peak} by {costs.peak_by}" for costs in (now, before))
        message = f"the peak is {here}, and in {name} {there}: these are not compared"
        yield _finding("warning", message)
    for what, new, old, key in numbers:
        if abs(new - old) <= tolerance * old:
            continue
        share = f" ({100 * (new - old) / old:+.3g} %)" if old else ""
        sent = most_sent([row for row in rows if _key_of(row) == key])
        message = f"{what} {bytes_shown(new)} in a step, {bytes_shown(old)} before{share}"
        if new > old:
            yield _finding("error", f"{message}{sent and f': {sent}'}", _GROWN, new - old)
        else:
            yield _finding("info", message, f"to keep it so, {_FIX}")


def _finding(level: Level, message: str, fix: str = _FIX, size: int = 0) -> Finding:
    return Finding(level, "budget", message, fix, bytes=size)


def most_sent(rows: Sequence[Collective]) -> str:
    """Name the collectives that send most, with their bytes and lines."""
    names = [f"{bytes_shown(row.sent_at_least)} by {row}" for row in rows[:_NAMED]]
    return "; ".join([*names, *and_more(len(rows), _NAMED, "collective")])
