"""The folded paths of a model as units: their words, and what their dimensions are.

Costs once per folded path. Must not know about meshes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._format import brief
from shardrules._planning.roles import parts_of_model
from shardrules._suggesting.dims import Dims, dims_of
from shardrules._suggesting.words import apart, numbered, words_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._planning.columns import Columns
    from shardrules._planning.fold import Folded
    from shardrules._planning.roles import Part
    from shardrules._suggesting.words import Word

__all__ = ["Unit", "alone", "parted", "units_of", "with_rows"]

# Some 0.3 ms each.
_MOST_PATHS: Final = 4000


class Unit(NamedTuple):
    """The leaves of one folded path."""

    folded: Folded
    words: tuple[Word, ...]
    part: Part
    dims: Dims
    every: Sequence[str]
    """The paths of all leaves of the tree."""
    bytes: int
    """Of all of them, whole."""
    names: tuple[Any, ...] = ()
    """The logical axis names of their dimensions, if rules are for names."""

    @property
    def path(self) -> str:
        """That of the first of its leaves."""
        return self.every[int(self.folded.rows[0])]


def units_of(columns: Columns, heads: Mapping[int, int]) -> list[Unit]:
    """The leaves that need a rule.

    Args:
        columns: Of the tree, without rules.
        heads: Per row that is a projection of attention the elements of a head, where they are
            known.

    Raises:
        ValueError: The paths have too many names.
    """
    kinds = columns.kinds
    needed = [
        kind.shape is not None and (kind.status != "placed" or kind.names is not None)
        for kind in kinds
    ]
    folded = apart((one for one in columns.folded if needed[one.group]), columns.paths)
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(columns.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    parts = parts_of_model(folded, [kind.shape for kind in kinds], [kind.names for kind in kinds])
    return [
        Unit(
            one,
            words,
            part,
            _with_head(dims, heads.get(int(one.rows[0]))),
            columns.paths,
            kinds[one.group].bytes * len(one.rows),
            kinds[one.group].names or (),
        )
        for one, words, part, dims in zip(
            folded, words_of(folded), parts, dims_of(parts), strict=True
        )
    ]


def _with_head(dims: Dims, size: int | None) -> Dims:
    return dims if size is None else dims._replace(unit=size, is_assumed=False)


def with_rows(unit: Unit, chosen: npt.NDArray[np.bool_]) -> list[Unit]:
    """The unit with those of its leaves that are chosen; nothing if none are."""
    rows = unit.folded.rows[chosen[unit.folded.rows]]
    return [_of_rows(unit, unit.words, rows)] if len(rows) else []


def alone(unit: Unit) -> list[Unit]:
    """Each leaf as a unit."""
    rows = unit.folded.rows
    return [_of_rows(unit, unit.words, rows[i : i + 1]) for i in range(len(rows))]


def _of_rows(unit: Unit, words: tuple[Word, ...], rows: npt.NDArray[np.intp]) -> Unit:
    return unit._replace(
        folded=unit.folded._replace(rows=rows),
        words=words,
        part=replace(unit.part, leaves=len(rows)),
        bytes=unit.bytes // len(unit.folded.rows) * len(rows),
    )


def parted(unit: Unit) -> list[Unit]:
    """Per distinct words with numbers a unit."""
    rows = list(map(int, unit.folded.rows))
    found: dict[tuple[Word, ...], list[int]] = defaultdict(list)
    paths = [unit.every[row] for row in rows]
    for row, words in zip(rows, numbered(unit.words, paths), strict=True):
        found[words].append(row)
    return [_of_rows(unit, words, np.array(chosen, np.intp)) for words, chosen in found.items()]
