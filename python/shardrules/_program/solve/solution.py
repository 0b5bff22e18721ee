"""`solve`: the sharding of a step that takes least time, and `Solution`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from shardrules._base.arguments import check_type, memory_bytes
from shardrules._base.rule_specs import plain_spec
from shardrules._base.specs import Entries, entries_of, entry_axes, spec_shown, trimmed
from shardrules._base.text import (
    and_more,
    answer,
    brief,
    bytes_shown,
    counted,
    mesh_shown,
    printable_lines,
    record,
    seconds_shown,
)
from shardrules._place.mesh import as_mesh, has_devices, in_force
from shardrules._plan.answers import Section, Table
from shardrules._plan.findings import Declared
from shardrules._plan.kinds import axes_named
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan as plan_by_rules
from shardrules._plan.report import Page
from shardrules._plan.suggest.draft import Draft, draft_of_specs
from shardrules._plan.suggest.patterns import units_of
from shardrules._plan.suggest.suggest import Suggestion, rule_reasons
from shardrules._program.solve.candidates import (
    Candidate,
    Contender,
    StepCost,
    compile_each,
    mesh_to_compile,
    plan_of,
    shortlist,
    specs_of,
    table_of_candidates,
)
from shardrules._program.solve.constraints import Activation, activations, constrained_step
from shardrules._program.solve.search import Search, Show, best_of, missing_solver
from shardrules._program.solve.space import STORED
from shardrules._program.step.equations import inputs_of
from shardrules._program.step.step import Step
from shardrules._program.topologies.topology import Topology, hardware_on, topology_of
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from jax.sharding import Mesh, PartitionSpec

    from shardrules._base.hardware import Hardware
    from shardrules._program.program import Program
    from shardrules._program.step.step import ClassRole

_AXES: Final = ("fsdp", "tp")
_MESHES_SHOWN: Final = 4


@answer
@dataclass(frozen=True)
class Solution:
    """The sharding of a step that takes least time of those that fit; `solve` makes it."""

    step: Step
    mesh: Any
    """The mesh, as `plan` takes it: that of `solve`, or the best of the topology."""
    plan: Plan
    """Of the parameters: those of `Step.plan`, or else the first argument."""
    specs: dict[str, PartitionSpec]
    """By path, such as "inputs/0/embed", the spec of each argument."""
    choices: tuple[ClassChoice, ...]
    candidates: tuple[Candidate, ...]
    """The layouts of the shortlist, the best first, which is this one: as compiled, or without a
    compiler as predicted."""
    program: Program | None
    """What the compiler makes of it; None if it was not asked."""
    bound: float
    """Seconds: no choice in the space is predicted to take less."""
    left_out: tuple[dict[str, int], ...]
    """Meshes that have all devices and were not tried: they split a dimension of the topology."""
    _layout: Contender
    """This layout: cuts of all arrays of the step, and what is sent."""

    @property
    def compiled(self) -> StepCost | None:
        """What a step costs as the compiler has it; None if it was not asked."""
        return self.candidates[0].compiled

    @property
    def seconds(self) -> float:
        """Seconds of a step, as compiled; without a compiler, as predicted."""
        return (self.compiled or self.candidates[0].predicted).seconds

    @property
    def memory(self) -> int:
        """Bytes that a device needs, as compiled; without a compiler, as predicted."""
        return (self.compiled or self.candidates[0].predicted).memory

    @property
    def gap(self) -> float:
        """The part of the predicted time by which a better choice may be faster; 0 without one."""
        least = min(row.predicted.seconds for row in self.candidates if not row.refusal)
        return max(0.0, 1 - self.bound / least) if least else 0.0

    @property
    def summary(self) -> str:
        """Time, memory, bound and gap, in a line."""
        gap = "none takes less" if self.gap == 0 else f"at most {self.gap:.1%} from the best"
        if self.gap and (missing := missing_solver()):
            gap += f"; {missing}, which proves more"
        costs, note = self.candidates[0].predicted, ""
        shares = self._layout.search.machine.shares_links
        links = " whose axes are taken to share the links evenly," if shares else ""
        if self.compiled is not None:
            note = f"as compiled, the best of {counted(len(self.candidates), 'layout')}; "
            note += f"predicted {seconds_shown(costs.seconds)}, {bytes_shown(costs.memory)}; "
            costs = self.compiled
        return (
            f"{seconds_shown(costs.seconds)} a step on {mesh_shown(self.plan.axis_sizes)},{links} "
            f"{bytes_shown(costs.memory)} on each device; {note}bound {seconds_shown(self.bound)} "
            f"for layouts that shard each class of dimensions alike: {gap}"
        )

    def _section(self, page: Page) -> Section:
        return Section("Solution", (self,))

    def _parts(self) -> list[Table | str]:
        """Return summary, choices, candidates, and the meshes that were not tried."""
        lines = printable_lines([self.summary, *map(str, self.choices)])
        parts: list[Table | str] = [lines, table_of_candidates(self.candidates)]
        if self.left_out:
            meshes = [mesh_shown(mesh) for mesh in self.left_out[:_MESHES_SHOWN]]
            meshes += and_more(len(self.left_out), _MESHES_SHOWN, "mesh")
            parts.append(f"not tried, as they split a dimension of the slice: {'; '.join(meshes)}")
        return parts

    @property
    def rules(self) -> Rules:
        """Rules that give each parameter its spec, 12 at most where specs are no more.

        They are in the words of the paths, for arrays with logical axis names as well. What is
        whole has one rule.

        Raises:
            ValueError: No rules of the dialect tell the paths apart.
        """
        return self._suggestion.rules

    @cached_property
    def _suggestion(self) -> Suggestion:
        """The parameters planned by the rules, each with its leaves."""
        return suggestion_of(self.step, self.specs, self.mesh)

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """The arrays between the parameters that the solution shards, line by line.

        Each is printed as the line that shards it: XLA keeps to it, also in the backward pass.
        """
        return activations(self.step, self._layout.spread)

    @contextmanager
    def constraints(self, mesh: Mesh | None = None) -> Iterator[Callable[..., Any]]:
        """Return a context that gives the step with the constraints in it, jitted.

        The step is the traced one, with a constraint at each operation of `activations` and its
        gradient, also inside of `lax.scan`, branches and `jax.checkpoint`: code that cannot be
        edited stays as it is. Code in `shard_map` and kernels keep their specs. Values are those of
        the step, but for the order of sums. In the context the mesh is in force.

        Args:
            mesh: The devices, with the axes of the solution's mesh. Default: the solution's own.

        Raises:
            ValueError: There are no devices, the mesh has other axes, or Explicit ones.
        """
        solved = as_mesh(self.mesh)
        devices: Any = solved if mesh is None else mesh
        if not has_devices(devices) or devices.shape != solved.shape:
            none = "" if has_devices(devices) else " of no devices"
            raise ValueError(
                f"mesh: it is {mesh_shown(devices.shape)}{none}, and the solution is for "
                f"{mesh_shown(solved.shape)}: give a mesh of devices, such as "
                f"jax.make_mesh({tuple(solved.shape.values())}, {tuple(solved.shape)})"
            )
        with in_force(devices):
            yield constrained_step(self.step, self._layout.spread, devices)


def solve(
    step: Step,
    on: Any = None,
    *,
    hardware: Hardware | str | None = None,
    hbm: float | str | None = None,
) -> Solution:
    """Find the sharding of a step that takes least time of those that fit.

    An interrupt ends the search, with the best that it has, and its gap.

    Args:
        step: What `trace` read.
        on: The mesh, or a `Topology`, of which the best mesh is chosen; `Topology.mesh` makes one
            that has its links. Default: the step's mesh.
        hardware: The devices: a `Hardware` or its name. Default: that of the topology.
        hbm: Bytes of memory of a device. Default: that of the hardware.

    Returns:
        A `Solution`.

    Raises:
        TypeError: There is no hardware, or the step is none.
        ValueError: Nothing that fits was found.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"up": jax.ShapeDtypeStruct((512, 2048), "bfloat16")}
        >>> x = jax.ShapeDtypeStruct((8, 512), "bfloat16")
        >>> step = sr.trace(lambda params, x: x @ params["up"], tree, x)
        >>> solution = sr.solve(step, {"tp": 4}, hardware="v5p")
        >>> [*solution.specs["inputs/0/up"]], solution.gap
        ([None, 'tp'], 0.0)
    """
    return solved(step, on, hardware, hbm, show=lambda text: None)


def solved(
    step: Step, on: Any, hardware: Hardware | str | None, hbm: float | str | None, *, show: Show
) -> Solution:
    """Solve a step, and show after each mesh and layout how far it is."""
    check_type("step", step, Step, "a Step, as shardrules.trace gives one")
    if not step._paths:
        raise ValueError(f"{step.name}: it was traced without arrays among its arguments")
    if on is None and step.mesh is None:
        raise TypeError("on: the step was traced without a mesh; give one, or a Topology")
    on = step.mesh if on is None else on
    mesh = step.mesh if isinstance(on, Topology) else as_mesh(on, "on")
    axes = _AXES if mesh is None else tuple(mesh.shape)
    topology = on if isinstance(on, Topology) else topology_of(on)
    hardware = hardware_on(topology, hardware)
    room = hardware.memory_bytes if hbm is None else memory_bytes("hbm", hbm)
    meshes, left_out = on._whole_and_split(axes) if isinstance(on, Topology) else ([on], [])

    # Of those alike the first is the answer: that with most devices along the first axes.
    searches = [Search(step, row, hardware, room, topology) for row in reversed(meshes)]
    best, bound = best_of(searches, show)
    rows = _compiled_shortlist(best, searches, topology, show)
    refused = [row for row in rows if row.needed]
    if rows[0].refusal and refused:  # predictions are so much too low
        for search in searches:
            search.hbm = round(room * refused[0].memory / refused[0].needed)
        with suppress(ValueError):
            rows += _compiled_shortlist(best_of(searches, show)[0], searches, topology, show)
            rows.sort(key=Contender.rank)
    answer = rows[0]
    if answer.refusal:
        raise _refused(rows)
    return Solution(
        step=step,
        mesh=answer.search.mesh,
        plan=plan_of(step, answer.spread, answer.search.mesh),
        specs=specs_of(step, answer.spread),
        choices=tuple(_class_choices(answer)),
        candidates=tuple(row.row for row in rows),
        program=answer.program,
        bound=bound,
        left_out=tuple(left_out),
        _layout=answer,
    )


def _compiled_shortlist(
    best: Search, searches: Sequence[Search], topology: Topology | None, show: Show
) -> list[Contender]:
    """Return the layouts of the shortlist, the best first: as compiled, if a compiler is there."""
    entries = shortlist(best, searches)
    if mesh_to_compile(entries[0], topology) is None:
        return entries
    rows: list[Contender] = []
    with suppress(KeyboardInterrupt):  # then those count that are known
        for row in compile_each(entries, topology):
            rows.append(row)
            show(f"layout {len(rows)} of {len(entries)} compiled: {row.what}")
    return sorted(rows, key=Contender.rank) or entries[:1]


def _refused(rows: list[Contender]) -> ValueError:
    """Return the error that the compiler has no layout that fits."""
    lines = [
        f"{rows[0].search.space.step.name}: nothing fits: the compiler refuses all of the "
        f"{counted(len(rows), 'layout')} that are predicted to fit and to take least time",
        *(f"  {r.what} on {mesh_shown(r.search.machine.sizes)}: {r.refusal}" for r in rows),
    ]
    return ValueError(printable_lines(lines))


@record
class ClassChoice(NamedTuple):
    """Mesh axes of a class of dimensions; a row of `Solution.choices`."""

    role: ClassRole | Literal["stored"]
    """What the step does with them; "" if nothing tells. "stored" is no class: the mesh axes that
    cut weights while no operation uses them, as in FSDP."""
    size: int
    arrays: tuple[tuple[str, int], ...]
    """(path, dimension) of each argument that has them."""
    axes: tuple[str, ...]

    def __str__(self) -> str:
        axes = ",".join(self.axes)
        if self.role == "stored" and axes:
            return f"parameters are stored over {axes} and gathered where used"
        if self.role == "stored":
            return "parameters are stored as they are used"
        return f"{self.role or 'no role'} {self.size:,}: {axes or 'whole'}"


def _class_choices(layout: Contender) -> Iterator[ClassChoice]:
    """Yield the choice of each variable that arguments have, or that is cut."""
    space, assignment = layout.search.space, layout.assignment
    step = space.step
    for name in space.values:
        if name == STORED or name in step._arrays_of or assignment[name]:
            yield ClassChoice(
                "stored" if name == STORED else step._roles.of.get(name, ""),
                0 if name == STORED else step._equations.dims.sizes[name],
                tuple(step._arrays_of.get(name, ())),
                assignment[name],
            )


def suggestion_of(step: Step, specs: Mapping[str, PartitionSpec], mesh: Any) -> Suggestion:
    """Plan the parameters by rules that give them their specs, in the dialect of the step's."""
    from jax.tree_util import tree_leaves

    planned, tree = step.plan, step._trees[step._model_at]
    if planned is not None and isinstance(planned.rules, Rules):  # its leaves have the user's order
        bare = planned.with_rules(Rules((), planned.rules.dialect)).on_mesh(mesh)
    else:
        bare = plan_by_rules(tree, Rules(()), mesh)
    leaves = inputs_of(tree, step._function, tree_leaves(bare._leaves.tree))
    rows = zip(leaves, step._ranges[step._model_at], strict=True)
    spec_of = {bare.paths[leaf]: _entries(specs[step._paths[row]]) for leaf, row in rows}
    result, draft = with_specs(bare, spec_of)
    used = frozenset().union(*(axes_named(kind.spec) for kind in result.kinds))
    replicated = [str(pattern) for pattern, value in result.rules if plain_spec(value) == Entries()]
    unused = tuple(axis for axis in result.axis_sizes if axis not in used)
    declared = Declared(replicated=tuple(replicated), data_axes=unused)
    reasons = (row._replace(is_understood=True, assumed_head=None) for row in rule_reasons(draft))
    return Suggestion(result._declaring(declared), tuple(reasons), declared)


def _entries(spec: Any) -> Entries:
    """Return the entries of a spec, those of one axis bare, without the last that are None."""
    return Entries(trimmed(() if spec is None else entries_of(spec)))


def with_specs(plan: Plan, specs: Mapping[str, Entries]) -> tuple[Plan, Draft]:
    """Plan the leaves of a plan by rules that give each of them its spec, by its path.

    Of rules of paths the dialect counts.

    Raises:
        ValueError: No rules of the dialect can say it; the message names a leaf.
    """
    assert isinstance(plan.rules, Rules)
    dialect = plan.rules.dialect
    bare = plan.with_rules(Rules((), replace(dialect, unmatched="error")))
    units = units_of(bare)
    draft = draft_of_specs(units, specs, dialect)
    result = bare.with_rules(draft.rules)
    for path, number in zip(result.paths, result.kind_of.tolist(), strict=True):
        spec = _entries(result.kinds[number].spec)
        if [*map(entry_axes, spec)] != [*map(entry_axes, specs[path])]:
            raise ValueError(
                f"{brief(path)}: rules of the dialect {dialect.name} cannot give it "
                f"{spec_shown(specs[path])}: rename it, or choose another dialect"
            )
    return result, draft
