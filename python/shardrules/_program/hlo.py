"""Reads the text of an optimized HLO module: calls, collectives, groups, aliases and lines."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardrules._base.io import collector_paused
from shardrules._base.text import Place, record
from shardrules._program.computation import (
    NAME,
    OPCODE,
    Computation,
    Instruction,
    Shape,
    instruction_at,
    number,
    trips,
)

CollectiveOpcode = Literal[
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
]
_KINDS: Final[dict[str, CollectiveOpcode]] = {kind: kind for kind in get_args(CollectiveOpcode)}
_COLLECTIVE: Final = re.compile(rf" ({'|'.join(_KINDS)})(-start)?\(")
# A fixed beginning makes them fast.
_CALLS: Final = re.compile(r"=%[^\s,)}]+")
_BRANCHES: Final = re.compile(r"_computations=\{[^}]*\}")
_ASYNC_START: Final = re.compile(r'custom_call_target="AsyncCollectiveStart"')
_SCATTERED: Final = re.compile(r"^all-reduce-scatter\b")
_PARTITIONS: Final = re.compile(r"num_partitions=(\d+)")
_ALIAS: Final = re.compile(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)")
_FRAME: Final = re.compile(r"stack_frame_id=(\d+)")
_SOURCE: Final = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_LIBRARY: Final = re.compile(r"[/\\](?:site|dist)-packages[/\\]|^<")
_TABLE_ROW: Final = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_NO_HLO: Final = "the text of the executable is cut, or no HLO as XLA prints it"
_FIELD: Final = re.compile(r"(\w+)=(\d+)")
# The metadata of a Pallas kernel is on lines of its own.
_BROKEN: Final = re.compile(r'\n(?="|\}\})')


def check_hlo(text: str) -> None:
    """Check that a text begins and ends as a module does."""
    if not text.startswith("HloModule") or not text[-1000:].rstrip().endswith("}"):
        raise ValueError(f"{_NO_HLO}: {text[:40]!r} ... {text[-40:]!r}")


@contextmanager
def hlo_errors() -> Iterator[None]:
    """Make a ValueError of what fails as a text is read that is cut, or no HLO.

    The many small objects that are read have no cycles for a collector of garbage to find.
    """
    try:
        with collector_paused():
            yield
    except (ArithmeticError, LookupError, MemoryError, RecursionError, StopIteration) as error:
        raise ValueError(f"{_NO_HLO} ({type(error).__name__}: {error})") from error


Moved = Literal["argument", "gradient", "state", "activation", "unexplained"]
# Names of collectives in user programs, as JAX has them in op_name.
_CALLED: Final = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
})  # fmt: skip


@record
class Collective(NamedTuple):
    """Array that a program moves between devices: a row of `Program.collectives`."""

    kind: CollectiveOpcode
    axes: tuple[str, ...]
    """Mesh axes along which devices exchange data; empty if the mesh is not known."""
    shape: str
    """Dtype and dimensions of the whole array, such as "f32[16,512]"."""
    payload: int
    """Bytes of the whole array that is moved in one execution: of all-gather its result, of
    reduce-scatter its operand."""
    times: int | None
    """Executions in a step; None within a loop whose trip count is not known."""
    sent_once: int
    """Bytes that one device sends in an execution."""
    what: Moved
    """Kind of array that is moved."""
    moves: str
    """Path of the argument or output that is moved, or JAX's name of the operation."""
    reason: str
    """Explains why the program moves it; of what is unexplained, the likely cause."""
    is_expected: bool
    """False for a collective that no planned array and no product needs."""
    op_name: str
    place: Place | None
    """File and line of the user's program."""
    name: str
    """Name of the instruction in the HLO."""

    @property
    def is_called(self) -> bool:
        """True if the program calls it, such as jax.lax.psum; False if XLA has put it in.

        Of one that XLA has merged of both kinds it is False, too.
        """
        return is_called(self.op_name)

    @property
    def sent(self) -> int | None:
        """Bytes that one device sends in a step; None without the number of executions."""
        return None if self.times is None else self.sent_once * self.times

    @property
    def bytes(self) -> int | None:
        """Bytes that are moved in a step: payload times executions."""
        return None if self.times is None else self.payload * self.times

    @property
    def sent_at_least(self) -> int:
        """Bytes that one device sends in a step; an unknown trip count counts as 1."""
        return self.sent_once if self.sent is None else self.sent

    def __str__(self) -> str:
        times = "" if self.times in (None, 1) else f", {self.times:,} times"
        place = "" if self.place is None else f" at {self.place}"
        return f"{self.kind} of {self.shape}{times}{place} ({self.op_name or self.name})"


