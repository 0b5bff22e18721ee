"""Checks of rules: unmatched, dead and shadowed ones, specs that do not fit, unused mesh axes."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.specs import Entries, axes_in_tags
from shardrules._base.text import counted
from shardrules._plan.check_context import Queries, check_of, finding, leaves_in, rules_listed
from shardrules._plan.check_leaves import advice
from shardrules._plan.edits import renamed_axes
from shardrules._plan.findings import Finding, at_stake
from shardrules._plan.fold import Folded
from shardrules._plan.kinds import (
    Kind,
    Loss,
    axes_named,
    could_cut,
    is_replicated,
    placement_shown,
    refused,
)

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

# A number that ends a name, as in w1 and w2, is a part of the name.
_NUMBERS_OF_SIBLINGS: Final = re.compile(r"(?<![A-Za-z0-9])[0-9]+")


@check_of("dead", "warning, info", "rules that match no leaf; info for logical rules")
def dead_rules(queries: Queries) -> Iterator[Finding]:
    if queries.plan._leaves.path_rules is None:  # such rules are often for other trees as well
        return
    for rule in queries.dead:
        yield finding(
            "warning",
            "dead",
            f"{queries.rule(rule)} matches no leaf",
            "correct the pattern, or remove the rule",
            rule=rule,
        )


@check_of("shadowed", "warning", "rules that match leaves, all of which earlier rules win")
def shadowed_rules(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    rules = plan._leaves.path_rules
    if rules is None:  # later rules for a name are for where the first does not fit
        return
    for rule, winners in plan.coverage.shadowed.items():
        if rule in queries.catch_alls:  # it is to win nothing
            continue
        leaves = plan.coverage.matched[rule]
        is_first = rules.dialect.precedence == "first"
        yield finding(
            "warning",
            "shadowed",
            f"{queries.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: "
            f"{rules_listed(winners)} came first",
            f"move it before {rules_listed(winners)}, or remove it"
            if is_first
            else "make the patterns exclude each other, or remove it",
            rule=rule,
            leaves=leaves,
        )


@check_of("siblings", "warning", "leaves that differ only in numbers, with different specs")
def siblings(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    arrays = [(kind.shape, str(kind.dtype)) for kind in plan.kinds]
    if len(set(arrays)) == len(arrays):
        return
    spec_of = ["none" if kind.spec is None else placement_shown(kind) for kind in plan.kinds]
    specs_of: dict[Any, set[str]] = defaultdict(set)
    for array, spec in zip(arrays, spec_of, strict=True):
        specs_of[array].add(spec)
    groups: dict[Any, list[Folded]] = defaultdict(list)
    for part in plan.folded:
        array = arrays[part.group]
        if len(specs_of[array]) > 1:
            template = _NUMBERS_OF_SIBLINGS.sub("#", plan.paths[part.rows[0]])
            groups[template, array].append(part)
    for folded in groups.values():
        specs = dict.fromkeys(spec_of[part.group] for part in folded)
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
                mend=queries.added_rule(folded, opens_numbers=True),
            )


@check_of("uncut", "warning", "leaves that a mesh axis could cut, as it cuts others like them")
def uncut(queries: Queries) -> Iterator[Finding]:
    """Leaves that a mesh axis could cut as it cuts others like them, but does not.

    Others are like a leaf if they have no more dimensions: an axis for the experts of a mixture
    alone says nothing about matrices, but one for matrices does about experts.
    """
    plan = queries.plan
    state = {int(plan.kind_of[row]) for row in plan._leaves.optimizer_rows}
    for axis, size in plan.axis_sizes.items():
        # ZeRO-1 cuts optimizer state by axes that do not cut parameters.
        kinds = _forgotten(queries, axis, state)
        folded = queries.undeclared(queries.folded_kinds(kinds))
        cost = _saved_by(queries, size, folded)
        if not queries.is_much(cost):
            continue
        rules = queries.rules_of(folded)
        is_by_path = plan._leaves.path_rules is not None
        where = "the spec" if is_by_path else "a rule for one of their names"
        yield finding(
            "warning",
            "uncut",
            f"the mesh axis {axis!r} could cut {counted(leaves_in(folded), 'leaf')} "
            f"({queries.rules(rules) or 'no rule'}), as it cuts others like them, but does not: "
            f"it costs {at_stake(cost)}",
            f"name {axis!r} in {where}, or declare them replicated",
            folded=folded,
            rule=rules[0] if len(rules) == 1 else None,
            bytes=cost,
            mend=queries.added_rule(folded),
        )


def _forgotten(queries: Queries, axis: str, state: set[int]) -> set[int]:
    """Find the kinds that this axis does not cut, though it cuts others like them.

    Parameters are like parameters, and optimizer state, `state`, is like optimizer state.
    """
    plan, counts = queries.plan, queries.plan.counts.tolist()
    cut: dict[tuple[bool, int], int] = defaultdict(int)
    for number, kind in enumerate(plan.kinds):
        if axis in axes_named(kind.spec) and plan.axis_sizes[axis] > 1:
            cut[number in state, len(kind.shape or ())] += kind.bytes * counts[number]
    if not cut:
        return set()
    return {
        number
        for number, kind in enumerate(plan.kinds)
        if could_cut(axis, kind, plan.axis_sizes)
        # What is replicated, or has lost the axis, is reported as that.
        and not is_replicated(kind, plan.axis_sizes)
        and axis not in axes_named(kind.wanted)
        and queries.large
        <= sum(
            size
            for (in_state, rank), size in cut.items()
            if in_state == (number in state) and rank <= len(kind.shape or ())
        )
    }


def _saved_by(queries: Queries, parts: int, folded: list[Folded]) -> int:
    """Bytes of these leaves on the fullest device that a cut into parts would save."""
    kinds = queries.plan.kinds
    return sum(
        (kind.device_bytes - kind.device_bytes // parts) * len(part.rows)
        for part in folded
        for kind in [kinds[part.group]]
    )


@check_of(
    "unused-axis",
    "warning, info",
    "mesh axes that cut no leaf and are not declared to be for data; info if little could be "
    "saved by them, or only rules for no leaf name them",
)
def unused_axes(queries: Queries) -> Iterator[Finding]:
    plan = queries.plan
    # Locks know rules alone.
    specs = [plan._spec_of_rule(rule) for kind in plan.kinds for rule in kind.deciders]
    requested = [kind.wanted for kind in plan.kinds]
    named = frozenset().union(*map(axes_named, dict.fromkeys([*specs, *requested])))
    # An axis that leaves lose, or that a misspelt one means, is reported as a correction.
    losses = [loss for kind in plan.kinds for loss in kind.losses]
    lost = {a for loss in losses for a in (*loss.axes, *loss.beside, *loss.meant)}
    for axis, dead in queries.dead_rules_of.items():
        if axis in queries.data_axes or axis in lost:
            continue
        size = plan.axis_sizes[axis]
        could = queries.folded([could_cut(axis, kind, plan.axis_sizes) for kind in plan.kinds])
        cost = _saved_by(queries, size, queries.undeclared(could))
        costs, fix = f"everything is held {size} times along it", "name it in a rule"
        if axis in named:
            costs, fix, cost = f"{costs}, though rules name it", "`explain` a path to see why", 0
        elif dead:
            costs += f"; it is named only by {queries.rules(dead)}, which no leaf meets"
            fix = "correct the rule" if len(dead) == 1 else "correct the rules"
        alone = dead if axis not in named else []
        is_said = alone and _are_for_others(queries)
        is_warning = queries.is_much(cost) and not is_said
        # Where a rule should name the axis, the declaration would only hide that.
        is_for_data = not (is_warning or dead or axis in named)
        yield finding(
            "warning" if is_warning else "info",
            "unused-axis",
            f"the mesh axis {axis!r} cuts no leaf: {costs}",
            f"{fix}; or declare that it cuts data alone: data_axes=[{axis!r}]",
            rule=alone[0] if len(alone) == 1 else None,
            bytes=cost,
            mend=f"data_axes=[{axis!r}]" if is_for_data else queries.added_rule(could),
        )


def _are_for_others(queries: Queries) -> bool:
    """Return whether rules for no leaf are known to be for no leaf, or are warned of themselves.

    Logical rules are often for activations; unless leaves have names that no rule knows, or lack
    some.
    """
    plan = queries.plan
    if plan._leaves.path_rules is not None:
        return True
    names_of_rules = {None, *(name for name, _ in plan.rules)}
    names = itertools.chain(*(kind.names or () for kind in plan.kinds))
    return not queries.fewer_names and names_of_rules.issuperset(names)


_Words = tuple[str | None, str | None]  # message and fix


@check_of("unmatched", "error", "leaves that no rule matches")
def unmatched(queries: Queries) -> Iterator[Finding]:
    folded = queries.folded([kind.status == "unmatched" for kind in queries.plan.kinds])
    if folded:
        leaves, mend = counted(leaves_in(folded), "leaf"), queries.added_rule(folded)
        example = f", such as {mend}" if mend else ""
        yield finding(
            "error",
            "unmatched",
            f"no rule matches {leaves} of {len(queries.plan.paths):,}",
            f"add rules for them{example}; or replicate them by a "
            f"last rule ('.*', P()){advice(queries, folded)}",
            folded=folded,
            mend=mend,
            bytes=queries.device_bytes(folded),
        )


@check_of("misfit", "error", "leaves that cannot be sharded as their rule says")
def misfits(queries: Queries) -> Iterator[Finding]:
    """Leaves whose rule does not fit, or of which several rules claim to be the only one."""
    kinds = queries.plan.kinds
    groups: dict[tuple[Any, _Words], list[Folded]] = defaultdict(list)
    for part in queries.folded([kind.status in ("misfit", "ambiguous") for kind in kinds]):
        problem = _misfit_words(kinds[part.group])
        if problem is not None:
            groups[kinds[part.group].decided_by, problem].append(part)
    for (_, problem), folded in groups.items():
        kind = kinds[folded[0].group]
        rule = kind.rule
        if kind.status == "ambiguous":
            message, fix = kind.message, f"{kind.fix}; `explain` a path to see which they are"
        else:
            who = _who(queries, kind)
            message = f"{who} cannot be applied to the shape {kind.shape}: {problem[0]}"
            fix = problem[1] or "change the rule, the mesh or the array"
        cost = queries.device_bytes(folded)
        yield finding(
            "error",
            "misfit",
            str(message),
            fix,
            folded=folded,
            rule=rule,
            bytes=cost,
            mend=queries.added_rule(folded),
        )


def _misfit_words(kind: Kind) -> _Words | None:
    """Return why a kind is not placed, and the fix.

    None if the mesh lacks axes, which is reported so.
    """
    errors = [loss for loss in kind.losses if loss.is_error]
    others = [loss for loss in errors if loss.kind != "absent"]
    if len(others) == len(errors):
        return kind.message, kind.fix
    return refused(others) if others else None


@check_of("misfit")
def unplaceable(queries: Queries) -> Iterator[Finding]:
    """Leaves whose spec the corrections let through, and JAX refuses."""
    plan = queries.plan
    refused = {
        number: list(refusals(kind, plan))
        for number, kind in enumerate(plan.kinds)
        if kind.spec is not None and kind.shape is not None
    }
    groups: dict[tuple[Any, tuple[str, str]], list[Folded]] = defaultdict(list)
    for part in queries.folded_kinds({number for number, reasons in refused.items() if reasons}):
        for refusal in refused[part.group]:
            groups[plan.kinds[part.group].decided_by, refusal].append(part)
    for (_, (why, fix)), folded in groups.items():
        kind = plan.kinds[folded[0].group]
        who, rule = _who(queries, kind), kind.rule
        cost = queries.device_bytes(folded)
        message = f"{who} cannot be placed: {why}"
        mend = queries.added_rule(folded)
        yield finding(
            "error", "misfit", message, fix, folded=folded, rule=rule, bytes=cost, mend=mend
        )


def _who(queries: Queries, kind: Kind) -> str:
    return "a spec" if kind.decided_by is None else queries.who(kind)


def refusals(kind: Kind, plan: Plan) -> Iterator[tuple[str, str]]:
    """(message, fix) for each reason why JAX makes no sharding of a kind's spec."""
    spec = kind.spec if kind.spec is not None else Entries()
    for axis in sorted(axes_named(spec) - plan.axis_sizes.keys()):
        yield (
            f"the mesh has no axis {axis!r}",
            f"rename it, add it to the mesh, or declare it in the rules: optional_axes=[{axis!r}]",
        )
    for name, tagged in axes_in_tags(spec).items():
        for axis in sorted({*tagged} - plan._mesh.explicit_axes):
            is_there = axis in plan.axis_sizes
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


