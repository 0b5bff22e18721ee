"""Error messages for logical rules that do not fit a mesh: the leaves, their rules, the axis meant.

Reads leaves only after an error. Must not know how names are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, Final

from shardrules._format import and_more, counted, mesh_shown
from shardrules._logical.names import logical_names
from shardrules._logical.resolver import UNASSIGNED, Resolution, Resolver, axes_in
from shardrules._printable import printable_lines

__all__ = ["ErrorCollector", "unknown_axes"]

_SHOWN: Final = 20


def unknown_axes(resolution: Resolution, mesh_axes: Collection[str]) -> list[str]:
    """A line for each mesh axis that an array gets and the mesh does not have."""
    lines = []
    for dim, (entry, winner) in enumerate(
        zip(resolution.entries(), resolution.winners, strict=True)
    ):
        for axis in axes_in(None if entry is UNASSIGNED else entry):
            if axis in mesh_axes:
                continue
            near = get_close_matches(str(axis), list(mesh_axes), n=1)
            if winner is None:
                lines.append(f"dim {dim}: no rule for {axis!r}, and the mesh has no axis {axis!r}")
                near = get_close_matches(str(axis), resolution.rules.names, n=1) or near
            else:
                rule = resolution.rules.rules[winner]
                lines.append(f"dim {dim}: rule {winner} {rule!r}: the mesh has no axis {axis!r}")
            lines[-1] += f"; did you mean {near[0]!r}?" if near else ""
    return lines


class ErrorCollector:
    """Calls `make` for each leaf and collects its errors, so that one error reports all leaves.

    Args:
        make: make(names, shape or None). A ValueError is an error of the leaf.
        rules: The rules that `make` resolves names by.
        mesh: The mesh that `make` uses.
    """

    def __init__(self, make: Callable[[Any, Any], Any], rules: Resolver, mesh: Any) -> None:
        self._make = make
        self._rules = rules
        self._mesh = mesh
        self._failed: dict[Any, Exception] = {}

    def __call__(self, names: Any, shape: Any) -> Any:
        try:
            return self._make(names, shape)
        except ValueError as error:
            self._failed[names, shape] = error
            return None

    def check(self, leaves: Callable[[], Iterable[tuple[str, Any, Any]]]) -> None:
        """Checks that there was no error.

        Args:
            leaves: Returns (path, names, shape or None) of each leaf; called only after an error.

        Raises:
            ValueError: There was one. The message has the number of leaves and lists the first 20.
        """
        if not self._failed:
            return
        wrong = [leaf for leaf in leaves() if leaf[1:] in self._failed]
        lines = [
            f"{counted(len(wrong), 'leaf')} cannot be sharded as the logical rules say, on the "
            f"mesh {mesh_shown(self._mesh.shape)}:"
        ]
        for path, names, shape in wrong[:_SHOWN]:
            size = "" if shape is None else f"  shape {shape}"
            lines.append(f"    {path or '(the tree)'}  names {logical_names(names)}{size}")
            lines += [f"        {text}" for text in self._errors_of(names, shape)]
        lines += [f"    {line}" for line in and_more(len(wrong), _SHOWN, "leaf")]
        raise ValueError(printable_lines(lines)) from next(iter(self._failed.values()))

    def _errors_of(self, names: Any, shape: Any) -> list[str]:
        errors = str(self._failed[names, shape]).splitlines()
        try:
            resolution = self._rules.resolve(names, shape)
        except ValueError:  # the names themselves are wrong
            return errors
        unknown = unknown_axes(resolution, self._mesh.axis_names)
        # Without a correction the only error is JAX's, about these axes.
        others = [] if unknown and shape is None else errors
        return unknown + others + resolution.explained().splitlines()
