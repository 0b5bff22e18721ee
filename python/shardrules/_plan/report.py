"""HTML report: the data of a plan, its findings and a sweep, in one file that fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from shardrules._base.rule_specs import rule_spec_shown
from shardrules._base.specs import spec_shown
from shardrules._base.text import printable_json, printable_lines
from shardrules._plan.findings import Findings, conclusion
from shardrules._plan.kinds import (
    DEFAULT_LARGE,
    Kind,
    decided_shown,
    dtype_shown,
    is_replicated,
    placement_shown,
    problem_shown,
)
from shardrules._plan.lock import plan_fingerprint
from shardrules._rules.patterns import pattern_shown

if TYPE_CHECKING:
    from shardrules._plan.memory import DeviceBytes, Room
    from shardrules._plan.plan import Plan
    from shardrules._plan.sweep import Sweep, SweepRow


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


@runtime_checkable
class CompiledProgram(Protocol):
    """A compiled function's report: all that is known here of a `Program`."""

    def to_json(self) -> dict[str, Any]:
        """Return its mesh, collectives and memory."""
        ...

    def diff(self, other: Any) -> Findings:
        """Find what the program sends or needs beyond an earlier one."""
        ...


@runtime_checkable
class CompiledTime(Protocol):
    """An estimate of a compiled step's seconds: all that is known here of a `ProgramTime`."""

    @property
    def timelines(self) -> tuple[Any, ...]:
        """Return what is computed and sent in a trip of its loops."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return its seconds and these."""
        ...


@runtime_checkable
class Solved(Protocol):
    """What the page shows of a `Solution`."""

    @property
    def choices(self) -> tuple[Any, ...]:
        """Return the classes of dimensions, with their mesh axes and what others cost."""
        ...

    @property
    def activations(self) -> Any:
        """Return the constraints, a tuple; `str` gives the line of each."""
        ...

    @property
    def summary(self) -> str:
        """Return its time, memory, bound and gap."""
        ...


def _solution_data(solution: Solved) -> dict[str, Any]:
    """Return each class of dimensions, the axes that cut it, and what others cost."""
    choices = [
        {
            "role": row.role or "no role",
            "size": f"{row.size:,}",
            "axes": ",".join(row.axes) or "whole",
            "arrays": [f"{path}[{dim}]" for path, dim in row.arrays],
            "alternatives": list(map(str, row.alternatives)),
        }
        for row in solution.choices
    ]
    return {
        "text": solution.summary,
        "choices": choices,
        "activations": list(map(str, solution.activations)),
    }


class Proposed(NamedTuple):
    """What the page shows of other rules for its leaves."""

    plan: Plan
    held: DeviceBytes
    reasons: list[str]


def report_data(
    plan: Plan,
    findings: Findings,
    sweep: Sweep | None,
    title: str,
    *,
    room: Room,
    budget: DeviceBytes,
    proposed: Proposed | None,
    program: CompiledProgram | None,
    time: CompiledTime | None,
    solution: Solved | None,
) -> dict[str, Any]:
    """Return everything that a report shows, of a plan and what comes with it."""
    _check_same_budget(plan, sweep, budget)
    specs: dict[tuple[str, bool], int] = {}
    return {
        "title": title,
        "mesh": plan.axis_sizes,
        "devices": plan.devices,
        "leaves": len(plan.paths),
        "bytes": plan.total_bytes,
        "fullest": budget.max,
        "budget": budget._fullest(),
        "fingerprint": plan_fingerprint(plan),
        "hbm": room.hbm,
        "fits": None if (fits := room.fits(budget)) is None else {"yes": fits, "room": str(room)},
        "separators": _separators(plan),
        "findings": [finding._asdict() for finding in findings],
        "conclusion": conclusion(findings),
        "rules": _rule_data(plan),
        "kinds": [_kind_data(kind, plan, specs) for kind in plan.kinds],
        "specs": [{"text": text, "replicated": replicated} for text, replicated in specs],
        "rows": _row_data(plan),
        "sweep": None if sweep is None else [_sweep_row_data(row, plan) for row in sweep],
        "sweep_notes": [] if sweep is None else sweep.notes,
        "program": None if program is None else program.to_json(),
        "time": None if time is None else {**time.to_json(), "text": str(time).split("\n")[0]},
        "solution": None if solution is None else _solution_data(solution),
        "suggestion": None if proposed is None else {
            "reasons": proposed.reasons,
            "plans": [
                _plan_row("this plan", plan, budget, room),
                _plan_row("suggested", proposed.plan, proposed.held, room),
            ],
        },
    }  # fmt: skip


def _row_data(plan: Plan) -> dict[str, list[Any]]:
    """Return the folded rows as columns, which a browser parses faster than rows."""
    folded = plan.folded
    return {
        # A path, or the parts of a pattern: texts and sets of numbers by turns.
        "paths": [row.parts[0] if len(row.parts) == 1 else row.parts for row in folded],
        "kinds": [row.group for row in folded],
        "leaves": [len(row.rows) for row in folded],
    }


def _plan_row(name: str, plan: Plan, budget: DeviceBytes, room: Room) -> dict[str, Any]:
    return {
        "name": name,
        "mesh": plan.axis_sizes,
        "rules": len(plan.rules),
        "bytes": budget.max,
        "fits": room.fits(budget),
    }


