"""What `explain` takes beside a path; what an answer says where nothing was found: what was looked at, what was not."""

from __future__ import annotations

import copy
import pickle
import re
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


@pytest.fixture(scope="module")
def folded():
    layer = {"mlp": {"w": LEAF, "b": LEAF}, "[x]": LEAF}
    tree = {"layers": [layer] * 12, "{0..2}": LEAF, "head": {"w": LEAF}, "opt": {"head": LEAF}}
    return sr.plan(tree, [("mlp", "tp"), ("", ())], {"tp": 2})


@pytest.mark.parametrize(
    ("asked", "path", "leaves"),
    [
        ("layers/7/mlp/w", "layers/7/mlp/w", 1),
        ("layers/{0..11}/mlp/w", "layers/0/mlp/w", 12),  # as the table has it
        ("mlp/w", "layers/0/mlp/w", 12),
        ("/b", "layers/0/mlp/b", 12),
        ("1/mlp/w", "layers/1/mlp/w", 1),  # not of layer 11
        ("layers/*/w", "layers/0/mlp/w", 12),
        ("layers/?/mlp/w", "layers/0/mlp/w", 10),
        ("layers/1?/mlp/w", "layers/10/mlp/w", 2),
        ("[x]", "layers/0/[x]", 12),
        ("{0..2}", "{0..2}", 1),
        ("{{0..2}}", "{0..2}", 1),
        ("head/w", "head/w", 1),
        ("h*w", "head/w", 1),  # whole paths come before ends
    ],
)
def test_what_is_meant(folded, asked, path, leaves):
    found = folded.explain(asked)
    assert (found.path, found.leaves) == (path, leaves)
    assert found == folded.explain(path)._replace(leaves=leaves)
    assert (f"\n  the first of {leaves} leaves\n" in str(found)) is (leaves > 1)


def test_what_is_ambiguous_is_an_error_with_the_candidates(folded):
    with pytest.raises(KeyError) as info:
        folded.explain("w")
    assert info.value.args == (
        "'w' is ambiguous: it may be any of 2 folded paths: layers/{0..11}/mlp/w, head/w; give more of the path",
    )
    with pytest.raises(KeyError, match="any of 2 folded paths: head/w, opt/head; give more"):
        folded.explain("*he*d*")
    names = {f"{chr(97 + i)}{chr(98 + i)}": {"w": LEAF} for i in range(15)}
    with pytest.raises(KeyError, match="15 folded paths: ab/w, .* and 5 more paths; give more"):
        sr.plan(names, [("", ())], {"tp": 2}).explain("w")


NOWHERE = ("lp/b", "{12..99}/mlp/w", "layers/*/mlp/wx", "layers/{2..11}/mlp/w", "{0..11}/mlp/w", "{1..2..3}/mlp/w")
NO_PATH = ("", ".", "{,}", "\0")


@pytest.mark.parametrize("asked", [*NOWHERE, *NO_PATH])
def test_what_is_nowhere_is_an_error_with_near_paths(folded, asked):
    with pytest.raises(KeyError) as info:
        folded.explain(asked)
    end = "b" if asked.endswith("b") else "w"
    near = f"no leaf has the path {asked!r}; near it: layers/{{0..11}}/mlp/{end}"
    assert re.match(
        "no leaf has the path .*; a glob such as" if asked in NO_PATH else re.escape(near), info.value.args[0]
    )


def test_paths_of_other_dialects():
    tree = {"model": [{"up": {"w": LEAF}}] * 3, "head": LEAF}
    plan = sr.plan(tree, sr.Rules([("", "tp")], sr.dialects.KEYSTR), {"tp": 2})
    for asked in ("['up']['w']", "['model'][*]['up']['w']"):
        found = plan.explain(asked)
        assert (found.path, found.leaves) == ("['model'][0]['up']['w']", 3)


def test_the_keys_of_jax_are_told_to_be_a_string():
    tree = {"layers": [{"w": LEAF}]}
    plan = sr.plan(tree, [("w", ())], {"tp": 2})
    ((keys, _),) = jax.tree_util.tree_leaves_with_path(tree)
    with pytest.raises(TypeError, match=r"as in plan\.paths, such as 'layers/0/w' for JAX"):
        plan.explain(keys)
    assert plan.explain("layers/0/w").path == plan.paths[0]
