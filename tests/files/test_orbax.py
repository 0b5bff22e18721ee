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


def test_restored_arrays_have_the_plan_s_shardings(tmp_path, mesh):
    """On that mesh and on another; orbax stores no memory kinds: the target has them."""
    path, orbax = tmp_path / "checkpoint", ocp.StandardCheckpointer()
    orbax.save(path, sr.shard(PARAMS, RULES, mesh))
    orbax.wait_until_finished()
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    for there in (mesh, other):
        plan = sr.plan(PARAMS, RULES, there)
        restored = orbax.restore(path, plan.abstract())
        assert jax.tree.all(jax.tree.map(np.array_equal, restored, PARAMS))
        shardings = jax.tree.map(lambda x: x.sharding, restored)
        assert shardings == plan.shardings()
        assert shardings["embedding"].memory_kind == "pinned_host"
    assert orbax.restore(path)["embedding"].sharding.memory_kind == jax.devices()[0].default_memory().kind
    assert "no arrays that can be read; give" in message(read_arrays, path)
