"""Trees of a plan's specs, shardings and ShapeDtypeStructs, as JAX takes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardrules._base.dtypes import key_dtype
from shardrules._base.rule_specs import MemoryKind, rule_spec_shown
from shardrules._base.specs import as_partition_spec
from shardrules._place.mesh import as_mesh, sharding_in_memory
from shardrules._place.shardings import Decided, LeafError, leaf_errors
from shardrules._plan.check import refusals, run_checks
from shardrules._plan.findings import NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import NamedSharding

    from shardrules._plan.kinds import Kind
    from shardrules._plan.plan import Plan


def spec_tree(plan: Plan) -> Any:
    return _mapped(plan, [as_partition_spec(spec) for spec in kind_specs(plan)])


def sharding_tree(plan: Plan) -> Any:
    return _mapped(plan, _kind_shardings(plan))


def decided_in(plan: Plan, tree: Any, numbers: Any, rows: Sequence[int]) -> Decided:
    """Return the shardings of another tree, by the tree of its leaves' numbers in `rows`."""
    from jax import tree_util

    of_kind, of_row = _kind_shardings(plan), plan.kind_of[rows].tolist()
    kinds = [of_row[number] for number in tree_util.tree_leaves(numbers)]
    shardings = [of_kind[kind] for kind in kinds]
    names_memory = [plan.kinds[kind].memory_kind is not None for kind in kinds]
    treedef: Any = tree_util.tree_structure(tree)
    return Decided(shardings, names_memory, partial(treedef.unflatten, shardings))


def abstract_tree(plan: Plan) -> Any:
    from jax import ShapeDtypeStruct

    kinds = zip(plan.kinds, _kind_shardings(plan), strict=True)
    return _mapped(
        plan,
        [
            None
            if k.shape is None
            else ShapeDtypeStruct(k.shape, key_dtype(str(k.dtype)) or k.dtype, sharding=sharding)
            for k, sharding in kinds
        ],
    )


def kind_specs(plan: Plan) -> list[Any]:
    """Return the spec of each kind."""
    if any(kind.status != "placed" for kind in plan.kinds):
        raise ValueError(placement_errors(plan))
    return [kind.spec for kind in plan.kinds]


def _kind_shardings(plan: Plan) -> list[NamedSharding]:
    on_mesh = as_mesh(plan.mesh)
    placed: list[tuple[Any, MemoryKind | None]] = [
        (spec, kind.memory_kind) for spec, kind in zip(kind_specs(plan), plan.kinds, strict=True)
    ]
    try:
        sharding_of = {
            (spec, memory): sharding_in_memory(on_mesh, as_partition_spec(spec), memory)
            for spec, memory in set(placed)
        }
    except ValueError as error:
        raise ValueError(placement_errors(plan) or str(error)) from error
    return [sharding_of[pair] for pair in placed]


def placement_errors(plan: Plan) -> str:
    """Word the error for leaves without a sharding; for those without a rule, as `check` does."""
    rows = [
        LeafError(leaves.pattern, kind.shape, _decider(kind, plan), reasons, len(leaves.rows))
        for leaves in plan.folded
        for kind in [plan.kinds[leaves.group]]
        if (reasons := _refusals(kind, plan))
    ]
    said_by = "rules" if plan._leaves.path_rules is not None else "logical rules"
    messages = [leaf_errors(rows, plan.axis_sizes, said_by=said_by)] if rows else []
    if any(kind.status == "unmatched" for kind in plan.kinds):
        findings = run_checks(plan, declared=NOTHING)
        messages += [str(finding) for finding in findings if finding.kind == "unmatched"]
    return "\n".join(messages)


def _refusals(kind: Kind, plan: Plan) -> list[str]:
    """Return message and fix of each reason why leaves with a rule get no sharding."""
    if kind.status == "placed" and kind.shape is not None:
        return [": ".join(words) for words in refusals(kind, plan)]
    if kind.status in ("placed", "unmatched"):
        return []
    reasons = [f"{loss.message}: {loss.fix}" for loss in kind.losses if loss.is_error]
    reasons = reasons or [": ".join(filter(None, (kind.message, kind.fix)))]
    return reasons + [
        f"dim {dim} {name!r} -> {plan.rules[rule][1]!r}  (rule {rule})"
        for dim, (name, rule) in enumerate(zip(kind.names or (), kind.dim_rules, strict=False))
        if rule is not None
    ]


def _decider(kind: Kind, plan: Plan) -> str:
    if kind.rule is None:
        return "" if kind.names is None else f"names {kind.names}"
    pattern, value = plan.rules[kind.rule]
    return f"rule {kind.rule}: {pattern!r} -> {rule_spec_shown(value)}"


def _mapped(plan: Plan, of_kind: list[Any]) -> Any:
    from jax import tree_util

    of_row = [of_kind[kind] for kind in plan.kind_of.tolist()]
    return tree_util.tree_map(of_row.__getitem__, plan._leaves.tree)