def _check_same_budget(plan: Plan, sweep: Sweep | None, budget: DeviceBytes) -> None:
    mine = budget.max, budget.max_host
    for row in sweep or ():
        if plan._is_on(row.mesh) and (row.bytes, row.host_bytes) != mine:
            raise ValueError(
                f"the sweep counts {row.bytes:,} bytes on the fullest device of this plan's mesh "
                f"and {row.host_bytes:,} on the host, the report {mine[0]:,} and {mine[1]:,}: give "
                "both the same gradients=, optimizer= and optimizer_memory_kind="
            )


def _separators(plan: Plan) -> str:
    """Before which characters a path comes apart into modules."""
    dialect = plan._leaves.paths_dialect
    if dialect.keys == "keystr":
        return "[."
    # A flat dict of checkpoint names has dots in its keys.
    return dialect.separator if any(dialect.separator in path for path in plan.paths) else "."


def _kind_data(kind: Kind, plan: Plan, specs: dict[tuple[str, bool], int]) -> dict[str, Any]:
    replicated = is_replicated(kind, plan.axis_sizes)
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


def _rule_data(plan: Plan) -> list[dict[str, Any]]:
    """Return the share of each rule; last that of no rule, if there is any."""
    shares = [
        _Share(pattern_shown(pattern), _asked_shown(plan, i), i)
        for i, (pattern, _) in enumerate(plan.rules)
    ]
    free, lost = _Share("no rule is needed", "P()"), _Share("no rule decides", "-")
    for kind, count in zip(plan.kinds, plan.counts.tolist(), strict=True):
        ruleless = free if kind.status == "placed" else lost
        # Logical rules share a leaf, each with a dimension of it.
        for share in [shares[rule] for rule in kind.deciders] or [ruleless]:
            share.leaves += count
            share.bytes += count * kind.bytes
            share.held += count * kind.device_bytes
    shares += [share for share in (free, lost) if share.leaves]
    return [{name: getattr(share, name) for name in _Share.__slots__} for share in shares]


def _asked_shown(plan: Plan, rule: int) -> str:
    """Return what a rule asks for: a spec, and its memory kind if it has one."""
    if plan._leaves.path_rules is None:
        return spec_shown(plan._spec_of_rule(rule))
    return rule_spec_shown(plan.rules[rule][1])


def _sweep_row_data(row: SweepRow, plan: Plan) -> dict[str, Any]:
    return {**row._asdict(), "current": row.mesh == plan.axis_sizes}


_FILES: Final = resources.files(__name__.rpartition(".")[0]) / "page"
_SCRIPTS: Final = ("base.js", "tree.js", "sections.js", "leaves.js", "charts.js")
# Scripts and styles count by their hashes alone.
_POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; "
    "base-uri 'none'; form-action 'none'"
)
# None of them may be markup or end the element; in JSON they occur in strings only.
_IN_SCRIPTS: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def report_html(data: Mapping[str, Any]) -> str:
    """Return `report_data` as an HTML page that works offline: no part of it may fetch anything."""
    scripts, styles = [*map(_data_text, _SCRIPTS)], _data_text("page.css")
    return Template(_data_text("page.html")).substitute(
        policy=_POLICY.format(
            scripts=" ".join(map(_script_hash, scripts)), styles=_script_hash(styles)
        ),
        title=html.escape(_printable(data["title"])).encode("ascii", "xmlcharrefreplace").decode(),
        styles=styles,
        data=_embedded_json(data),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _data_text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _script_hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _embedded_json(data: Any) -> str:
    """JSON in ASCII, U+2028 and lone surrogates escaped, that cannot leave its element."""
    # What json does not know are NumPy's integers.
    text = json.dumps(_printable(data), separators=(",", ":"), default=int)
    return text.translate(_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    """Make all texts printable: a mark of direction would turn a name around."""
    if isinstance(value, str):
        return printable_lines(value.split("\n"))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [*map(_printable, value)] if isinstance(value, list | tuple) else value


def sweep_json(rows: Sweep) -> str:
    """Return the sweep as a JSON object: a row for each mesh, the best first."""
    return printable_json({"rows": [row._asdict() for row in rows]})


def plan_json(plan: Plan, memory: DeviceBytes, room: Room) -> str:
    """Return the plan as a JSON object, with a row for each folded path."""
    leaves = [
        {
            "path": row.pattern,
            "leaves": len(row.rows),
            "shape": kind.shape,
            "dtype": dtype_shown(kind),
            "rule": kind.rule,
            **({} if kind.names is None else {"names": kind.names, "rules": kind.dim_rules}),
            "spec": spec_shown(kind.spec),
            "memory_kind": kind.memory_kind,
            "problem": problem_shown(kind),
            "bytes": kind.bytes * len(row.rows),
            "device_bytes": kind.device_bytes * len(row.rows),
            "lost": [loss.message for loss in kind.losses],
        }
        for row in plan.folded
        for kind in (plan.kinds[row.group],)
    ]
    content: dict[str, Any] = {
        "mesh": plan.axis_sizes,
        "leaves": len(plan.paths),
        "bytes": plan.total_bytes,
        "device_bytes": {"total": memory.max, **memory._fullest()},
        "fingerprint": plan_fingerprint(plan),
        "folded": leaves,
    }
    if (fits := room.fits(memory)) is not None:
        content["fits"] = fits
    return printable_json(content)
