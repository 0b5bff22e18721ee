"""`Plan`: the shardings of the leaves of a tree on a mesh, and the questions that it answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from shardrules._base.arguments import (
    as_tuple,
    byte_size,
    check_file,
    check_items,
    check_type,
    hbm_bytes,
    integer,
    strings,
)
from shardrules._base.dtypes import key_dtype
from shardrules._base.io import write_text
from shardrules._base.rule_specs import MemoryKind, check_memory_kind, plain_spec
from shardrules._base.specs import Entries, as_partition_spec
from shardrules._base.text import answer
from shardrules._place.decider import ByNames, ByPaths, Decider, RulesLike, as_decider
from shardrules._place.mesh import AnyMesh, MeshLike, has_devices, resolve_mesh
from shardrules._place.shardings import Shardings
from shardrules._plan.align import (
    check_planned,
    kind_shardings,
    kind_specs,
    mapped,
    match_rows,
    put_as_planned,
    shardings_in,
    survey_planned,
)
from shardrules._plan.findings import NOTHING, CheckKind, Declared, Findings, Level, all_declared
from shardrules._plan.fold import Folded, rows_meant
from shardrules._plan.kinds import DEFAULT_LARGE, Kind, Spec, coverage_of
from shardrules._plan.leaves import Leaves, leaves_by_rules, leaves_by_specs
from shardrules._plan.memory import DeviceBytes, Training
from shardrules._plan.resolve import PutOnMesh, SizedMesh, put_by_rules, sized_mesh
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.matcher import Coverage
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.compare import PlanDiff, Transfer
    from shardrules._plan.report import Explanation, HasSection
    from shardrules._plan.sweep import Sweep
    from shardrules._program.topologies.topology import Topology

_SECTIONS: Final = "what has a section: [plan.sweep(), proof.program, shardrules.suggest(model)]"


@answer
class Plan(Decider):
    """Shardings of the leaves of a tree on a mesh; from `shardrules.plan`.

    `paths`, `kind_of` and other columns have a row for each leaf, in the order of the walk; what
    leaves have in common is in `kinds`, once for each kind.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"layers": [{"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")} for _ in range(4)]}
        >>> sr.plan(tree, [("w", "tp")], {"tp": 2})
        4 leaves, 512 B on tp=2 (2 devices): 256 B on the fullest device: params 256 B
        path             leaves  shape   dtype     rule  spec           bytes  per device
        layers/{0..3}/w       4  [8, 8]  bfloat16     0  P('tp', None)  512 B       256 B
    """

    rules: Rules | LogicalRules
    """The rules that decide the leaves."""
    paths: list[str]
    """The leaves' paths: a column."""
    sources: list[str]
    """The paths that rules match, of the leaves or of what they follow: a column."""
    kind_of: npt.NDArray[np.int32]
    """The index of each leaf's kind in `kinds`: a column, int32."""
    kinds: list[Kind]
    """The kinds of leaves: one record for all leaves that are alike."""
    mesh: MeshLike
    """The mesh that the tree is planned on, as it was given."""
    axis_sizes: dict[str, int]
    """Devices along each axis of `mesh`, in its order."""

    def __init__(
        self,
        _put: PutOnMesh,
        _mesh: SizedMesh,
        _declared: Declared = NOTHING,
    ) -> None:
        self._put, self._mesh, self._declared = _put, _mesh, _declared
        self.mesh, self.axis_sizes = _mesh
        self._leaves, self.kinds = leaves, _ = _put(_mesh)
        self.rules, self.paths, self.sources = leaves.rules, leaves.paths, leaves.sources
        self.kind_of = leaves.kind_of

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of leaves of each kind, int64."""
        return self._leaves.counts

    @property
    def folded(self) -> list[Folded]:
        """Siblings folded: patterns such as `layers/{0..60}/w`, a kind each."""
        return self._leaves.folded

    @cached_property
    def rule(self) -> npt.NDArray[np.int32]:
        """The index of the rule that decides each leaf, or -1: a column, int32."""
        rules = [-1 if kind.rule is None else kind.rule for kind in self.kinds]
        return np.array(rules, np.int32)[self.kind_of]

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves together, exactly where int64 is too small for the sum."""
        counted = zip(self.kinds, self.counts.tolist(), strict=True)
        return sum([kind.bytes * count for kind, count in counted])

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return prod(self.axis_sizes.values())

    @cached_property
    def coverage(self) -> Coverage:
        """The number of leaves that each rule matches and wins, among those that need a rule."""
        return coverage_of(self._leaves, self.kinds)

    def __getstate__(self) -> dict[str, Any]:
        if has_devices(self.mesh):
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

    def __len__(self) -> int:
        return len(self.paths)

    def _parts(self) -> list[Any]:
        from shardrules._plan.report import plan_parts

        return plan_parts(self)

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
        return self._on(sized_mesh(mesh))

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
            rows = match_rows(self.paths, decider.paths)
            check_planned(self._leaves, rows, decider._leaves)
            return decider._for(self._leaves, rows, self.mesh)
        if isinstance(self.rules, LogicalRules) != isinstance(decider, ByNames):
            raise TypeError(
                "rules: the plan has logical rules: give LogicalRules, or plan the tree itself"
                if isinstance(self.rules, LogicalRules)
                else "rules: these are logical, and the plan's are of paths: plan the tree itself"
            )
        if isinstance(decider, ByNames):
            leaves = replace(self._leaves, rules=decider.rules)
        elif isinstance(decider, ByPaths):
            leaves = leaves_by_rules(self._leaves, decider.rules)
        else:
            leaves = leaves_by_specs(self._leaves, rules)
        # What was declared is about the rules of this plan.
        return Plan(partial(put_by_rules, leaves), self._mesh)

    def for_optimizer(
        self, state: Any, *, zero1: str | None = None, memory_kind: MemoryKind | None = None
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

        Axes that a Variable or box of the state names, other than its parameter's, decide instead:
        those of flax's `nnx.Param(..., optimizer_sharding=...)`.

        Args:
            state: Any pytree of arrays or abstract arrays: `jax.eval_shape(tx.init, params)` of
                optax, an nnx.Optimizer's state, or a whole train state with its parameters.
            zero1: A mesh axis to cut what follows a parameter by as well, as in ZeRO-1, unless it
                does so already: along the dimension that divides and of which each device holds
                most, the first of equals. `RuleSpec.units` do not bind it. In a tree with leaves
                of an optimizer's state, by the names of `DeviceBytes`, those alone are cut.
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
        from shardrules._plan.state import put_of_state

        if state is None:
            raise TypeError(
                "state is None; give the optimizer's state, such as "
                "jax.eval_shape(optimizer.init, params); one without arrays is ()"
            )
        check_type("zero1", zero1, str | None, "a mesh axis or None")
        check_memory_kind("memory_kind", memory_kind)
        put = put_of_state(self, state, zero1=zero1, memory_kind=memory_kind)
        return Plan(put, self._mesh, self._declared)

    def check(
        self,
        *,
        large: float | str = DEFAULT_LARGE,
        replicated: Iterable[str | re.Pattern[str]] = (),
        data_axes: Iterable[str] = (),
        head_dim: int | None = None,
        hbm: float | str | None = None,
        levels: Mapping[CheckKind, Level | Literal["off"]] | None = None,
    ) -> Findings:
        """Check the coverage: no large leaf is replicated and no rule for paths ignored silently.

        | you have | it looks |
        |---|---|
        | rules, and a tree of shapes | `plan.check()` |
        | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
        | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
        | live arrays | `sr.audit(params, plan)` |
        | a small step, and this machine | `sr.rehearse(step_on, {"fsdp": 4, "tp": 2})` |

        A plan of `suggest` knows what its rules declare; arguments add to that.

        The kinds of findings, with their levels and meanings, are in docs/findings.md.

        Args:
            large: Minimum bytes on a device for a replicated leaf or a correction to be a warning.
                Default: 16 MiB. What is large only together with others must also be more than 2 %
                of the fullest device's bytes.
            replicated: Patterns, searched in the paths, of leaves that are meant to be replicated.
            data_axes: Mesh axes that cut batches and sequences alone, such as "dp".
            head_dim: Size of an attention head. Default: that of a `q_norm` or `k_norm` beside the
                projections, if there is one.
            hbm: Bytes of memory of a device, as a number or "95GB", into which the leaves are to
                fit. Default: any.
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

        check_type("levels", levels, Mapping | None, "a dict such as {'dead': 'error'}")
        patterns = as_tuple("replicated", replicated, "patterns")
        if patterns:
            check_items("replicated", patterns, str | re.Pattern, "a pattern")
        arguments = Declared(replicated=patterns, data_axes=strings("data_axes", data_axes))
        declared = all_declared(self._declared, arguments)
        size = None if head_dim is None else integer("head_dim", head_dim, least=1)
        return check.run_checks(
            self,
            large=byte_size("large", large),
            declared=declared,
            head_dim=size,
            hbm=hbm_bytes(hbm),
            levels=levels,
        )

    def bytes_per_device(
        self, *, gradients: Any = None, optimizer: Self | Iterable[Any] | None = None
    ) -> DeviceBytes:
        """Count the bytes on the device that holds most, and in the host's memory.

        `DeviceBytes` says which leaves count as parameters, and which as the optimizer's.

        Args:
            gradients: The dtype of gradients, which are sharded like the parameters; True for the
                parameters' own dtypes. Default: none are counted.
            optimizer: The optimizer's state, if it is not in the tree: its plan, or the dtypes of
                its moments, which have the parameters' shapes, specs and memory. Adam has two.

        Raises:
            ValueError: The optimizer's plan is for another mesh, or the tree has a state already;
                or a dtype is unknown.
            TypeError: The optimizer is neither a plan nor dtypes, such as its name.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 2})
            >>> adam = ("float32", "float32")
            >>> print(plan.bytes_per_device(gradients="float32", optimizer=adam))
            448 B on the fullest device: params 64 B, gradients 128 B, optimizer 256 B
        """
        return Training(gradients, optimizer).bytes_with(self)

    def sweep(
        self,
        meshes: Iterable[Mapping[str, int]] | None = None,
        *,
        devices: int | str | Topology | None = None,
        axes: Iterable[str] | None = None,
        hbm: float | str | None = None,
        gradients: Any = None,
        optimizer: Self | Iterable[Any] | None = None,
    ) -> Sweep:
        """Put the leaves and rules on many meshes: bytes per device, and what fits.

        Args:
            meshes: The meshes. Axes of the plan or of others of them that one lacks have size 1
                there. Default: all factorizations of `devices` over `axes`.
            devices: Devices of these factorizations; or the name of a `Topology`, such as
                "v5p:8x8x8", for the meshes that JAX builds on it without splitting a dimension of
                the torus. Default: as many as the plan has.
            axes: Axes of these factorizations. Default: those of the plan.
            hbm: Bytes of memory of a device, for `SweepRow.fits`. Default: those of the topology.
            gradients: As in `bytes_per_device`.
            optimizer: As in `bytes_per_device`; a plan is put on each mesh.

        Returns:
            A row for each mesh, those with the fewest problems first, of these what fits, of these
            the fewest bytes. What differs by less than 5 %, or by less than 5 % of `hbm`, is a tie.
            Then the fewest devices along axes that do not split tokens, by their names, come first,
            then the fewest corrections, then bytes.

        Raises:
            ValueError: A mesh is invalid, there are no axes, or there are more than 10,000 meshes.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 4})
            >>> [(row.mesh, row.bytes) for row in plan.sweep()]
            [({'dp': 1, 'tp': 4}, 32), ({'dp': 2, 'tp': 2}, 64), ({'dp': 4, 'tp': 1}, 128)]
        """
        from shardrules._plan import sweep

        training = Training(gradients, optimizer)
        return sweep.sweep_meshes(
            self, meshes, devices=devices, axes=axes, hbm=hbm_bytes(hbm), training=training
        )

    def diff(self, other: Plan) -> PlanDiff:
        """Compare with another plan: rules, new and missing leaves, other shardings.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> print(plan.diff(sr.plan(tree, [("w", ())], {"tp": 2})))
            rules:
            - 'w' -> P('tp')
            + 'w' -> P()
            ~ w  P('tp', None) -> P()  (+64 B on each device)
            1 leaf changed; 64 B -> 128 B on the fullest device
        """
        from shardrules._plan.compare import plan_diff

        check_type("other", other, Plan, "a Plan; that of a lock is Plan.from_lock(path)")
        return plan_diff(self, other)

    def transfer(self, other: Plan) -> Transfer:
        """Count what moves from these shardings to those of another plan of the same leaves.

        What a device holds already it need not receive. Between two meshes of devices these are
        the same devices, in whatever order. If one of the meshes has none, such as a dict, device
        i of one mesh is device i of the other, both in row-major order.

        Args:
            other: A plan of leaves with the same paths, shapes and dtypes, on any mesh.

        Raises:
            ValueError: The leaves are not the same; a leaf gets no sharding, or has unreduced or
                unconstrained axes; or there are more bytes than 64 bits count.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> trainer = sr.plan(tree, [("w", ("fsdp", "tp"))], {"fsdp": 4, "tp": 1})
            >>> print(moved := trainer.transfer(trainer.on_mesh({"fsdp": 1, "tp": 2})))
            fsdp=4,tp=1 -> fsdp=1,tp=2: 2 devices in both
            96 B received in all; at most 48 B by a device
            path  leaves  shape   dtype     spec             received  most by a device
            w          1  [8, 8]  bfloat16  P('fsdp', 'tp')      96 B              48 B
            >>> moved.received
            array([[48, 48]])
        """
        from shardrules._plan.compare import transfer

        check_type("other", other, Plan, "a Plan; that of a lock is Plan.from_lock(path)")
        return transfer(self, other)

    def explain(self, path: str) -> Explanation:
        """Explain why the leaf of this path gets its spec, rule by rule, and each correction.

        Args:
            path: A leaf's path; or what stands for leaves that are alike, the first of which is
                explained: a folded path of the table, a glob with `*` and `?`, which may be
                separators too, or the end of paths, from one component on.

        Raises:
            KeyError: No leaf has this path, and the message has the nearest ones; or leaves of
                several folded paths have it, and the message has these.

        Example:
            >>> import jax, shardrules as sr
            >>> layer = {"up": {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}}
            >>> plan = sr.plan({"layers": [layer] * 4}, [("w", "tp")], {"tp": 2})
            >>> why = plan.explain("up/w")
            >>> why.path, why.leaves, plan.explain("layers/*/w") == why
            ('layers/0/up/w', 4, True)
        """
        from shardrules._plan.report import explanation

        keys = "a string, as in plan.paths, such as 'layers/0/w' for JAX's keys of that leaf"
        check_type("path", path, str, keys)
        return explanation(self, rows_meant(self, path))

    def specs(self) -> Any:
        """Return the tree of PartitionSpecs, corrected; those of `named_shardings`.

        Raises:
            ValueError: Some leaves get no spec. The message has their number, and lists the first.
        """
        return mapped(self, map(as_partition_spec, kind_specs(self)))

    def shardings(self) -> Any:
        """Return the tree of NamedShardings; on a dict of sizes they have an AbstractMesh.

        Raises:
            ValueError: As `specs`.
        """
        return mapped(self, kind_shardings(self))

    def abstract(self) -> Any:
        """Return ShapeDtypeStructs with their shardings, to restore a checkpoint into.

        haliax's arrays come without their NamedArrays; its guide puts shardings into them.

        Raises:
            ValueError: As `specs`.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).abstract()["w"].sharding.spec[0]
            'tp'
        """
        from jax import ShapeDtypeStruct

        kinds = zip(self.kinds, kind_shardings(self), strict=True)
        arrays = [
            None
            if kind.shape is None
            else ShapeDtypeStruct(
                kind.shape, key_dtype(str(kind.dtype)) or kind.dtype, sharding=sharding
            )
            for kind, sharding in kinds
        ]
        return mapped(self, arrays)

    def fingerprint(self) -> str:
        """Return 64 hex digits that change with any path, shape, dtype, spec, memory or mesh axis.

        The same in every process and every run, whatever the order of the leaves; and for specs
        that are alike as written, such as P("tp") and P("tp", None).

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).fingerprint()[:8]
            '3fe8a7a3'
        """
        from shardrules._plan.compare import plan_fingerprint

        return plan_fingerprint(self)

    def lock(self, path: str | Path | None = None) -> str:
        """Write the plan as a text for version control: JSON, a line for each folded path.

        Args:
            path: A file to write it to as well.

        Raises:
            ValueError: There are more than a million leaves, two have the same path, or a name or
                a spec cannot be written, such as one with unconstrained dimensions.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> sr.Plan.from_lock(plan.lock()).fingerprint() == plan.fingerprint()
            True
        """
        from shardrules._plan.lock import lock_text

        check_file("path", path)
        text = lock_text(self)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_lock(cls, lock: str | Path) -> Plan:
        """Read a locked plan, with the specs as they were decided then.

        Its tree is a flat dict of the paths. It cannot be put on another mesh.

        Args:
            lock: A lock's text, or its file.

        Raises:
            FileError: It is not a lock; a ValueError.
        """
        from shardrules._plan.lock import content_of, read_lock

        check_type("lock", lock, str | os.PathLike, "a lock's text, or the path of its file")
        put, axis_sizes = read_lock(*content_of(lock, "Plan.lock"))
        return cls(put, sized_mesh(axis_sizes))

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        sections: Iterable[HasSection] = (),
        title: str = "Sharding plan",
        hbm: float | str | None = None,
        gradients: Any = None,
        optimizer: Self | Iterable[Any] | None = None,
    ) -> str:
        """Write the plan as one HTML page that works offline.

        Args:
            path: The file to write, if any; it is replaced in one step.
            sections: What the page shows beside the plan, as a notebook shows it: its
                `Findings` (default: those of `check`); a `Sweep` with the same gradients
                and optimizer; the `Suggestion` of `suggest` for the same leaves; the `Solution` of
                `solve`; the `Program` of `inspect`, for a step that is compiled for the plan's
                mesh; and the time of a proof, `proof.time`.
            title: The page's title, such as the model's name.
            hbm: Bytes of memory of a device: the page says whether the plan fits.
            gradients: As in `bytes_per_device`.
            optimizer: As in `bytes_per_device`.

        Returns:
            The page.

        Raises:
            ValueError: A section is about other bytes, leaves or another mesh; or as
                `bytes_per_device`.
            TypeError: What is given as a section has none.
            OSError: The file cannot be written.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> page = plan.to_html(sections=[plan.sweep()])
            >>> "Content-Security-Policy" in page
            True
        """
        from shardrules._plan.report import HasSection, Page, plan_page

        check_file("path", path)
        parts = as_tuple("sections", sections, _SECTIONS)
        check_items("sections", parts, HasSection, _SECTIONS)
        check_type("title", title, str, "a string")
        needed = Training(gradients, optimizer).bytes_with(self)
        page = plan_page(Page(self, needed, hbm_bytes(hbm)), parts, title)
        if path is not None:
            write_text(path, page)
        return page

    def _declaring(self, declared: Declared) -> Plan:
        """Return the same plan, with what `check` is to know about its rules."""
        return Plan(self._put, self._mesh, declared)

    def _on(self, mesh: SizedMesh) -> Plan:
        """Return the plan on the mesh; itself if that is its own."""
        return self if mesh is self._mesh else Plan(self._put, mesh, self._declared)

    def _for(self, leaves: Leaves, rows: list[int], mesh: MeshLike | None) -> Plan:
        """Plan leaves as this plan's of these rows, on its mesh or another."""
        planned = self if mesh is None else self.on_mesh(mesh)
        return Plan(partial(put_as_planned, planned, leaves, rows), planned._mesh, self._declared)

    def _spec_of_rule(self, index: int) -> Spec:
        """Return the spec that a rule asks for; of one dimension for a logical rule."""
        value = self.rules[index][1]
        is_for_paths = self._leaves.path_rules is not None
        return plain_spec(value) if is_for_paths else Entries((value,))

    def _meshes(self, mesh: MeshLike | None) -> set[AnyMesh]:
        return {resolve_mesh(self.mesh if mesh is None else mesh)}

    def _shardings(self, tree: Any, mesh: MeshLike | None) -> Shardings:
        planned = self if mesh is None else self.on_mesh(mesh)
        leaves, rows = survey_planned(tree, self._leaves)
        return shardings_in(planned, tree, leaves.tree, rows)
