"""Finding about the memory that an executable needs on a device.

Read from `Compiled.memory_analysis()`, whose time is XLA's. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shardrules._format import bytes_shown
from shardrules._verifying.words import finding_of

if TYPE_CHECKING:
    from shardrules._planning.asking.findings import Finding
    from shardrules._verifying.executable import Executable

__all__ = ["peak"]

_PARTS: Final = {"argument": 1, "output": 1, "temp": 1, "alias": -1, "generated_code": 1}
"""By name in XLA's numbers, whether it is added. What is aliased is an argument and an output."""


def peak(executable: Executable, hbm: int | None) -> Iterator[Finding]:
    """More bytes on a device than it has."""
    if hbm is None:
        return
    memory = executable.memory
    if memory is None:
        yield finding_of(
            "warning",
            "peak",
            "this backend does not tell the memory that executables need: whether it fits is not "
            "known",
            "verify the same function on another backend",
        )
        return
    parts = {name: getattr(memory, f"{name}_size_in_bytes") for name in _PARTS}
    total = sum(sign * parts[name] for name, sign in _PARTS.items())
    if total > hbm:
        listed = ", ".join(
            f"{name.replace('_', ' ')} {bytes_shown(size)}" for name, size in parts.items() if size
        )
        yield finding_of(
            "error",
            "peak",
            f"{bytes_shown(total)} on each device ({listed}), which has {bytes_shown(hbm)}",
            "cut more of the arguments or activations, rematerialize, donate the state, or take a "
            "smaller batch",
            bytes=total - hbm,
        )
