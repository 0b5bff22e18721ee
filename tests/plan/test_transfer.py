"""Transfers: what moves is what is left when each device's old box is taken from its new one."""

from __future__ import annotations

import itertools
from math import prod

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.arguments import MOST
from shardrules._base.dtypes import bits_of
from shardrules._base.rule_specs import LibraryCorrection
from shardrules._base.specs import entries_of
from tests.support.trees import array


def size(box):
    return prod(max(stop - start, 0) for start, stop in box)


def boxes(mesh, shape, spec):
    """{number of the device: box}, with shards rounded up, from the devices' coordinates."""
    found = {}
    for number, coordinates in enumerate(itertools.product(*map(range, mesh.values()))):
        at = dict(zip(mesh, coordinates, strict=True))
        box = []
        for dim, of_dim in enumerate(shape):
            entry = spec[dim] if dim < len(spec) else None
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            parts, position = 1, 0
            for axis in axes:
                parts, position = parts * mesh[axis], position * mesh[axis] + at[axis]
            part = -(-of_dim // parts)
            box.append((min(position * part, of_dim), min((position + 1) * part, of_dim)))
        found[number] = box
    return found


AXES = ("a", "b", "c")


@st.composite
def specs(draw, rank):
    """The axes in any order, each in a dimension or in none."""
    entries = [[] for _ in range(rank)]
    for axis in draw(st.permutations(AXES)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            entries[place].append(axis)
    return tuple(tuple(entry) or None for entry in entries)


@st.composite
def leaves(draw):
    """(shape, dtype, spec before, spec after, number of leaves)."""
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=rank, max_size=rank)))
    dtype = draw(st.sampled_from(["int4", "uint8", "bfloat16", "float32"]))
    return shape, dtype, draw(specs(rank)), draw(specs(rank)), draw(st.integers(1, 3))


MESHES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES})
# As XLA cuts, where JAX refuses to.
UNEVEN = LibraryCorrection(absent="keep", indivisible="keep")


