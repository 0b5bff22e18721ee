"""Reads which arrays XLA has in the device's memory at the peak, from what it dumps: `LiveRanges`.

Its live ranges name the values at the peak, and its buffer assignment the memory of each.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

from shardrules._program.hlo import Hlo
from shardrules._program.lasting import WRITTEN, Alive

# "allocation 1: size 512, page 0, parameter 0, ..., maybe-live-out:"; a color is another memory.
_ALLOCATION: Final = re.compile(
    r"^allocation (\d+): size (\d+), (color [1-9]\d*, )?(?:page 0, )?(.*)$", re.MULTILINE
)
_VALUE: Final = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\)",
    re.MULTILINE,
)
_PARAMETER: Final = re.compile(r"parameter (\d+)")
_RANGE: Final = re.compile(r"^    (\S+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_AT_PEAK: Final = re.compile(r"^    (\S+)\{([\d,]*)\}: \d+ bytes \(cumulative", re.MULTILINE)
_IN_SEQUENCE: Final = re.compile(r"^    (\d+):(\S+)$", re.MULTILINE)
_ALLOCATED: Final = "AllocateBuffer"
"""Of a TPU's program, memory that is not written yet: what writes it tells more."""


class LiveRanges(NamedTuple):
    """What XLA writes of the memory that a module needs."""

    ranges: str
    """Text of the live ranges; "" before JAX 0.10, whose XLA writes none."""
    assignment: str
    """Text of the buffer assignment."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of arguments, of results, and of what is in the memory of both."""
        sums = {"argument": 0, "output": 0, "alias": 0}
        for _, size, color, kind in _ALLOCATION.findall(self.assignment):
            if color:
                continue
            is_argument, is_result = kind.startswith("parameter"), "maybe-live-out" in kind
            sums["argument"] += int(size) * is_argument
            sums["output"] += int(size) * is_result
            sums["alias"] += int(size) * (is_argument and is_result)
        return sums

    def alive(self, hlo: Hlo) -> list[Alive]:
        """Return the arrays in the device's memory at the peak, the largest first."""
        return sorted(filter(None, self._rows(hlo)), key=lambda row: -row.bytes)

    def _rows(self, hlo: Hlo) -> Iterator[Alive | None]:
        """Yield the array of each memory that is in use; None of what is none, as a tuple."""
        slots = dict(self._slots())
        sequence = dict(_IN_SEQUENCE.findall(self.ranges.partition("BufferLiveRange:")[0]))
        spans: defaultdict[_Slot, list[_Span]] = defaultdict(list)
        span_of: dict[tuple[str, str], _Span] = {}
        for name, element, begin, end in _RANGE.findall(self.ranges):
            span_of[name, element] = span = _Span(int(begin), int(end), name)
            if slot := slots.get((name, element)):
                spans[slot].append(span)
        at_peak: dict[_Slot, tuple[str, str]] = {}
        for key in _AT_PEAK.findall(self.ranges):
            if slot := slots.get(key):
                at_peak.setdefault(slot, key)
        for slot, key in at_peak.items():
            others = _chain(span_of.get(key, _Span(0, 0, key[0])), sorted(spans[slot]))
            last_use = sequence.get(str(max(span.end for span in others)), "")
            yield _in_module(hlo, slot, key, [span.name for span in others[1:]], last_use)

    def _slots(self) -> Iterator[tuple[tuple[str, str], _Slot]]:
        """Yield the memory of each value, by its instruction and element."""
        heads = list(_ALLOCATION.finditer(self.assignment))
        for head, following in zip(heads, [*heads[1:], None], strict=False):
            end = len(self.assignment) if following is None else following.start()
            for name, element, size, offset in _VALUE.findall(self.assignment, head.end(), end):
                yield (name, element), _Slot(head[1], head[4], int(offset), int(size))


class _Slot(NamedTuple):
    """Memory of one value, within one allocation."""

    allocation: str
    kind: str
    """Such as "parameter 0, ..., maybe-live-out:"."""
    offset: int
    bytes: int


class _Span(NamedTuple):
    """Instructions, by number, from the one that makes a value to the last that reads it."""

    begin: int
    end: int
    name: str


def _chain(first: _Span, spans: list[_Span]) -> list[_Span]:
    """Return the values that go on with the memory of one: what a loop carries is several."""
    spans_of_one, end = [first], first.end
    for span in spans:
        if first.begin <= span.begin <= end and span != first:
            spans_of_one.append(span)
            end = max(end, span.end)
    return spans_of_one


def _in_module(
    hlo: Hlo, slot: _Slot, key: tuple[str, str], others: list[str], last_use: str
) -> Alive | None:
    """Return a value in the module's terms; if JAX has not named it, by what goes on with it."""
    name, element = key[0], int(key[1].partition(",")[0] or 0)
    maker, user = hlo.computation_of(name), hlo.computation_of(last_use)
    if maker is None or not (line := hlo[maker][name]).results:
        return None
    parameter = _PARAMETER.match(slot.kind)
    is_parameter = maker == hlo.entry and line.parameter is not None
    if not line.op_name or _ALLOCATED in line.attributes:
        makers = [(c, other) for other in others if (c := hlo.computation_of(other))]
        written = (pair for pair in makers if _is_written(hlo, *pair))
        named = (pair for pair in makers if hlo[pair[0]][pair[1]].op_name)
        maker, name = next(chain(written, named), (maker, name))
    return Alive(
        shape=line.results[element if element < len(line.results) else 0],
        bytes=slot.bytes,
        computation=maker,
        name=name,
        parameter=int(parameter[1]) if parameter and is_parameter else None,
        is_output="maybe-live-out" in slot.kind,
        last_use=None if user is None else (user, last_use),
    )


def _is_written(hlo: Hlo, computation: str, name: str) -> bool:
    """True of what writes into an array that goes on, such as the stack of what a loop keeps."""
    line = hlo[computation][name]
    is_fusion = line.opcode == "fusion"
    return line.opcode == "dynamic-update-slice" or (
        is_fusion and hlo.contains(line.callees[0], WRITTEN)
    )
