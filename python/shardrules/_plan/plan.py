"""`plan`: the spec of every leaf of a tree on a mesh, before any device is touched; and `Plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.arguments import as_tuple, check_items, check_type, strings
from shardrules._base.correction import Correction
from shardrules._base.dtypes import given_dtype
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.rule_specs import MemoryKind, check_memory_kind
from shardrules._base.text import mesh_shown
from shardrules._place.boxes import unboxed
from shardrules._place.decider import (
    ByNames,
    ByPaths,
    BySpecs,
    Decider,
    RulesLike,
    as_decider,
)
from shardrules._place.mesh import AnyMesh, MeshLike, as_mesh, has_devices, resolve_mesh
from shardrules._place.shardings import Decided, check_memory_on_mesh
from shardrules._plan.companions import Companion
from shardrules._plan.findings import NOTHING, Declared
from shardrules._plan.names import check_rules_are_for_paths, plan_by_names, plan_named
from shardrules._plan.resolve import (
    OnMesh,
    SizedMesh,
    by_plan,
    mesh_of_shardings,
    plan_by_rules,
    plan_by_specs,
    plan_leaves,
    sized_mesh,
)
from shardrules._plan.state import (
    Zero1,
    by_parameters,
    find_parameters,
    gradients_of,
    leaves_with_gradients,
)
from shardrules._plan.survey import PlannedLeaves, leaves_in_plan, survey, survey_planned
from shardrules._plan.table import Columns
from shardrules._plan.views import Views
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.diff import PlanDiff
    from shardrules._plan.transfer import Transfer


@in_order("tree", "rules", "mesh")
def plan(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    correction: Correction | None = None,
    companions: Iterable[Companion] = (),
    names: Any = None,
) -> Plan:
    """Plan how each leaf of the tree is sharded on the mesh, and why.

    The specs are those of `named_shardings`. A leaf that gets none is a finding of `Plan.check`,
    and an error only when the specs are asked for. No device is needed, and no array is kept.

    Args:
        tree: Any pytree of arrays or abstract arrays; only `.shape` and `.dtype` are read.
        rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; PartitionSpecs or NamedShardings,
            one for all leaves or a tree of them, as rules for exactly these paths; or another
            `Plan`, which has leaves of the same paths and shapes.
        mesh: A Mesh, AbstractMesh or dict of axis sizes. Default: that of the shardings or the
            other plan, or else of the context.
        correction: For specs: the policies for those that do not fit. Default: `Correction()`.
            Rules have their own.
        companions: Leaves that follow the rules of other paths, such as those of `LORA`,
            `QUANTIZED` or `stacked`. The first that finds a leaf's path counts, and so for the path
            of its base. For rules of paths.
        names: For `LogicalRules`, the logical axis names of the arrays: a tree of tuples or
            PartitionSpecs of names, or {path: names}. Default: those in the tree's boxes, nnx
            Variables or haliax arrays.

    Raises:
        ValueError: There is no mesh, a dimension is negative, a dtype is unknown, or names do not
            fit the tree.
        TypeError: A rule's spec cannot be made a PartitionSpec; a shape is not one; the tree is not
            a tree of arrays; pairs are for the logical axis names of the tree's boxes; or the rules
            are `LogicalRules`, and nothing has names.

    Example:
        >>> import jax
        >>> import shardrules as sr
        >>> tree = {"wq": jax.ShapeDtypeStruct((512, 30), "bfloat16")}
        >>> plan = sr.plan(tree, [("wq", ("fsdp", "tp"))], {"fsdp": 8, "tp": 4})
        >>> plan.bytes_per_device().max
        3840
    """
    decider = as_decider("rules", rules, correction, names)
    records = as_tuple("companions", companions, _COMPANIONS)
    check_items("companions", records, Companion, "a Companion, such as those of shardrules.LORA")
    if records and not isinstance(decider, ByPaths):
        raise ValueError("companions are for rules of paths alone: leave them out")
    if isinstance(decider, Plan):
        return decider._for(survey_planned(tree, decider._leaves), mesh)
    if isinstance(decider, BySpecs) and mesh is None:
        mesh = mesh_of_shardings(rules)
    # A mesh of the context is taken now: later another one may be in force. One that is wrong is
    # refused before the walk.
    on = sized_mesh(mesh if isinstance(mesh, Mapping) else resolve_mesh(mesh))
    if isinstance(decider, ByNames):
        on_mesh = plan_by_names(tree, decider.rules, names)
    elif isinstance(decider, ByPaths):
        check_rules_are_for_paths(decider.rules, tree)
        on_mesh = plan_by_rules(tree, decider.rules, records)
    else:
        on_mesh = plan_by_specs(survey(tree, Rules(())), rules, correction)
    columns = on_mesh(on)
    if all(kind.shape is None for kind in columns.kinds):
        check_arrays("tree", tree, needs_shape=True)
    return Plan(columns, on_mesh, on.form)


_COMPANIONS: Final = "Companion records: write shardrules.LORA, or [shardrules.stacked('layers')]"


class Plan(Views, Decider):
    """Shardings of the leaves of a tree on a mesh; from `shardrules.plan`.

    Columns have a row for each leaf, in the order of the walk; what leaves have in common is in
    `kinds`, once for each kind.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"layers": [{"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")} for _ in range(4)]}
        >>> sr.plan(tree, [("w", "tp")], {"tp": 2})
        4 leaves, 512 B on tp=2 (2 devices): 256 B on the fullest device: params 256 B
        path             leaves  shape   dtype     rule  spec           bytes  per device
        layers/{0..3}/w       4  [8, 8]  bfloat16     0  P('tp', None)  512 B       256 B
    """

    def __init__(
        self, _value: Columns, _on_mesh: OnMesh, _mesh: MeshLike, _declared: Declared = NOTHING
    ) -> None:
        vars(self).update(vars(_value), _on_mesh=_on_mesh, _mesh=_mesh, _declared=_declared)

    def __getstate__(self) -> dict[str, Any]:
        if has_devices(self._mesh):
            raise TypeError(
                "a plan on a Mesh of devices cannot be pickled, as devices cannot: pickle "
                "plan.on_mesh(mesh.abstract_mesh), which the other process puts on its own mesh "
                "with on_mesh; or keep plan.lock()"
            )
        return dict(vars(self))

    def __copy__(self) -> Plan:
        return self  # nothing changes a plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def on_mesh(self, mesh: MeshLike) -> Plan:
        """Put the same leaves and rules on another mesh; the tree is not walked again.

        Raises:
            ValueError, TypeError: It is not a mesh; or the plan comes from a lock.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> plan.on_mesh({"tp": 8}).bytes_per_device().max
            16
        """
        return self._put_on(mesh, self._on_mesh, self._declared)

    def with_rules(self, rules: RulesLike) -> Plan:
        """Plan the same leaves and mesh by other rules; the tree is not walked again.

        Companions are left out.

        Args:
            rules: As in `plan`; but `LogicalRules` if those of the plan are, and only then.

        Raises:
            ValueError: The rules' dialect has other paths.
            TypeError: Either the plan's rules or the new ones are for logical axis names.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"fsdp": 2, "tp": 4})
            >>> plan.with_rules([("w", ("fsdp", "tp"))]).bytes_per_device().max
            16
        """
        decider = as_decider("rules", rules)
        if isinstance(decider, Plan):
            return decider._for(leaves_in_plan(self._leaves, decider._leaves), self._mesh)
        if isinstance(self.rules, LogicalRules) != isinstance(decider, ByNames):
            raise TypeError(
                "rules: the plan has logical rules: give LogicalRules, or plan the tree itself"
                if isinstance(self.rules, LogicalRules)
                else "rules: these are logical, and the plan's are of paths: plan the tree itself"
            )
        if isinstance(decider, ByNames):
            on_mesh = plan_named(self._leaves, decider.rules)
        elif isinstance(decider, ByPaths):
            on_mesh = plan_leaves(self._leaves, decider.rules)
        else:
            on_mesh = plan_by_specs(self._leaves, rules)
        # What was declared is about the rules of this plan.
        return self._put_on(self._mesh, on_mesh, NOTHING)

    def _put_on(self, mesh: MeshLike, on_mesh: OnMesh, declared: Declared) -> Plan:
        on = sized_mesh(mesh if isinstance(mesh, Mapping) else as_mesh(mesh))
        return Plan(on_mesh(on), on_mesh, on.form, declared)

    def _declaring(self, declared: Declared) -> Plan:
        """Return the same plan, with what `check` is to know about its rules."""
        return Plan(self, self._on_mesh, self._mesh, declared)

    def _for(self, tree: PlannedLeaves, mesh: MeshLike | None) -> Plan:
        """Plan another tree with leaves of this one, on this mesh or another."""
        planned = self if mesh is None else self.on_mesh(mesh)
        follow = partial(by_plan, tree=tree)
        on_mesh = partial(_put_followers, planned, self._on_mesh, follow, None)
        return Plan(follow(planned), on_mesh, planned._mesh, self._declared)

    def _follow(self, follow: Callable[[Columns], Columns], memory_kind: MemoryKind | None) -> Plan:
        """Plan leaves that follow those of this plan."""
        on_mesh = partial(_put_followers, self, self._on_mesh, follow, memory_kind)
        return Plan(on_mesh(sized_mesh(self.mesh)), on_mesh, self._mesh, self._declared)

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        return {resolve_mesh(self.mesh if mesh is None else mesh)}

    def _decided(self, tree: Any, mesh: MeshLike | None) -> Decided:
        from shardrules._plan import trees

        planned = self if mesh is None else self.on_mesh(mesh)
        leaves, rows = survey_planned(tree, self._leaves)
        return trees.decided_in(planned, planned.mesh, tree, leaves.tree, rows)

    @classmethod
    def from_lock(cls, lock: str | Path) -> Plan:
        """Read a locked plan, with the specs as they were decided then.

        Its tree is a flat dict of the paths. It cannot be put on another mesh.

        Args:
            lock: A lock's text, or its file.

        Raises:
            FileError: It is not a lock; a ValueError.
        """
        from shardrules._plan.lock import read_lock
        from shardrules._plan.lock_texts import content_of

        check_type("lock", lock, str | os.PathLike, "a lock's text, or the path of its file")
        columns = read_lock(*content_of(lock, "Plan.lock"))
        return cls(columns, partial(_put_locked, columns), columns.axis_sizes)

    def diff(self, other: Plan) -> PlanDiff:
        """Compare with another plan: rules, new and missing leaves, other shardings.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> print(plan.diff(sr.plan(tree, [("w", ())], {"tp": 2})))
            rules: 1 changed (0)
            ~ w  P('tp', None) -> P()  (+64 B on each device)
            1 leaf changed; 64 B -> 128 B on the fullest device
        """
        from shardrules._plan import diff

        check_type("other", other, Plan, "a Plan")
        return diff.plan_diff(self, other)

    def transfer(self, other: Plan) -> Transfer:
        """Count what moves from these shardings to those of another plan of the same leaves.

        What a device holds already it need not receive. Between two meshes of devices these are
        the same devices, in whatever order. If one of the meshes has none, such as a dict, device
        i of one mesh is device i of the other, both in row-major order.

        Args:
            other: A plan of leaves with the same paths, shapes and dtypes, on any mesh.

        Raises:
            ValueError: The leaves are not the same; a leaf gets no sharding, or has unreduced or
                unconstrained axes; or there are more than 2**27 pairs of a kind and a device.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> trainer = sr.plan(tree, [("w", ("fsdp", "tp"))], {"fsdp": 4, "tp": 1})
            >>> print(moved := trainer.transfer(trainer.on_mesh({"fsdp": 1, "tp": 2})))
            fsdp=4,tp=1 -> fsdp=1,tp=2: 2 devices in both
            96 B received in all; at most 48 B by a device, at most 32 B sent by one
            path  leaves  shape   dtype     spec             received  most by a device
            w          1  [8, 8]  bfloat16  P('fsdp', 'tp')      96 B              48 B
            >>> moved.received, moved.sent.ravel()
            (array([[48, 48]]), array([16, 16, 32, 32]))
        """
        from shardrules._plan import transfer

        check_type("other", other, Plan, "a Plan")
        return transfer.transfer(self, other, transfer.places_in(self.mesh, other.mesh))

    def for_optimizer(
        self, state: Any, *, zero1: str | Zero1 | None = None, memory_kind: MemoryKind | None = None
    ) -> Plan:
        """Plan an optimizer's state: each leaf is cut as its parameter is.

        A leaf's parameter is the one whose path ends the leaf's, whole components only; of several
        the longest. What begins all parameters' paths, or flax's `params`, may be missing there: a
        plan of {"params": params} fits the state of `params`. In a state of Keras,
        `dense_kernel_momentum` belongs to `dense/kernel`. A moment of the parameter's shape gets
        its spec; one that lacks a dimension, as Adafactor's `v_row` and `v_col`
        (`optax.scale_by_factored_rms`), lacks its entry; a history with a dimension in front gets
        it behind None; of dimensions that are 1, none is cut. All else is replicated; `Kind.origin`
        says which of these it was. What follows a parameter is in its kind of memory, unless
        another is given.

        Args:
            state: Any pytree of arrays or abstract arrays: `jax.eval_shape(tx.init, params)` of
                optax, an nnx.Optimizer's state, or a whole train state with its parameters.
            zero1: A mesh axis to cut what follows a parameter by as well, as in ZeRO-1, unless it
                does so already: along the dimension that divides and of which each device holds
                most, the first of equals. `RuleSpec.units` do not bind it. In a tree with leaves
                of an optimizer's state, by the names of `DeviceBytes`, those alone are cut. A
                `Zero1` says otherwise which dimension it is, as `shardrules.compat.maxtext.ZERO1`.
            memory_kind: The memory of all of the state, such as "pinned_host"; in a tree with
                leaves of an optimizer's state, of those alone. Default: the parameters'.

        Raises:
            ValueError: The state has arrays of numbers, and none follows a parameter; the mesh has
                no axis `zero1`, or its devices no such memory; or as `plan`.
            TypeError: The state is None, or not a tree of arrays.

        Example:
            >>> import jax, shardrules as sr
            >>> params = {"w": jax.ShapeDtypeStruct((8, 6), "bfloat16")}
            >>> plan = sr.plan(params, [("w", ("fsdp", "tp"))], {"dp": 2, "fsdp": 2, "tp": 2})
            >>> state = [{"count": jax.ShapeDtypeStruct((), "int32")}, {"mu": params}]
            >>> plan.for_optimizer(state, zero1="dp").specs()[1]["mu"]["w"][0]
            ('fsdp', 'dp')
            >>> print(plan.for_optimizer(state, memory_kind="pinned_host").bytes_per_device())
            0 B on the fullest device: nothing; 28 B in the host's memory
        """
        if state is None:
            raise TypeError(
                "state is None; give the optimizer's state, such as "
                "jax.eval_shape(optimizer.init, params); one without arrays is ()"
            )
        check_type("zero1", zero1, str | Zero1 | None, "a mesh axis, a Zero1 or None")
        check_memory_kind("memory_kind", memory_kind)
        is_boxed = isinstance(self.rules, LogicalRules)
        leaves = survey(
            unboxed(state).tree if is_boxed else state, Rules((), self._leaves.paths_dialect)
        )
        if all(leaf.shape is None for leaf in leaves.types):
            check_arrays("state", state)
        follow = partial(
            by_parameters,
            state=leaves,
            parameters=find_parameters(self._leaves, leaves),
            zero1=Zero1(zero1) if isinstance(zero1, str) else zero1,
            memory_kind=memory_kind,
        )
        return self._follow(follow, memory_kind)

    def for_gradients(self, dtype: Any = None, *, unreduced: Iterable[str] = ()) -> Plan:
        """Plan the parameters' gradients: the same tree and specs, on the device.

        Gradients are those of real and complex numbers, and of parameters: what `DeviceBytes`
        counts as the optimizer's or as activations has none. In the tree, None stands for a leaf
        without gradient. If a parameter's spec has `reduced` axes, the gradient's has them as
        `unreduced`, and the other way about, as in JAX.

        Args:
            dtype: Their dtype, such as "float32" for accumulators. Default: the parameters' own.
            unreduced: Mesh axes of type Explicit over which the gradients are not summed up yet,
                such as those of micro-batches. An axis that cuts a parameter cuts its gradient
                instead.

        Raises:
            ValueError: No leaf has a gradient, the dtype is unknown, or an axis is not in the mesh
                or not Explicit, or this version of JAX has no unreduced axes.

        Example:
            >>> import jax, shardrules as sr
            >>> params = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(params, [("w", "fsdp")], {"fsdp": 4})
            >>> print(plan.for_gradients("float32"))
            1 leaf, 256 B on fsdp=4 (4 devices): 64 B on the fullest device: params 64 B
            path  leaves  shape   dtype    rule  spec             bytes  per device
            w          1  [8, 8]  float32     0  P('fsdp', None)  256 B        64 B
        """
        checked = None if dtype is None else given_dtype("dtype", dtype)
        leaves = leaves_with_gradients(self._leaves, checked)
        follow = partial(gradients_of, leaves=leaves, unreduced=strings("unreduced", unreduced))
        return self._follow(follow, None)


def _put_locked(columns: Columns, mesh: SizedMesh, **_: frozenset[str]) -> Columns:
    if not columns._is_on(mesh.axis_sizes):
        raise ValueError(f"a locked plan is for the mesh {mesh_shown(columns.axis_sizes)} alone")
    return replace(columns, _explicit_axes=mesh.explicit_axes)


def _put_followers(
    params: Columns,
    on_mesh: OnMesh,
    follow: Callable[[Columns], Columns],
    memory_kind: MemoryKind | None,
    mesh: SizedMesh,
    *,
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    """Put leaves that follow others on the mesh, where these may stand already."""
    if has_devices(mesh.form):
        check_memory_on_mesh("for_optimizer", memory_kind, mesh.form)
    is_there = params._is_on(mesh.axis_sizes) and params._explicit_axes == mesh.explicit_axes
    return follow(params if is_there and not may_lack else on_mesh(mesh, may_lack=may_lack))
