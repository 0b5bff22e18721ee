"""Corrections by factors of mesh axes: which device holds which slice, and where JAX allows it."""

from __future__ import annotations

import pickle
import re
from math import gcd, prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place.spec_on_mesh import in_parts
from tests.support import corpus

FACTOR = sr.Correction(indivisible="factor")


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: prod(sizes.values())])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


def shards(spec, sizes, rank):
    """Per dimension the number of each device's shard, in the order of the devices."""
    place = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    found = []
    for entry in (*spec, *[None] * (rank - len(spec))):
        number = np.zeros(tuple(sizes.values()), int)
        for axis in () if entry is None else (entry,) if isinstance(entry, str) else entry:
            number = number * sizes[axis] + place[axis]
        found.append(number.ravel().tolist())
    return found


def slices(sharding, shape):
    """The slices of the devices, in the order of the devices."""
    found = sharding.devices_indices_map(shape)
    return [
        [s.indices(n) for s, n in zip(found[d], shape, strict=True)]
        for d in sharding.mesh.devices.ravel()
    ]


def test_four_kv_heads_on_eight_devices():
    mesh = mesh_of(dp=1, tp=8)
    tree = {"q": struct(16, 32, 128), "kv": struct(16, 4, 128), "norm": struct(16)}
    rules = [("q|kv", (None, "tp")), ("norm", ("tp",))]
    found = sr.named_shardings(tree, rules, mesh, correction=FACTOR)
    (factored,) = {one.mesh for one in found.values()}
    assert dict(factored.shape) == {"dp": 1, "tp_0": 4, "tp_1": 2}
    assert found["kv"].spec == P(None, "tp_0", None)
    for name in ("q", "norm"):
        before = sr.named_shardings(tree, rules, mesh)[name]
        assert slices(found[name], tree[name].shape) == slices(before, tree[name].shape)
    # Device i has query heads 4 i to 4 i + 3, and the key head that these attend with.
    kv_heads = [heads for _, heads, _ in slices(found["kv"], tree["kv"].shape)]
    assert kv_heads == [(i // 2, i // 2 + 1, 1) for i in range(8)]


@pytest.mark.parametrize(
    ("size", "factors", "parts"),
    [
        (8, [], [8]),
        (8, [4], [4, 2]),
        (8, [2, 4], [2, 2, 2]),
        (12, [6], [6, 2]),
        (12, [2, 6], [2, 3, 2]),
        (12, [4, 6], [2, 2, 3]),
        (12, [3, 4], [2, 2, 3]),
        (64, [8], [8, 8]),
        (1, [], [1]),
    ],
)
def test_parts_of_an_axis(size, factors, parts):
    sizes = in_parts({"dp": 3, "tp": size}, {"tp": factors})
    assert list(sizes.values()) == [3, *parts]
    assert list(sizes)[1] == ("tp" if len(parts) == 1 else "tp_0")


def test_a_part_with_the_name_of_another_axis():
    tree, sizes = {"w": struct(4)}, {"tp": 8, "tp_1": 2}
    with pytest.raises(ValueError, match="the axis 'tp' of the mesh tp=8,tp_1=2 cannot be") as why:
        sr.plan(tree, [("w", "tp")], sizes, correction=FACTOR)
    assert "one part would be 'tp_1', which the mesh has already; rename that axis" in str(
        why.value
    )


def test_too_many_parts():
    sizes = {f"a{i}": 1 for i in range(31)} | {"tp": 4}
    with pytest.raises(ValueError, match="a mesh of 33 axes; it can have at most 32"):
        sr.plan({"w": struct(2)}, [("w", "tp")], sizes, correction=FACTOR)


AXES = st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=2, unique=True).map(tuple)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24]), min_size=1, max_size=2)
SIZES = st.sampled_from([(1, 8), (2, 4), (4, 2), (6, 1), (2, 3), (8, 1)])


