"""`compat.openpi` against a restatement of openpi's function, on real models."""

from __future__ import annotations

import logging

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import openpi
from tests.support import corpus
from tests.support.references import openpi_fsdp
from tests.support.slow import MODELS


@pytest.mark.parametrize("sizes", [{"batch": 2, "fsdp": 8}, {"batch": 8, "fsdp": 1}], ids=str)
@pytest.mark.parametrize("least", [4, 1])
@pytest.mark.parametrize("model", MODELS)
def test_real_models(model, least, sizes):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    found = openpi.fsdp_sharding(tree, sizes, min_size_mbytes=least)
    expected = {}
    for path, leaf in tree.items():
        kind = leaf.shape, leaf.dtype
        if kind not in expected:
            expected[kind] = openpi_fsdp(leaf, sizes, least)
        assert found[path].spec == expected[kind], path


def test_a_train_state(mesh):
    state = {"step": 3, "rng": jax.random.key(0), "w": jax.ShapeDtypeStruct((64, 64), "float32")}
    found = openpi.fsdp_sharding(state, mesh, min_size_mbytes=0)
    replicated = NamedSharding(mesh, P())
    assert found == {
        "step": replicated,
        "rng": replicated,
        "w": NamedSharding(mesh, P(None, "fsdp")),
    }


def test_what_is_sharded_can_be_logged(caplog):
    with caplog.at_level(logging.INFO):
        tree = {"w": jax.ShapeDtypeStruct((2048, 4096), "float32")}
        openpi.fsdp_sharding(tree, {"fsdp": 8}, log=True)
    assert "P(None, 'fsdp')" in caplog.text
    assert "33.6 MB" in caplog.text


def test_a_mesh_without_the_axis():
    with pytest.raises(ValueError, match="one must be 'fsdp'"):
        openpi.fsdp_sharding({}, {"batch": 8})


def test_the_rule_is_that_of_a_plan():
    tree = {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
    plan = sr.plan(tree, openpi.rules(min_size_mbytes=1), {"fsdp": 8})
    assert plan.specs() == {"w": P(None, "fsdp")}
