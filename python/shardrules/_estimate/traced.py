"""What estimates ask of a step that `trace` has read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardrules._estimate.buffers import Memory
    from shardrules._estimate.step_time import Machine, StepTime
    from shardrules._estimate.traffic import Traffic
    from shardrules._plan.findings import Finding
    from shardrules._program.topologies.topology import Topology

A_STEP: Final = "a Step, as shardrules.trace(step, plan, *arguments) gives one"


class TracedStep(ABC):
    """A step before it is compiled, as `Step` is; `plan` is as `Step.memory` takes it."""

    @abstractmethod
    def memory(self, plan: Any = None) -> Memory:
        """Estimate the memory that the step needs on a device."""

    @abstractmethod
    def findings(self, plan: Any, large: int) -> list[Finding]:
        """Find what is wrong with a plan for the step; see `Plan.check`."""

    @abstractmethod
    def _refusal(self, plan: Any) -> str:
        """Say why a step is not for the mesh of a plan; "" if it is."""

    @abstractmethod
    def _compiled(self, topology: Topology) -> tuple[float, int]:
        """Return the seconds of the step, and its bytes on a device, by what the compiler makes."""

    @abstractmethod
    def traffic(self, plan: Any = None) -> Traffic:
        """Count the bytes that each device sends; see `Plan.traffic`."""

    @abstractmethod
    def time(self, machine: Machine, plan: Any = None) -> StepTime:
        """Estimate the time of the step on a machine; see `Plan.step_time`."""
