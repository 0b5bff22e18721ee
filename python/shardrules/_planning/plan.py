"""`plan`: what every leaf of a tree gets on a mesh, as columns, before any device is touched.

One walk over the tree, then one correction per kind of leaf; needs no JAX where the mesh is a dict
of axis sizes. Must not know how findings, files or reports are worded.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._arguments import (
    check_file,
    check_real,
    check_tree,
    check_type,
    each,
    integer,
    listed,
    texts,
)
from shardrules._correction import Correction, check_correction
from shardrules._declared import Declared
from shardrules._files.write import write_text
from shardrules._logical.leaves import check_rules_are_for_paths
from shardrules._matching.coverage import Coverage
from shardrules._matching.rules import as_rules, checked_min_size
from shardrules._planning.budget import DeviceBytes, budget
from shardrules._planning.check import DEFAULT_LARGE, check
from shardrules._planning.derive import Companion, Leaves, placed_leaves, with_companions
from shardrules._planning.diff import PlanDiff, diff
from shardrules._planning.explain import Explanation, explanation
from shardrules._planning.findings import Findings
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Kind, Placer
from shardrules._planning.lock import content_of, fingerprint, lock, read_lock
from shardrules._planning.optimizer import optimizer_leaves
from shardrules._planning.survey import Survey, survey
from shardrules._planning.sweep import Sweep, factorizations, sweep
from shardrules._planning.table import table
from shardrules._sharding.device_bytes import check_countable
from shardrules._sharding.mesh import as_mesh, axes_of_type, checked_sizes, resolve_mesh
from shardrules._sharding.shardings import ManualAxes, RulesLike, manual_axes, specs_on_mesh
from shardrules._specs import as_partition_spec
from shardrules._words import brief, mesh_shown

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._sharding.mesh import MeshLike

__all__ = ["Place", "Plan", "plan"]


_MOMENTS: Final = "dtypes, one for each moment such as Adam's two; or plan.for_optimizer(state)"
# What leaves get on a mesh.
Place = Callable[["MeshLike"], Leaves]


def plan(
    tree: Any,
    rules: RulesLike,
    mesh: MeshLike | None = None,
    *,
    min_size: int | None = 0,
    correction: Correction | None = None,
    companions: Iterable[Companion] = (),
) -> Plan:
    """What each leaf of the tree gets on the mesh, and why: to look at, check and budget.

    The specs are those of `named_shardings`; but what goes wrong is a finding of `Plan.check`, and
    an error only when the specs are asked for. No device is needed, and no array is kept.

    Args:
        tree: Any pytree of arrays or abstract arrays; only `.shape` and `.dtype` are read.
        rules: `Rules`, or (pattern, spec) pairs.
        mesh: A Mesh, AbstractMesh or dict of axis sizes; the context's unless given.
        min_size: As in `match_partition_rules`.
        correction: Instead of the dialect's; rules with a `RuleSpec` keep their own.
        companions: Leaves that follow the rules of other paths, such as those of `LORA`,
            `QUANTIZED` or `stacked`; of several that find a leaf's path, the first counts.

    Raises:
        ValueError: No mesh; a dimension is negative, or a dtype unknown.
        TypeError: A rule's spec cannot be made a PartitionSpec, a shape is none, or the tree is no
            tree of arrays; or the rules are for the logical axis names of the tree's boxes.

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
    compiled = as_rules("rules", rules)
    smallest = checked_min_size(min_size)
    check_rules_are_for_paths(compiled, tree)
    # A mesh of the context is taken now: later another one may be in force.
    chosen = mesh if isinstance(mesh, Mapping) else resolve_mesh(mesh)
    sizes = _sizes(chosen)
    base = survey(tree, compiled, smallest)
    policy = correction or compiled.dialect.correction
    return Plan(partial(_placed, base, policy, followers, smallest), sizes, chosen)


