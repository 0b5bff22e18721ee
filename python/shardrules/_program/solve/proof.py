"""Compiles a solution, and compares what the compiler made with what was predicted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.arguments import integer
from shardrules._base.text import answer, bytes_shown, record, seconds_shown
from shardrules._plan.plan import Plan
from shardrules._plan.tables import Column, Table
from shardrules._program.buffers import table_of
from shardrules._program.refusal import OutOfMemory
from shardrules._program.solve.activations import constrained_step
from shardrules._program.solve.machine import sent_seconds
from shardrules._program.solve.outcome import Outcome
from shardrules._program.solve.transmissions import Transmission, merged
from shardrules._program.verify.prove import prove

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._program.topologies.topology import Topology
    from shardrules._program.verify.prove import Proof

# Predicted and compiled bytes are alike within these shares of the compiled ones.
_SENT: Final = 0.2
_MEMORY: Final = 0.1
# Of all bytes sent, what mesh axes send less of is not compared.
_FEW: Final = 0.02
_SHOWN: Final = 6
_ROUNDS: Final = 3

_ByLine = dict[tuple[str, tuple[str, ...]], int]
"""Bytes sent in a step by (line, mesh axes)."""


@record
class SentBytes(NamedTuple):
    """Bytes that a device sends in a step, as predicted and as compiled."""

    axes: tuple[str, ...]
    """The mesh axes over which they are sent."""
    predicted: int
    compiled: int
    line: str = ""
    """Of the program; "" for all lines together."""


@answer
class ProofRound(NamedTuple):
    """A solution and what the compiler made of it: a row of `SolutionProof.rounds`."""

    solution: Outcome
    proof: Proof | None
    """None if the compiler refused it."""
    refusal: str
    """The compiler's words, if it refused the solution for its memory."""
    sent: tuple[SentBytes, ...]
    """By mesh axes."""
    lines: tuple[SentBytes, ...]
    """Those lines where predicted and compiled bytes differ, the most first."""
    memory: tuple[int, int]
    """Bytes that a device needs, as predicted and as compiled."""
    seconds: float
    """The predicted time, with what is sent beyond it."""

    @property
    def is_close(self) -> bool:
        """True if bytes sent agree within 20 % for all mesh axes, and memory within 10 %."""
        return not self.refusal and not any(self._far()) and _agrees(*self.memory, _MEMORY)

    def _far(self) -> Iterator[SentBytes]:
        """Yield the mesh axes over which the compiler sends more or less than predicted."""
        least = _FEW * sum(row.compiled for row in self.sent)
        for row in self.sent:
            if max(row.predicted, row.compiled) > least and not _agrees(*row[1:3], _SENT):
                yield row

    def _parts(self) -> list[Table | str]:
        head = f"predicted {seconds_shown(self.solution.time.total)} a step"
        if self.refusal:
            return [f"{head}; the compiler refuses it: {self.refusal}"]
        rows = [("sent over " + ",".join(row.axes), *_cells(row.predicted, row.compiled))
                for row in self.sent]  # fmt: skip
        rows.append(("memory", *_cells(*self.memory)))
        parts: list[Table | str] = [head, Table(_COLUMNS, rows)]
        if self.seconds > self.solution.time.total:
            parts.append(f"{seconds_shown(self.seconds)} a step with what is sent beyond that")
        if any(self._far()):
            shown = [
                (f"  {row.line} over {','.join(row.axes)}", *_cells(row.predicted, row.compiled))
                for row in self.lines[:_SHOWN]
                if not _agrees(row.predicted, row.compiled, _SENT)
            ]
            parts += ["where they differ", Table(_COLUMNS, shown)]
        if not _agrees(*self.memory, _MEMORY):
            compiled = None if self.proof is None else self.proof.memory
            for name, memory in (("predicted", self.solution.memory), ("compiled", compiled)):
                if memory is not None and memory.buffers:
                    largest = table_of(memory.buffers[:_SHOWN])
                    parts += [f"largest at the peak, {name}", largest]
        return parts


_COLUMNS: Final = (
    Column(""),
    Column("predicted", is_right=True),
    Column("compiled", is_right=True),
    Column("ratio", is_right=True),
)


def _cells(predicted: int, compiled: int) -> tuple[str, str, str]:
    ratio = f"{predicted / compiled:.2f}" if compiled else "-"
    return bytes_shown(predicted), bytes_shown(compiled), ratio


