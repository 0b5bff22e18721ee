"""Estimates how long a compiled step takes, by the cycles that the TPU's compiler expects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from shardrules._base.text import answer, counted, printable_lines, seconds_shown
from shardrules._plan.answers import Column, Section, Table
from shardrules._plan.report import Page
from shardrules._program.computation import Instruction, line_at, parsed, shapes_in
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.work import KERNEL_EFFICIENCY, splash_flops

_CYCLES: Final = re.compile(r'"estimated_cycles":"(\d+)"')
_UNKNOWN: Final = 2**62
"""Cycles from which on XLA does not know them."""
_KERNEL: Final = re.compile(r' custom-call\(.*custom_call_target="(tpu_custom_call|Mosaic[^"]*)"')
_FLOPS: Final = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_LAYOUTS: Final = re.compile(r"operand_layout_constraints=\{(.*?\})\}")
# Names of an operation, from the first that fits.
_PHASES: Final = (
    ("recomputed", "rematted_computation"),
    ("backward", "transpose("),
    ("forward", "jvp("),
)
_OTHER: Final = "other"
LEAST_CYCLES: Final = 0.87
"""The least part of the compiler's cycles that a published run on v6e took; of runs on
other TPUs it is not fitted (benchmarks.published_runs)."""
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
    kernels: float
    """Of computing, the seconds of Pallas kernels: by their FLOPs, at half of the peak."""
    uncounted: tuple[str, ...]
    """Pallas kernels of unknown FLOPs, by the name of their operation."""

    @property
    def shortest(self) -> float:
        """Seconds if all that is sent is hidden behind what is computed, or the other way round.

        Published runs took down to 0.87 of the cycles that the compiler expects: so much counts.
        """
        return max(LEAST_CYCLES * self.computing, self.sending)

    @property
    def longest(self) -> float:
        """Seconds if nothing is hidden."""
        return self.computing + self.sending

    def to_json(self) -> dict[str, Any]:
        """Return the seconds as `json.dumps` takes them."""
        return self._asdict() | {
            "kernel_efficiency": KERNEL_EFFICIENCY,
            "least_cycles": LEAST_CYCLES,
            "shortest": self.shortest,
            "longest": self.longest,
        }

    def _section(self, page: Page) -> Section:
        return Section("Time of a step", (self,))

    def __str__(self) -> str:
        lines = [
            f"a step takes {seconds_shown(self.shortest)} to {seconds_shown(self.longest)} by the "
            f"compiler's estimate: {seconds_shown(self.computing)} computing, of which runs take "
            f"{LEAST_CYCLES:.0%} or more, {seconds_shown(self.sending)} sending, hidden behind it "
            "or not"
        ]
        if self.kernels:
            lines.append(
                f"of it {seconds_shown(self.kernels)} in Pallas kernels, by their FLOPs, if they "
                f"reach {KERNEL_EFFICIENCY:.0%} of the peak"
            )
        if self.uncounted:
            kernels = counted(len(self.uncounted), "Pallas kernel")
            lines.append(f"without {kernels}, of which it says nothing: {self.uncounted[0]}")
        rows = [(seconds_shown(seconds), line) for line, seconds in self.lines[:_IN_TEXT]]
        return printable_lines([*lines, *Table(_COLUMNS, rows).lines()])


@answer
class Roofline(NamedTuple):
    """Bounds of a step's seconds by FLOPs and bytes of the partitioned program: no forecast."""

    computing: float
    """Of its matrix products and Pallas kernels, at the peak of the device."""
    sending: float
    """Of what it sends, by bytes and links, one collective after the other."""

    @property
    def shortest(self) -> float:
        """Seconds if all that is sent is hidden behind what is computed, or the other way round."""
        return max(self.computing, self.sending)

    @property
    def longest(self) -> float:
        """Seconds if nothing is hidden; what waits for the device's memory is not counted."""
        return self.computing + self.sending

    def to_json(self) -> dict[str, Any]:
        """Return the seconds as `json.dumps` takes them."""
        return self._asdict() | {"shortest": self.shortest, "longest": self.longest}

    def __str__(self) -> str:
        return (
            f"roofline: {seconds_shown(self.shortest)} to {seconds_shown(self.longest)} a step, "
            f"{seconds_shown(self.computing)} of products at the device's peak and "
            f"{seconds_shown(self.sending)} of sending at the links'; no forecast, for which the "
            "compiler's cycles are asked by time=True"
        )


def kernel_flops(hlo: Hlo) -> int:
    """Return the operations of a module's Pallas kernels, as far as they are known."""
    with hlo_errors():
        return sum(flops * times for _, flops, times in _kernels(hlo))


def program_time(hlo: Hlo, sending: float, clock: float, peak: float) -> ProgramTime | None:
    """Estimate the time of a program; None if its text has no cycles."""
    cycles = [(op, count / clock, times) for op, count, times in _cycles(hlo)]
    if not cycles:
        return None
    flops = list(_kernels(hlo))
    rate = peak * KERNEL_EFFICIENCY
    kernels = [(op, count / rate, times) for op, count, times in flops if count]
    timed = cycles + kernels
    by_line: defaultdict[str, float] = defaultdict(float)
    for op, seconds, times in timed:
        by_line[_instruction_line(hlo, op)] += times * seconds
    return ProgramTime(
        computing=sum(by_line.values()),
        sending=sending,
        lines=tuple(sorted(by_line.items(), key=lambda item: -item[1])),
        kernels=sum(times * seconds for _, seconds, times in kernels),
        uncounted=tuple(
            dict.fromkeys(op.op_name or op.name for op, count, _ in flops if not count)
        ),
    )


def _cycles(hlo: Hlo) -> Iterator[tuple[Instruction, int, int]]:
    """Yield each instruction that has cycles, these, and its executions in a step."""
    for name, computation in hlo.computations.items():
        if hlo.fusion_of(name) is not None:
            continue  # the fusion has them
        for match in computation.matches(_CYCLES):
            if (cycles := int(match[1])) < _UNKNOWN:
                yield parsed(line_at(hlo.text, match.start())), cycles, hlo.times(name) or 1


def _kernels(hlo: Hlo) -> Iterator[tuple[Instruction, int, int]]:
    """Yield each Pallas kernel, its operations, 0 if they are not known, and its executions."""
    for name, computation in hlo.computations.items():
        for match in computation.matches(_KERNEL):
            line = line_at(hlo.text, match.start())
            instruction = parsed(line)
            estimate = _FLOPS.search(line)
            flops = int(estimate[1]) if estimate else _splash_flops(instruction)
            yield instruction, flops, hlo.times(name) or 1


def _splash_flops(kernel: Instruction) -> int:
    layouts = _LAYOUTS.search(kernel.attributes)
    if layouts is None:
        return 0
    arrays = [shape.dims for shape in shapes_in(layouts[1]) if shape.dtype in ("bf16", "f32")]
    name = f"{kernel.name} {kernel.op_name or ''}"
    return splash_flops(name, arrays, len(kernel.results))


def _instruction_line(hlo: Hlo, instruction: Instruction) -> str:
    place = hlo.place(instruction)
    return str(place) if place else instruction.op_name or "of no line"


def phase_of(name: str) -> str:
    """Return the pass of a step that an operation is in, by JAX's names around it."""
    return next((phase for phase, mark in _PHASES if mark in name), _OTHER)
