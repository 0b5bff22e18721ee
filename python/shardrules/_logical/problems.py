"""Words for what logical rules say and a mesh cannot do: which leaf, by which rule, what was meant.

Looks at leaves only when something has gone wrong. Must not know how names are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from typing import Any, Final

from shardrules._logical.names import logical_names
from shardrules._logical.rules import UNASSIGNED, CompiledLogicalRules, Outcome, axes_in
from shardrules._printable import printable_lines
from shardrules._words import and_more, counted, mesh_shown

__all__ = ["Attempts", "unknown_axes"]

_SHOWN: Final = 20


def unknown_axes(outcome: Outcome, mesh_axes: Collection[str]) -> list[str]:
    """A line for each mesh axis that an array with these names gets, and the mesh does not have."""
    lines = []
    for dim, (entry, winner) in enumerate(zip(outcome.entries(), outcome.winners, strict=True)):
        for axis in axes_in(None if entry is UNASSIGNED else entry):
            if axis in mesh_axes:
                continue
            near = get_close_matches(str(axis), list(mesh_axes), n=1)
            if winner is None:
                lines.append(f"dim {dim}: no rule for {axis!r}, and the mesh has no axis {axis!r}")
                near = get_close_matches(str(axis), outcome.rules.names, n=1) or near
            else:
                rule = outcome.rules.rules[winner]
                lines.append(f"dim {dim}: rule {winner} {rule!r}: the mesh has no axis {axis!r}")
            lines[-1] += f"; did you mean {near[0]!r}?" if near else ""
    return lines


class Attempts:
    """`make`, with what goes wrong remembered, so that all leaves can be told of at once.

    Args:
        make: make(names, shape or None); its ValueErrors are problems of the leaf.
        rules: The rules that it resolves by.
        mesh: The mesh that it is for.
    """

    def __init__(
        self, make: Callable[[Any, Any], Any], rules: CompiledLogicalRules, mesh: Any
    ) -> None:
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
        """That nothing has gone wrong.

        Args:
            leaves: Gives (path, names, shape or None) of each leaf; called only if something has.

        Raises:
            ValueError: Something has; the message lists the first 20 leaves, with the count.
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
            lines += [f"        {text}" for text in self._problems(names, shape)]
        lines += [f"    {line}" for line in and_more(len(wrong), _SHOWN, "leaf")]
        raise ValueError(printable_lines(lines)) from next(iter(self._failed.values()))

    def _problems(self, names: Any, shape: Any) -> list[str]:
        said = str(self._failed[names, shape]).splitlines()
        try:
            outcome = self._rules.resolve(names, shape)
        except ValueError:  # the names themselves are wrong
            return said
        unknown = unknown_axes(outcome, self._mesh.axis_names)
        # JAX says no more of these; a correction may forbid something else.
        others = [] if unknown and shape is None else said
        return unknown + others + outcome.explained().splitlines()
