"""`suggest(step=)`: the rules of `solve`; and what a step would tell where none is given."""

from __future__ import annotations

import jax
import pytest

import shardrules as sr
from tests.support import models
from tests.support.models import array

MESH = {"fsdp": 4, "tp": 2}
TREE = {"up": {"kernel": array(512, 2048)}, "down": {"kernel": array(2048, 512)},
        "norm": {"scale": array(512)}}  # fmt: skip


def loss(params, x):
    x = x * params["norm"]["scale"]
    return (jax.nn.relu(x @ params["up"]["kernel"]) @ params["down"]["kernel"]).sum()


def traced(rows=8, tree=TREE):
    plan = sr.plan(tree, [(".*", ())], MESH)
    return sr.trace(jax.grad(loss), plan, jax.ShapeDtypeStruct((rows, 512), "bfloat16"))


def test_rules_are_those_of_the_solution_with_what_the_step_does():
    step = traced()
    suggestion = sr.suggest(TREE, MESH, step=step, hardware="v5p")
    solution = sr.solve(step, MESH, hardware="v5p")
    assert list(suggestion.rules) == list(solution.rules)
    assert suggestion.untold == ()
    up = next(reason for reason in suggestion.reasons if "up" in str(reason.pattern))
    assert [(dim.size, dim.axes) for dim in up.dims] == [(512, ()), (2048, ("fsdp", "tp"))]
    assert sum(reason.leaves for reason in suggestion.reasons) == 3
    assert "shardrules" not in str(suggestion)
    assert not suggestion.plan.check().at_least("warning")


def test_a_rule_file_of_it_is_read_again(tmp_path):
    suggestion = sr.suggest(sr.plan(TREE, [], MESH), step=traced(2**16), mesh=MESH, hardware="v5p")
    (tmp_path / "rules.toml").write_text(suggestion.to_toml())
    read = sr.read_rules(tmp_path / "rules.toml")
    assert sr.plan(TREE, read.rules, MESH).specs() == suggestion.plan.specs()
    assert "shards" not in suggestion.to_python()


@pytest.mark.parametrize(
    ("said", "value"),
    [("devices", 8), ("axes", "fsdp"), ("tokens", 4), ("experts_per_token", 2), ("head_dim", 64),
     ("like", [("up", "tp")]), ("names", {}), ("dialect", sr.dialects.EASYLM)],
)  # fmt: skip
def test_what_the_step_says_is_not_given_beside_it(said, value):
    with pytest.raises(ValueError, match=f"^{said}: the step, its plan and the mesh say it"):
        sr.suggest(TREE, step=traced(), hardware="v5p", **{said: value})


def test_steps_of_other_models_and_without_plans_are_refused():
    other = TREE | {"gate": {"kernel": array(512, 2048)}}
    with pytest.raises(ValueError, match="another model; 'gate/kernel' is in one"):
        sr.suggest(other, MESH, step=traced(), hardware="v5p")
    bare = sr.trace(loss, TREE, jax.ShapeDtypeStruct((8, 512), "bfloat16"))
    with pytest.raises(ValueError, match="traced without a Plan"):
        sr.suggest(TREE, MESH, step=bare, hardware="v5p")
    with pytest.raises(TypeError, match="step is 3"):
        sr.suggest(TREE, MESH, step=3)
    with pytest.raises(TypeError, match="hardware"):
        sr.suggest(TREE, MESH, step=traced())


def test_without_a_step_it_says_what_one_would_tell():
    found = sr.suggest(models.llama(), MESH)
    assert any("the size of a head of" in text and "assumed to be 128" in text
               for text in found.untold)  # fmt: skip
    assert "step= would tell the size of a head" in str(found)
    known = sr.suggest(models.llama(), MESH, head_dim=128)
    assert known.untold[0] == "how activations are sharded"
    assert "step=" not in str(known)
    odd = sr.suggest(
        {f"m{i}": {"a": array(64 + i, 64 + i)} for i in "12345" for i in [int(i)]}, MESH
    )
    assert any("what contracts" in text for text in odd.untold)
    assert any("of 2 more paths" in text for text in odd.untold)
