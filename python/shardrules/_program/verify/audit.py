"""Compares live arrays with a plan: `audit`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from math import prod
from numbers import Number
from operator import attrgetter, methodcaller
from typing import Any, Final, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from shardrules._base.arguments import boolean, check_type
from shardrules._base.dtypes import SAFETENSORS, bits_of
from shardrules._base.mistakes import check_arrays, in_order
from shardrules._base.specs import (
    Entries,
    as_partition_spec,
    entries_of,
    entry_axes,
    is_unconstrained,
    partition_spec,
    spec_shown,
    tags_of,
    with_entries,
)
from shardrules._base.text import bytes_shown, counted, mesh_shown, with_article
from shardrules._core import aligned_values
from shardrules._place.boxes import NodeForms
from shardrules._place.mesh import has_devices, memory_apart, processes_of
from shardrules._place.processes import DEVICES, JointCall, Row
from shardrules._place.spec_trees import rows_and_paths
from shardrules._plan.align import align
from shardrules._plan.findings import Finding, Findings, VerifyKind
from shardrules._plan.fold import fold, fold_paths
from shardrules._plan.kinds import (
    DEFAULT_LARGE,
    Kind,
    axes_named,
    axes_used,
    device_bytes,
    dtype_shown,
    is_replicated,
    placement_shown,
)
from shardrules._plan.leaves import Leaves
from shardrules._plan.plan import Plan
from shardrules._rules.rules import Rules


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
            arrays with a NamedSharding on the devices of the plan's mesh. One in the host's memory
            is copied to its devices for that, and needs room there.

    Returns:
        All findings, the worst first. `Finding.bytes` are what a device holds beyond the plan, or,
        if that is nothing, what it has to receive. `scope` says how many arrays have copies that
        were compared.

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
    "structure": "audit the tree that was planned, or the part of it that was; or plan this one",
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
_NARROW: Final = {
    "int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64",
}  # fmt: skip
"""What JAX makes of dtypes without 64 bits."""


class _Fault(NamedTuple):
    """Difference of a leaf from its plan."""

    kind: VerifyKind
    actual: str
    """How the leaf is, in words."""
    planned: str = ""
    """How it is planned; "" if that says nothing."""


def _devices_shown(ids: Sequence[int]) -> str:
    rest = ", ..." if len(ids) > _MOST_DEVICES else ""
    return f"device{'s'[: len(ids) - 1]} {', '.join(map(str, ids[:_MOST_DEVICES]))}{rest}"


class _Audit:
    """Tree matched with its plan; what is alike on both sides is compared once."""

    def __init__(self, tree: Any, plan: Plan, mesh: Mesh, has_values: bool) -> None:
        self._plan, self._mesh, self._has_values = plan, mesh, has_values
        self._devices = tuple(mesh.devices.flat)
        self._memory = NamedSharding(mesh, partition_spec()).memory_kind
        self._tree = _live_leaves(tree, plan._leaves)
        leaves, rows = self._tree.leaves, self._tree.rows
        if not any(hasattr(leaf, "shape") for leaf in (*leaves, *self._tree.extra.values())):
            check_arrays("tree", tree)
        self._cases = list(zip(_fields_of(leaves), plan.kind_of[rows].tolist(), strict=True))
        self._faults = {
            (live, kind): tuple(self._differences(live, plan.kinds[kind]))
            for live, kind in set(self._cases)
        }
        # By the plan's rows: all processes run the same programs in the same order.
        order = sorted(range(len(rows)), key=rows.__getitem__) if has_values else []
        self._with_copies = [
            index
            for index in order
            if _has_copies(leaves[index])
            and all(fault.kind in _ON_THE_MESH for fault in self._faults[self._cases[index]])
        ]

    @property
    def scope(self) -> str:
        """Says in words what is compared."""
        mesh = mesh_shown(self._plan.axis_sizes) or "one device"
        scope = f"{counted(len(self._cases), 'leaf')}, on {mesh}"
        compared = f"; copies of {counted(len(self._with_copies), 'leaf')} compared"
        return scope + (compared if self._has_values else "")

    def rows(self) -> list[Row]:
        """List what processes must agree on: each path and what is at it, and the devices."""
        texts, compared = {}, set(self._with_copies)
        for index, row in enumerate(self._tree.rows):
            kind = self._plan.kinds[self._cases[index][1]]
            # Each process may have arrays on devices of its own.
            faults = ", ".join(
                "on other devices" if fault.kind == "devices" else fault.actual
                for fault in self._faults_of(index)
            )
            texts[row] = (
                f"{f'an array {faults}' if faults else 'as planned'}: planned {dtype_shown(kind)}"
                f"{list(kind.shape or ())} {placement_shown(kind)}"
                f"{', values compared' if index in compared else ''}"
            )
        planned_paths = enumerate(self._plan.paths)
        rows = [(path, texts.get(row, "not in the tree")) for row, path in planned_paths]
        rows += [(path, "not in the plan") for path in self._tree.extra]
        ids = " ".join(str(device.id) for device in self._devices)
        return [*rows, (DEVICES, ids)]

    def findings(self) -> Iterator[Finding]:
        """Yield all findings, in any order."""
        yield from self._of_structure()
        leaves_of: dict[_Fault, list[int]] = defaultdict(list)
        if any(self._faults.values()):
            for index in range(len(self._cases)):
                for fault in self._faults_of(index):
                    leaves_of[fault].append(index)
        arrays = [self._tree.leaves[index] for index in self._with_copies]
        sums = jax.device_get(list(map(_checksums, arrays)))
        for index, array, checksums in zip(self._with_copies, arrays, sums, strict=True):
            if differing := _differing_shown(array.sharding, checksums):
                leaves_of[_Fault("differs", differing)].append(index)
        for fault, indices in leaves_of.items():
            yield self._finding(fault, indices)

    def _faults_of(self, index: int) -> Iterator[_Fault]:
        case = self._cases[index]
        for fault in self._faults[case]:
            # An array that is not committed: jit may move it.
            if fault.kind == "devices" and not getattr(self._tree.leaves[index], "committed", True):
                planned = placement_shown(self._plan.kinds[case[1]])
                yield _Fault("unplaced", _CHOSEN, planned)
            else:
                yield fault

    def _finding(self, fault: _Fault, indices: list[int]) -> Finding:
        plan, cases = self._plan, Counter(self._cases[index] for index in indices)
        kinds = {kind: plan.kinds[kind] for _, kind in cases}
        size = sum(_bytes_on_device(live) * count for (live, _), count in cases.items())
        planned_size = sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items())
        at_stake = size - planned_size if size > planned_size else planned_size
        is_whole = all(is_replicated(kind, plan.axis_sizes) for kind in kinds.values())
        is_small = fault.kind == "unplaced" and is_whole and at_stake < DEFAULT_LARGE
        message = (
            f"{counted(len(indices), 'leaf')} {'is' if len(indices) == 1 else 'are'} {fault.actual}"
            f"{', planned ' if fault.planned else ''}{fault.planned}"
        )
        if fault.kind in ("sharding", "type"):
            message += f": {bytes_shown(size)} on each device, planned {bytes_shown(planned_size)}"
        rows = [self._tree.rows[index] for index in indices]
        groups = fold([plan.paths[row] for row in rows], plan.kind_of[rows])
        groups.sort(key=lambda group: -plan.kinds[group.group].device_bytes * len(group.rows))
        rules = {kind.rule for kind in kinds.values()}
        return Finding(
            "warning" if is_small else "error",
            fault.kind,
            message,
            _FIXES[fault.kind],
            tuple(group.pattern for group in groups),
            len(indices),
            rules.pop() if len(rules) == 1 else None,
            at_stake,
        )

    def _of_structure(self) -> Iterator[Finding]:
        """Yield findings about arrays that only the plan or only the tree has."""
        plan, extra = self._plan, self._tree.extra
        kinds = ((plan.paths[row], plan.kinds[plan.kind_of[row]]) for row in self._tree.missing)
        lives = zip(extra, _fields_of(list(extra.values())), strict=True)
        of_plan = {path: kind.device_bytes for path, kind in kinds if kind.shape is not None}
        of_tree = {path: _bytes_on_device(live) for path, live in lives if None not in live[1:]}
        texts = "the tree lacks {} of the plan", "the tree has {} that the plan lacks"
        for text, sizes in zip(texts, (of_plan, of_tree), strict=True):
            if count := len(sizes):
                message, paths = text.format(counted(count, "array")), tuple(fold_paths([*sizes]))
                fix, size = _FIXES["structure"], sum(sizes.values())
                yield Finding("error", "structure", message, fix, paths, count, bytes=size)

    def _differences(self, live: _Live, kind: Kind) -> Iterator[_Fault]:
        """Yield the differences of a leaf from its kind."""
        where, shape, dtype = live
        if kind.status != "placed":
            yield _Fault("unplanned", f"without a place in the plan: {kind.message}")
            return
        if kind.shape is None and where in ("host", "nowhere"):
            return  # a number or a function, in the plan as in the tree
        is_of_shape = shape == (kind.shape or ())
        has_dtypes = dtype is not None and kind.dtype is not None  # numbers have none
        if not is_of_shape or (has_dtypes and not _is_dtype(dtype, kind.dtype)):
            yield _Fault("type", _type_shown(shape, dtype), _type_shown(kind.shape, kind.dtype))
        if where in _NOWHERE:
            yield _Fault(*_NOWHERE[where], placement_shown(kind))
        if not isinstance(where, str) and is_of_shape:
            yield from self._of_place(where, shape or (), kind)

    def _of_place(self, sharding: Any, shape: tuple[int, ...], kind: Kind) -> Iterator[_Fault]:
        # "device" is the devices' default memory, whatever its name.
        is_default = kind.memory_kind in (None, self._memory)
        planned_memory = "device" if is_default else str(kind.memory_kind)
        if (memory := memory_apart(sharding) or "device") != planned_memory:
            words = (f"in {each} memory" for each in (memory, planned_memory))
            yield _Fault("memory-kind", *words)
        mesh = getattr(sharding, "mesh", None)
        # Of a sharding without a mesh, JAX lists the parts in the order of its devices.
        devices = tuple(sharding.devices_indices_map(shape) if mesh is None else mesh.devices.flat)
        if devices != self._devices:
            actual = f"on {_devices_shown([device.id for device in devices])}"
            if set(devices) == set(self._devices):
                actual = "on the plan's devices in another order"
            yield _Fault("devices", actual, f"on {mesh_shown(self._mesh.shape)}")
            return
        target = NamedSharding(self._mesh, self._spec(kind, sharding))
        if not target.is_equivalent_to(sharding.with_memory_kind(target.memory_kind), len(shape)):
            if mesh is None:
                actual = f"parts of shape {sharding.shard_shape(shape)}"
            else:
                is_other = mesh.shape != self._mesh.shape
                actual = spec_shown(sharding.spec) + f" on {mesh_shown(mesh.shape)}" * is_other
            yield _Fault("sharding", f"sharded as {actual}", placement_shown(kind))

    def _spec(self, kind: Kind, sharding: Any) -> PartitionSpec:
        """Return the planned spec; entries of the array's free axes replace unconstrained ones."""
        spec = as_partition_spec(Entries() if kind.spec is None else kind.spec)
        is_on_mesh = getattr(sharding, "mesh", None) == self._mesh
        actual = chain(entries_of(sharding.spec) if is_on_mesh else (), repeat(None))
        named, pairs = axes_named(kind.spec), zip(entries_of(spec), actual, strict=False)
        free = ((a, b if named.isdisjoint(entry_axes(b)) else None) for a, b in pairs)
        return with_entries(spec, (b if is_unconstrained(a) else a for a, b in free))


