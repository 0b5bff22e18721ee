"""`Plan.check`: the coverage contract, which is that nothing large is replicated silently.

Each check is one function from a plan to findings; all run, and all is reported at once. Here are
those of rules: unmatched, dead and shadowed ones, specs that do not fit, unused mesh axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from shardrules._base.arguments import check_choice
from shardrules._base.specs import Entries, axes_in_tags
from shardrules._base.text import counted, mesh_shown
from shardrules._plan import check_leaves
from shardrules._plan.check_context import (
    KINDS,
    Check,
    CheckContext,
    finding,
    leaves_in,
    only_one,
    rules_listed,
)
from shardrules._plan.findings import (
    LEVELS,
    CheckKind,
    Declared,
    Finding,
    FindingKind,
    Findings,
    Level,
    at_stake,
)
from shardrules._plan.fold import Folded
from shardrules._plan.kinds import DEFAULT_LARGE, Kind, Loss, axes_named, could_cut, is_replicated

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan


def run_checks(
    plan: Plan,
    *,
    large: int = DEFAULT_LARGE,
    declared: Declared,
    head_dim: int | None = None,
    hbm: int | None = None,
    levels: Mapping[CheckKind, Level | Literal["off"]] | None = None,
) -> Findings:
    """See `Plan.check`."""
    new_levels: dict[FindingKind, Level | Literal["off"]] = dict((levels or {}).items())
    for kind, level in new_levels.items():
        check_choice("levels: a kind of finding", kind, tuple(KINDS))
        check_choice(f"levels: the level of {kind!r}", level, (*LEVELS, "off"))
    context = CheckContext(plan, large, declared, head_dim, hbm)
    others = "paths" if context.path_rules is None else "names"
    findings = [
        finding._replace(level=level)
        for check, rules_of in (*check_leaves.CHECKS, *CHECKS)
        if rules_of != others
        for finding in check(context)
        if (level := new_levels.get(finding.kind, finding.level)) != "off"
    ]
    counts = f"{counted(len(plan.paths), 'leaf')}, {counted(len(plan.rules), 'rule')}"
    off = ", ".join(kind for kind, level in new_levels.items() if level == "off")
    scope = f"{counts}, on {mesh_shown(plan.axis_sizes) or 'one device'}"
    return Findings(findings, f"{scope}; not looked for: {off}" if off else scope)


# Logical rules are often for activations, or for other trees as well.
def dead_rules(context: CheckContext) -> Iterator[Finding]:
    for rule in context.dead:
        message = f"{context.rule(rule)} matches no leaf"
        yield finding("dead", message, "correct the pattern, or remove the rule", rule=rule)


# Later logical rules for a name are for where the first does not fit.
def shadowed_rules(context: CheckContext) -> Iterator[Finding]:
    coverage = context.plan.coverage
    for rule, winners in coverage.shadowed.items():
        if rule in context.catch_alls:  # it is to win nothing
            continue
        leaves, first = coverage.matched[rule], rules_listed([*winners])
        is_first = context.path_rules and context.path_rules.dialect.precedence == "first"
        yield finding(
            "shadowed",
            f"{context.rule(rule)} matches {counted(leaves, 'leaf')}, but wins none: {first} came "
            "first",
            f"{f'move it before {first}' if is_first else 'make the patterns exclude each other'}"
            ", or remove it",
            rule=rule,
            leaves=leaves,
        )


def uncut(context: CheckContext) -> Iterator[Finding]:
    """Leaves that a mesh axis could cut as it cuts others like them, but does not.

    Others are like a leaf if they have no more dimensions: an axis for the experts of a mixture
    alone says nothing about matrices, but one for matrices does about experts.
    """
    plan = context.plan
    # ZeRO-1 cuts optimizer state by axes that do not cut parameters.
    state = {int(plan.kind_of[row]) for row in plan._leaves.optimizer_rows}
    for axis, size in context.sizes.items():
        folded = context.undeclared(context.folded(_forgotten(context, axis, state)))
        cost = _saved_by(context, size, folded)
        if not context.is_much(cost):
            continue
        rules = context.rules_of(folded)
        where = "a rule for one of their names" if context.path_rules is None else "the spec"
        yield finding(
            "uncut",
            f"the mesh axis {axis!r} could cut {counted(leaves_in(folded), 'leaf')} "
            f"({context.rules(rules) or 'no rule'}), as it cuts others like them, but does not: "
            f"it costs {at_stake(cost)}",
            f"name {axis!r} in {where}, or declare them replicated",
            folded,
            rule=only_one(rules),
            bytes=cost,
        )


def _forgotten(context: CheckContext, axis: str, state: set[int]) -> list[bool]:
    """Tell of each kind whether this axis does not cut it, though it cuts others like it.

    Parameters are like parameters, and optimizer state, `state`, is like optimizer state.
    """
    sizes, counts = context.sizes, context.plan.counts.tolist()
    bytes_of_rank: dict[tuple[bool, int], int] = defaultdict(int)
    for number, kind in enumerate(context.kinds):
        if axis in axes_named(kind.spec) and sizes[axis] > 1:
            bytes_of_rank[number in state, len(kind.shape or ())] += kind.bytes * counts[number]
    if not bytes_of_rank:
        return []
    return [
        could_cut(axis, kind, sizes)
        # What is replicated, or has lost the axis, is reported as that.
        and not is_replicated(kind, sizes)
        and axis not in axes_named(kind.wanted)
        and context.large
        <= sum(
            size
            for (in_state, rank), size in bytes_of_rank.items()
            if in_state == (number in state) and rank <= len(kind.shape or ())
        )
        for number, kind in enumerate(context.kinds)
    ]


def _saved_by(context: CheckContext, parts: int, folded: list[Folded]) -> int:
    """Return the bytes on the fullest device that a cut of these leaves into parts would save."""
    sizes = [(context.kinds[part.group].device_bytes, len(part.rows)) for part in folded]
    return sum([(size - size // parts) * leaves for size, leaves in sizes])


def unused_axes(context: CheckContext) -> Iterator[Finding]:
    plan, kinds = context.plan, context.kinds
    # Locks know rules alone.
    specs = [plan._spec_of_rule(rule) for kind in kinds for rule in kind.deciders]
    wanted_specs = [kind.wanted for kind in kinds]
    named_axes = frozenset().union(*map(axes_named, dict.fromkeys([*specs, *wanted_specs])))
    # An axis that leaves lose, or that a misspelt one means, is reported as a correction.
    losses = [loss for kind in kinds for loss in kind.losses]
    lost_axes = {a for loss in losses for a in (*loss.axes, *loss.beside, *loss.meant)}
    # Dead rules for paths are told themselves; those for names are often for activations, unless
    # leaves have names that no rule knows.
    rule_names = {None, *[name for name, _ in plan.rules]}
    are_told = context.path_rules is not None or all(
        rule_names.issuperset(kind.names or ()) for kind in kinds
    )
    for axis, dead in context.dead_rules_of.items():
        if axis in context.data_axes or axis in lost_axes:
            continue
        size = context.sizes[axis]
        could = context.folded([could_cut(axis, kind, context.sizes) for kind in kinds])
        cost = _saved_by(context, size, context.undeclared(could))
        costs, fix = f"everything is held {size} times along it", "name it in a rule"
        if axis in named_axes:
            costs, fix, cost = f"{costs}, though rules name it", "`explain` a path to see why", 0
        elif dead:
            costs += f"; it is named only by {context.rules(dead)}, which no leaf meets"
            fix = "correct the rule" if len(dead) == 1 else "correct the rules"
        rules = dead if axis not in named_axes else []
        is_warning = context.is_much(cost) and not (rules and are_told)
        yield finding(
            "unused-axis",
            f"the mesh axis {axis!r} cuts no leaf: {costs}",
            f"{fix}; or declare that it cuts data alone: data_axes=[{axis!r}]",
            level="warning" if is_warning else "info",
            rule=only_one(rules),
            bytes=cost,
        )


def unmatched(context: CheckContext) -> Iterator[Finding]:
    folded = context.folded([kind.status == "unmatched" for kind in context.kinds])
    if folded:
        leaves = counted(leaves_in(folded), "leaf")
        yield finding(
            "unmatched",
            f"no rule matches {leaves} of {len(context.plan.paths):,}",
            "add rules for them, such as `suggest` writes; "
            "or replicate them by a last rule ('.*', P())",
            folded,
            bytes=context.device_bytes(folded),
        )


_Words = tuple[str, str]  # message and fix


def misfits(context: CheckContext) -> Iterator[Finding]:
    """Leaves whose rule does not fit, that several rules claim, or whose spec JAX refuses."""
    words = [[*_misfit_words(kind, context.plan)] for kind in context.kinds]
    groups: dict[tuple[Any, _Words], list[Folded]] = defaultdict(list)
    for part in context.folded(words):
        for of_kind in words[part.group]:
            groups[context.kinds[part.group].decided_by, of_kind].append(part)
    for (_, (why, fix)), folded in groups.items():
        kind, message = context.kinds[folded[0].group], why
        if kind.status != "ambiguous":
            who = "a spec" if kind.decided_by is None else context.who(kind)
            where = "" if kind.shape is None else f" to the shape {kind.shape}"
            message = f"{who} cannot be applied{where}: {why}"
        yield finding(
            "misfit", message, fix, folded, rule=kind.rule, bytes=context.device_bytes(folded)
        )


def _misfit_words(kind: Kind, plan: Plan) -> Iterator[_Words]:
    """Yield message and fix of each reason why leaves of a kind are not placed."""
    if kind.status in ("ambiguous", "misfit"):
        errors = [loss.kind for loss in kind.losses if loss.is_error]
        if not errors or {*errors} != {"absent"}:  # which is reported as that
            yield str(kind.message), kind.fix or "change the rule, the mesh or the array"
    elif kind.spec is not None and kind.shape is not None:
        yield from refusals(kind, plan)


def refusals(kind: Kind, plan: Plan) -> Iterator[_Words]:
    """Yield message and fix of each reason why JAX makes no sharding of a kind's spec."""
    spec = kind.spec if kind.spec is not None else Entries()
    for axis in sorted(axes_named(spec) - plan.axis_sizes.keys()):
        yield (
            f"the mesh has no axis {axis!r}",
            f"rename it, add it to the mesh, or declare it in the rules: optional_axes=[{axis!r}]",
        )
    for name, tagged in () if type(spec) is Entries else axes_in_tags(spec).items():
        for axis in sorted({*tagged} - plan._mesh.explicit_axes):
            lacks = "is not Explicit" if axis in plan.axis_sizes else "is no axis of the mesh"
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


