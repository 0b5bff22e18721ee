"""Counts the work of a program: products, kernels, and how long the compiler expects it to take."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import prod, sqrt
from typing import Any, Final, NamedTuple

import numpy as np

from shardrules._base.dtypes import is_inexact
from shardrules._base.text import Place, answer, counted, printable_lines, seconds_shown
from shardrules._plan.answers import Column, Section, Table
from shardrules._plan.report import Page
from shardrules._program.computation import Instruction, instruction_at, shapes_in
from shardrules._program.facts import PRODUCTS, Variation
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.values import Values

_FACTORS: Final = 2
_CONTRACTED: Final = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS: Final = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW: Final = re.compile(r"window=\{(.*?)\}")
_SETTING: Final = re.compile(r"(\w+)=(\S+)")
_LIBRARY: Final = re.compile(r'custom_call_target="[^"]*(?:matmul|gemm|conv|dot)', re.IGNORECASE)


class Product(NamedTuple):
    """Matrix product or convolution of a program."""

    flops: int
    """Floating-point operations of a device in a step; a loop of unknown trip count counts once."""
    axes: frozenset[str]
    """Mesh axes along which devices compute different parts."""
    op_name: str
    place: Place | None
    leaves: frozenset[int]
    """Leaves of the inputs that it multiplies, or whose gradient it is."""


def products(
    values: Values, variation: Variation, leaves_of: Callable[[int], frozenset[int]]
) -> Iterator[Product]:
    """Yield the products that a module executes, with the leaves that `leaves_of` a node says."""
    for node, flops in product_nodes(values):
        line = values.lines[node]
        axes, name = variation.of(values.made_of[node]), line.op_name or line.name
        yield Product(flops, axes, name, values.hlo.place(line), leaves_of(node))


def product_nodes(values: Values) -> Iterator[tuple[int, int]]:
    """Yield the products of a module as nodes, with their operations in a step."""
    for node, opcode in enumerate(values.opcodes):
        if opcode in PRODUCTS and values.elements[node] == 0:
            times = values.hlo.times(values.computations[node])
            yield node, product_flops(values, node) * (1 if times is None else times)


def product_flops(values: Values, node: int) -> int:
    """Count the operations of a product: twice its multiplications, 0 of other calls."""
    product = values.lines[node]
    if not product.results:
        return 0  # such as a call of Python
    result = values.shapes[node].elements
    shapes = [values.shapes[factor].dims for factor in values.made_of[node][:2]]
    if len(shapes) < _FACTORS:
        return 0
    if match := _CONTRACTED.search(product.attributes):
        sizes = [shapes[0][int(dim)] for dim in match[1].split(",") if dim]
        return 2 * result * prod(sizes)
    if match := _LABELS.search(product.attributes):
        return round(2 * result * _multiplications(match, shapes, product))
    # A call of a library: of (m, k) and (k, n) the root of all elements is m k n.
    if not _LIBRARY.search(product.attributes):
        return 0
    return int(2 * sqrt(prod(shapes[0]) * prod(shapes[1]) * result))


def _multiplications(
    labels: re.Match[str], shapes: list[tuple[int, ...]], product: Instruction
) -> float:
    """Return the multiplications of a convolution for an element of its result, in the mean.

    TPUs have batches of products as windows that meet one element each: what a window meets in the
    padding, or between elements that are apart, is not multiplied.
    """
    window = _WINDOW.search(product.attributes)
    settings = dict(_SETTING.findall(window[1])) if window else {}
    of_input, of_kernel, of_result = (
        dict(zip(text, dims, strict=False))
        for text, dims in zip(labels.groups(), (*shapes, product.results[0].dims), strict=False)
    )
    count: float = of_kernel.get("i", 1)
    for dim, size in enumerate(settings.get("size", "").split("x") if settings else ()):
        stride, apart, step, low = (
            int(settings[name].split("x")[dim].partition("_")[0]) if name in settings else default
            for name, default in (("stride", 1), ("lhs_dilate", 1), ("rhs_dilate", 1), ("pad", 0))
        )
        rows = of_result[str(dim)]
        pairs = window_pairs((rows, stride), (int(size), step), low, of_input[str(dim)], apart)
        count *= pairs / rows
    return count


def window_pairs(
    rows: tuple[int, int], window: tuple[int, int], first: int, size: int, dilation: int
) -> int:
    """Count the pairs of a row and a place of its window that meet no padding, along a dimension.

    Rows and places are so many, and so far apart; `first` is the padding before the operand, whose
    elements are a dilation apart.
    """
    few, many = sorted((rows, window))
    places = np.arange(many[0]) * many[1] - first
    count = 0
    for elements in (places + i * few[1] for i in range(few[0])):
        inside = (elements >= 0) & (elements <= (size - 1) * dilation) & (elements % dilation == 0)
        count += int(np.count_nonzero(inside))
    return count


KERNEL_EFFICIENCY: Final = 0.5
"""Share of the peak that Pallas kernels are assumed to reach."""
# JAX's splash attention estimates no cost. Products by its kernels, of the size of the queries and
# of that of the values; with three results, the backward kernel has those of the other one too.
_SPLASH: Final = {"_fwd": (1, 1), "_dkv": (2, 2), "_dq": (2, 1)}
_SPLASH_NAME: Final = re.compile(r"splash_m[hq]a(_fwd|_dkv|_dq)")
_UNMASKED: Final = 0.5


def primitive_name(eqn: Any) -> str:
    """Name what is not modelled: a kernel by its own name."""
    name = eqn.primitive.name
    kernel = eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", None)
    return f"{name} {kernel}" if isinstance(kernel, str) and kernel else str(name)


def kernel_flops(eqn: Any) -> int:
    """Count the operations of a Pallas kernel by its estimate, or those of splash attention."""
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    arrays = [var.aval.shape for var in eqn.invars if is_inexact(var.aval.dtype)]
    return splash_flops(primitive_name(eqn), arrays, len(eqn.outvars))


def splash_flops(name: str, arrays: Sequence[tuple[int, ...]], results: int) -> int:
    """Count the operations of a kernel of splash attention, as if half of its mask were empty.

    The first arguments of floats are queries, keys and values; 0 of another kernel.
    """
    match = _SPLASH_NAME.search(name)
    if match is None:
        return 0
    query, key, value = arrays[:3]
    of_query, of_value = _SPLASH[match[1]]
    if match[1] == "_dkv" and results == 3:
        of_query += 1
    width = of_query * query[-1] + of_value * value[-1]
    return int(2 * prod(query[:-1]) * key[-2] * width * _UNMASKED)


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
_COLUMNS: Final = (Column("computing", is_right=True), Column("line"))


@answer
class ProgramTime(NamedTuple):
    """Bounds of a step's seconds: no forecast, no measurement.

    By the compiler's cycles, where it has generated code; else a roofline, by the FLOPs and bytes
    of the partitioned program, in which what waits for the device's memory is not counted.
    """

    computing: float
    """Of what a device computes, and moves in its memory: the compiler's cycles by the clock; of a
    roofline, matrix products and Pallas kernels at the peak of the device."""
    sending: float
    """Of what it sends, by bytes and links, one collective after the other."""
    lines: tuple[tuple[str, float], ...] = ()
    """The seconds of computing by line of the program, the longest first; () of a roofline."""
    kernels: float = 0.0
    """Of cycles, the seconds of Pallas kernels: by their FLOPs, at half of the peak."""
    uncounted: tuple[str, ...] = ()
    """Pallas kernels of unknown FLOPs, by the name of their operation."""
    is_roofline: bool = False
    """True without the compiler's cycles."""

    @property
    def shortest(self) -> float:
        """Seconds if all that is sent is hidden behind what is computed, or the other way round.

        Published runs took down to 0.87 of the cycles that the compiler expects: so much counts.
        """
        least = 1 if self.is_roofline else LEAST_CYCLES
        return max(least * self.computing, self.sending)

    @property
    def longest(self) -> float:
        """Seconds if nothing is hidden."""
        return self.computing + self.sending

    def to_json(self) -> dict[str, Any]:
        """Return the seconds as `json.dumps` takes them."""
        return self._asdict() | {"shortest": self.shortest, "longest": self.longest}

    def _section(self, page: Page) -> Section:
        return Section("Time of a step", (self,))

    def __str__(self) -> str:
        computing, sending = map(seconds_shown, (self.computing, self.sending))
        bounds = f"{seconds_shown(self.shortest)} to {seconds_shown(self.longest)}"
        if self.is_roofline:
            return (
                f"roofline: {bounds} a step, {computing} of products at the device's peak and "
                f"{sending} of sending at the links'; no forecast, for which the compiler's cycles "
                "are asked by time=True"
            )
        lines = [
            f"a step takes {bounds} by the compiler's estimate: {computing} computing, of which "
            f"runs take {LEAST_CYCLES:.0%} or more, {sending} sending, hidden behind it or not"
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


def flops_of_kernels(hlo: Hlo) -> int:
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
    by_line: defaultdict[str, float] = defaultdict(float)
    for op, seconds, times in cycles + kernels:
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
                yield instruction_at(hlo.text, match.start()), cycles, hlo.times(name) or 1


def _kernels(hlo: Hlo) -> Iterator[tuple[Instruction, int, int]]:
    """Yield each Pallas kernel, its operations, 0 if they are not known, and its executions."""
    for name, computation in hlo.computations.items():
        for match in computation.matches(_KERNEL):
            instruction = instruction_at(hlo.text, match.start())
            estimate = _FLOPS.search(instruction.attributes)
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
