"""`audit`: live arrays that are not sharded, placed or kept in the memory that a plan says.

Costs a walk over the tree and a look at each array; all else is done once for each kind of leaves
and sharding. Must not know how a plan was made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeGuard

import numpy as np

from shardrules._arguments import check_tree, check_type, in_order
from shardrules._dtypes import SAFETENSORS, bits_of
from shardrules._jax import device_order
from shardrules._mesh.device_bytes import held_of
from shardrules._mesh.memory import memory_apart
from shardrules._mesh.mesh import has_devices, has_own_devices
from shardrules._place.processes import DEVICES, JointCall, Row
from shardrules._plan.findings import Finding, Findings, Level, VerifyKind
from shardrules._plan.fold import fold
from shardrules._plan.plan import Plan
from shardrules._plan.table import DEFAULT_LARGE, axes_used, dtype_shown, placement_shown
from shardrules._specs import (
    Entries,
    as_partition_spec,
    entries_of,
    entry_axes,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_entries,
    without_axes,
)
from shardrules._text import bytes_shown, counted, mesh_shown, with_article
from shardrules._verify.live import Live, fields_of, is_committed, live_leaves

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

    from shardrules._mesh.mesh import MeshLike
    from shardrules._plan.table import Kind
    from shardrules._verify.live import Fields, Live, Where

    _Case = tuple[Fields, int]
    """Leaves that are alike: the fields of `Live`, and the index of their kind in the plan."""

FaultKind = Literal[
    "unplanned", "type", "narrowed", "deleted", "abstract", "host", "uncommitted",
    "devices", "order", "memory-kind", "sharding",
]  # fmt: skip

_WITHOUT_PLACE: Final[tuple[FaultKind, ...]] = ("deleted", "abstract", "host")


class Fault(NamedTuple):
    """What of a leaf is not as planned."""

    kind: FaultKind
    found: str
    planned: str


class PlannedKinds:
    """What a plan has for its leaves, on devices.

    A plan on a mesh without devices is put on that of the arrays: the mesh with the plan's axes
    that most of them are on; or the devices that most of them are on, in their order.

    Args:
        axis_sizes: Devices along each axis of the plan's mesh, in its order.
        mesh: The plan's mesh.
        wheres: Where each leaf is.
    """

    def __init__(
        self, axis_sizes: Mapping[str, int], mesh: MeshLike, wheres: Iterable[Where]
    ) -> None:
        self._axis_sizes = axis_sizes
        self.mesh = mesh if has_devices(mesh) else _mesh_of(axis_sizes, wheres)
        """None if no array is on as many devices."""
        self._devices = () if self.mesh is None else tuple(self.mesh.devices.flat)
        self._default_memory = None
        if self.mesh is not None:
            self._default_memory = self._on_mesh(partition_spec(), None).memory_kind

    def faults(self, live: Live, kind: Kind) -> Iterator[Fault]:
        """What of a leaf is not as planned; nothing if all is."""
        planned = placement_shown(kind)
        if kind.status != "placed":
            yield Fault("unplanned", "", str(kind.message))
            return
        if kind.shape is None and live.where in ("host", "nowhere"):
            return  # a number or a function, in the plan as in the tree
        is_of_shape = live.shape == (kind.shape or ())
        if not is_of_shape or not _is_of_dtype(live, kind):
            is_narrowed = is_of_shape and _name(live.dtype) == _name_on_devices(kind.dtype)
            types = _type_shown(live.shape, live.dtype), _type_shown(kind.shape, kind.dtype)
            yield Fault("narrowed" if is_narrowed else "type", *types)
        yield from (Fault(one, "", planned) for one in _WITHOUT_PLACE if one == live.where)
        if not isinstance(live.where, str) and is_of_shape:
            yield from self._of_place(live.where, live, kind)

    def _of_place(self, found: Sharding, live: Live, kind: Kind) -> Iterator[Fault]:
        memory, planned_memory = memory_apart(found) or "device", self._memory_of(kind)
        if memory != planned_memory:
            yield Fault("memory-kind", memory, planned_memory)
        shape, planned = live.shape or (), placement_shown(kind)
        if not _is_on_devices(found):
            yield from self._of_abstract(found, kind)
            return
        devices = _devices_of(found)
        if set(devices) != set(self._devices):
            other = "other " if len(devices) == len(self._devices) else ""
            on = counted(len(devices), f"{other}device")
            yield Fault("devices", on, mesh_shown(self._axis_sizes))
            return
        if devices != self._devices:
            yield Fault("order", self._shown(found, shape), planned)
            if not self._has_axes_of(found):
                return
            found = self._on_mesh(found.spec, found.memory_kind)
        wanted = self._on_mesh(self._spec(kind, found), found.memory_kind)
        if not wanted.is_equivalent_to(found, len(shape)):
            yield Fault("sharding", self._shown(found, shape), planned)

    def _of_abstract(self, found: Any, kind: Kind) -> Iterator[Fault]:
        """The faults of a sharding on a mesh without devices."""
        if not self._has_axes_of(found):
            yield Fault("devices", mesh_shown(found.mesh.shape), mesh_shown(self._axis_sizes))
        elif self._cuts(found.spec) != self._cuts(self._spec(kind, found)):
            yield Fault("sharding", self._shown(found, ()), placement_shown(kind))

    def _on_mesh(self, spec: PartitionSpec, memory_kind: str | None) -> NamedSharding:
        from jax.sharding import NamedSharding

        assert self.mesh is not None
        # The arrays' mesh may lack axes of one device.
        absent = self._axis_sizes.keys() - frozenset(self.mesh.axis_names)
        spec = without_axes(spec, frozenset(absent))
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def _spec(self, kind: Kind, found: Sharding) -> PartitionSpec:
        """The planned spec; what it leaves unconstrained is as the array has it."""
        spec = as_partition_spec(Entries() if kind.spec is None else kind.spec)
        entries = entries_of(spec)
        if not any(map(is_unconstrained, entries)):
            return spec
        there = [*(entries_of(found.spec) if self._has_axes_of(found) else ())]
        there += [None] * len(entries)
        return with_entries(
            spec, (b if is_unconstrained(a) else a for a, b in zip(entries, there, strict=False))
        )

    def _memory_of(self, kind: Kind) -> str:
        """The planned memory; "device" is the devices' default one, whatever its name."""
        default = (None, self._default_memory)
        return "device" if kind.memory_kind in default else str(kind.memory_kind)

    def _has_axes_of(self, found: Sharding) -> TypeGuard[NamedSharding]:
        """Whether it is a NamedSharding on the axes of the plan."""
        mesh = getattr(found, "mesh", None)
        return mesh is not None and _axes(mesh.shape) == _axes(self._axis_sizes)

    def _cuts(self, spec: PartitionSpec) -> list[tuple[str, ...]]:
        """Per dimension the axes that cut it, without those of one device; [] for the last ones."""
        sizes = _axes(self._axis_sizes)
        cuts = [
            tuple(axis for axis in entry_axes(entry) if axis in sizes) for entry in entries_of(spec)
        ]
        while cuts and not cuts[-1]:
            cuts.pop()
        return cuts

    def _shown(self, found: Sharding, shape: tuple[int, ...]) -> str:
        """A sharding as people write it, without ids: they differ between processes."""
        mesh, spec = getattr(found, "mesh", None), getattr(found, "spec", None)
        if mesh is None or spec is None:
            return f"shards of shape {found.shard_shape(shape)}"
        here, there = _axes(self._axis_sizes), _axes(mesh.shape)
        on_other = [*here.items()] != [*there.items()]
        return spec_shown(spec) + (f" on {mesh_shown(mesh.shape)}" if on_other else "")


