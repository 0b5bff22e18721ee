"""The memory that a program needs on a device: totals, the largest arrays, what does not fit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from shardrules._base.text import Place, answer, bytes_shown, printable_lines, record
from shardrules._plan.answers import Column, Table
from shardrules._program.computation import Computation, Instruction, Shape
from shardrules._program.executable import Executable
from shardrules._program.facts import MOVES, UPDATES
from shardrules._program.hlo import Hlo, hlo_errors
from shardrules._program.values import Values

_LARGEST: Final = 100
_FEW_STACKS: Final = 3
_MOST_STEPS: Final = 10
_IN_TEXT: Final = 10
_NEGLIGIBLE: Final = 1000
# XLA's numbers of bytes, with their signs: aliased bytes are counted as argument and as output.
_NUMBERS: Final = {
    "arguments": ("argument", 1),
    "outputs": ("output", 1),
    "aliased": ("alias", -1),
    "temporaries": ("temp", 1),
    "code": ("generated_code", 1),
}
SIZES: Final = (
    *(f"{name}_size_in_bytes" for name, _ in _NUMBERS.values()),
    "total_allocation_bytes",
)
"""What is read of `Compiled.memory_analysis()`."""
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
    is_argument: bool
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


def totals_from(sizes: Sequence[int]) -> Totals:
    """Read `SIZES`.

    The TPU's compiler counts some temporaries twice: it accepts programs of which arguments and
    temporaries are more than the memory, and refuses those that allocate more.
    """
    *numbers, allocated = sizes
    totals = Totals(*numbers)
    if not allocated:
        return totals
    rest = allocated - totals.arguments - totals.outputs + totals.aliased
    return totals._replace(temporaries=max(rest, 0))


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
    """Return a table of the largest of these arrays, which are sorted by bytes.

    Scratch a thousand times smaller than the largest says nothing.
    """
    least = buffers[0].bytes / _NEGLIGIBLE if buffers else 0
    rows = (buffer for buffer in buffers[:_IN_TEXT] if buffer.bytes >= least)
    return Table(_COLUMNS, map(_buffer_cells, rows))


def _buffer_cells(buffer: Buffer) -> tuple[str, ...]:
    place = "" if buffer.place is None else str(buffer.place)
    return bytes_shown(buffer.bytes), buffer.shape, buffer.what, place


def totals_of(executable: Executable) -> Totals | None:
    """Read XLA's numbers of bytes; None where the backend does not tell."""
    stats: Any = executable.call.compiled.memory_analysis()
    if stats is None:
        return None
    return totals_from([getattr(stats, name, 0) for name in SIZES])  # 0 for what JAX lacks


def memory_of(executable: Executable, totals: Totals) -> Memory:
    """Read the arrays that a program needs, beside XLA's numbers."""
    hlo = executable.hlo

    def path_of(parameter: int) -> str | None:
        leaf = executable.leaf_of.get(parameter)
        return None if leaf is None else executable.inputs.paths[leaf]

    with hlo_errors():
        live = getattr(executable.call.compiled, "live", None)
        rows = live.alive(hlo) if live and live.ranges else lasting(executable)
        saved = [row for row in rows if _is_saved(hlo, row)]
        alive, kept = (sum(row.bytes for row in some) for some in (rows, saved))
        return Memory(
            totals=totals,
            alive=min(alive, totals.peak),
            saved=min(kept, totals.peak),
            is_recomputed="/rematted_computation" in hlo.text and not _is_all_kept(hlo, saved),
            buffers=tuple(buffers_of(hlo, rows[:_LARGEST], path_of)),
        )


def _is_all_kept(hlo: Hlo, saved: Sequence[Alive]) -> bool:
    """Say whether loops keep more than a few arrays of each trip."""
    lines = (hlo[row.computation][row.name] for row in saved)
    stacks = [
        line
        for line in lines
        if line.opcode in UPDATES or any(hlo.contains(body, WRITTEN) for body in line.callees)
    ]
    return len(stacks) > _FEW_STACKS


