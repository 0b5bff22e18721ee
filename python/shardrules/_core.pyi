"""The C++ core: csrc/bind.

What comes from a user is refused with a short TypeError if it has another type than it has here, or
if an int is not one of 64 bits. Takes positional arguments alone: pybind11 crashes on a keyword
where there is no memory for its name.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any, final

class Answers:
    """What a leaf gets from the rule that has won it."""

class RecordLayout(enum.IntEnum):
    """How nodes of a record type are read and rebuilt; see csrc/pytree/record_type.hpp."""

    CALL = 0
    FIELDS = 1
    ATTRIBUTES = 2
    VARIABLE = 3

@final
class SpecTable(Answers):
    """The spec object of each (rule, rank), made by `make` on first sight.

    Args:
        specs: Per rule its spec, or None if it has yet to be made.
        lengths: Per rule, the entries of its spec; a leaf of at least that rank gets it whole.
        make: make(rule, rank), the spec for a leaf of that rank.
    """

    def __init__(
        self, specs: Sequence[object], lengths: Sequence[int], make: Callable[[int, int], object], /
    ) -> None: ...

@final
class Corrector:
    """Which axes of a spec an array of a given shape can have.

    Args:
        dims: Per entry of the spec, (sizes of its axes, 0 for an absent one; unit of the cuts), all
            below 2**63.
        absent: "drop", "drop_axis", "prefix" or "keep".
        indivisible: The same.
    """

    def __init__(
        self, dims: Sequence[tuple[Sequence[int], int]], absent: str, indivisible: str, /
    ) -> None: ...
    def kept(self, shape: tuple[Any, ...], /) -> int:
        """Bit i: the i-th axis of the spec is kept.

        Dimensions may be ints of any size, or symbolic, as jax.export has them.
        """

@final
class LogicalRuleSet:
    """Logical axis rules with names and mesh axes as numbers; see csrc/sharding/logical.hpp.

    Args:
        rules: (name, mesh axes).
        axis_sizes: Per mesh axis its devices, below 2**63; looked at only for
            dimensions that have a size.
        last_wins: Whether the last rule for a name wins, instead of the first that is free.
        indivisible: For axes that do not divide a dimension: "drop", "drop_axis", "prefix" or
            "keep". A rule of which nothing is left loses.
    """

    def __init__(
        self,
        rules: Sequence[tuple[int, Sequence[int]]],
        axis_sizes: Sequence[int],
        last_wins: bool,
        indivisible: str,
        /,
    ) -> None: ...
    def resolve(
        self, dims: Sequence[tuple[int | None, Sequence[int], Any]], /
    ) -> tuple[list[int | None], list[tuple[int, int, str, int | None]]]:
        """Per dimension (name, mesh axes that it has already, size), the rule it gets.

        And the rules that lost: (rule, dimension, "dim taken" by the rule `to` | "axis taken" by
        the dimension `to` | "indivisible", to).
        """

def resolve_all(
    names: list[Any],
    shapes: list[Any] | None,
    memo: dict[Any, Any],
    make: Callable[[Any, Any], Any],
    /,
) -> list[Any]:
    """Of each leaf make(names, shape), from the memo where it was asked before."""

def aligned_values(rows: Any, values: Any, leaves: int, /) -> list[Any] | None:
    """Return what `values`, a tree like `rows`, has for each leaf, by its number in `rows`.

    None if the trees differ, or have other nodes than dicts, lists and tuples.
    """

def read_ranges(
    file: int, begins: Any, sizes: Any, places: Any, memory: Any, gap: int, /
) -> tuple[int, int]:
    """Read ranges of a file, in its order, into memory, without the GIL; not on Windows.

    Args:
        file: The file's descriptor.
        begins: Where each range begins in the file, int64.
        sizes: The bytes of each, int64.
        places: Where each goes in the memory, int64.
        memory: A writable buffer.
        gap: At most so many bytes between two ranges are read along with them.

    Returns:
        (the offset where it stopped; 0, or the system's error number, or -1 at the file's end)
    """

def templates(paths: list[str], /) -> tuple[list[str], bytes, bytes]:
    """Paths with holes for their numbers; see csrc/folding/templates.hpp.

    Returns:
        (the distinct templates, with a NUL and # for each number; per path its template, int32; the
        numbers of all paths in a row, int64)
    """

@final
class ShardingTable(Answers):
    """What each (spec, rank, kept axes) gets, made by `make` on first sight.

    Args:
        correctors: Per distinct spec; None for a spec that is made from shapes.
        spec_of: Per rule, its spec's index.
        make: make(spec, rank, kept), what such a leaf gets; None if it cannot be given that.
        make_for_shape: make_for_shape(spec, shape, dtype), the same without a corrector; dtype is
            None for a leaf that has none.
    """

    def __init__(
        self,
        correctors: Sequence[Corrector | None],
        spec_of: Sequence[int],
        make: Callable[[int, int, int], object],
        make_for_shape: Callable[[int, tuple[Any, ...], Any], object],
        /,
    ) -> None: ...

@final
class DialectOptions:
    """What the core needs to know of a dialect; `sr.dialects.Dialect` says what it means."""

    def __init__(
        self,
        separator: str,
        shown_separator: str,
        keystr: bool,
        hidden_key: str | None,
        unique: bool,
        scalars_need_rules: bool,
        size_one_is_scalar: bool,
        min_size_first: bool,
        /,
    ) -> None: ...

@final
class RuleSet:
    r"""A compiled rule list.

    Args:
        patterns: Per match mode and rule a literal, code words, or None where `fallbacks` has
            the rule.
        classes: Per character class its ASCII members, bit c for character c.
        oracle: oracle(class, character): whether the class has a non-ASCII member.
        word_class: The class that `\b` looks at, or -1.
        ascii_word_class: The same for patterns with the ASCII flag.
        empty_text_has_no_non_boundary: Whether `\B` does not match the empty string.
        fallbacks: (position in `patterns`, search) of those evaluated by calling search(path).
        memory_budget: Bytes for the states of each DFA, and as many for its way down a tree.
        match_modes: How many match modes there are: `patterns` has all rules once for each. What
            matches in an earlier mode wins.
        dialect: What the core needs to know of the dialect.
    """

    def __init__(
        self,
        patterns: Sequence[str | list[int] | None],
        classes: Sequence[int],
        oracle: Callable[[int, str], bool],
        word_class: int,
        ascii_word_class: int,
        empty_text_has_no_non_boundary: bool,
        fallbacks: Sequence[tuple[int, Callable[[str], object]]],
        memory_budget: int,
        match_modes: int,
        dialect: DialectOptions,
        /,
    ) -> None: ...
    def first_match(self, path: str, /) -> int | None: ...
    def all_matches(self, path: str, /) -> list[int]: ...
    def match(
        self,
        tree: object,
        answers: Answers,
        strict: bool,
        min_size: object,
        replicated: object,
        unmatched: object,
        ambiguous: object,
        record_events: bool,
        /,
    ) -> tuple[
        Any,
        tuple[int, list[tuple[str, Any]]],
        tuple[int, list[tuple[str, tuple[list[int], Any]]]],
        tuple[int, list[tuple[str, tuple[int, Any]]]],
        tuple[int, list[tuple[str, Any]]],
        bool,
    ]:
        """Return the fields of `shardrules._rules.matcher.WalkResult`."""

    def survey(
        self,
        tree: object,
        answers: Answers,
        min_size: object,
        replicated: object,
        unmatched: object,
        ambiguous: object,
        /,
    ) -> tuple[Any, list[str], dict[tuple[Any, Any, Any], int], bytes]:
        """(tree of rows, paths, {(answer, shape, dtype): number}, int32 number of each row)."""

    def count_matches(
        self, tree: object, strict: bool, /
    ) -> tuple[list[int], list[int], int, list[tuple[int, int, int]]]:
        """Leaves (matched per rule, won per rule, unmatched, of (loser, winner) pairs)."""

    def count_paths(
        self, paths: list[str], /
    ) -> tuple[list[int], list[int], int, list[tuple[int, int, int]]]:
        """Paths (matched per rule, won per rule, unmatched, of (loser, winner) pairs)."""

    def counters(self) -> tuple[int, int, int, int]:
        """(states built, cache clears, simulated steps, program nodes)."""
