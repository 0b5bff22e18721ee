"""`Explanation`: how each rule met the path of a leaf, and which axes the leaf does not get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from shardrules._base.specs import spec_shown
from shardrules._base.text import answer, bytes_shown, counted, mesh_shown, printable_lines, record
from shardrules._plan.kinds import Kind, dtype_shown, placement_shown
from shardrules._rules.resolver import rule_lines

if TYPE_CHECKING:
    from shardrules._plan.companions import Companion
    from shardrules._plan.plan import Plan
    from shardrules._rules.patterns import Pattern
    from shardrules._rules.rules import Rules

Outcome = Literal["wins", "no match", "too late", "not needed", "ambiguous"]


@record
class Tried(NamedTuple):
    """The result of trying one rule on a path."""

    rule: int
    pattern: Pattern
    outcome: Outcome
    """"wins"; "no match"; or it matches, but an earlier rule wins ("too late"), the leaf needs no
    rule ("not needed"), or several rules match where only one may ("ambiguous")."""


NameOutcome = Literal["wins", "dim taken", "axis taken", "indivisible", "absent"]


@record
class TriedName(NamedTuple):
    """The result of trying one logical rule on a dimension with its name.

    Example:
        >>> import jax, shardrules as sr
        >>> rules = sr.LogicalRules([("mlp", "tp"), ("embed", "tp")])
        >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
        >>> plan = sr.plan(tree, rules, {"tp": 2}, names={"w": ("embed", "mlp")})
        >>> [(one.rule, one.name, one.outcome) for one in plan.explain("w").tried]
        [(1, 'embed', 'axis taken'), (0, 'mlp', 'wins')]
    """

    rule: int
    dim: int
    name: Any
    axes: Any
    """The mesh axes of the rule."""
    outcome: NameOutcome
    """"wins"; or another rule has the dimension ("dim taken"), another dimension has one of the
    axes ("axis taken"), or the correction leaves none of them, since they do not divide the
    dimension ("indivisible") or are "absent" from the mesh."""
    to: int | None
    """The rule or the dimension that it loses to."""


@answer
class Explanation(NamedTuple):
    """Why a leaf gets what it gets; `str` says it in words."""

    path: str
    source: str
    """The path that the rules meet: the leaf's own, or that of the leaf that it follows."""
    kind: Kind
    """The leaf's spec, bytes and losses."""
    tried: tuple[Tried, ...] | tuple[TriedName, ...]
    """Each rule, in order; for logical rules, of each dimension those for its name."""
    mesh: str
    """The mesh as the command line has it: fsdp=8,tp=4."""
    companions: tuple[Companion, ...] = ()
    """The companions that find the leaf; each but the first finds the base of the one before."""
    bases: tuple[str, ...] = ()
    """Per companion the path to which it leads."""
    leaves: int = 1
    """How many leaves are meant, of which this is the first; all get the same."""
    by_names: bool = False
    """Whether the rules are for logical axis names."""

    def __str__(self) -> str:
        kind = self.kind
        what = f"shape {kind.shape}  {dtype_shown(kind)}  {bytes_shown(kind.bytes)}"
        lines = [
            f"{self.path}  {what if kind.shape is not None else 'not an array'}",
            *([f"  the first of {counted(self.leaves, 'leaf')}"] if self.leaves > 1 else []),
            *self._companion_lines(),
            *(self._name_lines() if self.by_names else self._rule_lines()),
        ]
        if kind.wanted is not None:
            say = "rules say " if self.by_names else "rule says "
            lines.append(f"  the {say} {spec_shown(kind.wanted)}")
        if kind.origin is not None:
            lines.append(f"  derived        {kind.origin}")
        if kind.status == "placed":
            device_bytes = bytes_shown(kind.device_bytes)
            lines.append(
                f"  on {self.mesh}  {placement_shown(kind)}, {device_bytes} on each device"
            )
            lines += [
                f"  lost           {loss.message} (costs {bytes_shown(loss.bytes)} on each device)"
                for loss in kind.losses
            ]
        else:
            lost = sum(loss.bytes for loss in kind.losses if loss.kind == "absent")
            cost = f" (costs {bytes_shown(lost)} on each device)" if lost else ""
            lines.append(f"  PROBLEM        {kind.message}{cost}")
            lines += [f"  fix            {kind.fix}"] if kind.fix else []
        return printable_lines(lines)

    def _companion_lines(self) -> list[str]:
        lines = []
        link = "it"
        for companion, base in zip(self.companions, self.bases, strict=True):
            lines.append(f"  companion      {companion.pattern!r} finds {link}")
            link = base
        if lines and self.source != link:
            counts = "its own" if self.source == self.path else f"that of {self.source}"
            lines[-1] += f"; but no rule meets its base {link}, so {counts} counts"
        return lines if self.source == self.path else [*lines, f"  follows        {self.source}"]

    def _rule_lines(self) -> list[str]:
        tried_rules = (tried for tried in self.tried if isinstance(tried, Tried))
        matching = [tried for tried in tried_rules if tried.outcome != "no match"]
        missed = len(self.tried) - len(matching)
        if not matching:
            needs_none = self.kind.status == "placed" and self.kind.origin is None
            return [f"  no rule matches, of {missed}{'; the leaf needs none' * needs_none}"]
        words = {
            "wins": "wins",
            "too late": f"matches, but comes after rule {self.kind.rule}",
            "not needed": "matches, but the leaf needs no rule",
            "ambiguous": "matches",
        }
        lines = [
            f"  rule {tried.rule}: {tried.pattern!r} {words[tried.outcome]}" for tried in matching
        ]
        verb = "does" if missed == 1 else "do"
        others = f"  {counted(missed, 'other rule')} {verb} not match"
        return [*lines, others] if missed else lines

    def _name_lines(self) -> list[str]:
        names = self.kind.names
        if names is None:
            if self.kind.origin is not None or self.kind.shape is None:
                return []
            return ["  it has no logical axis names, so no rule is for it"]
        tried_names = (tried for tried in self.tried if isinstance(tried, TriedName))
        rows = ((row.rule, row.dim, row.axes, row.outcome, row.to) for row in tried_names)
        return [f"  {line}" for line in rule_lines(names, rows)]