def _mesh_of(axis_sizes: Mapping[str, int], wheres: Iterable[Where]) -> Mesh | None:
    """A mesh with the plan's axes, of the arrays' devices."""
    from jax.sharding import Mesh

    meshes: Counter[Mesh] = Counter()
    devices: Counter[tuple[Any, ...]] = Counter()
    for where, leaves in Counter(wheres).items():
        if isinstance(where, str) or not _is_on_devices(where):
            continue
        mesh = getattr(where, "mesh", None)
        if mesh is not None and _axes(mesh.shape) == _axes(axis_sizes):
            meshes[mesh] += leaves
        devices[_devices_of(where)] += leaves
    if meshes:
        return meshes.most_common(1)[0][0]
    sizes = tuple(axis_sizes.values())
    fitting = [one for one, _ in devices.most_common() if len(one) == np.prod(sizes)]
    return Mesh(np.array(fitting[0]).reshape(sizes), tuple(axis_sizes)) if fitting else None


def _axes(axis_sizes: Mapping[str, int]) -> dict[str, int]:
    """The axes of more than one device."""
    return {axis: size for axis, size in axis_sizes.items() if size > 1}


def _is_on_devices(sharding: Sharding) -> bool:
    mesh = getattr(sharding, "mesh", None)
    return mesh is None or has_devices(mesh)


def _devices_of(sharding: Any) -> tuple[Any, ...]:
    """The devices in the sharding's order."""
    if hasattr(sharding, "mesh"):
        return tuple(sharding.mesh.devices.flat)
    return device_order(sharding)


