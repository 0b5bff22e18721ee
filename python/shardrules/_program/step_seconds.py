"""Estimates how long a compiled step takes, by the cycles that the TPU's compiler expects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._program.computation import line_at, parsed
from shardrules._program.hlo import hlo_errors
from shardrules._text import Column, Table, answer, counted, printable_lines, seconds_shown

if TYPE_CHECKING:
    from shardrules._program.collectives import Collective
    from shardrules._program.hlo import Hlo

_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN: Final = 2**62
"""Cycles from which on XLA does not know them."""
_KERNEL: Final = re.compile(r' custom-call\(.*custom_call_target="(tpu_custom_call|Mosaic[^"]*)"')
_IN_TEXT: Final = 10
_COLUMNS: Final = (Column("computing", is_right=True), Column("line", is_elided=True))


@answer
class ProgramTime(NamedTuple):
    """Estimate of the seconds of a step by the compiler's cost model: no bound, no measurement."""

    computing: float
    """Of what a device computes, and moves in its memory: the compiler's cycles by the clock."""
    sending: float
    """Of what it sends, by bytes and links, one collective after the other."""
    lines: tuple[tuple[str, float], ...]
    """The seconds of computing by line of the program, the longest first."""
    uncounted: tuple[str, ...]
    """What has no cycles: Pallas kernels, by the name of their operation."""

    @property
    def shortest(self) -> float:
        """Seconds if all that is sent is hidden behind what is computed, or the other way round."""
        return max(self.computing, self.sending)

    @property
    def longest(self) -> float:
        """Seconds if nothing is hidden."""
        return self.computing + self.sending

    def to_json(self) -> dict[str, Any]:
        """Return the seconds as `json.dumps` takes them."""
        return self._asdict() | {"shortest": self.shortest, "longest": self.longest}

    def __str__(self) -> str:
        head = (
            f"a step takes {seconds_shown(self.shortest)} to {seconds_shown(self.longest)}, by the "
            f"compiler's estimate: {seconds_shown(self.computing)} computing, "
            f"{seconds_shown(self.sending)} sending, hidden or not"
        )
        lines = [head]
        if self.uncounted:
            kernels = counted(len(self.uncounted), "Pallas kernel")
            lines.append(f"without {kernels}, of which it says nothing: {self.uncounted[0]}")
        rows = [(seconds_shown(seconds), line) for line, seconds in self.lines[:_IN_TEXT]]
        return printable_lines([*lines, *Table(_COLUMNS, rows).lines()])


def program_time(
    hlo: Hlo,
    collectives: Iterable[Collective],
    clock: float,
    link_rate: Callable[[Sequence[str]], float],
) -> ProgramTime | None:
    """Estimate the time of a program; None if its text has no cycles.

    Args:
        hlo: The module, behind the generation of code.
        collectives: All that it sends.
        clock: Cycles of a device in a second.
        link_rate: Bytes that a device sends in a second over these mesh axes.
    """
    with hlo_errors():
        cycles = list(_cycles(hlo))
        if not cycles:
            return None
        by_line: defaultdict[str, float] = defaultdict(float)
        for line, count in cycles:
            by_line[line] += count / clock
        sending = sum(row.sent_at_least / link_rate(row.axes) for row in collectives if row.axes)
        kernels = tuple(dict.fromkeys(_kernels(hlo)))
    longest = sorted(by_line.items(), key=lambda item: -item[1])
    return ProgramTime(sum(by_line.values()), sending, tuple(longest), kernels)


def _cycles(hlo: Hlo) -> Iterator[tuple[str, int]]:
    """Yield the program's line, and the cycles in a step, of each instruction that has some."""
    for name, computation in hlo.computations.items():
        if hlo.fusion_of(name) is not None:
            continue  # the fusion has them
        for match in computation.matches(_CYCLES):
            if (cycles := int(match[1])) < _UNKNOWN:
                instruction = parsed(line_at(hlo.text, match.start()))
                place = hlo.place(instruction)
                line = str(place) if place else instruction.op_name or "of no line"
                yield line, cycles * (hlo.times(name) or 1)


def _kernels(hlo: Hlo) -> Iterator[str]:
    for match in _KERNEL.finditer(hlo.text):
        instruction = parsed(line_at(hlo.text, match.start()))
        yield instruction.op_name or instruction.name
