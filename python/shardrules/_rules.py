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
from typing import Any, Final, NoReturn, TypeVar

from shardrules._core import Answers, RuleSet, SpecTable
from shardrules._correction import RuleSpec
from shardrules._coverage import Counters, Coverage
from shardrules._dialects import EFORMER, Dialect
from shardrules._patterns import EMPTY_TEXT_HAS_NO_NON_BOUNDARY, compile_patterns
from shardrules._specs import (
    Entries,
    normalize_spec,
    partition_spec,
    shown,
    spec_for_rank,
    spec_length,
)

Pattern = str | re.Pattern[str]
_T = TypeVar("_T")

DEFAULT_MEMORY_BUDGET: Final = 32 * 1024 * 1024
_MESHES_REMEMBERED: Final = 16
_DEFAULT_MIN_SIZE: Final = "16384"
_TRUE_WORDS: Final = ("true", "yes", "1", "on")


class Rules:
    r"""An ordered list of (pattern, spec) rules, compiled for matching. Immutable, hashable.

    The rule of a path is the first one whose ``re.search(pattern, path)`` is not None: exactly the
    one that the running Python's `re` would choose, for any string.

    Args:
        rules: (pattern, spec) pairs. A pattern is a string, or a compiled `re.Pattern` whose flags
            hold. A spec is a PartitionSpec; or None, an axis name, or a tuple or list of
            PartitionSpec entries, which stand for the PartitionSpec made of them; or any other
            hashable object, which leaves get as it is. A `RuleSpec` adds a correction to a spec.
        dialect: Whose semantics to follow.
        memory_budget: Bytes that the matcher may spend on remembered states, for each call that
            runs at the same time; 32 MiB unless told. When they are spent it forgets and goes on,
            slower; with 0 it remembers nothing. `counters` shows what happened.

    Raises:
        TypeError: A rule is not a pair, a pattern is no string, or a spec cannot be one.
        re.error: A pattern is invalid; the message has the rule's index and a caret.
        ValueError: memory_budget is no number of bytes.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = Rules([("embed", P("tp")), (r"layers/\d+/.*kernel", P("fsdp")), (".*", P())])
        >>> rules.first_match("layers/7/mlp/kernel")
        1
        >>> rules.all_matches("layers/7/mlp/kernel")
        [1, 2]
    """

    __slots__ = (
        "_dialect", "_fallbacks", "_memory_budget", "_on_meshes", "_pairs", "_rule_set", "_table",
    )  # fmt: skip

    _dialect: Dialect
    _fallbacks: tuple[tuple[int, str], ...]
    _memory_budget: int
    _on_meshes: dict[Any, Any]
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
        if not isinstance(memory_budget, int) or memory_budget < 0:
            raise ValueError(f"memory_budget is {memory_budget!r}; it must be a number of bytes")
        pairs = tuple(_checked_pair(i, rule) for i, rule in enumerate(_checked_rules(rules)))
        code = compile_patterns([pattern for pattern, _ in pairs])
        specs = [spec.spec if isinstance(spec, RuleSpec) else spec for _, spec in pairs]
        attributes = {
            "_pairs": pairs,
            "_on_meshes": {},
            "_dialect": dialect,
            "_memory_budget": memory_budget,
            "_fallbacks": code.fallbacks,
            "_table": SpecTable(
                specs=[None if isinstance(spec, Entries) else spec for spec in specs],
                lengths=[spec_length(spec) for spec in specs],
                make=lambda rule, rank: spec_for_rank(specs[rule], rank),
            ),
            "_rule_set": RuleSet(
                patterns=code.patterns,
                classes=code.classes,
                accepts=code.accepts,
                word_class=code.word_class,
                ascii_word_class=code.ascii_word_class,
                empty_text_has_no_non_boundary=EMPTY_TEXT_HAS_NO_NON_BOUNDARY,
                searched=code.searched,
                memory_budget=memory_budget,
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
        """The index of the first rule that matches the path, or None."""
        return self._rule_set.first_match(path)

    def all_matches(self, path: str) -> list[int]:
        """The indices of all rules that match the path, ascending."""
        return self._rule_set.all_matches(path)

    def coverage(self, tree: Any, strict: bool = True) -> Coverage:
        """How each rule does on the tree, from one walk over it.

        Args:
            tree: Any pytree; of its leaves only `.shape` is read.
            strict: Leaves without a shape, or with an empty one, need no rule and are not counted.

        Example:
            >>> import numpy as np
            >>> rules = Rules([("kernel", "tp"), ("wq/kernel", None), ("lora", None)])
            >>> coverage = rules.coverage({"wq": {"kernel": np.ones((2, 2))}, "b": np.ones(2)})
            >>> coverage.shadowed, coverage.dead, coverage.unmatched
            ({1: (0,)}, (2,), 1)
        """
        counts = self._rule_set.count_matches(
            tree, separator=self._dialect.separator, strict=strict
        )
        return Coverage.from_counts(*counts)

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
            tree, self._table, partition_spec(), min_size=min_size, strict=strict, stacklevel=4
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
        describe: Callable[[int, list[tuple[str, tuple[int, Any]]]], str] | None = None,
    ) -> Any:
        """The tree with each leaf replaced by what `answers` has for it, in one crossing.

        For the modules of this package: `replicated` is what a leaf gets that is not sharded, and
        `describe` words the problems that `answers` reports.
        """
        if min_size is None:
            min_size = int(os.environ.get("MIN_SHARDING_SIZE", _DEFAULT_MIN_SIZE))
        result, unmatched_count, unmatched, problem_count, problems, events = self._rule_set.match(
            tree,
            separator=self._dialect.separator,
            answers=answers,
            strict=strict,
            min_size=min_size,
            replicated=replicated,
            record_events=logs_moves(),
        )
        for path, spec in events:
            warnings.warn(_event_message(path, spec), stacklevel=stacklevel)
        messages = []
        if unmatched_count:
            messages.append(_unmatched_message(unmatched_count, unmatched, len(self)))
        if problem_count and describe is not None:
            messages.append(describe(problem_count, problems))
        if messages:
            raise ValueError("\n".join(messages))
        return result

    def cached_on_mesh(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` makes of these rules, remembered for the next call with this key."""
        found = self._on_meshes.get(key)
        if found is None:
            if len(self._on_meshes) >= _MESHES_REMEMBERED:
                self._on_meshes.clear()
            found = self._on_meshes.setdefault(key, make())
        return found  # type: ignore[no-any-return]


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
    compiled = rules if isinstance(rules, Rules) else Rules(rules)
    return compiled._match(tree, min_size, strict)


def logs_moves() -> bool:
    """Whether LOG_SHARDING_MOVE, read at each call, asks for a warning at each correction."""
    return os.environ.get("LOG_SHARDING_MOVE", "false") in _TRUE_WORDS


def _unpickled(
    pairs: tuple[tuple[Pattern, Any], ...], dialect: Dialect, memory_budget: int
) -> Rules:
    return Rules(pairs, dialect, memory_budget=memory_budget)


def _checked_rules(rules: Any) -> list[Any]:
    if isinstance(rules, (str, bytes, Mapping)) or not isinstance(rules, Iterable):
        hint = "; pass list(rules.items())" if isinstance(rules, Mapping) else ""
        raise TypeError(
            f"rules must be a sequence of (pattern, spec) pairs, not {type(rules).__name__}{hint}"
        )
    return list(rules)


def _checked_pair(index: int, rule: Any) -> tuple[Pattern, Any]:
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise TypeError(f"rule {index} is not a (pattern, spec) pair: {shown(rule)}")
    pattern, spec = rule
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise TypeError(
            f"rule {index}: the pattern must be a string or a compiled re.Pattern of one, not "
            f"{shown(pattern)}"
        )
    if isinstance(spec, RuleSpec):
        return pattern, replace(spec, spec=normalize_spec(index, spec.spec))
    return pattern, normalize_spec(index, spec)


def _event_message(path: str, spec: object) -> str:
    """Eformer's words, for those who filter warnings by them."""
    if spec is None:
        return f"PartitionSpec Related to {path} was safer and faster being local array."
    return f"PartitionSpec Related to {path} went out of range (will be auto trimed to {spec})."


def _unmatched_message(count: int, unmatched: list[tuple[str, Any]], rule_count: int) -> str:
    listed = [f"    {path}  shape {shape}" if shape is not None else f"    {path}"
              for path, shape in unmatched]  # fmt: skip
    if count > len(listed):
        listed.append(f"    ... and {count - len(listed)} more")
    leaves = "1 leaf matches" if count == 1 else f"{count} leaves match"
    return "\n".join(
        [
            f"Partition rule not found for param: {unmatched[0][0]}",
            f"  {leaves} none of the {rule_count} rules:",
            *listed,
            "  Add a rule for them, or end the rules with ('.*', PartitionSpec()) to replicate "
            "whatever no rule shards.",
        ]
    )
