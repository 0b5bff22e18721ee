"""What stands on the page of a plan beside it: sections, from whatever has one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shardrules._plan.answers import Section
from shardrules._plan.memory import DeviceBytes, Room, Training

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan


@dataclass(frozen=True)
class Page:
    """What sections know of the page that they are on."""

    plan: Plan
    training: Training
    room: Room

    @cached_property
    def bytes(self) -> DeviceBytes:
        """Bytes of the plan, with what training adds."""
        return self.training.bytes_with(self.plan)


@runtime_checkable
class HasSection(Protocol):
    """Anything that a page can show beside a plan."""

    def _section(self, page: Page) -> Section:
        """Return its section.

        Raises:
            ValueError: It is about another mesh, other leaves or other bytes than the page.
        """
        ...
