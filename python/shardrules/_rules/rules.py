"""`Rules`, a rule list as a value, and `match_partition_rules`, the drop-in for eformer's."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final, NoReturn, TypeAlias

from shardrules._base.arguments import boolean, check_type, integer
from shardrules._base.mistakes import check_arrays, check_order
from shardrules._base.rule_specs import (
    Correction,
    RuleSpec,
    axes_of_rule,
    has_axes,
    plain_spec,
    rule_with_axes,
)
from shardrules._base.specs import (
    Entries,
    as_partition_spec,
    checked_parts,
    is_partition_spec,
    normalize_spec,
    rules_shown,
    split_axes,
)
from shardrules._base.text import answer, shown
from shardrules._rules.dialects import (
    EFORMER,
    Dialect,
    dialect_of,
    optional_axes_of,
    policy_shown,
)
from shardrules._rules.matcher import (
    Coverage,
    Matcher,
    checked_min_size,
    rule_shown,
    too_long_message,
    tree_of_walk,
)
from shardrules._rules.patterns import Pattern, checked_pattern

DEFAULT_MEMORY_BUDGET: Final = 32 * 1024 * 1024


@answer
class Rules:
    r"""Ordered list of (pattern, spec) rules, compiled for matching. Immutable, hashable.

    The rule of a path is the first one whose ``re.search(pattern, path)`` is not None: exactly the
    one that the running Python's `re` would choose, for any string. This is eformer's dialect;
    others have other match modes.

    Args:
        rules: (pattern, spec) pairs. A pattern is a string, or a compiled `re.Pattern` whose flags
            hold. A spec is a PartitionSpec; or None, an axis name,
            or a tuple or list of PartitionSpec entries, which stand for the PartitionSpec made of
            them; or `fsdp`, which makes one of each shape on a mesh; or any other hashable object,
            which leaves get as it is. A `RuleSpec` adds a correction to a spec. Or `Rules`, whose
            dialect and policy hold where no other is given here.
        dialect: Whose semantics to follow. Default: eformer's.
        correction: The policies for specs that do not fit an array; a `RuleSpec` may have its own.
            Default: the dialect's.
        optional_axes: Mesh axes that the rules name and a mesh may lack, such as "sp", beside those
            of a `RuleSpec`. They are dropped alone where the mesh lacks them. Any other axis that
            it lacks is an error.
        min_size: A leaf with fewer elements is replicated. Default: 0.
        memory_budget: Bytes that the matcher may spend on remembered states, for each call that
            runs at the same time, and as many on its way down a tree. Default: 32 MiB. When they
            are spent, it clears the states and goes on, more slowly; with 0 it keeps none.

    Raises:
        TypeError: A rule is not a pair, a pattern not a string, a spec not hashable, dialect not
            a Dialect, or memory_budget not an integer.
        re.error: A pattern is invalid; the message has the rule's index and a caret.
        ValueError: memory_budget is negative, or above 2**63 - 1.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = Rules([("embed", P("tp")), (r"layers/\d+/.*kernel", P("fsdp")), (".*", P())])
        >>> rules.first_match("layers/7/mlp/kernel")
        1
        >>> rules.all_matches("layers/7/mlp/kernel")
        [1, 2]
    """

    __slots__ = ("_matcher",)

    _matcher: Matcher

    def __init__(
        self,
        rules: Iterable[tuple[Pattern, Any]],
        dialect: Dialect | None = None,
        *,
        correction: Correction | None = None,
        optional_axes: Iterable[str] | None = None,
        min_size: int | None = None,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        if hasattr(self, "_matcher"):
            raise AttributeError("Rules are immutable; make new ones")
        kind = "a Dialect, such as shardrules.dialects.EASYLM"
        check_type("dialect", dialect, Dialect | None, kind)
        memory_budget = integer("memory_budget", memory_budget, what="a number of bytes")
        pairs = _checked_pairs(_checked_rules(rules))
        has = rules._matcher if isinstance(rules, Rules) else None
        in_force = dialect_of(dialect, correction, has.dialect if has else None, EFORMER)
        axes = optional_axes_of(optional_axes, has.optional_axes if has else ())
        least = (has.min_size if has else 0) if min_size is None else checked_min_size(min_size)
        matcher = Matcher(pairs, in_force, memory_budget, axes, least)
        object.__setattr__(self, "_matcher", matcher)

    @property
    def dialect(self) -> Dialect:
        """Whose semantics the rules follow, with their correction."""
        return self._matcher.dialect

    @property
    def correction(self) -> Correction:
        """The policies for specs that do not fit an array, where a rule has none of its own."""
        return self.dialect.correction

    @property
    def optional_axes(self) -> tuple[str, ...]:
        """Mesh axes that a mesh may lack."""
        return self._matcher.optional_axes

    @property
    def min_size(self) -> int:
        """Elements below which a leaf is replicated."""
        return self._matcher.min_size

    @property
    def fallbacks(self) -> tuple[tuple[int, str], ...]:
        """Return (rule index, reason) of the rules that `re` evaluates, path by path.

        Example:
            >>> Rules([("wq", None), (r"(?=w)k", None)]).fallbacks
            ((1, 'lookahead'),)
        """
        return self._matcher.fallbacks

    def match(self, tree: Any, *, strict: bool = True) -> Any:
        """Return the tree with each leaf replaced by its spec; see `match_partition_rules`."""
        return specs_by_rules(self._matcher, tree, 0, strict)

    def first_match(self, path: str) -> int | None:
        """Return the index of the first rule that matches the path, or None.

        A dialect may allow only one to match; `match` checks that, and this does not.
        """
        try:
            return self._matcher.rule_set.first_match(path)
        except TypeError:
            check_type("path", path, str, "a string")
            raise

    def all_matches(self, path: str) -> list[int]:
        """Return the indices of all rules that match the path, ascending."""
        try:
            return self._matcher.rule_set.all_matches(path)
        except TypeError:
            check_type("path", path, str, "a string")
            raise

    def coverage(self, tree: Any, strict: bool = True) -> Coverage:
        """Return per rule, the leaves that it matches and wins, from one walk over the tree.

        Args:
            tree: Any pytree; of its leaves only `.shape` is read.
            strict: Whether leaves that need no rule (the dialect's `scalars`) are left out.

        Example:
            >>> import numpy as np
            >>> rules = Rules([("kernel", "tp"), ("wq/kernel", None), ("lora", None)])
            >>> coverage = rules.coverage({"wq": {"kernel": np.ones((2, 2))}, "b": np.ones(2)})
            >>> coverage.shadowed, coverage.dead, coverage.unmatched
            ({1: (0,)}, (2,), 1)
        """
        coverage = self._matcher.coverage(tree, strict=boolean("strict", strict))
        if not any(coverage.matched) and not coverage.unmatched:
            check_arrays("tree", tree)
        return coverage

    def with_axes(self, axes: Mapping[str, str | Iterable[str]]) -> Rules:
        """Return the rules for a mesh on which some axes are made of several.

        With `Correction(indivisible="prefix")` an array of few heads keeps the first of them.

        Args:
            axes: For each axis that the rules name, the axes that it is made of, in order.

        Raises:
            ValueError: The rules name no such axis.
            TypeError: An axis is not a string.

        Example:
            >>> rules = Rules([("w[qk]", (None, "tp")), ("wo", (("fsdp", "tp"),))])
            >>> [tuple(spec) for _, spec in rules.with_axes({"tp": ("kv", "rep")})]
            [(None, ('kv', 'rep')), (('fsdp', 'kv', 'rep'),)]
        """
        named = frozenset(self.optional_axes).union(*(axes_of_rule(spec) for _, spec in self))
        parts = checked_parts(axes, named)
        pairs = [(pattern, rule_with_axes(spec, parts)) for pattern, spec in self]
        return rules_like(self, pairs, split_axes(self.optional_axes, parts))

    def __len__(self) -> int:
        return len(self._matcher.pairs)

    def __iter__(self) -> Iterator[tuple[Pattern, Any]]:
        return iter(self._matcher.pairs)

    def __getitem__(self, index: int) -> tuple[Pattern, Any]:
        return self._matcher.pairs[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rules):
            return NotImplemented
        return self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[Any, ...]:
        axes = frozenset(self.optional_axes)
        return self._matcher.pairs, self.dialect, axes, self.min_size

    def __str__(self) -> str:
        least = [f"min_size={self.min_size}"] if self.min_size else []
        policy = policy_shown(self.dialect, self.optional_axes) + least
        return rules_shown(", ".join(policy), self)

    def __reduce__(self) -> tuple[Any, ...]:
        has = self._matcher
        policy: Any = {"optional_axes": has.optional_axes, "min_size": has.min_size}
        make = functools.partial(Rules, memory_budget=has.memory_budget, **policy)
        return make, (has.pairs, has.dialect)

    def __setattr__(self, *_: object) -> NoReturn:
        raise AttributeError("Rules are immutable; make new ones")

    __delattr__ = __setattr__


PathRules: TypeAlias = Rules | Iterable[tuple[Pattern, Any]]
"""(pattern, spec) pairs, or rules that are compiled already."""


def match_partition_rules(
    rules: PathRules, tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """Return the tree with each leaf replaced by the spec of the first rule that matches its path.

    Semantics of `eformer.escale.match_partition_rules`, 0.0.101: paths are the keys' texts joined
    by "/"; a leaf without a shape, or with an empty one, gets `PartitionSpec()` and needs no rule;
    a spec that is longer than the leaf's rank is cut to it. With the environment variable
    LOG_SHARDING_MOVE set to true, yes, 1 or on, each leaf that is too small or has its spec cut is
    warned about. Unlike eformer, all unmatched leaves are reported at once.

    Args:
        rules: (pattern, spec) pairs, or `Rules`, which are compiled already and may have a
            min_size of their own.
        tree: Any pytree; of its leaves only `.shape` is read.
        min_size: A matched leaf with fewer elements gets `PartitionSpec()`. None stands for the
            environment variable MIN_SHARDING_SIZE, or else 16384.
        strict: If False, shapes are not looked at: each leaf needs a rule and gets its spec whole.

    Returns:
        A tree of the same structure; dicts keep the order of their keys.

    Raises:
        ValueError: No rule matches some leaf; the message has the count and the first ten paths. Or
            `Rules` have a min_size, and another is given here.
        TypeError: A rule is not a pair, a pattern not a string, or a spec not hashable or made from
            shapes (`fsdp`), which needs a mesh.
        re.error: A pattern is invalid.
        RecursionError: The tree is nested too deeply.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"wq": {"kernel": jax.ShapeDtypeStruct((512, 512), "bfloat16")}}
        >>> specs = match_partition_rules([("wq/kernel", P("fsdp", "tp"))], params)
        >>> specs == {"wq": {"kernel": P("fsdp", "tp")}}
        True
    """
    try:
        matcher = matcher_of(as_rules("rules", rules))
    except (TypeError, ValueError, re.error):
        check_order("match_partition_rules", ("rules", "tree"), (rules, tree))
        raise
    return specs_by_rules(matcher, tree, min_size, strict)


def specs_by_rules(matcher: Matcher, tree: Any, min_size: int | None, strict: bool = True) -> Any:
    """Return the tree with each leaf replaced by its spec, for public functions."""
    if (rule := matcher.from_shapes) is not None:
        raise TypeError(
            f"rule {rule}: {rule_shown(*matcher.pairs[rule])} is a spec that only a mesh makes: "
            "use named_shardings or plan, with a mesh"
        )
    least = checked_min_size(min_size)
    if least and matcher.min_size:
        raise ValueError(
            f"min_size is {least}, and the rules have min_size={matcher.min_size}; leave one out"
        )
    walk = matcher.decide(
        tree,
        matcher.specs,
        as_partition_spec(Entries()),
        min_size=least or matcher.min_size,
        strict=boolean("strict", strict),
    )
    return tree_of_walk(matcher, walk, too_long_message)


def as_rules(name: str, rules: PathRules) -> Rules:
    """Return the rules, compiled if they are pairs; `name` is the parameter's, for errors."""
    return rules if isinstance(rules, Rules) else remembered_rules(rules, EFORMER, name)


