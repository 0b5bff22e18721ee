"""`compat.big_vision` against a restatement of big_vision's tactics, on real models and strategies."""

from __future__ import annotations

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import big_vision
from tests.support import corpus
from tests.support.references import big_vision_fsdp, by_fullmatch
from tests.support.slow import MODELS

MESHES = [{"fsdp": 8}, {"data": 2, "fsdp": 12}, {"fsdp": 1, "tp": 8}]


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def strategy_of(name):
    return corpus.rule_file(name)["rules"]


def spec(leaf, tactics, mesh=None):
    """The entries that one leaf gets from tactics."""
    sizes = mesh or {"data": 4, "model": 2}
    found = big_vision.infer_sharding({"w": leaf}, [("w", tactics)], sizes)["w"].spec
    return tuple(found)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["big_vision__default", "big_vision__jetformer"])
@pytest.mark.parametrize("model", MODELS)
def test_real_strategies_on_real_models(model, name, sizes):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    strategy = strategy_of(name)
    shardings = big_vision.infer_sharding(tree, strategy, sizes)
    patterns = [pattern for pattern, _ in strategy]
    expected = {}
    for path, leaf in tree.items():
        rule = by_fullmatch(patterns, path)
        is_cut = rule is not None and strategy[rule][1].startswith("fsdp")
        key = is_cut, leaf.shape, leaf.dtype
        if key not in expected:
            expected[key] = P(*[None] * len(leaf.shape))
            if is_cut:
                expected[key] = big_vision_fsdp(leaf, sizes, "fsdp")
        assert shardings[path].spec == expected[key], path


@pytest.mark.parametrize("model", MODELS[::4])
def test_a_strategy_can_be_planned(model):
    strategy = [(".*bias", "replicate"), *strategy_of("big_vision__jetformer")]
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    mesh = {"fsdp": 8}
    plan = sr.plan(tree, big_vision.rules(strategy), mesh)
    shardings = big_vision.infer_sharding(tree, strategy, mesh)
    for path, planned in plan.specs().items():
        assert [e for e in planned if e] == [e for e in shardings[path].spec if e], path
    assert plan.rules.dialect is sr.dialects.BIG_VISION
    assert not sr.Plan.from_lock(plan.lock()).diff(plan)


@pytest.mark.parametrize(
    ("tactics", "expected"),
    [
        ("replicate", (None, None)),
        ("replicate()", (None, None)),
        ("fsdp('data', 0)", (None, "data")),
        ("fsdp(axis=('data', 'model'), min_size_to_shard_mb=0)", (None, ("data", "model"))),
        ("fsdp('data', min_size_to_shard_mb=0.03125)", (None, None)),
        ("fsdp('data', min_size_to_shard_mb=0.03124)", (None, "data")),
        ("shard_dim('model', 1)|fsdp('data', 0)", ("data", "model")),
        ("shard_dim('model', -1)", (None, "model")),
        ("fsdp('data', 0)|shard_dim('model', 0)", ("model", "data")),
        ("shard_dim('model', 0) | shard_dim('data', 1) | fsdp('x', 100)", ("model", "data")),
    ],
)
def test_tactics(tactics, expected):
    mesh = {"data": 4, "model": 2, "x": 1}
    assert spec(array(64, 128), tactics, mesh) == expected


def test_what_fsdp_leaves_alone():
    assert spec(array(7, 9), "fsdp('data', 0)") == (None, None)
    assert spec(array(), "fsdp('data', 0)") == ()
    assert spec(array(8, 4), "shard_dim('model', 0)|fsdp('data', 0)", {"data": 8, "model": 2}) == (
        "model",
        None,
    )


def test_the_first_pattern_that_matches_the_whole_path_counts():
    tree = {"a": {"kernel": array(8, 8)}, "kernel": array(8, 8), "step": array()}
    strategy = [("kernel", "shard_dim('x', 0)"), (".*kernel", "shard_dim('x', 1)")]
    found = big_vision.infer_sharding(tree, strategy, {"x": 2})
    specs = {"a": found["a"]["kernel"].spec, "": found["kernel"].spec, "step": found["step"].spec}
    assert specs == {"a": P(None, "x"), "": P("x", None), "step": P()}


@pytest.mark.parametrize(
    ("tactics", "message"),
    [
        ("shard_dim('x', 0)|replicate", "['w']: replicate comes after tactics that shard it"),
        ("shard_dim('x', 0)|shard_dim('y', -2)", "['w']: shard_dim('y', -2) for 2 dimensions"),
        ("shard_dim('x', 0)|shard_dim('y', 0)", "['w']: shard_dim('y', 0) after ('x', None)"),
        ("shard_dim('x', 2)", "['w']: shard_dim('x', 2) for 2 dimensions; ignore_ndim_error"),
        ("fsdp('z', 0)", "['w']: the mesh {'x': 2, 'y': 2} has no axis 'z'"),
        ("fsdp", "the tactic 'fsdp' (a str) is none of replicate, fsdp(axis"),
        ("fsdp(x)", "is none of replicate"),
        ("fsdp('x'", "is none of replicate"),
        ("os.system('x')", "is none of replicate"),
        ("logical_partitioning", "for arrays with logical axis names take shardrules.LogicalRules"),
    ],
)
def test_tactics_that_cannot_be_applied(tactics, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        spec(array(8, 8), tactics, {"x": 2, "y": 2})


def test_a_dimension_that_is_not_there_may_be_ignored():
    with pytest.warns(UserWarning, match="shard_dim\\('model', 2\\) for 2 dimensions"):
        assert spec(array(8, 8), "shard_dim('model', 2, ignore_ndim_error=True)") == (None, None)


@pytest.mark.parametrize(
    ("tactics", "expected"),
    [
        ("replicate", ()),
        ("shard_dim('model', 1)", (None, "model")),
        ("fsdp('data', 1)", sr.fsdp("data", min_bytes=2**20 + 1)),
        (
            "replicate|shard_dim('model', 0)|fsdp(['data', 'x'])",
            sr.fsdp(("data", "x"), min_bytes=4 * 2**20 + 1, within=("model",)),
        ),
    ],
)
def test_tactics_as_specs(tactics, expected):
    assert big_vision.rules([(".*", tactics)]) == sr.Rules(
        [(".*", expected)], sr.dialects.BIG_VISION
    )


@pytest.mark.parametrize(
    "tactics",
    [
        "fsdp('x')|fsdp('y')",
        "shard_dim('x', -1)",
        "shard_dim('x', 0)|shard_dim('y', 0)",
        "shard_dim('x', 1)|replicate",
        "shard_dim('x', 1, ignore_ndim_error=True)",
    ],
)
def test_tactics_without_a_form_as_a_spec(tactics):
    with pytest.raises(ValueError, match="have no form as a spec.*infer_sharding may take them"):
        big_vision.rules([(".*", tactics)])
