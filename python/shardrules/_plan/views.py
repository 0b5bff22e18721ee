"""`Plan`'s views of its leaves: findings, bytes, specs, explanations, the lock, the report."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from shardrules._base.arguments import (
    as_tuple,
    check_bytes,
    check_file,
    check_items,
    check_type,
    integer,
    strings,
)
from shardrules._base.atomic_write import write_text
from shardrules._base.rule_specs import MemoryKind
from shardrules._base.text import MOST_HTML, mesh_shown
from shardrules._place.mesh import MeshLike
from shardrules._plan.findings import CheckKind, Declared, Findings, Level, all_declared
from shardrules._plan.memory import DeviceBytes, room_of
from shardrules._plan.resolve import OnMesh, sized_mesh
from shardrules._plan.show import plan_text, table_html
from shardrules._plan.state import Training
from shardrules._plan.table import DEFAULT_LARGE, Columns, Kind

if TYPE_CHECKING:
    from shardrules._plan.explain import Explanation
    from shardrules._plan.report import CompiledProgram, CompiledTime, Proposal, Proposed, Solved
    from shardrules._plan.sweep import Sweep
    from shardrules._program.topologies.topology import Topology

_MOST_IN_NOTEBOOK = 100_000  # leaves; a check of more takes long
_PATH = "a string, as in plan.paths, such as 'layers/0/w' for JAX's keys of that leaf"


class Views(Columns):
    """Views of the leaves and their specs: methods of `Plan`."""

    _on_mesh: OnMesh
    _mesh: MeshLike
    _declared: Declared

    @property
    def mesh(self) -> MeshLike:
        """Returns the mesh that the tree is planned on, as it was given."""
        return self._mesh

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
        """Check the coverage: no leaf is replicated and no rule ignored without a finding.

        | you have | it looks |
        |---|---|
        | rules, and a tree of shapes | `plan.check()` |
        | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
        | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
        | live arrays | `sr.audit(params, plan)` |

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

        check_bytes("large", large)
        check_type("levels", levels, Mapping | None, "a dict such as {'dead': 'error'}")
        patterns = as_tuple("replicated", replicated, "patterns")
        if patterns:
            check_items("replicated", patterns, str | re.Pattern, "a pattern")
        arguments = Declared(
            replicated=patterns,
            optional_axes=strings("optional_axes", optional_axes),
            data_axes=strings("data_axes", data_axes),
        )
        declared = all_declared(self._declared, arguments)
        size = None if head_dim is None else integer("head_dim", head_dim, least=1)
        columns: Columns = self
        if any(loss.is_error for kind in self.kinds for loss in kind.losses):
            optional = frozenset(declared["optional_axes"])
            columns = self._on_mesh(sized_mesh(self._mesh), may_lack=optional)
        return check.run_checks(
            columns,
            large=large,
            declared=declared,
            head_dim=size,
            hbm=room_of(hbm, None).hbm,
            levels=levels,
        )

    def bytes_per_device(
        self,
        *,
        gradients: Any = None,
        optimizer: Self | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        activations: Self | None = None,
    ) -> DeviceBytes:
        """Count the bytes on each device and in the host's memory, uneven shards included.

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
        training = Training(gradients, optimizer, optimizer_memory_kind, activations)
        return training.bytes_with(self)

    def sweep(
        self,
        meshes: Iterable[Mapping[str, int]] | None = None,
        *,
        devices: int | str | Topology | None = None,
        axes: Iterable[str] | None = None,
        fixed: Mapping[str, int] | None = None,
        hbm: int | None = None,
        host_memory: int | None = None,
        gradients: Any = None,
        optimizer: Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
    ) -> Sweep:
        """Put the leaves and rules on many meshes: bytes per device, and what fits.

        Args:
            meshes: The meshes, each of which may lack axes of the others. Default: all
                factorizations of `devices` over `axes`.
            devices: Devices of these factorizations; or the name of a `Topology`, such as
                "v5p:8x8x8", for the meshes that JAX builds on it without splitting a dimension of
                the torus. Default: as many as the plan has.
            axes: Axes of these factorizations. Default: those of the plan that are not in `fixed`.
            fixed: Further axes, with the size that each has in all meshes.
            hbm: Bytes of memory of a device, for `SweepRow.fits`. Default: those of the topology.
            host_memory: Bytes of the host's memory for each of its devices, for the same.
            gradients: As in `bytes_per_device`.
            optimizer: The dtypes of the optimizer's moments, as in `bytes_per_device`.
            optimizer_memory_kind: As in `bytes_per_device`.

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

        return sweep.sweep_meshes(
            self, self._on_mesh, meshes, devices=devices, axes=axes, fixed=fixed, hbm=hbm,
            host_memory=host_memory, gradients=gradients, optimizer=optimizer,
            optimizer_memory_kind=optimizer_memory_kind,
        )  # fmt: skip

    def specs(self) -> Any:
        """Return the tree of PartitionSpecs, corrected; those of `named_shardings`.

        Raises:
            ValueError: Some leaves get no spec. The message has their number, and lists the first.
        """
        from shardrules._plan import trees

        return trees.spec_tree(self)

    def shardings(self) -> Any:
        """Return the tree of NamedShardings; on a dict of sizes they have an AbstractMesh.

        Raises:
            ValueError: As `specs`.
        """
        from shardrules._plan import trees

        return trees.sharding_tree(self, self.mesh)

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
        from shardrules._plan import trees

        return trees.abstract_tree(self, self.mesh)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        return plan_text(self)

    def fingerprint(self) -> str:
        """Return 64 hex digits that change with any path, shape, dtype, spec, memory or mesh axis.

        The same in every process and every run, whatever the order of the leaves.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> sr.plan(tree, [("w", "tp")], {"tp": 2}).fingerprint()[:8]
            '229b934b'
        """
        from shardrules._plan.lock import plan_fingerprint

        return plan_fingerprint(self)

    def lock(self, path: str | Path | None = None) -> str:
        """Write the plan as a text for version control: JSON, a line for each folded path.

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
        text = lock_text(self)
        if path is not None:
            write_text(path, text)
        return text

    def explain(self, path: str) -> Explanation:
        """Explain why the leaf of this path gets its spec, rule by rule, and each correction.

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
            >>> why = plan.explain("up/w")
            >>> why.path, why.leaves, plan.explain("layers/*/w") == why
            ('layers/0/up/w', 4, True)
        """
        from shardrules._plan import explain, rows

        check_type("path", path, str, _PATH)
        return explain.explanation(self, *rows.meant_by(self, path))

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
        optimizer: Self | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        program: CompiledProgram | None = None,
        time: CompiledTime | None = None,
        suggestion: Proposal | None = None,
        solution: Solved | None = None,
    ) -> str:
        """Write the plan as one HTML page that works offline.

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
            program: The `Program` of `inspect`, for a compiled step on the plan's mesh: the arrays
                in the memory of a device at the peak, and all collectives. Default: neither.
            time: The `ProgramTime` of `prove`, `proof.time`: a time line of what a device computes
                and sends in a layer, and what of it is hidden. Default: none.
            suggestion: The `Suggestion` of `suggest` for the same leaves, with which the page ends:
                why each rule says what it says, and its bytes beside the plan's. Default: none.
            solution: The `Solution` of `solve`: each class of dimensions, the axes that cut it, and
                what a step costs with others. Default: none.

        Returns:
            The page.

        Raises:
            ValueError: The sweep counts other bytes for the plan's mesh; the program is for another
                mesh; the suggestion is for other leaves; or as `bytes_per_device`.
            TypeError: A suggestion comes with an optimizer that is a Plan.
            OSError: The file cannot be written.

        Example:
            >>> import jax, shardrules as sr
            >>> tree = {"w": jax.ShapeDtypeStruct((8, 8), "bfloat16")}
            >>> page = sr.plan(tree, [("w", "tp")], {"tp": 2}).to_html()
            >>> "Content-Security-Policy" in page
            True
        """
        from shardrules._plan.report import (
            CompiledProgram,
            CompiledTime,
            Proposal,
            Solved,
            report_data,
            report_html,
        )
        from shardrules._plan.sweep import Sweep

        check_file("path", path)
        check_type("findings", findings, Findings | None, "the Findings of Plan.check")
        check_type("sweep", sweep, Sweep | None, "the Sweep of Plan.sweep")
        check_type("title", title, str, "a string")
        room = room_of(hbm, host_memory)
        check_type("program", program, CompiledProgram | None, "the Program of shardrules.inspect")
        axis_sizes = self.axis_sizes if program is None else program.to_json()["mesh"]
        if axis_sizes != self.axis_sizes:
            raise ValueError(
                f"program: it is for {mesh_shown(axis_sizes)}, the plan for "
                f"{mesh_shown(self.axis_sizes)}: inspect a step that is compiled for this mesh"
            )
        check_type("time", time, CompiledTime | None, "the time of a Proof of shardrules.prove")
        check_type(
            "suggestion", suggestion, Proposal | None, "the Suggestion of shardrules.suggest"
        )
        check_type("solution", solution, Solved | None, "the Solution of shardrules.solve")
        training = Training(gradients, optimizer, optimizer_memory_kind)
        data = report_data(
            self,
            self.check() if findings is None else findings,
            sweep,
            title,
            room=room,
            budget=training.bytes_with(self),
            proposed=None if suggestion is None else self._proposed(suggestion, training),
            program=program,
            time=time,
            solution=solution,
        )
        page = report_html(data)
        if path is not None:
            write_text(path, page)
        return page

    def _proposed(self, suggestion: Proposal, training: Training) -> Proposed:
        """Return other rules for these leaves, with their bytes counted in the same way."""
        from shardrules._plan.report import Proposed

        proposal: Columns = suggestion.plan
        if (len(proposal.paths), proposal.total_bytes) != (len(self), self.total_bytes):
            raise ValueError(
                f"suggestion: it is for other leaves (number {len(proposal.paths):,}, bytes "
                f"{proposal.total_bytes:,}) than the plan (number {len(self):,}, bytes "
                f"{self.total_bytes:,}): suggest for the same model"
            )
        if isinstance(training.optimizer, Columns):
            raise TypeError(
                "suggestion: the optimizer's plan follows other rules; give the dtypes of its "
                "moments as optimizer"
            )
        reasons = list(map(str, suggestion.reasons))
        return Proposed(proposal, training.bytes_with(proposal), reasons)

    def _repr_html_(self) -> str:
        from html import escape

        table = table_html(self)
        if len(self.paths) > _MOST_IN_NOTEBOOK:
            return table
        # In a frame of its own, whose scripts see nothing of the notebook.
        page = (
            "<details><summary>Treemap, findings and leaves</summary><iframe "
            'sandbox="allow-scripts" style="width:100%;height:800px;border:0" title="Report" '
            f'srcdoc="{escape(self.to_html())}"></iframe></details>'
        )
        return table + page if len(table) + len(page) <= MOST_HTML else table

    def kind(self, path: str) -> Kind:
        """Return the kind of the leaf of this path, which may be folded.

        Raises:
            KeyError: No leaf has this path; the message has the nearest ones.
        """
        return self.kinds[int(self.kind_of[self._row(path)])]

    def source(self, path: str) -> str:
        """Return the path that rules match for this leaf: its own, or that of what it follows.

        Raises:
            KeyError: As `kind`.
        """
        return self.sources[self._row(path)]

    def _row(self, path: str) -> int:
        from shardrules._plan import rows

        check_type("path", path, str, _PATH)
        return rows.row_of(self, path)
