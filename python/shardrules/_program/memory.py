"""The memory that a program needs on a device: totals, the largest arrays, what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from shardrules._base.text import Place, answer, bytes_shown, printable_lines, record
from shardrules._plan.answers import Column, Table
from shardrules._program.computation import Instruction
from shardrules._program.executable import Executable
from shardrules._program.facts import JOINS, Facts
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.values import Values, reached

_LARGEST: Final = 100
_FEW_STACKS: Final = 3
"""Stacks that loops keep where all of it is recomputed; more, and only a part of the step is."""
_MOST_STEPS: Final = 10
"""How far before an instruction without a name of JAX's one with a name is looked for."""
_IN_TEXT: Final = 10
# XLA's numbers of bytes, with their signs: aliased bytes are counted as argument and as output.
_NUMBERS: Final = {
    "arguments": ("argument", 1),
    "outputs": ("output", 1),
    "aliased": ("alias", -1),
    "temporaries": ("temp", 1),
    "code": ("generated_code", 1),
}
_COLUMNS: Final = (
    Column("bytes", is_right=True),
    Column("array"),
    Column("what"),
    Column("line"),
)


@record
class Buffer(NamedTuple):
    """Array in the memory of a device when a program needs most."""

    bytes: int
    shape: str
    """Dtype and dimensions on a device, such as "f32[16,128]"."""
    what: str
    """Path of an argument, "output", or JAX's name of the operation that makes it."""
    is_saved: bool
    """True for what the forward pass keeps for the backward pass."""
    place: Place | None
    """File and line of that operation."""


@record
class Totals(NamedTuple):
    """XLA's numbers of bytes that a program needs on a device."""

    arguments: int
    outputs: int
    aliased: int
    """Bytes of outputs in the memory of donated arguments."""
    temporaries: int
    """What else it allocates; before JAX 0.12, `temp_size_in_bytes`, which is too high for TPUs."""
    code: int
    """Bytes of the compiled code; 0 where it is not in the device's memory."""

    @property
    def peak(self) -> int:
        """Bytes that the program needs at most."""
        return sum(sign * getattr(self, name) for name, (_, sign) in _NUMBERS.items())

    def __str__(self) -> str:
        terms = [
            f"{'-' if sign < 0 else '+'} {name} {bytes_shown(size)}"
            for name, (_, sign) in _NUMBERS.items()
            if (size := getattr(self, name))
        ]
        return " ".join(terms).removeprefix("+ ")


@answer
class Memory(NamedTuple):
    """Memory that a program needs on a device, in bytes: XLA's numbers, and the largest arrays."""

    totals: Totals
    alive: int
    """Sum of the arrays that are alive at the peak, at most the peak itself; of an executable that
    you compiled, of arguments, results and what is kept for the backward pass."""
    saved: int
    """Part of it that the forward pass keeps for the backward pass."""
    is_recomputed: bool
    """True if the backward pass computes something again, as `jax.checkpoint` has it."""
    buffers: tuple[Buffer, ...]
    """The largest of these arrays, 100 at most."""

    @property
    def peak(self) -> int:
        """Bytes that the program needs at most, with what XLA loses between arrays."""
        return self.totals.peak

    def to_json(self) -> dict[str, Any]:
        """Return all numbers, and the arrays, as `json.dumps` takes them."""
        numbers = {"peak": self.peak, "totals": self.totals._asdict()}
        rows = [row._asdict() | {"place": row.place and str(row.place)} for row in self.buffers]
        return self._asdict() | numbers | {"buffers": rows}

    def _parts(self) -> list[Table | str]:
        head = f"{bytes_shown(self.peak)} on each device: {self.totals}"
        largest = "the largest arrays that are alive"
        if self.alive < self.peak:
            share = self.alive / self.peak
            largest += f", {bytes_shown(self.alive)} in all, {share:.0%} of that"
        if self.saved:
            largest += f"; {bytes_shown(self.saved)} are kept for the backward pass"
        return [head, largest, table_of(self.buffers)]


