"""`compat.jax_llm_examples`: rules as dataclasses, of two of its models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import jax_llm_examples as examples

AXES = ("y", "z")


@dataclass
class Llama3:
    """The axes of the rules of its Llama 3."""

    batch: Any = "x"
    sequence: Any = None
    act_embed: Any = None
    head_dim: Any = None
    qkv_embed: Any = None
    q_heads: Any = AXES
    kv_heads: Any = "y"
    o_heads: Any = AXES
    o_embed: Any = None
    vocab_in: Any = None
    vocab_out: Any = AXES


@dataclass
class KimiK2:
    """The same of its experts in Kimi K2."""

    moe_e_experts: Any = "y"
    moe_e_up_embed: Any = None
    moe_e_up_ffw: Any = "z"


CASES = [
    (Llama3(), ("qkv_embed", "q_heads", "head_dim"), P(None, AXES, None)),
    (Llama3(), ("qkv_embed", "kv_heads", "head_dim"), P(None, "y", None)),
    (Llama3(), ("batch", "sequence", None), P("x", None, None)),
    (Llama3(), ("vocab_out",), P(AXES)),
    (Llama3(), (), P()),
    (KimiK2(), ("moe_e_experts", "moe_e_up_embed", "moe_e_up_ffw"), P("y", None, "z")),
]


@pytest.mark.parametrize(("rules", "logical", "spec"), CASES)
def test_specs(rules, logical, spec):
    assert examples.logical_to_physical(logical, rules) == spec
    mesh = sr.resolve_mesh({"x": 2, "y": 2, "z": 2})
    found = examples.logical_to_sharding(logical, mesh, rules)
    assert found == NamedSharding(mesh, spec)


def test_what_is_remembered_is_of_these_rules_and_this_mesh():
    """Equal calls get one object; rules that were changed, lists and other meshes get their own."""
    meshes = [sr.resolve_mesh({"x": size, "y": 2, "z": 2}) for size in (1, 2)]
    rules = Llama3()
    first = examples.logical_to_sharding(("batch", "kv_heads"), meshes[0], rules)
    assert examples.logical_to_sharding(("batch", "kv_heads"), meshes[0], rules) is first
    assert examples.logical_to_sharding(("batch", "kv_heads"), meshes[1], rules).mesh is meshes[1]
    rules.batch = ["x", "z"]
    found = examples.logical_to_sharding(("batch", "kv_heads"), meshes[0], rules)
    assert found == NamedSharding(meshes[0], P(("x", "z"), "y"))
    for _ in range(2):
        with pytest.raises(ValueError, match="Colliding"):
            examples.logical_to_sharding(("q_heads", "kv_heads"), meshes[0], rules)


@pytest.mark.parametrize(("rules", "logical", "spec"), [case for case in CASES if case[1]])
def test_the_same_rules_as_logical_rules(rules, logical, spec):
    compiled = examples.logical_rules(rules)
    assert compiled.dialect is examples.DIALECT
    assert sr.logical_to_mesh(logical, compiled) == spec


@pytest.mark.parametrize("logical", [("q_heads", "o_heads"), ("q_heads", "kv_heads")])
def test_a_mesh_axis_for_two_dimensions_is_an_error(logical):
    with pytest.raises(ValueError, match="Colliding physical axes.*only one dimension"):
        examples.logical_to_physical(logical, Llama3())


def test_rules_are_planned_and_collisions_found():
    rules, mesh = examples.logical_rules(Llama3()), {"x": 2, "y": 2, "z": 2}
    tree = {"q": jax.ShapeDtypeStruct((64, 8, 16), "bfloat16")}
    plan = sr.plan(tree, rules, mesh, names={"q": ("qkv_embed", "q_heads", "head_dim")})
    assert plan.specs() == {"q": P(None, AXES, None)}
    twice = sr.plan(tree, rules, mesh, names={"q": ("o_heads", "q_heads", None)})
    (misfit,) = (finding for finding in twice.check() if finding.kind == "misfit")
    assert "is used twice" in misfit.message
    unknown = sr.plan(tree, rules, mesh, names={"q": ("experts", None, None)})
    assert any(finding.level == "error" for finding in unknown.check())


def test_a_name_without_a_rule_is_an_error():
    with pytest.raises(AttributeError, match="experts"):
        examples.logical_to_physical(("experts",), Llama3())


def test_rules_that_are_changed():
    fsdp = replace(Llama3(), qkv_embed="x")
    assert examples.logical_to_physical(("qkv_embed", "q_heads"), fsdp) == P("x", AXES)


@pytest.mark.parametrize("rules", [3, {"batch": "x"}, Llama3])
def test_what_is_no_dataclass_of_rules(rules):
    with pytest.raises(TypeError, match="it must be a dataclass"):
        examples.logical_rules(rules)
