"""Rules of a solution: from the spec of each leaf to rules in the words of paths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.rule_specs import RuleSpec, plain_spec
from shardrules._base.specs import Entries, entries_of, entry_axes, spec_shown, trimmed
from shardrules._base.text import brief
from shardrules._plan.findings import Declared
from shardrules._plan.kinds import axes_named
from shardrules._plan.planning import plan as plan_of
from shardrules._plan.suggest.draft import draft_of_specs
from shardrules._plan.suggest.patterns import TIGHTEST
from shardrules._plan.suggest.suggestion import CutReason, Reason, Suggestion
from shardrules._plan.suggest.units import units_of
from shardrules._program.step.jaxprs import inputs_of
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._plan.plan import Plan
    from shardrules._program.step.step import Step

_HEADS: Final = frozenset(["heads", "KV heads", "query heads of a KV head"])


def ruled(step: Step, specs: Mapping[str, PartitionSpec], mesh: Any) -> Plan:
    """Plan the parameters by rules that give them their specs, in the dialect of the step's."""
    from jax.tree_util import tree_leaves

    place, given = step._place, step.plan
    tree = step._trees[place]
    if given is not None and isinstance(given.rules, Rules):  # its leaves have the user's order
        bare = given.with_rules(Rules((), given.rules.dialect)).on_mesh(mesh)
    else:
        bare = plan_of(tree, Rules(()), mesh)
    leaves = inputs_of(tree, step._function, tree_leaves(bare._leaves.tree))
    own: dict[str, Entries | RuleSpec] = {}
    for leaf, row in zip(leaves, step._ranges[place], strict=True):
        spec = Entries(trimmed(entries_of(specs[step._paths[row]])))
        units = _units(step, step._equations.body.inputs[row], spec, bare.axis_sizes)
        own[bare.paths[leaf]] = RuleSpec(spec, units=units) if units else spec
    return with_specs(bare, own)


def _units(step: Step, number: int, spec: Entries, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """Return the units of an array whose heads are cut, and none of them inside."""
    equations, roles = step._equations, step._roles.of
    sizes = equations.dims.sizes
    for dim, (entry, classes) in enumerate(
        zip(spec, map(equations.dims.classes, equations.values[number].dims), strict=False)
    ):
        heads = [c for c in classes if roles.get(c) in _HEADS]
        behind = [c for c in classes if c not in heads]
        parts = prod(mesh[axis] for axis in entry_axes(entry))
        if heads and behind and parts > 1 and prod(sizes[c] for c in heads) % parts == 0:
            return (*[1] * dim, prod(sizes[c] for c in behind))
    return ()


def with_specs(plan: Plan, specs: Mapping[str, Entries | RuleSpec]) -> Plan:
    """Plan the leaves of a plan by rules that give each of them its spec.

    Args:
        plan: Leaves and mesh; of rules of paths the dialect counts.
        specs: By path.

    Raises:
        ValueError: No rules of the dialect can say it; the message names a leaf.
    """
    assert isinstance(plan.rules, Rules)
    dialect = plan.rules.dialect
    bare = plan.with_rules(Rules((), replace(dialect, unmatched="error")))
    units = units_of(bare)
    wrong = ""
    for tightness in (0, TIGHTEST):
        result = bare.with_rules(draft_of_specs(units, specs, dialect, tightness).rules)
        wrong = next(_wrong(result, specs), "")
        if not wrong:
            return result
    raise ValueError(
        f"{brief(wrong)}: rules of the dialect {dialect.name} cannot give it "
        f"{spec_shown(plain_spec(specs[wrong]))}: rename it, or choose another dialect"
    )


def _wrong(plan: Plan, specs: Mapping[str, Entries | RuleSpec]) -> Iterator[str]:
    """Yield the paths that have another spec."""
    for path, number in zip(plan.paths, plan.kind_of.tolist(), strict=True):
        found, wanted = plan.kinds[number].spec, plain_spec(specs[path])
        entries = () if found is None else trimmed(entries_of(found))
        if list(map(entry_axes, entries)) != list(map(entry_axes, wanted)):
            yield path


def suggestion_of(result: Plan, step: Step) -> Suggestion:
    """Return the rules of a plan, each with what the step does with its leaves."""
    used = frozenset().union(*(axes_named(kind.spec) for kind in result.kinds))
    whole = tuple(str(pattern) for pattern, value in result.rules if plain_spec(value) == Entries())
    unused = tuple(axis for axis in result.axis_sizes if axis not in used)
    declared = Declared(replicated=whole, optional_axes=(), data_axes=unused)
    return Suggestion(result._declaring(declared), tuple(_reasons(result, step)), declared)


def _reasons(result: Plan, step: Step) -> Iterator[Reason]:
    """Yield a reason for each rule, by the roles that the step gives the first of its leaves."""
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
            value = equations.values[numbers[f"inputs/{step._place}/{result.paths[row]}"]]
            cuts = () if kind.spec is None else tuple(map(entry_axes, entries_of(kind.spec)))
            for dim, size in enumerate(value.shape):
                names = [roles.get(c, "") for c in equations.dims.classes(value.dims[dim])]
                role = " x ".join(filter(None, names)) or "other"
                dims.append(CutReason(dim, size, role, cuts[dim] if dim < len(cuts) else ()))
        size = sum(result.kinds[int(result.kind_of[row])].bytes for row in rows)
        folded = tuple(
            part.pattern for part in result.folded if not {*part.rows.tolist()}.isdisjoint(rows)
        )
        yield Reason(rule, pattern, len(rows), size, folded, tuple(dims), is_understood=True)
