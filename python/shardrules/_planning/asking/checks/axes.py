"""Checks of mesh axes that do not cut what they could: the leaves that they forget, or all of them.

Costs per kind of leaf and mesh axis. Must not know how findings are shown.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator

from shardrules._format import counted
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in
from shardrules._planning.asking.findings import Finding, at_stake
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import axes_named, axes_used, could_cut, is_replicated

__all__ = ["uncut", "unused_axes"]


def uncut(queries: Queries) -> Iterator[Finding]:
    """Leaves that a mesh axis could cut as it cuts others like them, but does not.

    Others are like a leaf if they have no more dimensions: an axis for the experts of a mixture
    alone says nothing about matrices, but one for matrices does about experts.
    """
    columns = queries.columns
    state = {int(columns.kind_of[row]) for row in columns.leaves.optimizer_rows}
    for axis, size in columns.axis_sizes.items():
        # ZeRO-1 cuts optimizer state by axes that do not cut parameters.
        chosen = _forgotten(queries, axis, in_state=False, state=state)
        chosen |= _forgotten(queries, axis, in_state=True, state=state)
        folded = queries.undeclared(queries.folded_kinds(chosen))
        cost = _saved_by(queries, size, folded)
        if not queries.is_much(cost):
            continue
        rules = queries.rules_of(folded)
        yield finding(
            "warning",
            "uncut",
            f"the mesh axis {axis!r} could cut {counted(leaves_in(folded), 'leaf')} "
            f"({queries.rules(rules) or 'no rule'}), as it cuts others like them, but does not: "
            f"it costs {at_stake(cost)}",
            f"name {axis!r} in the spec, or declare them replicated",
            folded=folded,
            rule=rules[0] if len(rules) == 1 else None,
            bytes=cost,
        )


def _forgotten(queries: Queries, axis: str, *, in_state: bool, state: set[int]) -> set[int]:
    """Kinds of parameters, or of optimizer state, whose like this axis cuts, but not them."""
    columns = queries.columns
    mine = [(n, kind) for n, kind in enumerate(columns.kinds) if (n in state) == in_state]
    counts = columns.counts.tolist()
    cut: dict[int, int] = defaultdict(int)
    for number, kind in mine:
        if axis in axes_used(kind.spec, columns.axis_sizes):
            cut[len(kind.shape or ())] += kind.bytes * counts[number]
    return {
        number
        for number, kind in mine
        if could_cut(axis, kind, columns.axis_sizes)
        # What is replicated, or has lost the axis, is reported as that.
        and not is_replicated(kind, columns.axis_sizes)
        and axis not in axes_named(kind.wanted)
        and sum(held for rank, held in cut.items() if rank <= len(kind.shape or ()))
        >= queries.large
    }


def _saved_by(queries: Queries, parts: int, folded: list[Folded]) -> int:
    """Bytes of these leaves on the fullest device that a cut into parts would save."""
    kinds = queries.columns.kinds
    return sum(
        (kind.device_bytes - kind.device_bytes // parts) * len(one.rows)
        for one in folded
        for kind in [kinds[one.group]]
    )


def unused_axes(queries: Queries) -> Iterator[Finding]:
    """Axes that cut no leaf and are not declared to cut data; a warning where they could."""
    columns = queries.columns
    # Locks know rules alone.
    specs = [columns.spec_of_rule(rule) for kind in columns.kinds for rule in kind.deciders]
    wanted = [kind.wanted for kind in columns.kinds]
    named = frozenset().union(*map(axes_named, dict.fromkeys([*specs, *wanted])))
    # An axis that leaves lose, or that a misspelt one means, is reported as a correction.
    losses = [loss for kind in columns.kinds for loss in kind.losses]
    lost = {a for loss in losses for a in (*loss.axes, *loss.beside, *loss.meant)}
    for axis, dead in queries.dead_rules_of.items():
        if axis in queries.data_axes or axis in lost:
            continue
        size = columns.axis_sizes[axis]
        could = queries.folded(lambda kind, axis=axis: could_cut(axis, kind, columns.axis_sizes))  # type: ignore[misc]
        cost = _saved_by(queries, size, queries.undeclared(could))
        costs, fix = f"everything is held {size} times along it", "name it in a rule"
        if axis in named:
            costs, fix, cost = f"{costs}, though rules name it", "`explain` a path to see why", 0
        elif dead:
            costs += f"; it is named only by {queries.rules(dead)}, which no leaf meets"
            fix = "correct the rule" if len(dead) == 1 else "correct the rules"
        alone = dead if axis not in named else []
        is_said = alone and _are_for_others(queries)
        yield finding(
            "warning" if queries.is_much(cost) and not is_said else "info",
            "unused-axis",
            f"the mesh axis {axis!r} cuts no leaf: {costs}",
            f"{fix}; or declare that it cuts data alone: data_axes=[{axis!r}]",
            rule=alone[0] if len(alone) == 1 else None,
            bytes=cost,
        )


def _are_for_others(queries: Queries) -> bool:
    """Whether rules for no leaf are known to be for no leaf, or are warned of themselves.

    Logical rules are often for activations; unless leaves have names that no rule knows, or lack
    some.
    """
    columns = queries.columns
    if columns.leaves.path_rules is not None:
        return True
    known = {None, *(name for name, _ in columns.rules)}
    names = itertools.chain(*(kind.names or () for kind in columns.kinds))
    return not queries.fewer_names and known.issuperset(names)
