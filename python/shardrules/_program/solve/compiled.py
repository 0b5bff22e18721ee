"""Asks the compiler about the layouts of a shortlist: what each sends, needs and takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.text import bytes_shown, mesh_shown, record, seconds_shown
from shardrules._place.mesh import as_mesh, axes_of_type, has_devices
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._plan.tables import Column, Table
from shardrules._program.collectives import exchanges
from shardrules._program.compiler import asked_compiler, has_child, results_in_order
from shardrules._program.hlo import hlo_errors
from shardrules._program.lowering import lowering_on
from shardrules._program.program import Program, inspect
from shardrules._program.refusal import Refusal
from shardrules._program.solve.activations import constrained_step, spec_of_cuts
from shardrules._program.solve.machine import OVERLAPPED, Network
from shardrules._program.solve.price import Price
from shardrules._program.solve.transmissions import merged
from shardrules._program.step_seconds import kernel_flops
from shardrules._program.topologies.topology import Topology
from shardrules._program.work import product_nodes

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from shardrules._program.compiler import AskedCompiler
    from shardrules._program.solve.shortlist import Contender
    from shardrules._program.solve.space import Cost, Space
    from shardrules._program.step.step import Step

_DIGITS: Final = 3


@record
class StepCost(NamedTuple):
    """What a step costs on a device."""

    seconds: float
    """Of products at the hardware's rate, and collectives over its links."""
    sent: dict[tuple[str, ...], int]
    """Bytes that it sends in a step, by mesh axes."""
    memory: int
    """Bytes that it needs."""

    @property
    def sent_in_all(self) -> int:
        """Bytes that it sends in a step over all axes."""
        return sum(self.sent.values())


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


class Compiled(NamedTuple):
    """A layout of the shortlist with what the compiler makes of it."""

    entry: Contender
    cost: Cost
    row: Candidate
    program: Program | None
    needed: int = 0
    """Bytes of memory of a layout that does not fit."""

    def rank(self) -> tuple[Any, ...]:
        """Least time first; of about the same, least bytes and memory."""
        costs = self.row.compiled or self.row.predicted
        seconds = float(f"{costs.seconds:.{_DIGITS}g}")
        return bool(self.row.refusal), seconds, costs.sent_in_all, costs.memory


def predicted(entry: Contender) -> Compiled:
    """Return what a layout costs by prediction."""
    space = entry.case.search.space
    cost = space.cost(entry.assignment)
    sent: Counter[tuple[str, ...]] = Counter()
    for row in cost.spread.sent:
        payload = row.payload * row.trips
        for one in merged([(row.kind, row.axes, "activations", row.trips, payload)], space.sizes):
            sent[one.axes] += space.machine.sent(one)
    memory = entry.case.search.resident.least(entry.assignment)
    costs = StepCost(cost.time.total, dict(sent), memory)
    return Compiled(entry, cost, Candidate(entry.what, entry.case.sizes, costs, None, ""), None)


def has_compiler(entries: Sequence[Contender], on: Any) -> bool:
    """Say whether a child can compile for the devices: a mesh without any says of none."""
    mesh = _mesh_of(entries[0], on)
    return mesh is not None and has_child(mesh) and not axes_of_type(mesh, "Explicit")


def _mesh_of(entry: Contender, on: Any) -> Mesh | None:
    mesh = as_mesh(entry.case.mesh)
    if has_devices(mesh):
        return mesh
    return on.mesh(entry.case.sizes) if isinstance(on, Topology) else None


def compiled(entries: Iterable[Contender], on: Any) -> Iterator[Compiled]:
    """Return the layouts with what the compiler makes of each; two are compiled at once."""
    return results_in_order(
        entries, lambda entry: _asked(entry, on), _read, lambda asked: asked.compiler.close()
    )


class _Asked(NamedTuple):
    """A layout that is compiled now."""

    row: Compiled
    mesh: Mesh
    lowered: Any
    compiler: AskedCompiler


def _asked(entry: Contender, on: Any) -> _Asked:
    """Start the compiler of a layout."""
    row, mesh, step = predicted(entry), _mesh_of(entry, on), entry.case.search.space.step
    assert mesh is not None
    function = constrained_step(step, row.cost.spread, mesh)
    lowered = lowering_on(mesh, function, tuple(_arguments(step, row.cost, mesh))).lowered
    compiler = asked_compiler(lowered, mesh)
    if compiler is None:
        raise RuntimeError("this version of JAX hides what its compiler is to be asked")
    return _Asked(row, mesh, lowered, compiler)


def _read(asked: _Asked) -> Compiled:
    """Return a layout with the compiler's answer."""
    row, mesh, lowered, compiler = asked
    space = row.entry.case.search.space
    try:
        answer = compiler.answer()
    except (RuntimeError, TimeoutError) as error:
        refusal = str(error).partition("\n")[0].partition(". ")[0]
        return row._replace(row=row.row._replace(refusal=refusal))
    if isinstance(answer, Refusal):
        refused = row.row._replace(refusal=_too_much(answer.required, space.hbm))
        return row._replace(row=refused, needed=answer.required)
    program = inspect(answer.program(lowered, mesh), _planned(space.step, row.cost, mesh))
    peak = answer.peak
    costs = _costs(space, row.cost, program, peak)
    needed = peak if peak > space.hbm else 0
    refusal = _too_much(peak, space.hbm) if needed else ""
    known = row.row._replace(compiled=costs, refusal=refusal)
    return row._replace(row=known, program=program, needed=needed)