def _agrees(predicted: int, compiled: int, share: float) -> bool:
    return abs(predicted - compiled) <= share * compiled


@answer
class SolutionProof(NamedTuple):
    """What the compiler makes of a solution: `Solution.prove` makes it.

    Where it sends more than was predicted, or refuses the solution, the problem is solved again
    with that price; each round is a row.
    """

    rounds: tuple[ProofRound, ...]
    best: ProofRound
    """The round of least seconds, with what is sent beyond its prediction."""

    @property
    def solution(self) -> Outcome:
        """The solution of the best round."""
        return self.best.solution

    @property
    def is_close(self) -> bool:
        """True if bytes sent agree within 20 % for all mesh axes, and memory within 10 %."""
        return self.best.is_close

    def _parts(self) -> list[Table | str]:
        parts: list[Table | str] = []
        for number, row in enumerate(self.rounds, 1):
            head, *rest = row._parts()
            parts += [f"round {number}: {head}", *rest]
        if len(self.rounds) > 1:
            parts.append(f"best: round {self.rounds.index(self.best) + 1}")
        return parts


class Provable(Outcome):
    """A solution that the compiler can be asked about."""

    def prove(
        self,
        on: Topology | Mesh | None = None,
        *,
        rounds: int = 3,
    ) -> SolutionProof:
        """Compile the step with its constraints, and compare it with what was predicted.

        Bytes sent, by mesh axes, are to agree within 20 %, and memory within 10 %; else the lines
        are listed where they differ. What the compiler sends beyond the prediction is then added to
        the solution's time, or what it refuses to its memory, and the problem is solved again
        without the cut that is to blame: if that is faster, it is compiled as well. The last of
        three rounds is FSDP alone, so that no solution that XLA does otherwise is taken for it.

        Args:
            on: A Topology, whose devices need not be there, or a mesh of devices. Default: those of
                `solve`.
            rounds: How often to compile at most, 1 to 3.

        Raises:
            ImportError: The compiler is not installed, as for `Topology`.
            ValueError: There are no devices, or the mesh has other axes.
        """
        return _proof(self, rounds, partial(_round, on=on))


def _proof(
    solution: Provable, rounds: int, compile: Callable[[Outcome], ProofRound]
) -> SolutionProof:
    """Compile a solution, and others as long as they may be faster."""
    most = integer("rounds", rounds, 1, _ROUNDS)
    rows: list[ProofRound] = []
    bans: tuple[tuple[str, str], ...] = solution.again.keywords["forbid"]
    room = solution.again.keywords["hbm"] or solution.machine.hardware.memory_bytes
    current: Any = solution
    while True:
        row = compile(current)
        rows.append(row)
        if row.is_close or len(rows) == most:
            break
        if row.refusal:
            room = round(room * row.memory[0] / row.memory[1])
        else:
            blamed = [ban for ban in _blamed(row) if ban not in bans][:1]
            sizes = current.plan.axis_sizes
            # Along another axis of that size it would be the same program.
            bans += tuple(
                (role, a) for role, axis in blamed for a in sizes if sizes[a] == sizes[axis]
            )
        other = _next(current, rows, room, bans)
        if other is None:
            break
        current = other
    return SolutionProof(tuple(rows), min(rows, key=_rank))


def _rank(row: ProofRound) -> tuple[bool, float]:
    return bool(row.refusal), row.seconds


def _next(
    solution: Provable, rows: list[ProofRound], room: int, bans: tuple[tuple[str, str], ...]
) -> Outcome | None:
    """Return what may be faster than all rounds; the last of three is FSDP alone, if that may be.

    XLA does the latter as it is priced in most programs.
    """
    roles = {"", *solution.step._roles.of.values()} - {"batch"}
    data_alone = [(role, axis) for role in sorted(roles) for axis in solution.plan.axis_sizes]
    best = min(rows, key=_rank)
    for forbid in ((), data_alone)[:: -1 if len(rows) == _ROUNDS - 1 else 1]:
        try:
            other: Outcome = solution.again(hbm=room, forbid=(*bans, *forbid))
        except (ValueError, MemoryError, TimeoutError):
            continue
        is_known = any(other.specs == row.solution.specs for row in rows)
        if not is_known and (best.refusal or other.time.total < best.seconds):
            return other
    return None


