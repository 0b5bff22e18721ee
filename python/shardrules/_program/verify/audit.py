"""Compares live arrays with a plan: `audit`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import chain
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules._base.arguments import boolean, check_type
from shardrules._base.dtypes import SAFETENSORS, bits_of
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.specs import (
    Entries,
    as_partition_spec,
    as_placed,
    entries_of,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_entries,
    without_axes,
)
from shardrules._base.text import bytes_shown, counted, mesh_shown, with_article
from shardrules._place.agreement import DEVICES, Row
from shardrules._place.memory import memory_apart
from shardrules._place.mesh import MeshLike, has_devices, processes_of
from shardrules._place.processes import JointCall
from shardrules._plan.findings import Finding, Findings, Level, VerifyKind
from shardrules._plan.fold import fold, fold_paths
from shardrules._plan.kinds import (
    DEFAULT_LARGE,
    Kind,
    axes_used,
    device_bytes,
    dtype_shown,
    placement_shown,
)
from shardrules._plan.plan import Plan
from shardrules._program.jax_names import device_order
from shardrules._program.verify.checksums import Unlike, has_copies, unlike_copies
from shardrules._program.verify.live import (
    Fields,
    Live,
    Where,
    fields_of,
    is_committed,
    live_leaves,
)

if TYPE_CHECKING:
    _Case = tuple[Fields, int]
    """Fields of equal leaves, and the index of their kind in the plan."""


@in_order("tree", "plan")
def audit(tree: Any, plan: Plan, *, values: bool = False) -> Findings:
    """Compare live arrays with a plan: where they are, how they are sharded, in which memory.

    | you have | it looks |
    |---|---|
    | rules, and a tree of shapes | `plan.check()` |
    | a step, as a function | `sr.prove(step, plan, batch, on=...)` |
    | an executable that you compiled | `sr.verify(compiled, (plan, None), plan)` |
    | live arrays | `sr.audit(params, plan)` |
    | a small step, and this machine | `sr.rehearse(step_on, {"fsdp": 4, "tp": 2})` |

    Nothing is moved, and no data is read, unless by `values`. Shardings that cut alike are equal,
    whatever they are called: `P("tp")` and `P(("tp",), None)`, or a mesh axis of one device. In
    several processes, each process calls this with its tree; all get the same findings.

    | kind | level | what |
    |---|---|---|
    | structure | error | leaves of the plan that the tree lacks; leaves that the plan lacks |
    | unplanned | error | leaves that the plan has no place for; `Plan.check` says why |
    | type | error, info | leaves of another shape or dtype; info if only `jax_enable_x64` makes the
      difference |
    | deleted | error | arrays that were donated to a call, or deleted |
    | unknown | error | abstract arrays without a sharding |
    | unplaced | error, warning | numpy arrays and numbers, and arrays on a device that JAX chose;
      a warning if the plan replicates them and they are not large together (16 MiB) |
    | devices | error, info | arrays on other devices than those of the plan's mesh, or in another
      order of them; info that the plan's mesh has no devices to compare with |
    | memory-kind | error | arrays in another memory |
    | sharding | error | arrays that are sharded otherwise |
    | differs | error | with `values`, arrays whose copies of a shard have not the same bits |

    Args:
        tree: A tree like the one that was planned: of jax.Arrays, or of abstract arrays with
            shardings. Its leaves are found by their paths if its structure is another.
        plan: The plan of such a tree; of an optimizer's state, that of `Plan.for_optimizer`. If its
            mesh has no devices, the arrays are compared on their own mesh.
        values: Also compare the values of the copies that several devices have of an array, or of a
            part of it, in all processes: by checksums that the devices make of all bits. Only
            arrays with a NamedSharding on the devices of the plan's mesh.

    Returns:
        All findings, the worst first. `Finding.bytes` are what a device holds beyond the plan, or,
        if that is nothing, what it has to receive.

    Raises:
        TypeError: It is not a plan, not a tree of arrays, or the call is inside jit.
        RuntimeError: In several processes: what they have differs, and the message names the first
            path; or as `shard`.

    Example:
        >>> import jax, numpy as np, shardrules as sr
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
        >>> tree = {"w": np.ones((8, 8), "float32")}
        >>> plan = sr.plan(tree, [("w", "tp")], mesh)
        >>> [(finding.level, finding.kind) for finding in sr.audit(tree, plan)]
        [('error', 'unplaced')]
        >>> sr.audit(sr.shard(tree, plan.shardings()), plan).raise_for("error")
    """
    with JointCall("audit") as call:
        check_type("plan", plan, Plan, "a Plan, as shardrules.plan makes one")
        values = boolean("values", values)
        if len(processes_of(plan.mesh)) == 1:
            call.alone()
        comparison = _Audit(tree, plan, values)
        mesh = comparison.kinds.mesh
        if call.joint and mesh is not None and len(processes_of(mesh)) == 1:
            call.alone()
        call.agree(comparison.rows)
    return Findings(comparison.findings(), comparison.scope)


class _FaultWords(NamedTuple):
    """Words of a fault; the fields in braces are those of `_Audit._finding`."""

    kind: VerifyKind
    message: str
    fix: str
    level: Level = "error"
    mend: str = ""


_PLACED: Final = "tree = shardrules.shard(tree, {shardings})"
_REPLANNED: Final = "plan = shardrules.plan(tree, rules, mesh)"
_PLACE: Final = (
    "place them by shardrules.shard(tree, {shardings}), or have jit make them with "
    "out_shardings={shardings}"
)
_WORDS: Final[dict[str, _FaultWords]] = {
    "unplanned": _FaultWords(
        "unplanned",
        "the plan has no place for {leaves}: {planned}",
        "mend the rules: plan.check()",
        mend="plan.check()",
    ),
    "type": _FaultWords(
        "type",
        "{leaves} {are} {actual}, planned {planned}: {bytes} on each device, planned "
        "{planned_bytes}",
        "plan the tree that is there, or make the one that was planned",
        mend=_REPLANNED,
    ),
    "narrowed": _FaultWords(
        "type",
        "{leaves} {are} {actual}, planned {planned}, since jax_enable_x64 is not set",
        "plan what jax.eval_shape gives, whose bytes are those on the devices",
        "info",
    ),
    "deleted": _FaultWords(
        "deleted",
        "{leaves} {are} deleted, by donation or by hand; planned {planned}",
        "audit what the call that they were donated to returned",
    ),
    "abstract": _FaultWords(
        "unknown",
        "{leaves} {are} abstract and without sharding, so nothing is known; planned {planned}",
        "audit the arrays themselves, or abstract ones with their shardings",
    ),
    "host": _FaultWords(
        "unplaced",
        "{leaves} {are} in this process's memory and on no device; planned {planned}",
        _PLACE,
    ),
    "uncommitted": _FaultWords(
        "unplaced", "{leaves} {are} whole on a device that JAX chose; planned on {planned}", _PLACE
    ),
    "devices": _FaultWords("devices", "{leaves} {are} on {actual}; planned on {planned}", _PLACE),
    "order": _FaultWords(
        "devices",
        "{leaves} {are} on the plan's devices in another order, as {actual}; planned {planned}",
        "make the mesh once and give it to all; or " + _PLACE,
    ),
    "memory-kind": _FaultWords(
        "memory-kind",
        "{leaves} {are} in {actual} memory, planned in {planned} memory",
        "move them by shardrules.shard(tree, {shardings}); or, if they are meant to be there, name "
        "it in their rule: RuleSpec(..., memory_kind={actual!r})",
    ),
    "sharding": _FaultWords(
        "sharding",
        "{leaves} {are} sharded as {actual}, planned {planned}: {bytes} on each device, planned "
        "{planned_bytes}",
        _PLACE,
    ),
    "differs": _FaultWords(
        "differs",
        "{leaves} {are} not the same in all copies, along {planned}: {actual}",
        "look for a sum over {planned} that is missing where they were made, as shard_map with "
        "check_vma=False allows, and for what each process made or read by itself",
    ),
}
_ON_THE_MESH: Final = frozenset({"sharding", "memory-kind", "narrowed"})
"""Faults of arrays that are on the devices of the mesh, in its order."""
_MOST_DEVICES: Final = 8


class _Fault(NamedTuple):
    """Difference of a leaf from its plan."""

    name: str
    """Key of `_WORDS`."""
    actual: str
    planned: str


def _differs(unlike: Unlike) -> _Fault:
    have = "has" if len(unlike.devices) == 1 else "have"
    devices, firsts = map(_devices_shown, (unlike.devices, unlike.firsts))
    actual = f"{devices} {have} other values than {firsts}"
    return _Fault("differs", actual, " and ".join(unlike.axes))


def _devices_shown(ids: tuple[int, ...]) -> str:
    more = ", ..." if len(ids) > _MOST_DEVICES else ""
    return f"device{'s'[: len(ids) - 1]} {', '.join(map(str, ids[:_MOST_DEVICES]))}{more}"


class _Audit:
    """Tree matched with its plan."""

    def __init__(self, tree: Any, plan: Plan, has_values: bool) -> None:
        self._plan = plan
        self._live = live_leaves(tree, plan._leaves)
        leaves = chain(self._live.leaves, self._live.extra.values())
        if not any(hasattr(leaf, "shape") for leaf in leaves):
            check_arrays("tree", tree)
        self._fields = fields_of(self._live.leaves)
        self.kinds = _PlannedKinds(plan.axis_sizes, plan.mesh, map(itemgetter(0), self._fields))
        self._has_devices = has_devices(plan.mesh)
        self._has_values = has_values

    @property
    def scope(self) -> str:
        """Says in words what is compared."""
        mesh = mesh_shown(self._plan.axis_sizes) or "one device"
        return f"{counted(len(self._live.leaves), 'leaf')}, on {mesh}"

    def rows(self) -> list[Row]:
        """List what processes must agree on: each path and what is at it, and the devices."""
        texts = {row: self._text(index) for index, row in enumerate(self._live.rows)}
        planned = enumerate(self._plan.paths)
        rows = [(path, texts.get(row, "not in the tree")) for row, path in planned]
        rows += [(path, "not in the plan") for path in self._live.extra]
        mesh = self.kinds.mesh
        ids = "" if mesh is None else " ".join(str(device.id) for device in mesh.devices.flat)
        return [*rows, (DEVICES, ids)]

    def _text(self, index: int) -> str:
        kind = self._plan.kinds[self._cases[index][1]]
        planned = f"{dtype_shown(kind)}{list(kind.shape or ())} {placement_shown(kind)}"
        faults = [f"{fault.name} {fault.actual}".strip() for fault in self._faults_of(index)]
        values = ", values compared" if self._is_compared(index) else ""
        return f"{', '.join(faults) or 'as planned'}: planned {planned}{values}"

    def findings(self) -> Iterator[Finding]:
        """Yield all findings, in any order."""
        yield from self._of_structure()
        plan = self._plan
        leaves_of: dict[tuple[_Fault, bool], list[int]] = defaultdict(list)
        if any(self._faults.values()) or self._has_values:
            is_sharded = [bool(axes_used(kind.spec, plan.axis_sizes)) for kind in plan.kinds]
            for index, (_, kind) in enumerate(self._cases):
                for fault in self._faults_of(index):
                    leaves_of[fault, is_sharded[kind]].append(index)
            for index, unlike in self._unlike_copies():
                leaves_of[_differs(unlike), is_sharded[self._cases[index][1]]].append(index)
        for (fault, is_of_sharded), indices in leaves_of.items():
            yield self._finding(fault, indices, is_sharded=is_of_sharded)
        if not self._has_devices and self.kinds.mesh is not None:
            axes, mend = mesh_shown(plan.axis_sizes), "audit(tree, plan.on_mesh(mesh))"
            message = (
                f"the plan's mesh {axes} has no devices: the mesh of most of the arrays counts"
            )
            yield Finding(
                "info", "devices", message, f"give the mesh of devices: {mend}", mend=mend
            )

    @cached_property
    def _cases(self) -> list[_Case]:
        kinds = self._plan.kind_of[self._live.rows].tolist()
        return list(zip(self._fields, kinds, strict=True))

    @cached_property
    def _faults(self) -> dict[_Case, tuple[_Fault, ...]]:
        return {
            (live, kind): tuple(self.kinds.faults(Live(*live), self._plan.kinds[kind]))
            for live, kind in set(self._cases)
        }

    def _faults_of(self, index: int) -> Iterator[_Fault]:
        for fault in self._faults[self._cases[index]]:
            is_jax_choice = fault.name == "devices" and not is_committed(self._live.leaves[index])
            yield _Fault("uncommitted", "", fault.planned) if is_jax_choice else fault

    def _is_compared(self, index: int) -> bool:
        """Return whether copies of this leaf are compared; the same in all processes."""
        if not self._has_values or not has_copies(self._live.leaves[index]):
            return False
        return all(fault.name in _ON_THE_MESH for fault in self._faults[self._cases[index]])

    def _unlike_copies(self) -> Iterator[tuple[int, Unlike]]:
        # By the plan's rows: all processes run the same programs in the same order.
        order = sorted(range(len(self._live.rows)), key=self._live.rows.__getitem__)
        indices = list(filter(self._is_compared, order))
        found = unlike_copies(self._live.leaves[index] for index in indices)
        return ((i, unlike) for i, unlike in zip(indices, found, strict=True) if unlike)

    def _finding(self, fault: _Fault, indices: list[int], *, is_sharded: bool) -> Finding:
        cases, kinds = Counter(self._cases[index] for index in indices), self._plan.kinds
        rules = {kinds[kind].rule for _, kind in cases}
        size = sum(_bytes_of(Live(*live)) * count for (live, _), count in cases.items())
        planned_bytes = sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items())
        at_stake = size - planned_bytes if size > planned_bytes else planned_bytes
        words = _WORDS[fault.name]
        is_small = words.kind == "unplaced" and not is_sharded and at_stake < DEFAULT_LARGE
        fields = {
            "leaves": counted(len(indices), "leaf"),
            "are": "is" if len(indices) == 1 else "are",
            "actual": fault.actual,
            "planned": fault.planned,
            "bytes": bytes_shown(size),
            "planned_bytes": bytes_shown(planned_bytes),
            "shardings": f"plan{'' if self._has_devices else '.on_mesh(mesh)'}.shardings()",
        }
        return Finding(
            "warning" if is_small else words.level,
            words.kind,
            words.message.format(**fields),
            words.fix.format(**fields),
            self._folded([self._live.rows[index] for index in indices]),
            len(indices),
            rules.pop() if len(rules) == 1 else None,
            at_stake,
            _PLACED.format(**fields) if _PLACE in words.fix else words.mend,
        )

    def _of_structure(self) -> Iterator[Finding]:
        """Yield findings about arrays that only the plan or only the tree has."""
        plan, extra = self._plan, self._live.extra
        missing = [
            row for row in self._live.missing if plan.kinds[plan.kind_of[row]].shape is not None
        ]
        lives = zip(extra, map(Live._make, fields_of(list(extra.values()))), strict=True)
        sizes = {
            path: _bytes_of(live)
            for path, live in lives
            if live.shape is not None and live.dtype is not None
        }
        separator = plan._leaves.paths_dialect.separator
        fix = _structure_fix([plan.paths[row] for row in missing], list(sizes), separator)
        error = partial(Finding, "error", "structure", mend=_REPLANNED)
        if missing:
            message = f"the tree lacks {counted(len(missing), 'array')} of the plan"
            paths, count = self._folded(missing), len(missing)
            size = sum(plan.kinds[plan.kind_of[row]].device_bytes for row in missing)
            yield error(message, fix, paths=paths, leaves=count, bytes=size)
        if count := len(sizes):
            are = "is" if count == 1 else "are"
            message = f"{counted(count, 'array')} of the tree {are} not in the plan"
            paths, size = tuple(fold_paths([*sizes])), sum(sizes.values())
            yield error(message, fix, paths=paths, leaves=count, bytes=size)

    def _folded(self, rows: list[int]) -> tuple[str, ...]:
        """Fold the paths of rows of the plan, those with most bytes first."""
        plan = self._plan
        folded = fold([plan.paths[row] for row in rows], plan.kind_of[rows])
        folded.sort(key=lambda group: -plan.kinds[group.group].device_bytes * len(group.rows))
        return tuple(group.pattern for group in folded)


def _structure_fix(missing: list[str], extra: list[str], separator: str) -> str:
    if under := _prefix_of_paths(missing, extra, separator):
        return f"the plan's leaves are under {under!r} in the tree: audit that part of it"
    if under := _prefix_of_paths(extra, missing, separator):
        return f"the tree's leaves are under {under!r} in the plan: audit the whole tree"
    return "audit the tree that was planned, or plan this one"


def _prefix_of_paths(paths: list[str], longer: list[str], separator: str) -> str | None:
    """Find the prefix with which all of these paths are among the longer ones."""
    end = separator + paths[0] if paths else ""
    first = next((path for path in longer if path.endswith(end)), None) if paths else None
    if first is None:
        return None
    prefix, names = first.removesuffix(end), set(longer)
    return prefix if all(f"{prefix}{separator}{path}" in names for path in paths) else None


def _bytes_of(live: Live) -> int:
    """Compute the bytes of a leaf on the fullest device."""
    if isinstance(live.where, str):
        return 0
    shape, bits = live.shape or (), bits_of(live.dtype)
    mesh, spec = getattr(live.where, "mesh", None), getattr(live.where, "spec", None)
    if mesh is not None and spec is not None:
        return device_bytes(shape, bits, spec, mesh.shape)
    return -(-prod(live.where.shard_shape(shape)) * bits // 8)


class _PlannedKinds:
    """Kinds of a plan's leaves, on devices.

    A plan on a mesh without devices is put on that of the arrays: the mesh with the plan's axes
    that most of them are on; or the devices that most of them are on, in their order.
    """

    def __init__(
        self, axis_sizes: Mapping[str, int], mesh: MeshLike, wheres: Iterable[Where]
    ) -> None:
        self._axis_sizes = axis_sizes
        self.mesh = mesh if has_devices(mesh) else _mesh_of_arrays(axis_sizes, wheres)
        """None if no array is on as many devices."""
        self._devices = () if self.mesh is None else tuple(self.mesh.devices.flat)
        self._default_memory = None
        if self.mesh is not None:
            self._default_memory = self._on_mesh(partition_spec(), None).memory_kind

    def faults(self, live: Live, kind: Kind) -> Iterator[_Fault]:
        """Yield the differences of a leaf from its kind."""
        planned = placement_shown(kind)
        if kind.status != "placed":
            yield _Fault("unplanned", "", str(kind.message))
            return
        if kind.shape is None and live.where in ("host", "nowhere"):
            return  # a number or a function, in the plan as in the tree
        is_of_shape = live.shape == (kind.shape or ())
        name = _dtype_name(live.dtype)
        has_dtypes = live.dtype is not None and kind.dtype is not None  # numbers have none
        if not is_of_shape or (has_dtypes and name != _dtype_name(kind.dtype)):
            is_narrowed = is_of_shape and name == _name_on_devices(kind.dtype)
            types = _type_shown(live.shape, live.dtype), _type_shown(kind.shape, kind.dtype)
            yield _Fault("narrowed" if is_narrowed else "type", *types)
        if live.where in ("deleted", "abstract", "host"):
            yield _Fault(str(live.where), "", planned)
        if not isinstance(live.where, str) and is_of_shape:
            yield from self._of_place(live.where, live, kind)

    def _of_place(self, sharding: Sharding, live: Live, kind: Kind) -> Iterator[_Fault]:
        # "device" is the devices' default memory, whatever its name.
        is_default = kind.memory_kind in (None, self._default_memory)
        planned_memory = "device" if is_default else str(kind.memory_kind)
        if (memory := memory_apart(sharding) or "device") != planned_memory:
            yield _Fault("memory-kind", memory, planned_memory)
        shape, planned = live.shape or (), placement_shown(kind)
        devices = _devices_of(sharding)
        if not devices:
            yield from self._of_abstract(sharding, kind)
            return
        if set(devices) != set(self._devices):
            what = "other device" if len(devices) == len(self._devices) else "device"
            yield _Fault("devices", counted(len(devices), what), mesh_shown(self._axis_sizes))
            return
        if devices != self._devices:
            yield _Fault("order", self._shown(sharding, shape), planned)
            if not self._has_axes_of(sharding):
                return
            sharding = self._on_mesh(sharding.spec, sharding.memory_kind)
        target = self._on_mesh(self._spec(kind, sharding), sharding.memory_kind)
        if not target.is_equivalent_to(sharding, len(shape)):
            yield _Fault("sharding", self._shown(sharding, shape), planned)

    def _of_abstract(self, sharding: Any, kind: Kind) -> Iterator[_Fault]:
        """Yield the faults of a sharding on a mesh without devices."""
        if not self._has_axes_of(sharding):
            yield _Fault("devices", mesh_shown(sharding.mesh.shape), mesh_shown(self._axis_sizes))
        elif as_placed(sharding.spec, self._axis_sizes) != as_placed(
            self._spec(kind, sharding), self._axis_sizes
        ):
            yield _Fault("sharding", self._shown(sharding, ()), placement_shown(kind))

    def _on_mesh(self, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
        assert self.mesh is not None
        # The arrays' mesh may lack axes of one device.
        absent = self._axis_sizes.keys() - frozenset(self.mesh.axis_names)
        spec = without_axes(spec, frozenset(absent))
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def _spec(self, kind: Kind, sharding: Sharding) -> PartitionSpec:
        """Return the planned spec; the array's entries replace unconstrained ones."""
        spec = as_partition_spec(Entries() if kind.spec is None else kind.spec)
        entries = entries_of(spec)
        if not any(map(is_unconstrained, entries)):
            return spec
        actual = [*(entries_of(sharding.spec) if self._has_axes_of(sharding) else ())]
        actual += [None] * len(entries)
        return with_entries(
            spec, (b if is_unconstrained(a) else a for a, b in zip(entries, actual, strict=False))
        )

    def _has_axes_of(self, sharding: Sharding) -> TypeGuard[NamedSharding]:
        mesh = getattr(sharding, "mesh", None)
        return mesh is not None and _without_unit_axes(mesh.shape) == _without_unit_axes(
            self._axis_sizes
        )

    def _shown(self, sharding: Sharding, shape: tuple[int, ...]) -> str:
        """Format a sharding without device ids, which differ between processes."""
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
        if mesh is None or spec is None:
            return f"shards of shape {sharding.shard_shape(shape)}"
        own, other = (list(_without_unit_axes(s).items()) for s in (self._axis_sizes, mesh.shape))
        return spec_shown(spec) + ("" if own == other else f" on {mesh_shown(mesh.shape)}")


