"""Parts of a checkpoint: `only`, `strict` and `missing` of `load`."""

from __future__ import annotations

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_layouts import check
from tests.checkpoint.test_load import RULES, by_safe_open, mesh_of

ALL = [*RULES, ("", ())]
HEAD = {"value_head": jax.ShapeDtypeStruct((32, 8), "float32")}


def tree_of(folder, **others):
    own = sr.read_model(folder)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in own.items()} | others


def test_only_without_a_tree(checkpoint):
    loaded = sr.load(checkpoint, RULES, mesh_of(), only=r"layers\.0\..*proj")
    check(loaded, {name: x for name, x in by_safe_open(checkpoint).items() if ".0." in name and "proj" in name})
    renames = [sr.Rename("model.norm.weight", "last/scale"), sr.Rename("lm_head.weight", "head")]
    assert list(sr.load(checkpoint, ALL, mesh_of(), renames=renames, only="^last/")) == ["last"]


def test_only_into_a_tree_leaves_the_rest_as_it_is(checkpoint):
    tree = tree_of(checkpoint, **HEAD)
    loaded = sr.load(checkpoint, ALL, mesh_of(), tree=tree, only="norm")
    assert all(leaf is tree[name] for name, leaf in loaded.items() if "norm" not in name)
    check(*({name: x for name, x in each.items() if "norm" in name} for each in (loaded, by_safe_open(checkpoint))))


def test_what_is_left_over_is_listed(checkpoint, caplog):
    tree = tree_of(checkpoint)
    left = [name for name in tree if "layers" in name]
    for name in left:
        del tree[name]
    with pytest.raises(sr.FileError, match="left over"):
        sr.load(checkpoint, RULES, mesh_of(), tree=tree)
    with caplog.at_level(logging.WARNING, "shardrules"):
        loaded = sr.load(checkpoint, RULES, mesh_of(), tree=tree, strict=False)
    assert loaded.keys() == tree.keys()
    assert f"{len(left)} arrays left out: " in caplog.text
    assert "model.layers.{0,1}.mlp.down_proj.weight" in caplog.text


@pytest.mark.parametrize(
    ("others", "options", "told"),
    [
        (HEAD, {"strict": False}, "value_head: missing: the tree wants"),
        ({}, {"missing": {"valu_head": 0}}, "valu_head: missing: the tree has no such path"),
    ],
)
def test_what_is_missing_is_an_error_though_not_strict(checkpoint, others, options, told):
    with pytest.raises(sr.FileError, match=told):
        sr.load(checkpoint, RULES, mesh_of(), tree=tree_of(checkpoint, **others), **options)


COUNTED = np.arange(256.0).reshape(32, 8)
MADE = [(0.5, COUNTED * 0 + 0.5), (COUNTED.astype("int"), COUNTED), (jnp.asarray(COUNTED), COUNTED)]


@pytest.mark.parametrize(("init", "expected"), MADE)
def test_missing_leaves_are_made(checkpoint, caplog, init, expected):
    rules = [("value_head", ("fsdp", "tp")), *RULES]
    tree = tree_of(checkpoint, **HEAD)
    with caplog.at_level(logging.WARNING, "shardrules"):
        loaded = sr.load(checkpoint, rules, mesh_of(), tree=tree, missing={"value_head": init})
    head = loaded["value_head"]
    assert (head.sharding.spec, head.dtype) == (P("fsdp", "tp"), "float32")
    assert np.array_equal(np.asarray(head), expected)
    assert "1 array made: value_head" in caplog.text
    converted = sr.load(checkpoint, rules, mesh_of(), tree=tree, missing={"value_head": init}, dtype="bfloat16")
    assert converted["value_head"].dtype == "bfloat16"


CANNOT_BE = [
    *((HEAD["value_head"], init, r"value of head: its shape is \[.\]; the tree wants \[32, 8\]") for init in (np.ones(3), jnp.ones(8))),
    *((jax.ShapeDtypeStruct((4,), dtype), init, "missing: the value of head: a finite value would become")
      for init, dtype in ((1e6, "float16"), (300, "int8"), (3.7, "int8"))),
]  # fmt: skip


@pytest.mark.parametrize(("head", "init", "told"), CANNOT_BE)
def test_a_value_that_a_leaf_cannot_have_names_its_path(checkpoint, head, init, told):
    with pytest.raises(ValueError, match=told):
        sr.load(checkpoint, ALL, mesh_of(), tree=tree_of(checkpoint, head=head), missing={"head": init})


def test_a_value_for_all_leaves_below_its_path(checkpoint):
    lora = {"a": jax.ShapeDtypeStruct((4,), "float32"), "b": jax.ShapeDtypeStruct((2,), "int32")}
    tree = {"norm": jax.ShapeDtypeStruct((32,), "float32"), "lora": lora}
    renames = [sr.Rename("model.norm.weight", "norm")]
    loaded = sr.load(checkpoint, [("", ())], mesh_of(), tree=tree, renames=renames, strict=False,
                     missing={"lora": 1})  # fmt: skip
    assert loaded["lora"]["a"].tolist() == [1.0] * 4
    assert loaded["lora"]["b"].tolist() == [1, 1]


def test_a_value_of_a_leaf_called_value_is_its_own(checkpoint):
    tree = {"attn": {part: jax.ShapeDtypeStruct((), "float32") for part in ("key", "value")}}
    with pytest.raises(sr.FileError, match="attn/key: missing"):
        sr.load(checkpoint, [("", ())], mesh_of(), tree=tree, strict=False,
                missing={"attn": {"value": 1.0}})  # fmt: skip


def test_a_part_of_a_model_and_arrays_that_an_index_leaves_out_are_told(tmp_path, caplog):
    sr.save({"a": np.ones(4), "b": np.ones(4)}, tmp_path / "m", shard_bytes=32)
    with caplog.at_level(logging.WARNING, "shardrules"):
        sr.load(tmp_path / "m" / "model-00001-of-00002.safetensors", P(), mesh_of())
        sr.save({"a": np.ones(4), "b": np.ones(4)}, tmp_path / "n")
        weights = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
        (tmp_path / "n" / "model.safetensors.index.json").write_text(json.dumps(weights))
        assert list(sr.load(tmp_path / "n", P(), mesh_of())) == ["a"]
    assert "is a part of a model; its directory has all" in caplog.text
    assert "1 array of model-00001-of-00001.safetensors, such as b, which the index" in caplog.text


WITHOUT_A_TREE = [{"strict": False}, {"missing": {"x": 0}}]
OF_OTHER_TYPES = [{"strict": 2}, {"only": 3}, {"missing": "x"}, {"missing": {"x": "y"}}, {"missing": {"x": jnp.zeros}}]


@pytest.mark.parametrize("options", [*WITHOUT_A_TREE, *OF_OTHER_TYPES])
def test_options_that_are_refused(checkpoint, options):
    error, told = (
        (ValueError, "give tree, or a plan") if options in WITHOUT_A_TREE else (TypeError, next(iter(options)))
    )
    with pytest.raises(error, match=told):
        sr.load(checkpoint, RULES, mesh_of(), **options)
