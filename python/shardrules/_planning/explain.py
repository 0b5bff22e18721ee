"""Why one leaf gets its spec: the rules that were tried, and what was lost to the mesh.

Costs a match per rule that is asked for. Must not know how a plan is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardrules._planning.kinds import Kind, spec_shown
from shardrules._printable import printable_lines
from shardrules._words import bytes_shown, counted, mesh_shown

if TYPE_CHECKING:
    from shardrules._matching.rules import Pattern
    from shardrules._planning.derive import Companion
    from shardrules._planning.plan import Plan

__all__ = ["Explanation", "Tried", "explanation"]


class Tried(NamedTuple):
    """How a rule met a path."""

    rule: int
    pattern: Pattern
    outcome: str
    """"wins", "does not match", "matches, but comes after rule N", "matches, but the leaf needs no
    rule", or "matches" if several do where one alone may."""


class Explanation(NamedTuple):
    """Why a leaf gets what it gets; `str` tells it in words."""

    path: str
    source: str
    """The path that the rules meet: the leaf's own, or that of what it is derived from."""
    kind: Kind
    """What it gets."""
    tried: tuple[Tried, ...]
    """Every rule, in order."""
    mesh: str
    companion: Companion | None = None
    """What has found the leaf."""

    def __str__(self) -> str:
        kind = self.kind
        lines = [
            f"{self.path}  shape {kind.shape}  {kind.dtype_shown}  {bytes_shown(kind.bytes)}",
            *self._companion_lines(),
            *self._rule_lines(),
        ]
        if kind.wanted is not None:
            lines.append(f"  the rule says  {spec_shown(kind.wanted)}")
        if kind.origin is not None:
            lines.append(f"  derived        {kind.origin}")
        if kind.problem is None:
            held = bytes_shown(kind.largest_bytes)
            lines.append(f"  on {self.mesh}  {spec_shown(kind.spec)}, {held} on each device")
            lines += [
                f"  lost           {note} (costs {bytes_shown(cost)} on each device)"
                for (note, _), cost in zip(kind.notes, kind.costs, strict=True)
            ]
        else:
            lines.append(f"  PROBLEM        {kind.problem}")
            lines += [f"  way out        {way_out}" for way_out in kind.ways_out]
        return printable_lines(lines)

    def _companion_lines(self) -> list[str]:
        follows = [] if self.source == self.path else [f"  follows        {self.source}"]
        if self.companion is None:
            return follows
        found = f"  companion      {self.companion.pattern!r} finds it"
        base = self.companion.base_of(self.path)
        if follows or base == self.path:
            return [found, *follows]
        return [f"{found}; but no rule meets its base {base}, so its own counts"]

    def _rule_lines(self) -> list[str]:
        met = [one for one in self.tried if one.outcome != "does not match"]
        missed = len(self.tried) - len(met)
        lines = [f"  rule {one.rule}: {one.pattern!r} {one.outcome}" for one in met]
        if not met:
            return [f"  no rule matches, of {missed}"]
        verb = "does" if missed == 1 else "do"
        others = f"  {counted(missed, 'other rule')} {verb} not match"
        return [*lines, others] if missed else lines


def explanation(plan: Plan, row: int) -> Explanation:
    """Of the leaf of this row."""
    kind, source = plan.kinds[plan.kind_of[row]], plan.sources[row]
    rules = plan.rules
    matching = set(rules.all_matches(source))

    def outcome(rule: int) -> str:
        if rule == kind.rule:
            return "wins"
        if rule not in matching:
            return "does not match"
        if kind.rule is None:
            return "matches, but the leaf needs no rule" if kind.problem is None else "matches"
        return f"matches, but comes after rule {kind.rule}"

    tried = tuple(Tried(rule, rules[rule][0], outcome(rule)) for rule in range(len(rules)))
    companion = plan.found_by.get(row)
    mesh = mesh_shown(plan.axis_sizes)
    return Explanation(plan.paths[row], source, kind, tried, mesh, companion)
