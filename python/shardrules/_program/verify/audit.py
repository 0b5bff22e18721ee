"""Compares live arrays with a plan: `audit`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import chain
from math import prod
from numbers import Number
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import jax
from jax import tree_util
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from shardrules._base.arguments import boolean, check_type
from shardrules._base.dtypes import SAFETENSORS, bits_of
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.specs import (
    Entries,
    as_partition_spec,
    entries_of,
    is_unconstrained,
    partition_spec,
    spec_shown,
    with_entries,
)
from shardrules._base.text import bytes_shown, counted, mesh_shown, with_article
from shardrules._core import aligned_values
from shardrules._place.boxes import NodeForms
from shardrules._place.mesh import has_devices, memory_apart, processes_of
from shardrules._place.processes import DEVICES, JointCall, Row
from shardrules._place.spec_trees import rows_and_paths
from shardrules._plan.align import align
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
from shardrules._plan.leaves import Leaves
from shardrules._plan.plan import Plan
from shardrules._program.jax_names import device_order
from shardrules._program.verify.checksums import Unlike, has_copies, unlike_copies
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    _Case = tuple["_Fields", int]
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
    several processes, each process calls this with its tree; all get the same findings. The page
    "Findings" says what each kind means.

    Args:
        tree: A tree like the one that was planned. Its leaves are found by their paths if its
            structure is another.
        plan: The plan of such a tree, on a mesh of devices; of an optimizer's state, that of
            `Plan.for_optimizer`.
        values: Also compare the values of the copies that several devices have of an array, or of a
            part of it, in all processes: by checksums that the devices make of all bits. Only
            arrays with a NamedSharding on the devices of the plan's mesh, in their own memory.

    Returns:
        All findings, the worst first. `Finding.bytes` are what a device holds beyond the plan, or,
        if that is nothing, what it has to receive.

    Raises:
        TypeError: It is not a plan, not a tree of arrays, or the call is inside jit.
        ValueError: The plan's mesh has no devices: give `plan.on_mesh(mesh)`.
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
        if not has_devices(plan.mesh):
            raise ValueError(
                f"the plan's mesh {mesh_shown(plan.axis_sizes)} has no devices to compare with: "
                "audit(tree, plan.on_mesh(mesh))"
            )
        if len(processes_of(plan.mesh)) == 1:
            call.alone()
        comparison = _Audit(tree, plan, plan.mesh, values)
        call.agree(comparison.rows)
    return Findings(comparison.findings(), comparison.scope)


_PLACE: Final = (
    "place them by shardrules.shard(tree, plan.shardings()), or have jit make them with "
    "out_shardings=plan.shardings()"
)
_FIXES: Final[dict[VerifyKind, str]] = {
    "unplanned": "mend the rules: plan.check()",
    "type": "plan the tree that is there, or make the one that was planned",
    "deleted": "audit what the call that they were donated to returned",
    "unknown": "audit the arrays themselves",
    "unplaced": _PLACE,
    "devices": f"make the mesh once and give it to all; or {_PLACE}",
    "memory-kind": "move them by shardrules.shard(tree, plan.shardings()); or, if they are meant "
    "to be there, name it in their rule: RuleSpec(..., memory_kind=...)",
    "sharding": _PLACE,
    "differs": "look for a sum over these axes that is missing where they were made, as shard_map "
    "with check_vma=False allows, and for what each process made or read by itself",
}
_ON_THE_MESH: Final = frozenset({"sharding", "memory-kind"})
"""Faults of arrays that are on the devices of the mesh, in its order."""
_CHOSEN: Final = "whole on a device that JAX chose"
_MOST_DEVICES: Final = 8


class _Fault(NamedTuple):
    """Difference of a leaf from its plan."""

    kind: VerifyKind
    actual: str
    """How the leaf is, in words."""
    planned: str
    """How it is planned; "" if that says nothing."""


def _fault_of_copies(unlike: Unlike) -> _Fault:
    have = "has" if len(unlike.devices) == 1 else "have"
    devices, firsts = map(_devices_shown, (unlike.devices, unlike.firsts))
    along = " and ".join(unlike.axes)
    actual = (
        f"not the same in all copies, along {along}: {devices} {have} other values than {firsts}"
    )
    return _Fault("differs", actual, "")


def _devices_shown(ids: tuple[int, ...]) -> str:
    ending = ", ..." if len(ids) > _MOST_DEVICES else ""
    return f"device{'s'[: len(ids) - 1]} {', '.join(map(str, ids[:_MOST_DEVICES]))}{ending}"


class _Audit:
    """Tree matched with its plan."""

    def __init__(self, tree: Any, plan: Plan, mesh: Mesh, has_values: bool) -> None:
        self._plan = plan
        self._mesh = mesh
        self._live = _live_leaves(tree, plan._leaves)
        leaves = chain(self._live.leaves, self._live.extra.values())
        if not any(hasattr(leaf, "shape") for leaf in leaves):
            check_arrays("tree", tree)
        self._fields = _fields_of(self._live.leaves)
        self._planned = _PlannedKinds(mesh)
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
        ids = " ".join(str(device.id) for device in self._mesh.devices.flat)
        return [*rows, (DEVICES, ids)]

    def _text(self, index: int) -> str:
        kind = self._plan.kinds[self._cases[index][1]]
        planned = f"{dtype_shown(kind)}{list(kind.shape or ())} {placement_shown(kind)}"
        faults = ", ".join(fault.actual for fault in self._faults_of(index))
        values = ", values compared" if self._is_compared(index) else ""
        return f"{f'an array {faults}' if faults else 'as planned'}: planned {planned}{values}"

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
            for index, copies in self._unlike_copies():
                leaves_of[_fault_of_copies(copies), is_sharded[self._cases[index][1]]].append(index)
        for (fault, is_of_sharded), indices in leaves_of.items():
            yield self._finding(fault, indices, is_sharded=is_of_sharded)

    @cached_property
    def _cases(self) -> list[_Case]:
        kinds = self._plan.kind_of[self._live.rows].tolist()
        return list(zip(self._fields, kinds, strict=True))

    @cached_property
    def _faults(self) -> dict[_Case, tuple[_Fault, ...]]:
        return {
            (live, kind): tuple(self._planned.faults(_Live(*live), self._plan.kinds[kind]))
            for live, kind in set(self._cases)
        }

    def _faults_of(self, index: int) -> Iterator[_Fault]:
        for fault in self._faults[self._cases[index]]:
            is_jax_choice = fault.kind == "devices" and not _is_committed(self._live.leaves[index])
            yield fault._replace(kind="unplaced", actual=_CHOSEN) if is_jax_choice else fault

    def _is_compared(self, index: int) -> bool:
        """Return whether copies of this leaf are compared; the same in all processes."""
        if not self._has_values or not has_copies(self._live.leaves[index]):
            return False
        return all(fault.kind in _ON_THE_MESH for fault in self._faults[self._cases[index]])

    def _unlike_copies(self) -> Iterator[tuple[int, Unlike]]:
        # By the plan's rows: all processes run the same programs in the same order.
        order = sorted(range(len(self._live.rows)), key=self._live.rows.__getitem__)
        indices = list(filter(self._is_compared, order))
        unlike = unlike_copies(self._live.leaves[index] for index in indices)
        return ((i, copies) for i, copies in zip(indices, unlike, strict=True) if copies)

    def _finding(self, fault: _Fault, indices: list[int], *, is_sharded: bool) -> Finding:
        cases, kinds = Counter(self._cases[index] for index in indices), self._plan.kinds
        rules = {kinds[kind].rule for _, kind in cases}
        size = sum(_bytes_on_fullest(_Live(*live)) * count for (live, _), count in cases.items())
        planned_bytes = sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items())
        at_stake = size - planned_bytes if size > planned_bytes else planned_bytes
        level: Level = "error"
        if fault.kind == "unplaced" and not is_sharded and at_stake < DEFAULT_LARGE:
            level = "warning"
        are = "is" if len(indices) == 1 else "are"
        message = f"{counted(len(indices), 'leaf')} {are} {fault.actual}"
        message += f", planned {fault.planned}" if fault.planned else ""
        if fault.kind in ("sharding", "type"):
            message += f": {bytes_shown(size)} on each device, planned {bytes_shown(planned_bytes)}"
        return Finding(
            level,
            fault.kind,
            message,
            _FIXES[fault.kind],
            self._folded([self._live.rows[index] for index in indices]),
            len(indices),
            rules.pop() if len(rules) == 1 else None,
            at_stake,
        )

    def _of_structure(self) -> Iterator[Finding]:
        """Yield findings about arrays that only the plan or only the tree has."""
        plan, extra = self._plan, self._live.extra
        missing = [
            row for row in self._live.missing if plan.kinds[plan.kind_of[row]].shape is not None
        ]
        lives = zip(extra, map(_Live._make, _fields_of(list(extra.values()))), strict=True)
        sizes = {
            path: _bytes_on_fullest(live)
            for path, live in lives
            if live.shape is not None and live.dtype is not None
        }
        fix = "audit the tree that was planned, or the part of it that was; or plan this one"
        error = partial(Finding, "error", "structure")
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


def _bytes_on_fullest(live: _Live) -> int:
    """Compute the bytes of a leaf on the fullest device."""
    if isinstance(live.where, str):
        return 0
    shape, bits = live.shape or (), bits_of(live.dtype)
    mesh, spec = getattr(live.where, "mesh", None), getattr(live.where, "spec", None)
    if mesh is not None and spec is not None:
        return device_bytes(shape, bits, spec, mesh.shape)
    return -(-prod(live.where.shard_shape(shape)) * bits // 8)


_NOWHERE: Final[dict[Any, tuple[VerifyKind, str]]] = {
    "deleted": ("deleted", "deleted, by donation or by hand"),
    "abstract": ("unknown", "abstract and on no devices, so nothing is known"),
    "host": ("unplaced", "in this process's memory and on no device"),
}
"""Kind and words of what is on no devices."""


class _PlannedKinds:
    """Kinds of a plan's leaves, on its mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._devices = tuple(mesh.devices.flat)
        self._default_memory = NamedSharding(mesh, partition_spec()).memory_kind

    def faults(self, live: _Live, kind: Kind) -> Iterator[_Fault]:
        """Yield the differences of a leaf from its kind."""
        planned = placement_shown(kind)
        if kind.status != "placed":
            yield _Fault("unplanned", f"without a place in the plan: {kind.message}", "")
            return
        if kind.shape is None and live.where in ("host", "nowhere"):
            return  # a number or a function, in the plan as in the tree
        is_of_shape = live.shape == (kind.shape or ())
        has_dtypes = live.dtype is not None and kind.dtype is not None  # numbers have none
        if not is_of_shape or (has_dtypes and not _is_dtype(live.dtype, kind.dtype)):
            types = _type_shown(live.shape, live.dtype), _type_shown(kind.shape, kind.dtype)
            yield _Fault("type", *types)
        if live.where in _NOWHERE:
            yield _Fault(*_NOWHERE[live.where], planned)
        if not isinstance(live.where, str) and is_of_shape:
            yield from self._of_place(live.where, live.shape or (), kind)

    def _of_place(self, sharding: Any, shape: tuple[int, ...], kind: Kind) -> Iterator[_Fault]:
        # "device" is the devices' default memory, whatever its name.
        is_default = kind.memory_kind in (None, self._default_memory)
        planned_memory = "device" if is_default else str(kind.memory_kind)
        if (memory := memory_apart(sharding) or "device") != planned_memory:
            words = (f"in {each} memory" for each in (memory, planned_memory))
            yield _Fault("memory-kind", *words)
        mesh = getattr(sharding, "mesh", None)
        devices = device_order(sharding) if mesh is None else tuple(mesh.devices.flat)
        if devices != self._devices:
            what = "other device" if len(devices) == len(self._devices) else "device"
            actual = f"on {counted(len(devices), what)}"
            if set(devices) == set(self._devices):
                actual = "on the plan's devices in another order"
            yield _Fault("devices", actual, f"on {mesh_shown(self._mesh.shape)}")
            return
        target = NamedSharding(self._mesh, self._spec(kind, sharding))
        if not target.is_equivalent_to(sharding.with_memory_kind(target.memory_kind), len(shape)):
            yield _Fault(
                "sharding", f"sharded as {self._shown(sharding, shape)}", placement_shown(kind)
            )

    def _spec(self, kind: Kind, sharding: Any) -> PartitionSpec:
        """Return the planned spec; the array's entries replace unconstrained ones."""
        spec = as_partition_spec(Entries() if kind.spec is None else kind.spec)
        entries = entries_of(spec)
        if not any(map(is_unconstrained, entries)):
            return spec
        is_on_mesh = getattr(sharding, "mesh", None) == self._mesh
        actual = [*(entries_of(sharding.spec) if is_on_mesh else ()), *[None] * len(entries)]
        pairs = zip(entries, actual, strict=False)
        return with_entries(spec, (b if is_unconstrained(a) else a for a, b in pairs))

    def _shown(self, sharding: Any, shape: tuple[int, ...]) -> str:
        """Format a sharding without device ids, which differ between processes."""
        mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
        if mesh is None or spec is None:
            return f"parts of shape {sharding.shard_shape(shape)}"
        return spec_shown(spec) + (
            "" if mesh.shape == self._mesh.shape else f" on {mesh_shown(mesh.shape)}"
        )


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, of which a plan may have the name alone."""
    name = str(getattr(dtype, "name", dtype))
    return SAFETENSORS.get(name, name)


def _is_dtype(live: Any, planned: Any) -> bool:
    """Return whether a dtype is the planned one, or what JAX makes of that without 64 bits."""
    name, planned_name = _dtype_name(live), _dtype_name(planned)
    if name == planned_name:
        return True
    try:
        return name == _dtype_name(jax.dtypes.canonicalize_dtype(planned_name))
    except TypeError:  # that of random keys
        return False


def _type_shown(shape: tuple[int, ...] | None, dtype: Any) -> str:
    if shape is None:
        return "no array" if dtype is None else with_article(dtype.__name__)
    return "a number" if dtype is None else f"{_dtype_name(dtype)}{list(shape)}"


# Leaves of a live tree.

_Where = Sharding | Literal["deleted", "abstract", "host", "nowhere"]
"""Sharding of a leaf; or, of "host", a numpy array or number in this process's memory, and of
"nowhere", something that is no array."""
_Fields = tuple[_Where, tuple[int, ...] | None, Any]
"""Fields of `_Live`, as a plain tuple: making 10,000 records costs half a walk."""


class _Live(NamedTuple):
    """Sharding, shape and dtype of a live leaf."""

    where: _Where
    shape: tuple[int, ...] | None
    """None for what is no array, nor a number."""
    dtype: Any
    """Class of what is no array; None for a number."""


class _LiveLeaves(NamedTuple):
    """Leaves of a tree that the plan has, and those that only one of both has."""

    leaves: list[Any]
    rows: list[int]
    """Rows of these leaves in the plan."""
    missing: list[int]
    """Rows of the plan that the tree does not have."""
    extra: dict[str, Any]
    """Leaves that the plan does not have, by path."""


# An array's own shape and dtype are functions in Python, which take these.
_OF_ARRAY: Final[Any] = attrgetter("sharding", "aval.shape", "aval.dtype")


def _live_leaves(tree: Any, leaves: Leaves) -> _LiveLeaves:
    """Match the leaves of a tree with those of a plan: by structure, or else by path."""
    values, rows = aligned_values(leaves.tree, tree, len(leaves.paths)), [*range(len(leaves.paths))]
    if values is None:  # of other nodes than dicts, lists and tuples, or unlike
        structures: list[Any] = [None, None]
        rows, structures[0] = tree_util.tree_flatten(leaves.tree)
        values, structures[1] = tree_util.tree_flatten(tree)
        # Not by flatten_up_to: its error has the text of each array, and fetches the data for it.
        try:
            is_alike = bool(structures[0] == structures[1])
        except (TypeError, ValueError):  # of what a node compares, such as arrays
            is_alike = False
        if not is_alike:
            return _leaves_by_paths(tree, leaves)
    if not _are_arrays(set(map(type, values))):
        forms = NodeForms()
        values = list(map(forms.array_in, values))
        # The tree may have more levels than the plan's; and None is no leaf.
        if not tree_util.all_leaves(values):
            return _leaves_by_paths(tree, leaves)
    return _LiveLeaves(values, rows, [], {})


def _leaves_by_paths(tree: Any, leaves: Leaves) -> _LiveLeaves:
    rules = Rules((), leaves.paths_dialect)
    aligned = align(tree, leaves, partial(rows_and_paths, rules=rules))
    rows, values, paths = aligned.rows, aligned.values, aligned.leaves.paths
    return _LiveLeaves(
        [value for value, row in zip(values, rows, strict=True) if row >= 0],
        [row for row in rows if row >= 0],
        aligned.missing,
        {path: values[i] for i, path in enumerate(paths) if rows[i] < 0},
    )


def _are_arrays(types: set[type]) -> bool:
    return all(issubclass(cls, jax.Array) and not issubclass(cls, Tracer) for cls in types)


def _fields_of(leaves: list[Any]) -> list[_Fields]:
    """Read the fields of `_Live` for each leaf."""
    types: set[Any] = set(map(type, leaves))
    if not _are_arrays(types):
        return list(map(_live, leaves))
    # A method of the class takes half the time of looking one up for each array. Random keys of
    # older versions of JAX have a property.
    method = types.pop().is_deleted if len(types) == 1 else None
    is_deleted = method if callable(method) else methodcaller("is_deleted")
    return list(map(_live if any(map(is_deleted, leaves)) else _OF_ARRAY, leaves))


def _live(leaf: Any) -> _Live:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "audit looks at arrays on devices, and inside jit there are none yet: call it outside"
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        is_number = isinstance(leaf, Number)
        return _Live("host", (), None) if is_number else _Live("nowhere", None, type(leaf))
    where: _Where = "abstract"
    sharding = getattr(leaf, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        where = "deleted"
    elif isinstance(sharding, Sharding) and (mesh is None or has_devices(mesh)):
        where = sharding
    elif hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__"):
        where = "host"
    return _Live(where, tuple(leaf.shape), leaf.dtype)


def _is_committed(leaf: Any) -> bool:
    """Return False for an array on a device that JAX chose, from which jit may move it."""
    return bool(getattr(leaf, "committed", True))