def remembered_rules(rules: Iterable[Any], dialect: Dialect, name: str = "rules") -> Rules:
    """Return `Rules(rules, dialect)`, or the ones of an earlier call with the same pairs."""
    pairs = tuple(_checked_rules(rules, name))
    if not {*map(type, pairs)} <= {tuple}:  # namedtuples; or lists, as JSON has them
        pairs = _checked_pairs(pairs)
    try:
        return _compiled_once(pairs, dialect)
    except TypeError:  # lists inside; checked, they are tuples
        return _compiled_once(_checked_pairs(pairs), dialect)


def _compiled_once(pairs: tuple[Any, ...], dialect: Dialect) -> Rules:
    types = tuple(map(type, chain.from_iterable(pairs)))  # 1 and True are equal
    rules, own = _compiled(pairs, types, dialect)
    # Equal objects of the user's own are two all the same.
    is_same = all(plain_spec(pairs[i][1]) is plain_spec(rules[i][1]) for i in own)
    return rules if is_same else Rules(pairs, dialect)


# Each may hold its memory budget in states, but real rules take some 100 KB.
@functools.lru_cache(maxsize=16)
def _compiled(
    pairs: tuple[Any, ...], types: tuple[type, ...], dialect: Dialect
) -> tuple[Rules, list[int]]:
    """Return (rules, those of them whose spec is an object of the user's own)."""
    rules = Rules(pairs, dialect)
    specs = [plain_spec(spec) for _, spec in rules]
    return rules, [i for i, spec in enumerate(specs) if not has_axes(spec)]


