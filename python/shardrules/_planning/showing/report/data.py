"""The content of a report, as plain values for JSON: kinds, folded rows, rules, findings, meshes.

Costs per folded row, not per leaf. Must not know HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from shardrules._correction import rule_spec_shown
from shardrules._format import seconds_shown
from shardrules._planning.asking.defaults import DEFAULT_LARGE
from shardrules._planning.asking.findings import conclusion
from shardrules._planning.kinds import (
    Kind,
    decided_shown,
    dtype_shown,
    is_replicated,
    placement_shown,
    problem_shown,
)
from shardrules._planning.locks.write import fingerprint
from shardrules._specs import spec_shown

if TYPE_CHECKING:
    from shardrules._matching.match_modes import Pattern
    from shardrules._planning.asking.budget import DeviceBytes, Room
    from shardrules._planning.asking.findings import Findings
    from shardrules._planning.asking.sweep import Sweep, SweepRow
    from shardrules._planning.columns import Columns

__all__ = ["Proposal", "Proposed", "report_data"]


@runtime_checkable
class Proposal(Protocol):
    """Rules that could take the place of a plan's: all that is known here of a `Suggestion`."""

    @property
    def plan(self) -> Any:
        """The plan of the same leaves under these rules."""
        ...

    @property
    def reasons(self) -> tuple[object, ...]:
        """Per rule why it says what it says; `str` gives it in words."""
        ...


class Proposed(NamedTuple):
    """What the page shows of other rules for its leaves."""

    columns: Columns
    held: DeviceBytes
    reasons: list[str]


def report_data(
    columns: Columns,
    findings: Findings,
    sweep: Sweep | None,
    title: str,
    *,
    room: Room,
    held: DeviceBytes,
    proposed: Proposed | None,
) -> dict[str, Any]:
    """Everything that a report shows; see `report_html`."""
    _check_same_budget(columns, sweep, held)
    specs: dict[tuple[str, bool], int] = {}
    return {
        "title": title,
        "mesh": columns.axis_sizes,
        "devices": columns.devices,
        "leaves": len(columns.paths),
        "bytes": columns.total_bytes,
        "fullest": held.max,
        "budget": {name: int(part.max()) for name, part in zip(held._fields, held, strict=True)},
        "fingerprint": fingerprint(columns),
        "hbm": room.hbm,
        "fits": None if (fits := room.fits(held)) is None else {"yes": fits, "room": str(room)},
        "separators": _separators(columns),
        "findings": [one._asdict() for one in findings],
        "conclusion": conclusion(findings),
        "rules": _rules(columns),
        "kinds": [_kind(kind, columns, specs) for kind in columns.kinds],
        "specs": [{"text": text, "replicated": whole} for text, whole in specs],
        "rows": _rows(columns),
        "sweep": None if sweep is None else [_sweep_row(row, columns) for row in sweep],
        "sweep_notes": [] if sweep is None else sweep.notes,
        "suggestion": None if proposed is None else {
            "reasons": proposed.reasons,
            "plans": [
                _plan_row("this plan", columns, held, room),
                _plan_row("suggested", proposed.columns, proposed.held, room),
            ],
        },
    }  # fmt: skip


def _rows(columns: Columns) -> dict[str, list[Any]]:
    """The folded rows as columns, which a browser parses in a fraction of the time of rows."""
    folded = columns.folded
    return {
        # A path, or the parts of a pattern: texts and sets of numbers by turns.
        "paths": [row.parts[0] if len(row.parts) == 1 else row.parts for row in folded],
        "kinds": [row.group for row in folded],
        "leaves": [len(row.rows) for row in folded],
    }


def _plan_row(name: str, columns: Columns, held: DeviceBytes, room: Room) -> dict[str, Any]:
    return {
        "name": name,
        "mesh": columns.axis_sizes,
        "rules": len(columns.rules),
        "bytes": held.max,
        "fits": room.fits(held),
    }


def _check_same_budget(columns: Columns, sweep: Sweep | None, held: DeviceBytes) -> None:
    mine = held.max, held.max_host
    for row in sweep or ():
        if columns.is_on(row.mesh) and (row.bytes, row.host_bytes) != mine:
            raise ValueError(
                f"the sweep counts {row.bytes:,} bytes on the fullest device of this plan's mesh "
                f"and {row.host_bytes:,} on the host, the report {mine[0]:,} and {mine[1]:,}: give "
                "both the same gradients=, optimizer= and optimizer_memory_kind="
            )


def _pattern_shown(pattern: Pattern) -> str:
    """A rule's pattern: a string as it is, anything else as Python writes it."""
    return pattern if isinstance(pattern, str) else repr(pattern)


def _separators(columns: Columns) -> str:
    """Before which characters a path comes apart into modules."""
    dialect = columns.leaves.paths_dialect
    if dialect.keys == "keystr":
        return "[."
    # A flat dict of checkpoint names has dots in its keys.
    return dialect.separator if any(dialect.separator in path for path in columns.paths) else "."


def _kind(kind: Kind, columns: Columns, specs: dict[tuple[str, bool], int]) -> dict[str, Any]:
    replicated = is_replicated(kind, columns.axis_sizes)
    return {
        "rule": kind.rule,
        "decided": decided_shown(kind),
        # As texts: a browser's numbers are exact up to 2**53.
        "shape": None if kind.shape is None else list(map(str, kind.shape)),
        "dtype": dtype_shown(kind),
        "spec": specs.setdefault((placement_shown(kind), replicated), len(specs)),
        "notes": [loss.message for loss in kind.losses],
        "problem": problem_shown(kind),
        "origin": kind.origin,
        "bytes": kind.bytes,
        "held": kind.device_bytes,
        "large": replicated and kind.bytes >= DEFAULT_LARGE,
    }


@dataclass(slots=True)
class _Share:
    """The leaves that a rule decides, and their bytes."""

    pattern: str
    spec: str
    rule: int | None = None
    leaves: int = 0
    bytes: int = 0
    held: int = 0


def _rules(columns: Columns) -> list[dict[str, Any]]:
    """The share of each rule; last that of no rule, if there is any."""
    shares = [
        _Share(_pattern_shown(pattern), _asked_shown(columns, i), i)
        for i, (pattern, _) in enumerate(columns.rules)
    ]
    free, lost = _Share("no rule is needed", "P()"), _Share("no rule decides", "-")
    for kind, count in zip(columns.kinds, columns.counts.tolist(), strict=True):
        ruleless = free if kind.status == "placed" else lost
        # Logical rules share a leaf, each with a dimension of it.
        for share in [shares[rule] for rule in kind.deciders] or [ruleless]:
            share.leaves += count
            share.bytes += count * kind.bytes
            share.held += count * kind.device_bytes
    shares += [share for share in (free, lost) if share.leaves]
    return [{name: getattr(share, name) for name in _Share.__slots__} for share in shares]


def _asked_shown(columns: Columns, rule: int) -> str:
    """What a rule asks for: a spec, and its memory kind if it has one."""
    if columns.leaves.path_rules is None:
        return spec_shown(columns.spec_of_rule(rule))
    return rule_spec_shown(columns.rules[rule][1])


def _sweep_row(row: SweepRow, columns: Columns) -> dict[str, Any]:
    time = row.time and {
        "shown": seconds_shown(row.time.total),
        "longest": row.time.dominant,
        "text": str(row.time),
    }
    return {**row._asdict(), "time": time, "current": row.mesh == columns.axis_sizes}
