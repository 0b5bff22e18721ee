"""Checks for leaves that get no spec: no rule matches, several do, or the spec does not fit.

Costs per kind of leaf. Must not know how findings are shown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardrules._format import counted
from shardrules._planning.asking.checks.queries import Queries, finding, leaves_in
from shardrules._planning.asking.checks.tables import advice
from shardrules._planning.asking.findings import Finding
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import axes_named, refused
from shardrules._specs import Entries

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns
    from shardrules._planning.kinds import Kind

__all__ = ["misfits", "refusals", "unmatched", "unplaceable"]

_Words = tuple[str | None, str | None]  # message and fix


def unmatched(queries: Queries) -> Iterator[Finding]:
    """Leaves that no rule matches."""
    folded = queries.folded(lambda kind: kind.status == "unmatched")
    if folded:
        leaves = counted(leaves_in(folded), "leaf")
        yield finding(
            "error",
            "unmatched",
            f"no rule matches {leaves} of {len(queries.columns.paths):,}",
            f"add rules for them, such as {queries.example(folded[0])}; or replicate them by a "
            f"last rule {queries.example_of_a_catch_all}{advice(queries, folded)}",
            folded=folded,
            bytes=queries.device_bytes(folded),
        )


def misfits(queries: Queries) -> Iterator[Finding]:
    """Leaves whose rule does not fit, or of which several rules claim to be the only one."""
    kinds = queries.columns.kinds
    alike: dict[tuple[Any, _Words], list[Folded]] = defaultdict(list)
    for one in queries.folded(lambda kind: kind.status in ("misfit", "ambiguous")):
        problem = _problem(kinds[one.group])
        if problem is not None:
            alike[kinds[one.group].decided_by, problem].append(one)
    for (_, problem), folded in alike.items():
        kind = kinds[folded[0].group]
        rule = kind.rule
        if kind.status == "ambiguous":
            message, fix = kind.message, f"{kind.fix}; `explain` a path to see which they are"
        else:
            who = _who(queries, kind)
            message = f"{who} cannot be applied to the shape {kind.shape}: {problem[0]}"
            fix = problem[1] or "change the rule, the mesh or the array"
        held = queries.device_bytes(folded)
        yield finding("error", "misfit", str(message), fix, folded=folded, rule=rule, bytes=held)


def _problem(kind: Kind) -> _Words | None:
    """Why a kind is not placed, and the fix; None if the mesh lacks axes, which is reported so."""
    errors = [loss for loss in kind.losses if loss.is_error]
    others = [loss for loss in errors if loss.kind != "absent"]
    if len(others) == len(errors):
        return kind.message, kind.fix
    return refused(others) if others else None


def unplaceable(queries: Queries) -> Iterator[Finding]:
    """Leaves whose spec the corrections let through, and JAX refuses."""
    columns = queries.columns
    refused = {
        number: list(refusals(kind, columns))
        for number, kind in enumerate(columns.kinds)
        if kind.spec is not None and kind.shape is not None
    }
    alike: dict[tuple[Any, tuple[str, str]], list[Folded]] = defaultdict(list)
    for one in queries.folded_kinds({number for number, found in refused.items() if found}):
        for refusal in refused[one.group]:
            alike[columns.kinds[one.group].decided_by, refusal].append(one)
    for (_, (why, fix)), folded in alike.items():
        kind = columns.kinds[folded[0].group]
        who, rule = _who(queries, kind), kind.rule
        held = queries.device_bytes(folded)
        message = f"{who} cannot be placed: {why}"
        yield finding("error", "misfit", message, fix, folded=folded, rule=rule, bytes=held)


def _who(queries: Queries, kind: Kind) -> str:
    return "a spec" if kind.decided_by is None else queries.who(kind)


def refusals(kind: Kind, columns: Columns) -> Iterator[tuple[str, str]]:
    """(message, fix) for each reason why JAX makes no sharding of a kind's spec."""
    spec = kind.spec if kind.spec is not None else Entries()
    for axis in sorted(axes_named(spec) - columns.axis_sizes.keys()):
        yield (
            f"the mesh has no axis {axis!r}",
            "rename it, add it to the mesh, or drop it with Correction(absent='drop_axis')",
        )
    for name in ("unreduced", "reduced"):
        for axis in sorted(frozenset(getattr(spec, name, None) or ()) - columns.explicit_axes):
            is_there = axis in columns.axis_sizes
            lacks = "is not Explicit" if is_there else "is no axis of the mesh"
            yield (
                f"{axis!r} is {name} and {lacks}",
                f"give the mesh that axis with AxisType.Explicit, or leave {name} out",
            )
    if kind.shape is not None and len(spec) > len(kind.shape):
        yield (
            f"the spec has {counted(len(spec), 'entry')}, the array "
            f"{counted(len(kind.shape), 'dimension')}",
            "shorten the spec, or truncate it with Correction(rank='truncate')",
        )
