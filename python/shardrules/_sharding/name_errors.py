"""Error messages for logical rules that do not fit a mesh: the leaves, their rules, the axis meant.

Reads leaves only after an error. Must not know how names are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from shardrules._format import nearest
from shardrules._logical.names import logical_names
from shardrules._logical.resolver import UNASSIGNED, Resolution, Resolver, axes_in
from shardrules._sharding.leaf_errors import LeafError, leaf_errors

__all__ = ["ErrorCollector", "unknown_axes"]


def unknown_axes(resolution: Resolution, mesh_axes: Collection[str]) -> list[str]:
    """A line for each mesh axis that an array gets and the mesh does not have."""
    lines = []
    for dim, (entry, winner) in enumerate(
        zip(resolution.entries(), resolution.winners, strict=True)
    ):
        for axis in axes_in(None if entry is UNASSIGNED else entry):
            if axis in mesh_axes:
                continue
            near = nearest(str(axis), mesh_axes)
            if winner is None:
                lines.append(f"dim {dim}: no rule for {axis!r}, and the mesh has no axis {axis!r}")
                near = nearest(str(axis), resolution.rules.names) or near
            else:
                rule = resolution.rules.rules[winner]
                lines.append(f"dim {dim}: rule {winner} {rule!r}: the mesh has no axis {axis!r}")
            lines[-1] += f" (did you mean {near!r}?)" if near else ""
    return lines


class ErrorCollector:
    """Calls `make` for each leaf and collects its errors, so that one error reports all leaves.

    Args:
        make: make(names, shape or None). A ValueError is an error of the leaf, and so is a list, of
            reasons.
        rules: The rules that `make` resolves names by.
        mesh: The mesh that `make` uses.
    """

    def __init__(self, make: Callable[[Any, Any], Any], rules: Resolver, mesh: Any) -> None:
        self._make = make
        self._rules = rules
        self._mesh = mesh
        self._failed: dict[Any, ValueError | list[str]] = {}

    def __call__(self, names: Any, shape: Any) -> Any:
        try:
            found = self._make(names, shape)
        except ValueError as error:
            found = error
        if isinstance(found, ValueError | list):
            self._failed[names, shape] = found
            return None
        return found

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
        rows = [
            LeafError(path, shape, f"names {logical_names(names)}", self._errors_of(names, shape))
            for path, names, shape in wrong
        ]
        message = leaf_errors(rows, self._mesh.shape, said_by="logical rules")
        first = next(iter(self._failed.values()))
        raise ValueError(message) from (first if isinstance(first, ValueError) else None)

    def _errors_of(self, names: Any, shape: Any) -> list[str]:
        error = self._failed[names, shape]
        reasons = error if isinstance(error, list) else str(error).splitlines()
        try:
            resolution = self._rules.resolve(names, shape)
        except ValueError:  # the names themselves are wrong
            return reasons
        if isinstance(error, ValueError):
            # Without a correction the only error is JAX's, about these axes.
            reasons = unknown_axes(resolution, self._mesh.axis_names) or reasons
        return reasons + resolution.explained().splitlines()
