"""Leaves that rules are written for, with the roles of their dimensions: `Unit`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._base.text import brief
from shardrules._plan.roles import Dims, dims_of_model
from shardrules._plan.suggest.patterns import Path, apart, numbered, words_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.fold import Folded
    from shardrules._plan.plan import Plan

# Some 0.3 ms each.
_MOST_PATHS: Final = 4000


class Unit(NamedTuple):
    """Leaves of one folded path."""

    folded: Folded
    words: Path
    shape: tuple[int, ...]
    dims: Dims
    columns: tuple[int, ...]
    """Dimensions that a bias of it has."""
    paths: Sequence[str]
    """Paths of all leaves of the tree."""
    bytes: int
    """Bytes of all its leaves together."""

    @property
    def path(self) -> str:
        """Path of the first leaf."""
        return self.paths[int(self.folded.rows[0])]

    @property
    def pattern(self) -> str:
        """Folded path."""
        return self.folded.pattern

    @property
    def leaves(self) -> int:
        """Number of its leaves."""
        return len(self.folded.rows)

    def with_rows(self, rows: Sequence[int], words: Path | None = None) -> Unit:
        """Return the unit with these of its leaves."""
        return self._replace(
            folded=self.folded._replace(rows=np.array(rows, np.intp)),
            words=self.words if words is None else words,
            bytes=self.bytes // self.leaves * len(rows),
        )

    def where(self, mask: npt.NDArray[np.bool_]) -> list[Unit]:
        """Return the unit with the leaves in a mask of rows; nothing if none are."""
        rows = self.folded.rows[mask[self.folded.rows]]
        return [self.with_rows(rows.tolist())] if len(rows) else []

    def numbered(self) -> list[Unit]:
        """Split the unit into one for each of its words with numbers."""
        rows: list[int] = self.folded.rows.tolist()
        rows_of: dict[Path, list[int]] = defaultdict(list)
        paths = [self.paths[row] for row in rows]
        for row, words in zip(rows, numbered(self.words, paths), strict=True):
            rows_of[words].append(row)
        return [self.with_rows(of_words, words) for words, of_words in rows_of.items()]


def units_of(plan: Plan, heads: Mapping[int, int] | None = None) -> list[Unit]:
    """Collect the leaves that need a rule; `heads` are sizes of heads by rows of projections."""
    kinds = plan.kinds
    needed = [kind.shape is not None and kind.status != "placed" for kind in kinds]
    needing = (path for path in plan.folded if needed[path.group])
    folded = list(apart(needing, plan.paths))
    if len(folded) > _MOST_PATHS:
        raise ValueError(
            f"the tree has {len(folded):,} paths that differ not only in numbers, such as "
            f"{brief(plan.paths[folded[0].rows[0]])}; rules that name more than {_MOST_PATHS:,} "
            "are no rules: cut each array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
        )
    shapes = [kind.shape or () for kind in kinds]
    roles = dims_of_model(folded, shapes, heads)
    return [
        Unit(path, words, shapes[path.group], of_path.dims, of_path.columns, plan.paths,
             kinds[path.group].bytes * len(path.rows))
        for path, words, of_path in zip(folded, words_of(folded), roles, strict=True)
    ]  # fmt: skip
