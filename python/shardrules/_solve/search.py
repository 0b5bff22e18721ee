"""Searches the assignment of least time that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shardrules._solve.space import Assignment, Cost, Space


class Best(NamedTuple):
    """The best assignment, and how good any can be."""

    assignment: Assignment
    cost: Cost
    bound: float
    """Seconds; no assignment takes less."""


def search(space: Space) -> Best:
    """Improve assignments variable by variable until none gets better."""

    def measured(assignment: Assignment) -> tuple[tuple[float, float], Assignment, Cost]:
        cost = space.cost(assignment)
        over = 0 if space.hbm is None else max(0, cost.peak - space.hbm)
        return (over, cost.time.total), assignment, cost

    whole: Assignment = dict.fromkeys(space.values, ())
    now = measured(whole)
    is_better = True
    while is_better:
        is_better = False
        for name, values in space.values.items():
            for value in values:
                if value != now[1][name]:
                    other = measured({**now[1], name: value})
                    if other[0] < now[0]:
                        now, is_better = other, True
    return Best(now[1], now[2], bound=0.0)
