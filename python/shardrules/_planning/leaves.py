"""The leaves of a tree, on whatever mesh: of each its path, of each kind its rule, shape and dtype.

A model of 10^5 leaves has some hundred kinds, so everything that follows costs per kind. Must not
know about meshes, nor how the rule of a leaf was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shardrules._dtypes import is_inexact
from shardrules._matching.dialects import EFORMER
from shardrules._matching.rules import Rules
from shardrules._planning.fold import Folded, Templates, fold, templates_of
from shardrules._planning.state_paths import of_activations, of_optimizer, of_state

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._logical.rules import LogicalRules
    from shardrules._matching.dialects import Dialect
    from shardrules._planning.companion import Companion, Link
    from shardrules._planning.roles import Part

__all__ = ["LeafType", "Leaves"]


class LeafType(NamedTuple):
    """The rule, shape and dtype of leaves of one kind, on whatever mesh."""

    rule: int
    """Index of the rule that decides them, or one of the negative numbers of `path_rules`."""
    shape: tuple[int, ...] | None
    """None for a leaf that is not an array."""
    dtype: Any
    bits: int
    """Bits of one element; 0 for a leaf that is not an array."""
    names: tuple[Any, ...] | None = None
    """The logical axis names of its dimensions; None for a leaf without."""


@dataclass(frozen=True, eq=False)
class Leaves:
    """The leaves of a tree; rows are leaves in the order of the walk."""

    rules: Rules | LogicalRules
    tree: Any
    """The tree with the number of its row for each leaf."""
    paths: list[str]
    sources: list[str]
    """Per leaf the path that the rules meet: its own, or that of what it follows."""
    kind_of: npt.NDArray[np.int32]
    """Per leaf an index of `types`."""
    types: list[LeafType]
    companions: tuple[Companion, ...] = ()
    """The companions that were given."""
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)
    """For each row that companions find, the links to its base, to the base of that, and so on. The
    row's source is the last of these bases that a rule matches, or its own path."""

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each path."""
        return {path: row for row, path in enumerate(self.paths)}

    @property
    def path_rules(self) -> Rules | None:
        """The rules, if they are for paths; None for logical rules."""
        return self.rules if isinstance(self.rules, Rules) else None

    @property
    def paths_dialect(self) -> Dialect:
        """The dialect that spells the paths."""
        return self.rules.dialect if isinstance(self.rules, Rules) else EFORMER

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Per kind, how many leaves are of it."""
        return np.bincount(self.kind_of, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def templates(self) -> Templates:
        """The paths with holes for their numbers."""
        return templates_of(self.paths)

    @cached_property
    def optimizer_rows(self) -> list[int]:
        """The rows of an optimizer's state, by the names in their paths."""
        rows: list[int] = self._rows(of_optimizer).tolist()
        return rows

    @cached_property
    def state_rows(self) -> npt.NDArray[np.intp]:
        """The rows of an optimizer's state and of averages of the parameters, likewise."""
        return self._rows(of_state)

    @cached_property
    def activation_rows(self) -> npt.NDArray[np.intp]:
        """The rows of activations, likewise."""
        return self._rows(of_activations)

    def _rows(self, found: Callable[[list[str]], list[int]]) -> npt.NDArray[np.intp]:
        is_found = np.zeros(len(self.templates.texts), np.bool_)
        is_found[found(self.templates.texts)] = True
        return np.flatnonzero(is_found[self.templates.of_path])

    @cached_property
    def state_counts(self) -> npt.NDArray[np.int64]:
        """Per kind, how many leaves are an optimizer's state or averages of the parameters."""
        kinds = self.kind_of[self.state_rows]
        return np.bincount(kinds, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def activation_counts(self) -> npt.NDArray[np.int64]:
        """Per kind, how many leaves are activations."""
        kinds = self.kind_of[self.activation_rows]
        return np.bincount(kinds, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def gradient_rows(self) -> npt.NDArray[np.intp]:
        """The rows of the leaves that have gradients: parameters of real or complex numbers."""
        has_gradient = np.array([is_inexact(one.dtype) for one in self.types], bool)[self.kind_of]
        has_gradient[self.state_rows] = False
        has_gradient[self.activation_rows] = False
        return np.flatnonzero(has_gradient)

    @cached_property
    def gradient_counts(self) -> npt.NDArray[np.int64]:
        """Per kind, how many leaves have gradients."""
        kinds = self.kind_of[self.gradient_rows]
        return np.bincount(kinds, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def folded(self) -> list[Folded]:
        """The leaves with siblings folded, a kind each."""
        return fold(self.paths, self.kind_of, self.templates)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parameters with siblings folded, and what their dimensions are."""
        from shardrules._planning.roles import parts_of_model

        others = {*self.state_rows.tolist(), *self.activation_rows.tolist()}
        params = [one for one in self.folded if int(one.rows[0]) not in others]
        shapes = [leaf.shape for leaf in self.types]
        return parts_of_model(params, shapes, [leaf.names for leaf in self.types])
