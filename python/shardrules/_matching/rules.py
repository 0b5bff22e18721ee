"""`Rules`, a rule list compiled once, and `match_partition_rules`, the drop-in for eformer's.

The Python side of the main job: checks the arguments, makes one call into the C++ core per tree,
and turns what the core reports into errors and warnings.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from shardrules._arguments import boolean, check_real, check_tree, check_type, integer
from shardrules._core import Answers, Choices, RuleSet, SpecTable
from shardrules._correction import RuleSpec, plain_spec
from shardrules._matching.coverage import Counters, Coverage
from shardrules._matching.dialects import EFORMER, Dialect
from shardrules._matching.patterns import EMPTY_TEXT_HAS_NO_NON_BOUNDARY, compile_patterns
from shardrules._matching.reports import (
    ambiguous_message,
    event_message,
    too_long_message,
    unmatched_message,
)
from shardrules._matching.ways import WAYS, Way, checked_pattern
from shardrules._specs import (
    Entries,
    is_partition_spec,
    normalize_spec,
    partition_spec,
    spec_for_rank,
    spec_length,
)
from shardrules._words import shown

__all__ = [
    "DEFAULT_MEMORY_BUDGET",
    "Outcome",
    "Pattern",
    "Rules",
    "as_rules",
    "checked_min_size",
    "logs_moves",
    "match_partition_rules",
]

Pattern = str | re.Pattern[str] | tuple[str, ...]
_T = TypeVar("_T")

DEFAULT_MEMORY_BUDGET: Final = 32 * 1024 * 1024
_MOST_REMEMBERED: Final = 16
_DEFAULT_MIN_SIZE: Final = "16384"
_TRUE_WORDS: Final = ("true", "yes", "1", "on")


class Rules:
    r"""An ordered list of (pattern, spec) rules, compiled for matching. Immutable, hashable.

    The rule of a path is the first one whose ``re.search(pattern, path)`` is not None: exactly the
    one that the running Python's `re` would choose, for any string. So it is in eformer's dialect;
    others meet paths in other ways.

    Args:
        rules: (pattern, spec) pairs. A pattern is a string, or a compiled `re.Pattern` whose flags
            hold; for windows, a tuple of strings. A spec is a PartitionSpec; or None, an axis name,
            or a tuple or list of PartitionSpec entries, which stand for the PartitionSpec made of
            them; or any other hashable object, which leaves get as it is. A `RuleSpec` adds a
            correction to a spec.
        dialect: Whose semantics to follow.
        memory_budget: Bytes that the matcher may spend on remembered states, for each call that
            runs at the same time, and as many on its way down a tree. Default: 32 MiB. When they
            are spent it forgets and goes on, slower; with 0 it remembers nothing. `counters` shows
            what happened.

    Raises:
        TypeError: A rule is not a pair, a pattern is no string, a spec cannot be one, dialect is
            no Dialect, or memory_budget no integer.
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

    __slots__ = (
        "_dialect",
        "_fallbacks",
        "_made",
        "_memory_budget",
        "_pairs",
        "_rule_set",
        "_table",
    )  # fmt: skip

    _dialect: Dialect
    _fallbacks: tuple[tuple[int, str], ...]
    _memory_budget: int
    _made: dict[Any, Any]
    _pairs: tuple[tuple[Pattern, Any], ...]
    _rule_set: RuleSet
    _table: SpecTable

    def __init__(
        self,
        rules: Iterable[tuple[Pattern, Any]],
        dialect: Dialect = EFORMER,
        *,
        memory_budget: int = DEFAULT_MEMORY_BUDGET,
    ) -> None:
        if hasattr(self, "_rule_set"):
            raise AttributeError("Rules are immutable; make new ones")
        check_type("dialect", dialect, Dialect, "a Dialect, such as shardrules.EASYLM")
        memory_budget = integer("memory_budget", memory_budget, what="a number of bytes")
        ways = [WAYS[way] for way in dialect.match]
        pairs = tuple(
            _checked_pair(i, rule, ways[-1]) for i, rule in enumerate(_checked_rules(rules))
        )
        code = compile_patterns([pattern for pattern, _ in pairs], ways)
        specs = _specs_of(pairs)
        attributes = {
            "_pairs": pairs,
            "_made": {},
            "_dialect": dialect,
            "_memory_budget": memory_budget,
            "_fallbacks": code.fallbacks,
            "_table": _spec_table(specs, dialect.rank, None),
            "_rule_set": RuleSet(
                patterns=code.patterns,
                classes=code.classes,
                accepts=code.accepts,
                word_class=code.word_class,
                ascii_word_class=code.ascii_word_class,
                empty_text_has_no_non_boundary=EMPTY_TEXT_HAS_NO_NON_BOUNDARY,
                searched=code.searched,
                memory_budget=memory_budget,
                passes=len(ways),
                choices=_choices(dialect),
            ),
        }
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    @property
    def counters(self) -> Counters:
        """What the matcher has done so far, of all calls that have ended."""
        return Counters(*self._rule_set.counters())

    @property
    def dialect(self) -> Dialect:
        """Whose semantics the rules follow."""
        return self._dialect

    @property
    def fallbacks(self) -> tuple[tuple[int, str], ...]:
        """(rule index, reason) of the rules that `re` evaluates, path by path.

        Example:
            >>> Rules([("wq", None), (r"(?=w)k", None)]).fallbacks
            ((1, 'lookahead'),)
        """
        return self._fallbacks

    def match(self, tree: Any, min_size: int | None = 0, strict: bool = True) -> Any:
        """The tree with each leaf replaced by its spec; see `match_partition_rules`."""
        return self._match(tree, min_size, strict)

    def first_match(self, path: str) -> int | None:
        """The index of the first rule that matches the path, or None.

        That it is the only one, where the dialect allows one alone, is for `match` to check.
        """
        return self._rule_set.first_match(self.joined(path))

    def all_matches(self, path: str) -> list[int]:
        """The indices of all rules that match the path, ascending."""
        return self._rule_set.all_matches(self.joined(path))

    def coverage(self, tree: Any, strict: bool = True) -> Coverage:
        """How each rule does on the tree, from one walk over it.

        Args:
            tree: Any pytree; of its leaves only `.shape` is read.
            strict: Scalars, as the dialect has it, need no rule and are not counted.

        Example:
            >>> import numpy as np
            >>> rules = Rules([("kernel", "tp"), ("wq/kernel", None), ("lora", None)])
            >>> coverage = rules.coverage({"wq": {"kernel": np.ones((2, 2))}, "b": np.ones(2)})
            >>> coverage.shadowed, coverage.dead, coverage.unmatched
            ({1: (0,)}, (2,), 1)
        """
        check_tree("tree", tree)
        is_strict = boolean("strict", strict)
        return Coverage.from_counts(*self._rule_set.count_matches(tree, strict=is_strict))

    def __len__(self) -> int:
        return len(self._pairs)

    def __iter__(self) -> Iterator[tuple[Pattern, Any]]:
        return iter(self._pairs)

    def __getitem__(self, index: int) -> tuple[Pattern, Any]:
        return self._pairs[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rules):
            return NotImplemented
        return (self._pairs, self._dialect) == (other._pairs, other._dialect)

    def __hash__(self) -> int:
        return hash((self._pairs, self._dialect))

    def __repr__(self) -> str:
        return f"<Rules: {len(self)} rules, dialect {self._dialect.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._pairs, self._dialect, self._memory_budget)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("Rules are immutable; make new ones")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError("Rules are immutable; make new ones")

    def _match(self, tree: Any, min_size: int | None, strict: bool) -> Any:
        return self.resolve(
            tree,
            self._table,
            partition_spec(),
            min_size=min_size,
            strict=strict,
            stacklevel=4,
        )

    def resolve(
        self,
        tree: Any,
        answers: Answers,
        replicated: object,
        *,
        min_size: int | None,
        strict: bool = True,
        stacklevel: int = 3,
        describe: Callable[..., str] = too_long_message,
    ) -> Any:
        """The tree with each leaf replaced by what `answers` has for it, in one crossing.

        For the modules of this package: `replicated` is what a leaf gets that is not sharded, and
        `describe` words the problems that `answers` reports: describe(rules, count, leaves).
        """
        is_replicated = self._dialect.unmatched == "replicate"
        outcome = self.decide(
            tree,
            answers,
            replicated,
            replicated if is_replicated else None,
            min_size=checked_min_size(min_size),
            strict=boolean("strict", strict),
        )
        for path, spec in outcome.events[1]:
            warnings.warn(event_message(path, spec), stacklevel=stacklevel)
        messages = []
        if outcome.unmatched[0]:
            messages.append(unmatched_message(self, *outcome.unmatched))
        if outcome.ambiguous[0]:
            messages.append(ambiguous_message(self, *outcome.ambiguous))
        if outcome.problems[0]:
            messages.append(describe(self, *outcome.problems))
        if messages:
            raise ValueError("\n".join(messages))
        return outcome.tree

    def answers(self, answer: Callable[[int, Any], object]) -> Answers:
        """For `decide`: answer(rule, spec cut to the leaf), made once for each rule and rank.

        The spec is None where it is longer than the rank and the dialect calls that an error.
        """
        return _spec_table(_specs_of(self._pairs), self._dialect.rank, answer)

    def numbers(self) -> Answers:
        """For `decide`: the index of the rule itself; needs no JAX."""
        indices = list(range(len(self)))
        return SpecTable(specs=indices, lengths=[0] * len(self), make=lambda rule, _: rule)

    def decide(
        self,
        tree: Any,
        answers: Answers,
        replicated: object,
        unmatched: object,
        ambiguous: object = None,
        *,
        min_size: int = 0,
        strict: bool = True,
    ) -> Outcome:
        """As `resolve`, but tells what went wrong, and leaves None there, instead of raising.

        Leaves that no rule matches get `unmatched`, and those of several rules where one alone may
        match, `ambiguous`; if it is None, they go wrong.
        """
        return Outcome(
            *self._rule_set.match(
                tree,
                answers=answers,
                strict=strict,
                min_size=min_size,
                replicated=replicated,
                unmatched=unmatched,
                ambiguous=ambiguous,
                record_events=logs_moves(),
            )
        )

    def survey(
        self, tree: Any, *, min_size: int, replicated: int, unmatched: int, ambiguous: int
    ) -> tuple[Any, list[str], dict[tuple[int, Any, Any], int], bytes]:
        """The leaves by kind: what has the same rule, shape and dtype.

        Args:
            tree: Any pytree; of its leaves `.shape` and `.dtype` are read.
            min_size: As in `match_partition_rules`.
            replicated: In the place of the rule of a leaf that needs none.
            unmatched: The same for a leaf that no rule matches.
            ambiguous: The same for a leaf of several rules, where one alone may match.

        Returns:
            (the tree with the number of its row for each leaf, the leaves' paths by row,
            {(rule, shape, dtype): number of the kind}, the kinds' numbers by row as int32)
        """
        return self._rule_set.survey(
            tree,
            answers=self.numbers(),
            min_size=min_size,
            replicated=replicated,
            unmatched=unmatched,
            ambiguous=ambiguous,
        )

    def joined(self, path: str) -> str:
        """A path as people write it, as the patterns meet it."""
        check_type("path", path, str, "a string")
        return self.all_joined([path])[0]

    def all_joined(self, paths: Iterable[str]) -> list[str]:
        """The same of many paths."""
        dialect = self._dialect
        separator, joined_by = dialect.separator, dialect.joined_by
        if not separator or separator == joined_by:
            return list(paths)
        return [path.replace(separator, joined_by) for path in paths]

    def for_whole_paths(self) -> Rules:
        """These rules, for trees whose only keys are `joined` paths."""
        if self._dialect.keys == "text":
            return self
        dialect = replace(self._dialect, keys="text")
        return self.remembered(dialect, lambda: Rules(self._pairs, dialect))

    def remembered(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` makes of these rules, remembered for the next call with this key."""
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _MOST_REMEMBERED:
                self._made.clear()
            found = self._made.setdefault(key, make())
        return found  # type: ignore[no-any-return]


class Outcome(NamedTuple):
    """What one walk has found: the tree of answers, and per kind (count, the first of them)."""

    tree: Any
    unmatched: tuple[int, list[tuple[str, Any]]]
    """(path, shape or None)"""
    ambiguous: tuple[int, list[tuple[str, tuple[list[int], Any]]]]
    """(path, (rules, shape))"""
    problems: tuple[int, list[tuple[str, tuple[int, Any]]]]
    """(path, (rule, shape)): leaves that their rule cannot be applied to"""
    events: tuple[int, list[tuple[str, Any]]]
    """(path, truncated spec or None)"""


def match_partition_rules(
    rules: Rules | Iterable[tuple[Pattern, Any]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
) -> Any:
    """The tree with each leaf replaced by the spec of the first rule that matches its path.

    Semantics of `eformer.escale.match_partition_rules`, 0.0.101: paths are the keys' texts joined
    by "/"; a leaf without a shape, or with an empty one, gets `PartitionSpec()` and needs no rule;
    a spec that is longer than the leaf's rank is cut to it. With the environment variable
    LOG_SHARDING_MOVE set to true, yes, 1 or on, each leaf that is too small or has its spec cut is
    warned about. Unlike eformer, all unmatched leaves are reported at once.

    Args:
        rules: (pattern, spec) pairs, or `Rules`, which are compiled already.
        tree: Any pytree; of its leaves only `.shape` is read.
        min_size: A matched leaf with fewer elements gets `PartitionSpec()`. None stands for the
            environment variable MIN_SHARDING_SIZE, or else 16384.
        strict: If False, shapes are not looked at: each leaf needs a rule and gets its spec whole.

    Returns:
        A tree of the same structure; dicts keep the order of their keys.

    Raises:
        ValueError: No rule matches some leaf; the message has the count and the first ten paths.
        TypeError: A rule is not a pair, a pattern is no string, or a spec cannot be one.
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
    return as_rules("rules", rules)._match(tree, min_size, strict)


def as_rules(name: str, rules: Rules | Iterable[tuple[Pattern, Any]]) -> Rules:
    """Rules, compiled if they are not yet; `name` is the parameter's.

    Raises:
        TypeError, re.error: As `Rules`.
    """
    return rules if isinstance(rules, Rules) else Rules(_checked_rules(rules, name))


def checked_min_size(min_size: Any) -> Any:
    """The number that a function's `min_size` stands for.

    Raises:
        TypeError: It is neither a number nor None.
        ValueError: It is None, and MIN_SHARDING_SIZE is no integer.
    """
    if min_size is not None:
        check_real("min_size", min_size)
        return min_size
    text = os.environ.get("MIN_SHARDING_SIZE", _DEFAULT_MIN_SIZE)
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable MIN_SHARDING_SIZE is {shown(text)}; it must be a number of "
            "elements, such as 16384"
        ) from None


def logs_moves() -> bool:
    """Whether LOG_SHARDING_MOVE, read at each call, asks for a warning at each correction."""
    return os.environ.get("LOG_SHARDING_MOVE", "false") in _TRUE_WORDS


def _unpickled(
    pairs: tuple[tuple[Pattern, Any], ...], dialect: Dialect, memory_budget: int
) -> Rules:
    return Rules(pairs, dialect, memory_budget=memory_budget)


def _checked_rules(rules: Any, name: str = "rules") -> list[Any]:
    if is_partition_spec(rules):
        raise TypeError(
            f"{name} must be a sequence of (pattern, spec) pairs, not a spec; write "
            f"[('.*', {rules})] for all leaves"
        )
    if isinstance(rules, (str, bytes, Mapping)) or not isinstance(rules, Iterable):
        hint = f"; pass {_pairs_of(rules)}" if isinstance(rules, Mapping) else ""
        raise TypeError(
            f"{name} must be a sequence of (pattern, spec) pairs, not {type(rules).__name__}{hint}"
        )
    return list(rules)


def _pairs_of(rules: Mapping[Any, Any]) -> str:
    """What to pass instead of a mapping, with the dialect that it has."""
    if isinstance(getattr(rules, "rules", None), Rules):  # compat.keras
        return "its .rules"
    if type(rules).__module__.partition(".")[0] == "keras":
        return (
            "the .rules of a shardrules.compat.keras.LayoutMap(rules.device_mesh) after its "
            ".update(rules)"
        )
    return "list(rules.items())"


def _checked_pair(index: int, rule: Any, way: Way) -> tuple[Pattern, Any]:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise TypeError(f"rule {index} is not a (pattern, spec) pair: {shown(rule)}")
    pattern, spec = checked_pattern(index, rule[0], way), rule[1]
    if isinstance(spec, RuleSpec):
        return pattern, replace(spec, spec=normalize_spec(index, spec.spec))
    return pattern, normalize_spec(index, spec)


def _specs_of(pairs: Iterable[tuple[Pattern, Any]]) -> list[Any]:
    return [plain_spec(given) for _, given in pairs]


def _spec_table(
    specs: list[Any], too_long: str, answer: Callable[[int, Any], object] | None
) -> SpecTable:
    def make(rule: int, rank: int) -> object:
        spec = spec_for_rank(specs[rule], rank, too_long)
        return spec if answer is None else answer(rule, spec)

    return SpecTable(
        specs=[None if isinstance(spec, Entries) or answer is not None else spec for spec in specs],
        lengths=[0 if too_long == "keep" else spec_length(spec) for spec in specs],
        make=make,
    )


def _choices(dialect: Dialect) -> Choices:
    return Choices(
        separator=dialect.joined_by,
        shown_separator=dialect.separator,
        keystr=dialect.keys == "keystr",
        unique=dialect.precedence == "only",
        scalars_need_rules=dialect.scalars == "none",
        size_one_is_scalar=dialect.scalars == "size 1",
        min_size_first=dialect.min_size == "before",
    )