@check_of("unknown-axis", "error", "axes that rules name and the mesh lacks")
@check_of(
    "correction",
    "warning, info",
    "axes of a rule's spec that leaves do not get, because of their shapes or the mesh; info if "
    "that costs less than `large`",
)
def corrections(queries: Queries) -> Iterator[Finding]:
    """Axes of the rules' specs that leaves do not get; axes that the mesh lacks are errors."""
    losses = list(_losses(queries))
    small = sum(lost.bytes for lost in losses if lost.bytes < queries.large)
    for lost in losses:
        is_much = lost.bytes >= queries.large or queries.matters(lost.bytes, small)
        who = queries.rules(lost.rules) or queries.who(queries.plan.kinds[lost.folded[0].group])
        # The message has the size of the first.
        is_like = lost.has_several_shapes and lost.loss.kind == "indivisible"
        free = "" if lost.is_unknown else "; costs nothing"
        # Specs of others are given to JAX as they are.
        refused = lost.loss.kind == "indivisible" and not queries.plan._leaves.is_corrected
        if refused:
            free = "; JAX refuses it"
        yield finding(
            "error" if lost.is_unknown or refused else "warning" if is_much else "info",
            "unknown-axis" if lost.is_unknown else "misfit" if refused else "correction",
            f"{who}: {lost.loss.message}{', and the like' if is_like else ''}"
            + (f"; costs {at_stake(lost.bytes)}" if lost.bytes else free),
            lost.loss.fix,
            folded=lost.folded,
            rule=lost.rules[0] if len(lost.rules) == 1 else None,
            bytes=lost.bytes,
            mend=_mend_of_loss(queries, lost),
        )