def table_of(buffers: Sequence[Buffer]) -> Table:
    """Return a table of the largest of these arrays, which are sorted by bytes."""
    rows = [
        (bytes_shown(row.bytes), row.shape, row.what, "" if row.place is None else str(row.place))
        for row in buffers[:_IN_TEXT]
    ]
    return Table(_COLUMNS, rows)


def totals_of(compiled: Any) -> Totals | None:
    """Read XLA's numbers of bytes; None where the backend does not tell.

    The TPU's compiler counts some temporaries twice: it accepts programs of which arguments and
    temporaries are more than the memory, and refuses those that allocate more.
    """
    if totals := getattr(compiled, "totals", None):  # of a program that a child was asked for
        return totals  # type: ignore[no-any-return]
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = (f"{name}_size_in_bytes" for name, _ in _NUMBERS.values())
    totals = Totals(*(getattr(stats, name, 0) for name in names))
    allocated = getattr(stats, "total_allocation_bytes", 0)  # which older JAX lacks
    if not allocated:
        return totals
    rest = allocated - totals.arguments - totals.outputs + totals.aliased
    return totals._replace(temporaries=max(rest, 0))


def memory_of(executable: Executable, totals: Totals) -> Memory:
    """Read the arrays that a program needs, beside XLA's numbers."""
    with hlo_errors():
        leaves, parameters = executable.leaf_of.items(), executable.values.parameters
        paths = {parameters[number]: executable.inputs.paths[leaf] for number, leaf in leaves}
        live = getattr(executable.call.compiled, "live", None)
        arrays = DeviceArrays(executable.values)
        rows = arrays.at_peak(live) if live and live.ranges else arrays.lasting()
        # The memory of a result is needed, whatever is in it before.
        saved = [row for row in rows if not row.is_output and arrays.is_saved(row.node)]
        is_again = executable.hlo.has("/rematted_computation")
        stacks = sum(arrays.written(row.node) is not None for row in saved)
        return Memory(
            totals=totals,
            alive=min(sum(row.bytes for row in rows), totals.peak),
            saved=min(sum(row.bytes for row in saved), totals.peak),
            is_recomputed=is_again and stacks <= _FEW_STACKS,
            buffers=tuple(arrays.buffer(row, paths) for row in rows[:_LARGEST]),
        )


class Alive(NamedTuple):
    """Array that is alive at the peak: its node in the graph of values, and its memory."""

    node: int
    bytes: int
    is_output: bool = False