def rules_like(
    rules: Rules, pairs: Iterable[tuple[Pattern, Any]], optional_axes: Iterable[str] | None = None
) -> Rules:
    """Return rules of other pairs, with the dialect and the policy of these."""
    return Rules(
        pairs,
        rules.dialect,
        optional_axes=rules.optional_axes if optional_axes is None else optional_axes,
        min_size=rules.min_size,
        memory_budget=rules._matcher.memory_budget,
    )


def matcher_of(rules: Rules) -> Matcher:
    """Return the matcher inside the rules, for the modules of this package."""
    return rules._matcher


def _checked_rules(rules: Any, name: str = "rules") -> list[Any]:
    if is_partition_spec(rules):
        raise TypeError(
            f"{name} must be a sequence of (pattern, spec) pairs, not a spec; write "
            f"[('.*', {rules})] for all leaves"
        )
    if hasattr(rules, "dialect") and not isinstance(rules, Rules):
        raise TypeError(
            f"{name} must be rules for paths, not {shown(rules)}, which are for logical axis "
            "names; give them to named_shardings, shard or plan"
        )
    if hasattr(rules, "with_rules"):
        raise TypeError(
            f"{name} must be rules for paths, not a Plan, which has put them on a mesh; give "
            "plan.rules, or take plan.specs()"
        )
    hint = where_rules_are(rules)
    if hint or isinstance(rules, (bytes, Mapping)) or not isinstance(rules, Iterable):
        hint = hint or (f"; pass {_pairs_of(rules)}" if isinstance(rules, Mapping) else "")
        raise TypeError(
            f"{name} must be a sequence of (pattern, spec) pairs, not {type(rules).__name__}{hint}"
        )
    return list(rules)


