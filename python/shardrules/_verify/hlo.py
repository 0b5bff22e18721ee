"""Reads the text of an optimized HLO module: its collectives, aliases, loops and instructions.

Costs a few searches for fixed strings over the text, and some microseconds per collective; all else
is read when it is asked for. Needs no JAX. Must not know about plans.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import prod
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

CollectiveOpcode = Literal[
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
]
Groups = tuple[tuple[int, ...], ...]

_KINDS: Final[tuple[CollectiveOpcode, ...]] = get_args(CollectiveOpcode)
_COLLECTIVE: Final = re.compile(rf" ({'|'.join(_KINDS)})(-start)?\(")
# Layouts, as in {1,0:T(8,128)S(1)}, have no small letters before their parentheses.
_OPCODE: Final = re.compile(r" ([a-z][a-z0-9-]*)\(")
_SHAPE: Final = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_NAME: Final = re.compile(r"%([^\s,(){}]+)")
_PARENTHESES: Final = re.compile(r"[()]")
_HEADER: Final = re.compile(r"(?:ENTRY )?%?([^\s(]+) \(")
_CALLED: Final = re.compile(r"([a-z_-]+)=\{?(%[^\s,)}]+(?:, ?%[^\s,)}]+)*)")
_NO_CALLS: Final = ("control-predecessors", "control-successors")
# A fixed beginning makes them fast.
_CALLS: Final = re.compile(r"=%[^\s,)}]+")
_BRANCHES: Final = re.compile(r"_computations=\{[^}]*\}")
_TRIPS: Final = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME: Final = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INDEX: Final = re.compile(r"\bindex=(\d+)")
_DIMENSION: Final = re.compile(r"\bdimensions=\{(\d+)\}")
_ALIAS: Final = re.compile(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)")
_GROUPS: Final = re.compile(r"(?:replica_groups|source_target_pairs)=")
_EXPLICIT: Final = re.compile(r"\{(?:\{[\d,]*\},?)*\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(((?:\([^)]*\)|[^()]|T\([^)]*\))*)\))? \{([^}]*)\}"
)
_AXIS: Final = re.compile(r"'?([^',=]+?)'?=(\d+)")
_AXIS_PART: Final = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


class Shape(NamedTuple):
    """The dtype of an array by XLA's name, such as bf16, and its dimensions on a device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bits(self) -> int:
        """Bits of an element; 0 for tokens."""
        digits = re.search(r"\d+", self.dtype)
        return int(digits[0]) if digits else 8 * (self.dtype == "pred")

    @property
    def bytes(self) -> int:
        """Bytes of the array; elements of less than a byte are packed."""
        return -(-prod(self.dims) * self.bits // 8)


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    opcode: str
    results: tuple[Shape, ...]
    """Its result; of a tuple, the arrays in order."""
    operands: tuple[str, ...]
    """Their names."""
    literal: str
    """The text of the operands: of a parameter its number, of a constant its value."""
    attributes: str
    """The text behind the operands."""

    @property
    def op_name(self) -> str | None:
        """JAX's name for the operation that it comes from: its place in the user's functions."""
        found = _OP_NAME.search(self.attributes)
        return found and found[1].replace("\\", "")

    @property
    def dimension(self) -> int | None:
        """The one dimension of its attribute of this name, if it has one."""
        found = _DIMENSION.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def element(self) -> int | None:
        """Which element of a tuple it gets."""
        found = _INDEX.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def parameter(self) -> int | None:
        """Of a parameter its number."""
        return int(self.literal) if self.opcode == "parameter" else None

    @property
    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations that it calls, by attribute, such as "body" or "calls"."""
        found = _CALLED.findall(self.attributes)
        return {key: tuple(_NAME.findall(names)) for key, names in found if key not in _NO_CALLS}


class Collective(NamedTuple):
    """A collective, with the shapes that one device has."""

    kind: CollectiveOpcode
    """Of an asynchronous one too, whose start stands for both halves."""
    instruction: Instruction
    computation: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    groups: Groups
    """The partitions that exchange something; the (source, target) pairs of collective-permute."""
    times: int | None
    """How often it runs in a run of the program, a branch as if it were taken; None within a loop
    whose number of trips is not known."""


class Hlo:
    """An optimized module, as `jax.stages.Compiled.as_text()` prints it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._groups: dict[str, Groups] = {}
        self._times: dict[str, int | None] = {}
        self._instructions: dict[str, dict[str, str]] = {}
        self._parsed: dict[tuple[str, str], Instruction] = {}
        self._users: dict[str, dict[str, list[str]]] = {}

    @cached_property
    def partitions(self) -> int:
        """Devices over which the module is partitioned."""
        found = re.search(r"num_partitions=(\d+)", self._head)
        return int(found[1]) if found else 1

    @cached_property
    def aliases(self) -> dict[int, int]:
        """By index of an output, the number of the parameter whose memory it takes."""
        begin = self._head.find("input_output_alias={")
        if begin < 0:
            return {}
        end = self._head.find(") }", begin)
        pairs = _ALIAS.findall(self._head, begin, end + 1)
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    @cached_property
    def alias_count(self) -> int:
        """How many outputs take the memory of a parameter."""
        return self._head.count("-alias)")

    @cached_property
    def signature(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """The shapes of the parameters and of the outputs, on a device."""
        parameters, outputs = self._signature
        return _shapes(parameters), _shapes(outputs)

    @cached_property
    def counts(self) -> tuple[int, int]:
        """How many parameters and outputs there are."""
        parameters, outputs = self._signature
        return parameters.count("["), outputs.count("[")

    @cached_property
    def entry(self) -> str:
        """The name of the entry computation."""
        begin = self.text.rfind("\nENTRY ") + 1
        found = _HEADER.match(self.text, begin)
        return found[1] if begin and found else ""

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives, in the order of the text."""
        found = sorted(chain.from_iterable(map(self._found, _KINDS)))
        return tuple(self._collective(*one) for one in found)

    def of_kind(self, kind: CollectiveOpcode, least: int) -> Iterator[Collective]:
        """The collectives of a kind with a result of at least so many bytes, for less time."""
        for position, _, start in self._found(kind):
            if any(one.bytes >= least for one in parsed(self._line(position)).results):
                yield self._collective(position, kind, start)

    def instructions(self, computation: str) -> Mapping[str, str]:
        """The lines of a computation by the names of their instructions, as they are scheduled."""
        if computation not in self._instructions:
            begin, end = self._span(computation)
            lines = self.text[begin:end].split("\n")[1:]
            self._instructions[computation] = {_name_of(line): line for line in lines}
        return self._instructions[computation]

    def instruction(self, computation: str, name: str) -> Instruction:
        """An instruction of a computation."""
        if (computation, name) not in self._parsed:
            self._parsed[computation, name] = parsed(self.instructions(computation)[name])
        return self._parsed[computation, name]

    def users(self, computation: str, name: str) -> Sequence[str]:
        """The instructions of a computation that have this operand."""
        if computation not in self._users:
            users = self._users[computation] = defaultdict(list)
            for user in self.instructions(computation):
                for operand in set(self.instruction(computation, user).operands):
                    users[operand].append(user)
        return self._users[computation].get(name, ())

    def root(self, computation: str) -> Instruction:
        """The instruction whose result is that of the computation."""
        begin, end = self._span(computation)
        return parsed(self._line(self.text.rfind("\n  ROOT ", begin, end) + 1))

    def callers(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """The instructions that call a computation, each with the computation that it is in."""
        for position in self._calls.get(computation, ()):
            instruction = parsed(self._line(position))
            if instruction.opcode not in ("async-update", "async-done"):
                yield self._name_at(position), instruction

    def times(self, computation: str) -> int | None:
        """How often a computation runs; None if a loop around it has an unknown number of trips."""
        if computation == self.entry:
            return 1
        if computation not in self._times:
            runs = [
                _times_within(self.times(caller), instruction, computation)
                for caller, instruction in self.callers(computation)
            ]
            known = [run for run in runs if run is not None]
            self._times[computation] = sum(known) if runs and len(known) == len(runs) else None
        return self._times[computation]

    def groups(self, attributes: str) -> Groups:
        """The replica groups of a collective, or its pairs."""
        found = _GROUPS.search(attributes)
        if found is None:
            return (tuple(range(self.partitions)),)
        for form, read in _FORMS.items():
            if written := form.match(attributes, found.end()):
                if written[0] not in self._groups:
                    self._groups[written[0]] = read(written) or (tuple(range(self.partitions)),)
                return self._groups[written[0]]
        raise ValueError(f"replica groups of an unknown form: {attributes[found.start() :][:80]}")

    @cached_property
    def _head(self) -> str:
        return self.text[: self.text.find("\n")]

    @cached_property
    def _signature(self) -> tuple[str, str]:
        begin = self._span(self.entry)[0]
        line = self.text[begin : self.text.find(" {\n", begin)]
        parameters, _, outputs = line.partition(") -> ")
        return parameters, outputs

    @cached_property
    def _ends(self) -> list[int]:
        """Where the computations end."""
        ends = []
        end = self.text.find("\n}")
        while end >= 0:
            ends.append(end)
            end = self.text.find("\n}", end + 2)
        return ends

    @cached_property
    def _spans(self) -> dict[str, tuple[int, int]]:
        """By name of a computation, where it begins and ends."""
        return {self._name_ending(i): (self._begin(i), end) for i, end in enumerate(self._ends)}

    @cached_property
    def _calls(self) -> dict[str, list[int]]:
        """By name of a computation, the positions at which it is called."""
        calls = defaultdict(list)
        for attributes in (_CALLS, _BRANCHES):
            for attribute in attributes.finditer(self.text):
                for name in _NAME.findall(attribute[0]):
                    calls[name].append(attribute.start())
        return calls

    def _begin(self, index: int) -> int:
        """Where the header of a computation begins."""
        after = self._ends[index - 1] + 2 if index else 0
        return self.text.rfind("\n", after, self.text.find(" {\n", after)) + 1

    def _name_ending(self, index: int) -> str:
        found = _HEADER.match(self.text, self._begin(index))
        return found[1] if found else ""

    def _name_at(self, position: int) -> str:
        """The computation that has this position."""
        return self._name_ending(bisect_left(self._ends, position))

    def _span(self, computation: str) -> tuple[int, int]:
        if computation == self.entry:
            begin = self.text.rfind("\nENTRY ") + 1
            return begin, self.text.find("\n}", begin)
        return self._spans[computation]

    def _line(self, position: int) -> str:
        end = self.text.find("\n", position)
        return self.text[self.text.rfind("\n", 0, position) + 1 : end if end >= 0 else None]

    def _found(self, kind: CollectiveOpcode) -> Iterator[tuple[int, CollectiveOpcode, str]]:
        """(where, kind, "-start" or "") of the collectives of a kind."""
        # A search for a fixed string is much faster than one for a pattern.
        position = self.text.find(f" {kind}")
        while position >= 0:
            if found := _COLLECTIVE.match(self.text, position):
                # In a quoted name the same words are no opcode.
                line = self.text.rfind("\n", 0, position)
                first = _OPCODE.search(self.text, line, found.end())
                if first and first.start() == position:
                    yield position, kind, found[2] or ""
            position = self.text.find(f" {kind}", position + 1)

    def _collective(self, position: int, kind: CollectiveOpcode, start: str) -> Collective:
        instruction = parsed(self._line(position))
        results = instruction.results
        if start and kind != "all-reduce":
            # The start's result is (operands, results, what the backend needs besides).
            count = len(instruction.operands)
            results = results[count : 2 * count]
        groups = self.groups(instruction.attributes)
        operands = tuple(
            _operand_of(kind, one, instruction.dimension, len(groups[0])) for one in results
        )
        computation = self._name_at(position)
        return Collective(
            kind=kind,
            instruction=instruction,
            computation=computation,
            operands=operands,
            results=results,
            groups=groups,
            times=self.times(computation),
        )


def parsed(line: str) -> Instruction:
    """The instruction of a line."""
    name, _, rest = line.partition(" = ")
    opcode = _OPCODE.search(f" {rest}")
    if opcode is None:
        raise ValueError(f"not an instruction of HLO: {line[:80]}")
    begin = opcode.end() - 1
    end, depth = begin, 1
    for one in _PARENTHESES.finditer(rest, begin):
        end, depth = one.start(), depth + (1 if one[0] == "(" else -1)
        if not depth:
            break
    return Instruction(
        name=_name_of(name),
        opcode=opcode[1],
        results=_shapes(rest[: opcode.start()]),
        operands=tuple(_NAME.findall(rest[begin:end])),
        literal=rest[begin:end],
        attributes=rest[end + 1 :],
    )


def axes_of_groups(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the members of a group differ, in the mesh's order.

    A group has all devices along them if their sizes' product is its size. XLA may split an axis.

    Args:
        groups: Numbers of partitions: positions of devices in the mesh, flattened.
        axis_sizes: Devices along each mesh axis, in the mesh's order.
    """
    sizes = tuple(axis_sizes.values())
    members = np.concatenate([np.array(group, np.int64) for group in groups])
    firsts = np.repeat([group[0] for group in groups], [len(group) for group in groups])
    differ = [
        bool((one != first).any())
        for one, first in zip(
            np.unravel_index(members, sizes), np.unravel_index(firsts, sizes), strict=True
        )
    ]
    return tuple(axis for axis, is_along in zip(axis_sizes, differ, strict=True) if is_along)


def _name_of(line: str) -> str:
    return line.partition(" = ")[0].strip().removeprefix("ROOT ").removeprefix("%")


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _SHAPE.findall(text)
    )


def _operand_of(kind: str, result: Shape, dimension: int | None, devices: int) -> Shape:
    """The operand of a collective, by its result and the size of its groups."""
    if dimension is None or kind not in ("all-gather", "reduce-scatter"):
        return result
    dims = list(result.dims)
    if kind == "all-gather":
        dims[dimension] //= devices
    else:
        dims[dimension] *= devices
    return Shape(result.dtype, tuple(dims))


def _times_within(times: int | None, caller: Instruction, computation: str) -> int | None:
    """How often a computation runs for its caller, which is in one that runs so many times."""
    if caller.opcode != "while" or times is None:
        return times
    trips = _TRIPS.search(caller.attributes)
    if trips is None:
        return None
    # The condition is evaluated once more, to end the loop.
    return times * (int(trips[1]) + (computation in caller.called.get("condition", ())))


def _explicit(written: re.Match[str]) -> Groups:
    groups = re.findall(r"\{([\d,]+)\}", written[0])
    return tuple(tuple(map(int, group.split(","))) for group in groups)


def _iota(written: re.Match[str]) -> Groups:
    return _rows(_arranged(written[2], written[3]), _numbers(written[1])[1])


def _mesh(written: re.Match[str]) -> Groups:
    """Groups along mesh axes, or parts of them: `:(4)2` are 2 parts of each of the axis's 4."""
    sizes = {axis: int(size) for axis, size in _AXIS.findall(written[1])}
    along = [
        (axis, int(before or 1), int(before or 1) * int(size or sizes[axis]))
        for axis, before, size in _AXIS_PART.findall(written[3])
    ]
    parts = []
    for axis, size in sizes.items():
        cuts = {1, size, *(cut for name, *ends in along if name == axis for cut in ends)}
        parts += [(axis, begin, end) for begin, end in pairwise(sorted(cuts))]
    inner = [
        i
        for name, begin, end in along
        for i, (axis, one, _) in enumerate(parts)
        if axis == name and begin <= one < end
    ]
    outer = [i for i in range(len(parts)) if i not in inner]
    dims = [end // begin for _, begin, end in parts]
    ids = _device_ids(written[2], prod(sizes.values())).reshape(dims).transpose(outer + inner)
    return _rows(ids, prod(dims[i] for i in inner))


def _device_ids(written: str | None, count: int) -> npt.NDArray[np.int64]:
    """The devices of a mesh: [4,2]T(1,0), or each; ascending if nothing is written."""
    if written is None:
        return np.arange(count)
    sizes, _, order = written.partition("]")
    if order:
        return _arranged(sizes.strip("(["), order.strip("T()"))
    return np.array(_numbers(written), np.int64)


def _arranged(sizes: str, order: str | None) -> npt.NDArray[np.int64]:
    """0, 1, 2, ... in an array of these sizes, transposed to this order, flattened."""
    shape = _numbers(sizes)
    ids = np.arange(prod(shape)).reshape(shape)
    return (ids.transpose(_numbers(order)) if order else ids).ravel()


def _rows(ids: npt.NDArray[np.int64], size: int) -> Groups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


_FORMS: Final = {_EXPLICIT: _explicit, _IOTA: _iota, _MESH: _mesh}
"""How replica groups are written, with what reads them."""
