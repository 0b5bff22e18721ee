"""What checks share: the kinds of findings, and facts of a plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from shardrules._base.rule_specs import Fsdp, rule_spec, rule_spec_shown
from shardrules._plan.findings import CheckKind, Declared, Finding, Level
from shardrules._plan.fold import Folded, fold
from shardrules._plan.kinds import Kind, axes_named, axes_used, is_replicated
from shardrules._plan.leaves import UNMATCHED, first_rules
from shardrules._rules.patterns import parse
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

# What adds more than this share to the bytes that a device must hold anyway is much.
_MUCH: Final = 0.02

Check: TypeAlias = (
    "tuple[Callable[[CheckContext], Iterator[Finding]], Literal['paths', 'names'] | None]"
)
"""A function that finds, and what the rules must be of, if that matters."""


KINDS: Final[dict[str, tuple[str, str]]] = {
    "companion": (
        "warning",
        "leaves that a companion finds, but no rule for their base, so that their own rule counts; "
        "companions that find nothing: of `LORA` and `QUANTIZED`, if no companion does; "
        "and factors of LoRA whose rank a rule for their kernel cuts",
    ),
    "memory": ("error", "leaves that do not fit into `hbm`"),
    "unpinned": (
        "warning, info",
        "leaves in `unpinned_host` memory, which jit copies to the device as a whole; info if they "
        "are not large together",
    ),
    "catch-all": (
        "error, info",
        "leaves that only the catch-all rule matches; info if those of them that are replicated "
        "are not large together",
    ),
    "replicated": (
        "warning, info",
        "other leaves that are replicated, and large alone or together; info if the rule itself "
        "leaves them whole, as `fsdp(min_bytes=)` does",
    ),
    "half-head": ("warning", "projections of attention that are cut inside a head"),
    "unknown-name": (
        "error, warning, info",
        "names that no logical rule has: an error if the name is near one that no leaf has, or "
        "what is replicated is large, a warning if it is near another, else info",
    ),
    "unnamed": (
        "error, warning, info",
        "leaves without logical axis names; info if they are not large together. A warning for "
        "leaves with fewer names than dimensions",
    ),
    "nnx-value": (
        "error",
        "rules that match leaves of flax nnx only through the `value` in which all their paths end",
    ),
    "dead": ("warning", "rules for paths that match no leaf"),
    "shadowed": ("warning", "rules that match leaves, all of which earlier rules win"),
    "uncut": ("warning", "leaves that a mesh axis could cut, as it cuts others like them"),
    "unused-axis": (
        "warning, info",
        "mesh axes that cut no leaf and are not declared to be for data; info if little could be "
        "saved by them, or only rules for no leaf name them",
    ),
    "unmatched": ("error", "leaves that no rule matches"),
    "misfit": ("error", "leaves that cannot be sharded as their rule says"),
    "correction": (
        "warning, info",
        "axes of a rule's spec that leaves do not get, because of their shapes or the mesh; info "
        "if that costs less than `large`, or if devices share single units",
    ),
    "unknown-axis": ("error", "axes that rules name and the mesh lacks"),
}
"""The kinds of findings of `Plan.check`: their levels, the usual one first; what they are about."""


def finding(
    kind: CheckKind,
    message: str,
    fix: str,
    folded: Iterable[Folded] = (),
    *,
    level: Level | None = None,
    **fields: Any,
) -> Finding:
    """Return a finding about these leaves; its level is the usual one of its kind, or this."""
    parts = [*folded]
    usual: Any = KINDS[kind][0].partition(",")[0]
    paths = tuple([part.pattern for part in parts])
    fields = {"paths": paths, "leaves": leaves_in(parts), **fields}
    return Finding(level or usual, kind, message, fix, **fields)


def leaves_in(folded: Iterable[Folded]) -> int:
    """Return the number of leaves that these stand for."""
    return sum([len(part.rows) for part in folded])


def rules_listed(rules: Sequence[int]) -> str:
    """Format indices of rules for a message: rule 3; rules 1, 2; nothing if there are none."""
    if not rules:
        return ""
    return ("rule " if len(rules) == 1 else "rules ") + ", ".join(map(str, rules))


def only_one(rules: Sequence[int]) -> int | None:
    """Return the rule that alone is the reason of a finding; None if several are, or none."""
    return rules[0] if len(rules) == 1 else None


class CheckContext:
    """A plan, what is declared about it, and what several checks ask of it."""

    def __init__(
        self,
        plan: Plan,
        large: int,
        declared: Declared,
        head_dim: int | None = None,
        hbm: int | None = None,
    ) -> None:
        self.plan = plan
        self.kinds = plan.kinds
        self.sizes = plan.axis_sizes
        self.is_whole = partial(is_replicated, axis_sizes=plan.axis_sizes)
        """Tell if each of several devices holds leaves of a kind whole."""
        self.companions = plan._leaves.companions
        self.path_rules = plan._leaves.path_rules
        """The rules, if they are for paths; None for logical names."""
        self.large = large
        self.data_axes = frozenset(declared["data_axes"])
        self.head_dim = head_dim
        self.hbm = hbm
        patterns = declared["replicated"]
        self._declared = _rules_of_declared(patterns) if patterns else None

    @cached_property
    def catch_alls(self) -> frozenset[int]:
        """Rules that match every path: these here, and others."""
        if self.path_rules is None:
            return frozenset()
        coverage = self.plan.coverage
        leaves = sum(coverage.won) + coverage.unmatched
        matching = _matching_all(self.path_rules)
        return frozenset([rule for rule in matching if coverage.matched[rule] == leaves])

    @cached_property
    def silent_catch_alls(self) -> frozenset[int]:
        """Those of them that give all leaves one spec, whatever they are."""
        spec_of = self.plan._spec_of_rule
        return frozenset([rule for rule in self.catch_alls if not isinstance(spec_of(rule), Fsdp)])

    @cached_property
    def dead(self) -> tuple[int, ...]:
        """Rules for no leaf; none of a state or of gradients, whose rules are the parameters'."""
        return () if self.plan._leaves.follows_parameters else tuple(self.plan.coverage.dead)

    def folded(self, is_wanted: Iterable[object]) -> list[Folded]:
        """Return the folded leaves of the wanted kinds, with most bytes on a device first."""
        kinds = {number for number, is_one in enumerate(is_wanted) if is_one}
        return [part for part in self._by_bytes if part.group in kinds] if kinds else []

    @cached_property
    def _by_bytes(self) -> list[Folded]:
        """The folded leaves, those with most bytes on a device first."""
        parts = self.plan.folded
        most = [self.kinds[part.group].device_bytes * len(part.rows) for part in parts]
        order = sorted(range(len(parts)), key=most.__getitem__, reverse=True)
        return [parts[number] for number in order]

    def undeclared(self, folded: list[Folded]) -> list[Folded]:
        """Return the leaves among these that are not declared to be replicated."""
        if self._declared is None:
            return folded
        return [part for leaves in folded for part in self._undeclared(leaves, self._declared)]

    def _undeclared(self, folded: Folded, declared: Rules) -> list[Folded]:
        paths = [self.plan.paths[row] for row in folded.rows]
        first = first_rules(declared, paths)
        rest = [i for i, path in enumerate(paths) if first[path] == UNMATCHED]
        if len(rest) == len(paths):
            return [folded]
        rows = folded.rows[rest]
        parts = fold([paths[i] for i in rest], np.full(len(rest), folded.group, np.int32))
        return [part._replace(rows=rows[part.rows]) for part in parts]

    def device_bytes(self, folded: Iterable[Folded]) -> int:
        """Return the bytes of these leaves on the device that holds most."""
        leaves: Counter[int] = Counter()
        for part in folded:
            leaves[part.group] += len(part.rows)
        return sum([self.kinds[kind].device_bytes * count for kind, count in leaves.items()])

    def level(self, count: int, level: Level) -> Level:
        """Return the level of a finding with so many bytes at stake: info if they are not large."""
        return level if count >= self.large else "info"

    @cached_property
    def _total(self) -> int:
        """Bytes of all leaves for the fullest device, in its memory and the host's."""
        total = self.plan.bytes_per_device()
        return total.max + total.host

    def is_much(self, count: int) -> bool:
        """Tell if so many bytes on a device are much, beside what it must hold anyway."""
        return count >= self.large and count > _MUCH * (self._total - count)

    def is_exempt(self, kind: Kind) -> bool:
        """Tell if a rule that is made from shapes leaves such arrays whole itself."""
        spec = None if kind.rule is None else self.plan._spec_of_rule(kind.rule)
        return isinstance(spec, Fsdp) and not kind.losses and not axes_named(kind.wanted)

    def is_unnamed(self, kind: Kind) -> bool:
        """Tell if logical rules are to decide leaves that have no names."""
        has_rules = self.path_rules is None and kind.rule is None
        return has_rules and kind.names is None and kind.origin is None and bool(kind.shape)

    @cached_property
    def dead_rules_of(self) -> dict[str, list[int]]:
        """The mesh axes that cut no leaf, each with the rules for no leaf that name it."""
        axes_of_rule = {rule: axes_named(self.plan._spec_of_rule(rule)) for rule in self.dead}
        cutting_axes = frozenset().union(
            *[axes_used(kind._counted, self.sizes) for kind in self.kinds]
        )
        return {
            axis: [rule for rule, axes in axes_of_rule.items() if axis in axes]
            for axis, size in self.sizes.items()
            if size > 1 and axis not in cutting_axes
        }

    def optional_axes_of(self, rule: int | None) -> frozenset[str]:
        """Return the mesh axes that a mesh may lack, as far as this rule is concerned."""
        axes = () if rule is None else rule_spec(self.plan.rules[rule][1]).optional_axes
        return frozenset({*self.plan.rules.optional_axes, *axes})

    def rules_of(self, folded: Iterable[Folded]) -> list[int]:
        """Return the rules that decide these leaves, ascending."""
        return sorted({rule for part in folded for rule in self.kinds[part.group].deciders})

    def rule(self, index: int) -> str:
        """Return a rule, for a message."""
        pattern, spec = self.plan.rules[index]
        if self.plan._leaves.by_specs:
            return f"the tree's spec {rule_spec_shown(spec)}"
        text = repr(spec) if self.path_rules is None else rule_spec_shown(spec)
        return f"rule {index} {pattern!r} -> {text}"

    def rules(self, indices: list[int]) -> str:
        """Return rules, for a message: one alone with its pattern and spec; "" for none."""
        if len(indices) > 1 and self.plan._leaves.by_specs:
            return f"{len(indices)} of the tree's specs"
        return self.rule(indices[0]) if len(indices) == 1 else rules_listed(indices)

    def who(self, kind: Kind) -> str:
        """Return what decides the leaves of a kind, for a message: their rule, or their names."""
        if kind.rule is not None:
            return self.rule(kind.rule)
        return "no rule decides" if kind.names is None else f"the names {kind.names}"


@lru_cache(maxsize=16)
def _rules_of_declared(patterns: tuple[str | re.Pattern[str], ...]) -> Rules:
    """Return the patterns as rules that are searched in printed paths, in every dialect.

    The error of an invalid pattern has its index.
    """
    for index, pattern in enumerate(patterns):
        parse(f"replicated[{index}]", pattern)
    return Rules([(pattern, None) for pattern in patterns])


# A rule that matches these, and all leaves, matches whatever comes.
_PROBES: Final = ("~", "\x01/\x02")


@lru_cache(maxsize=64)
def _matching_all(rules: Rules) -> frozenset[int]:
    """Return the rules that match whatever comes."""
    return frozenset.intersection(*[frozenset(rules.all_matches(probe)) for probe in _PROBES])