def _is_of_dtype(live: Live, kind: Kind) -> bool:
    """Whether the dtypes are equal, of which the plan's may be a name; numbers have none."""
    # Not by ==: to numpy, None is float64.
    if live.dtype is None or kind.dtype is None:
        return True
    return _name(live.dtype) == _name(kind.dtype)


def _name(dtype: Any) -> str:
    name = str(getattr(dtype, "name", dtype))
    return SAFETENSORS.get(name, name)


def _name_on_devices(dtype: Any) -> str | None:
    """The name of the dtype that JAX makes of it, which depends on jax_enable_x64."""
    import jax

    try:
        return _name(jax.dtypes.canonicalize_dtype(_name(dtype)))
    except TypeError:  # that of random keys
        return None


def _type_shown(shape: tuple[int, ...] | None, dtype: Any) -> str:
    if shape is None:
        return "no array" if dtype is None else with_article(dtype.__name__)
    return "a number" if dtype is None else f"{_name(dtype)}{list(shape)}"


class _Words(NamedTuple):
    """How a fault is told; the fields in braces are those of `finding_of`."""

    kind: VerifyKind
    message: str
    fix: str
    level: Level = "error"


_PLACE: Final = (
    "place them by shardrules.shard(tree, {shardings}), or have jit make them with "
    "out_shardings={shardings}"
)
_WORDS: Final[dict[FaultKind, _Words]] = {
    "unplanned": _Words(
        "unplanned", "the plan has no place for {leaves}: {planned}", "mend the rules: plan.check()"
    ),
    "type": _Words(
        "type",
        "{leaves} {are} {found}, planned {planned}: {held} on each device, planned {budget}",
        "plan the tree that is there, or make the one that was planned",
    ),
    "narrowed": _Words(
        "type",
        "{leaves} {are} {found}, planned {planned}, since jax_enable_x64 is not set",
        "plan what jax.eval_shape gives, whose bytes are those on the devices",
        "info",
    ),
    "deleted": _Words(
        "deleted",
        "{leaves} {are} deleted, by donation or by hand; planned {planned}",
        "audit what the call that they were donated to returned",
    ),
    "abstract": _Words(
        "unknown",
        "{leaves} {are} abstract and without sharding, so nothing is known; planned {planned}",
        "audit the arrays themselves, or abstract ones with their shardings",
    ),
    "host": _Words(
        "unplaced",
        "{leaves} {are} in this process's memory and on no device; planned {planned}",
        _PLACE,
    ),
    "uncommitted": _Words(
        "unplaced",
        "{leaves} {are} whole on a device that JAX chose; planned on {planned}",
        _PLACE,
    ),
    "devices": _Words("devices", "{leaves} {are} on {found}; planned on {planned}", _PLACE),
    "order": _Words(
        "devices",
        "{leaves} {are} on the plan's devices in another order, as {found}; planned {planned}",
        "make the mesh once and give it to all; or " + _PLACE,
    ),
    "memory-kind": _Words(
        "memory-kind",
        "{leaves} {are} in {found} memory, planned in {planned} memory",
        "move them by shardrules.shard(tree, {shardings}); or, if they are meant to be there, name "
        "it in their rule: RuleSpec(..., memory_kind={found!r})",
    ),
    "sharding": _Words(
        "sharding",
        "{leaves} {are} sharded as {found}, planned {planned}: {held} on each device, planned "
        "{budget}",
        _PLACE,
    ),
}


def finding_of(
    fault: Fault,
    *,
    paths: tuple[str, ...],
    leaves: int,
    rule: int | None,
    held: int,
    planned: int,
    is_cut: bool,
    has_devices: bool,
) -> Finding:
    """The finding of a fault.

    Args:
        fault: The fault.
        paths: The folded paths of its leaves.
        leaves: How many leaves have it.
        rule: The rule that decides them all, if it is one.
        held: Bytes of them on the device that holds most.
        planned: The planned bytes on that device.
        is_cut: Whether the plan cuts them.
        has_devices: Whether the plan's mesh has devices.
    """
    words = _WORDS[fault.kind]
    at_stake = held - planned if held > planned else planned
    is_small = words.kind == "unplaced" and not is_cut and at_stake < DEFAULT_LARGE
    told = {
        "leaves": counted(leaves, "leaf"),
        "are": _are(leaves),
        "found": fault.found,
        "planned": fault.planned,
        "held": bytes_shown(held),
        "budget": bytes_shown(planned),
        "shardings": f"plan{'' if has_devices else '.on_mesh(mesh)'}.shardings()",
    }
    level: Level = "warning" if is_small else words.level
    message, fix = words.message.format(**told), words.fix.format(**told)
    return Finding(level, words.kind, message, paths, leaves, rule, at_stake, fix)