def _is_saved(hlo: Hlo, row: Alive) -> bool:
    """Say whether the forward pass makes an array that the backward pass reads."""
    if row.parameter is not None or row.is_output or row.last_use is None:
        return False
    maker, user = (
        _named_instruction(hlo, hlo[computation], name).op_name or ""
        for computation, name in ((row.computation, row.name), row.last_use)
    )
    return "jvp(" in maker and "transpose(" not in maker and "transpose(" in user


def buffers_of(
    hlo: Hlo, rows: Iterable[Alive], path_of: Callable[[int], str | None]
) -> Iterator[Buffer]:
    """Yield what is known of arrays that are alive; `path_of` names the module's parameters."""
    for row in rows:
        instruction = _named_instruction(hlo, hlo[row.computation], row.name)
        what = "output" if row.is_output else instruction.op_name or instruction.name
        if row.parameter is not None:
            what = path_of(row.parameter) or instruction.op_name or f"parameter {row.parameter}"
        yield Buffer(
            bytes=row.bytes,
            shape=str(row.shape),
            what=what,
            is_argument=row.parameter is not None,
            is_saved=_is_saved(hlo, row),
            place=hlo.place(instruction),
        )


def _before_moves(computation: Computation, line: Instruction) -> Instruction:
    """Return the instruction whose result is only moved to another's."""
    while line.opcode in MOVES:
        line = computation[line.operands[0]]
    return line


def _named_instruction(hlo: Hlo, computation: Computation, name: str) -> Instruction:
    """Return the instruction that makes an array, or the next before it that JAX has named.

    Of an update it is what is written: the update itself is a line of JAX's own.
    """
    line = instruction = computation[name]
    for _ in range(_MOST_STEPS):
        inner = hlo[line.callees[0]] if line.opcode == "fusion" else computation
        root = inner.root if line.opcode == "fusion" else line
        if line.opcode == "fusion" and root.opcode == "tuple":  # of several, what it writes
            parts = (inner[part] for part in root.operands)
            root = next((x for x in parts if x.opcode == "dynamic-update-slice"), root)
        if root.opcode == "dynamic-update-slice":
            root = _before_moves(inner, inner[root.operands[1]])
        if root.parameter is not None and inner is not computation:
            line = computation[line.operands[root.parameter]]
        elif named := next((operation for operation in (root, line) if operation.op_name), None):
            return named  # a root may be a cast without a name: the fusion has one
        elif not line.operands:
            return instruction
        else:
            line = computation[line.operands[0]]
    return instruction


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
    rows = [_memory_row(values, node, number) for number, node in enumerate(values.parameters)]
    others = values.returned.difference(in_place, values.parameters)
    rows += [_memory_row(values, node, is_output=True) for node in others]
    rows += _kept(executable)
    return sorted((row for row in rows if row), key=lambda row: -row.bytes)


def _memory_row(
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
    written = [source for source in values.made_of[node] if values.opcodes[source] in UPDATES]
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
                    yield _memory_row(values, node, user=user)


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
        makers = [(c, name_of) for name_of in others if (c := hlo.computation_of(name_of))]
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


# "Ran out of memory on HBM, the total memory required for HLO temporaries (18.14G) exceeds
# available HBM (15.75G)."; older ones: "Used 18.14G of 15.75G hbm." Arguments are counted, too.
_REFUSALS: Final = (
    re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_MOST: Final = 0.5
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
        largest = self.buffers[0]
        line = "" if largest.place is None else f" at {largest.place}"
        most = _MOST * sum(buffer.bytes for buffer in self.buffers)
        if sum(buffer.bytes for buffer in self.buffers if buffer.is_saved) > most:
            return (
                "most of it is kept for the backward pass: recompute it by jax.checkpoint around "
                f"the layer; or shard what is kept{line} by another axis too, or take a smaller "
                "batch"
            )
        if sum(buffer.bytes for buffer in self.buffers if buffer.is_argument) > most:
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
        return OutOfMemory(self.required, self.available, buffers)


def refused_bytes(message: str) -> tuple[int, int] | None:
    """Read the bytes that are required and available, if XLA says that a step does not fit."""
    for pattern in _REFUSALS:
        if match := pattern.search(message):
            required, unit, available, limit = match.groups()
            return int(float(required) * _UNITS[unit]), int(float(available) * _UNITS[limit])
    return None
