"""The recorded HLO texts, as a second reader counts them, against sums by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.support import hlo_counts

FOLDER = Path(__file__).parents[1] / "data" / "hlo"
KIB, MIB = 2**10, 2**20

# From the shapes and the loops of the steps, on a device. Kernels of the train step are bfloat16 of
# 512 x 4 x 64 (q, k, v, o) and 512 x 1024 (gate, up, down); its activations of 4 x 256 x 512.
LAYER = 4 * 512 * 4 * 64 * 2 + 3 * 512 * 1024 * 2
ACTIVATION = 4 * 256 * 512 * 2
TRAIN = {
    # Forward, and again in the backward pass; embedding, tokens on it, ids, head, the constraint.
    "all-gather": 2 * 3 * LAYER + 2 * MIB + 8 * 256 * 4 + 512 * 2048 * 2 + 16 * 256 * 512 * 2,
    # Attention and MLP forward; one recomputed and two gradients; the kernels' gradients but two;
    # behind the loop the logits' gradient, their greatest, two sums, and those of norms and loss.
    "all-reduce": 3 * 2 * ACTIVATION
    + 3 * (3 * ACTIVATION + 4 * 512 * 4 * 64 * 2 + 512 * 1024 * 2)
    + ACTIVATION
    + 4 * 256 * (2 + 2 * 4)
    + (2 * 3 * 512 + 512 + 1) * 4,
    "all-to-all": 4 * 4 * 256 * 128 * 2,
    "collective-permute": 4 * 256 * 4,
    # gate and up in the loop; embedding and head.
    "reduce-scatter": 3 * 2 * 512 * 1024 * 2 + 4096 * 128 * 2 + 512 * 2048 * 2,
}
# Its embedding's and its head's gather are as above, but the head is gathered twice in a tuple; all
# gradients of kernels are scattered; the greatest logit is float32.
TRAIN_H100 = TRAIN | {
    "all-gather": TRAIN["all-gather"] + 512 * 2048 * 2,
    "all-reduce": 3 * 5 * ACTIVATION + ACTIVATION + 4 * 256 * 3 * 4 + (2 * 3 * 512 + 512 + 1) * 4,
    "reduce-scatter": 3 * LAYER + 4096 * 128 * 2 + 512 * 2048 * 2,
}
# 2 layers; a window of 8 shards sends 9 permutes, 2 forward and 3 in the backward pass.
WINDOWED = {"all-gather": 2 * 4096 * 16384 * 2, "collective-permute": 2 * 5 * 9 * (4096 // 8) * 16384 * 2}
# 4 micro-batches of 3 layers, with two kernels of 1 MiB.
ACCUMULATE = {"all-gather": 4 * 3 * 2 * 2 * MIB, "reduce-scatter": 4 * 3 * 2 * MIB}
BRANCHES = {
    "all-gather": 2 * MIB,
    # The loop of unknown length once; then seven, which begin at 0.
    "all-reduce": (1 + 1 + 7) * 512 * KIB + 256 * KIB,
    "reduce-scatter": 512 * KIB,
}
RING = {"collective-permute": 8 * 2 * MIB}
EXPERTS = {"all-to-all": 2 * 512 * KIB}
DECODE = {"all-reduce": 4 * 2 * 4 * 1024 * 2}
SUMS = {
    "train-v5e": TRAIN,
    "train-v5p": TRAIN,
    "train-h100": TRAIN_H100,
    "mlp-v5e": {"all-gather": 3 * 8 * MIB},
    "mlp-v5p": {"all-gather": 3 * 8 * MIB},
    "mlp-h100": {"all-gather": 3 * 16 * MIB},
    "mlp-b200": {"all-gather": 3 * 16 * MIB},
    "windowed-v5e": WINDOWED,
    "accumulate-v5e": ACCUMULATE,
    "accumulate-v5p": {"all-gather": 4 * 3 * 2 * 2 * MIB, "all-reduce": 4 * 3 * 2 * MIB},
    "accumulate-h100": ACCUMULATE,
    "accumulate-gb200": ACCUMULATE,
    "ring-v5e": RING,
    "ring-h100": RING,
    "decode-v5e": DECODE,
    "decode-h100": DECODE,
    "experts-v5e": EXPERTS,
    "experts-h100": EXPERTS,
    "branches-v5e": BRANCHES,
    "branches-h100": BRANCHES,
}


@pytest.mark.parametrize("name", SUMS)
def test_the_counts_that_readers_are_compared_with_are_those_by_hand(name):
    text = gzip.decompress((FOLDER / f"{name}.txt.gz").read_bytes()).decode()
    assert hlo_counts.totals(hlo_counts.collectives(text)) == SUMS[name]
