"""`compare`: the leaves of a tree that two rule lists, or trees of specs, decide differently.

One walk over the tree per rule list; paths are made for the leaves that differ. Must not know what
a dialect's choices mean.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple

from shardrules._arguments import check_tree, in_order
from shardrules._core import resolve_all
from shardrules._place.decider import RulesLike, as_decider, is_named_sharding
from shardrules._place.spec_trees import spread_specs
from shardrules._plan_like import PlanLike
from shardrules._rules.logical_rules import LogicalRules, resolver_of
from shardrules._rules.matcher import Matcher, checked_min_size
from shardrules._rules.names import logical_names
from shardrules._rules.patterns import Pattern
from shardrules._rules.resolver import repeated
from shardrules._rules.rules import Rules, as_rules, matcher_of
from shardrules._specs import (
    entries_of,
    entry_axes,
    is_partition_spec,
    is_unconstrained,
    partition_spec,
    with_entries,
)
from shardrules._text import record
from shardrules._trees.align import named_arrays, rows_and_paths

Problem = Literal["unmatched", "ambiguous", "spec longer than rank", "name twice"]


@record
class Decision(NamedTuple):
    """The decision of a rule list about a leaf."""

    spec: Any
    """None if there is a problem."""
    rule: int | None
    """None if no rule matches or is needed, or logical rules decide each dimension."""
    pattern: Pattern | None
    problem: Problem | None
    """Why there is no spec."""


@record
class Difference(NamedTuple):
    """A leaf that two rule lists decide differently."""

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
    """The leaves whose specs differ between two rule lists: for migrating from one to the other.

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
    given = {"rules_a": rules_a, "rules_b": rules_b}
    deciders = {name: _unplanned(name, rules) for name, rules in given.items()}
    plain: Any = tree
    named: list[Any] = []
    if any(isinstance(one, LogicalRules) for one in deciders.values()):
        if least:
            raise ValueError(f"min_size is {least}; it is not for LogicalRules: leave it")
        plain, named, _ = named_arrays(tree, names)
    elif names is not None:
        raise TypeError("names: they are for LogicalRules, not for rules of paths: leave them out")
    leaves: list[Any]
    treedef: Any
    leaves, treedef = tree_util.tree_flatten(plain)

    decisions = [
        _by_names(decider, named)
        if isinstance(decider, LogicalRules)
        else list(map(_of_spec, spread_specs(name, tree, treedef, given[name])))
        if decider is None
        else treedef.flatten_up_to(_by_paths(matcher_of(decider), plain, least))
        for name, decider in deciders.items()
    ]
    differing = [
        (index, a, b)
        for index, (a, b) in enumerate(zip(*decisions, strict=True))
        if _essence(a) != _essence(b)
    ]
    if not differing:
        return []
    # Only the paths are wanted here, whatever the rules say and the leaves are.
    decider = deciders["rules_a"]
    spelling = decider if isinstance(decider, Rules) else Rules(())
    numbered = treedef.unflatten(range(len(leaves)))
    rows, paths = rows_and_paths(numbered, spelling)
    row_of = treedef.flatten_up_to(rows)
    return [
        Difference(paths[row_of[index]], getattr(leaves[index], "shape", None), a, b)
        for index, a, b in differing
    ]


def _unplanned(name: str, given: Any) -> Rules | LogicalRules | None:
    decider = as_decider(name, given)
    # It is two things: its rules, and what a mesh has made of them.
    return as_rules(name, given) if isinstance(decider, PlanLike) else decider


def _by_names(rules: LogicalRules, names: list[Any]) -> list[Decision]:
    resolver = resolver_of(rules, {})

    def decision(given: Any, _: None) -> Decision:
        if given is not None and repeated(logical_names(given), rules.dialect):
            return _NAME_TWICE
        spec = partition_spec() if given is None else resolver.spec(given)
        return Decision(spec, None, None, None)

    return resolve_all(names, None, {}, decision)


def _of_spec(given: Any) -> Decision:
    """The decision of a spec or a sharding that was given for a leaf."""
    spec = given.spec if is_named_sharding(given) else given
    return Decision(spec, None, None, "unmatched" if given is None else None)


def _by_paths(matcher: Matcher, tree: Any, min_size: int) -> Any:
    """The tree with a Decision for each leaf."""
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
    """Equal for decisions that shard alike."""
    spec, problem = decision.spec, decision.problem
    if problem is not None or not is_partition_spec(spec):
        return problem, spec
    entries = [
        entry if is_unconstrained(entry) else entry_axes(entry) for entry in entries_of(spec)
    ]
    while entries and entries[-1] == ():
        entries.pop()
    return problem, with_entries(spec, entries)
