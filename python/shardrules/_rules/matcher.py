"""`Matcher`: a rule list compiled for one dialect, and the messages about its walks over trees."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from shardrules._base.arguments import check_real
from shardrules._base.rule_specs import Fsdp, plain_spec
from shardrules._base.specs import Entries, RankPolicy, spec_for_rank, spec_length
from shardrules._base.text import and_more, answer, counted, printable, printable_lines, shown
from shardrules._core import Answers, DialectOptions, RuleSet, SpecTable
from shardrules._rules.dialects import Dialect
from shardrules._rules.patterns import (
    EMPTY_TEXT_HAS_NO_NON_BOUNDARY,
    Pattern,
    compile_patterns,
)

_DEFAULT_MIN_SIZE: Final = "16384"
_TRUE_WORDS: Final = ("true", "yes", "1", "on")


def checked_min_size(min_size: Any) -> Any:
    """Return a function's `min_size`; None stands for MIN_SHARDING_SIZE, or else 16384."""
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
    """Return whether LOG_SHARDING_MOVE asks for warnings about leaves that lose specs."""
    return os.environ.get("LOG_SHARDING_MOVE", "false") in _TRUE_WORDS


_T = TypeVar("_T")

_MOST_REMEMBERED: Final = 16


class WalkResult(NamedTuple):
    """Result of one walk. Each kind of failure is (number of leaves, the first of them)."""

    tree: Any
    """The answer of each leaf; None where something went wrong."""
    unmatched: tuple[int, list[tuple[str, Any]]]
    """(path, shape or None): leaves that no rule matches"""
    ambiguous: tuple[int, list[tuple[str, tuple[list[int], Any]]]]
    """(path, (rules, shape)): leaves that several rules match, where only one may"""
    misfits: tuple[int, list[tuple[str, tuple[int, Any]]]]
    """(path, (rule, shape)): leaves that their rule cannot be applied to"""
    events: tuple[int, list[tuple[str, Any]]]
    """(path, truncated spec or None): leaves that do not get their whole spec, if these are asked
    for"""
    has_dimensions: bool
    """True if some leaf has a shape that is not (); False if shapes are not looked at."""