def corrections(context: CheckContext) -> Iterator[Finding]:
    """Axes of the rules' specs that leaves do not get; axes that the mesh lacks are errors."""
    kinds = context.kinds
    for is_unknown, pairs in _losses(context):
        cost = sum([loss.bytes * len(part.rows) for part, loss in pairs])
        folded, first = [part for part, _ in pairs], pairs[0][1]
        rules = sorted({rule for pair in pairs for rule in _deciding(context, *pair)})
        who = context.rules(rules) or context.who(kinds[folded[0].group])
        # The message has the size of the first.
        shapes = {kinds[part.group].shape for part in folded}
        is_like = len(shapes) > 1 and first.kind == "indivisible"
        # Specs of others are given to JAX as they are.
        is_refused = first.kind == "indivisible" and not context.plan._leaves.is_corrected
        free = "; JAX refuses it" if is_refused else "" if is_unknown else "; costs nothing"
        # What devices share is meant so, by the policy that has kept the other axes.
        is_much = not first.is_shared and cost >= context.large
        yield finding(
            "unknown-axis" if is_unknown else "misfit" if is_refused else "correction",
            f"{who}: {first.message}{', and the like' if is_like else ''}"
            + (f"; costs {at_stake(cost)}" if cost else free),
            first.fix,
            folded,
            level=None if is_much or is_unknown or is_refused else "info",
            rule=only_one(rules),
            bytes=cost,
        )


