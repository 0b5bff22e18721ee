"""`PlanLike`: what has decided the leaves of a tree already, of which `Plan` is the one kind.

Rooms that take a plan as rules know it by this class, and must not know planning.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any


class PlanLike:
    """The shardings of the leaves of a tree, by their paths."""

    @property
    @abstractmethod
    def mesh(self) -> Any:
        """The mesh of the shardings, of any form."""

    @abstractmethod
    def _placements(self, tree: Any, mesh: Any) -> list[Any]:
        """Return the Placement of each leaf of a tree, by its path, in the order of JAX's leaves.

        Args:
            tree: Any pytree whose paths and shapes are those of the plan, or some of them.
            mesh: The mesh of the placements. None: the plan's.

        Raises:
            ValueError: The plan has no such leaf, has it in another shape, or does not place one.
        """