class DeviceArrays:
    """Arrays of a module in the memory of a device, and what they are for."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self._facts = Facts(values)

    def at_peak(self, live: LiveRanges) -> list[Alive]:
        """List the arrays that XLA has in memory at the peak, the largest first.

        What a start has beside its array, as a semaphore, is none: it is smaller.
        """
        slots, rows = dict(live.slots()), dict[_Slot, Alive]()
        for name, path in _AT_PEAK.findall(live.ranges):
            node = self._values.at(name, [int(place) for place in path.split(",") if place])
            slot = slots.get((name, path))
            if node is not None and slot and slot[2] >= self._values.shapes[node].bytes:
                rows.setdefault(slot, Alive(node, *slot[2:]))
        return sorted(rows.values(), key=lambda row: -row.bytes)

    def lasting(self) -> list[Alive]:
        """List arguments, results and what is kept for the backward pass, the largest first."""
        values = self._values
        in_place = {values.outputs[number] for number in values.hlo.aliases}
        results = values.returned.difference(in_place, values.parameters)
        at_ends = {*values.parameters, *values.returned}
        saved = {self._facts.source_of(x): x for x in range(len(values)) if self._is_kept(x)}
        others = [node for source, node in saved.items() if source not in at_ends]
        rows = [
            Alive(node, values.shapes[node].bytes, node in results)
            for node in (*values.parameters, *results, *others)
            if _ON_HOST not in values.lines[node].type
        ]
        return sorted(rows, key=lambda row: -row.bytes)

    def buffer(self, row: Alive, paths: Mapping[int, str]) -> Buffer:
        """Say what is known of an array; the module's parameters have paths, by their node."""
        line = self._named(row.node)
        what = "output" if row.is_output else line.op_name or line.name
        return Buffer(
            bytes=row.bytes,
            shape=str(self._values.shapes[row.node]),
            what=paths.get(row.node, what),
            is_saved=not row.is_output and self.is_saved(row.node),
            place=self._values.hlo.place(line),
        )

    def is_saved(self, node: int) -> bool:
        """Say whether the forward pass makes an array that the backward pass reads."""
        return any(map(self._is_kept, self._in_place_of(node)))

    def written(self, node: int) -> int | None:
        """Find what a loop writes into a part of an array in each trip."""
        values = self._values
        places = self._in_place_of(node)
        return next((values.made_of[x][1] for x in places if values.opcodes[x] == _UPDATE), None)

    def _in_place_of(self, node: int) -> Iterator[int]:
        """Yield what the forward pass has in the memory of an array: loops carry it, and update."""
        values = self._values

        def goes_on(node: int) -> list[int]:
            sources = values.made_of[node] if values.opcodes[node] in JOINS else ()
            return [
                near
                for near in (*sources, *values.used_by[node])
                if values.opcodes[near] in _IN_PLACE
                and values.shapes[near] == values.shapes[node]
                and self._phases[near] == "forward"
            ]

        return reached([node], goes_on)

    def _is_kept(self, node: int) -> bool:
        """Say whether the backward pass reads an array of the forward pass."""
        values = self._values
        return (
            self._phases[node] == "forward"
            and values.opcodes[node] not in _FREE
            and any(self._phases[user] == "backward" for user in self._readers(node))
        )

    def _readers(self, node: int) -> Iterator[int]:
        """Yield what reads an array, also by another shape of the same memory."""
        for user in self._values.used_by[node]:
            if self._values.opcodes[user] == "bitcast":
                yield from self._readers(user)
            else:
                yield user

    def _named(self, node: int) -> Instruction:
        """Return the instruction that makes an array, or the next before it that JAX has named.

        Of an update it is what is written: the update itself is a line of JAX's own.
        """
        values, written = self._values, self.written(node)
        source = node if written is None else self._facts.source_of(written)
        for _ in range(_MOST_STEPS):
            if values.lines[source].op_name:
                return values.lines[source]
            source = next(iter(values.made_of[source]), source)
        return values.lines[node]

    @cached_property
    def _phases(self) -> Sequence[str]:
        """Say of each value whether it is of the "forward" or "backward" pass, or "" of neither.

        By JAX's name of the fusion that it is in, or of the instruction, or by what it is made of.
        """
        values, phases = self._values, list[str]()
        of_fusions: dict[str, str | None] = {}
        for node, (computation, line) in enumerate(
            zip(values.computations, values.lines, strict=True)
        ):
            if computation not in of_fusions:
                fusion = values.hlo.fusion_of(computation)
                of_fusions[computation] = fusion and _named_phase(fusion)
            phase = of_fusions[computation]
            phase = _named_phase(line) if phase is None else phase
            if phase is None:
                source = next(iter(values.made_of[node]), node)
                phase = phases[source] if source < node else ""
            phases.append(phase)
        return phases


def _named_phase(line: Instruction) -> str | None:
    """Read the pass in the name of an instruction; None without a name."""
    text = line.attributes
    if "op_name=" not in text:
        return None
    return "backward" if "transpose(" in text else "forward" if "jvp(" in text else ""


_FREE: Final = frozenset({"broadcast", "constant", "iota"})
"""Operations that are computed again where they are used."""
_UPDATE: Final = "dynamic-update-slice"
_IN_PLACE: Final = JOINS | {_UPDATE}
_ON_HOST: Final = "S(5)"

