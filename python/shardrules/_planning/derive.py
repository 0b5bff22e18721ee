"""Derivation: leaves that follow the rule of another path, such as scales, LoRA factors, stacks.

Costs one more match of each path, and a `re.sub` for each leaf that follows. Must not know of
optimizers, nor which libraries name leaves in which ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import NamedTuple, TypeVar

import numpy as np

from shardrules._arguments import check_type, integer, listed
from shardrules._matching.rules import Rules
from shardrules._planning.kinds import Kind, Placer
from shardrules._planning.survey import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED, Alike, Survey
from shardrules._specs import Dim
from shardrules._words import shown

__all__ = ["Companion", "Leaves", "first_rules", "grouped", "placed_leaves", "with_companions"]

_Key = TypeVar("_Key", bound=Hashable)
_Shape = tuple[int, ...]
_Dims = tuple[Dim | EllipsisType, ...]


@dataclass(frozen=True, slots=True)
class Companion:
    r"""Leaves that follow the rule of another path: their base's, which need not be in the tree.

    Such a leaf gets the rule that its base's path meets; of the rule's spec it takes an entry for
    each of its dimensions, together with the unit (`RuleSpec`), and that is corrected for its own
    shape. A dimension of size 1 takes none. If no rule matches the base's path, the leaf's own
    counts.

    Args:
        pattern: A regex that `re.search` finds in the leaf's path.
        base: What `re.sub` puts in the place of what was found: that is the path of the base.
        dims: Per dimension of the leaf: the base's dimension that it is; None if it is none, and
            not cut; or the mesh axis, or axes, that cut it. The record is for leaves of this rank
            only. A final `...` stands for all further dimensions, those of the base in order.
            Or a function that tells the dims of a leaf of any rank from its shape and its base's,
            which is None where the base is not in the tree.
        blocks: Per dimension of the leaf, how many of the base's elements one of its own stands
            for; 1 unless told. Only units need it.

    Raises:
        ValueError: dims or blocks are no such things.
        re.error: The pattern or the replacement is invalid.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> scale = sr.Companion("kernel_scale$", "kernel", dims=(1,))
        >>> tree = {"wq": {"kernel_scale": jax.ShapeDtypeStruct((512,), "float32")}}
        >>> rules, mesh = [("wq/kernel$", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4}
        >>> sr.plan(tree, rules, mesh, companions=[scale]).specs()["wq"]["kernel_scale"][0]
        'tp'
    """

    pattern: str | re.Pattern[str]
    base: str
    dims: _Dims | Callable[[_Shape, _Shape | None], tuple[Dim, ...]] = (...,)
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, str | re.Pattern, "a pattern")
        check_type("base", self.base, str, "a string")
        re.sub(self.pattern, self.base, "")
        if not callable(self.dims):
            object.__setattr__(self, "dims", listed("dims", self.dims, "dimensions"))
            _check_dims(self.dims)
        blocks = listed("blocks", self.blocks, "integers")
        checked = (integer(f"blocks[{i}]", block, 1) for i, block in enumerate(blocks))
        object.__setattr__(self, "blocks", tuple(checked))

    def base_of(self, path: str) -> str:
        """The base's path, of the path of a leaf."""
        check_type("path", path, str, "a string")
        return re.sub(self.pattern, self.base, path, count=1)

    def is_for(self, rank: int) -> bool:
        """Whether leaves of this rank can be such."""
        rank = integer("rank", rank)
        if callable(self.dims):
            return True
        named, is_open = _named(self.dims)
        # There must be a place for each dimension that the base does not have.
        return all(isinstance(dim, int) for dim in named[rank:]) if is_open else len(named) == rank


def _check_dims(dims: _Dims) -> None:
    for position, dim in enumerate(dims):
        if not _is_dim(dim) and not (dim is ... and position == len(dims) - 1):
            raise ValueError(
                f"dims has {shown(dim)}; it has dimensions from 0 on, None and mesh axes, and "
                "at its end there may be an ellipsis"
            )


def _named(dims: _Dims) -> tuple[tuple[Dim, ...], bool]:
    """The dims before the ellipsis, and whether there is one."""
    named = tuple(dim for dim in dims if dim is not ...)
    return named, len(named) < len(dims)


def _dims_of(dims: _Dims, rank: int, entries: int) -> tuple[Dim, ...]:
    """The dims of a leaf of this rank, whose base's spec has so many entries.

    Where all of the base's dimensions are taken, entries beyond the rank are too many for the base
    as well; they are taken along, so that the correction says what becomes of them.
    """
    named, is_open = _named(dims)
    if not is_open:
        return named
    following = max((dim for dim in named if isinstance(dim, int)), default=-1) + 1
    every = (*named, *range(following, following + max(rank, entries)))
    return (*every[:rank], *(dim for dim in every[rank:] if isinstance(dim, int) and dim < entries))


def _is_dim(dim: object) -> bool:
    if isinstance(dim, tuple):
        return all(isinstance(axis, str) for axis in dim)
    if isinstance(dim, int):
        return not isinstance(dim, bool) and dim >= 0
    return dim is None or isinstance(dim, str)


class Leaves(NamedTuple):
    """The leaves of a tree, placed."""

    found: Survey
    kinds: list[Kind]
    """Of each of `found.kinds`."""
    sources: list[str]
    """Per row, the path that the rules meet."""
    companions: tuple[Companion, ...] = ()
    """Those that were given."""
    found_by: Mapping[int, Companion] | None = None
    """Of each row that one finds, which; the row's source is its own path if no rule meets the
    base's."""


def placed_leaves(found: Survey, placer: Placer) -> Leaves:
    """The leaves by their own rules."""
    return Leaves(found, [placer.place(alike) for alike in found.kinds], found.paths)


class _Followed(NamedTuple):
    """How leaves follow their bases."""

    rule: int
    dims: _Dims
    blocks: tuple[int, ...]


def with_companions(
    leaves: Leaves,
    rules: Rules,
    placer: Placer,
    companions: tuple[Companion, ...],
    min_size: int,
) -> Leaves:
    """The leaves again, those that companions find by the rules of their bases."""
    found = leaves.found
    companion_of = _companions_of(found, companions)
    base_of = {row: one.base_of(found.paths[row]) for row, one in companion_of.items()}
    rule_of = first_rules(rules, set(base_of.values()))
    followed: dict[int, _Followed] = {}
    sources = list(found.paths)
    for row, companion in companion_of.items():
        if (rule := rule_of[base_of[row]]) != UNMATCHED:
            dims = _resolved(companion, found, row, base_of[row])
            followed[row] = _Followed(rule, dims, companion.blocks)
            sources[row] = base_of[row]
    keys, kind_of = grouped(
        (kind, followed.get(row)) for row, kind in enumerate(found.kind_of.tolist())
    )

    def placed(kind: int, how: _Followed | None) -> Kind:
        alike = found.kinds[kind]
        return leaves.kinds[kind] if how is None else _placed(alike, how, placer, min_size)

    kinds = [placed(*key) for key in keys]
    alikes = [found.kinds[kind] for kind, _ in keys]
    found = replace(found, kind_of=kind_of, kinds=alikes)
    return Leaves(found, kinds, sources, companions, companion_of)


def _resolved(companion: Companion, found: Survey, row: int, base: str) -> _Dims:
    """The dims of the leaf of this row."""
    if not callable(companion.dims):
        return companion.dims
    shape, of_base = (
        None if at is None else found.kinds[int(found.kind_of[at])].shape
        for at in (row, found.rows.get(base))
    )
    dims = tuple(companion.dims(shape or (), of_base))
    _check_dims(dims)
    if len(dims) != len(shape or ()):
        raise ValueError(
            f"{found.paths[row]}: the dims of the companion {companion.pattern!r} are {dims} for "
            f"the shape {shape}; there must be one for each of its dimensions"
        )
    return dims


def _companions_of(found: Survey, companions: tuple[Companion, ...]) -> dict[int, Companion]:
    """Per row that one finds, the first that does."""
    ranks = [
        -1 if alike.shape is None or alike.rule == NO_RULE_NEEDED else len(alike.shape)
        for alike in found.kinds
    ]
    rank_of = np.array(ranks, np.int64)[found.kind_of]
    companion_of = {}
    for rank in set(ranks) - {-1}:
        fitting = [companion for companion in companions if companion.is_for(rank)]
        rows = np.flatnonzero(rank_of == rank).tolist()
        matcher = Rules([(companion.pattern, None) for companion in fitting])
        first = first_rules(matcher, [found.paths[row] for row in rows])
        for row in rows:
            if (index := first[found.paths[row]]) != UNMATCHED:
                companion_of[row] = fitting[index]
    return companion_of


def _placed(alike: Alike, how: _Followed, placer: Placer, min_size: int) -> Kind:
    shape = alike.shape or ()
    decided = alike._replace(rule=how.rule)
    if how.rule >= 0 and prod(shape) < min_size:
        decided = alike._replace(rule=NO_RULE_NEEDED)
    if decided.rule < 0:
        return placer.place(decided)
    of_base = placer.spec(how.rule)
    dims = _dims_of(how.dims, len(shape), len(of_base.spec))
    cut = tuple(None if size == 1 else dim for size, dim in zip(shape, dims, strict=False))
    return placer.placed(
        decided,
        of_base.with_dims((*cut, *dims[len(shape) :]), how.blocks),
        f"the rule of what it follows, dims {_dims_shown(dims[: len(shape)])} of its spec",
    )


def first_rules(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Per path the index of the rule that decides it, or UNMATCHED or AMBIGUOUS."""
    distinct = list(dict.fromkeys(paths))
    joined = dict(zip(distinct, rules.all_joined(distinct), strict=True))
    outcome = rules.for_whole_paths().decide(
        dict.fromkeys(joined.values(), 0),
        rules.numbers(),
        NO_RULE_NEEDED,
        UNMATCHED,
        AMBIGUOUS,
        strict=False,
    )
    return {path: outcome.tree[key] for path, key in joined.items()}


def grouped(keys: Iterable[_Key]) -> tuple[list[_Key], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """The distinct keys in order of sight, and per key the number of its like."""
    numbers: dict[_Key, int] = {}
    column = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(column, np.int32)


def _dims_shown(dims: tuple[Dim, ...]) -> str:
    """(0, -, 'stage'): what a new array's dimensions are; - for those that are not cut."""
    return "(" + ", ".join("-" if dim is None else repr(dim) for dim in dims) + ")"
