"""A solution as suggested rules, each with what the step does with its leaves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardrules._base.rule_specs import plain_spec
from shardrules._base.specs import Entries, entries_of, entry_axes
from shardrules._plan.findings import Declared
from shardrules._plan.kinds import axes_named
from shardrules._plan.suggest.suggestion import CutReason, Reason, Suggestion

if TYPE_CHECKING:
    from shardrules._program.solve.solution import Solution


def suggestion_of(solution: Solution) -> Suggestion:
    """Return the rules of a solution, each with what the step does with its leaves."""
    result = solution._ruled
    used = frozenset().union(*(axes_named(kind.spec) for kind in result.kinds))
    unused = tuple(axis for axis in result.axis_sizes if axis not in used)
    whole = tuple(
        str(pattern) for pattern, value in solution.rules if plain_spec(value) == Entries()
    )
    declared = Declared(replicated=whole, optional_axes=(), data_axes=unused)
    return Suggestion(result._declaring(declared), tuple(_solved_reasons(solution)), declared)


def _solved_reasons(solution: Solution) -> Iterator[Reason]:
    """Yield a reason for each rule, by the roles that the step gives the first of its leaves."""
    result, step = solution._ruled, solution.step
    equations, roles = step._equations, step._roles.of
    numbers = dict(zip(step._paths, equations.body.inputs, strict=True))
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, number in enumerate(result.kind_of.tolist()):
        for rule in result.kinds[number].deciders:
            rows_of[rule].append(row)
    for rule, (pattern, _) in enumerate(result.rules):
        rows = rows_of[rule]
        dims = []
        for row in rows[:1]:
            kind = result.kinds[int(result.kind_of[row])]
            value = equations.values[numbers[f"inputs/{solution.step._place}/{result.paths[row]}"]]
            cuts = () if kind.spec is None else tuple(map(entry_axes, entries_of(kind.spec)))
            for dim, size in enumerate(value.shape):
                names = [roles.get(c, "") for c in equations.dims.classes(value.dims[dim])]
                role = " x ".join(filter(None, names)) or "other"
                axes = cuts[dim] if dim < len(cuts) else ()
                dims.append(CutReason(dim, size, role, axes))
        size = sum(result.kinds[int(result.kind_of[row])].bytes for row in rows)
        folded = tuple(
            part.pattern for part in result.folded if not {*part.rows.tolist()}.isdisjoint(rows)
        )
        yield Reason(rule, pattern, len(rows), size, folded, tuple(dims), is_understood=True)
