"""Gradients: their tree, shapes, dtypes and shardings are those of jax.grad, in explicit mode too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.plans import shard_bytes

SIZES = {"dp": 2, "fsdp": 4, "tp": 2}
RULES = [("kernel", P("fsdp", "tp")), ("bias", P("tp")), (".*", P())]


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def params():
    return {
        "layers": [{"kernel": array(8, 8, dtype="bfloat16"), "bias": array(8)} for _ in range(2)],
        "phase": array(4, dtype="complex64"),
        "temperature": array(),
    }


def test_they_are_those_of_jax():
    def loss(tree):
        return sum(jnp.abs(jnp.sum(leaf)).astype("float32") for leaf in jax.tree.leaves(tree))

    made = jax.eval_shape(jax.grad(loss), params())
    plan = sr.plan(params(), RULES, SIZES)
    found = plan.for_gradients()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found.abstract()) == jax.tree.map(
        lambda x: (x.shape, x.dtype), made
    )
    assert found.specs() == plan.specs()
    assert found.paths == plan.paths
    assert "on dp=2,fsdp=4,tp=2  P('fsdp', 'tp')" in str(found.explain("layers/0/kernel"))


@pytest.mark.parametrize("dtype", [None, "float32", np.float32, jnp.bfloat16, "BF16"])
def test_their_dtype(dtype):
    found = sr.plan(params(), RULES, SIZES).for_gradients(dtype)
    names = {str(kind.dtype) for kind in found.kinds}
    expected = {"BF16": "bfloat16", "float32": "float32"}.get(dtype) if isinstance(dtype, str) else dtype
    own = {"bfloat16", "float32", "complex64"}
    assert names == (own if dtype is None else {str(np.dtype(expected))})
    assert jax.tree.leaves(found.abstract())[0].shape == (8,)


def train_state():
    return {
        "params": {**params(), "scales": array(8, dtype="int8"), "mask": array(8, dtype="bool")},
        "opt_state": [{"count": array(dtype="int32")}, {"mu": params(), "nu": params()}],
        "ema_params": params(),
        "rng": jax.eval_shape(jax.random.key, 0),
        "step": 3,
        "eps": 0.1,
    }


@pytest.mark.parametrize("dtype", [None, "float32", "float8_e4m3fn"])
def test_they_are_what_is_counted(dtype):
    plan = sr.plan(train_state(), RULES, SIZES)
    counted = plan.bytes_per_device(gradients=True if dtype is None else dtype).gradients
    assert plan.for_gradients(dtype).bytes_per_device().params == counted
    alone = sr.plan(params(), RULES, SIZES)
    assert alone.for_gradients(dtype).bytes_per_device().params == counted
    if dtype is not None:
        assert alone.bytes_per_device(optimizer=[dtype]).optimizer == counted


def test_other_leaves_have_none():
    plan = sr.plan(train_state(), RULES, SIZES)
    found = plan.for_gradients()
    specs = found.specs()
    assert specs["params"]["layers"] == plan.specs()["params"]["layers"]
    del specs["params"]["layers"], specs["params"]["phase"], specs["params"]["temperature"]
    assert not jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    assert specs["params"] == {"scales": None, "mask": None}
    assert specs["opt_state"][0] == {"count": None}
    assert [path.split("/")[0] for path in found.paths] == ["params"] * 6
    with pytest.raises(KeyError, match="no leaf has the path 'rng'"):
        found.kind("rng")


@pytest.mark.parametrize("tree", [{"step": array(dtype="int32")}, {"opt_state": params()}])
def test_no_gradients_at_all(tree):
    with pytest.raises(ValueError, match="no leaf has a gradient: .* plan the parameters"):
        sr.plan(tree, RULES, SIZES).for_gradients()
    assert len(sr.plan({}, RULES, SIZES).for_gradients()) == 0


def test_they_are_made_on_the_device():
    pinned = [("kernel", sr.RuleSpec(P("fsdp", "tp"), memory_kind="pinned_host")), (".*", P())]
    plan = sr.plan(params(), pinned, SIZES)
    assert plan.bytes_per_device().host
    assert not plan.for_gradients().bytes_per_device().host


def test_leaves_without_a_sharding_have_gradients_without_one():
    plan = sr.plan(params(), [("kernel", P("fsdp", "tp"))], SIZES)
    (finding,) = (one for one in plan.for_gradients().check() if one.level == "error")
    assert (finding.kind, finding.leaves) == ("unmatched", 3)


def test_another_mesh_and_logical_rules():
    plan = sr.plan(params(), RULES, SIZES)
    other = plan.for_gradients("float32").on_mesh({"fsdp": 2, "tp": 4})
    assert other.axis_sizes == {"fsdp": 2, "tp": 4}
    assert sum(shard_bytes(other)) == sum(shard_bytes(plan.on_mesh({"fsdp": 2, "tp": 4}).for_gradients("float32")))
    rules = sr.LogicalRules([("embed", "fsdp"), ("mlp", "tp")])
    named = sr.plan({"w": array(8, 8)}, rules, SIZES, names={"w": ("embed", "mlp")})
    assert named.for_gradients("bfloat16").specs() == named.specs()
    assert named.for_gradients().kind("w").names == ("embed", "mlp")


TREE = {"up": array(16, 8), "down": array(8, 16), "cut": array(8)}


class TestExplicit:
    """In explicit mode the type of a gradient has its sharding: JAX says what it is."""

    @pytest.fixture
    def mesh(self):
        types = (jax.sharding.AxisType.Explicit,) * 2
        return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tp"), axis_types=types)

    @staticmethod
    def loss(tree, x):
        out = jnp.einsum("bf,fe->be", x @ tree["up"], tree["down"], out_sharding=P("data", None))
        return jnp.sum(out) + jnp.sum(tree["cut"])

    def values(self, plan, spec):
        tree = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), TREE)
        x = jax.device_put(np.ones((8, 16), "float32"), NamedSharding(plan.mesh, P(*spec)))
        return jax.device_put(tree, plan.shardings()), x

    @pytest.mark.parametrize("tags", [{}, {"reduced": {"data"}}], ids=str)
    def test_gradients_have_the_planned_shardings(self, mesh, tags):
        specs = {"up": P(None, "tp", **tags), "down": P("tp", None, **tags), "cut": P("data")}
        plan = sr.plan(TREE, list(specs.items()), mesh)
        with jax.set_mesh(mesh):
            made = jax.jit(jax.grad(self.loss))(*self.values(plan, ("data", None)))
        planned = plan.for_gradients().shardings()
        assert jax.tree.map(lambda leaf: leaf.sharding, made) == planned
        assert planned["up"].spec.unreduced == tags.get("reduced", frozenset())

    def test_micro_batches_leave_them_unreduced(self, mesh):
        """The accumulators of a scan, with one reduction behind it."""
        specs = {"up": P(None, "tp"), "down": P("tp", None), "cut": P("data")}
        tags = {"up": {"data"}, "down": {"data"}, "cut": frozenset()}
        reduced = {name: P(*spec, reduced=tags[name]) for name, spec in specs.items()}
        plan = sr.plan(TREE, list(specs.items()), mesh)
        sums = sr.plan(TREE, list(reduced.items()), mesh).for_gradients()
        assert {name: spec.unreduced for name, spec in sums.specs().items()} == tags

        def accumulated(tree, batches):
            tree = jax.tree.map(jax.reshard, tree, reduced)
            first = jax.grad(self.loss)(tree, batches[0])

            def add(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(self.loss)(tree, x)), None

            return jax.lax.scan(add, first, batches[1:])[0]

        with jax.set_mesh(mesh):
            tree, _ = self.values(plan, ("data", None))
            placed = NamedSharding(mesh, P(None, "data", None))
            batches = jax.device_put(np.ones((3, 8, 16), "float32"), placed)
            made = jax.jit(accumulated)(tree, batches)
            assert jax.tree.map(lambda leaf: leaf.sharding, made) == sums.shardings()
            whole = jax.jit(lambda t, b: jax.tree.map(jax.reshard, accumulated(t, b), plan.specs()))
            total = whole(tree, batches)
        # The same, undivided, by hand: all are ones.
        expected = {"up": np.full((16, 8), 24 * 16.0), "down": np.full((8, 16), 24 * 16.0), "cut": np.full(8, 3.0)}
        jax.tree.map(np.testing.assert_allclose, total, expected)

    def test_the_specs_of_cotangents(self, mesh):
        for tags in ({"reduced": {"data"}}, {"unreduced": {"data"}}, {"unreduced": {"data"}, "reduced": {"tp"}}):
            spec = P(None, None, **tags)
            plan = sr.plan({"w": array(8, 8)}, [("w", spec)], mesh)
            (found,) = plan.for_gradients().specs().values()
            assert (found.unreduced, found.reduced) == (spec.reduced, spec.unreduced)
            assert found == plan.specs()["w"].to_ct_spec()
            assert f"a gradient, {'un' if spec.reduced else ''}reduced=" in plan.for_gradients().kind("w").origin

    def test_they_can_be_locked(self, mesh):
        plan = sr.plan(TREE, [(".*", P(reduced={"data"}))], mesh).for_gradients("float32")
        back = sr.Plan.from_lock(plan.lock())
        assert back.fingerprint() == plan.fingerprint()
        assert back.specs() == plan.specs()
        assert "P(unreduced=['data'])" in str(plan)