@given(MESHES, MESHES, st.lists(leaves(), min_size=1, max_size=4))
def test_uneven_shards_and_packed_elements(mesh, other, found):
    trees, rules, other_rules = {}, [], []
    for number, (shape, dtype, before, after, count) in enumerate(found):
        trees[f"leaf{number}"] = [array(*shape, dtype=dtype)] * count
        rules.append((f"leaf{number}", before))
        other_rules.append((f"leaf{number}", after))
    plan = sr.plan(trees, sr.Rules(rules, correction=UNEVEN), mesh)
    changed = sr.plan(trees, sr.Rules(other_rules, correction=UNEVEN), other)
    received = dict.fromkeys(boxes(other, (), ()), 0)  # by brute force, from the boxes of both meshes
    held = dict.fromkeys(received, 0)
    for kind, path in zip(plan.kind_of.tolist(), plan.paths, strict=True):
        before, after = plan.kinds[kind], changed.explain(path).kind
        bits, old = bits_of(before.dtype), boxes(mesh, before.shape, entries_of(before.spec))
        for device, box in boxes(other, after.shape, entries_of(after.spec)).items():
            both = zip(old.get(device, ()), box, strict=False)
            kept = size([(max(a, c), min(b, d)) for (a, b), (c, d) in both]) if device in old else 0
            received[device] += -(-(size(box) - kept) * bits // 8)
            held[device] += -(-size(box) * bits // 8)
    assert changed.bytes_per_device().max == max(held.values())
    moved = plan.transfer(changed)
    assert moved.received.ravel().tolist() == list(received.values())
    assert moved.total == sum(received.values()) == sum(row.received for row in moved)
    assert bool(moved) == bool(moved.total)
    assert moved.mesh == (mesh, other)
    assert moved.shared == min(plan.devices, prod(other.values()))


def test_disjoint_devices_receive_all():
    trainer, sampler = (Mesh(np.array(half), ("d",)) for half in np.split(np.array(jax.devices()), 2))
    plan = sr.plan({"w": array(8, 4)}, [("w", "d")], trainer)
    moved = plan.transfer(plan.on_mesh(sampler))
    assert moved.shared == 0
    assert moved.received.tolist() == [32] * 4
    assert moved.total == plan.total_bytes


def test_a_mesh_without_devices_has_those_of_the_other_in_order():
    devices = np.array(jax.devices())[::-1]
    plan = sr.plan({"w": array(8, 4)}, [("w", "d")], Mesh(devices, ("d",)))
    assert not plan.transfer(plan.on_mesh({"d": 8}))
    assert not plan.on_mesh({"d": 8}).transfer(plan)
    assert plan.transfer(plan.on_mesh(Mesh(devices[::-1], ("d",)))).total == 128


def test_leaves_that_follow_their_mesh_stay():
    tree = {"w": array(8, 4), "step": 3, "empty": array(0, 4)}
    plan = sr.plan(tree, [("w", ("a", "b")), (".", ())], {"a": 4, "b": 2})
    renamed = sr.plan(tree, [("w", ("c", "d")), (".", ())], {"c": 4, "d": 2})
    moved = plan.transfer(renamed)
    assert not moved
    assert moved.total == 0
    assert str(moved) == "a=4,b=2 -> c=4,d=2: 8 devices in both\nnothing moves"
    assert [row.received for row in moved] == [0, 0, 0]
    with pytest.raises(ValueError, match="read-only"):
        moved.received[0] = 1


def test_the_table_has_what_moves():
    tree = {"layers": [{"w": array(8, 8), "norm": array(8), "v\x1b": array(8, 8)} for _ in range(3)]}
    rules = [("w", ("a", None)), ("norm", ()), (".", (None, "a"))]
    plan = sr.plan(tree, rules, {"a": 4})
    moved = plan.transfer(plan.on_mesh({"a": 2}))
    assert str(moved).splitlines() == [
        "a=4 -> a=2: 2 devices in both",
        "1.15 kB received in all; at most 768 B by a device",
        "path                   leaves  shape   dtype    spec          received  most by a device",
        "layers/{0..2}/w             3  [8, 8]  float32  P('a', None)     576 B             384 B",
        "layers/{0..2}/v\\u001b       3  [8, 8]  float32  P(None, 'a')     576 B             384 B",
    ]
    norm = next(row for row in moved if row.path == "layers/{0..2}/norm")
    assert (norm.leaves, norm.received, norm.most) == (3, 0, 0)
    assert norm.before.spec == norm.after.spec


def test_memory_kinds():
    tree = {"w": array(8, 4), "v": array(8, 4)}
    pinned = sr.RuleSpec("a", memory_kind="pinned_host")
    plan = sr.plan(tree, [("w", pinned), ("v", "a")], {"a": 4})
    moved = plan.transfer(sr.plan(tree, [("w", "a"), ("v", "a")], {"a": 2, "b": 2}))
    # Device 0 has rows 0:2, and gets 0:4; device 1 had 2:4, and gets 0:4. Of w nothing is there.
    assert [(row.path, row.received) for row in moved] == [("w", 256), ("v", 128)]
    stays = plan.transfer(sr.plan(tree, [("w", "a"), ("v", "a")], {"a": 4}))
    assert [(row.path, row.received) for row in stays] == [("w", 128), ("v", 0)]
    assert "P('a', None) in pinned_host -> P('a', None)" in str(stays)


def test_numbers_beyond_64_bits():
    huge = {"w": array(2**29, 2**30, dtype="uint8")}
    plan = sr.plan(huge, [("w", ("a", None))], {"a": 8})
    moved = plan.transfer(sr.plan(huge, [("w", (None, None))], {"b": 128}))
    assert moved.total == 8 * 7 * 2**56 + 120 * 2**59 > MOST
    assert moved.received.tolist() == [7 * 2**56] * 8 + [2**59] * 120


def test_bytes_of_more_than_64_bits_are_refused():
    plan = sr.plan({"w": [array(2**29, 2**30, dtype="uint8")] * 16}, [("w", "a")], {"a": 8})
    with pytest.raises(ValueError, match="9,223,372,036,854,775,808 bytes are too many"):
        plan.transfer(plan)


def plans(tree=None, rules=((".", "a"),), mesh=None, **policy):
    tree = {"w": array(8, 4), "v": array(8)} if tree is None else tree
    return sr.plan(tree, sr.Rules(rules, **policy), mesh or {"a": 4})


BF16 = {"w": array(8, 4, dtype="bfloat16"), "v": array(8)}
NOT_MOVED = {
    "paths": (plans({"params": {"w": array(8, 4), "v": array(8)}}), (
        "4 leaves of the two plans are not the same", "plan.transfer(plan.on_mesh(mesh))",
        "  w: [8, 4] float32 in this plan, no leaf in other", "  params/w: no leaf in this plan")),
    "dtype": (plans(BF16), ("other: 1 leaf of", "  w: [8, 4] float32 in this plan, [8, 4] bfloat16 in other")),
    "shape": (plans({"w": array(8, 4), "v": 1}), ("  v: [8] float32 in this plan, not an array in other",)),
    "unmatched": (plans(rules=[("w", "a")]), ("other: leaves get no sharding", "no rule matches 1 leaf")),
    "absent": (plans(rules=[(".", "b")], correction=LibraryCorrection(absent="keep")), (
        "other: leaves get no sharding", "the mesh has no axis 'b'")),
    "unconstrained": (plans(rules=[("v", "a"), ("w", P(P.UNCONSTRAINED))]), (
        "other: w has P(UNCONSTRAINED", "XLA chooses", "give them axes, or None")),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_MOVED)
def test_what_cannot_be_moved(case):
    other, fragments = NOT_MOVED[case]
    with pytest.raises(ValueError) as error:  # noqa: PT011 the fragments say which
        plans().transfer(other)
    for fragment in fragments:
        assert fragment in str(error.value)
    with pytest.raises(ValueError, match=r"this plan: (leaves get no sharding|w has)|not the same"):
        other.transfer(plans())


def test_unreduced_leaves_are_not_moved():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sums, whole, reduced = (
        plans(rules=[(".", P("a", **tags))], mesh=mesh) for tags in ({"unreduced": {"b"}}, {}, {"reduced": {"b"}})
    )
    for before, after in ((sums, whole), (whole, sums)):
        with pytest.raises(ValueError, match="terms of a sum along its unreduced axes"):
            before.transfer(after)
    assert not whole.transfer(reduced)


def test_a_lock_and_dtypes_by_other_names():
    plan = plans({"w": array(8, 4, dtype="bfloat16")})
    named = {"w": type("Header", (), {"shape": (8, 4), "dtype": "BF16"})()}
    locked = sr.Plan.from_lock(plan.lock())
    assert not locked.transfer(plan)
    assert not locked.transfer(plans(named))
    assert not locked.diff(plans(named))
    assert locked.fingerprint() == plans(named).fingerprint()
    assert locked.transfer(plan.on_mesh({"a": 2})).total == 16 + 32
