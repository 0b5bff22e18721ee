"""`PlanDiff`: new and missing leaves, other shardings and other rules of two plans."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import astuple, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import is_on_host, rule_spec
from shardrules._base.specs import spec_shown
from shardrules._base.text import answer, bytes_shown, counted, mesh_shown, printable, record
from shardrules._plan.align import match_leaves
from shardrules._plan.fold import fold
from shardrules._plan.kinds import Kind, dtype_shown, placement_shown, problem_shown
from shardrules._plan.memory import by_class
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.plan import Plan
    from shardrules._rules.logical_rules import LogicalRules

    AnyRules = Rules | LogicalRules


class Pair(NamedTuple):
    """Leaves that are of one kind in a plan, and of one kind in another."""

    before: Kind | None
    """None for leaves that are new."""
    after: Kind | None
    """None for leaves that are gone."""


class Pairs(NamedTuple):
    """The leaves of two plans: those of the first, then those of the second alone."""

    paths: list[str]
    group_of: npt.NDArray[np.int32]
    """Per leaf an index of `groups`."""
    groups: list[Pair]


def paired(before: Plan, after: Plan) -> Pairs:
    """Return the leaves of both plans, paired by their paths."""
    matched = np.array(match_leaves(before._leaves, after._leaves), np.int64)
    new = np.setdiff1d(np.arange(len(after.paths)), matched)
    then = before.kind_of.astype(np.int64)
    # A kind of -1 stands for a leaf that is not there.
    now = np.where(matched < 0, -1, after.kind_of[matched] if len(after.paths) else -1)
    paths = before.paths + [after.paths[row] for row in new.tolist()]
    then = np.concatenate([then, np.full(len(new), -1)])
    now = np.concatenate([now, after.kind_of[new]])
    width = len(after.kinds) + 1
    numbers, group_of = np.unique((then + 1) * width + now + 1, return_inverse=True)
    groups = [
        Pair(_kind_of_pair(before, number // width - 1), _kind_of_pair(after, number % width - 1))
        for number in numbers.tolist()
    ]
    return Pairs(paths, group_of.astype(np.int32), groups)


def _kind_of_pair(plan: Plan, number: int) -> Kind | None:
    return None if number < 0 else plan.kinds[number]


_MOST_RULES: Final = 8


@record
class Change(NamedTuple):
    """Leaves that changed alike."""

    path: str
    """Folded path pattern."""
    leaves: int
    before: Kind | None
    """None for leaves that are new."""
    after: Kind | None
    """None for leaves that are gone."""

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            sign, kind = ("-", self.before) if self.before is not None else ("+", self.after)
            return printable(f"{sign} {self.path}  {'  '.join(_aspects(kind))}")
        pairs = zip(_aspects(self.before), _aspects(self.after), strict=True)
        changes = "  ".join(f"{a} -> {b}" for a, b in pairs if a != b)
        delta = (_on_device(self.after) - _on_device(self.before)) * self.leaves
        sign = "+" if delta >= 0 else "-"
        cost = f"({sign}{bytes_shown(abs(delta))} on each device)"
        return printable(f"~ {self.path}  {changes}  {cost}")


@answer
class PlanDiff(NamedTuple):
    """The differences of two plans; `str` gives them in words. False if there are none."""

    mesh: tuple[dict[str, int], dict[str, int]]
    """Before and after."""
    bytes: tuple[int, int]
    """On the device that holds most, before and after."""
    changes: tuple[Change, ...]
    rules: tuple[str, ...] = ()
    """What differs in the rules, such as "the dialect" or "2 added (0, 1)", even if each leaf gets
    the same. Rules are compared by content; a removed one has the number that it had."""
    host_bytes: tuple[int, int] = (0, 0)
    """In the host's memory for the device that has most there, before and after."""

    def __bool__(self) -> bool:
        return bool(self.changes) or bool(self.rules) or self._meshes_differ

    @property
    def _meshes_differ(self) -> bool:
        return list(self.mesh[0].items()) != list(self.mesh[1].items())

    def __str__(self) -> str:
        if not self:
            return "no differences"
        meshes = " -> ".join(map(mesh_shown, self.mesh))
        lines = [printable(f"mesh {meshes}")] if self._meshes_differ else []
        lines += [printable(f"rules: {', '.join(self.rules)}")] if self.rules else []
        lines += map(str, self.changes)
        leaves = counted(sum(change.leaves for change in self.changes), "leaf")
        before, after = map(bytes_shown, self.bytes)
        host = " -> ".join(map(bytes_shown, self.host_bytes)) if any(self.host_bytes) else ""
        lines.append(
            f"{leaves} changed; {before} -> {after} on the fullest device"
            + (f"; {host} in the host's memory" if host else "")
        )
        return "\n".join(lines)


