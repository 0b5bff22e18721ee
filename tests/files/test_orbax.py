"""A plan's abstract tree is what orbax restores a checkpoint into: really saved, really restored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._plan.files.models import read_arrays
from tests.support.plans import shard_bytes

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

RULES = [("wq/kernel", P("fsdp", "tp")), ("embedding", P("tp")), (".*", P())]


@pytest.fixture
def params():
    key = iter(range(100))

    def array(*shape, dtype="float32"):
        return jax.random.normal(jax.random.key(next(key)), shape).astype(dtype)

    return {
        "embedding": array(16, 8),
        "layers": [{"wq": {"kernel": array(8, 8, dtype="bfloat16")}, "norm": array(8)}] * 2,
        "step": jnp.int32(7),
    }


@pytest.fixture
def saved(params, tmp_path):
    checkpointer = ocp.StandardCheckpointer()
    path = tmp_path / "checkpoint"
    try:
        checkpointer.save(path, params)
        checkpointer.wait_until_finished()
    except AttributeError as error:
        pytest.skip(f"this orbax does not work with this JAX: {error}")
    return path


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)
    )


def test_restored_arrays_have_the_plan_s_shardings(params, saved, mesh):
    plan = sr.plan(params, RULES, mesh)
    restored = ocp.StandardCheckpointer().restore(saved, plan.abstract())
    assert equal(restored, params)
    assert jax.tree.map(lambda x: x.sharding, restored) == plan.shardings()
    kernel = restored["layers"][0]["wq"]["kernel"]
    assert kernel.sharding.spec == P("fsdp", "tp")
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 4)}


def test_a_checkpoint_goes_to_another_mesh(params, saved, mesh):
    there = sr.shard(params, RULES, mesh)
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    restored = ocp.StandardCheckpointer().restore(saved, sr.plan(there, RULES, other).abstract())
    assert equal(restored, params)
    assert restored["embedding"].sharding == NamedSharding(other, P("tp", None))


def test_the_plan_of_a_checkpoint_is_that_of_its_tree(params, saved, mesh):
    arrays = read_arrays(str(saved))
    plan, of_tree = sr.plan(arrays.leaves, RULES, mesh), sr.plan(params, RULES, mesh)
    assert dict(zip(plan.paths, shard_bytes(plan), strict=True)) == dict(
        zip(of_tree.paths, shard_bytes(of_tree), strict=True)
    )
    assert plan.fingerprint() == of_tree.fingerprint()


def test_a_save_and_a_restore_keep_the_memory_kinds_of_the_plan(params, tmp_path, mesh):
    """orbax stores none: the target has them. Without one all goes to the default memory."""
    rules = [("embedding", sr.RuleSpec("tp", memory_kind="pinned_host")), *RULES]
    plan = sr.plan(params, rules, mesh)
    there = sr.shard(params, rules, mesh)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "host", there)
    for target in (plan.abstract(), sr.plan(there, rules, mesh).abstract()):
        restored = ocp.StandardCheckpointer().restore(tmp_path / "host", target)
        assert equal(restored, params)
        shardings = jax.tree.map(lambda x: x.sharding, restored)
        assert shardings == plan.shardings() == jax.tree.map(lambda x: x.sharding, there)
        assert shardings["embedding"].memory_kind == "pinned_host"
    without = ocp.StandardCheckpointer().restore(tmp_path / "host")
    assert without["embedding"].sharding.memory_kind == jax.devices()[0].default_memory().kind