def _placed(
    base: Survey,
    correction: Correction,
    companions: tuple[Companion, ...],
    min_size: int,
    mesh: MeshLike,
) -> Leaves:
    sizes, rules = _sizes(mesh), base.rules
    manual = ManualAxes() if isinstance(mesh, Mapping) else manual_axes(mesh)
    specs, spec_of = specs_on_mesh(rules, sizes, correction, manual=manual, made=False)
    unmatched_is_error = rules.dialect.unmatched != "replicate"
    placer = Placer(specs, spec_of, sizes, unmatched_is_error=unmatched_is_error)
    leaves = placed_leaves(base, placer)
    if not companions:
        return leaves
    return with_companions(leaves, rules, placer, companions, min_size)


def _sizes(mesh: MeshLike) -> dict[str, int]:
    """Devices along each axis."""
    return checked_sizes(mesh) if isinstance(mesh, Mapping) else dict(mesh.shape)


class Plan:
    """What each leaf of a tree gets on a mesh; from `shardrules.plan`.

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

    def __init__(self, place: Place, axis_sizes: dict[str, int], mesh: MeshLike) -> None:
        check_countable(axis_sizes)
        leaves = place(mesh)
        self._found = found = leaves.found
        self._place = place
        self._mesh = mesh
        self.paths = found.paths
        """Column: the leaves' paths."""
        self.sources = leaves.sources
        """Column: the paths that the rules meet: those of the leaves, or of what they follow."""
        self.companions = leaves.companions
        """The companions that were given."""
        self.found_by = leaves.found_by or {}
        """Of each row that a companion finds, which; a row whose source is its own path does not
        follow: no rule meets its base's path."""
        self.kind_of = found.kind_of
        """Column, int32: index of the leaf's kind in `kinds`."""
        self.kinds = leaves.kinds
        self.rules = found.rules
        self.axis_sizes = axis_sizes
        """Devices along each mesh axis, in the mesh's order."""
        self.explicit_axes = (
            frozenset() if isinstance(mesh, Mapping) else axes_of_type(mesh, "Explicit")
        )
        """Those of type Explicit; the axes of a dict are of type Auto."""

    @cached_property
    def rule(self) -> npt.NDArray[np.int32]:
        """Column, int32: index of the rule that decides the leaf; -1 if none does."""
        rules = [-1 if kind.rule is None else kind.rule for kind in self.kinds]
        return np.array(rules, np.int32)[self.kind_of]

    @cached_property
    def bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the whole leaf."""
        return np.array([kind.bytes for kind in self.kinds], np.int64)[self.kind_of]

    @property
    def total_bytes(self) -> int:
        """Bytes of all leaves together; their sum where int64 is too small for it, too."""
        counted = zip(self.kinds, self.counts.tolist(), strict=True)
        return sum(kind.bytes * count for kind, count in counted)

    @cached_property
    def device_bytes(self) -> npt.NDArray[np.int64]:
        """Column, int64: bytes of the leaf on the device that holds most of it."""
        return np.array([kind.largest_bytes for kind in self.kinds], np.int64)[self.kind_of]

    @property
    def folded(self) -> list[Folded]:
        """The leaves with siblings folded: patterns such as `layers/{0..60}/w`, a kind each."""
        return self._found.folded

    @cached_property
    def devices(self) -> int:
        """Devices of the mesh."""
        return int(np.prod(list(self.axis_sizes.values()), dtype=np.int64))

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Per kind, int64: how many leaves are of it."""
        return self._found.counts

    @cached_property
    def coverage(self) -> Coverage:
        """How each rule does on the leaves that need one."""
        needed = [kind.rule is not None or kind.problem is not None for kind in self.kinds]
        rows = np.flatnonzero(np.array(needed, bool)[self.kind_of])
        sources = map(self.sources.__getitem__, rows.tolist())
        leaves = dict.fromkeys(self.rules.all_joined(sources), 0)
        return self.rules.for_whole_paths().coverage(leaves, strict=False)

    def check(
        self,
        *,
        large: int = DEFAULT_LARGE,
        replicated: Iterable[str] = (),
        optional_axes: Iterable[str] = (),
        data_axes: Iterable[str] = (),
        head_dim: int | None = None,
        levels: Mapping[str, str] | None = None,
    ) -> Findings:
        """The coverage contract: nothing is replicated or ignored silently.

        | kind | level | what |
        |---|---|---|
        | unmatched | error | leaves that no rule matches |
        | misfit | error | leaves that cannot be sharded as their rule says |
        | unknown-axis | error | axes that rules name and the mesh lacks |
        | catch-all | error, info | leaves that only the catch-all rule matches; info if those of
          them that are replicated are not large together |
        | nnx-value | error | rules that match every leaf of flax nnx through its `value` |
        | replicated | warning | other leaves that are replicated, and large alone or together |
        | uncut | warning | leaves that a mesh axis could cut, as it cuts others like them |
        | correction | warning, info | what the mesh or the shape takes from a spec; info if that
          costs less than `large` |
        | half-head | warning | projections of attention that are cut inside a head |
        | dead | warning | rules that match no leaf |
        | shadowed | warning | rules that match leaves, all of which earlier rules win |
        | siblings | warning | leaves that differ only in numbers, with different specs |
        | companion | warning | leaves that a companion finds, but no rule for their base, so that
          their own rule counts; and companions that find nothing: of `LORA` and `QUANTIZED`, if
          none of their records does |
        | unused-axis | warning, info | mesh axes that cut no leaf and are not declared to be for
          data; info if little could be saved by them |

        Args:
            large: Minimum bytes on a device for a replicated leaf or a correction to be a warning.
                Default: 16 MiB. What is large only together with others must also be more than 2 %
                of the fullest device's bytes.
            replicated: Patterns, searched in the paths, of leaves that are meant to be replicated.
            optional_axes: Mesh axes that rules name and a mesh may lack, such as "sp".
            data_axes: Mesh axes that cut batches and sequences alone, such as "dp".
            head_dim: Size of an attention head. Default: that of a `q_norm` or `k_norm` beside the
                projections, if there is one.
            levels: Per kind another level: "error", "warning", "info", or "off".

        Returns:
            All findings, the worst first.

        Raises:
            ValueError: A kind or level that does not exist.
            re.error: A pattern is invalid.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((4096, 4096), "float32")}
            >>> plan = sr.plan(tree, [("kernel", "tp"), (".*", ())], {"tp": 8})
            >>> [(finding.level, finding.kind) for finding in plan.check()]
            [('error', 'catch-all'), ('warning', 'unused-axis'), ('warning', 'dead')]
        """
        check_real("large", large)
        check_type("levels", levels, Mapping | None, "a dict such as {'dead': 'error'}")
        patterns = listed("replicated", replicated, "patterns")
        each("replicated", patterns, str | re.Pattern, "a pattern")
        declared = Declared(
            patterns, texts("optional_axes", optional_axes), texts("data_axes", data_axes)
        )
        size = None if head_dim is None else integer("head_dim", head_dim, least=1)
        return check(self, large=large, declared=declared, head_dim=size, levels=levels)

    def specs(self) -> Any:
        """The tree of PartitionSpecs, corrected; those of `named_shardings`.

        Raises:
            ValueError: Leaves have none; the message is that of `check`.
        """
        return self._mapped([as_partition_spec(spec) for spec in self._all_specs()])

    def shardings(self) -> Any:
        """The tree of NamedShardings; on a dict of axis sizes they have an AbstractMesh.

        Raises:
            ValueError: As `specs`.
        """
        return self._mapped(self._shardings_of_kinds())

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
        from jax import ShapeDtypeStruct

        shardings = self._shardings_of_kinds()
        return self._mapped(
            [
                None if k.shape is None else ShapeDtypeStruct(k.shape, k.dtype, sharding=sharding)
                for k, sharding in zip(self.kinds, shardings, strict=True)
            ]
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return table(self)

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._mesh, Mapping) and hasattr(self._mesh, "devices"):
            raise TypeError(
                "a plan on a Mesh of devices cannot be pickled, as devices cannot; pickle "
                "plan.on_mesh(plan.axis_sizes), or keep plan.lock()"
            )
        return self.__dict__

    def on_mesh(self, mesh: MeshLike) -> Plan:
        """The same leaves and rules on another mesh; the tree is not walked again.

        Raises:
            ValueError, TypeError: It is no mesh; or the plan is that of a lock.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> plan.on_mesh({"tp": 8}).device_bytes
            array([16])
        """
        chosen = mesh if isinstance(mesh, Mapping) else as_mesh(mesh)
        return Plan(self._place, _sizes(chosen), chosen)

    def sweep(
        self,
        meshes: Iterable[Mapping[str, int]] | None = None,
        *,
        devices: int | None = None,
        axes: Iterable[str] | None = None,
        fixed: Mapping[str, int] | None = None,
        hbm: int | None = None,
        gradients: Any = None,
        optimizer: Iterable[Any] | None = None,
    ) -> Sweep:
        """The same leaves and rules on many meshes: bytes per device, corrections, what fits.

        Args:
            meshes: Which; all factorizations of `devices` over `axes` unless given.
            devices: How many, for the factorizations; the plan's own number unless given.
            axes: Their axes; the plan's own unless given.
            fixed: More axes, of these sizes in all meshes.
            hbm: Bytes of memory of a device; rows tell whether they fit.
            gradients: As in `bytes_per_device`.
            optimizer: The dtypes of its moments, as there.

        Returns:
            A row for each mesh, those with the fewest bytes on a device first.

        Raises:
            ValueError: A mesh is none; no axes; or more than 10,000 meshes.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 4})
            >>> [(row.mesh, row.bytes) for row in plan.sweep()]
            [({'dp': 1, 'tp': 4}, 32), ({'dp': 2, 'tp': 2}, 64), ({'dp': 4, 'tp': 1}, 128)]
        """
        if hbm is not None:
            check_real("hbm", hbm)
        check_type("fixed", fixed, Mapping | None, "a dict of axis sizes")
        moments = None if optimizer is None else listed("optimizer", optimizer, _MOMENTS)
        if meshes is None:
            sizes = checked_sizes(fixed) if fixed else {}
            left = tuple(name for name in self.axis_sizes if name not in sizes)
            names = left if axes is None else texts("axes", axes)
            count = self.devices if devices is None else integer("devices", devices, 1)
            meshes = factorizations(count, names, sizes)
        else:
            check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")
        return sweep(self, meshes, hbm=hbm, gradients=gradients, optimizer=moments)

    def bytes_per_device(
        self, *, gradients: Any = None, optimizer: Plan | Iterable[Any] | None = None
    ) -> DeviceBytes:
        """Bytes on each device, uneven shards included.

        `DeviceBytes` says which leaves count as parameters, and which as the optimizer's.

        Args:
            gradients: A dtype to count gradients of that type, sharded like the parameters; True
                for the parameters' own types.
            optimizer: The optimizer's state, if it is not in the tree: its plan, or the dtypes of
                moments of the parameters' shapes and specs, such as Adam's two.

        Raises:
            ValueError: The optimizer's plan is for another mesh; or a dtype is unknown.
            TypeError: The optimizer is neither a plan nor dtypes, such as its name.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"dp": 1, "tp": 2})
            >>> adam = ("float32", "float32")
            >>> plan.bytes_per_device(gradients="float32", optimizer=adam).total
            array([[448, 448]])
        """
        if optimizer is None or isinstance(optimizer, Plan):
            return budget(self, gradients, optimizer)
        return budget(self, gradients, listed("optimizer", optimizer, _MOMENTS))

    def fingerprint(self) -> str:
        """64 hex digits that change with any path, shape, dtype, spec or mesh axis size.

        The same in every process and every run, whatever the order of the leaves.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).fingerprint()[:8]
            '229b934b'
        """
        return fingerprint(self)

    def lock(self, path: str | Path | None = None) -> str:
        """The plan as a text to keep under version control: JSON, a line for each folded path.

        Args:
            path: A file to write it to as well.

        Raises:
            ValueError: A spec has unreduced or reduced axes.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> sr.Plan.from_lock(plan.lock()).fingerprint() == plan.fingerprint()
            True
        """
        check_file("path", path)
        text = lock(self)
        if path is not None:
            write_text(path, text)
        return text

    @classmethod
    def from_lock(cls, lock: str | Path) -> Plan:
        """The plan that was locked: its specs are those of the lock, as they were decided then.

        Its tree is a flat dict of the paths. It cannot go to another mesh.

        Args:
            lock: A lock's text, or its file.

        Raises:
            FileError: It is no lock; a ValueError.
        """
        check_type("lock", lock, str | os.PathLike, "a lock's text, or the path of its file")
        found, kinds, sizes = read_lock(*content_of(lock))
        return cls(partial(_locked, Leaves(found, kinds, found.paths), sizes), sizes, sizes)

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan has otherwise: rules, and leaves that came, went, or get other specs.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> plan = sr.plan(tree, [("w", "tp")], {"tp": 2})
            >>> print(plan.diff(sr.plan(tree, [("w", ())], {"tp": 2})))
            rules changed: rule 0
            ~ w  P('tp', None) -> P()  (+64 B on each device)
            1 leaf changed; 64 B -> 128 B on the fullest device
        """
        check_type("other", other, Plan, "a Plan")
        return diff(self, other)

    def for_optimizer(self, state: Any, *, zero1: str | None = None) -> Plan:
        """The plan of an optimizer's state: each leaf is cut as its parameter is.

        A leaf's parameter is the one whose path ends the leaf's, whole components only; of several
        the longest. In a state of Keras, `dense_kernel_momentum` belongs to `dense/kernel`. A
        moment of the parameter's shape gets its spec; one that lacks a dimension, as Adafactor's
        `v_row` and `v_col` (`optax.scale_by_factored_rms`), lacks its entry; a history with a
        dimension in front gets it behind None; of dimensions that are 1, none is cut. All else is
        replicated; `Kind.origin` says which of these it was.

        Args:
            state: Any pytree of arrays or abstract arrays: `jax.eval_shape(tx.init, params)` of
                optax, an nnx.Optimizer's state, or a whole train state with its parameters.
            zero1: A mesh axis to cut what follows a parameter by as well, as in ZeRO-1, unless it
                does so already: along the dimension that divides and of which each device holds
                most, the first of equals. `RuleSpec.units` do not bind it. In a tree with leaves
                of an optimizer's state, by the names of `DeviceBytes`, those alone are cut.

        Raises:
            ValueError: The mesh has no axis `zero1`; or as `plan`.
            TypeError: The state is no tree of arrays.

        Example:
            >>> import jax, shardrules as sr
            >>> params = {"w": jax.ShapeDtypeStruct((8, 6), "bfloat16")}
            >>> plan = sr.plan(params, [("w", ("fsdp", "tp"))], {"dp": 2, "fsdp": 2, "tp": 2})
            >>> state = [{"count": jax.ShapeDtypeStruct((), "int32")}, {"mu": params}]
            >>> plan.for_optimizer(state, zero1="dp").specs()[1]["mu"]["w"][0]
            ('fsdp', 'dp')
        """
        check_tree("state", state)
        check_type("zero1", zero1, str | None, "a mesh axis or None")
        return Plan(partial(_followed, self, state, zero1), self.axis_sizes, self._mesh)

    def explain(self, path: str) -> Explanation:
        """Why the leaf of this path gets what it gets: each rule tried, and each correction.

        Args:
            path: Of a leaf; or a folded one, as the table has it, for the first of its leaves.

        Raises:
            KeyError: No leaf has this path; the message has the nearest ones.
        """
        return explanation(self, self._row(path))

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        findings: Findings | None = None,
        sweep: Sweep | None = None,
        title: str = "Sharding plan",
        hbm: int | None = None,
        gradients: Any = None,
        optimizer: Plan | Iterable[Any] | None = None,
    ) -> str:
        """The plan as one HTML page that works offline; needs `shardrules[report]`.

        Args:
            path: The file to write, if any; it is replaced at once.
            findings: To show instead of those of `check`.
            sweep: Rows of a mesh sweep, for a chart of the bytes by mesh; with the same gradients
                and optimizer.
            title: Such as the model's name.
            hbm: Bytes of memory of a device: the page says whether the plan fits.
            gradients: As in `bytes_per_device`.
            optimizer: As in `bytes_per_device`.

        Returns:
            The page.

        Raises:
            ValueError: The sweep counts other bytes for the plan's mesh; or as `bytes_per_device`.
            ModuleNotFoundError: plotly is not installed; the message says how to get it.
            OSError: The file cannot be written.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> page = sr.plan(tree, [("w", "tp")], {"tp": 2}).to_html()
            >>> "Content-Security-Policy" in page
            True
        """
        from shardrules._planning.report.page import report_html

        check_file("path", path)
        check_type("findings", findings, Findings | None, "the Findings of Plan.check")
        check_type("sweep", sweep, Sweep | None, "the Sweep of Plan.sweep")
        check_type("title", title, str, "a string")
        if hbm is not None:
            check_real("hbm", hbm)
        shown = self.check() if findings is None else findings
        held = self.bytes_per_device(gradients=gradients, optimizer=optimizer)
        page = report_html(self, shown, sweep, title, hbm=hbm, held=held)
        if path is not None:
            write_text(path, page)
        return page

    def _repr_html_(self) -> str:
        from shardrules._planning.notebook import table_html

        return table_html(self)

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
        check_type("path", path, str, "a string")
        row = self._found.rows.get(path)
        if row is not None:
            return row
        first_of = {one.pattern: int(one.rows[0]) for one in self.folded}
        if path not in first_of:
            raise KeyError(_no_such_path(path, list(first_of)))
        return first_of[path]

    def _all_specs(self) -> list[Any]:
        if any(kind.problem is not None for kind in self.kinds):
            raise ValueError(self._misfits())
        return [kind.spec for kind in self.kinds]

    def _misfits(self) -> str:
        errors = (one for one in self.check() if one.kind in ("unmatched", "misfit"))
        return "\n".join(map(str, errors))

    def _shardings_of_kinds(self) -> list[Any]:
        from jax.sharding import NamedSharding

        on_mesh = as_mesh(self._mesh)
        made: dict[Any, NamedSharding] = {}
        try:
            for spec in self._all_specs():
                made.setdefault(spec, NamedSharding(on_mesh, as_partition_spec(spec)))
        except ValueError as error:
            raise ValueError(self._misfits()) from error
        return [made[spec] for spec in self._all_specs()]

    def _mapped(self, of_kind: list[Any]) -> Any:
        from jax import tree_util

        of_row = [of_kind[kind] for kind in self.kind_of.tolist()]
        return tree_util.tree_map(of_row.__getitem__, self._found.tree)


def _locked(leaves: Leaves, axis_sizes: dict[str, int], mesh: MeshLike) -> Leaves:
    if list(_sizes(mesh).items()) != list(axis_sizes.items()):
        raise ValueError(f"a locked plan is for the mesh {mesh_shown(axis_sizes)} alone")
    return leaves


def _followed(params: Plan, state: Any, zero1: str | None, mesh: MeshLike) -> Leaves:
    same = list(_sizes(mesh).items()) == list(params.axis_sizes.items())
    there = params if same else params.on_mesh(mesh)
    return optimizer_leaves(there, state, zero1)


def _no_such_path(path: str, patterns: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(path[:1000], patterns, n=3, cutoff=0.5)
    return f"no leaf has the path {brief(path)}" + (f"; near it: {', '.join(near)}" if near else "")
