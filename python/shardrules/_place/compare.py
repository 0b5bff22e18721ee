"""`compare`: the leaves of a tree that two rule lists, or trees of specs, decide differently."""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from shardrules._base.arguments import check_tree, in_order
from shardrules._base.specs import (
    entries_of,
    entry_axes,
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    with_entries,
)
from shardrules._base.text import record
from shardrules._core import resolve_all
from shardrules._place.align import named_arrays, rows_and_paths
from shardrules._place.decider import ByNames, ByPaths, BySpecs, RulesLike, as_decider
from shardrules._place.spec_trees import broadcast_specs, is_named_sharding
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.matcher import Matcher, checked_min_size
from shardrules._rules.names import logical_names
from shardrules._rules.patterns import Pattern
from shardrules._rules.resolver import repeated
from shardrules._rules.rules import Rules, as_rules, matcher_of

Problem = Literal["unmatched", "ambiguous", "spec longer than rank", "name twice"]


@record
class Decision(NamedTuple):
    """Decision of a rule list about a leaf."""

    spec: Any
    """None if there is a problem."""
    rule: int | None
    """None if no rule matches or is needed, or logical rules decide each dimension."""
    pattern: Pattern | None
    problem: Problem | None
    """Why there is no spec."""


@record
class Difference(NamedTuple):
    """Leaf that two rule lists decide differently."""

    path: str
    """The path in the dialect of the first rule list."""
    shape: tuple[int, ...] | None
    a: Decision
    b: Decision


_UNMATCHED: Final = Decision(None, None, None, "unmatched")
_AMBIGUOUS: Final = Decision(None, None, None, "ambiguous")
_NAME_TWICE: Final = Decision(None, None, None, "name twice")


@in_order("tree", "rules", "rules")
def compare(
    tree: Any,
    rules_a: RulesLike,
    rules_b: RulesLike,
    *,
    min_size: int | None = 0,
    names: Any = None,
) -> list[Difference]:
    """Return the leaves whose specs differ between two rule lists, for migrating to the other.

    Specs are equal if they shard alike: `P("tp")`, `P("tp", None)` and `P(("tp",))` are. Those of
    logical rules are `logical_to_mesh`'s, without a mesh.

    Args:
        tree: Any pytree; of its leaves only `.shape` is read.
        rules_a: `Rules` of any dialect, or (pattern, spec) pairs, which are eformer's;
            `LogicalRules`; or specs or shardings, as in `named_shardings`. Of a Plan, its `rules`
            or its `specs()`.
        rules_b: The same.
        min_size: As in `match_partition_rules`, for both. For rules of paths alone.
        names: For `LogicalRules`, as in `plan`.

    Returns:
        The differences, in JAX's order of the leaves. A leaf that is an error for one of the two
        is one of them; if it is the same error for both, there is no difference.

    Raises:
        TypeError, re.error: As `Rules`; or there are no names for `LogicalRules`.
        ValueError: The names do not fit the tree, or min_size is given for `LogicalRules`.

    Example:
        >>> import jax
        >>> from shardrules import Rules
        >>> from shardrules.dialects import KERAS
        >>> tree = {"dense": {"kernel": jax.ShapeDtypeStruct((8, 8), "float32")}}
        >>> searched = [("kernel", ("fsdp", "tp"))]
        >>> (difference,) = compare(tree, searched, Rules(searched, KERAS))
        >>> difference.path, difference.a.rule, difference.b.rule, tuple(difference.b.spec)
        ('dense/kernel', 0, None, ())
    """
    from jax import tree_util

    check_tree("tree", tree)
    least = checked_min_size(min_size)
    deciders = _without_mesh("rules_a", rules_a), _without_mesh("rules_b", rules_b)
    plain: Any = tree
    named: list[Any] = []
    if any(isinstance(decider, ByNames) for decider in deciders):
        if least:
            raise ValueError(f"min_size is {least}; it is not for LogicalRules: leave it")
        plain, named, _ = named_arrays(tree, names)
    elif names is not None:
        raise TypeError("names: they are for LogicalRules, not for rules of paths: leave them out")
    leaves: list[Any]
    treedef: Any
    leaves, treedef = tree_util.tree_flatten(plain)

    def decisions(decider: ByPaths | ByNames | BySpecs) -> list[Decision]:
        if isinstance(decider, ByNames):
            return _by_names(decider.rules, named)
        if isinstance(decider, BySpecs):
            specs = broadcast_specs(decider.parameter, tree, treedef, decider.specs)
            return list(map(_of_spec, specs))
        by_paths = _path_decisions(matcher_of(decider.rules), plain, least)
        return treedef.flatten_up_to(by_paths)  # type: ignore[no-any-return]

    differing = [
        (index, a, b)
        for index, (a, b) in enumerate(zip(*map(decisions, deciders), strict=True))
        if _essence(a) != _essence(b)
    ]
    if not differing:
        return []
    # Only the paths are wanted here, whatever the rules say and the leaves are.
    first = deciders[0]
    spelling = first.rules if isinstance(first, ByPaths) else Rules(())
    numbered = treedef.unflatten(range(len(leaves)))
    rows, paths = rows_and_paths(numbered, spelling)
    row_of = treedef.flatten_up_to(rows)
    return [
        Difference(paths[row_of[index]], getattr(leaves[index], "shape", None), a, b)
        for index, a, b in differing
    ]


def _without_mesh(name: str, rules: Any) -> ByPaths | ByNames | BySpecs:
    decider = as_decider(name, rules)
    if isinstance(decider, ByPaths | ByNames | BySpecs):
        return decider
    # A plan is ambiguous: its rules, or what a mesh has made of them. This refuses it.
    return ByPaths(as_rules(name, rules))


def _by_names(rules: LogicalRules, names: list[Any]) -> list[Decision]:
    resolver = resolver_of(rules, {})

    def decision(names: Any, _: None) -> Decision:
        if names is not None and repeated(logical_names(names), rules.dialect):
            return _NAME_TWICE
        spec = partition_spec() if names is None else resolver.spec(names)
        return Decision(spec, None, None, None)

    return resolve_all(names, None, {}, decision)


def _of_spec(sharding: Any) -> Decision:
    """Return the decision of a spec or a sharding that was given for a leaf."""
    spec = sharding.spec if is_named_sharding(sharding) else sharding
    return Decision(spec, None, None, "unmatched" if sharding is None else None)


def _path_decisions(matcher: Matcher, tree: Any, min_size: int) -> Any:
    replicated = Decision(partition_spec(), None, None, None)

    def decision(rule: int, spec: object) -> Decision:
        problem: Problem | None = "spec longer than rank" if spec is None else None
        return Decision(spec, rule, matcher.pairs[rule][0], problem)

    return matcher.decide(
        tree,
        matcher.answers(decision),
        replicated,
        replicated if matcher.dialect.unmatched == "replicate" else _UNMATCHED,
        _AMBIGUOUS,
        min_size=min_size,
    ).tree


def _essence(decision: Decision) -> object:
    """Return a key that is equal for decisions that shard alike."""
    spec, problem = decision.spec, decision.problem
    if problem is not None or not is_partition_spec(spec):
        return problem, spec
    entries = [
        entry if is_unconstrained(entry) else entry_axes(entry) for entry in entries_of(spec)
    ]
    while entries and entries[-1] == ():
        entries.pop()
    return problem, with_entries(spec, entries)
