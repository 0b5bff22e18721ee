"""The example trains, sharded as its rules say, and to the same result as on one device."""

import os
import subprocess
import sys

import pytest

from tests.support.folders import ROOT

# For a process of its own, because JAX must know the number of devices before it first uses one.
SCRIPT = """
import math
import jax, numpy as np, optax
from train_transformer import main, train

def parts(tree):
    return {
        jax.tree_util.keystr(path): (array.shape, [shard.data.shape for shard in array.addressable_shards])
        for path, array in jax.tree.leaves_with_path(tree)
    }

state, losses = main(30)
on_one, losses_on_one = train(30, fsdp=1, tp=1)
assert len(losses) == 30 and losses[-1] < 0.25 * losses[0]
for path, (shape, shards) in parts(state.params).items():
    is_whole = len(shape) == 1 or "positions" in path
    # 2 KV heads cannot be cut by tp=4.
    count = 1 if is_whole else 2 if "key" in path or "value" in path else 8
    assert [math.prod(shard) for shard in shards] == [math.prod(shape) // count] * 8, path
for moments in ("mu", "nu"):
    assert parts(optax.tree_utils.tree_get(state.optimizer, moments)) == parts(state.params)
# Sharding does not change the maths.
assert all(shards == [shape] for shape, shards in parts(on_one.params).values())
np.testing.assert_allclose(losses, losses_on_one, rtol=1e-4)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, on_one)
"""


@pytest.mark.slow
def test_train_transformer():
    pytest.importorskip("flax", reason="flax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    command = [sys.executable, "-c", SCRIPT]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    corrected = [line.split()[0] for line in lines if "corrected from" in line]
    assert corrected == ["block_0/key/kernel", "block_0/value/kernel"]
    assert [line for line in lines if line.startswith("Adam's")] == [
        f"Adam's {name} sharded as the parameters: True" for name in ("mu", "nu")
    ]
