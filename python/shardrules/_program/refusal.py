"""The compiler's refusal of a step that does not fit: what it needs, what is alive, the fix."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Final, NamedTuple

from shardrules._base.text import bytes_shown, printable_lines
from shardrules._program.hlo import Hlo
from shardrules._program.live_ranges import LiveRanges
from shardrules._program.memory import Buffer, buffers_of, table_of

# "Ran out of memory on HBM, the total memory required for HLO temporaries (18.14G) exceeds
# available HBM (15.75G)."; older ones: "Used 18.14G of 15.75G hbm." Arguments are counted, too.
_REFUSALS: Final = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_KEPT: Final = 0.5
_NAMED: Final = 10


class OutOfMemory(MemoryError):  # noqa: N818
    """The compiler's refusal of a step that needs more memory than a device has.

    Attributes:
        required: Bytes that the step needs on a device, its arguments included.
        available: Bytes that the compiler lets it use.
        buffers: The largest arrays that are alive at the peak, with their lines; () if XLA does
            not tell.

    Example:
        >>> import shardrules as sr
        >>> refusal = sr.OutOfMemory(required=20 * 10**9, available=16 * 10**9, buffers=())
        >>> str(refusal).partition(",")[0]
        'the step needs 20.0 GB on each device'
    """

    def __init__(
        self,
        required: int,
        available: int,
        buffers: tuple[Buffer, ...],
        *,
        is_recomputed: bool = False,
    ) -> None:
        self.required = required
        self.available = available
        self.buffers = buffers
        self._is_recomputed = is_recomputed
        super().__init__(self._message())

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(type(self), is_recomputed=self._is_recomputed)
        return make, (self.required, self.available, self.buffers)

    def _message(self) -> str:
        head = (
            f"the step needs {bytes_shown(self.required)} on each device, its arguments included, "
            f"and the compiler has {bytes_shown(self.available)}"
        )
        if not self.buffers:
            return f"{head}; XLA does not say for which arrays"
        lines = [
            f"{head}. The largest arrays at the peak:",
            *table_of(self.buffers).lines(),
            self._fix(),
        ]
        return printable_lines(lines)

    def _fix(self) -> str:
        """Say what would mend it."""
        largest = self.buffers[0]
        kept = sum(buffer.bytes for buffer in self.buffers if buffer.is_saved)
        of_arguments = sum(buffer.bytes for buffer in self.buffers if buffer.is_argument)
        total = sum(buffer.bytes for buffer in self.buffers)
        line = "" if largest.place is None else f" at {largest.place}"
        if kept > _KEPT * total and self._is_recomputed:
            return (
                "most of it is the inputs of layers that are computed again: shard them by "
                f"another axis too{line}, keep them in the host's memory by a policy of "
                "jax.checkpoint, or take a smaller batch"
            )
        if kept > _KEPT * total:
            return (
                "most of it is kept for the backward pass: recompute it by jax.checkpoint around "
                "the layer, or take a smaller batch"
            )
        if of_arguments > _KEPT * total:
            return "most of it is arguments: shard them over more devices, and donate the state"
        return (
            f"shard {largest.shape}{line} by the axes of the batch or of the model, by "
            "jax.lax.with_sharding_constraint; or take a smaller batch"
        )


class Refusal(NamedTuple):
    """What the compiler says of a step that does not fit."""

    required: int
    available: int
    text: str = ""
    """The module; "" if XLA does not write it."""
    live: LiveRanges | None = None

    def error(self) -> OutOfMemory:
        """Return it as the error to raise."""
        buffers: tuple[Buffer, ...] = ()
        if self.text and self.live:
            hlo = Hlo(self.text)
            buffers = tuple(buffers_of(hlo, self.live.alive(hlo)[:_NAMED], lambda _: None))
        is_recomputed = "/rematted_computation" in self.text
        return OutOfMemory(self.required, self.available, buffers, is_recomputed=is_recomputed)


def refused_bytes(message: str) -> tuple[int, int] | None:
    """Read the bytes that are required and available, if XLA says that a step does not fit."""
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            required, unit, available, limit = match.groups()
            return int(float(required) * _UNITS[unit]), int(float(available) * _UNITS[limit])
    return None
