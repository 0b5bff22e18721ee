"""What users take from a solution: rules, lines of constraints, the step with them, a proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.specs import entries_of, entry_axes
from shardrules._base.text import bytes_shown, mesh_shown, seconds_shown
from shardrules._place.mesh import as_mesh, context_mesh, has_devices, in_force
from shardrules._place.named_arrays import leaf_paths
from shardrules._plan.plan import Plan
from shardrules._program.solve.activations import Activation, activations, constrained_step
from shardrules._program.solve.rules import with_cuts
from shardrules._program.solve.tables import has_solver
from shardrules._program.topologies.topology import Topology
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax.sharding import Mesh, PartitionSpec

    from shardrules._place.mesh import AnyMesh
    from shardrules._program.buffers import Memory
    from shardrules._program.solve.machine import Machine, StepTime
    from shardrules._program.solve.spread import LaidSpread
    from shardrules._program.step.step import Step

_HEADS: Final = frozenset(["heads", "KV heads", "query heads of a KV head"])


class Outcome:
    """What users take from a solution."""

    step: Step
    mesh: Any
    on: Any
    specs: dict[str, PartitionSpec]
    plan: Plan
    time: StepTime
    memory: Memory
    spread: LaidSpread
    bound: float
    machine: Machine
    again: partial[Any]

    @property
    def gap(self) -> float:
        """The part of the time by which a better choice may be faster; 0 if there is none."""
        return max(0.0, 1 - self.bound / self.time.total) if self.time.total else 0.0

    @property
    def summary(self) -> str:
        """Time, memory, bound and gap, in a line."""
        gap = "none takes less" if self.gap == 0 else f"at most {self.gap:.1%} from the best"
        if self.gap and not has_solver():
            gap += "; pip install ortools, which proves more"
        return (
            f"{seconds_shown(self.time.total)} a step on {mesh_shown(self.plan.axis_sizes)}, "
            f"{bytes_shown(self.memory.peak)} on each device; bound {seconds_shown(self.bound)} "
            f"for layouts that shard each class of dimensions alike: {gap}"
        )

    @property
    def rules(self) -> Rules:
        """Rules that give each parameter its spec, 12 at most where specs are no more.

        They are in the words of the paths, for arrays with logical axis names as well. What is
        whole has one rule. Where heads are cut, the rule has the size of a head as its unit, so
        that other meshes do not split them.

        Raises:
            ValueError: No rules of the dialect tell the paths apart.
        """
        rules = self._ruled.rules
        assert isinstance(rules, Rules)
        return rules

    @cached_property
    def _ruled(self) -> Plan:
        """Plan of the parameters by the rules."""
        from jax.tree_util import tree_leaves

        step = self.step
        base, place = step.plan, step._place
        if base is None:
            base = self.plan
        else:
            kind: Any = type(base.rules)
            base = base.with_rules(kind((), base.rules.dialect)).on_mesh(self.mesh)
        prefix = f"inputs/{place}/"
        rows = map(base.paths.__getitem__, tree_leaves(base._leaves.tree))
        tree = (step.plan or self.plan).abstract()
        path_of = dict(zip(leaf_paths(tree), rows, strict=True))
        cuts, heads = {}, {}
        for row in step._ranges[place]:
            number, path = step._equations.body.inputs[row], step._paths[row]
            short = path_of[path.removeprefix(prefix)]
            axes = tuple(map(entry_axes, entries_of(self.specs[path])))
            rank = len(step._equations.values[number].shape)
            cuts[short] = axes + ((),) * (rank - len(axes))
            if units := self._units(number, cuts[short]):
                heads[short] = units
        return with_cuts(base, cuts, heads)

    def _units(self, number: int, cuts: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
        """Return the units of an array whose heads are cut, and none of them inside."""
        equations, roles = self.step._equations, self.step._roles.of
        sizes = equations.dims.sizes
        for dim, (classes, axes) in enumerate(
            zip(map(equations.dims.classes, equations.values[number].dims), cuts, strict=True)
        ):
            heads = [c for c in classes if roles.get(c) in _HEADS]
            behind = [c for c in classes if c not in heads]
            parts = prod(self.spread.sizes.get(axis, 1) for axis in axes)
            if heads and behind and parts > 1 and prod(sizes[c] for c in heads) % parts == 0:
                return (*[1] * dim, prod(sizes[c] for c in behind))
        return ()

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """The arrays between the parameters that the solution shards, line by line.

        Each is printed as the line that shards it: XLA keeps to it, also in the backward pass.
        """
        return activations(self.step, self.spread)

    @property
    def unconstrained(self) -> tuple[str, ...]:
        """What keeps its own specs, or is not looked into: code by device, kernels, by their lines.

        Its arrays stay as the program has them; what is around is sharded for it.
        """
        kept = (
            f"{operation.line}: {operation.name}"
            for operation, _ in self.step._equations.everything()
            if operation.name == "shard_map" or (operation.rule is None and not operation.bodies)
        )
        return tuple(dict.fromkeys(kept))

    @contextmanager
    def constraints(self, mesh: Mesh | None = None) -> Iterator[Callable[..., Any]]:
        """Return a context that gives the step with the constraints in it, jitted.

        The step is the traced one, with a constraint at each operation of `activations` and its
        gradient, also inside of `lax.scan`, branches and `jax.checkpoint`: code that cannot be
        edited stays as it is. Not in what `unconstrained` lists. Values are those of the step, but
        for the order of sums. In the context the mesh is in force.

        Args:
            mesh: The devices, with the axes of the solution's mesh. Default: the solution's own, or
                that of the context.

        Raises:
            ValueError: There are no devices, the mesh has other axes, or Explicit ones.
        """
        devices = self._devices(mesh)
        with in_force(devices):
            yield constrained_step(self.step, self.spread, devices)

    def _devices(self, mesh: Mesh | None) -> Mesh:
        """Return the mesh of devices with the solution's axes."""
        sizes = dict(as_mesh(self.mesh).shape)
        choice: AnyMesh | None = mesh
        if choice is None:
            own = as_mesh(self.mesh)
            choice = own if has_devices(own) else context_mesh()
        if choice is None or not has_devices(choice):
            raise ValueError(
                f"mesh: the solution is for {mesh_shown(sizes)}, of no devices: give a mesh of "
                f"devices, such as jax.make_mesh({tuple(sizes.values())}, {tuple(sizes)}); to "
                "prove it, on=shardrules.Topology('v5p:8x8x8')"
            )
        if dict(choice.shape) != sizes:
            raise ValueError(
                f"mesh: it is {mesh_shown(choice.shape)}, and the solution is for "
                f"{mesh_shown(sizes)}: give a mesh of these axes"
            )
        return choice

    def _target(self, on: Topology | Mesh | None) -> tuple[Any, Mesh]:
        """Return the devices to compile for, and their mesh of the solution's axes."""
        target = self.on if on is None and isinstance(self.on, Topology) else on
        if isinstance(target, Topology):
            return target, target.mesh(dict(as_mesh(self.mesh).shape))
        return target, self._devices(target)