# Leaves of a live tree.

_Live = tuple[Sharding | Literal["deleted", "abstract", "host", "nowhere"], Any, Any]
"""Where a leaf is, its shape and its dtype.

"host" is for numpy arrays and numbers in this process's memory, and "nowhere" for what is no array:
its shape is None, its dtype its class. Numbers have no dtype.
"""
_NOWHERE: Final[dict[Any, tuple[VerifyKind, str]]] = {
    "deleted": ("deleted", "deleted, by donation or by hand"),
    "abstract": ("unknown", "abstract and on no devices, so nothing is known"),
    "host": ("unplaced", "in this process's memory and on no device"),
}
"""Kind and words of what is on no devices."""


def _bytes_on_device(live: _Live) -> int:
    """Compute the bytes of a leaf on a device."""
    where, shape, dtype = live
    if isinstance(where, str):
        return 0
    if isinstance(where, NamedSharding):  # an abstract one may be uneven
        return device_bytes(shape, bits_of(dtype), where.spec, where.mesh.shape)
    return -(-prod(where.shard_shape(shape)) * bits_of(dtype) // 8)


def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, of which a plan may have the name alone."""
    name = str(getattr(dtype, "name", dtype))
    return SAFETENSORS.get(name, name)


def _is_dtype(live: Any, planned: Any) -> bool:
    """Return whether a dtype is the planned one, or what JAX makes of that without 64 bits."""
    name, planned_name = _dtype_name(live), _dtype_name(planned)
    config: Any = jax.config
    is_narrow = not config.jax_enable_x64 and name == _NARROW.get(planned_name)
    return name == planned_name or is_narrow


def _type_shown(shape: tuple[int, ...] | None, dtype: Any) -> str:
    if shape is None:
        return "no array" if dtype is None else with_article(dtype.__name__)
    return "a number" if dtype is None else f"{_dtype_name(dtype)}{list(shape)}"


class _LiveLeaves(NamedTuple):
    """Leaves of a tree that the plan has, and those that only one of both has."""

    leaves: list[Any]
    rows: list[int]
    """Rows of these leaves in the plan."""
    missing: list[int]
    """Rows of the plan that the tree does not have."""
    extra: dict[str, Any]
    """Leaves that the plan does not have, by path."""


def _live_leaves(tree: Any, leaves: Leaves) -> _LiveLeaves:
    """Match the leaves of a tree with those of a plan: by structure, or else by path."""
    rows, values = [*range(len(leaves.paths))], aligned_values(leaves.tree, tree, len(leaves.paths))
    is_alike = values is not None
    if values is None:  # of other nodes than dicts, lists and tuples, or unlike
        flat: list[tuple[list[Any], Any]] = [*map(tree_util.tree_flatten, (leaves.tree, tree))]
        (rows, planned), (values, structure) = flat
        # Not by flatten_up_to: its error has the text of each array, and fetches the data for it.
        with suppress(TypeError, ValueError):  # of what a node compares, such as arrays
            is_alike = bool(planned == structure)
    if is_alike and not _are_arrays(values):
        values = list(map(NodeForms().array_in, values))
        # The tree may have more levels than the plan's; and None is no leaf.
        is_alike = tree_util.all_leaves(values)
    if is_alike:
        return _LiveLeaves(values, rows, [], {})
    aligned = align(tree, leaves, partial(rows_and_paths, rules=Rules((), leaves.paths_dialect)))
    rows, values, paths = aligned.rows, aligned.values, aligned.leaves.paths
    return _LiveLeaves(
        [value for value, row in zip(values, rows, strict=True) if row >= 0],
        [row for row in rows if row >= 0],
        aligned.missing,
        {path: values[i] for i, path in enumerate(paths) if rows[i] < 0},
    )


def _are_arrays(leaves: Sequence[Any]) -> bool:
    types = set(map(type, leaves))
    return all(issubclass(cls, jax.Array) and not issubclass(cls, Tracer) for cls in types)


# An array's own shape and dtype are functions in Python, which take these.
_OF_ARRAY: Final[Any] = attrgetter("sharding", "aval.shape", "aval.dtype")


def _fields_of(leaves: Sequence[Any]) -> list[_Live]:
    if not _are_arrays(leaves):
        return list(map(_live, leaves))
    # A method of the class takes half the time of looking one up for each array. Random keys of
    # older versions of JAX have a property.
    types: set[Any] = set(map(type, leaves))
    method = types.pop().is_deleted if len(types) == 1 else None
    is_deleted = method if callable(method) else methodcaller("is_deleted")
    return list(map(_live if any(map(is_deleted, leaves)) else _OF_ARRAY, leaves))


def _live(leaf: Any) -> _Live:
    if isinstance(leaf, Tracer):
        raise TypeError(
            "audit looks at arrays on devices, and inside jit there are none yet: call it outside"
        )
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return ("host", (), None) if isinstance(leaf, Number) else ("nowhere", None, type(leaf))
    shape, sharding = tuple(leaf.shape), getattr(leaf, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "deleted", shape, leaf.dtype
    if isinstance(sharding, Sharding) and (mesh is None or has_devices(mesh)):
        return sharding, shape, leaf.dtype
    is_host = hasattr(leaf, "__array__") or hasattr(leaf, "__dlpack__")
    return "host" if is_host else "abstract", shape, leaf.dtype


# Copies of shards: compared by checksums that the devices make of what they hold.


def _has_copies(leaf: Any) -> bool:
    """Return True for an array of which several devices have a shard."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
        return False
    # Of what is yet to be summed, each device has a part of its own.
    return "unreduced" not in tags_of(sharding.spec) and bool(_copied_axes(sharding))


def _copied_axes(sharding: NamedSharding) -> list[str]:
    sizes = sharding.mesh.shape
    used = axes_used(sharding.spec, sizes)
    return [axis for axis, size in sizes.items() if size > 1 and axis not in used]


def _checksums(array: Any) -> Any:
    """Return the checksums that devices make of their shards, in the mesh's order."""
    sharding = array.sharding
    is_apart = memory_apart(sharding) is not None
    if is_apart:  # in the host's memory, where nothing is computed
        sharding = sharding.with_memory_kind(None)
        # Each shard alone: for several processes JAX 0.7 makes a program that XLA refuses.
        shards = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device))
            for shard in array.addressable_shards
        ]
        array = jax.make_array_from_single_device_arrays(array.shape, sharding, shards)
    with jax.set_mesh(sharding.mesh):  # shard_map takes no other mesh than that in force
        sums = _checksums_by_devices(array, sharding)
    return jax.block_until_ready(sums) if is_apart else sums  # room for an array at a time