def _round(solution: Outcome, on: Topology | Mesh | None) -> ProofRound:
    target, mesh = solution._target(on)
    predicted = _predicted(solution)
    memory = solution.memory.peak
    try:
        proof = prove(
            constrained_step(solution.step, solution.spread, mesh),
            *_arguments(solution, mesh),
            on=target,
        )
    except OutOfMemory as error:
        text = str(error).partition(". The largest")[0]
        memories = (memory, error.required)
        return ProofRound(solution, None, text, (), (), memories, solution.time.total)
    compiled: _ByLine = defaultdict(int)
    for sent in proof.collectives:
        ordered = tuple(axis for axis in mesh.axis_names if axis in sent.axes)
        compiled[str(sent.place or sent.op_name), ordered] += sent.sent_at_least
    lines = [
        SentBytes(axes, predicted.get((line, axes), 0), compiled.get((line, axes), 0), line)
        for line, axes in predicted.keys() | compiled.keys()
    ]
    sums = {row.axes: (0, 0) for row in lines}
    for row in lines:
        sums[row.axes] = sums[row.axes][0] + row.predicted, sums[row.axes][1] + row.compiled
    return ProofRound(
        solution,
        proof,
        "",
        tuple(SentBytes(axes, *sums[axes]) for axes in sorted(sums)),
        tuple(sorted(lines, key=lambda row: (-abs(row.predicted - row.compiled), row))),
        (memory, memory if proof.memory is None else proof.memory.peak),
        _seconds(solution, proof),
    )


def _arguments(solution: Outcome, mesh: Mesh) -> Iterator[Any]:
    """Yield the step's arguments as shapes on the mesh; the planned one is a Plan."""
    import jax
    from jax.sharding import NamedSharding

    step = solution.step
    for place, (arg, rows) in enumerate(zip(step._args, step._ranges, strict=True)):
        if place == step._place:
            yield solution.plan.on_mesh(mesh)
            continue
        tree = arg.abstract() if isinstance(arg, Plan) else arg
        leaves = jax.tree_util.tree_leaves(tree)
        structure: Any = jax.tree_util.tree_structure(tree)
        shapes = [
            jax.ShapeDtypeStruct(
                leaf.shape,
                leaf.dtype,
                sharding=NamedSharding(mesh, solution.specs[step._paths[row]]),
            )
            for leaf, row in zip(leaves, rows, strict=True)
        ]
        yield structure.unflatten(shapes)


def _predicted(solution: Outcome) -> _ByLine:
    """Return what the solution sends by line and mesh axes."""
    sizes = solution.spread.sizes
    sums: _ByLine = defaultdict(int)
    for sent in solution.spread.sent:
        payload = sent.payload * sent.trips
        for row in merged([(sent.kind, sent.axes, "activations", sent.trips, payload)], sizes):
            sums[sent.operation.line, row.axes] += solution.machine.sent(row)
    return sums


def _seconds(solution: Outcome, proof: Proof) -> float:
    """Return the predicted time, and that of what is sent beyond it over each of the axes."""
    rows: list[Any] = [
        (row.kind, row.axes, "activations", row.times or 1, row.payload * (row.times or 1))
        for row in proof.collectives
    ]
    sizes = solution.spread.sizes
    sent: list[Transmission] = list(merged(rows, sizes))
    compiled, _ = sent_seconds(solution.machine, sizes, sent)
    predicted: Mapping[tuple[str, ...], float] = solution.time.sent
    beyond = sum(max(0.0, s - predicted.get(axes, 0.0)) for axes, s in compiled.items())
    return solution.time.total + beyond


def _blamed(row: ProofRound) -> list[tuple[str, str]]:
    """List (role, mesh axis) of the classes where the compiler sends more, the likeliest first."""
    solution = row.solution
    equations, roles = solution.step._equations, solution.step._roles.of
    votes: Counter[tuple[str, str]] = Counter()
    excess = {
        (sent.line, sent.axes): sent.compiled - sent.predicted
        for sent in row.lines
        if sent.compiled > sent.predicted
    }
    for operation, _ in equations.everything():
        line = operation.line
        for (of_line, axes), size in excess.items():
            if of_line != line:
                continue
            for number in {n for n in (*operation.inputs, *operation.outputs) if n is not None}:
                dims = zip(
                    equations.values[number].dims, solution.spread.target(number), strict=True
                )
                for dim, names in dims:
                    for role in {roles.get(c, "") for c in equations.dims.classes(dim)} - {""}:
                        votes.update({(role, axis): size for axis in names if axis in axes})
    return [pair for pair, _ in votes.most_common()]