@given(st.lists(st.tuples(SHAPES, AXES), min_size=1, max_size=4), SIZES, st.sampled_from([1, 2, 3]))
def test_the_largest_factor_cuts(leaves, sizes, unit):
    mesh = mesh_of(a=sizes[0], b=sizes[1])
    tree = {f"w{i}": struct(*shape) for i, (shape, _) in enumerate(leaves)}
    rules = [(f"w{i}$", sr.RuleSpec((axes,), units=(unit,))) for i, (_, axes) in enumerate(leaves)]
    found = sr.named_shardings(tree, rules, mesh, correction=FACTOR)
    plan = sr.plan(tree, rules, mesh, correction=FACTOR)
    assert plan.shardings() == found
    assert len({one.mesh for one in found.values()}) == 1
    for (shape, axes), (name, leaf) in zip(leaves, tree.items(), strict=True):
        parts = prod(mesh.shape[axis] for axis in axes)
        most = gcd(parts, shape[0] // unit) if shape[0] % unit == 0 else 1
        shard = found[name].shard_shape(leaf.shape)
        assert shard[0] * most == shape[0]
        assert plan.kind(name).device_bytes == prod(shard) * 4


@given(
    st.lists(SHAPES, min_size=1, max_size=3),
    SHAPES,
    SIZES,
    st.sampled_from(["drop", "drop_axis", "prefix", "error"]),
    AXES,
)
def test_arrays_of_other_rules_keep_their_slices(factored, shape, sizes, policy, axes):
    mesh = mesh_of(a=sizes[0], b=sizes[1])
    tree = {f"w{i}": struct(*one) for i, one in enumerate(factored)} | {"other": struct(*shape)}
    rules = [("w", sr.RuleSpec((("a", "b"),), FACTOR)), ("other", (axes, None))]
    other = sr.Correction(indivisible=policy)
    try:
        alone = sr.named_shardings({"other": tree["other"]}, rules[1:], mesh, correction=other)
    except ValueError:
        with pytest.raises(ValueError, match="is not divisible by"):
            sr.named_shardings(tree, rules, mesh, correction=other)
        return
    found = sr.named_shardings(tree, rules, mesh, correction=other)
    assert slices(found["other"], tuple(shape)) == slices(alone["other"], tuple(shape))
    sizes = dict(found["other"].mesh.shape)
    before = shards(alone["other"].spec, dict(mesh.shape), len(shape))
    assert shards(found["other"].spec, sizes, len(shape)) == before


@pytest.mark.parametrize("tp", [8, 16, 64])
@pytest.mark.parametrize(
    ("model", "projections", "spec", "units"),
    [
        # Heads have a dimension of their own, or share one with what a head holds.
        ("maxtext-llama3.1-405b-scanned", "(query|key|value)/kernel", (None, None, "tp"), ()),
        ("easydel-mixtral-8x22b", "[qkv]_proj/kernel", (None, "tp"), (None, 128)),
        ("llama-3.1-405b", r"[qkv]_proj\.weight", ("tp",), (128,)),
    ],
)
def test_real_models_with_eight_kv_heads(model, projections, spec, units, tp):
    tree = corpus.manifest(model).flat(corpus.abstract)
    others = [("embed|mlp", (None, "tp")), (".*", ())]
    rules = [(projections, sr.RuleSpec(spec, FACTOR, units)), *others]
    sizes = {"fsdp": 2, "tp": tp}
    found = sr.named_shardings(tree, rules, sizes)
    before = sr.named_shardings(tree, others, sizes)
    factored = dict(next(iter(found.values())).mesh.shape)
    assert prod(factored.values()) == 2 * tp
    dim, kv = len(spec) - 1, 0
    for path, leaf in tree.items():
        held = shards(found[path].spec, factored, len(leaf.shape))
        if not re.search(projections, path):
            assert held == shards(before[path].spec, sizes, len(leaf.shape)), path
            continue
        heads = leaf.shape[dim] // (units[-1] if units else 1)
        kv += heads == 8
        # Neighbours share what is not cut further.
        cut = gcd(heads, tp)
        assert held.pop(dim) == [device * cut // tp for device in range(tp)] * 2
        assert set(map(sum, held)) <= {0}
    assert kv > 0


ARRAYS = {
    "wq": np.arange(64, dtype="float32").reshape(8, 8),
    "wk": np.arange(32, dtype="float32").reshape(8, 4),
}
OF_ARRAYS = [("w", (None, "tp"))]


class TestOnDevices:
    def test_values(self):
        placed = sr.shard(ARRAYS, OF_ARRAYS, mesh_of(tp=8), correction=FACTOR)
        assert placed["wk"].sharding.spec == P(None, "tp_0")
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(np.asarray(placed[name]), array)
        plan = sr.plan(ARRAYS, OF_ARRAYS, mesh_of(tp=8), correction=FACTOR)
        for name, array in placed.items():
            held = {shard.data.nbytes for shard in array.addressable_shards}
            assert held == {plan.kind(name).device_bytes}

    @pytest.mark.parametrize("context", [None, "set_mesh"])
    def test_a_step_with_arrays_on_both_meshes(self, context):
        mesh = mesh_of(tp=8)
        placed = sr.shard(ARRAYS, OF_ARRAYS, mesh, correction=FACTOR)
        x = jax.device_put(np.ones((4, 8), "float32"), NamedSharding(mesh, P(None, "tp")))

        def step(params, x):
            params = sr.with_sharding_constraint(params, OF_ARRAYS, mesh, correction=FACTOR)
            return {name: x @ w for name, w in params.items()}

        factored = placed["wk"].sharding.mesh
        if context:
            with jax.set_mesh(factored):
                result = jax.jit(step)(placed, x)
        else:
            result = jax.jit(step)(placed, x)
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(np.asarray(result[name]), np.ones((4, 8)) @ array)

    def test_activations_on_the_factored_mesh(self):
        """A spec that names tp means its parts there."""
        factored = mesh_of(tp_0=4, tp_1=2)
        step = jax.jit(
            lambda x: sr.with_sharding_constraint(x, P("tp"), factored, correction=FACTOR)
        )
        assert step(jnp.ones((8, 2))).sharding.is_equivalent_to(
            NamedSharding(mesh_of(tp=8), P("tp")), 2
        )
        assert step(jnp.ones((4, 2))).sharding.is_equivalent_to(
            NamedSharding(factored, P("tp_0")), 2
        )


OF_KV = [("kv", ("tp",))]


class TestRefused:
    @pytest.mark.parametrize("call", [sr.named_shardings, sr.plan])
    def test_explicit_axes(self, call):
        explicit = (jax.sharding.AxisType.Explicit,)
        mesh = Mesh(np.array(jax.devices()[:8]), ("tp",), axis_types=explicit)
        with pytest.raises(ValueError, match="needs the mesh tp_0=4,tp_1=2 in the place of") as why:
            call({"kv": struct(4, 2)}, OF_KV, mesh, correction=FACTOR)
        assert "whose axes tp are Explicit: the types of arrays name them" in str(why.value)
        factored = Mesh(
            mesh.devices.reshape(4, 2), ("tp_0", "tp_1"), axis_types=explicit + explicit
        )
        found = sr.named_shardings({"kv": struct(4, 2)}, OF_KV, factored, correction=FACTOR)
        assert found["kv"].spec == P("tp_0", None)
        assert found["kv"].mesh == factored

    def test_inside_shard_map(self):
        mesh, factored = mesh_of(dp=2, tp=4), mesh_of(dp=2, tp_0=2, tp_1=2)

        def step(mesh, spec):
            inside = jax.shard_map(
                lambda x: sr.with_sharding_constraint(
                    {"kv": x}, [("kv", (None, "tp"))], mesh, correction=FACTOR
                )["kv"],
                mesh=mesh,
                in_specs=P("dp"),
                out_specs=P("dp"),
                axis_names={"dp"},
            )
            return jax.jit(inside)(np.ones((4, 2)))

        with pytest.raises(ValueError, match="whose axes dp are Manual: a shard_map runs over"):
            step(mesh, None)
        assert step(factored, None).sharding.is_equivalent_to(
            NamedSharding(factored, P("dp", "tp_0")), 2
        )


class TestOneArray:
    """Which parts its axis has depends on the others."""

    def test_without_the_mesh_of_the_tree(self):
        with pytest.raises(ValueError, match="kv  shape") as why:
            sr.spec_for("kv", (4,), OF_KV, {"tp": 8}, correction=FACTOR)
        assert "dim 0 of size 4 is not divisible by tp=8, but by a factor of tp" in str(why.value)
        assert "pass the mesh that has this factor as an axis: Plan.mesh" in str(why.value)
        assert sr.spec_for("kv", (8,), OF_KV, {"tp": 8}, correction=FACTOR) == P("tp")
        assert sr.spec_for("kv", (3,), OF_KV, {"tp": 8}, correction=FACTOR) == P()

    def test_on_the_mesh_of_the_tree(self):
        tree = {"kv": struct(4), "other/kv": struct(2)}
        sizes = sr.plan(tree, OF_KV, {"tp": 8}, correction=FACTOR).mesh
        assert sizes == {"tp_0": 2, "tp_1": 2, "tp_2": 2}
        assert sr.spec_for("kv", (4,), OF_KV, sizes, correction=FACTOR) == P(("tp_0", "tp_1"))
        with pytest.raises(ValueError, match="a factor of tp_0"):
            sr.spec_for("kv", (2,), OF_KV, {"tp_0": 4, "tp_1": 2}, correction=FACTOR)

    def test_specs_of_a_tree(self):
        with pytest.raises(ValueError, match="but by a factor of tp: pass the mesh that has"):
            sr.named_shardings({"w": struct(4)}, {"w": P("tp")}, {"tp": 8}, correction=FACTOR)


PARAMS = {"wq": struct(4096, 4096), "wk": struct(4096, 512), "step": struct()}
OF_PARAMS = [("w", sr.RuleSpec((None, "tp"), units=(None, 128)))]


class TestPlanned:
    def plan(self, mesh=None):
        return sr.plan(PARAMS, OF_PARAMS, mesh or {"dp": 1, "tp": 8}, correction=FACTOR)

    def test_its_mesh(self):
        plan = self.plan()
        assert plan.mesh == plan.axis_sizes == {"dp": 1, "tp_0": 4, "tp_1": 2}
        assert plan.devices == 8
        mesh = mesh_of(dp=1, tp=8)
        assert self.plan(mesh).mesh == mesh_of(dp=1, tp_0=4, tp_1=2)
        abstract = self.plan(mesh.abstract_mesh).mesh
        assert isinstance(abstract, AbstractMesh)
        assert abstract == mesh_of(dp=1, tp_0=4, tp_1=2).abstract_mesh
        plain = sr.plan(PARAMS, OF_PARAMS, mesh)
        assert plain.mesh is mesh

    def test_on_its_own_mesh_again(self):
        plan = self.plan()
        again = plan.on_mesh(plan.axis_sizes)
        assert again.fingerprint() == plan.fingerprint()
        assert pickle.loads(pickle.dumps(again)).specs() == plan.specs()
        finer = self.plan({"dp": 1, "tp_0": 8, "tp_1": 1})
        assert finer.axis_sizes == {"dp": 1, "tp_0_0": 4, "tp_0_1": 2, "tp_1": 1}
        assert finer.kind("wk").device_bytes == plan.kind("wk").device_bytes

    def test_findings(self):
        (found,) = (one for one in self.plan().check(data_axes=["dp"]) if one.rule == 0)
        assert (found.level, found.kind, found.paths) == ("info", "correction", ("wk",))
        held = 4096 * 512 * 4 // 4
        assert found.bytes == held - held // 2
        assert "dim 1 of size 512 is not divisible by tp_0=4 * tp_1=2 in multiples of 128" in str(
            found
        )
        assert "tp_1 does not cut it" in str(found)
        explained = str(self.plan().explain("wk"))
        assert "on dp=1,tp_0=4,tp_1=2  P(None, 'tp_0'), 2.10 MB on each device" in explained
        assert "tp_1 does not cut it (costs 1.05 MB on each device)" in explained

    def test_no_factor_is_a_correction_as_under_other_policies(self):
        rules, sizes = [("w", (("one", "tp"),))], {"one": 1, "tp": 8}
        plan = sr.plan({"w": struct(3, 2**24)}, rules, sizes, correction=FACTOR)
        (found,) = (one for one in plan.check() if one.kind == "correction")
        assert (found.level, plan.axis_sizes) == ("warning", sizes)
        assert "dim 0 of size 3 is not divisible by one=1 * tp=8" in found.message

    def test_sweep(self):
        sweep = self.plan().sweep()
        by_tp = {prod(row.mesh.values()) // row.mesh["dp"]: row for row in sweep}
        assert sorted(by_tp) == [1, 2, 4, 8]
        assert by_tp[8].mesh == {"dp": 1, "tp_0": 4, "tp_1": 2}
        assert by_tp[4].mesh == {"dp": 2, "tp": 4}
        assert by_tp[8].bytes == self.plan().bytes_per_device().max
        assert by_tp[8].corrections == 1

    def test_lock(self):
        plan = self.plan()
        read = sr.Plan.from_lock(plan.lock())
        assert read.fingerprint() == plan.fingerprint()
        assert read.axis_sizes == plan.axis_sizes
        assert not plan.diff(read)

    def test_an_optimizer(self):
        plan = self.plan()
        state = [{"mu": PARAMS}, {"nu": PARAMS}]
        optimizer = plan.for_optimizer(state, zero1="dp")
        assert optimizer.specs()[0]["mu"] == plan.specs()
        assert optimizer.on_mesh({"dp": 2, "tp": 4}).specs()[0]["mu"]["wk"] == P("dp", "tp")
        held = plan.bytes_per_device(optimizer=optimizer)
        assert held.max == 3 * plan.bytes_per_device().max

    def test_companions(self):
        tree = {"wk": struct(64, 4), "wk_lora_b": struct(8, 4)}
        lora = sr.Companion(r"^(.*)_lora_b$", r"\1", dims=(None, 1))
        given = (tree, [("wk$", (None, "tp"))], {"tp": 8})
        plan = sr.plan(*given, correction=FACTOR, companions=[lora])
        assert plan.specs() == dict.fromkeys(tree, P(None, "tp_0"))
        found = sr.named_shardings(*given, correction=FACTOR, companions=[lora])
        assert found == plan.shardings()

    def test_a_rule_file(self, write):
        from shardrules._files.rules import read_rule_source

        content = {"rules": [["w", [None, "tp"]]], "correction": {"indivisible": "factor"}}
        rules = read_rule_source(write("rules.json", content)).rules
        assert sr.plan({"w": struct(8, 4)}, rules, {"tp": 8}).specs() == {"w": P(None, "tp_0")}


def test_the_same_leaves_later_with_others():
    """What a call has needed does not change the mesh of the next."""
    rules = sr.Rules([("w", "tp")])
    assert len(sr.plan({"w": struct(2)}, rules, {"tp": 8}, correction=FACTOR).axis_sizes) == 2
    for tree, axes in [
        ({"w": struct(2)}, 2),
        ({"w": struct(4)}, 2),
        ({"w": struct(2), "w2": struct(4)}, 3),
        ({"w": struct(4)}, 2),
        ({"w": struct(8)}, 1),
    ]:
        found = sr.named_shardings(tree, rules, {"tp": 8}, correction=FACTOR)
        assert len(found["w"].mesh.shape) == axes
