"""Why one leaf gets its spec: how each rule met its path, and which axes it does not get.

Costs a match of each rule. Must not know how a plan is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardrules._format import bytes_shown, counted, mesh_shown
from shardrules._planning.companion import base_path
from shardrules._planning.kinds import Kind, dtype_shown
from shardrules._printable import printable_lines
from shardrules._specs import spec_shown

if TYPE_CHECKING:
    from shardrules._matching.match_modes import Pattern
    from shardrules._planning.columns import Columns
    from shardrules._planning.companion import Companion

__all__ = ["Explanation", "Tried", "explanation"]


Outcome = Literal["wins", "no match", "too late", "not needed", "ambiguous"]


class Tried(NamedTuple):
    """The result of trying one rule on a path."""

    rule: int
    pattern: Pattern
    outcome: Outcome
    """"wins"; "no match"; or it matches, but an earlier rule wins ("too late"), the leaf needs no
    rule ("not needed"), or several rules match where only one may ("ambiguous")."""


class Explanation(NamedTuple):
    """Why a leaf gets what it gets; `str` says it in words."""

    path: str
    source: str
    """The path that the rules meet: the leaf's own, or that of the leaf that it follows."""
    kind: Kind
    """The leaf's spec, bytes and losses."""
    tried: tuple[Tried, ...]
    """Each rule, in order."""
    mesh: str
    """The mesh as the command line has it: fsdp=8,tp=4."""
    companion: Companion | None = None
    """The companion that finds the leaf."""

    def __str__(self) -> str:
        kind = self.kind
        lines = [
            f"{self.path}  shape {kind.shape}  {dtype_shown(kind)}  {bytes_shown(kind.bytes)}",
            *self._companion_lines(),
            *self._rule_lines(),
        ]
        if kind.wanted is not None:
            lines.append(f"  the rule says  {spec_shown(kind.wanted)}")
        if kind.origin is not None:
            lines.append(f"  derived        {kind.origin}")
        if kind.status == "placed":
            held = bytes_shown(kind.device_bytes)
            lines.append(f"  on {self.mesh}  {spec_shown(kind.spec)}, {held} on each device")
            lines += [
                f"  lost           {loss.message} (costs {bytes_shown(loss.bytes)} on each device)"
                for loss in kind.losses
            ]
        else:
            lines.append(f"  PROBLEM        {kind.message}")
            lines += [f"  fix            {kind.fix}"] if kind.fix else []
        return printable_lines(lines)

    def _companion_lines(self) -> list[str]:
        follows = [] if self.source == self.path else [f"  follows        {self.source}"]
        if self.companion is None:
            return follows
        found = f"  companion      {self.companion.pattern!r} finds it"
        base = base_path(self.companion, self.path)
        if follows or base == self.path:
            return [found, *follows]
        return [f"{found}; but no rule meets its base {base}, so its own counts"]

    def _rule_lines(self) -> list[str]:
        met = [one for one in self.tried if one.outcome != "no match"]
        missed = len(self.tried) - len(met)
        if not met:
            return [f"  no rule matches, of {missed}"]
        words = {
            "wins": "wins",
            "too late": f"matches, but comes after rule {self.kind.rule}",
            "not needed": "matches, but the leaf needs no rule",
            "ambiguous": "matches",
        }
        lines = [f"  rule {one.rule}: {one.pattern!r} {words[one.outcome]}" for one in met]
        verb = "does" if missed == 1 else "do"
        others = f"  {counted(missed, 'other rule')} {verb} not match"
        return [*lines, others] if missed else lines


def explanation(columns: Columns, row: int) -> Explanation:
    """The explanation of the leaf of this row."""
    kind, source = columns.kinds[columns.kind_of[row]], columns.sources[row]
    rules = columns.rules
    matching = set(rules.all_matches(source))
    tried = tuple(
        Tried(rule, rules[rule][0], _outcome(rule, kind, matching)) for rule in range(len(rules))
    )
    companion = columns.leaves.found_by.get(row)
    mesh = mesh_shown(columns.axis_sizes)
    return Explanation(columns.paths[row], source, kind, tried, mesh, companion)


def _outcome(rule: int, kind: Kind, matching: set[int]) -> Outcome:
    if rule == kind.rule:
        return "wins"
    if rule not in matching:
        return "no match"
    if kind.rule is not None:
        return "too late"
    return "not needed" if kind.status == "placed" else "ambiguous"