def is_called(op_name: str) -> bool:
    """Return whether JAX's name of an operation is of a collective in the user's program."""
    # "jit(step)/shard_map/(psum:layer/psum)" is one that XLA has merged of two.
    names = op_name.rstrip(")").split(":") if op_name.endswith(")") else [op_name]
    return all(name.rpartition("/")[2].lstrip("(") in _CALLED for name in names)


class Exchange(NamedTuple):
    """Array that a collective moves; the start of an asynchronous one stands for its end, too."""

    kind: CollectiveOpcode
    instruction: Instruction
    computation: str
    number: int
    """Index of the array among the results; XLA may have combined several in one collective."""
    groups: ReplicaGroups
    axes: tuple[str, ...]
    shape: Shape
    """Shape of what is moved, as one device has it before or behind: the larger one."""
    payload: int
    """Bytes of that array, or of all pieces that an all-to-all exchanges."""
    times: int | None
    """Executions in a run of the program, a branch counted as taken; None within a loop of unknown
    trip count."""

    @property
    def sent_once(self) -> int:
        """Bytes that one device sends in an execution, by the algorithms that send least."""
        if self.kind == "collective-permute":
            return self.payload * any(source != target for source, target in self.groups)
        devices = len(self.groups[0])
        rounds = 2 if self.kind == "all-reduce" else 1
        return round(rounds * self.payload * (devices - 1) / devices)


