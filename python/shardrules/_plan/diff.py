"""Whether plans are alike: their digests, and `PlanDiff`, in which leaves and rules differ."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from dataclasses import fields
from difflib import unified_diff
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import Fsdp, has_axes, in_memory_shown, is_on_host, rule_spec
from shardrules._base.specs import as_placed, as_written, spec_shown
from shardrules._base.text import and_more, bytes_shown, counted, mesh_shown, printable, record
from shardrules._plan.align import check_distinct, match_rows
from shardrules._plan.answers import Answer
from shardrules._plan.fold import fold
from shardrules._plan.kinds import Kind, Spec, dtype_shown, placement_shown, problem_shown
from shardrules._rules.patterns import with_inline_flags
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.plan import Plan
    from shardrules._rules.logical_rules import LogicalRules

    AnyRules = Rules | LogicalRules


def plan_fingerprint(plan: Plan) -> str:
    """Digest what each leaf gets on which mesh, whatever the order of the leaves."""
    texts = [f"\t{kind_written(kind)}\n" for kind in plan.kinds]
    rows = map(texts.__getitem__, plan.kind_of.tolist())
    # With its tabs and newlines escaped no path can pass for a row of something else.
    ordered = sorted(map(operator.add, map(ascii, plan.paths), rows))
    text = "".join([ascii(plan.axis_sizes), *ordered])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def kind_written(kind: Kind) -> str:
    """Return the shape, dtype and place of leaves: equal for specs that are alike as written."""
    counted = "" if kind.status == "placed" else _written(kind._counted)
    placed = in_memory_shown(_written(kind.spec), kind.memory_kind)
    return f"{kind.shape}\t{dtype_shown(kind)}\t{placed}{counted}"


def _written(spec: Spec | None) -> str:
    return "" if spec is None else spec_shown(as_written(spec))


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
    for plan in (before, after):
        check_distinct(plan.paths, "plans are compared by paths")
    matched = np.array(match_rows(before.paths, after.paths), np.int64)
    new = np.setdiff1d(np.arange(len(after.paths)), matched)
    kinds_before = before.kind_of.astype(np.int64)
    # A kind of -1 stands for a leaf that is not there.
    kinds_after = np.where(matched < 0, -1, after.kind_of[matched] if len(after.paths) else -1)
    paths = before.paths + [after.paths[row] for row in new.tolist()]
    kinds_before = np.concatenate([kinds_before, np.full(len(new), -1)])
    kinds_after = np.concatenate([kinds_after, after.kind_of[new]])
    width = len(after.kinds) + 1
    numbers, group_of = np.unique((kinds_before + 1) * width + kinds_after + 1, return_inverse=True)
    kinds = (*before.kinds, None), (*after.kinds, None)
    places = [(number // width - 1, number % width - 1) for number in numbers.tolist()]
    groups = [Pair(kinds[0][first], kinds[1][second]) for first, second in places]
    return Pairs(paths, group_of.astype(np.int32), groups)


_MOST_LINES: Final = 40


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
    moves: bool | None = None
    """Whether devices hold other parts now; None for leaves that are new, gone or other arrays."""

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            sign, kind = ("-", self.before) if self.before is not None else ("+", self.after)
            return printable(f"{sign} {self.path}  {'  '.join(_aspects(kind))}")
        pairs = zip(_aspects(self.before), _aspects(self.after), strict=True)
        changes = "  ".join(f"{a} -> {b}" for a, b in pairs if a != b)
        delta = (_on_device(self.after) - _on_device(self.before)) * self.leaves
        sign = "+" if delta >= 0 else "-"
        still = "; nothing moves" if self.moves is False else ""
        cost = f"({sign}{bytes_shown(abs(delta))} on each device{still})"
        return printable(f"~ {self.path}  {changes}  {cost}")


class PlanDiff(Answer[Change]):
    """The differences of two plans, a row for leaves that changed alike. False without any."""

    mesh: tuple[dict[str, int], dict[str, int]]
    """Before and after."""
    bytes: tuple[int, int]
    """On the device that holds most, before and after."""
    rules: tuple[str, ...]
    """What differs in the rules, as the lines of a diff, even if each leaf gets the same."""
    host_bytes: tuple[int, int]
    """In the host's memory for the device that has most there, before and after."""

    _rows_key = "changes"

    def __bool__(self) -> bool:
        return bool(len(self)) or bool(self.rules) or self._meshes_differ

    @property
    def _meshes_differ(self) -> bool:
        return list(self.mesh[0].items()) != list(self.mesh[1].items())

    @property
    def heading(self) -> str:
        """The meshes and the lines of the rules that differ."""
        meshes = [f"mesh {' -> '.join(map(mesh_shown, self.mesh))}"] if self._meshes_differ else []
        return "\n".join([*meshes, *(["rules:"] if self.rules else []), *self.rules])

    @property
    def notes(self) -> list[str]:
        """How many leaves changed, and the bytes before and after."""
        if not self:
            return ["no differences"]
        leaves = counted(sum(change.leaves for change in self), "leaf")
        before, after = map(bytes_shown, self.bytes)
        host = " -> ".join(map(bytes_shown, self.host_bytes)) if any(self.host_bytes) else ""
        return [
            f"{leaves} changed; {before} -> {after} on the fullest device"
            + (f"; {host} in the host's memory" if host else "")
        ]

    def _json(self) -> dict[str, Any]:
        names = ("mesh", "bytes", "host_bytes", "rules")
        return {name: getattr(self, name) for name in names}

    def _row_json(self, row: Change) -> dict[str, Any]:
        return row._asdict() | {"before": _kind_json(row.before), "after": _kind_json(row.after)}


