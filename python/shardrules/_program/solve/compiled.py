"""Asks the compiler about the layouts of a shortlist: what each sends, needs and takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import tree_util
from jax.sharding import NamedSharding

from shardrules._base.text import bytes_shown
from shardrules._place.mesh import as_mesh, axes_of_type, has_devices
from shardrules._plan.planning import plan
from shardrules._program.collectives import exchanges
from shardrules._program.compiler import asked_compiler, has_child, results_in_order
from shardrules._program.hlo import hlo_errors
from shardrules._program.lowering import lowering_on
from shardrules._program.program import Program, inspect
from shardrules._program.refusal import Refusal
from shardrules._program.solve.activations import spec_of_cuts
from shardrules._program.solve.candidates import StepCost
from shardrules._program.solve.price import Price, Seconds
from shardrules._program.solve.rewrite import constrained_step
from shardrules._program.step_seconds import kernel_flops
from shardrules._program.topologies.topology import Topology
from shardrules._program.work import product_nodes

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from shardrules._plan.plan import Plan
    from shardrules._program.compiler import AskedCompiler
    from shardrules._program.solve.candidates import Contender
    from shardrules._program.solve.spread import Spread
    from shardrules._program.step.step import Step


def mesh_to_compile(row: Contender, on: Any) -> Mesh | None:
    """Return the devices for which a child can compile a layout; None if there are none."""
    mesh = as_mesh(row.search.mesh)
    if not has_devices(mesh):
        if not isinstance(on, Topology):
            return None
        mesh = on.mesh(dict(mesh.shape))
    return mesh if has_child(mesh) and not axes_of_type(mesh, "Explicit") else None


def compiled(rows: Iterable[Contender], on: Any) -> Iterator[Contender]:
    """Yield the layouts with what the compiler makes of each; two are compiled at once."""
    return results_in_order(
        rows, lambda row: _asked(row, on), _read, lambda asked: asked.compiler.close()
    )


class _Asked(NamedTuple):
    """A layout that is compiled now."""

    row: Contender
    mesh: Mesh
    compiler: AskedCompiler


def _asked(row: Contender, on: Any) -> _Asked:
    """Start the compiler of a layout."""
    mesh, step = mesh_to_compile(row, on), row.search.space.step
    assert mesh is not None
    function = constrained_step(step, row.spread, mesh)
    lowered = lowering_on(mesh, function, _arguments(step, row.spread, mesh)).lowered
    compiler = asked_compiler(lowered, mesh)
    if compiler is None:
        raise RuntimeError("this version of JAX hides what its compiler is to be asked")
    return _Asked(row, mesh, compiler)


def _read(asked: _Asked) -> Contender:
    """Return a layout with the compiler's answer."""
    row, mesh, compiler = asked
    step, hbm = row.search.space.step, row.search.space.hbm
    try:
        answer = compiler.answer()
    except (RuntimeError, TimeoutError) as error:
        row.refusal = str(error).partition("\n")[0].partition(". ")[0]
        return row
    needed = answer.required if isinstance(answer, Refusal) else answer.peak
    if not isinstance(answer, Refusal):
        own = plan_of(step, row.spread, mesh)
        plans = (own if place == step._place else None for place in range(len(step._args)))
        row.program = inspect(answer.program, tuple(plans))
        row.compiled = _costs(row, row.program, needed)
    if needed > hbm or isinstance(answer, Refusal):
        row.needed, row.refusal = needed, f"it needs {bytes_shown(needed)} of {bytes_shown(hbm)}"
    return row


def _costs(layout: Contender, program: Program, peak: int) -> StepCost:
    """Return what a program costs, by the rules with which a layout is predicted."""
    space, spread = layout.search.space, layout.spread
    flops = sum(
        operation.flops * trips / spread.share(operation)
        for operation, trips in space.step._equations.operations(on_device=True)
    )
    executable, hlo = program._executable, program._executable.hlo
    assert hlo is not None
    with hlo_errors():
        done = sum(size for _, size in product_nodes(executable.values)) + kernel_flops(hlo)
        rows = list(exchanges(hlo, program.axis_sizes))
    sent: Counter[tuple[str, ...]] = Counter()
    seconds: defaultdict[tuple[str, ...], float] = defaultdict(float)
    for row in rows:
        axes = tuple(axis for axis in space.sizes if axis in row.axes)
        if axes:
            size = row.sent_once * (1 if row.times is None else row.times)
            sent[axes] += size
            seconds[axes] += space.machine.seconds(row.kind, axes, size)
    # What is sent beyond the gathers and sums of weights that are predicted, products wait for.
    price, hidden = Price(spread, space.machine), defaultdict[tuple[str, ...], float](float)
    for one in spread.sent:
        hidden[one.axes] += price.sending([one]).meanwhile
    meanwhile = sum(min(total, hidden[axes]) for axes, total in seconds.items())
    # Elementwise arithmetic, and reading and writing, is taken from the prediction.
    computing = layout.seconds.compute * (done / flops if done and flops else 1.0)
    alone = sum(seconds.values()) - meanwhile
    total = Seconds(computing, layout.seconds.memory, meanwhile, alone).total
    return StepCost(total, dict(sent), peak)


def specs_of(step: Step, spread: Spread) -> dict[str, PartitionSpec]:
    """Return the spec of each argument by its path."""
    numbers = zip(step._paths, step._equations.body.inputs, strict=True)
    return {path: spec_of_cuts(spread.target(number)) for path, number in numbers}


def _arguments(step: Step, spread: Spread, mesh: Mesh) -> tuple[Any, ...]:
    """Return the step's arguments as shapes on the mesh."""
    specs = iter(specs_of(step, spread).values())
    return tuple(
        tree_util.tree_map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, next(specs))
            ),
            tree,
        )
        for tree in step._trees
    )


def plan_of(step: Step, spread: Spread, mesh: Any) -> Plan:
    """Return the plan of the parameters."""
    specs, place = list(specs_of(step, spread).values()), step._place
    tree, structure = step._trees[place], tree_util.tree_structure(step._trees[place])
    rows = [specs[row] for row in step._ranges[place]]
    return plan(tree, tree_util.tree_unflatten(structure, rows), mesh)
