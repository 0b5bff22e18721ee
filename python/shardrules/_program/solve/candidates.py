"""The layouts of a step that may be the best, and what the compiler says of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.text import bytes_shown, mesh_shown, record, seconds_shown
from shardrules._place.mesh import as_mesh, axes_of_type, has_devices
from shardrules._plan.answers import Column, Table
from shardrules._plan.planning import plan
from shardrules._program.compiler import has_child
from shardrules._program.hlo import hlo_errors
from shardrules._program.memory import OutOfMemory
from shardrules._program.program import Program
from shardrules._program.solve.constraints import constrained_step, spec_of_cuts
from shardrules._program.solve.space import STORED
from shardrules._program.solve.spread import Seconds, Spread
from shardrules._program.verify.prove import AskedProof, asked_in_order
from shardrules._program.work import flops_of_kernels, product_nodes

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from shardrules._plan.plan import Plan
    from shardrules._program.solve.search import Search
    from shardrules._program.solve.space import Assignment
    from shardrules._program.step.step import Step
    from shardrules._program.topologies.topology import Topology

MOST: Final = 10
"""Layouts that are compiled."""
# Predicted seconds that are so many times those of the best are not mispredicted alone.
_FAR: Final = 1.5
# Digits to which costs are compared: of predictions, and as compiled.
_DIGITS: Final = 4
_COMPILED_DIGITS: Final = 3


@record
class StepCost(NamedTuple):
    """What a step costs on a device."""

    seconds: float
    """Of products at the hardware's rate, and collectives over its links."""
    sent: dict[tuple[str, ...], int]
    """Bytes that it sends in a step, by mesh axes."""
    memory: int
    """Bytes that it needs."""


@record
class Candidate(NamedTuple):
    """A layout of a step, as predicted and as compiled: a row of `Solution.candidates`."""

    what: str
    """Why it is one: such as "FSDP", or a choice in which it differs from the best."""
    mesh: dict[str, int]
    predicted: StepCost
    compiled: StepCost | None
    """None if the compiler was not asked, or does not say."""
    refusal: str
    """Why it is no answer: the memory that it needs, or what the compiler says; "" otherwise."""


@dataclass
class Contender:
    """A layout that may be the best, and what the compiler says of it."""

    what: str
    search: Search
    assignment: Assignment
    compiled: StepCost | None = None
    refusal: str = ""
    needed: int = 0
    """Bytes of memory, if they are too many."""
    program: Program | None = None

    @cached_property
    def seconds(self) -> Seconds:
        """By prediction."""
        return self.search.terms.total(self.assignment)

    @cached_property
    def memory(self) -> int:
        """Bytes that a device needs by prediction."""
        return self.search.resident.bytes(self.assignment)

    @cached_property
    def spread(self) -> Spread:
        """What is sent by prediction."""
        return Spread(self.search.space, self.assignment).of_step()

    @cached_property
    def predicted(self) -> StepCost:
        """What a step costs by prediction."""
        machine = self.search.machine
        sent: Counter[tuple[str, ...]] = Counter()
        for row in self.spread.sent:
            sent[row.axes] += row.trips * round(machine.sent(row.kind, row.axes, row.payload))
        return StepCost(self.seconds.total, dict(sent), self.memory)

    @property
    def row(self) -> Candidate:
        """The layout as users see it."""
        mesh = self.search.machine.sizes
        return Candidate(self.what, mesh, self.predicted, self.compiled, self.refusal)

    def rank(self) -> tuple[Any, ...]:
        """Least time first; of about the same, least bytes and memory."""
        costs = self.compiled or self.predicted
        seconds = float(f"{costs.seconds:.{_COMPILED_DIGITS}g}")
        return bool(self.refusal), seconds, sum(costs.sent.values()), costs.memory

    def key(self) -> tuple[Any, ...]:
        """Return what layouts share that cost the same: most are the same program.

        XLA tells meshes apart whose axes have changed places.
        """
        costs = self.seconds.total, self.memory
        return *self.search.space.sizes.values(), *(f"{cost:.{_DIGITS}g}" for cost in costs)


def shortlist(best: Search, searches: Sequence[Search]) -> list[Contender]:
    """List the layouts of least predicted time that may fit, the best first.

    FSDP, the layout of the program and the best of each other mesh are tried before those that
    differ from the best in one choice. Of layouts that cost the same there is one, such as those
    along the one or the other of two axes.
    """
    assert best.assignment is not None
    first = Contender("the best by prediction", best, best.assignment)
    fsdp = [Contender("FSDP", search, search.space.fsdp()) for search in searches]
    mesh = best.space.step.mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    program_search = next((row for row in searches if row.machine.sizes == sizes), best)
    others = [
        Contender(f"the best on {mesh_shown(row.machine.sizes)}", row, row.assignment)
        for row in searches
        if row is not best and row.assignment is not None
    ]
    others = [*_fastest(others), *_fastest(neighbours(first))]
    rows = [
        first,
        *_fastest(fsdp)[:1],
        Contender("as in the program", program_search, program_search.space.of_program()),
        *(row for row in others if row.seconds.total <= first.seconds.total * _FAR),
    ]
    by_cost: dict[Any, Contender] = {}
    for row in rows:
        if row is first or not row.search.missing_bytes(row.assignment):
            by_cost.setdefault(row.key(), row)
    return list(by_cost.values())[:MOST]


def _fastest(rows: Iterable[Contender]) -> list[Contender]:
    """Sort layouts; those alike, such as along one or the other of two axes, stay in order."""
    return sorted(rows, key=lambda row: float(f"{row.seconds.total:.{_DIGITS}g}"))