class Matcher:
    """Compiled rule list."""

    __slots__ = (
        "_remembered", "dialect", "fallbacks", "from_shapes", "memory_budget", "min_size",
        "optional_axes", "pairs", "rule_set", "specs",
    )  # fmt: skip

    def __init__(
        self,
        pairs: tuple[tuple[Pattern, Any], ...],
        dialect: Dialect,
        memory_budget: int,
        optional_axes: tuple[str, ...] = (),
        min_size: int = 0,
    ) -> None:
        code = compile_patterns([pattern for pattern, _ in pairs], dialect.match)
        self.pairs: Final = pairs
        self.dialect: Final = dialect
        self.memory_budget: Final = memory_budget
        self.optional_axes: Final = optional_axes
        self.min_size: Final = min_size
        self.fallbacks: Final = code.reasons
        specs = [plain_spec(spec) for _, spec in pairs]
        shaped = [rule for rule, spec in enumerate(specs) if isinstance(spec, Fsdp)]
        self.from_shapes: Final = shaped[0] if shaped else None
        """The first rule whose spec is made from shapes, which needs a mesh; or None."""
        self.specs: Final = _spec_table(specs, dialect.rank)
        """For `decide`: each rule's spec, as long as the dialect lets it be."""
        self.rule_set: Final = RuleSet(
            code.patterns,
            code.classes,
            code.oracle,
            code.word_class,
            code.ascii_word_class,
            EMPTY_TEXT_HAS_NO_NON_BOUNDARY,
            code.fallbacks,
            memory_budget,
            len(dialect.match),
            _dialect_options(dialect),
        )
        self._remembered: Final[dict[Hashable, Any]] = {}

    def decide(
        self,
        tree: Any,
        answers: Answers,
        replicated: object,
        unmatched: object = None,
        ambiguous: object = None,
        *,
        min_size: int | None = None,
        strict: bool = True,
    ) -> WalkResult:
        """Return the tree with each leaf replaced by what `answers` has for it.

        Args:
            tree: Any pytree; of its leaves only `.shape` is read.
            answers: What the leaves of each rule get.
            replicated: What a leaf gets that needs no rule.
            unmatched: What a leaf gets that no rule matches. None: `replicated` if the dialect
                replicates such leaves; otherwise it is reported.
            ambiguous: What a leaf gets that several rules match, where only one may. None: it is
                reported.
            min_size: As in `match_partition_rules`. Default: the rules'.
            strict: The same.
        """
        least = self.min_size if min_size is None else min_size
        if unmatched is None and self.dialect.unmatched == "replicate":
            unmatched = replicated
        return WalkResult(
            *self.rule_set.match(
                tree, answers, strict, least, replicated, unmatched, ambiguous, logs_moves()
            )
        )

    def survey(
        self, tree: Any, *, replicated: int, unmatched: int, ambiguous: int
    ) -> tuple[Any, list[str], dict[tuple[int, Any, Any], int], bytes]:
        """Return the leaves by kind: those of one kind have the same rule, shape and dtype.

        Args:
            tree: Any pytree; of its leaves `.shape` and `.dtype` are read.
            replicated: Stands for the rule of a leaf that needs none.
            unmatched: The same for a leaf that no rule matches.
            ambiguous: The same for a leaf that several rules match, where only one may.

        Returns:
            (the tree with the number of its row for each leaf, the leaves' paths by row,
            {(rule, shape, dtype): number of the kind}, the kinds' numbers by row as int32)
        """
        return self.rule_set.survey(
            tree, self.rule_indices(), self.min_size, replicated, unmatched, ambiguous
        )

    def coverage(self, tree: Any, *, strict: bool = True) -> Coverage:
        """Return per rule, the leaves of the tree that it matches and wins."""
        return _coverage(*self.rule_set.count_matches(tree, strict))

    def coverage_of_paths(self, paths: list[str]) -> Coverage:
        """Return per rule, the paths that it matches and wins."""
        return _coverage(*self.rule_set.count_paths(paths))

    def rule_indices(self) -> Answers:
        """Return for `decide` the index of the rule itself; needs no JAX."""
        count = len(self.pairs)
        return SpecTable(list(range(count)), [0] * count, lambda rule, _: rule)

    def for_whole_paths(self) -> Matcher:
        """Return these rules, for trees whose only keys are paths."""
        if self.dialect.keys == "text":
            return self
        dialect = replace(self.dialect, keys="text")
        policy = self.memory_budget, self.optional_axes, self.min_size
        return self.remembered(dialect, lambda: Matcher(self.pairs, dialect, *policy))

    def remembered(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Return the result of `make`, remembered for the next call with this key."""
        value = self._remembered.get(key)
        if value is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            value = self._remembered.setdefault(key, make())
        return value  # type: ignore[no-any-return]


def _spec_table(specs: list[Any], too_long: RankPolicy) -> SpecTable:
    def make(rule: int, rank: int) -> object:
        return spec_for_rank(specs[rule], rank, too_long)

    return SpecTable(
        [None if isinstance(spec, Entries) else spec for spec in specs],
        [0 if too_long == "keep" else spec_length(spec) for spec in specs],
        make,
    )


def _dialect_options(dialect: Dialect) -> DialectOptions:
    return DialectOptions(
        "" if dialect.keys == "keystr" else dialect.separator,
        dialect.separator,
        dialect.keys == "keystr",
        dialect.hidden_key,
        dialect.precedence == "only",
        dialect.scalars == "none",
        dialect.scalars == "size 1",
        dialect.min_size == "before",
    )


@answer
class Coverage(NamedTuple):
    """Leaves that each rule of a list matches and wins. Only leaves that need a rule count."""

    matched: tuple[int, ...]
    """Per rule, the leaves that its pattern matches."""
    won: tuple[int, ...]
    """Per rule, the leaves that it decides: the first rule that matches wins."""
    unmatched: int
    """Leaves that no rule matches."""
    lost: dict[int, dict[int, int]]
    """Of each rule, by the rule that won instead, the leaves that it matched but did not decide."""

    @property
    def dead(self) -> tuple[int, ...]:
        """Return rules that match no leaf."""
        return tuple([rule for rule, leaves in enumerate(self.matched) if leaves == 0])

    @property
    def shadowed(self) -> dict[int, tuple[int, ...]]:
        """Return rules that match leaves but win none, with the rules that win them all."""
        return {
            rule: tuple(sorted(self.lost[rule]))
            for rule, leaves in enumerate(self.matched)
            if leaves > 0 and self.won[rule] == 0
        }

    def __str__(self) -> str:
        heading = f"{counted(len(self.won), 'rule')}: {counted(self.unmatched, 'leaf')} unmatched"
        return "\n".join([heading, *map(self._line, range(len(self.won)))])

    def _line(self, rule: int) -> str:
        if not self.matched[rule]:
            return f"rule {rule}: dead, matches no leaf"
        winners = ", ".join(f"rule {winner}" for winner in sorted(self.lost.get(rule, ())))
        matched = counted(self.matched[rule], "leaf")
        if not self.won[rule]:
            return f"rule {rule}: shadowed, wins none of {matched}, which {winners} wins"
        lost = f", the others {winners}" if winners else ""
        return f"rule {rule}: wins {self.won[rule]:,} of {matched}{lost}"


def _coverage(
    matched: list[int], won: list[int], unmatched: int, lost_pairs: list[tuple[int, int, int]]
) -> Coverage:
    lost: dict[int, dict[int, int]] = {}
    for loser, winner, leaves in lost_pairs:
        lost.setdefault(loser, {})[winner] = leaves
    return Coverage(tuple(matched), tuple(won), unmatched, lost)


def tree_of_walk(
    matcher: Matcher, walk: WalkResult, misfits_message: Callable[[Matcher, int, Any], str]
) -> Any:
    """Return the tree of a walk, if nothing went wrong. Its events become warnings.

    The warnings name the line that called the public function, three frames above this one.

    Raises:
        ValueError: Some leaves are not decided; one message lists all.
    """
    for path, spec in walk.events[1]:
        warnings.warn(_event_message(path, spec), stacklevel=4)
    messages = []
    if walk.unmatched[0]:
        messages.append(_unmatched_message(matcher, *walk.unmatched))
    if walk.ambiguous[0]:
        messages.append(ambiguous_message(matcher, *walk.ambiguous))
    if walk.misfits[0]:
        messages.append(misfits_message(matcher, *walk.misfits))
    if messages:
        raise ValueError("\n".join(messages))
    return walk.tree


def _unmatched_message(matcher: Matcher, count: int, leaves: list[tuple[str, Any]]) -> str:
    """Word the message about leaves that no rule matches: (path, shape or None)."""
    lines = _leaf_lines(
        count, [path if shape is None else f"{path}  shape {shape}" for path, shape in leaves]
    )
    searches = matcher.dialect.match == ("search",)
    catch_all = ", or end the rules with ('.*', PartitionSpec()) to replicate whatever no rule "
    fix = f"Add a rule for them{catch_all + 'shards' if searches else ''}."
    return (
        f"{printable(f'Partition rule not found for param: {leaves[0][0]}')}\n"
        f"  {_leaves_match(count)} none of the {len(matcher.pairs)} rules:\n{lines}\n"
        f"  {fix}"
    )


def ambiguous_message(
    matcher: Matcher, count: int, leaves: list[tuple[str, tuple[list[int], Any]]]
) -> str:
    """Word the message about leaves that several rules match: (path, (rules, shape))."""
    lines = _leaf_lines(
        count,
        [
            f"{path}  shape {shape}  "
            + ", ".join(f"rule {rule}: {matcher.pairs[rule][0]!r}" for rule in matching)
            for path, (matching, shape) in leaves
        ],
    )
    tries_exact = matcher.dialect.match[0] == "exact"
    exact = ", or add a rule whose pattern is the path itself" if tries_exact else ""
    return (
        f"{_leaves_match(count)} several rules, where only one may:\n{lines}\n"
        f"  Make the patterns exclude each other{exact}."
    )


def too_long_message(
    matcher: Matcher, count: int, leaves: list[tuple[str, tuple[int, Any]]]
) -> str:
    """Word the message about leaves of fewer dimensions than entries: (path, (rule, shape))."""
    lines = _leaf_lines(
        count,
        [
            f"{path}  shape {shape}  rule {rule}: {rule_shown(*matcher.pairs[rule])}"
            for path, (rule, shape) in leaves
        ],
    )
    have = f"{counted(count, 'leaf')} {'has' if count == 1 else 'have'}"
    return (
        f"{have} fewer dimensions than the spec has entries:\n{lines}\n"
        "  Shorten the specs, or take a dialect with rank='truncate'."
    )


def _event_message(path: str, spec: object) -> str:
    """Return an event in the words of eformer, so that filters of its warnings work."""
    if spec is None:
        what = "was safer and faster being local array."
    else:
        what = f"went out of range (will be auto trimed to {spec})."
    return printable(f"PartitionSpec Related to {path} {what}")


def rule_shown(pattern: Pattern, spec: Any) -> str:
    """Return a rule, for a message."""
    return f"{pattern!r} -> {plain_spec(spec)}"


def _leaves_match(count: int) -> str:
    return f"{counted(count, 'leaf')} {'matches' if count == 1 else 'match'}"


def _leaf_lines(count: int, lines: list[str]) -> str:
    return printable_lines(f"    {line}" for line in lines + and_more(count, len(lines), "leaf"))