def _too_much(required: int, available: int) -> str:
    return f"it needs {bytes_shown(required)} of {bytes_shown(available)}"


def _costs(space: Space, cost: Cost, program: Program, peak: int) -> StepCost:
    """Return what a program costs, by the rules with which a layout is predicted."""
    machine, equations = space.machine, space.step._equations
    flops = sum(
        operation.flops * trips / cost.spread.share(operation)
        for operation, trips in equations.operations(on_device=True)
    )
    executable, hlo = program._executable, program._executable.hlo
    assert hlo is not None
    with hlo_errors():
        done = sum(size for _, size in product_nodes(executable.values)) + kernel_flops(hlo)
        rows = list(exchanges(hlo, program.axis_sizes))
    # Elementwise arithmetic, and reading and writing, is taken from the prediction.
    busy = cost.time.compute * (done / flops if done and flops else 1.0) + cost.time.memory
    network = Network(machine, space.sizes)
    sent: Counter[tuple[str, ...]] = Counter()
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for row in rows:
        axes = tuple(axis for axis in space.sizes if axis in row.axes)
        if axes:
            size = row.sent_once * (1 if row.times is None else row.times)
            sent[axes] += size
            seconds[axes] += network.sending(row.kind, axes, size)
    # What is sent beyond the gathers and sums of weights that are predicted, products wait for.
    hidden: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for one in Price(space.step, cost.spread).collectives():
        if one.of in OVERLAPPED:
            hidden[one.axes] += network.seconds(one)
    meanwhile = sum(min(total, hidden[axes]) for axes, total in seconds.items())
    alone = sum(seconds.values()) - meanwhile
    return StepCost(machine.total(busy, meanwhile, alone), dict(sent), peak)


def specs_of(step: Step, cost: Cost) -> dict[str, PartitionSpec]:
    """Return the spec of each argument by its path."""
    numbers = zip(step._paths, step._equations.body.inputs, strict=True)
    return {path: spec_of_cuts(cost.spread.target(number)) for path, number in numbers}


def _arguments(step: Step, cost: Cost, mesh: Mesh) -> Iterator[Any]:
    """Yield the step's arguments as shapes on the mesh."""
    specs = specs_of(step, cost)
    for arg, rows in zip(step._args, step._ranges, strict=True):
        tree = arg.abstract() if isinstance(arg, Plan) else arg
        leaves = tree_util.tree_leaves(tree)
        structure: Any = tree_util.tree_structure(tree)
        shardings = (NamedSharding(mesh, specs[step._paths[row]]) for row in rows)
        shapes = (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )
        yield structure.unflatten(shapes)


def plan_of(step: Step, cost: Cost, mesh: Any) -> Plan:
    """Return the plan of the parameters."""
    specs, place = specs_of(step, cost), step._place
    tree = step._args[place]
    tree = tree.abstract() if isinstance(tree, Plan) else tree
    structure: Any = tree_util.tree_structure(tree)
    rows = [specs[step._paths[row]] for row in step._ranges[place]]
    return plan(tree, structure.unflatten(rows), mesh)


def _planned(step: Step, cost: Cost, mesh: Mesh) -> tuple[Plan | None, ...]:
    return tuple(
        plan_of(step, cost, mesh) if place == step._place else None
        for place in range(len(step._args))
    )


_COLUMNS: Final = (
    Column("layout", is_elided=True),
    Column("mesh"),
    *(Column(name, is_right=True) for name in ("time", "predicted", "sent", "predicted")),
    *(Column(name, is_right=True) for name in ("memory", "predicted")),
    Column("", is_optional=True),
)


def table_of_candidates(rows: Sequence[Candidate]) -> Table:
    """Return a table of what each costs as compiled, beside the prediction."""
    cells = []
    for row in rows:
        texts = [row.what, mesh_shown(row.mesh)]
        for show, name in ((seconds_shown, "seconds"), (bytes_shown, "sent_in_all"),
                           (bytes_shown, "memory")):  # fmt: skip
            texts.append("" if row.compiled is None else show(getattr(row.compiled, name)))
            texts.append(show(getattr(row.predicted, name)))
        cells.append([*texts, row.refusal])
    return Table(_COLUMNS, cells)


def sent_lines(row: Candidate) -> Iterator[str]:
    """Yield a line for the bytes over each of the mesh axes."""
    compiled: Mapping[tuple[str, ...], int] = {} if row.compiled is None else row.compiled.sent
    for axes in sorted({*row.predicted.sent, *compiled}):
        both = [bytes_shown(sent.get(axes, 0)) for sent in (compiled, row.predicted.sent)]
        yield f"sent over {','.join(axes)}: {both[0]}, predicted {both[1]}"
