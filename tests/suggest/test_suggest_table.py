"""Suggested rules on all models and meshes: few, clean, and near the fewest bytes that any rules would hold."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

import shardrules as sr
from tests.support import corpus
from tests.support.slow import some

MESHES = {
    "fsdp=8": {"fsdp": 8},
    "tp=8": {"tp": 8},
    "fsdp=64,tp=8": {"fsdp": 64, "tp": 8},
    "fsdp=64,ep=8": {"fsdp": 64, "ep": 8},
    "dp=2,fsdp=8,sp=1,tp=8": {"dp": 2, "fsdp": 8, "sp": 1, "tp": 8},
}
DATA_AXES = ("dp", "sp")
# Routers and projections to a latent space are whole over tensor axes, whatever they hold.
SPARED = re.compile(r"(q_a|kv_a)_proj|w(q|kv)_a[./]|(mlp|MoeBlock_0|block_sparse_moe)[./]gate[./]")


MODELS = corpus.manifest_names()
ALL_CASES = [
    (model, mesh) for model in MODELS for mesh in MESHES if "ep" not in mesh or re.search("deepseek|mixtral", model)
]
# The models of 45,000 and more arrays take a second each.
SMALL = [case for case in ALL_CASES if case[0] not in corpus.LARGEST]
CASES = [*some(SMALL, 6), *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL_CASES if case not in SMALL)]


@cache
def leaves(model):
    return corpus.manifest(model).flat(corpus.with_dtype)


def least(model, mesh, *, spares=False):
    """The fewest bytes that any assignment of axes to dimensions that they divide would hold.

    With `spares`, of those that do not cut what is SPARED by tp.
    """
    axes = {axis: size for axis, size in MESHES[mesh].items() if axis not in DATA_AXES}
    others = {axis: size for axis, size in axes.items() if axis != "tp"}
    plan = sr.plan(leaves(model), [], axes)
    spared = Counter(
        int(kind) for path, kind in zip(plan.paths, plan.kind_of, strict=True) if spares and SPARED.search(path)
    )
    counted = enumerate(zip(plan.kinds, plan.counts.tolist(), strict=True))
    return sum(
        kind.bytes // most_parts(kind.shape or (), (*axes.values(),)) * (count - spared[number])
        + kind.bytes // most_parts(kind.shape or (), (*others.values(),)) * spared[number]
        for number, (kind, count) in counted
    )


@cache
def most_parts(shape, sizes):
    """Into how many equal parts axes of these sizes can cut an array, each of them once."""
    if not sizes:
        return 1
    size, *rest = sizes
    cut = [most_parts(shape, tuple(rest))]
    for dim, elements in enumerate(shape):
        if elements % size == 0:
            part = (*shape[:dim], elements // size, *shape[dim + 1 :])
            cut.append(size * most_parts(part, tuple(rest)))
    return max(cut)


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_few_clean_rules_hold_nearly_the_fewest_bytes(model, mesh):
    found = sr.suggest(leaves(model), MESHES[mesh])
    held, fewest = found.plan.bytes_per_device().max, least(model, mesh)
    assert held <= 1.01 * least(model, mesh, spares=True)
    assert held <= 1.02 * fewest
    assert len(found.rules) <= 19
    assert not found.plan.check(**found.declared).at_least("warning")
    assert not found.warnings
    # Without what it declares: nothing large is replicated but what tensor axes are kept from.
    bare = found.plan.with_rules(found.rules).check(data_axes=DATA_AXES)
    kept = [path for one in bare.at_least("warning") for path in one.paths]
    assert all(map(SPARED.search, kept)), kept
    coverage = found.plan.coverage
    assert coverage.unmatched == 0
    assert not coverage.dead
    assert not coverage.shadowed
    assert all(reason.is_understood for reason in found.reasons)
    assert [reason.leaves for reason in found.reasons] == list(coverage.won)
