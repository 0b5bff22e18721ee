"""Steps, their faults, and how many of the faults that cost are in the findings of `verify`.

Costs are counted from the text of the HLO by `tests.support.hlo_counts`, which knows nothing of the
library's reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import shardrules as sr
from tests.steps.table import Built, Step
from tests.support import hlo_counts

LARGE: Final = 2**16
"""The `large` of `verify` that suits these sizes."""
_SENT: Final = 1.05
_PEAK: Final = 1.02
_MORE: Final = 3


class Cost(NamedTuple):
    """Bytes of a step on a device."""

    sent: int
    """Payload of all collectives, times the trip counts of loops."""
    peak: int

    def exceeds(self, clean: Cost) -> bool:
        """Return whether this costs more than the clean step does."""
        is_sent = self.sent > _SENT * clean.sent and self.sent >= clean.sent + LARGE
        return is_sent or self.peak > _PEAK * clean.peak

    def over(self, clean: Cost) -> str:
        """Return the ratios to the clean step."""
        sent = self.sent / clean.sent if clean.sent else float("inf")
        return f"sent x{sent:.2f}, peak x{self.peak / clean.peak:.2f}"


class Outcome(NamedTuple):
    """What comes of a step, clean or with a fault."""

    cost: Cost | None
    """None if JAX refuses it."""
    findings: tuple[sr.types.Finding, ...]
    """All but infos of what FSDP gathers."""
    unexplained: float
    """Share of the bytes."""
    error: str = ""


def warnings(outcome: Outcome) -> list[sr.types.Finding]:
    """Return the warnings and errors of a step."""
    return [finding for finding in outcome.findings if finding.level != "info"]


class Score(NamedTuple):
    """The score of a step."""

    step: str
    clean: Outcome
    outcomes: Mapping[str, Outcome]

    @property
    def costly(self) -> dict[str, Outcome]:
        """Faults that cost more than the clean step."""
        assert self.clean.cost, self.clean.error
        return {k: v for k, v in self.outcomes.items() if v.cost and v.cost.exceeds(self.clean.cost)}

    @property
    def missed(self) -> list[str]:
        """Costly faults that `verify` does not find."""
        return [name for name, one in self.costly.items() if not self.new(one)]

    def new(self, one: Outcome) -> list[sr.types.Finding]:
        """Return the findings of a fault that the clean step has not, or of far fewer bytes."""
        before = {_essence(finding): finding.bytes for finding in self.clean.findings}
        return [
            finding
            for finding in one.findings
            if (bytes := before.get(_essence(finding))) is None or finding.bytes > _MORE * bytes > 0
        ]


def cost(built: Built) -> Cost:
    """Return the bytes that the collectives of a step move, and its peak."""
    compiled = built.compiled
    while not hasattr(compiled, "memory_analysis"):
        compiled = compiled.compiled
    rows = hlo_counts.collectives(compiled.as_text())
    memory = compiled.memory_analysis()
    peak = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    return Cost(sum(hlo_counts.totals(rows).values()), peak)


_outcomes: dict[tuple[str, str], Outcome] = {}


def outcome(step: Step, fault: str = "") -> Outcome:
    """Return what comes of a fault of a step, or of the clean step; each is compiled once."""
    if (step.name, fault) not in _outcomes:
        _outcomes[step.name, fault] = _outcome(step, step.faults[fault] if fault else {})
    return _outcomes[step.name, fault]


def _outcome(step: Step, switches: Mapping[str, Any]) -> Outcome:
    try:
        built = step.build(**switches)
    except Exception as error:  # JAX itself says what is wrong, in errors of many types
        if not switches:
            raise
        return Outcome(None, (), 0, f"{type(error).__name__}: {str(error)[:200]}")
    findings = sr.verify(built.compiled, built.inputs, built.outputs, large=LARGE)
    reported = tuple(one for one in findings if one.kind != "gathered" or one.level != "info")
    rows = () if switches else sr.inspect(built.compiled, built.inputs, built.outputs).collectives
    total, lost = (sum(row.bytes or 0 for row in some) for some in (rows, [row for row in rows if not row.is_expected]))
    return Outcome(cost(built), reported, lost / max(total, 1))


def score(steps: Iterable[Step]) -> Iterator[Score]:
    """Yield the score of each step, with all its faults."""
    for step in steps:
        yield Score(step.name, outcome(step), {name: outcome(step, name) for name in step.faults})


def _essence(finding: sr.types.Finding) -> tuple[str, tuple[str, ...], str]:
    """What makes a finding another one: its kind, and paths and mesh axes; not its bytes."""
    axes = re.search(r"\b(?:over|along) ([\w, ]+?)(?:[:.]| to )", finding.message)
    return finding.kind, finding.paths, axes[1] if axes else ""
