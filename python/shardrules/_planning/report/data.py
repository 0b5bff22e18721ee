"""What a report shows, as plain values for JSON: kinds, folded rows, rules, findings, meshes.

Costs per folded row, not per leaf. Must not know HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardrules._correction import plain_spec
from shardrules._planning.check import DEFAULT_LARGE
from shardrules._planning.kinds import Kind, is_replicated, spec_shown

if TYPE_CHECKING:
    from shardrules._matching.rules import Pattern
    from shardrules._planning.budget import DeviceBytes
    from shardrules._planning.findings import Findings
    from shardrules._planning.plan import Plan
    from shardrules._planning.sweep import Sweep, SweepRow

__all__ = ["report_data"]


def report_data(
    plan: Plan,
    findings: Findings,
    sweep: Sweep | None,
    title: str,
    *,
    hbm: int | None,
    held: DeviceBytes,
) -> dict[str, Any]:
    """Everything that a report shows; see `report_html`."""
    _check_same_budget(plan, sweep, held)
    specs: dict[tuple[str, bool], int] = {}
    return {
        "title": title,
        "mesh": plan.axis_sizes,
        "devices": plan.devices,
        "leaves": len(plan.paths),
        "bytes": plan.total_bytes,
        "fullest": held.max,
        "budget": {name: int(part.max()) for name, part in zip(held._fields, held, strict=True)},
        "fingerprint": plan.fingerprint(),
        "hbm": hbm,
        "separators": _separators(plan),
        "findings": [one._asdict() for one in findings],
        "rules": _rules(plan),
        "kinds": [_kind(kind, plan, specs) for kind in plan.kinds],
        "specs": [{"text": text, "replicated": whole} for text, whole in specs],
        "rows": [[row.parts, row.group, len(row.rows)] for row in plan.folded],
        "sweep": None if sweep is None else [_sweep_row(row, plan) for row in sweep],
    }


def _check_same_budget(plan: Plan, sweep: Sweep | None, held: DeviceBytes) -> None:
    for row in sweep or ():
        if list(row.mesh.items()) == list(plan.axis_sizes.items()) and row.bytes != held.max:
            raise ValueError(
                f"the sweep counts {row.bytes:,} bytes on the fullest device of this plan's mesh, "
                f"the report {held.max:,}: give both the same gradients= and optimizer="
            )


def _pattern_shown(pattern: Pattern) -> str:
    """A rule's pattern: a string as it is, anything else as Python writes it."""
    return pattern if isinstance(pattern, str) else repr(pattern)


def _separators(plan: Plan) -> str:
    """Before which characters a path comes apart into modules."""
    dialect = plan.rules.dialect
    if dialect.keys == "keystr":
        return "[."
    # A flat dict of checkpoint names has dots in its keys.
    return dialect.separator if any(dialect.separator in path for path in plan.paths) else "."


def _kind(kind: Kind, plan: Plan, specs: dict[tuple[str, bool], int]) -> dict[str, Any]:
    replicated = is_replicated(kind, plan.axis_sizes)
    return {
        "rule": kind.rule,
        # As texts: a browser's numbers are exact up to 2**53.
        "shape": None if kind.shape is None else list(map(str, kind.shape)),
        "dtype": kind.dtype_shown,
        "spec": specs.setdefault((spec_shown(kind.spec), replicated), len(specs)),
        "notes": [what for what, _ in kind.notes],
        "problem": kind.problem,
        "origin": kind.origin,
        "bytes": kind.bytes,
        "held": kind.largest_bytes,
        "large": replicated and kind.bytes >= DEFAULT_LARGE,
    }


@dataclass(slots=True)
class _Share:
    """What a rule has decided."""

    pattern: str
    spec: str
    rule: int | None = None
    leaves: int = 0
    bytes: int = 0
    held: int = 0


def _rules(plan: Plan) -> list[dict[str, Any]]:
    """Per rule what it has decided; then what no rule has, if there is any."""
    shares = [
        _Share(_pattern_shown(pattern), spec_shown(plain_spec(spec)), i)
        for i, (pattern, spec) in enumerate(plan.rules)
    ]
    free, lost = _Share("no rule is needed", "P()"), _Share("no rule decides", "-")
    for kind, count in zip(plan.kinds, plan.counts.tolist(), strict=True):
        ruleless = free if kind.problem is None else lost
        share = ruleless if kind.rule is None else shares[kind.rule]
        share.leaves += count
        share.bytes += count * kind.bytes
        share.held += count * kind.largest_bytes
    shares += [share for share in (free, lost) if share.leaves]
    return [{name: getattr(share, name) for name in _Share.__slots__} for share in shares]


def _sweep_row(row: SweepRow, plan: Plan) -> dict[str, Any]:
    return {**row._asdict(), "current": row.mesh == plan.axis_sizes}