class Hlo:
    """Optimized module, as `jax.stages.Compiled.as_text()` prints it: computations by name."""

    def __init__(self, text: str) -> None:
        is_broken = text.rfind(" custom-call(") >= 0 and text.rfind("={\n") >= 0
        self.text = text = _BROKEN.sub("", text) if is_broken else text
        self._head = text[: text.find("\n")]
        self._times: dict[str, int | None] = {}

    def has(self, words: str) -> bool:
        """Say whether words are behind the head, which takes least time from the end."""
        return self.text.rfind(words, len(self._head)) >= 0

    def __getitem__(self, computation: str) -> Computation:
        return self.computations[computation]

    @cached_property
    def computations(self) -> dict[str, Computation]:
        ends, end, after = [], len(self.text), len(self._head)
        while (end := self.text.rfind("\n}", after, end)) >= 0:
            ends.append(end)
        computations = {}
        for end in reversed(ends):
            # Much faster than a search for the end of a header, which may be long.
            begin, line = after, self.text.find("\n", after, end)
            while line >= 0 and not self.text.startswith(" {", line - 2):
                begin, line = line + 1, self.text.find("\n", line + 1, end)
            if line >= 0:
                computation = Computation(self.text, begin, end)
                computations[computation.name] = computation
            after = end + 2
        return computations

    @cached_property
    def _in_order(self) -> list[Computation]:
        return list(self.computations.values())

    def _computation_at(self, position: int) -> str:
        return self._in_order[bisect_left(self._in_order, position, key=attrgetter("end"))].name

    @cached_property
    def partitions(self) -> int:
        """Devices over which the module is partitioned."""
        return number(_PARTITIONS, self._head) or 1

    @cached_property
    def aliases(self) -> dict[int, int]:
        """Number of the parameter whose memory an output takes, by index of the output."""
        pairs = _ALIAS.findall(self._aliases)
        return {int(output or 0): int(parameter) for output, parameter in pairs}

    @cached_property
    def _aliases(self) -> str:
        begin = self._head.find("input_output_alias={")
        return "" if begin < 0 else self._head[begin : self._head.find(") }", begin) + 1]

    @property
    def alias_count(self) -> int:
        """Number of outputs that take the memory of a parameter."""
        return self._aliases.count(":")

    @cached_property
    def entry(self) -> str:
        """Name of the entry computation."""
        entries = (x.name for x in self._in_order if self.text.startswith("ENTRY ", x.begin))
        return next(entries, "")

    def exchanges(self, axis_sizes: Mapping[str, int]) -> Iterator[Exchange]:
        """Yield the arrays that collectives move, in the order of the text.

        Args:
            axis_sizes: Devices along each mesh axis; of {} exchanges have no axes.
        """
        for position, kind, start in self._places:
            instruction, name = instruction_at(self.text, position), self._computation_at(position)
            if not self._is_part(instruction, name):
                yield from self._exchanges_of(kind, instruction, name, bool(start), axis_sizes)

    def _is_part(self, instruction: Instruction, computation: str) -> bool:
        """Say whether a collective is written again in a fusion that goes on with it, or ends it.

        On TPU, a fusion starts an asynchronous collective, and others have a copy of its line.
        """
        is_chained = "chain_id=" in instruction.attributes
        return is_chained and not any(self[computation].matches(_ASYNC_START))

    def _exchanges_of(
        self,
        kind: CollectiveOpcode,
        instruction: Instruction,
        computation: str,
        is_start: bool,
        axis_sizes: Mapping[str, int],
    ) -> Iterator[Exchange]:
        shapes, count = instruction.results, len(instruction.operands)
        if is_start and len(shapes) >= 2 * count:
            # The start's result is (operands, results, what the backend needs besides).
            shapes = shapes[count : 2 * count]
        groups = self.groups(instruction.attributes)
        if kind == "reduce-scatter" and (dim := instruction.dimension) is not None:
            sizes = [(*x[:dim], x[dim] * len(groups[0]), *x[dim + 1 :]) for _, x in shapes]
            shapes = tuple(map(Shape, (dtype for dtype, _ in shapes), sizes))
        if kind == "all-reduce" and _SCATTERED.search(computation):
            # On TPU, a fusion that sums and takes the device's part of it.
            kind = "reduce-scatter"
        payloads = [shape.bytes for shape in shapes]
        if kind == "all-to-all":
            payloads = [sum(payloads)]  # its results are pieces of one array
        axes, times = groups.axes(axis_sizes) if axis_sizes else (), self.times(computation)
        for i, payload in enumerate(payloads):
            yield Exchange(
                kind, instruction, computation, i, groups, axes, shapes[i], payload, times
            )

    def fusion_of(self, computation: str) -> Instruction | None:
        """Return the fusion that a computation is the inside of."""
        callers = [line for _, line in self.callers(computation)]
        is_fusion = len(callers) == 1 and callers[0].opcode in ("fusion", "fusion-start")
        return callers[0] if is_fusion else None

    @cached_property
    def has_gradients(self) -> bool:
        """True if JAX has transposed something in the module."""
        return self.has("/transpose(") or self.has("(transpose(")

    def callers(self, computation: str) -> Iterator[tuple[str, Instruction]]:
        """Yield the instructions that call a computation, each behind its own computation."""
        for position in self._calls.get(computation, ()):
            instruction = instruction_at(self.text, position)
            if instruction.opcode not in ("async-update", "async-done"):
                yield self._computation_at(position), instruction

    def count_calls(self, computation: str) -> int:
        """Count the places at which a computation is called; both ends of what is asynchronous."""
        return len(self._calls.get(computation, ()))

    def times(self, computation: str) -> int | None:
        """Count the executions of a computation; None if a loop has an unknown trip count."""
        if computation == self.entry:
            return 1
        if computation not in self._times:
            self._times[computation] = None  # of a computation that calls itself
            runs = [
                self._times_within(caller, instruction, computation)
                for caller, instruction in self.callers(computation)
            ]
            counts = [run for run in runs if run is not None]
            self._times[computation] = sum(counts) if runs and len(counts) == len(runs) else None
        return self._times[computation]

    def _times_within(self, caller: str, instruction: Instruction, computation: str) -> int | None:
        """Multiply the caller's executions by the trips of its loop, if it is one."""
        times = self.times(caller)
        if instruction.opcode != "while" or times is None:
            return times
        count = trips(self.computations, self[caller], instruction)
        # The condition is evaluated once more, to end the loop.
        is_condition = computation in instruction.called.get("condition", ())
        return None if count is None else times * (count + is_condition)

    def groups(self, attributes: str) -> ReplicaGroups:
        """Parse the replica groups of a collective, or its (source, target) pairs."""
        begin = _GROUPS.search(attributes)
        if begin is None:
            return _parsed_groups(_EXPLICIT, "{}", self.partitions)
        for form in _FORMS:
            if match := form.match(attributes, begin.end()):
                return _parsed_groups(form, match[0], self.partitions)
        raise ValueError(f"replica groups of an unknown form: {attributes[begin.start() :][:80]}")

    def place(self, instruction: Instruction) -> Place | None:
        """Return the user's file and line of an instruction; None where XLA does not know it.

        It is the innermost frame outside of installed libraries.
        """
        if (frame := number(_FRAME, instruction.attributes)) is not None:
            return self._frames.get(frame)
        match = _SOURCE.search(instruction.attributes)
        if not match or not match[2] or _LIBRARY.search(match[1]):
            return None
        return Place(match[1], int(match[2]))

    @cached_property
    def _frames(self) -> dict[int, Place]:
        """Files and lines by the number of a stack frame."""
        files = dict(self._table("FileNames"))
        lines = {
            location: Place(files[fields["file_name_id"]].strip('"'), fields["line"])
            for location, row in self._table("FileLocations")
            if (fields := _fields(row)).get("file_name_id") in files and "line" in fields
        }
        places: dict[int, Place] = {}
        for frame, row in self._table("StackFrames"):  # callers come first
            fields = _fields(row)
            place = lines.get(fields.get("file_location_id", 0))
            if place is None or _LIBRARY.search(place.file):
                # XLA's numbers of callers are one too large, and 1 is none.
                place = places.get(fields.get("parent_frame_id", 1) - 1)
            if place is not None:
                places[frame] = place
        return places

    def _table(self, name: str) -> list[tuple[int, str]]:
        begin = self.text.find(f"\n{name}\n", 0, self._in_order[0].begin if self._in_order else 0)
        if begin < 0:
            return []
        end = self.text.find("\n\n", begin + 1)
        rows = _TABLE_ROW.findall(self.text, begin + len(name) + 2, end)
        return [(int(key), row) for key, row in rows]

    @cached_property
    def _calls(self) -> dict[str, list[int]]:
        """Positions at which each computation is called."""
        calls = defaultdict(list)
        for attributes in (_CALLS, _BRANCHES):
            for attribute in attributes.finditer(self.text):
                for name in NAME.findall(attribute[0]):
                    calls[name].append(attribute.start())
        return calls

    @cached_property
    def _places(self) -> list[tuple[int, CollectiveOpcode, str]]:
        """List (position, kind, "-start" or "") of the collectives, in the order of the text."""
        places = []
        for attribute in (" replica_groups=", " source_target_pairs="):
            # A search for a fixed string is much faster than one for a pattern.
            position = len(self.text)
            while (position := self.text.rfind(attribute, len(self._head), position)) >= 0:
                line = self.text.rfind("\n", 0, position)
                opcode = OPCODE.search(self.text, line)
                if opcode and (match := _COLLECTIVE.match(self.text, opcode.start())):
                    places.append((opcode.start(), _KINDS[match[1]], match[2] or ""))
        return sorted(places)


