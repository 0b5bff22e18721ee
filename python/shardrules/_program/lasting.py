"""Finds the arrays of a program that are surely in memory together, by the flow of its values.

Arguments and results are there from beginning to end, and what the forward pass keeps for the
backward pass is there between the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from shardrules._program.computation import Instruction, Shape
from shardrules._program.executable import Executable
from shardrules._program.facts import UPDATES
from shardrules._program.values import Values

WRITTEN: Final = re.compile(rf" (?:{'|'.join(UPDATES)})\(")
_FREE: Final = frozenset({"broadcast", "constant", "iota"})
"""Operations that are computed again where they are used."""
_ON_HOST: Final = "S(5)"


class Alive(NamedTuple):
    """Array that is alive at the peak."""

    shape: Shape
    bytes: int
    """Of its memory, with the padding that is known."""
    computation: str
    name: str
    """Instruction that makes it."""
    parameter: int | None
    """Number of the module's parameter that it is."""
    is_output: bool
    last_use: tuple[str, str] | None
    """Computation and name of the last instruction that reads it."""


def lasting(executable: Executable) -> list[Alive]:
    """List arguments, results and what is kept for the backward pass, the largest first."""
    values, hlo = executable.values, executable.values.hlo
    in_place = {node for number, node in enumerate(values.outputs) if number in hlo.aliases}
    rows = [_row(values, node, number) for number, node in enumerate(values.parameters)]
    others = values.returned.difference(in_place, values.parameters)
    rows += [_row(values, node, is_output=True) for node in others]
    rows += _kept(executable)
    return sorted((row for row in rows if row), key=lambda row: -row.bytes)


def _row(
    values: Values,
    node: int,
    parameter: int | None = None,
    *,
    is_output: bool = False,
    user: int | None = None,
) -> Alive | None:
    """Describe an array; None of what is in the host's memory."""
    if _ON_HOST in values.lines[node].type:
        return None
    # What is written into the stack of a loop tells more than the loop.
    written = [one for one in values.made_of[node] if values.opcodes[one] in UPDATES]
    maker = written[0] if values.opcodes[node] == "while" and written else node
    last_use = None if user is None else _executed(values, user)
    shape = values.shapes[node]
    return Alive(shape, shape.bytes, *_executed(values, maker), parameter, is_output, last_use)


def _executed(values: Values, node: int) -> tuple[str, str]:
    """Name the instruction that makes a value, or the fusion that it is in."""
    fusion = values.hlo.fusion_of(values.computations[node])
    if fusion is None:
        return values.computations[node], values.lines[node].name
    return fusion[0], fusion[1].name


def _kept(executable: Executable) -> Iterator[Alive | None]:
    """Yield what the forward pass makes, and the backward pass reads, each once."""
    values, seen = executable.values, set(executable.values.parameters) | executable.values.returned
    phases = _phases(values)
    for node, phase in enumerate(phases):
        if phase == "forward" and values.opcodes[node] not in _FREE:
            users = (user for user in values.used_by[node] if phases[user] == "backward")
            if (user := next(users, None)) is not None:
                source = executable.facts.source_of(node)
                if source not in seen:
                    seen.add(source)
                    yield _row(values, node, user=user)


def _phases(values: Values) -> list[str]:
    """Say of each value whether it is of the "forward" or "backward" pass, or "" of neither.

    By JAX's name of the instruction, or of the fusion that it is in; or by what it is made of.
    """
    phases: list[str] = []
    of_fusions: dict[str, str | None] = {}
    for node, line in enumerate(values.lines):
        computation = values.computations[node]
        if computation not in of_fusions:
            fusion = values.hlo.fusion_of(computation)
            of_fusions[computation] = None if fusion is None else _named_phase(fusion[1])
        phase = of_fusions[computation]
        phase = _named_phase(line) if phase is None else phase
        if phase is None:
            first = next(iter(values.made_of[node]), node)
            phase = phases[first] if first < node else ""
        phases.append(phase)
    return phases


def _named_phase(line: Instruction) -> str | None:
    """Read the pass in the name of an instruction; None without a name."""
    text = line.attributes
    if "op_name=" not in text:
        return None
    return "backward" if "transpose(" in text else "forward" if "jvp(" in text else ""
