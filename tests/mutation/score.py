"""The mutation score: of the slips that cost memory, how many does a check tell?

`python -m tests.mutation` prints the table of docs/evidence.md. Must not know how a check works.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Final, NamedTuple

import shardrules as sr
from shardrules._base.specs import Entries, entries_of, entry_axes
from tests.mutation.slips import CLASSES, Case

HARM: Final = (0.02, 16 * 2**20)
"""A slip is harmful if it costs more than this share of the ideal, and more than these bytes."""
_NUMBERS: Final = re.compile(r"[0-9][0-9.,]*( [kMGTPE]?B)?")


class Outcome(NamedTuple):
    """What comes of a slip that is harmful."""

    slips: str
    """Their class."""
    case: Case
    is_told: bool


@dataclass
class Score:
    """Of many cases; per class of slips, how many are harmful and how many of them are told."""

    cases: int = 0
    unclean: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Cases that do not check clean, in which no slips are made: what is told of them."""
    harmful: Counter[str] = field(default_factory=Counter)
    missed: dict[str, list[Case]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Of the harmful slips, those that are told."""
        harmful = self.harmful.total()
        return 1 - sum(map(len, self.missed.values())) / harmful


def outcomes(case: Case, plan: sr.Plan, most: int | None = None) -> Iterator[Outcome]:
    """The harmful slips, at most so many slips of each class being tried."""
    before = {_essence(one) for one in case.check(plan).at_least("warning")}
    for name, slips in CLASSES.items():
        for slipped in islice(slips(case), most):
            other = slipped.plan()
            ideal = _ideal_bytes(slipped, plan)
            cost = other.bytes_per_device().max - ideal
            if cost > HARM[0] * ideal and cost > HARM[1]:
                found = slipped.check(other).at_least("warning")
                yield Outcome(name, slipped, any(_essence(one) not in before for one in found))


def score(cases: Iterable[Case], most: int | None = None) -> Score:
    """The score of the cases that check clean."""
    result = Score()
    for case in cases:
        result.cases += 1
        plan = case.plan()
        if found := case.check(plan).at_least("warning"):
            result.unclean[f"{case.model} on {case.mesh}"] = tuple(map(str, found))
            continue
        for outcome in outcomes(case, plan, most):
            result.harmful[outcome.slips] += 1
            if not outcome.is_told:
                result.missed.setdefault(outcome.slips, []).append(outcome.case)
    return result


def table(scores: dict[str, Score]) -> str:
    """A row per class, a column per score."""
    lines = [f"| slip | {' | '.join(scores)} |", "|---" * (len(scores) + 1) + "|"]
    for name in CLASSES:
        told = (
            f"{one.harmful[name] - len(one.missed.get(name, ()))} of {one.harmful[name]}" for one in scores.values()
        )
        lines.append(f"| {name} | {' | '.join(told)} |")
    shares = " | ".join(f"{one.share:.2%} of {one.harmful.total():,}" for one in scores.values())
    return "\n".join([*lines, f"| all | {shares} |"])


def _ideal_bytes(case: Case, original: sr.Plan) -> int:
    """Bytes on the fullest device if every leaf were cut as its rule means it."""
    if case.meant is not None or case.mesh == original.axis_sizes:
        return original.bytes_per_device().max
    return sum(
        -(-kind.bytes // prod(case.mesh[axis] for axis in _axes(kind))) * count
        for kind, count in zip(original.kinds, original.counts.tolist(), strict=True)
    )


def _axes(kind: sr.types.Kind) -> list[str]:
    return [axis for entry in entries_of(kind.spec or Entries()) for axis in entry_axes(entry)]


def _essence(finding: sr.types.Finding) -> tuple[str, str, str, tuple[str, ...]]:
    """What makes a finding another one; neither bytes nor the indices of rules do."""
    return finding.level, finding.kind, _NUMBERS.sub("#", finding.message), finding.paths
