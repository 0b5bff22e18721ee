"""Problems with arrays of a checkpoint or a tree, told in one error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from shardrules._base.io import FileError
from shardrules._base.text import counted, near_shown
from shardrules._plan.fold import fold_paths

_MOST_NEAR: Final = 5


class Problems:
    """Problems with arrays; equal lines with many paths become one, with the paths folded."""

    def __init__(self, name: str, *, in_file: bool = True) -> None:
        self._name = name
        self._in_file = in_file
        self._paths: dict[str, list[str]] = defaultdict(list)
        self._among: dict[str, Sequence[str]] = {}

    def add(self, what: str, path: str, among: Sequence[str] = ()) -> None:
        """Note what is wrong with the path; the nearest of others is named beside it."""
        self._paths[what].append(path)
        self._among[what] = among

    def raise_all(self) -> None:
        """Raise an error with all of them, if there are any."""
        if not self._paths:
            return
        count = sum(map(len, self._paths.values()))
        lines = [f"{self._name}: {counted(count, 'problem')} with the arrays:"]
        for what, paths in self._paths.items():
            for pattern in fold_paths(paths):
                # More of them would cost seconds, and tell no more.
                others = fold_paths(self._among[what]) if len(lines) <= _MOST_NEAR else ()
                lines.append(f"  {pattern}: {what}{near_shown(pattern, others)}")
        error = FileError(*lines)
        raise error if self._in_file else ValueError(str(error))