def neighbours(layout: Contender) -> Iterator[Contender]:
    """Yield the layouts that differ from one in one choice."""
    space = layout.search.space
    for name, values in space.values.items():
        what = "storage" if name == STORED else space.shown(name)
        for value in values:
            if value != layout.assignment[name]:
                text = f"{what}: {','.join(value) or 'whole'}"
                yield Contender(text, layout.search, {**layout.assignment, name: value})


def table_of_candidates(rows: Sequence[Candidate]) -> Table:
    """Return a table of what each costs: as compiled, beside the prediction, if there is that."""
    is_compiled = any(row.compiled for row in rows)
    heads = [(name, "predicted")[: 1 + is_compiled] for name in ("time", "sent", "memory")]
    cells = []
    for row in rows:
        costs = ([row.compiled] if is_compiled else []) + [row.predicted]
        columns = zip(*map(_shown, costs), strict=True)
        cells.append([row.what, mesh_shown(row.mesh), *chain(*columns), row.refusal])
    numbers = (Column(head, is_right=True) for head in chain(*heads))
    return Table([Column("layout"), Column("mesh"), *numbers, Column("")], cells)


def _shown(costs: StepCost | None) -> tuple[str, str, str]:
    """Return seconds, what is sent in all, and memory."""
    if costs is None:
        return "", "", ""
    sent = bytes_shown(sum(costs.sent.values()))
    return seconds_shown(costs.seconds), sent, bytes_shown(costs.memory)


def mesh_to_compile(row: Contender, topology: Topology | None) -> Mesh | None:
    """Return the devices for which a child can compile a layout; None if there are none."""
    mesh = as_mesh(row.search.mesh)
    if not has_devices(mesh):
        if topology is None:
            return None
        mesh = topology.mesh(dict(mesh.shape))
    return mesh if has_child(mesh) and not axes_of_type(mesh, "Explicit") else None


def compile_each(rows: Iterable[Contender], topology: Topology | None) -> Iterator[Contender]:
    """Yield the layouts with what the compiler makes of each; two are compiled at once."""

    def ask(row: Contender) -> tuple[Contender, AskedProof]:
        mesh, step = mesh_to_compile(row, topology), row.search.space.step
        assert mesh is not None
        specs = specs_of(step, row.spread).values()
        leaves, structure = tree_util.tree_flatten(step._trees)
        placed = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
        args = list(tree_util.tree_unflatten(structure, placed))
        args[step._model_at] = plan_of(step, row.spread, mesh)
        return row, AskedProof(constrained_step(step, row.spread, mesh), tuple(args), on=mesh)

    for row, proof in asked_in_order(rows, ask):
        assert proof is not None
        yield _with_answer(row, proof)


def _with_answer(row: Contender, proof: AskedProof) -> Contender:
    """Return a layout with the compiler's answer."""
    try:
        row.program, memory = (answer := proof.proof()).program, answer.memory
        assert memory is not None
        needed, row.compiled = memory.peak, _costs(row, row.program, memory.peak)
    except OutOfMemory as refusal:
        needed = refusal.required
    except (RuntimeError, TimeoutError) as error:
        row.refusal = str(error).partition("\n")[0].partition(". ")[0]
        return row
    hbm = row.search.hbm
    if needed > hbm or row.compiled is None:
        row.needed, row.refusal = needed, f"it needs {bytes_shown(needed)} of {bytes_shown(hbm)}"
    return row


def _costs(layout: Contender, program: Program, peak: int) -> StepCost:
    """Return what a program costs, by the rules with which a layout is predicted."""
    space, machine, spread = layout.search.space, layout.search.machine, layout.spread
    flops = sum(
        operation.flops * trips / spread.share(operation)
        for operation, trips in space.equations.everything()
    )
    executable, hlo = program._executable, program._executable.hlo
    with hlo_errors():
        products = product_nodes(executable.values)
        compiled_flops = sum(size for _, size in products) + flops_of_kernels(hlo)
        rows = list(hlo.exchanges(program.axis_sizes))
    sent: Counter[tuple[str, ...]] = Counter()
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for row in rows:
        axes = tuple(axis for axis in space.sizes if axis in row.axes)
        if axes:
            size = row.sent_once * (1 if row.times is None else row.times)
            sent[axes] += size
            seconds[axes] += machine.seconds(row.kind, axes, size)
    # What is sent beyond the gathers and sums of weights that are predicted, products wait for.
    most_hidden = defaultdict[tuple[str, ...], float](float)
    for predicted in spread.sent:
        most_hidden[predicted.axes] += machine.sending(space, [predicted]).meanwhile
    meanwhile = sum(min(total, most_hidden[axes]) for axes, total in seconds.items())
    # Elementwise arithmetic, and reading and writing, is taken from the prediction.
    ratio = compiled_flops / flops if compiled_flops and flops else 1.0
    alone = sum(seconds.values()) - meanwhile
    total = Seconds(ratio * layout.seconds.compute, layout.seconds.memory, meanwhile, alone).total
    return StepCost(total, dict(sent), peak)


def specs_of(step: Step, spread: Spread) -> dict[str, PartitionSpec]:
    """Return the spec of each argument by its path."""
    numbers = zip(step._paths, step._equations.body.inputs, strict=True)
    return {path: spec_of_cuts(spread.target(number)) for path, number in numbers}


def plan_of(step: Step, spread: Spread, mesh: Any) -> Plan:
    """Return the plan of the parameters."""
    specs, tree = list(specs_of(step, spread).values()), step._trees[step._model_at]
    rows = [specs[row] for row in step._ranges[step._model_at]]
    structure = tree_util.tree_structure(tree)
    return plan(tree, tree_util.tree_unflatten(structure, rows), mesh)
