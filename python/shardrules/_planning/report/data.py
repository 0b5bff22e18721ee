"""What a report shows, as plain values for JSON: kinds, folded rows, rules, findings, meshes.

Costs per folded row, not per leaf. Must not know HTML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from shardrules._correction import RuleSpec
from shardrules._planning.kinds import Kind, axes_used, spec_shown
from shardrules._specs import check_choice

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan
    from shardrules._rules import Pattern

LEVELS: Final = ("error", "warning", "info")
# Below it, a whole copy on each device is what everyone does: norms, biases, small routers.
_LARGE: Final = 1_000_000
_SET: Final = re.compile(r"\{[0-9]+(?:\.\.[0-9]+)?(?:,[0-9]+(?:\.\.[0-9]+)?)*\}")
_NUMBER: Final = re.compile("[0-9]*")


class FindingLike(Protocol):
    """What is read of a finding."""

    @property
    def level(self) -> str:
        """One of "error", "warning" and "info"."""

    @property
    def kind(self) -> str:
        """Such as "catch-all"."""

    @property
    def message(self) -> str:
        """What is wrong."""

    @property
    def paths(self) -> Sequence[str]:
        """Of the leaves, folded."""

    @property
    def leaves(self) -> int:
        """How many."""

    @property
    def rule(self) -> int | None:
        """Index of the rule that it is about."""

    @property
    def bytes(self) -> int:
        """On each device, at stake."""

    @property
    def fix(self) -> str:
        """The way out."""


class SweepRowLike(Protocol):
    """What is read of a row of a sweep."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """Devices along each axis."""

    @property
    def devices(self) -> int:
        """Of the mesh."""

    @property
    def max_bytes(self) -> int:
        """On the fullest device."""

    @property
    def replicated_bytes(self) -> int:
        """Of these, of leaves that every device holds whole."""

    @property
    def corrections(self) -> int:
        """Leaves whose spec does not fit."""

    @property
    def fits(self) -> bool | None:
        """Into the memory; None where its size is not known."""


def report_data(
    plan: Plan,
    findings: Iterable[FindingLike],
    sweep: Iterable[SweepRowLike] | None,
    title: str,
    hbm: int | None,
) -> dict[str, Any]:
    """Everything that a report shows; see `report_html`."""
    specs: dict[tuple[str, bool], int] = {}
    return {
        "title": title,
        "mesh": plan.axis_sizes,
        "devices": plan.devices,
        "leaves": len(plan.paths),
        "bytes": int(plan.bytes.sum()),
        "fullest": plan.bytes_per_device().max,
        "fingerprint": getattr(plan, "fingerprint", None),
        "hbm": hbm,
        "separators": _separators(plan),
        "findings": _findings(findings),
        "rules": _rules(plan),
        "kinds": [_kind(kind, plan, specs) for kind in plan.kinds],
        "specs": [{"text": text, "replicated": whole} for text, whole in specs],
        "rows": [
            [pattern_parts(row.pattern, plan.paths[row.rows[0]]), row.group, len(row.rows)]
            for row in plan.folded
        ],
        "sweep": None if sweep is None else [_sweep_row(row, plan) for row in sweep],
    }


def pattern_parts(pattern: str, path: str) -> list[str]:
    """A folded pattern as texts and sets of numbers by turns, beginning and ending with a text.

    Args:
        pattern: As `fold` makes it.
        path: One that it stands for: where that has a brace, the brace is the name's own.

    Example:
        >>> pattern_parts("layers/{0..2}/w", "layers/0/w")
        ['layers/', '{0..2}', '/w']
        >>> pattern_parts("a{0..2}/{0,1}", "a{0..2}/0")
        ['a{0..2}/', '{0,1}', '']
    """
    path = path.replace("\0", "\\0")  # as patterns show it
    parts, end, place = [""], 0, 0
    for found in _SET.finditer(pattern):
        parts[-1] += pattern[end : found.start()]
        place += found.start() - end
        end = found.end()
        if path[place] == "{":
            parts[-1] += found[0]
            place += len(found[0])
        else:
            parts += [found[0], ""]
            number = _NUMBER.match(path, place)
            place = number.end() if number else place
    parts[-1] += pattern[end:]
    return parts


def pattern_shown(pattern: Pattern) -> str:
    """A rule's pattern: a string as it is, anything else as Python writes it."""
    return pattern if isinstance(pattern, str) else repr(pattern)


def is_replicated(kind: Kind, plan: Plan) -> bool:
    """Whether each of several devices is to hold its leaves whole."""
    if kind.spec is None or kind.bytes == 0 or plan.devices == 1:
        return False
    return not axes_used(kind.spec, plan.axis_sizes)


def _separators(plan: Plan) -> str:
    """Before which characters a path comes apart into modules."""
    dialect = plan.rules.dialect
    if dialect.keys == "keystr":
        return "[."
    # A flat dict of checkpoint names has dots in its keys.
    return dialect.separator if any(dialect.separator in path for path in plan.paths) else "."


def _kind(kind: Kind, plan: Plan, specs: dict[tuple[str, bool], int]) -> dict[str, Any]:
    replicated = is_replicated(kind, plan)
    return {
        "rule": kind.rule,
        "shape": kind.shape,
        "dtype": kind.dtype_shown,
        "spec": specs.setdefault((spec_shown(kind.spec), replicated), len(specs)),
        "notes": kind.notes,
        "problem": kind.problem,
        "origin": kind.origin,
        "bytes": kind.bytes,
        "held": kind.largest_bytes,
        "large": replicated and kind.bytes >= _LARGE,
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
        _Share(
            pattern_shown(pattern), spec_shown(spec.spec if isinstance(spec, RuleSpec) else spec), i
        )
        for i, (pattern, spec) in enumerate(plan.rules)
    ]
    free, lost = _Share("no rule is needed", "P()"), _Share("no rule decides", "-")
    counts = np.bincount(plan.kind_of, minlength=len(plan.kinds))
    for kind, count in zip(plan.kinds, map(int, counts), strict=True):
        ruleless = free if kind.problem is None else lost
        share = ruleless if kind.rule is None else shares[kind.rule]
        share.leaves += count
        share.bytes += count * kind.bytes
        share.held += count * kind.largest_bytes
    shares += [share for share in (free, lost) if share.leaves]
    return [{name: getattr(share, name) for name in _Share.__slots__} for share in shares]


def _findings(findings: Iterable[FindingLike]) -> list[dict[str, Any]]:
    """The worst first: by level, then by bytes."""
    kept = list(findings)
    for one in kept:
        check_choice("a finding's level", one.level, LEVELS)
    ordered = sorted(kept, key=lambda one: (LEVELS.index(one.level), -one.bytes))
    names = ("level", "kind", "message", "leaves", "rule", "bytes", "fix")
    return [
        {"paths": list(one.paths), **{name: getattr(one, name) for name in names}}
        for one in ordered
    ]


def _sweep_row(row: SweepRowLike, plan: Plan) -> dict[str, Any]:
    names = ("devices", "max_bytes", "replicated_bytes", "corrections", "fits")
    return {
        "mesh": dict(row.mesh),
        "current": dict(row.mesh) == plan.axis_sizes,
        **{name: getattr(row, name) for name in names},
    }