def _kind_json(kind: Kind | None) -> dict[str, Any] | None:
    if kind is None:
        return None
    return {
        "shape": kind.shape,
        "dtype": dtype_shown(kind),
        "spec": spec_shown(kind.spec),
        "memory_kind": kind.memory_kind,
        "problem": problem_shown(kind),
        "device_bytes": kind.device_bytes,
    }


def plan_diff(before: Plan, after: Plan) -> PlanDiff:
    paths, group_of, groups = paired(before, after)
    changed = {
        number: pair
        for number, pair in enumerate(groups)
        if pair.before is None or pair.after is None or not _is_alike(pair.before, pair.after)
    }
    kept = np.flatnonzero(np.isin(group_of, list(changed)))
    folded = fold([paths[row] for row in kept], group_of[kept])
    device_bytes = before.bytes_per_device(), after.bytes_per_device()
    return PlanDiff(
        (
            Change(each.pattern, len(each.rows), *pair, _is_moved(pair, before, after))
            for each in folded
            for pair in [changed[each.group]]
        ),
        mesh=(before.axis_sizes, after.axis_sizes),
        bytes=(device_bytes[0].max, device_bytes[1].max),
        rules=tuple(_rules_changed(before.rules, after.rules)),
        host_bytes=(device_bytes[0].host, device_bytes[1].host),
    )


def _is_moved(pair: Pair, before: Plan, after: Plan) -> bool | None:
    """Tell whether devices hold other parts of leaves, as far as they are the same arrays."""
    a, b = pair
    if a is None or b is None or a.spec is None or b.spec is None:
        return None
    if (a.shape, dtype_shown(a)) != (b.shape, dtype_shown(b)):
        return None
    meshes = [
        [(axis, size) for axis, size in plan.axis_sizes.items() if size > 1]
        for plan in (before, after)
    ]
    specs = as_placed(a.spec, before.axis_sizes), as_placed(b.spec, after.axis_sizes)
    return meshes[0] != meshes[1] or specs[0] != specs[1] or a.memory_kind != b.memory_kind


def _rules_changed(before: AnyRules, after: AnyRules) -> Iterator[str]:
    """Yield the differences of the rules: lines of a diff."""
    if type(before) is not type(after):
        yield "paths or logical axis names decide"
        return
    texts = [_rules_text(rules) for rules in (before, after)]
    lines = list(unified_diff(texts[0], texts[1], n=0, lineterm=""))[2:]
    changes = [f"{line[0]} {line[1:]}" for line in lines if not line.startswith("@@")]
    yield from changes[:_MOST_LINES]
    yield from and_more(len(changes), _MOST_LINES, "line")


def _rules_text(rules: AnyRules) -> list[str]:
    """Return a line for each policy and each rule: equal for rules that mean the same."""
    policies = {item.name: getattr(rules.dialect, item.name) for item in fields(rules.dialect)}
    for name in ("optional_axes", "min_size"):  # logical rules have no min_size
        policies[name] = getattr(rules, name, 0)
    head = [f"{name} = {value!r}" for name, value in policies.items()]
    if isinstance(rules, Rules):
        return [
            *head,
            *(
                f"{with_inline_flags(pattern)!r} -> {_asked_text(asked)}"
                for pattern, asked in rules
            ),
        ]
    return [*head, *(f"{name!r} -> {axes!r}" for name, axes in rules)]


def _asked_text(value: Any) -> str:
    """Return what a rule asks for, with its spec in normal form."""
    rule = rule_spec(value)
    asked: Any = rule.spec
    if has_axes(asked) and not isinstance(asked, Fsdp):
        asked = as_written(asked)
    names = ("correction", "units", "memory_kind", "optional_axes")
    options = [f"{name}={getattr(rule, name)!r}" for name in names if getattr(rule, name)]
    return ", ".join([spec_shown(asked), *options])


def _on_device(kind: Kind) -> int:
    """Bytes of one leaf in the memory of the device that holds most of it."""
    return 0 if is_on_host(kind.memory_kind) else kind.device_bytes


def _aspects(kind: Kind | None) -> tuple[str, ...]:
    """Return a leaf's shape, dtype, and its place or problem, as texts."""
    if kind is None:
        return ()
    return str(kind.shape), dtype_shown(kind), problem_shown(kind) or placement_shown(kind)


def _is_alike(a: Kind, b: Kind) -> bool:
    """Tell whether leaves of both kinds are the same arrays with specs that are alike."""
    return kind_written(a) == kind_written(b) and problem_shown(a) == problem_shown(b)
