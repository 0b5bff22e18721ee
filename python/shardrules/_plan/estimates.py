"""`Plan`'s estimates: bytes per device, bytes sent in a training step, its time, and sweeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from shardrules._base.arguments import as_tuple, check_bytes, check_type, integer, strings
from shardrules._base.hardware import as_hardware
from shardrules._base.mesh_sizes import checked_sizes
from shardrules._base.rule_specs import MemoryKind, check_memory_kind
from shardrules._base.text import nearest
from shardrules._place.mesh import MeshLike, as_mesh
from shardrules._plan.memory import DeviceBytes, Room
from shardrules._plan.resolve import OnMesh, sized_mesh
from shardrules._plan.state import DTYPES, Training
from shardrules._plan.table import OVERLAP, Columns
from shardrules._program.topologies.topology import Topology

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._estimate.schedule import InputGradients, Of, Reduce
    from shardrules._estimate.step_time import StepTime
    from shardrules._estimate.sweep import Sweep
    from shardrules._estimate.traffic import Traffic
    from shardrules._plan.roles import DimRole

_SIZES: Final = "a dict of axis sizes"


class Estimates(Columns):
    """Estimates of memory, traffic and time: methods of `Plan`."""

    _on_mesh: OnMesh
    _mesh: MeshLike

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
        tokens: int | None = None,
        hardware: Hardware | str | None = None,
        axes_over_dcn: Iterable[str] = (),
        overlap: Iterable[Of] = OVERLAP,
        efficiency: float | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> Sweep:
        """Put the leaves and rules on many meshes: bytes per device, what fits, time of a step.

        Args:
            meshes: The meshes, each of which may lack axes of the others. Default: all
                factorizations of `devices` over `axes`.
            devices: Devices of these factorizations; or the name of a `Topology`, such as
                "v5p:8x8x8", for the meshes that JAX builds on it without splitting a dimension of
                the torus. Default: as many as the plan has.
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
            fewest devices along axes that do not split tokens, by their names, come first, then
            the fewest corrections, then bytes.

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

        topology = _topology_of(devices)
        plan_axes = tuple(sized_mesh(self._mesh).axis_sizes)
        if topology is not None:
            hardware = topology.hardware if hardware is None else hardware
            check_none("meshes: they are those of the topology", meshes)
            check_none("fixed: the meshes are those of the topology", fixed)
        device = None if hardware is None else as_hardware("hardware", hardware)
        if hbm is None and device is not None:
            hbm = device.memory_bytes
        room = room_of(hbm, host_memory)
        run = None
        if tokens is None:
            _check_unused(
                axes_over_dcn=axes_over_dcn != (),
                overlap=overlap != OVERLAP,
                efficiency=efficiency is not None,
                schedule=schedule is not None,
            )
        elif device is None:
            raise ValueError("tokens: the time of a step needs hardware=, such as 'v5p'")
        else:
            machine = step_time.machine_of(
                device, axes_over_dcn, overlap, efficiency, is_traced=False
            )
            run = step_time.run_of(tokens, machine, schedule=schedule, gradients=gradients)
        check_memory_kind("optimizer_memory_kind", optimizer_memory_kind)
        moments = None if optimizer is None else as_tuple("optimizer", optimizer, DTYPES)
        if topology is not None:
            meshes = topology.meshes(plan_axes if axes is None else strings("axes", axes))
        elif meshes is None:
            assert not isinstance(devices, str | Topology)
            meshes = self._factorizations(devices, axes, fixed)
        else:
            check_type("fixed", fixed, Mapping | None, _SIZES)
            check_type("meshes", meshes, Iterable, "a sequence of dicts of axis sizes")

        def on_mesh(mesh: MeshLike, axes: frozenset[str]) -> Columns:
            on = sized_mesh(mesh if isinstance(mesh, Mapping) else as_mesh(mesh))
            return self._on_mesh(on, may_lack=axes.union(plan_axes))

        return sweep.sweep_meshes(
            on_mesh,
            meshes,
            room=room,
            gradients=gradients,
            optimizer=moments,
            optimizer_memory_kind=optimizer_memory_kind,
            run=run,
        )

    def _factorizations(
        self, devices: int | None, axes: Iterable[str] | None, fixed: Mapping[str, int] | None
    ) -> Iterator[dict[str, int]]:
        from shardrules._estimate import sweep

        check_type("fixed", fixed, Mapping | None, _SIZES)
        sizes = checked_sizes(fixed) if fixed else {}
        plan_axes = sized_mesh(self._mesh).axis_sizes
        names = tuple(axis for axis in plan_axes if axis not in sizes)
        names = names if axes is None else strings("axes", axes)
        missing = plan_axes.keys() - {*names, *sizes}
        for axis in {*names, *sizes} - plan_axes.keys():
            if meant := nearest(axis, missing):
                raise ValueError(
                    f"the plan's mesh has no axis {axis!r}; did you mean {meant!r}? Its axes are "
                    f"{', '.join(plan_axes)}"
                )
        count = self.devices if devices is None else integer("devices", devices, 1)
        return sweep.factorizations(count, names, sizes)

    def step_time(
        self,
        *,
        hardware: Hardware | str,
        tokens: int,
        axes_over_dcn: Iterable[str] = (),
        overlap: Iterable[Of] = OVERLAP,
        efficiency: float | None = None,
        gradients: Any = None,
        optimizer: Self | Iterable[Any] | None = None,
        optimizer_memory_kind: MemoryKind | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> StepTime:
        """Estimate the time of a training step on hardware by a roofline.

        The hardware page says how, and what is left out. It is a lower bound for comparing meshes.

        Args:
            hardware: The devices: a `Hardware`, or the name of one such as "v5p".
            tokens: Tokens of the whole batch of a step.
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

        machine = step_time.machine_of(
            hardware, axes_over_dcn, overlap, efficiency, is_traced=False
        )
        run = step_time.run_of(tokens, machine, schedule=schedule, gradients=gradients)
        training = Training(gradients, optimizer, optimizer_memory_kind)
        state = training.optimizer if isinstance(training.optimizer, Columns) else None
        return step_time.step_time(self, run, training.bytes_with(self), state)

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
        """Count the bytes that each device sends in a training step, by axes and collective.

        Parameters and gradients are exact under this schedule: what batch axes cut is gathered over
        them for each use, and its gradient reduced over them; what other axes cut is used as it
        is. Activations follow from the kernels' contracted dimensions. Each argument is an
        assumption; `Traffic.assumptions` has them all, with what names and shapes tell of leaves.

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
            assumed by names and shapes: (unknown, unknown) of w
        """
        arguments = dict(locals())
        del arguments["self"]
        from shardrules._estimate import traffic
        from shardrules._estimate.schedule import schedule_of

        return traffic.traffic(self, schedule_of(self.axis_sizes, **arguments))


def _topology_of(devices: int | str | Topology | None) -> Topology | None:
    if isinstance(devices, str):
        try:
            return Topology(devices)
        except ValueError as error:
            raise ValueError(f"devices: {error}") from error
    return devices if isinstance(devices, Topology) else None


def check_none(what: str, value: Any) -> None:
    """Check that an argument is left out."""
    if value is not None:
        raise ValueError(f"{what}, and cannot be given beside it")


def _check_unused(**is_set: bool) -> None:
    """Check that none of these arguments is set, which are for the time of a step."""
    if names := [name for name, value in is_set.items() if value]:
        raise ValueError(f"{names[0]}: it is for the time of a step, which needs tokens=")


def room_of(hbm: int | None, host_memory: int | None) -> Room:
    """Return the memory that there is for each device."""
    for name, size in (("hbm", hbm), ("host_memory", host_memory)):
        if size is not None:
            check_bytes(name, size)
    return Room(hbm, host_memory)