def where_rules_are(thing: Any) -> str:
    """Return a hint for what is no rules itself, such as "; give its .rules"; or ""."""
    if isinstance(thing, str | os.PathLike):
        return "; the rules of a file are shardrules.read_rules(path).rules"
    has_rules = hasattr(getattr(thing, "rules", None), "dialect")  # of paths, or of names
    return "; give its .rules" if has_rules else ""


def _pairs_of(rules: Mapping[Any, Any]) -> str:
    """Return an example of pairs to pass instead of a mapping."""
    if type(rules).__module__.partition(".")[0] == "keras":
        return (
            "the .rules of a shardrules.compat.keras.LayoutMap(rules.device_mesh) after its "
            ".update(rules)"
        )
    if any(is_partition_spec(value) for value in rules.values()):
        return "list(rules.items()), if its keys are patterns; a tree of specs is no list of rules"
    if rules and all(isinstance(value, int) for value in rules.values()):
        return "rules first, and then this mesh"
    if any(hasattr(value, "shape") for value in rules.values()):
        return "this tree first, and then rules; or jax.tree.map(lambda x: x.sharding, it) as rules"
    return "list(rules.items())"


def _checked_pairs(rules: Iterable[Any]) -> tuple[tuple[Pattern, Any], ...]:
    return tuple([_checked_pair(index, rule) for index, rule in enumerate(rules)])


def _checked_pair(index: int, rule: Any) -> tuple[Pattern, Any]:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise TypeError(f"rule {index} is not a (pattern, spec) pair: {shown(rule)}")
    pattern, spec = checked_pattern(index, rule[0]), rule[1]
    if isinstance(spec, RuleSpec):
        return pattern, replace(spec, spec=normalize_spec(index, spec.spec))
    return pattern, normalize_spec(index, spec)