def _mend_of_loss(queries: Queries, lost: _Lost) -> str:
    """Return the rule with the axis that was meant, or the argument that declares the loss."""
    axes, meant = lost.loss.axes, lost.loss.meant
    if lost.is_unknown and not meant:
        return f"optional_axes={list(axes)}"
    if lost.is_unknown and lost.rules and queries.plan._leaves.path_rules is not None:
        return renamed_axes(queries.plan.rules[lost.rules[0]], dict(zip(axes, meant, strict=False)))
    return queries.added_rule(lost.folded) if lost.loss.kind in ("rank", "duplicate") else ""


def _deciding(queries: Queries, folded: Folded, loss: Loss) -> tuple[int, ...]:
    """Return the rules that ask for what is lost; of logical rules that of the dimension."""
    kind = queries.plan.kinds[folded.group]
    if kind.names is None:
        return kind.deciders
    lost = [
        rule_loss.rule
        for rule_loss in kind.lost_rules
        if (rule_loss.dim, rule_loss.why) == (loss.dim, loss.kind)
    ]
    decided = [rule for rule in kind.dim_rules[loss.dim : loss.dim + 1] if rule is not None]
    return tuple([*lost, *decided][:1])


def _losses(queries: Queries) -> Iterator[_Lost]:
    kinds = queries.plan.kinds
    groups: dict[tuple[Any, ...], list[tuple[Folded, Loss]]] = defaultdict(list)
    for part in queries.folded([kind.losses for kind in kinds]):
        optional = queries.optional_axes_of(kinds[part.group].rule)
        is_placed = kinds[part.group].status == "placed"
        for loss in kinds[part.group].losses:
            if not is_placed and loss.kind != "absent":
                continue  # the misfit is the finding
            is_unknown = loss.kind == "absent" and not optional.issuperset(loss.axes)
            # An axis that the mesh lacks is one finding, however many rules name it.
            key: tuple[Any, ...] = (kinds[part.group].decided_by, loss.kind, loss.dim, loss.axes)
            if loss.kind in ("absent", "optional"):
                key = (loss.axes, loss.meant, loss.beside)
            groups[is_unknown, *key].append((part, loss))
    for (is_unknown, *_), pairs in groups.items():
        first = pairs[0][1]
        yield _Lost(
            first,
            is_unknown,
            [part for part, _ in pairs],
            sorted({rule for part, loss in pairs for rule in _deciding(queries, part, loss)}),
            sum(loss.bytes * len(part.rows) for part, loss in pairs),
            len({kinds[part.group].shape for part, _ in pairs}) > 1,
        )
