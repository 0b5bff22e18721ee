"""A tree beside a plan: the plan's row of each leaf, by path, where the leaves have one shape.

Costs a walk over the tree and two look-ups per leaf. Must not know what is planned for a leaf.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np

from shardrules._plan.fold import fold
from shardrules._plan.survey import survey
from shardrules._plan.table import Leaves
from shardrules._rules.names import unboxed
from shardrules._rules.rules import Rules
from shardrules._text import and_more, counted, near_shown, printable_lines

_SHOWN: Final = 10


class Beside(NamedTuple):
    """The leaves of a tree, each with its row in a plan."""

    leaves: Leaves
    rows: list[int]


def beside(leaves: Leaves, planned: Leaves) -> Beside:
    """The leaves of a tree, which were surveyed, beside those of a plan, which may have more.

    Raises:
        ValueError: The plan has no leaf of some path, or has it in another shape; the message lists
            the first of them, with the nearest path.
    """
    rows = [planned.rows.get(path, -1) for path in leaves.paths]
    if -1 in rows:
        unknown = [path for path, row in zip(leaves.paths, rows, strict=True) if row == -1]
        raise ValueError(_unknown_message(unknown, planned))
    shapes, others = ([one.shape for one in each.types] for each in (leaves, planned))
    kinds = zip(leaves.kind_of.tolist(), planned.kind_of[rows].tolist(), strict=True)
    differ = [row for row, (kind, like) in enumerate(kinds) if shapes[kind] != others[like]]
    if differ:
        raise ValueError(
            _message(
                f"{counted(len(differ), 'leaf')} of the tree {_have(differ)} another shape than "
                "planned; plan this tree",
                [
                    f"{leaves.paths[row]}: {shapes[leaves.kind_of[row]]}, planned as "
                    f"{others[planned.kind_of[rows[row]]]}"
                    for row in differ[:_SHOWN]
                ],
                len(differ),
            )
        )
    return Beside(leaves, rows)


def surveyed(tree: Any, planned: Leaves) -> Leaves:
    """The leaves of a tree; those in boxes by the path that the plan has: with the box or without.

    Raises:
        TypeError, ValueError: As `survey`.
    """
    rules = Rules((), planned.paths_dialect)
    leaves = survey(tree, rules)
    if all(path in planned.rows for path in leaves.paths):
        return leaves
    boxes = unboxed(tree)
    without = survey(boxes.tree, rules)
    if not any(path in planned.rows for path in without.paths):
        return leaves
    return replace(without, tree=boxes.boxed(without.tree))


def _unknown_message(unknown: list[str], planned: Leaves) -> str:
    folded = [one.pattern for one in fold(unknown, np.zeros(len(unknown), np.int32))]
    known = [one.pattern for one in planned.folded]
    return _message(
        f"{counted(len(unknown), 'leaf')} of the tree {_have(unknown)} no place in the plan, which "
        "decides leaves by their paths; plan this tree with plan.rules, or the state of an "
        "optimizer with plan.for_optimizer(state)",
        [path + near_shown(path, known) for path in folded[:_SHOWN]],
        len(folded),
    )


def _have(leaves: list[Any]) -> str:
    return "has" if len(leaves) == 1 else "have"


def _message(what: str, leaves: list[str], count: int) -> str:
    more = and_more(count, _SHOWN, "line")
    return printable_lines([f"{what}:", *(f"    {line}" for line in [*leaves, *more])])
