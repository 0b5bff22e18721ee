"""Checkpoints of orbax: the arrays that we read are those saved, and a plan's abstract tree restores them."""

from __future__ import annotations

import shutil
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import read_arrays
from tests.support.files import message
from tests.support.plans import shard_bytes

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed")

RULES = [
    ("embedding", sr.RuleSpec("tp", memory_kind="pinned_host")),
    ("wq/kernel", P("fsdp", "tp")),
    (".*", P()),
]


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
def saved(params, tmp_path, mesh):
    """A checkpoint of the arrays on the mesh."""
    path = tmp_path / "checkpoint"
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, sr.shard(params, RULES, mesh))
    except AttributeError as error:
        pytest.skip(f"this orbax does not work with this JAX: {error}")
    return path


def equal(a, b):
    return jax.tree.all(
        jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)
    )


def test_restored_arrays_have_the_plan_s_shardings(params, saved, mesh):
    """On that mesh and on another; orbax stores no memory kinds: the target has them."""
    other = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    for there in (mesh, other):
        plan = sr.plan(params, RULES, there)
        restored = ocp.StandardCheckpointer().restore(saved, plan.abstract())
        assert equal(restored, params)
        shardings = jax.tree.map(lambda x: x.sharding, restored)
        assert shardings == plan.shardings()
        assert shardings["embedding"].memory_kind == "pinned_host"
    without = ocp.StandardCheckpointer().restore(saved)
    assert without["embedding"].sharding.memory_kind == jax.devices()[0].default_memory().kind


def test_the_plan_of_a_checkpoint_is_that_of_its_tree(params, saved, mesh):
    arrays = read_arrays(str(saved))
    plan, of_tree = sr.plan(arrays.leaves, RULES, mesh), sr.plan(params, RULES, mesh)
    assert dict(zip(plan.paths, shard_bytes(plan), strict=True)) == dict(
        zip(of_tree.paths, shard_bytes(of_tree), strict=True)
    )
    assert plan.fingerprint() == of_tree.fingerprint()


@pytest.mark.parametrize("how", [{}, {"use_zarr3": True}, {"use_ocdbt": False}])
def test_every_kind_of_leaf(tmp_path, how):
    tree = {
        "a": {"kernel": np.ones((2, 3), ml_dtypes.bfloat16), "none": None, "empty": {}},
        "list": [jnp.zeros(4, "int4"), {"x": np.ones((2,), "float64")}],
        "tuple": (jnp.ones(()), np.ones((1, 1), "uint8")),
        "number": 3,
        "text": "hello",
    }
    leaves = {
        "a/kernel": ArraySpec((2, 3), "bfloat16"),
        "list/0": ArraySpec((4,), "int4"),
        "list/1/x": ArraySpec((2,), "float64"),
        "number": ArraySpec((), "int64"),
        "tuple/0": ArraySpec((), "float32"),
        "tuple/1": ArraySpec((1, 1), "uint8"),
    }
    with ocp.PyTreeCheckpointer(**how) as checkpointer:
        checkpointer.save(tmp_path / "step", tree)
    assert read_arrays(str(tmp_path / "step"))[:4] == ("step", leaves, "/", None)


def test_a_train_state_of_a_manager(tmp_path):
    train_state = pytest.importorskip("flax.training.train_state", reason="flax is not installed")
    optax = pytest.importorskip("optax")
    state = train_state.TrainState.create(
        apply_fn=None, params={"dense": {"kernel": np.ones((4, 8))}}, tx=optax.adam(1e-3)
    )
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        for step, saved in ((9, {"old": np.ones(1)}), (10, state)):
            manager.save(step, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
    expected = {
        "opt_state/0/count": (),
        "opt_state/0/mu/dense/kernel": (4, 8),
        "opt_state/0/nu/dense/kernel": (4, 8),
        "params/dense/kernel": (4, 8),
        "step": (),
    }
    (tmp_path / "run" / "11.orbax-checkpoint-tmp").mkdir()
    for path in ("run", "run/10", "run/10/default"):
        leaves = read_arrays(str(tmp_path / path)).leaves
        assert {name: leaf.shape for name, leaf in leaves.items()} == expected


def test_the_latest_of_steps_that_are_items(saved, tmp_path):
    for step in ("9", "10"):
        shutil.copytree(saved, tmp_path / "run" / step)
    assert read_arrays(str(tmp_path / "run")).path == tmp_path / "run" / "10"


def test_several_items(tmp_path):
    save = ocp.args.StandardSave
    items = {"state": save({"w": np.ones(3)}), "ema": save({"w": np.ones(3)})}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    text = message(read_arrays, tmp_path)
    assert "the checkpoint has the items 3/ema, 3/state; give the directory of one" in text
    assert "the items ema, state" in message(read_arrays, tmp_path / "3")
    assert list(read_arrays(str(tmp_path / "3" / "ema")).leaves) == ["w"]


def test_a_damaged_or_unreadable_checkpoint(tmp_path, monkeypatch):
    (tmp_path / "_METADATA").write_text('{"tree_metadata": ')
    assert "_METADATA: line 1, column 19: this is not JSON" in message(read_arrays, tmp_path)
    for content in ("[]", "{}", '{"tree_metadata": {"a": {"key_metadata": [{"key": 3}]}}}'):
        (tmp_path / "_METADATA").write_text(content)
        assert "_METADATA: there is no tree_metadata with" in message(read_arrays, tmp_path)
    (tmp_path / "_METADATA").write_text('{"tree_metadata": {"a": {"key_metadata": []}}}')
    assert "orbax cannot read the checkpoint's metadata" in message(read_arrays, tmp_path)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "; pip install orbax-checkpoint" in message(read_arrays, tmp_path)
