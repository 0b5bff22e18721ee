"""The example trains, sharded as its rules say, and to the same result as on one device."""

import json
import math
import os
import subprocess
import sys

import pytest

from tests.support.folders import ROOT

EXAMPLES = ROOT / "examples"
# For a process of its own, because JAX must know the number of devices before it first uses one.
SCRIPT = """
import json, sys

import jax, numpy as np, optax
from train_transformer import main, train

STEPS = 30

def shapes(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): (array.shape, [s.data.shape for s in array.addressable_shards])
        for path, array in leaves
    }

state, losses = main(STEPS)
on_one, losses_on_one = train(STEPS, fsdp=1, tp=1)
gaps = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), state, on_one)
result = {
    "losses": losses,
    "losses_on_one": losses_on_one,
    "params": shapes(state.params),
    "params_on_one": shapes(on_one.params),
    "mu": shapes(optax.tree_utils.tree_get(state.optimizer, "mu")),
    "nu": shapes(optax.tree_utils.tree_get(state.optimizer, "nu")),
    "gap": float(max(jax.tree.leaves(gaps))),
}
with open(sys.argv[1], "w") as file:
    json.dump(result, file)
"""


@pytest.mark.slow
def test_train_transformer(tmp_path):
    pytest.importorskip("flax", reason="flax is not installed")
    pytest.importorskip("optax", reason="optax is not installed")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "result.json"],
        cwd=EXAMPLES,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())

    losses = result["losses"]
    assert len(losses) == 30
    assert losses[-1] < 0.25 * losses[0]

    for path, (shape, shards) in result["params"].items():
        if len(shape) == 1 or "positions" in path:
            parts = 1  # replicated
        elif "key" in path or "value" in path:
            parts = 2  # cut by fsdp, but 2 KV heads cannot be cut by tp=4
        else:
            parts = 8
        assert [math.prod(shard) for shard in shards] == [math.prod(shape) // parts] * 8, path
    assert result["mu"] == result["nu"] == result["params"]

    lines = done.stdout.splitlines()
    corrected = [line.split()[0] for line in lines if "corrected from" in line]
    assert corrected == ["block_0/key/kernel", "block_0/value/kernel"]
    assert [line for line in lines if line.startswith("Adam's")] == [
        f"Adam's {name} sharded as the parameters: True" for name in ("mu", "nu")
    ]

    # Sharding does not change the maths.
    assert all(shards == [shape] for shape, shards in result["params_on_one"].values())
    assert losses == pytest.approx(result["losses_on_one"], rel=1e-4)
    assert result["gap"] < 1e-4
