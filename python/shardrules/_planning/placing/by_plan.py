"""The columns of a tree whose leaves another plan has decided: the same paths, of any dtype.

Costs a kind per kind, and a look-up per leaf. Must not know how the other plan decided.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardrules._planning.columns import Columns
from shardrules._planning.path_rules import NO_RULE_NEEDED
from shardrules._planning.placing.derive import grouped
from shardrules._planning.placing.on_mesh import Problem, kind_on_mesh

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardrules._planning.kinds import Kind
    from shardrules._planning.leaves import LeafType
    from shardrules._planning.same_paths import Beside

__all__ = ["by_plan"]


def by_plan(planned: Columns, tree: Beside) -> Columns:
    """The sharding of each leaf on the mesh of the plan.

    Args:
        planned: The plan's columns.
        tree: The leaves of the tree, and their rows in the plan.
    """
    leaves, rows = tree
    kinds = zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    pairs, kind_of = grouped(kinds)
    made = [
        _kind(leaves.types[kind], planned.kinds[like], planned.axis_sizes) for kind, like in pairs
    ]
    types = [
        planned.leaves.types[like]._replace(dtype=own.dtype, bits=own.bits)
        for own, like in ((leaves.types[kind], like) for kind, like in pairs)
    ]
    found = replace(
        leaves,
        rules=planned.rules,
        sources=[planned.sources[row] for row in rows],
        kind_of=kind_of,
        types=types,
    )
    return Columns(found, made, planned.axis_sizes, planned.explicit_axes)


def _kind(leaf: LeafType, planned: Kind, axis_sizes: Mapping[str, int]) -> Kind:
    rule = NO_RULE_NEEDED if planned.rule is None else planned.rule
    return kind_on_mesh(
        leaf._replace(rule=rule, names=planned.names),
        planned.wanted,
        planned.spec,
        axis_sizes,
        counted=planned._counted,
        problem=Problem(planned.status, planned.message, planned.fix),
        losses=planned.losses,
        origin=planned.origin,
        dim_rules=planned.dim_rules,
        lost_rules=planned.lost_rules,
        memory_kind=planned.memory_kind,
    )