def explanation(plan: Plan, row: int, leaves: int) -> Explanation:
    """Return the explanation of the leaf of this row, which stands for so many that are like it."""
    kind, source = plan.kinds[plan.kind_of[row]], plan.sources[row]
    rules = plan._leaves.path_rules
    tried = _tried_names(kind, plan) if rules is None else _tried(kind, source, rules)
    links = plan._leaves.links.get(row, ())
    companions, bases = tuple(link.companion for link in links), tuple(link.base for link in links)
    mesh, path = mesh_shown(plan.axis_sizes), plan.paths[row]
    return Explanation(path, source, kind, tried, mesh, companions, bases, leaves, rules is None)


def _tried(kind: Kind, source: str, rules: Rules) -> tuple[Tried, ...]:
    matching = set(rules.all_matches(source))
    return tuple(
        Tried(rule, rules[rule][0], _outcome(rule, kind, matching)) for rule in range(len(rules))
    )


def _tried_names(kind: Kind, plan: Plan) -> tuple[TriedName, ...]:
    names = kind.names or ()
    outcomes: list[tuple[int, int, NameOutcome, int | None]] = [
        (dim, rule, "wins", None) for dim, rule in enumerate(kind.dim_rules) if rule is not None
    ]
    for lost in kind.lost_rules:
        outcomes.append((lost.dim, lost.rule, lost.why, lost.to))
    return tuple(
        TriedName(rule, dim, names[dim], plan.rules[rule][1], outcome, to)
        for dim, rule, outcome, to in sorted(outcomes, key=lambda rule_loss: rule_loss[:2])
    )


def _outcome(rule: int, kind: Kind, matching: set[int]) -> Outcome:
    if rule == kind.rule:
        return "wins"
    if rule not in matching:
        return "no match"
    if kind.rule is not None:
        return "too late"
    return "not needed" if kind.status == "placed" else "ambiguous"
