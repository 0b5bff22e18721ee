"""Check of what leaves lose of their specs to the mesh and to their shapes.

Costs per folded path whose leaves lose something. Must not know how findings are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardrules._planning.asking.checks.queries import Queries, finding
from shardrules._planning.asking.findings import Finding, at_stake
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Loss

__all__ = ["corrections"]


class _Lost(NamedTuple):
    """Axes that leaves lose, all for one reason."""

    loss: Loss
    """The first of them."""
    is_unknown: bool
    """Whether the mesh lacks the axes, and nobody has declared that it may."""
    folded: list[Folded]
    rules: list[int]
    """Those that ask for the axes, ascending."""
    bytes: int
    has_several_shapes: bool


def corrections(queries: Queries) -> Iterator[Finding]:
    """Axes of the rules' specs that leaves do not get; axes that the mesh lacks are errors."""
    found = list(_losses(queries))
    small = sum(one.bytes for one in found if one.bytes < queries.large)
    for one in found:
        is_much = one.bytes >= queries.large or queries.matters(one.bytes, small)
        # Who lets factors of an axis cut has accepted that they cut less.
        is_accepted = one.loss.kind == "factored"
        who = queries.rules(one.rules) or queries.who(queries.columns.kinds[one.folded[0].group])
        # The message has the size of the first.
        is_like = one.has_several_shapes and one.loss.kind in ("indivisible", "factored")
        free = "" if one.is_unknown else "; costs nothing"
        yield finding(
            "error" if one.is_unknown else "warning" if is_much and not is_accepted else "info",
            "unknown-axis" if one.is_unknown else "correction",
            f"{who}: {one.loss.message}{', and the like' if is_like else ''}"
            + (f"; costs {at_stake(one.bytes)}" if one.bytes else free),
            one.loss.fix,
            folded=one.folded,
            rule=one.rules[0] if len(one.rules) == 1 else None,
            bytes=one.bytes,
        )


def _deciding(queries: Queries, folded: Folded, loss: Loss) -> tuple[int, ...]:
    """The rules that ask for what is lost; of logical rules that of the dimension."""
    kind = queries.columns.kinds[folded.group]
    if kind.names is None:
        return kind.deciders
    lost = [one.rule for one in kind.lost_rules if (one.dim, one.why) == (loss.dim, loss.kind)]
    decided = [rule for rule in kind.dim_rules[loss.dim : loss.dim + 1] if rule is not None]
    return tuple([*lost, *decided][:1])


def _losses(queries: Queries) -> Iterator[_Lost]:
    kinds = queries.columns.kinds
    alike: dict[tuple[Any, ...], list[tuple[Folded, Loss]]] = defaultdict(list)
    for one in queries.folded(lambda kind: bool(kind.losses)):
        optional = queries.optional_axes_of(kinds[one.group].rule)
        is_placed = kinds[one.group].status == "placed"
        for loss in kinds[one.group].losses:
            if not is_placed and loss.kind != "absent":
                continue  # the misfit is the finding
            is_unknown = loss.kind == "absent" and not optional.issuperset(loss.axes)
            # An axis that the mesh lacks is one finding, however many rules name it.
            key: tuple[Any, ...] = (kinds[one.group].decided_by, loss.kind, loss.dim, loss.axes)
            if loss.kind in ("absent", "optional"):
                key = (loss.axes, loss.meant, loss.beside)
            alike[is_unknown, *key].append((one, loss))
    for (is_unknown, *_), found in alike.items():
        first = found[0][1]
        yield _Lost(
            first,
            is_unknown,
            [one for one, _ in found],
            sorted({rule for one, loss in found for rule in _deciding(queries, one, loss)}),
            sum(loss.bytes * len(one.rows) for one, loss in found),
            len({kinds[one.group].shape for one, _ in found}) > 1,
        )
