"""`plan`: what every leaf of a tree gets on a mesh, before any device is touched; and `Plan`.

One walk over the tree, then one correction per kind of leaf; needs no JAX where the mesh is a dict
of axis sizes. `Plan` checks what it is given and hands its columns to whoever answers; no other
module here knows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from shardrules._arguments import (
    check_file,
    check_real,
    check_shapes,
    check_tree,
    check_type,
    each,
    in_order,
    integer,
    listed,
    texts,
)
from shardrules._correction import Correction, MemoryKind, check_correction, check_memory_kind
from shardrules._dtypes import given_dtype
from shardrules._io import write_text
from shardrules._mesh.mesh import as_mesh, has_devices, places_in, resolve_mesh
from shardrules._mesh_sizes import checked_sizes
from shardrules._place.decider import RulesLike, as_decider, check_taken, find_placements_by
from shardrules._place.shardings import check_memory_on_mesh
from shardrules._plan.companions import Companion
from shardrules._plan.findings import NOTHING, Declared, all_declared
from shardrules._plan.resolve import axis_sizes_of, by_rules, explicit_axes_of, mesh_on
from shardrules._plan.show import table
from shardrules._plan.survey import (
    leaves_in_plan,
    redecided,
    survey,
    survey_planned,
    with_companions,
)
from shardrules._plan.table import DEFAULT_LARGE, OVERLAP
from shardrules._plan_like import PlanLike
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.matcher import checked_min_size
from shardrules._rules.names import check_rules_are_for_paths, unboxed
from shardrules._rules.rules import Rules
from shardrules._text import mesh_shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardrules._estimate.schedule import InputGradients, Of, Reduce
    from shardrules._estimate.step_time import StepTime
    from shardrules._estimate.sweep import Sweep
    from shardrules._estimate.traffic import Traffic
    from shardrules._estimate.transfer import Transfer
    from shardrules._hardware import Hardware
    from shardrules._mesh.mesh import MeshLike
    from shardrules._place.shardings import Placement
    from shardrules._plan.diff import PlanDiff
    from shardrules._plan.explain import Explanation
    from shardrules._plan.findings import CheckKind, Findings, Level
    from shardrules._plan.fold import Folded
    from shardrules._plan.memory import DeviceBytes, Room
    from shardrules._plan.report import Proposal, Proposed
    from shardrules._plan.roles import DimRole
    from shardrules._plan.state import Zero1
    from shardrules._plan.survey import PlannedLeaves
    from shardrules._plan.table import Columns, Kind, Leaves
    from shardrules._rules.matcher import Coverage

    _OnMesh = Callable[..., Columns]

_DTYPES: Final = "dtypes, one for each moment such as Adam's two"
_PATH: Final = "a string, as in plan.paths, such as 'layers/0/w' for JAX's keys of that leaf"
_MOMENTS: Final = f"{_DTYPES}; or plan.for_optimizer(state)"


@in_order("tree", "rules", "mesh")
def plan(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    companions: Iterable[Companion] = (),
    names: Any = None,
    optional_axes: Iterable[str] = (),
) -> Plan:
    """Plans how each leaf of the tree is sharded on the mesh, and why.

    The specs are those of `named_shardings`. A leaf that gets none is a finding of `Plan.check`,
    and an error only when the specs are asked for. No device is needed, and no array is kept.

    Args:
        tree: Any pytree of arrays or abstract arrays; only `.shape` and `.dtype` are read.
        rules: `Rules` or (pattern, spec) pairs; `LogicalRules`; PartitionSpecs or NamedShardings,
            one for all leaves or a tree of them, as rules for exactly these paths; or another
            `Plan`, which has leaves of the same paths and shapes.
        mesh: A Mesh, AbstractMesh or dict of axis sizes. Default: that of the shardings or the
            other plan, or else of the context.
        min_size: As in `match_partition_rules`.
        correction: Replaces the dialect's; a `RuleSpec` with a correction keeps its own.
        companions: Leaves that follow the rules of other paths, such as those of `LORA`,
            `QUANTIZED` or `stacked`. The first that finds a leaf's path counts, and so for the path
            of its base. For rules of paths.
        names: For `LogicalRules`, the logical axis names of the arrays: a tree of tuples or
            PartitionSpecs of names, or {path: names}. Default: those in the tree's boxes, nnx
            Variables or haliax arrays.
        optional_axes: Mesh axes that rules or specs name and a mesh may lack, such as "sp", beside
            those of a `RuleSpec`. They are dropped alone where the mesh lacks them. Any other axis
            that it lacks is an error, unless the correction says otherwise.

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
        >>> plan.device_bytes
        array([3840])
    """
    check_tree("tree", tree)
    check_correction(correction)
    followers = each(
        "companions",
        listed("companions", companions, "Companion records, such as shardrules.LORA"),
        Companion,
        "a Companion, such as those of shardrules.LORA",
    )
    smallest = checked_min_size(min_size)
    lacking = texts("optional_axes", optional_axes)
    optional = frozenset(lacking)
    decider = as_decider("rules", rules)
    check_taken(
        decider, min_size=smallest, companions=followers, names=names, correction=correction
    )
    if isinstance(decider, Plan):
        return decider._for(survey_planned(tree, decider._columns.leaves), mesh)
    if decider is None and mesh is None:
        from shardrules._plan.resolve import mesh_of_shardings

        mesh = mesh_of_shardings(rules)
    # A mesh of the context is taken now: later another one may be in force.
    chosen = mesh if isinstance(mesh, Mapping) else resolve_mesh(mesh)
    axis_sizes_of(chosen)  # a mesh that is wrong is refused before the walk
    if isinstance(decider, LogicalRules):
        on_mesh = _by_names(tree, decider, names, correction, optional)
    elif isinstance(decider, Rules):
        check_rules_are_for_paths(decider, tree)
        on_mesh = _by_paths(tree, decider, smallest, followers, correction, optional=optional)
    else:
        on_mesh = _by_rules_of_leaves(survey(tree, Rules(())), rules, correction, optional)
    columns = on_mesh(chosen)
    if all(kind.shape is None for kind in columns.kinds):
        check_shapes("tree", tree, next(iter(columns.paths), None))
    declared = Declared(replicated=(), optional_axes=lacking, data_axes=())
    return Plan(columns, on_mesh, chosen, declared)


def _by_names(
    tree: Any,
    rules: LogicalRules,
    names: Any,
    correction: Correction | None,
    optional: frozenset[str],
) -> _OnMesh:
    from shardrules._plan.names import by_names, survey_named

    leaves = survey_named(tree, rules, names)
    policy = correction or rules.dialect.correction
    return partial(by_names, leaves, rules, policy, optional_axes=optional)


def _by_paths(
    tree: Any,
    rules: Rules,
    min_size: int,
    companions: tuple[Companion, ...],
    correction: Correction | None,
    *,
    optional: frozenset[str],
) -> _OnMesh:
    leaves = survey(tree, rules, min_size)
    leaves, derivations = with_companions(leaves, rules, companions, min_size)
    policy = correction or rules.dialect.correction
    return partial(by_rules, leaves, rules, derivations, policy, optional_axes=optional)


def _by_rules_of_leaves(
    leaves: Leaves, rules: Rules | Any, correction: Correction | None, optional: frozenset[str]
) -> _OnMesh:
    """Leaves that were surveyed already, under rules of paths or under specs."""
    if isinstance(rules, Rules):
        compiled = rules
    else:
        from shardrules._plan.resolve import rules_of_specs

        compiled = rules_of_specs(leaves, rules)
    decided = redecided(leaves, compiled)
    none = [None] * len(decided.types)
    policy = correction or compiled.dialect.correction
    return partial(by_rules, decided, compiled, none, policy, optional_axes=optional)


def _placements(*arguments: Any, **more: Any) -> Any:
    from shardrules._plan import trees

    found = plan(*arguments, **more)
    return trees.placement_tree(found._columns, found.mesh)


find_placements_by(_placements)


class Plan(PlanLike):
    """The sharding of each leaf of a tree on a mesh; from `shardrules.plan`.

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
        self, _columns: Columns, _on_mesh: _OnMesh, _mesh: MeshLike, _declared: Declared = NOTHING
    ) -> None:
        self._columns = _columns
        self._on_mesh = _on_mesh
        self._mesh = _mesh
        self._declared = _declared

    @property
    def rules(self) -> Rules | LogicalRules:
        """The rules that decide the leaves."""
        return self._columns.rules

    @property
    def mesh(self) -> MeshLike:
        """The mesh of the shardings: the one given, or the same devices with axes in parts.

        Parts are those that `Correction(indivisible="factor")` needs.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"kv": jax.ShapeDtypeStruct((4, 8), "bfloat16")}
            >>> plan = sr.plan(
            ...     tree, [("kv", "tp")], {"tp": 8}, correction=sr.Correction(indivisible="factor")
            ... )
            >>> plan.mesh, plan.kind("kv").spec
            ({'tp_0': 4, 'tp_1': 2}, ('tp_0', None))
        """
        return mesh_on(self._mesh, self.axis_sizes)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Devices along each axis of `mesh`, in its order."""
        return self._columns.axis_sizes

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return self._columns.devices

    @property
    def paths(self) -> list[str]:
        """Column: the leaves' paths."""
        return self._columns.paths

    @property
    def sources(self) -> list[str]:
        """Column: the paths that the rules meet: those of the leaves, or of what they follow."""
        return self._columns.sources

    @property
    def kind_of(self) -> npt.NDArray[np.int32]:
        """Column, int32: index of the leaf's kind in `kinds`."""
        return self._columns.kind_of

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of leaves: one record for all leaves that are alike."""
        return self._columns.kinds

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Per kind, int64: how many leaves are of it."""
        return self._columns.counts

    @property
    def rule(self) -> npt.NDArray[np.int32]:
        """Column, int32: index of the rule that decides the leaf; -1 if none does."""
        return self._columns.rule

    @property
    def bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the whole leaf."""
        return self._columns.bytes

    @property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the leaf on the device that holds most of it."""
        return self._columns.device_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves together, exact where int64 is too small for the sum."""
        return self._columns.total_bytes

    @property
    def folded(self) -> list[Folded]:
        """The leaves with siblings folded: patterns such as `layers/{0..60}/w`, a kind each."""
        return self._columns.folded

    @property
    def coverage(self) -> Coverage:
        """Per rule, the leaves that it matches and wins, among those that need a rule."""
        return self._columns.coverage

    def check(
        self,
        *,
        large: int = DEFAULT_LARGE,
        replicated: Iterable[str | re.Pattern[str]] = (),
        optional_axes: Iterable[str] = (),
        data_axes: Iterable[str] = (),
        head_dim: int | None = None,
        hbm: int | None = None,
        levels: Mapping[CheckKind, Level | Literal["off"]] | None = None,
    ) -> Findings:
        """The coverage contract: no leaf is replicated and no rule ignored without a finding.

        A plan of `suggest` knows what its rules declare; arguments add to that.

        The kinds of findings, with their levels and meanings, are in docs/findings.md.

        Args:
            large: Minimum bytes on a device for a replicated leaf or a correction to be a warning.
                Default: 16 MiB. What is large only together with others must also be more than 2 %
                of the fullest device's bytes.
            replicated: Patterns, searched in the paths, of leaves that are meant to be replicated.
            optional_axes: As in `plan`: the findings are those of a plan with these axes too.
            data_axes: Mesh axes that cut batches and sequences alone, such as "dp".
            head_dim: Size of an attention head. Default: that of a `q_norm` or `k_norm` beside the
                projections, if there is one.
            hbm: Bytes of memory of a device, into which the leaves are to fit. Default: any.
            levels: Other levels by kind of finding: "error", "warning", "info" or "off".

        Returns:
            All findings, the worst first.

        Raises:
            ValueError: A kind or a level does not exist.
            re.error: A pattern is invalid.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
            >>> plan = sr.plan(tree, [("kernel", "tp"), (".*", ())], {"tp": 8})
            >>> [(finding.level, finding.kind) for finding in plan.check()]
            [('error', 'catch-all'), ('warning', 'dead'), ('info', 'unused-axis')]
        """
        from shardrules._plan import check

        check_real("large", large)
        check_type("levels", levels, Mapping | None, "a dict such as {'dead': 'error'}")
        patterns = listed("replicated", replicated, "patterns")
        each("replicated", patterns, str | re.Pattern, "a pattern")
        more = Declared(
            replicated=patterns,
            optional_axes=texts("optional_axes", optional_axes),
            data_axes=texts("data_axes", data_axes),
        )
        declared = all_declared(self._declared, more)
        size = None if head_dim is None else integer("head_dim", head_dim, least=1)
        columns = self._columns
        if any(loss.is_error for kind in self.kinds for loss in kind.losses):
            columns = self._on_mesh(self._mesh, may_lack=frozenset(declared["optional_axes"]))
        return check.check(
            columns,
            large=large,
            declared=declared,
            head_dim=size,
            hbm=_room(hbm, None).hbm,
            levels=levels,
        )

    def specs(self) -> Any:
        """The tree of PartitionSpecs, corrected; those of `named_shardings`.

        Raises:
            ValueError: Some leaves get no spec. The message has their number, and lists the first.
        """
        from shardrules._plan import trees

        return trees.spec_tree(self._columns)

    def shardings(self) -> Any:
        """The tree of NamedShardings; on a dict of axis sizes they have an AbstractMesh.

        Raises:
            ValueError: As `specs`.
        """
        from shardrules._plan import trees

        return trees.sharding_tree(self._columns, self.mesh)

    def abstract(self) -> Any:
        """The tree of ShapeDtypeStructs with their shardings: what to restore a checkpoint into.

        Raises:
            ValueError: As `specs`.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).abstract()["w"].sharding.spec[0]
            'tp'
        """
        from shardrules._plan import trees

        return trees.abstract_tree(self._columns, self.mesh)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return table(self._columns)

    def __getstate__(self) -> dict[str, Any]:
        if has_devices(self._mesh):
            raise TypeError(
                "a plan on a Mesh of devices cannot be pickled, as devices cannot: pickle "
                "plan.on_mesh(mesh.abstract_mesh), which the other process puts on its own mesh "
                "with on_mesh; or keep plan.lock()"
            )
        return self.__dict__

    def __copy__(self) -> Plan:
        return self  # nothing changes a plan

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def on_mesh(self, mesh: MeshLike) -> Plan:
        """The same leaves and rules on another mesh; the tree is not walked again.

        Raises:
            ValueError, TypeError: It is not a mesh; or the plan comes from a lock.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> plan.on_mesh({"tp": 8}).device_bytes
            array([16])
        """
        chosen = mesh if isinstance(mesh, Mapping) else as_mesh(mesh)
        return Plan(self._on_mesh(chosen), self._on_mesh, chosen, self._declared)

    def with_rules(self, rules: RulesLike) -> Plan:
        """The same leaves and mesh under other rules; the tree is not walked again.

        Companions and the correction of `plan` are left out.

        Args:
            rules: As in `plan`; but `LogicalRules` if those of the plan are, and only then.

        Raises:
            ValueError: The rules' dialect has other paths.
            TypeError: Of the rules and those of the plan, one is for logical axis names.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"fsdp": 2, "tp": 4})
            >>> plan.with_rules([("w", ("fsdp", "tp"))]).device_bytes
            array([16])
        """
        decider = as_decider("rules", rules)
        leaves = self._columns.leaves
        optional = frozenset(self._declared["optional_axes"])
        if isinstance(decider, Plan):
            return decider._for(leaves_in_plan(leaves, decider._columns.leaves), self._mesh)
        if isinstance(self.rules, LogicalRules) != isinstance(decider, LogicalRules):
            raise TypeError(
                "rules: the plan has logical rules: give LogicalRules, or plan the tree itself"
                if isinstance(self.rules, LogicalRules)
                else "rules: these are logical, and the plan's are of paths: plan the tree itself"
            )
        if isinstance(decider, LogicalRules):
            from shardrules._plan.names import by_names

            named = replace(leaves, rules=decider)
            policy = decider.dialect.correction
            on_mesh: _OnMesh = partial(by_names, named, decider, policy, optional_axes=optional)
        else:
            given = rules if decider is None else decider
            on_mesh = _by_rules_of_leaves(leaves, given, None, optional)
        # What else was declared is about the rules of this plan.
        declared = Declared(replicated=(), optional_axes=tuple(optional), data_axes=())
        return Plan(on_mesh(self._mesh), on_mesh, self._mesh, declared)

    def _declaring(self, declared: Declared) -> Plan:
        """The same plan, with what `check` is to know about its rules."""
        return Plan(self._columns, self._on_mesh, self._mesh, declared)

    def _for(self, tree: PlannedLeaves, mesh: MeshLike | None) -> Plan:
        """The plan of another tree with leaves of this one, on this mesh or another."""
        from shardrules._plan.resolve import by_plan

        chosen = self if mesh is None else self.on_mesh(mesh)
        follow = partial(by_plan, tree=tree)
        on_mesh = partial(_followed, chosen._columns, self._on_mesh, follow, None)
        return Plan(follow(chosen._columns), on_mesh, chosen._mesh, self._declared)

    def _placements(self, tree: Any, mesh: MeshLike | None) -> list[Placement]:
        from shardrules._plan import trees

        chosen = self if mesh is None else self.on_mesh(mesh)
        leaves, rows = survey_planned(tree, self._columns.leaves)
        return trees.placements_of(chosen._columns, chosen.mesh, leaves.tree, rows)

    def sweep(
        self,
        meshes: Iterable[Mapping[str, int]] | None = None,
        *,
        devices: int | None = None,
        axes: Iterable[str] | None = None,
        fixed: Mapping[str, int] | None = None,
        hbm: int | None = None,
        host_memory: int | None = None,
        gradients: Any = None,
        optimizer: Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        tokens: int | None = None,
        hardware: Hardware | str | None = None,
        axes_over_dcn: Iterable[str] = (),
        overlap: Iterable[Of] = OVERLAP,
        efficiency: float = 1.0,
        schedule: Mapping[str, Any] | None = None,
    ) -> Sweep:
        """The same leaves and rules on many meshes: bytes per device, what fits, time of a step.

        Args:
            meshes: The meshes, each of which may lack axes of the others. Default: all
                factorizations of `devices` over `axes`.
            devices: Devices of these factorizations. Default: as many as the plan has.
            axes: Axes of these factorizations. Default: those of the plan that are not in `fixed`.
            fixed: Further axes, with the size that each has in all meshes.
            hbm: Bytes of memory of a device, for `SweepRow.fits`. Default: those of `hardware`.
            host_memory: Bytes of the host's memory for each of its devices, for the same.
            gradients: As in `bytes_per_device`.
            optimizer: The dtypes of the optimizer's moments, as in `bytes_per_device`.
            optimizer_memory_kind: As in `bytes_per_device`.
            tokens: Tokens of the whole batch of a training step, to rank meshes by its time.
            hardware: The devices, for that: a `Hardware`, or the name of one such as "v5p".
            axes_over_dcn: As in `step_time`.
            overlap: As in `step_time`.
            efficiency: As in `step_time`.
            schedule: As in `step_time`.

        Returns:
            A row for each mesh, those with the fewest problems first, of these what fits, of these
            the shortest time of a step, if `tokens` are given, or else the fewest bytes. What
            differs by less than 5 %, or in bytes by less than 5 % of `hbm`, is a tie. Then the
            fewest devices along axes that do not split tokens, by their names, come first, then the
            fewest corrections, then bytes.

        Raises:
            ValueError: A mesh is invalid, there are no axes, or there are more than 10,000 meshes;
                there are tokens without hardware; or as `step_time`.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 4})
            >>> [(row.mesh, row.bytes) for row in plan.sweep()]
            [({'dp': 1, 'tp': 4}, 32), ({'dp': 2, 'tp': 2}, 64), ({'dp': 4, 'tp': 1}, 128)]
        """
        from shardrules._estimate import step_time, sweep
        from shardrules._hardware import as_hardware

        device = None if hardware is None else as_hardware("hardware", hardware)
        if hbm is None and device is not None:
            hbm = device.memory_bytes
        room = _room(hbm, host_memory)
        run = None
        if tokens is None:
            _check_unused(
                axes_over_dcn=axes_over_dcn != (),
                overlap=overlap != OVERLAP,
                efficiency=efficiency != 1.0,
                schedule=schedule is not None,
            )
        elif device is None:
            raise ValueError("tokens: the time of a step needs hardware=, such as 'v5p'")
        else:
            run = step_time.run_of(
                tokens=tokens,
                hardware=device,
                axes_over_dcn=axes_over_dcn,
                overlap=overlap,
                efficiency=efficiency,
                schedule=schedule,
                gradients=gradients,
            )
        check_memory_kind("optimizer_memory_kind", optimizer_memory_kind)
        check_type("fixed", fixed, Mapping | None, "a dict of axis sizes")
        moments = None if optimizer is None else listed("optimizer", optimizer, _DTYPES)
        if meshes is None:
            sizes = checked_sizes(fixed) if fixed else {}
            left = tuple(name for name in axis_sizes_of(self._mesh) if name not in sizes)
            names = left if axes is None else texts("axes", axes)
            count = self.devices if devices is None else integer("devices", devices, 1)
            meshes = sweep.factorizations(count, names, sizes)
        else:
            check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")

        def on_mesh(mesh: MeshLike, may_lack: frozenset[str]) -> Columns:
            chosen = mesh if isinstance(mesh, Mapping) else as_mesh(mesh)
            return self._on_mesh(chosen, may_lack=may_lack.union(axis_sizes_of(self._mesh)))

        return sweep.sweep(
            on_mesh,
            meshes,
            room=room,
            gradients=gradients,
            optimizer=moments,
            optimizer_memory_kind=optimizer_memory_kind,
            run=run,
        )

    def step_time(
        self,
        *,
        tokens: int,
        hardware: Hardware | str,
        axes_over_dcn: Iterable[str] = (),
        overlap: Iterable[Of] = OVERLAP,
        efficiency: float = 1.0,
        gradients: Any = None,
        optimizer: Plan | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> StepTime:
        """How long a training step takes on hardware, as one reckons it on paper: a roofline.

        The hardware page says how, and what is left out. It is a lower bound for comparing meshes.

        Args:
            tokens: Tokens of the whole batch of a step.
            hardware: The devices: a `Hardware`, or the name of one such as "v5p".
            axes_over_dcn: Mesh axes between slices or nodes. Default: none, but what does not fit
                into one; the last axes of the mesh are the innermost.
            overlap: What is sent while devices compute: some of "params", "gradients",
                "activations", "experts". Default: the first two.
            efficiency: The part of the peak FLOP/s that products reach. Default: 1.
            gradients: As in `bytes_per_device`.
            optimizer: As in `bytes_per_device`.
            optimizer_memory_kind: As in `bytes_per_device`.
            schedule: Further arguments of `traffic`, such as {"experts_per_token": 8}.

        Raises:
            ValueError: The hardware is unknown, or has no figure for the dtype of activations; the
                mesh lacks an axis; or as `traffic` and `bytes_per_device`.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((8192, 32768), "bfloat16")}}
            >>> plan = sr.plan(tree, [("kernel", "fsdp")], {"fsdp": 16})
            >>> time = plan.step_time(tokens=2**20, hardware="H100")
            >>> time.dominant, f"{time.total * 1e3:.1f} ms"
            ('compute', '106.7 ms')
        """
        from shardrules._estimate import step_time

        run = step_time.run_of(
            tokens=tokens,
            hardware=hardware,
            axes_over_dcn=axes_over_dcn,
            overlap=overlap,
            efficiency=efficiency,
            schedule=schedule,
            gradients=gradients,
        )
        held = self.bytes_per_device(
            gradients=gradients, optimizer=optimizer, optimizer_memory_kind=optimizer_memory_kind
        )
        state = optimizer._columns if isinstance(optimizer, Plan) else None
        return step_time.step_time(self._columns, run, held, state)

    def bytes_per_device(
        self,
        *,
        gradients: Any = None,
        optimizer: Plan | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        activations: Plan | None = None,
    ) -> DeviceBytes:
        """Bytes on each device and in the host's memory, uneven shards included.

        `DeviceBytes` says which leaves count as parameters, as the optimizer's or as activations.

        Args:
            gradients: The dtype of gradients, which are sharded like the parameters; True for the
                parameters' own dtypes. Default: none are counted.
            optimizer: The optimizer's state, if it is not in the tree: its plan, or the dtypes of
                its moments, which have the parameters' shapes and specs. Adam has two.
            optimizer_memory_kind: The memory of the state that `optimizer` gives, such as
                "pinned_host". Default: that of its plan, or of the parameters.
            activations: The plan of the activations that are there at once, if they are not in the
                tree.

        Raises:
            ValueError: The plan of the optimizer or the activations is for another mesh; a dtype or
                a memory kind is unknown; or there is a memory kind for no optimizer.
            TypeError: The optimizer is neither a plan nor dtypes, such as its name; or the
                activations are no plan.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 2})
            >>> adam = ("float32", "float32")
            >>> plan.bytes_per_device(gradients="float32", optimizer=adam).total
            array([[448, 448]])
            >>> print(plan.bytes_per_device(optimizer=adam, optimizer_memory_kind="pinned_host"))
            64 B on the fullest device: params 64 B; 256 B in the host's memory
        """
        from shardrules._plan import memory

        check_memory_kind("optimizer_memory_kind", optimizer_memory_kind)
        check_type("activations", activations, Plan | None, "a Plan")
        made = None if activations is None else activations._columns
        moments: Any = optimizer
        if isinstance(optimizer, Plan):
            moments = optimizer._columns
        elif optimizer is not None:
            moments = listed("optimizer", optimizer, _MOMENTS)
        return memory.budget(self._columns, gradients, moments, optimizer_memory_kind, made)

    def traffic(
        self,
        *,
        tokens: int,
        batch_axes: Iterable[str] | None = None,
        gathers: int = 2,
        accumulate: int = 1,
        reduce: Reduce = "reduce-scatter",
        zero1: str | None = None,
        gradients: Any = None,
        activations: Any = "bfloat16",
        sequence_parallel: bool = False,
        input_gradients: InputGradients = "once",
        experts_per_token: int | None = None,
        capacity_factor: float = 1.0,
        roles: Mapping[str, Sequence[DimRole]] | None = None,
    ) -> Traffic:
        """Bytes that each device sends in a training step, by mesh axes and kind of collective.

        Parameters and gradients are exact under this schedule: what batch axes cut is gathered over
        them for each use, and its gradient reduced over them; what other axes cut is used as it
        is. Activations follow from the kernels' contracted dimensions. Each argument is an
        assumption; `Traffic.assumptions` has them all.

        Args:
            tokens: Tokens of the whole batch of a step.
            batch_axes: The mesh axes that cut the tokens: of the batch or the sequence. Default:
                all but those with names of tensor axes and of pipelines, such as tp, model or pp.
            gathers: How often a step gathers a parameter: 2 for forward and again for backward, 1
                if it is kept in between. A table that tokens look up, and the kernel of the
                logits, are gathered once.
            accumulate: Micro-batches in a step; each gathers parameters and reduces gradients.
            reduce: "reduce-scatter" of gradients over the batch axes that cut the parameter; or
                "all-reduce" there, after which each device takes its part, as XLA does on CPUs.
            zero1: A mesh axis that cuts the optimizer's state and not the parameters, as in
                `for_optimizer`: gradients are scattered over it, new parameters gathered.
            gradients: The dtype in which gradients are reduced. Default: the parameter's.
            activations: The dtype of activations.
            sequence_parallel: Whether tokens outside of the kernels are cut by the tensor axes, so
                that an all-reduce becomes a reduce-scatter and an all-gather.
            input_gradients: Whether the gradient of an input that several kernels share, such as
                those of queries, keys and values, is reduced "once", or for "each" of them.
            experts_per_token: How many of a layer's experts each token meets; needed if there are
                experts, which names tell, or a router with as many outputs; and only then.
            capacity_factor: Tokens that are sent to experts, as a multiple of those that are
                routed to them.
            roles: By pattern, searched in the folded paths, what each dimension is: "stack" (of
                scanned layers), "experts", "in" (contracted with the input), "out", or "lookup" (of
                rows that tokens look up). Default: found by shapes and words.

        Raises:
            ValueError: The mesh has no such axis, the plan has experts and `experts_per_token` is
                not given, or none are found and it is, or roles do not fit.
            re.error: A pattern is invalid.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
            >>> print(sr.plan(tree, [("w", "fsdp")], {"fsdp": 8}).traffic(tokens=4096))
            each device sends 2.75 MB in a step
            of         collective      over  count  payload     sent
            params     all-gather      fsdp      2  2.10 MB  1.84 MB
            gradients  reduce-scatter  fsdp      1  1.05 MB   918 kB
            assumed: tokens=4096, batch_axes=fsdp, gathers=2, accumulate=1, reduce=reduce-scatter,
            zero1=None, gradients=None, activations=bfloat16, sequence_parallel=False,
            input_gradients=once, experts_per_token=None, capacity_factor=1.0, roles=None
        """
        from shardrules._estimate import traffic
        from shardrules._estimate.schedule import schedule_of

        schedule = schedule_of(
            self.axis_sizes,
            tokens=tokens,
            batch_axes=batch_axes,
            gathers=gathers,
            accumulate=accumulate,
            reduce=reduce,
            zero1=zero1,
            gradients=gradients,
            activations=activations,
            sequence_parallel=sequence_parallel,
            input_gradients=input_gradients,
            experts_per_token=experts_per_token,
            capacity_factor=capacity_factor,
            roles=roles,
        )
        return traffic.traffic(self._columns, schedule)

    def fingerprint(self) -> str:
        """64 hex digits that change with any path, shape, dtype, spec, memory kind or mesh axis.

        The same in every process and every run, whatever the order of the leaves. That of
        `shardrules.fingerprint` is of shardings: the two differ.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).fingerprint()[:8]
            '229b934b'
        """
        from shardrules._plan.lock import fingerprint

        return fingerprint(self._columns)

    def lock(self, path: str | Path | None = None) -> str:
        """The plan as a text to keep under version control: JSON, a line for each folded path.

        Args:
            path: A file to write it to as well.

        Raises:
            ValueError: There are more than a million leaves, two have the same path, or a name
                cannot be written.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> sr.Plan.from_lock(plan.lock()).fingerprint() == plan.fingerprint()
            True
        """
        from shardrules._plan.lock import lock_text

        check_file("path", path)
        text = lock_text(self._columns)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_lock(cls, lock: str | Path) -> Plan:
        """The plan that was locked, with the specs as they were decided then.

        Its tree is a flat dict of the paths. It cannot be put on another mesh.

        Args:
            lock: A lock's text, or its file.

        Raises:
            FileError: It is not a lock; a ValueError.
        """
        from shardrules._plan.lock import content_of, read_lock

        check_type("lock", lock, str | os.PathLike, "a lock's text, or the path of its file")
        columns = read_lock(*content_of(lock))
        return cls(columns, partial(_locked, columns), columns.axis_sizes)

    def diff(self, other: Plan) -> PlanDiff:
        """The differences to another plan: rules, new and missing leaves, other shardings.

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
        return diff.diff(self._columns, other._columns)

    def transfer(self, other: Plan) -> Transfer:
        """What moves from the shardings of this plan to those of another plan of the same leaves.

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
        from shardrules._estimate import transfer

        check_type("other", other, Plan, "a Plan")
        return transfer.transfer(self._columns, other._columns, places_in(self.mesh, other.mesh))

    def for_optimizer(
        self, state: Any, *, zero1: str | Zero1 | None = None, memory_kind: MemoryKind | None = None
    ) -> Plan:
        """The plan of an optimizer's state: each leaf is cut as its parameter is, and beside it.

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
            TypeError: The state is not a tree of arrays.

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
        from shardrules._plan.state import Zero1, by_parameters, find_parameters

        check_tree("state", state)
        check_type("zero1", zero1, str | Zero1 | None, "a mesh axis, a Zero1 or None")
        cut = Zero1(zero1) if isinstance(zero1, str) else zero1
        check_memory_kind("memory_kind", memory_kind)
        dialect = self._columns.leaves.paths_dialect
        is_boxed = isinstance(self.rules, LogicalRules)
        leaves = survey(unboxed(state).tree if is_boxed else state, Rules((), dialect))
        found = find_parameters(self._columns.leaves, leaves)
        follow = partial(
            by_parameters, state=leaves, found=found, zero1=cut, memory_kind=memory_kind
        )
        on_mesh = partial(_followed, self._columns, self._on_mesh, follow, memory_kind)
        return Plan(on_mesh(self.mesh), on_mesh, self._mesh, self._declared)

    def for_gradients(self, dtype: Any = None, *, unreduced: Iterable[str] = ()) -> Plan:
        """The plan of the parameters' gradients: the same tree and specs, on the device.

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
        from shardrules._plan.state import gradients_of, leaves_with_gradients

        own = None if dtype is None else given_dtype("dtype", dtype)
        leaves = leaves_with_gradients(self._columns.leaves, own)
        follow = partial(gradients_of, leaves=leaves, unreduced=texts("unreduced", unreduced))
        on_mesh = partial(_followed, self._columns, self._on_mesh, follow, None)
        return Plan(on_mesh(self.mesh), on_mesh, self._mesh, self._declared)

    def explain(self, path: str) -> Explanation:
        """Why the leaf of this path gets its spec: how each rule met it, and each correction.

        Args:
            path: A leaf's path; or what stands for leaves that are alike, the first of which is
                explained: a folded path of the table, a glob with `*` and `?`, which may be
                separators too, the end of paths, from one component on, or components inside.

        Raises:
            KeyError: No leaf has this path, and the message has the nearest ones; or leaves of
                several folded paths have it, and the message has these.

        Example:
            >>> import jax, shardrules as sr
            >>> layer = {"up": {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}}
            >>> plan = sr.plan({"layers": [layer] * 4}, [("w", "tp")], {"tp": 2})
            >>> found = plan.explain("up/w")
            >>> found.path, found.leaves, plan.explain("layers/*/w") == found
            ('layers/0/up/w', 4, True)
        """
        from shardrules._plan import explain, rows

        check_type("path", path, str, _PATH)
        return explain.explanation(self._columns, *rows.meant_by(self._columns, path))

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        findings: Findings | None = None,
        sweep: Sweep | None = None,
        title: str = "Sharding plan",
        hbm: int | None = None,
        host_memory: int | None = None,
        gradients: Any = None,
        optimizer: Plan | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        suggestion: Proposal | None = None,
    ) -> str:
        """The plan as one HTML page that works offline.

        Args:
            path: The file to write, if any; it is replaced in one step.
            findings: The findings to show. Default: those of `check`.
            sweep: Rows of a sweep with the same gradients and optimizer, for a chart of the bytes
                by mesh. Default: no chart.
            title: The page's title, such as the model's name.
            hbm: Bytes of memory of a device: the page says whether the plan fits.
            host_memory: Bytes of the host's memory for each of its devices, for the same.
            gradients: As in `bytes_per_device`.
            optimizer: As in `bytes_per_device`.
            optimizer_memory_kind: As in `bytes_per_device`.
            suggestion: The `Suggestion` of `suggest` for the same leaves, with which the page ends:
                why each rule says what it says, and its bytes beside the plan's. Default: none.

        Returns:
            The page.

        Raises:
            ValueError: The sweep counts other bytes for the plan's mesh; the suggestion is for
                other leaves; or as `bytes_per_device`.
            TypeError: A suggestion comes with an optimizer that is a Plan.
            OSError: The file cannot be written.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> page = sr.plan(tree, [("w", "tp")], {"tp": 2}).to_html()
            >>> "Content-Security-Policy" in page
            True
        """
        from shardrules._estimate.sweep import Sweep
        from shardrules._plan.findings import Findings
        from shardrules._plan.report import Proposal, report_html

        check_file("path", path)
        check_type("findings", findings, Findings | None, "the Findings of Plan.check")
        check_type("sweep", sweep, Sweep | None, "the Sweep of Plan.sweep")
        check_type("title", title, str, "a string")
        room = _room(hbm, host_memory)
        shown = self.check() if findings is None else findings
        check_type(
            "suggestion", suggestion, Proposal | None, "the Suggestion of shardrules.suggest"
        )
        counted: dict[str, Any] = {
            "gradients": gradients,
            "optimizer": optimizer
            if isinstance(optimizer, Plan | None)
            else listed("optimizer", optimizer, _MOMENTS),
            "optimizer_memory_kind": optimizer_memory_kind,
        }
        held = self.bytes_per_device(**counted)
        proposed = None if suggestion is None else self._proposed(suggestion, counted)
        page = report_html(
            self._columns, shown, sweep, title, room=room, budget=held, proposed=proposed
        )
        if path is not None:
            write_text(path, page)
        return page

    def _proposed(self, suggestion: Proposal, counted: dict[str, Any]) -> Proposed:
        """Other rules for these leaves, with their bytes counted in the same way.

        Raises:
            ValueError: They are for other leaves.
            TypeError: The optimizer is planned under these rules.
        """
        from shardrules._plan.report import Proposed

        other: Plan = suggestion.plan
        if (len(other), other.total_bytes) != (len(self), self.total_bytes):
            raise ValueError(
                f"suggestion: it is for other leaves (number {len(other):,}, bytes "
                f"{other.total_bytes:,}) than the plan (number {len(self):,}, bytes "
                f"{self.total_bytes:,}): suggest for the same model"
            )
        if isinstance(counted["optimizer"], Plan):
            raise TypeError(
                "suggestion: the optimizer's plan follows other rules; give the dtypes of its "
                "moments as optimizer"
            )
        held = other.bytes_per_device(**counted)
        return Proposed(other._columns, held, list(map(str, suggestion.reasons)))

    def _repr_html_(self) -> str:
        from shardrules._plan.show import table_html

        return table_html(self._columns)

    def kind(self, path: str) -> Kind:
        """The kind of the leaf of this path, which may be folded.

        Raises:
            KeyError: No leaf has this path; the message has the nearest ones.
        """
        return self.kinds[int(self.kind_of[self._row(path)])]

    def source(self, path: str) -> str:
        """The path that the rules meet for this leaf: its own, or that of what it follows.

        Raises:
            KeyError: As `kind`.
        """
        return self.sources[self._row(path)]

    def _row(self, path: str) -> int:
        from shardrules._plan import rows

        check_type("path", path, str, _PATH)
        return rows.row_of(self._columns, path)


def _check_unused(**is_given: bool) -> None:
    """Checks that none of these arguments is given, which are for the time of a step."""
    if named := [name for name, given in is_given.items() if given]:
        raise ValueError(f"{named[0]}: it is for the time of a step, which needs tokens=")


def _room(hbm: int | None, host_memory: int | None) -> Room:
    """The memory that there is for each device."""
    from shardrules._plan import memory

    for name, size in (("hbm", hbm), ("host_memory", host_memory)):
        if size is not None:
            check_real(name, size)
    return memory.Room(hbm, host_memory)


def _locked(columns: Columns, mesh: MeshLike, **_: frozenset[str]) -> Columns:
    if not columns.is_on(axis_sizes_of(mesh)):
        raise ValueError(f"a locked plan is for the mesh {mesh_shown(columns.axis_sizes)} alone")
    return replace(columns, explicit_axes=explicit_axes_of(mesh))


def _followed(
    params: Columns,
    on_mesh: _OnMesh,
    follow: Callable[[Columns], Columns],
    memory_kind: MemoryKind | None,
    mesh: MeshLike,
    *,
    may_lack: frozenset[str] = frozenset(),
) -> Columns:
    if has_devices(mesh):
        check_memory_on_mesh("for_optimizer", memory_kind, mesh)
    is_same = params.is_on(axis_sizes_of(mesh)) and params.explicit_axes == explicit_axes_of(mesh)
    return follow(params if is_same and not may_lack else on_mesh(mesh, may_lack=may_lack))
