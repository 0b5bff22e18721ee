"""Check of what leaves lose of their specs to the mesh and to their shapes.

Costs per folded path whose leaves lose something. Must not know how findings are shown.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._plan.check_leaves import advice
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded
from shardrules._plan.queries import Queries, finding, leaves_in, rules_listed
from shardrules._plan.table import (
    Loss,
    axes_named,
    axes_used,
    could_cut,
    dtype_shown,
    is_replicated,
    placement_shown,
    refused,
)
from shardrules._specs import Entries
from shardrules._text import counted

if TYPE_CHECKING:
    from shardrules._plan.table import Columns, Kind

# A number that ends a name, as in w1 and w2, is a part of the name.
_NUMBERS_OF_SIBLINGS: Final = re.compile(r"(?<![A-Za-z0-9])[0-9]+")


def dead_rules(queries: Queries) -> Iterator[Finding]:
    """Rules that match no leaf."""
    if queries.columns.leaves.path_rules is None:  # such rules are often for other trees as well
        return
    for rule in queries.columns.coverage.dead:
        yield finding(
            "warning",
            "dead",
            f"{queries.rule(rule)} matches no leaf",
            "correct the pattern, or remove the rule",
            rule=rule,
        )


def shadowed_rules(queries: Queries) -> Iterator[Finding]:
    """Rules that match leaves, all of which earlier rules win."""
    columns = queries.columns
    rules = columns.leaves.path_rules
    if rules is None:  # later rules for a name are for where the first does not fit
        return
    for rule, winners in columns.coverage.shadowed.items():
        if rule in queries.catch_alls:  # it is to win nothing
            continue
        leaves = columns.coverage.matched[rule]
        yield finding(
            "warning",
            "shadowed",
            f"{queries.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: "
            f"{rules_listed(winners)} came first",
            f"move it before {rules_listed(winners)}, or remove it"
            if rules.dialect.precedence == "first"
            else "make the patterns exclude each other, or remove it",
            rule=rule,
            leaves=leaves,
        )


def siblings(queries: Queries) -> Iterator[Finding]:
    """Leaves that differ only in numbers, with different specs."""
    columns = queries.columns
    spec_of = ["none" if kind.spec is None else placement_shown(kind) for kind in columns.kinds]
    arrays = [(kind.shape, dtype_shown(kind)) for kind in columns.kinds]
    specs_of: dict[Any, set[str]] = defaultdict(set)
    for array, spec in zip(arrays, spec_of, strict=True):
        specs_of[array].add(spec)
    alike: dict[Any, list[Folded]] = defaultdict(list)
    for one in columns.folded:
        array = arrays[one.group]
        if len(specs_of[array]) > 1:
            template = _NUMBERS_OF_SIBLINGS.sub("#", columns.paths[one.rows[0]])
            alike[template, array].append(one)
    for folded in alike.values():
        specs = dict.fromkeys(spec_of[one.group] for one in folded)
        if len(specs) > 1:
            rules = queries.rules_of(folded)
            yield finding(
                "warning",
                "siblings",
                f"{counted(leaves_in(folded), 'leaf')} that differ only in "
                f"numbers get {len(specs)} specs, {' and '.join(specs)}"
                + (f", by {rules_listed(rules)}" if rules else ""),
                "let one rule match them all, or see why the patterns tell them apart",
                folded=folded,
            )


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
            f"last rule ('.*', P()){advice(queries, folded)}",
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