def missing_leaves(paths: tuple[str, ...], leaves: int, held: int, fix: str) -> Finding:
    """The finding of arrays that the plan alone has."""
    message = f"the tree lacks {counted(leaves, 'array')} of the plan"
    return Finding("error", "structure", message, paths, leaves, None, held, fix)


def extra_leaves(paths: tuple[str, ...], leaves: int, held: int, fix: str) -> Finding:
    """The finding of arrays that the tree alone has."""
    message = f"{counted(leaves, 'array')} of the tree {_are(leaves)} not in the plan"
    return Finding("error", "structure", message, paths, leaves, None, held, fix)


def fix_of_structure(missing: list[str], extra: list[str], separator: str) -> str:
    """What to do about these paths of the plan alone, and these of the tree alone."""
    if under := _under(missing, extra, separator):
        return f"the plan's leaves are under {under!r} in the tree: audit that part of it"
    if under := _under(extra, missing, separator):
        return f"the tree's leaves are under {under!r} in the plan: audit the whole tree"
    return "audit the tree that was planned, or plan this one"


def without_devices(axes: str) -> Finding:
    """The finding that a plan on these axes has no devices to compare with."""
    message = f"the plan's mesh {axes} has no devices: the mesh of most of the arrays counts"
    fix = "give the mesh of devices: audit(tree, plan.on_mesh(mesh))"
    return Finding("info", "devices", message, (), 0, None, 0, fix)


def _under(paths: list[str], others: list[str], separator: str) -> str | None:
    """Where in the other tree all of these paths are; None if they are not in one place."""
    if not paths:
        return None
    end = f"{separator}{paths[0]}"
    found = next((other for other in others if other.endswith(end)), None)
    if found is None:
        return None
    under, known = found.removesuffix(end), set(others)
    return under if all(f"{under}{separator}{path}" in known for path in paths) else None


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


