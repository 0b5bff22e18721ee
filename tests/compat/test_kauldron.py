"""`compat.kauldron` against a restatement of Kauldron's rule, and its strategies on real devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import kauldron as sharding
from tests.support import corpus
from tests.support.references import big_vision_fsdp
from tests.support.slow import MODELS


def without_padding(spec):
    return tuple(spec) if any(spec) else ()


@pytest.mark.parametrize("least", [4, 0.5])
@pytest.mark.parametrize("model", MODELS[::3])
def test_real_models(model, least):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    rule = sharding.FSDPSharding(min_size_to_shard_mb=least)
    found = rule(tree)
    expected = {}
    for path, leaf in tree.items():
        kind = leaf.shape, leaf.dtype
        if kind not in expected:
            spec = big_vision_fsdp(leaf, {"devices": jax.device_count()}, "devices", least)
            expected[kind] = NamedSharding(sharding.DEVICES_MESH, P(*without_padding(spec)))
        assert found[path] == expected[kind], path
    plan = sr.plan(tree, rule.rules, {"devices": jax.device_count()})
    assert plan.specs() == {path: one.spec for path, one in found.items()}


def test_the_default_strategy_is_data_parallel():
    strategy = sharding.ShardingStrategy()
    assert (
        strategy.batch == sharding.FIRST_DIM == NamedSharding(sharding.DEVICES_MESH, P("devices"))
    )
    assert strategy.params == strategy.aux == sharding.REPLICATED
    assert strategy.opt_state is strategy.collections is None


@pytest.mark.parametrize("traced", [False, True])
def test_a_tree_of_shardings_none_and_functions(traced):
    x = {
        "a": {"w": jnp.ones((8, 2)), "v": jnp.ones(16)},
        "b": [jnp.ones(3)],
        "c": {"w": jnp.ones((64, 32))},
    }
    asked = []

    def lazily(part):
        asked.append(sorted(part))
        return {"w": sharding.FIRST_DIM}

    shardings = {"a": sharding.FIRST_DIM, "b": None, "c": lazily}

    def apply(tree):
        return sharding.with_sharding_constraint(tree, shardings)

    found = (jax.jit(apply) if traced else apply)(x)
    assert asked == [["w"]]
    for one in (*found["a"].values(), found["c"]["w"]):
        assert one.sharding.is_equivalent_to(sharding.FIRST_DIM, one.ndim)
    jax.tree.map(np.testing.assert_array_equal, found, x)
    if not traced:
        assert found["b"][0] is x["b"][0]


def test_abstract_arrays_get_their_sharding():
    x = {
        "w": jax.ShapeDtypeStruct((2048, 1024), "float32"),
        "b": jax.ShapeDtypeStruct((8,), "int32"),
    }
    strategy = sharding.ShardingStrategy(params=sharding.FSDPSharding())
    found = sharding.with_sharding_constraint(x, strategy.params)
    assert found["w"].sharding.spec == P("devices", None)
    assert found["b"].sharding == sharding.REPLICATED
    assert (found["b"].shape, found["b"].dtype) == ((8,), jnp.int32)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'SHARDED'"):
        sharding.SHARDED  # noqa: B018
