"""Checkpoints of orbax: a plan's abstract tree restores them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._plan.files.models import read_arrays
from tests.support.files import message

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

RULES = [("embedding", sr.RuleSpec("tp", memory_kind="pinned_host")), ("wq/kernel", P("fsdp", "tp")), (".*", P())]


LAYER = {"wq": {"kernel": jnp.arange(64, dtype="bfloat16").reshape(8, 8)}, "norm": jnp.arange(8.0)}
PARAMS = {"embedding": jnp.arange(128.0).reshape(16, 8), "layers": [LAYER] * 2, "step": jnp.int32(7)}


@pytest.fixture
def saved(tmp_path, mesh):
    """A checkpoint of the arrays on the mesh."""
    path = tmp_path / "checkpoint"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, sr.shard(PARAMS, RULES, mesh))
    except AttributeError as error:
        pytest.skip(f"this orbax does not work with this JAX: {error}")
    return path


def test_restored_arrays_have_the_plan_s_shardings(saved, mesh):
    """On that mesh and on another; orbax stores no memory kinds: the target has them."""
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    for there in (mesh, other):
        plan = sr.plan(PARAMS, RULES, there)
        restored = ocp.StandardCheckpointer().restore(saved, plan.abstract())
        assert jax.tree.all(jax.tree.map(np.array_equal, restored, PARAMS))
        shardings = jax.tree.map(lambda x: x.sharding, restored)
        assert shardings == plan.shardings()
        assert shardings["embedding"].memory_kind == "pinned_host"
    without = ocp.StandardCheckpointer().restore(saved)
    assert without["embedding"].sharding.memory_kind == jax.devices()[0].default_memory().kind


def test_a_checkpoint_is_not_read_here(saved):
    assert "no arrays that can be read; give" in message(read_arrays, saved)
