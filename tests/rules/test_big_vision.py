"""Strategies of big_vision as docs/guides/recipes.md writes them, against a restatement of its tactics."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus
from tests.support.references import big_vision_fsdp, by_fullmatch
from tests.support.slow import MODELS

FSDP = sr.fsdp("fsdp", min_bytes=4 * 2**20 + 1)


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 12}, {"fsdp": 1}], ids=str)
@pytest.mark.parametrize("name", ["big_vision__default", "big_vision__jetformer"])
@pytest.mark.parametrize("model", MODELS)
def test_real_strategies_on_real_models(model, name, sizes):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    strategy = corpus.rule_file(name)["rules"]
    pairs = [(pattern, FSDP if one.startswith("fsdp") else P()) for pattern, one in strategy]
    shardings = sr.named_shardings(tree, sr.Rules(pairs, sr.dialects.BIG_VISION), sizes)
    patterns = [pattern for pattern, _ in strategy]
    for path, leaf in tree.items():
        rule = by_fullmatch(patterns, path)
        is_cut = rule is not None and strategy[rule][1].startswith("fsdp")
        expected = big_vision_fsdp(leaf, sizes, "fsdp") if is_cut else P()
        found = (*shardings[path].spec, *[None] * len(leaf.shape))[: len(leaf.shape)]
        assert found == (*expected, *[None] * len(leaf.shape))[: len(leaf.shape)], path