# "allocation 1: size 512, page 0, parameter 0, ..., maybe-live-out:"; a color is another memory.
_ALLOCATION: Final = re.compile(
    r"^allocation (\d+): size (\d+), (color [1-9]\d*, )?(?:page 0, )?(.*)$", re.MULTILINE
)
_VALUE: Final = re.compile(
    r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @0> \(size=(\d+),offset=(\d+)\)",
    re.MULTILINE,
)
_AT_PEAK: Final = re.compile(r"^    (\S+)\{([\d,]*)\}: \d+ bytes \(cumulative", re.MULTILINE)


_Slot = tuple[str, int, int, bool]
"""Memory of one value: its allocation, offset and bytes, and whether a result is there."""


class LiveRanges(NamedTuple):
    """What XLA writes of the memory that a module needs."""

    ranges: str
    """Text of the live ranges; "" before JAX 0.10, whose XLA writes none."""
    assignment: str
    """Text of the buffer assignment."""

    def totals(self, peak: int) -> Totals:
        """Return the bytes that a module needs, of which XLA assigns so many."""
        arguments = outputs = aliased = 0
        for _, size, color, kind in _ALLOCATION.findall(self.assignment):
            if not color:
                is_argument, is_result = kind.startswith("parameter"), "maybe-live-out" in kind
                arguments += int(size) * is_argument
                outputs += int(size) * is_result
                aliased += int(size) * (is_argument and is_result)
        rest = max(peak - arguments - outputs + aliased, 0)
        return Totals(arguments, outputs, aliased, temporaries=rest, code=0)

    def slots(self) -> Iterator[tuple[tuple[str, str], _Slot]]:
        """Yield the memory of each value, by its instruction and its place in a tuple."""
        heads = list(_ALLOCATION.finditer(self.assignment))
        for head, following in zip(heads, [*heads[1:], None], strict=False):
            end = len(self.assignment) if following is None else following.start()
            for name, path, size, offset in _VALUE.findall(self.assignment, head.end(), end):
                is_output = "maybe-live-out" in head[4]
                yield (name, path), (head[1], int(offset), int(size), is_output)


# "Ran out of memory on HBM, the total memory required for HLO temporaries (18.14G) exceeds
# available HBM (15.75G)."; older ones: "Used 18.14G of 15.75G hbm." Arguments are counted, too.
_REFUSALS: Final = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


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

    def __init__(self, required: int, available: int, buffers: tuple[Buffer, ...]) -> None:
        self.required = required
        self.available = available
        self.buffers = buffers
        super().__init__(self._message())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.required, self.available, self.buffers)

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
        largest, is_kept = self.buffers[0], any(buffer.is_saved for buffer in self.buffers)
        line = f" at {largest.place}" if largest.place else ""
        remat = "recompute what is kept for the backward pass: jax.checkpoint; or " * is_kept
        return (
            f"{remat}shard {largest.shape}{line} over more devices, by the plan or by "
            "jax.lax.with_sharding_constraint; or donate the state, or take a smaller batch"
        )


def refusal(required: int, available: int, text: str, live: LiveRanges) -> OutOfMemory:
    """Return the error for a step that does not fit, of its module, "" if XLA does not write it."""
    if not text or not live.ranges:
        return OutOfMemory(required, available, ())
    arrays = DeviceArrays(Values(Hlo(text)))
    rows = arrays.at_peak(live)[:_IN_TEXT]
    return OutOfMemory(required, available, tuple(arrays.buffer(row, {}) for row in rows))


def refused_bytes(message: str) -> tuple[int, int] | None:
    """Read the bytes that are required and available, if XLA says that a step does not fit."""
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            required, unit, available, limit = match.groups()
            return int(float(required) * _UNITS[unit]), int(float(available) * _UNITS[limit])
    return None