@in_order("tree", "plan")
def audit(tree: Any, plan: Plan) -> Findings:
    """Compares live arrays with a plan: where they are, how they are sharded, in which memory.

    Nothing is moved, and no data is read. Shardings that cut alike are equal, whatever they are
    called: `P("tp")` and `P(("tp",), None)`, or a mesh axis of one device. In several processes,
    each process calls this with its tree; all get the same findings.

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

    Args:
        tree: A tree like the one that was planned: of jax.Arrays, or of abstract arrays with
            shardings. Its leaves are found by their paths if its structure is another.
        plan: The plan of such a tree; of an optimizer's state, that of `Plan.for_optimizer`. If its
            mesh has no devices, the arrays are compared on their own mesh.

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
        check_tree("tree", tree)
        check_type("plan", plan, Plan, "a Plan, as shardrules.plan makes one")
        if has_own_devices(plan.mesh):
            call.alone()
        audited = _Audited(tree, plan)
        if call.joint and audited.is_of_this_process:
            call.alone()
        call.agree(audited.rows)
    return Findings(audited.findings(), audited.scope)


class _Audited:
    """A tree beside its plan."""

    def __init__(self, tree: Any, plan: Plan) -> None:
        self._columns = plan._columns
        self._pairs = live_leaves(tree, self._columns.leaves)
        self._fields = fields_of(self._pairs.found)
        self._planned = PlannedKinds(plan.axis_sizes, plan.mesh, map(itemgetter(0), self._fields))
        self._has_devices = has_devices(plan.mesh)

    @property
    def is_of_this_process(self) -> bool:
        """Whether all devices belong to this process."""
        mesh = self._planned.mesh
        return mesh is not None and has_own_devices(mesh)

    @property
    def scope(self) -> str:
        """What is looked at, in words."""
        mesh = mesh_shown(self._columns.axis_sizes) or "one device"
        return f"{counted(len(self._pairs.found), 'leaf')}, on {mesh}"

    @cached_property
    def _cases(self) -> list[_Case]:
        """Per leaf that is in both."""
        kinds = self._columns.kind_of[self._pairs.rows].tolist()
        return list(zip(self._fields, kinds, strict=True))

    @cached_property
    def _faults(self) -> dict[_Case, tuple[Fault, ...]]:
        return {
            (live, kind): tuple(self._planned.faults(Live(*live), self._columns.kinds[kind]))
            for live, kind in set(self._cases)
        }

    def _faults_of(self, index: int) -> Iterator[Fault]:
        """The faults of one leaf."""
        for fault in self._faults[self._cases[index]]:
            is_chosen = fault.kind == "devices" and not is_committed(self._pairs.found[index])
            yield Fault("uncommitted", "", fault.planned) if is_chosen else fault

    def findings(self) -> Iterator[Finding]:
        """All of them, in any order."""
        yield from self._of_structure()
        leaves_of: dict[tuple[Fault, bool], list[int]] = defaultdict(list)
        if any(self._faults.values()):
            for index, (_, kind) in enumerate(self._cases):
                for fault in self._faults_of(index):
                    leaves_of[fault, self._is_cut(kind)].append(index)
        for (fault, is_cut), indices in leaves_of.items():
            yield self._of_fault(fault, indices, is_cut=is_cut)
        if not self._has_devices and self._planned.mesh is not None:
            yield without_devices(mesh_shown(self._columns.axis_sizes))

    def _of_fault(self, fault: Fault, indices: list[int], *, is_cut: bool) -> Finding:
        cases, kinds = Counter(self._cases[index] for index in indices), self._columns.kinds
        rules = {kinds[kind].rule for _, kind in cases}
        return finding_of(
            fault,
            paths=self._folded([self._pairs.rows[index] for index in indices]),
            leaves=len(indices),
            rule=rules.pop() if len(rules) == 1 else None,
            held=sum(_held(Live(*live)) * count for (live, _), count in cases.items()),
            planned=sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items()),
            is_cut=is_cut,
            has_devices=self._has_devices,
        )

    def _of_structure(self) -> Iterator[Finding]:
        """Arrays of the plan alone, and of the tree alone."""
        columns, pairs = self._columns, self._pairs
        missing = [
            row for row in pairs.missing if columns.kinds[columns.kind_of[row]].shape is not None
        ]
        lives = map(Live._make, fields_of(list(pairs.extra.values())))
        extra = {
            path: _held(live)
            for path, live in zip(pairs.extra, lives, strict=True)
            if live.shape is not None and live.dtype is not None
        }
        separator = columns.leaves.paths_dialect.separator
        fix = fix_of_structure([columns.paths[row] for row in missing], list(extra), separator)
        if missing:
            kinds = (columns.kinds[columns.kind_of[row]] for row in missing)
            held = sum(kind.device_bytes for kind in kinds)
            yield missing_leaves(self._folded(missing), len(missing), held, fix)
        if extra:
            folded = fold(list(extra), np.zeros(len(extra), np.int32))
            paths = tuple(one.pattern for one in folded)
            yield extra_leaves(paths, len(extra), sum(extra.values()), fix)

    def _is_cut(self, kind: int) -> bool:
        return bool(axes_used(self._columns.kinds[kind].spec, self._columns.axis_sizes))

    def _folded(self, rows: list[int]) -> tuple[str, ...]:
        """Folded paths of these rows of the plan, those with most bytes first."""
        columns = self._columns
        folded = fold([columns.paths[row] for row in rows], columns.kind_of[rows])
        held = [kind.device_bytes for kind in columns.kinds]
        folded.sort(key=lambda one: -held[one.group] * len(one.rows))
        return tuple(one.pattern for one in folded)

    def rows(self) -> list[Row]:
        """What processes must have alike: of each leaf its path, and what there is of it."""
        texts = {row: self._text(index) for index, row in enumerate(self._pairs.rows)}
        planned = enumerate(self._columns.paths)
        rows = [(path, texts.get(row, "not in the tree")) for row, path in planned]
        rows += [(path, "not in the plan") for path in self._pairs.extra]
        mesh = self._planned.mesh
        ids = "" if mesh is None else " ".join(str(one.id) for one in mesh.devices.flat)
        return [*rows, (DEVICES, ids)]

    def _text(self, index: int) -> str:
        kind = self._columns.kinds[self._cases[index][1]]
        planned = f"{dtype_shown(kind)}{list(kind.shape or ())} {placement_shown(kind)}"
        faults = [f"{fault.kind} {fault.found}".strip() for fault in self._faults_of(index)]
        return f"{', '.join(faults) or 'as planned'}: planned {planned}"


def _held(live: Live) -> int:
    """Bytes of a leaf on the device that holds most of it."""
    if isinstance(live.where, str):
        return 0
    shape, bits = live.shape or (), bits_of(live.dtype)
    mesh, spec = getattr(live.where, "mesh", None), getattr(live.where, "spec", None)
    if mesh is not None and spec is not None:
        return held_of(shape, bits, spec, mesh.shape).most
    return -(-prod(live.where.shard_shape(shape)) * bits // 8)
