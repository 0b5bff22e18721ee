"""T5X's rules and names: flax, which T5X resolves them with, is the oracle."""

from __future__ import annotations

import itertools

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import t5x

# Of T5X's documentation: what "embed" becomes beside nothing, beside a dimension on model, and
# beside one on data, by the dims of activations and parameters.
EMBED = {
    (1, 1): (None, None, None),
    (2, 1): ("model", None, "model"),
    (1, 2): ("data", "data", None),
    (2, 2): ("model", "data", "model"),
}
NAMES = ["batch", "vocab", "embed", "mlp", "heads", "kv", "joined_kv", "relpos_buckets",
         "abspos_buckets", "length", "layers", "stack", "mlp_activations"]  # fmt: skip


@pytest.mark.parametrize("dims", EMBED)
def test_the_standard_rules(dims):
    rules = t5x.standard_logical_axis_rules(*dims)
    assert rules.dialect == sr.dialects.LINEN
    alone, beside_model, beside_data = EMBED[dims]
    assert sr.logical_to_mesh(("embed",), rules) == P(alone)
    for name in ("vocab", "mlp", "heads", "joined_kv"):
        assert sr.logical_to_mesh((name,), rules) == P("model")
        assert sr.logical_to_mesh((name, "embed"), rules) == P("model", beside_model)
    assert sr.logical_to_mesh(("batch", "embed"), rules) == P("data", beside_data)
    for name in NAMES[5:6] + NAMES[7:]:
        assert sr.logical_to_mesh((name,), rules) == P(None)


@pytest.mark.parametrize("dims", EMBED)
def test_flax_decides_as_the_plan_does(dims):
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    rules = t5x.standard_logical_axis_rules(*dims, additional_rules=[("expert", "data")])
    for names in itertools.permutations([*NAMES, "expert"], 2):
        assert sr.logical_to_mesh(names, rules) == linen.logical_to_mesh_axes(names, list(rules))


def test_names_in_params_axes():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from flax.linen import partitioning

    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            ones = linen.initializers.ones
            kernel = partitioning.param_with_axes("kernel", ones, (8, 16), axes=("embed", "mlp"))
            return x @ kernel + partitioning.param_with_axes("bias", ones, (16,), axes=("mlp",))

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Dense(name="mlp_axes")(x)

    variables = jax.eval_shape(Model().init, jax.random.key(0), jax.numpy.ones((2, 8)))
    names = t5x.axis_names(variables["params_axes"])
    theirs = partitioning.get_axis_names(variables["params_axes"])
    assert {key: P(*value) for key, value in names["mlp_axes"].items()} == dict(theirs["mlp_axes"])
    assert names.keys() == theirs.keys() == {"mlp_axes"}
    rules = t5x.standard_logical_axis_rules(parameter_partitioning_dims=2)
    plan = sr.plan(variables["params"], rules, {"data": 2, "model": 2}, names=names)
    assert plan.specs() == {"mlp_axes": {"kernel": P("data", "model"), "bias": P("model")}}


def test_bad_input():
    with pytest.raises(ValueError, match="parameter_partitioning_dims is 3"):
        t5x.standard_logical_axis_rules(1, 3)
    with pytest.raises(TypeError, match="the entry 'kernel_axes' is 3 .*flax's AxisMetadata"):
        t5x.axis_names({"mlp": {"kernel_axes": 3}})
