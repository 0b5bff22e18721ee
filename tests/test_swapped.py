"""Arguments in another order, where functions of several orders live side by side, are told as such."""

from __future__ import annotations

import re
from pathlib import Path

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
PLAN = sr.plan(TREE, RULES, SIZES)
COMPILED = jax.jit(lambda x: x).lower(1.0).compile()
# What is told, of calls beside those of test_mistakes.py: without a mesh, by keywords, with specs or a plan.
SWAPPED = [
    ("plan(tree, rules", lambda: sr.plan(RULES, TREE)),
    ("plan(tree, rules, mesh)", lambda: sr.plan(RULES, TREE, mesh=SIZES)),
    ("plan(tree, rules, mesh)", lambda: sr.plan(tree=RULES, rules=TREE, mesh=SIZES)),
    ("named_shardings(tree, rules, mesh)", lambda: sr.named_shardings(TREE, MESH, sr.Rules(RULES))),
    ("named_shardings(tree, rules, mesh)", lambda: sr.named_shardings(TREE, MESH, PLAN.specs())),
    ("shard(tree, rules, mesh)", lambda: sr.shard(P("fsdp"), TREE, MESH)),
    ("shard(tree, rules, mesh)", lambda: sr.shard(TREE, MESH, P("fsdp"))),
    ("shard(tree, rules", lambda: sr.shard(PLAN, TREE)),
    ("with_sharding_constraint(tree, rules, mesh)", lambda: sr.with_sharding_constraint(TREE, MESH, RULES)),
    ("with_sharding_constraint(", lambda: sr.with_sharding_constraint(MESH, np.ones((8, 8)), P("fsdp"))),
    ("load(path, rules, mesh)", lambda: sr.load("model.safetensors", MESH, RULES)),
    ("load(path, rules, mesh)", lambda: sr.load(Path("model.safetensors"), MESH, RULES)),
    ("suggest(tree, mesh)", lambda: sr.suggest(SIZES, TREE)),
    ("reshard(tree, rules, mesh)", lambda: sr.reshard(TREE, MESH, RULES)),
    ("verify(compiled, plan)", lambda: sr.verify(PLAN, COMPILED)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "call"), SWAPPED)
def test_swapped_arguments_are_told(said, call):
    with pytest.raises(TypeError, match=re.escape("in another order, ") + ".*" + re.escape(said)):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: sr.plan(TREE, [("(", None)], SIZES),
        lambda: sr.plan(TREE, {"kernel": P()}, SIZES),
        lambda: sr.match_partition_rules([("nothing", P())], TREE),
        lambda: sr.shard({"w": "x"}, RULES, MESH),
        lambda: sr.named_shardings(TREE, RULES, {"fsdp": 0}),
        lambda: sr.spec_for("a", (2.5,), RULES, SIZES),
        lambda: sr.plan(RULES, None, SIZES),
        lambda: sr.plan(list(TREE.items()), {"kernel": P()}, SIZES),
        lambda: sr.plan(list(TREE["wq"].items()), {"kernel": P()}, SIZES),
        lambda: sr.plan(TREE, MESH),
        lambda: sr.shard(TREE, P("nowhere"), MESH),
        lambda: sr.shard(P("fsdp"), RULES, TREE),
        lambda: sr.shard(TREE, {"wq": P()}, MESH),
        lambda: sr.logical_to_mesh({"w": P("embed")}, {"embed": "fsdp"}),
        lambda: sr.shard(P("fsdp"), {"kernel": None}, MESH),
        lambda: sr.reshard(TREE, PLAN, {"fsdp": 0}),
        lambda: sr.audit(TREE, RULES),
    ],
)
def test_other_mistakes_are_no_order(call):
    with pytest.raises((TypeError, ValueError, re.error)) as error:
        call()
    assert "order" not in str(error.value)
