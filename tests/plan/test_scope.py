"""What an answer says where nothing was found: what was looked at, and what was not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import shardrules as sr

LEAF = jax.ShapeDtypeStruct((8, 8), "float32")
TREE = {"layers": [LEAF] * 2, "script": LEAF, "odd": jax.ShapeDtypeStruct((7,), "float32")}
RULES = [("layers", ("fsdp", "tp")), ("script", ()), ("odd", "tp"), ("never", ())]


@cache
def plan() -> sr.Plan:
    return sr.plan(TREE, RULES, {"fsdp": 2, "tp": 2})


CLEAN = sr.plan({"w": jax.ShapeDtypeStruct((8, 8), "float32")}, [("w", "tp")], {"tp": 2})


def verified(*inputs: Any, **options: Any) -> sr.types.Findings:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    compiled = jax.jit(lambda x, y: x @ y).lower(x, x).compile()
    return sr.verify(compiled, inputs, **options)


def replicated() -> jax.sharding.NamedSharding:
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def audited() -> sr.types.Findings:
    tree = {"w": np.ones((8, 8), "float32")}
    live = sr.plan(tree, [("w", "tp")], Mesh(np.array(jax.devices()[:2]), ("tp",)))
    return sr.audit(sr.shard(tree, live.shardings()), live)


# What is said where there is nothing: what was looked at, and what was not.
NOTHING: dict[str, tuple[Callable[[], Any], str]] = {
    "check": (lambda: CLEAN.check(), "nothing found: 1 leaf, 1 rule, on tp=2"),
    "switched off": (
        lambda: CLEAN.check(levels={"dead": "off", "misfit": "warning"}),
        "nothing found: 1 leaf, 1 rule, on tp=2; not looked for: dead"),
    "left out": (
        lambda: plan().check(levels={"misfit": "info"}).at_least("error"),
        "nothing found: 4 leaves, 4 rules, on fsdp=2,tp=2; 2 findings below error left out"),
    "left out of one's own": (lambda: sr.types.Findings(plan().check()[:1]).at_least("error"), "nothing found: 1 finding below error left out"),
    "one's own": (lambda: sr.types.Findings([]), "nothing found"),
    "verify": (
        lambda: verified(replicated(), None),
        "nothing found: 1 of 2 inputs planned, no output compared, as outputs= is not given; "
        "peak memory not compared, as hbm= is not given"),
    "audit": (audited, "nothing found: 1 leaf, on tp=2"),
    "diff": (lambda: plan().diff(plan()), "no differences"),
    "Rules": (lambda: sr.Rules([]), "0 rules, dialect eformer"),
}  # fmt: skip


@pytest.mark.parametrize("answer", NOTHING)
def test_an_answer_without_anything_says_so_and_what_it_looked_at(answer):
    make, said = NOTHING[answer]
    assert (repr(make()), make()._repr_html_()) == (said, f"<pre>{said}</pre>")


def test_what_was_looked_at_is_told_beside_findings_and_kept():
    found = verified(replicated(), None, outputs=replicated(), hbm=10**9)
    scope = "1 of 2 inputs planned, 1 of 1 output planned; peak memory within 1.00 GB"
    for findings in (found, found.at_least("info"), pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert findings.scope == scope
    assert repr(sr.types.Sweep([])) == "no meshes"
    assert "nothing moves" in repr(plan().transfer(plan()))
    findings = plan().check(replicated=["script"])
    assert '<b style="color:#b26a00">warning</b>[' in findings._repr_html_()
    assert "nothing found" not in str(findings)
