"""`keras.distribution.LayoutMap` of Keras 3.15, without Keras: the dialect `KERAS` as a mapping.

It does as the original, except that layouts are PartitionSpecs, or Keras's TensorLayouts, which are
returned as they are; `rules` and `specs` are ours; and a change compiles the rules again.

Example:
    >>> layouts = LayoutMap()
    >>> layouts[".*dense.*kernel"] = (None, "model")
    >>> tuple(layouts["model/dense_1/kernel"]), layouts["model/dense_1/bias"] is None
    ((None, 'model'), True)
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from shardrules._base.arguments import check_type
from shardrules._base.specs import entries_of, entry_axes, is_partition_spec, partition_spec
from shardrules._base.text import shown
from shardrules._rules.dialects import KERAS
from shardrules._rules.matcher import ambiguous_message
from shardrules._rules.rules import Rules, matcher_of, remembered_rules

__all__ = ["LayoutMap"]


class LayoutMap(MutableMapping[str, Any]):
    """Semantics of keras.distribution.LayoutMap: a mapping from paths, or regexes, to layouts."""

    def __init__(self, device_mesh: Any = None) -> None:
        self._device_mesh = device_mesh
        self._layouts: dict[str, Any] = {}
        self._rules: Rules | None = None

    @property
    def device_mesh(self) -> Any:
        """The mesh that the map was made with."""
        return self._device_mesh

    @property
    def rules(self) -> Rules:
        """The map as rules, for `shardrules.named_shardings` and others."""
        if self._rules is None:
            self._rules = remembered_rules(
                [(key, _layout_spec(layout)) for key, layout in self._layouts.items()], KERAS
            )
        return self._rules

    def specs(self, tree: Any) -> Any:
        """Replace each leaf of a tree by the PartitionSpec of its path, whose keys "/" joins."""
        return self.rules.match(tree)

    def __getitem__(self, key: str) -> Any:
        check_type("key", key, str, "a path")
        if key in self._layouts:
            return self._layouts[key]
        matching = self.rules.all_matches(key)
        if len(matching) > 1:
            matcher = matcher_of(self.rules)
            raise ValueError(ambiguous_message(matcher, 1, [(key, (matching, None))]))
        return self._layouts[str(self.rules[matching[0]][0])] if matching else None

    def __setitem__(self, key: str, layout: Any) -> None:
        check_type("key", key, str, "a path or a regex")
        if key in self._layouts:
            raise ValueError(
                f"{key!r} is in the LayoutMap already, with {shown(self._layouts[key])}; delete it "
                "first"
            )
        if isinstance(layout, tuple) and not is_partition_spec(layout):
            layout = partition_spec(*layout)
        spec = _layout_spec(layout)
        if spec is None:
            raise ValueError(
                f"{key!r}: a layout is a tuple of axis names and None, a PartitionSpec or a "
                f"TensorLayout, not {shown(layout)}"
            )
        axes = {axis for entry in entries_of(spec) for axis in entry_axes(entry)}
        axis_names = getattr(self._device_mesh, "axis_names", axes)
        if not axes <= set(axis_names):
            absent = sorted(axes - set(axis_names))
            raise ValueError(f"{key!r}: the mesh has no axes {absent}; it has {axis_names}")
        self._layouts[key] = layout
        self._rules = None

    def __delitem__(self, key: str) -> None:
        del self._layouts[key]
        self._rules = None

    def __len__(self) -> int:
        return len(self._layouts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)


def _layout_spec(layout: Any) -> Any:
    """Return the PartitionSpec of a layout; None if it is not a layout."""
    if is_partition_spec(layout):
        return layout
    axes = getattr(layout, "axes", None)
    return None if axes is None else partition_spec(*axes)