def _fields(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(text)}


_GROUPS: Final = re.compile(r"(?:replica_groups|source_target_pairs)=")
_EXPLICIT: Final = re.compile(r"\{(?:\{[\d,]*\},?)*\}")
_IOTA: Final = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH: Final = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(((?:\([^)]*\)|[^()]|T\([^)]*\))*)\))? \{([^}]*)\}"
)
_MOST_DEVICES: Final = 1 << 17
"""Of a program, more than machines have; a text may have any number."""
_AXIS: Final = re.compile(r"'?([^',=]+?)'?=(\d+)")
_AXIS_PART: Final = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")


class ReplicaGroups(tuple[tuple[int, ...], ...]):
    """Partitions that exchange data, by group; of collective-permute (source, target) pairs."""

    __slots__ = ()

    def axes(self, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
        """List the mesh axes along which members of a group differ, in the mesh's order.

        A group spans these axes if their sizes' product is its size. XLA may split an axis.

        Args:
            axis_sizes: Devices along each mesh axis; partitions are positions in the mesh.
        """
        sizes = tuple(axis_sizes.values())
        members = np.concatenate([np.array(group, np.int64) for group in self])
        firsts = np.repeat([group[0] for group in self], [len(group) for group in self])
        places = zip(
            axis_sizes,
            np.unravel_index(members, sizes),
            np.unravel_index(firsts, sizes),
            strict=True,
        )
        return tuple(axis for axis, place, first in places if (place != first).any())


@lru_cache(maxsize=256)
def _parsed_groups(form: re.Pattern[str], text: str, partitions: int) -> ReplicaGroups:
    """Parse groups; those without a member are one group of all partitions."""
    match = form.fullmatch(text)
    assert match is not None
    return ReplicaGroups(_FORMS[form](match) or (tuple(range(_within_bound(partitions))),))


def _within_bound(count: int) -> int:
    if count > _MOST_DEVICES:
        raise ValueError(f"the text has groups of {count} devices, of {_MOST_DEVICES:,} at most")
    return count


_Groups = tuple[tuple[int, ...], ...]


def _explicit(text: re.Match[str]) -> _Groups:
    return tuple(map(_group_numbers, re.findall(r"\{([\d,]+)\}", text[0])))


def _iota(text: re.Match[str]) -> _Groups:
    return _group_rows(_transposed(text[2], text[3]), _group_numbers(text[1])[1])


def _groups_along_axes(text: re.Match[str]) -> _Groups:
    """Parse groups along mesh axes, or parts of them: `:(4)2` are 2 parts of each 4."""
    sizes = {axis: int(size) for axis, size in _AXIS.findall(text[1])}
    along = [
        (axis, int(before or 1), int(before or 1) * int(size or sizes[axis]))
        for axis, before, size in _AXIS_PART.findall(text[3])
    ]
    parts = []
    for axis, size in sizes.items():
        cuts = {1, size, *(cut for name, *ends in along if name == axis for cut in ends)}
        parts += [(axis, begin, end) for begin, end in pairwise(sorted(cuts))]
    inner = [
        i
        for name, begin, end in along
        for i, (axis, first, _) in enumerate(parts)
        if axis == name and begin <= first < end
    ]
    outer = [i for i in range(len(parts)) if i not in inner]
    dims = [end // begin for _, begin, end in parts]
    ids = (
        _device_ids(text[2], _within_bound(prod(sizes.values())))
        .reshape(dims)
        .transpose(outer + inner)
    )
    return _group_rows(ids, prod(dims[i] for i in inner))


def _device_ids(text: str | None, count: int) -> npt.NDArray[np.int64]:
    """Parse the devices of a mesh: [4,2]T(1,0), or one by one; ascending without a text."""
    if text is None:
        return np.arange(count)
    sizes, _, order = text.partition("]")
    if order:
        return _transposed(sizes.strip("(["), order.strip("T()"))
    return np.array(_group_numbers(text), np.int64)


def _transposed(sizes: str, order: str | None) -> npt.NDArray[np.int64]:
    """Flatten 0, 1, 2, ... in an array of these sizes, transposed to this order."""
    shape = _group_numbers(sizes)
    ids = np.arange(_within_bound(prod(shape))).reshape(shape)
    return (ids.transpose(_group_numbers(order)) if order else ids).ravel()


def _group_rows(ids: npt.NDArray[np.int64], size: int) -> _Groups:
    return tuple(map(tuple, ids.reshape(-1, size).tolist()))


def _group_numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


_FORMS: Final = {_EXPLICIT: _explicit, _IOTA: _iota, _MESH: _groups_along_axes}