def plan_diff(before: Plan, after: Plan) -> PlanDiff:
    paths, group_of, groups = paired(before, after)
    counts = np.bincount(group_of).tolist()
    changed: dict[int, Pair] = {}
    decided_otherwise = 0
    for number, (pair, count) in enumerate(zip(groups, counts, strict=True)):
        a, b = pair
        if a is None or b is None or _aspects(a) != _aspects(b):
            changed[number] = pair
        elif a.deciders != b.deciders:
            decided_otherwise += count
    kept = np.flatnonzero(np.isin(group_of, list(changed)))
    folded = fold([paths[row] for row in kept], group_of[kept])
    device_bytes = by_class(before), by_class(after)
    return PlanDiff(
        (before.axis_sizes, after.axis_sizes),
        (device_bytes[0].max, device_bytes[1].max),
        tuple(Change(each.pattern, len(each.rows), *changed[each.group]) for each in folded),
        tuple(_rules_changed(before.rules, after.rules, decided_otherwise)),
        (device_bytes[0].max_host, device_bytes[1].max_host),
    )


def _rules_changed(before: AnyRules, after: AnyRules, decided_otherwise: int) -> Iterator[str]:
    """Yield the differences of the rules, in words."""
    if type(before) is not type(after):
        yield "paths or logical axis names decide"
        return
    if before.dialect != after.dialect:
        yield "the dialect"
    for name in ("optional_axes", "min_size"):  # logical rules have no min_size
        if getattr(before, name, 0) != getattr(after, name, 0):
            yield name
    changes = list(_content_changed(_comparable(before), _comparable(after)))
    yield from changes
    if not changes and decided_otherwise:
        yield f"which rule decides {counted(decided_otherwise, 'leaf')}"


def _content_changed(before: list[Any], after: list[Any]) -> Iterator[str]:
    """Say which rules are new, gone, changed or elsewhere; a rule that moved is the same rule."""
    new: list[int] = []
    gone: list[int] = []
    changed: list[int] = []
    for what, start, end, start_after, end_after in SequenceMatcher(
        a=before, b=after, autojunk=False
    ).get_opcodes():
        if what == "replace" and end - start == end_after - start_after:
            changed += range(start_after, end_after)
        elif what != "equal":
            gone += range(start, end)
            new += range(start_after, end_after)
    places: defaultdict[Any, deque[int]] = defaultdict(deque)
    for place in gone:
        places[before[place]].append(place)
    moved = [
        f"{places[after[place]].popleft()} -> {place}" for place in new if places.get(after[place])
    ]
    removed = sorted(place for kept in places.values() for place in kept)
    stayed = {int(pair.rpartition(" ")[2]) for pair in moved}
    for verb, numbers in (
        ("added", [place for place in new if place not in stayed]),
        ("removed", removed),
        ("changed", changed),
        ("moved", moved),
    ):
        if numbers:
            texts = ", ".join(map(str, numbers[:_MOST_RULES]))
            rest = f" and {len(numbers) - _MOST_RULES:,} more" * (len(numbers) > _MOST_RULES)
            yield f"{len(numbers):,} {verb} ({texts}{rest})"


def _comparable(rules: AnyRules) -> list[tuple[Any, ...]]:
    """Return per rule what is equal for equal rules, however they are given."""
    return list(map(_rule_shown, rules)) if isinstance(rules, Rules) else list(rules)


def _rule_shown(rule: tuple[Any, Any]) -> tuple[Any, ...]:
    pattern, spec = rule
    rule_spec_ = rule_spec(spec)
    if isinstance(pattern, re.Pattern):
        pattern = pattern.pattern, pattern.flags & ~re.DEBUG
    return pattern, *astuple(replace(rule_spec_, spec=spec_shown(rule_spec_.spec)))


def _on_device(kind: Kind) -> int:
    """Bytes of one leaf in the memory of the device that holds most of it."""
    return 0 if is_on_host(kind.memory_kind) else kind.device_bytes


def _aspects(kind: Kind | None) -> tuple[Any, ...]:
    """Return a leaf's shape, dtype, and its place or problem, as texts.

    Equal for one without a change.
    """
    if kind is None:
        return ()
    return str(kind.shape), dtype_shown(kind), problem_shown(kind) or placement_shown(kind)