def _losses(context: CheckContext) -> Iterator[tuple[bool, list[tuple[Folded, Loss]]]]:
    """Yield the losses that are one finding, and whether the mesh lacks their axes undeclared."""
    groups: dict[tuple[Any, ...], list[tuple[Folded, Loss]]] = defaultdict(list)
    for part in context.folded([kind.losses for kind in context.kinds]):
        kind = context.kinds[part.group]
        optional = context.optional_axes_of(kind.rule)
        for loss in kind.losses:
            if kind.status != "placed" and loss.kind != "absent":
                continue  # the misfit is the finding
            is_unknown = loss.kind == "absent" and not optional.issuperset(loss.axes)
            # An axis that the mesh lacks is one finding, however many rules name it.
            key: tuple[Any, ...] = (kind.decided_by, loss.kind, loss.dim, loss.axes, loss.is_shared)
            if loss.kind in ("absent", "optional"):
                key = (loss.axes, loss.meant, loss.beside)
            groups[is_unknown, *key].append((part, loss))
    return ((is_unknown, pairs) for (is_unknown, *_), pairs in groups.items())


def _deciding(context: CheckContext, folded: Folded, loss: Loss) -> tuple[int, ...]:
    """Return the rules that ask for what is lost; of logical rules that of the dimension."""
    kind = context.kinds[folded.group]
    if kind.names is None:
        return kind.deciders
    rules_of_loss = [
        rule_loss.rule
        for rule_loss in kind.lost_rules
        if (rule_loss.dim, rule_loss.why) == (loss.dim, loss.kind)
    ]
    rules_of_dim = [rule for rule in kind.dim_rules[loss.dim : loss.dim + 1] if rule is not None]
    return tuple([*rules_of_loss, *rules_of_dim][:1])


CHECKS: Final[tuple[Check, ...]] = (
    (dead_rules, "paths"),
    (shadowed_rules, "paths"),
    (uncut, None),
    (unused_axes, None),
    (unmatched, None),
    (misfits, None),
    (corrections, None),
)
