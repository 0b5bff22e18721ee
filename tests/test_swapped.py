"""Arguments in another order, where functions of several orders live side by side, are told as such."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr

TREE = {"wq": {"kernel": np.ones((8, 8), "float32")}, "norm": [np.ones(8, "float32")]}
RULES = [("kernel", P("fsdp", "tp")), (".*", P())]
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
SIZES = {"fsdp": 1, "tp": 1}
LOGICAL = sr.LogicalRules([("embed", "fsdp")])
PLAN = sr.plan(TREE, RULES, SIZES)
SWAPPED = {
    "match_partition_rules(rules, tree)": lambda: sr.match_partition_rules(TREE, RULES),
    "plan(tree, rules, mesh)": lambda: sr.plan(RULES, TREE, SIZES),
    "named_shardings(tree, rules, mesh)": lambda: sr.named_shardings(TREE, MESH, sr.Rules(RULES)),
    "shard(tree, rules, mesh)": lambda: sr.shard(RULES, TREE, MESH),
    "with_sharding_constraint(tree, rules, mesh)": lambda: sr.with_sharding_constraint(TREE, MESH, RULES),
    "logical_to_mesh_sharding(tree, mesh, rules)": lambda: sr.logical_to_mesh_sharding({"w": P("embed")}, LOGICAL, SIZES),
    "compare(tree, rules, rules)": lambda: sr.compare(RULES, RULES, TREE),
    "spec_for(path, shape, rules, mesh)": lambda: sr.spec_for("wq/kernel", RULES, (8, 8), SIZES),
    "audit(tree, plan)": lambda: sr.audit(PLAN, TREE),
    "load(path, rules, mesh)": lambda: sr.load("model.safetensors", MESH, RULES),
    "suggest(tree, mesh)": lambda: sr.suggest(SIZES, TREE),
}  # fmt: skip


@pytest.mark.parametrize("call", SWAPPED)
def test_swapped_arguments_are_told(call):
    with pytest.raises(TypeError, match=re.escape("in another order, ") + ".*" + re.escape(call)):
        SWAPPED[call]()


@pytest.mark.parametrize(
    "call",
    [
        lambda: sr.plan(TREE, [("(", None)], SIZES),
        lambda: sr.plan(TREE, {"kernel": P()}, SIZES),
        lambda: sr.match_partition_rules([("nothing", P())], TREE),
        lambda: sr.shard({"w": "x"}, RULES, MESH),
        lambda: sr.named_shardings(TREE, RULES, {"fsdp": 0}),
        lambda: sr.spec_for("a", (2.5,), RULES, SIZES),
    ],
)
def test_other_mistakes_are_no_order(call):
    with pytest.raises((TypeError, ValueError, re.error)) as error:
        call()
    assert "order" not in str(error.value)