def _mesh_of_arrays(axis_sizes: Mapping[str, int], wheres: Iterable[Where]) -> Mesh | None:
    """Make a mesh with the plan's axes from the arrays' devices."""
    meshes: Counter[Mesh] = Counter()
    devices: Counter[tuple[Any, ...]] = Counter()
    for where, leaves in Counter(wheres).items():
        if isinstance(where, str) or not (order := _devices_of(where)):
            continue
        mesh = getattr(where, "mesh", None)
        if mesh is not None and _without_unit_axes(mesh.shape) == _without_unit_axes(axis_sizes):
            meshes[mesh] += leaves
        devices[order] += leaves
    sizes = tuple(axis_sizes.values())
    orders = (order for order, _ in devices.most_common() if len(order) == prod(sizes))
    if not meshes and (order := next(orders, ())):
        return Mesh(np.array(order).reshape(sizes), tuple(axis_sizes))
    return next((mesh for mesh, _ in meshes.most_common(1)), None)


def _without_unit_axes(axis_sizes: Mapping[str, int]) -> dict[str, int]:
    """Drop the axes of one device."""
    return {axis: size for axis, size in axis_sizes.items() if size > 1}


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    """Return the devices in their order; () of a sharding on a mesh without any."""
    mesh = getattr(sharding, "mesh", None)
    if mesh is None:
        return device_order(sharding)
    return tuple(mesh.devices.flat) if has_devices(mesh) else ()


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, of which a plan may have the name alone."""
    name = str(getattr(dtype, "name", dtype))
    return SAFETENSORS.get(name, name)


def _name_on_devices(dtype: Any) -> str | None:
    """Name the dtype that JAX makes of it, which depends on jax_enable_x64."""
    try:
        return _dtype_name(jax.dtypes.canonicalize_dtype(_dtype_name(dtype)))
    except TypeError:  # that of random keys
        return None


def _type_shown(shape: tuple[int, ...] | None, dtype: Any) -> str:
    if shape is None:
        return "no array" if dtype is None else with_article(dtype.__name__)
    return "a number" if dtype is None else f"{_dtype_name(dtype)}{list(shape)}"