@partial(jax.jit, static_argnums=1)
def _checksums_by_devices(array: Any, sharding: Any) -> Any:
    axes = sharding.mesh.axis_names
    of_shards: Any = jax.shard_map(
        lambda shard: jax.lax.all_gather(_checksum(shard), axes),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return of_shards(array)


def _differing_shown(sharding: Any, checksums: Any) -> str:
    """Say which copies are unlike the first of their shard, and along which axes; "" for none."""
    mesh, copied = sharding.mesh, _copied_axes(sharding)
    sums = np.reshape(checksums, mesh.devices.shape)
    # Whatever their place on the axes that cut the array, copies are along the others.
    first = tuple(slice(0, 1) if axis in copied else slice(None) for axis in mesh.axis_names)
    ids = [device.id for device in mesh.devices[sums != sums[first]]]
    firsts_along = {axis: sums.take([0], mesh.axis_names.index(axis)) for axis in copied}
    axes = " and ".join(axis for axis, firsts in firsts_along.items() if (sums != firsts).any())
    words = f"along {axes}: {_devices_shown(ids)} {'has' if len(ids) == 1 else 'have'} other values"
    return f"not the same in all copies, {words} than the first copy" if ids else ""


def _checksum(shard: jax.Array) -> jax.Array:
    """Compute a checksum of the bits of a shard and where they are.

    Words are mixed before they are summed: those of floats often end in zeros, and so many of them
    sum up to nothing. A single word that differs always tells, as mixing is one to one.
    """
    words = _words(shard)
    place = jnp.zeros(words.shape, "uint32")
    for dim, size in enumerate(words.shape):
        numbers = jax.lax.broadcasted_iota("uint32", words.shape, dim)
        place = place * np.uint32(size % 2**32) + numbers
    # Spread over all of a word, as the end of MurmurHash3 does.
    words += place * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(words ^ (words >> np.uint32(16)), dtype="uint32")


def _words(shard: jax.Array) -> jax.Array:
    """Return the bits of the elements as unsigned integers."""
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        shard = jax.random.key_data(shard)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        shard = jnp.stack([shard.real, shard.imag])
    if shard.dtype != bool:
        bits = min(bits_of(shard.dtype), 32)  # of 64, two words
        shard = jax.lax.bitcast_convert_type(shard, f"uint{bits}")
    return shard.astype("uint32")
