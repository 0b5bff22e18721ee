"""The census: each public callable that takes rules, with each kind of rules.

A kind gives the same answer as pairs do, or a TypeError that says what to give instead.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat.flax_core_meta import Partitioned
from tests.support import api
from tests.support.files import header_file
from tests.support.plans import cuts

MESH = Mesh(np.array(jax.devices()[:2]), ("tp",))
TREE = {"norm": np.ones(8, np.float32), "wq": np.ones((8, 8), np.float32)}
PAIRS = [("norm", P()), ("wq", P("tp"))]
RULES = sr.Rules(PAIRS)
LOGICAL = sr.LogicalRules([("embed", "tp")])
NAMES = {"norm": (None,), "wq": ("embed", None)}
BOXED = {path: Partitioned(leaf, names=NAMES[path]) for path, leaf in TREE.items()}
SHAPES = jax.eval_shape(lambda: BOXED)
SPECS = {"norm": P(), "wq": P("tp")}
PLAN = sr.plan(TREE, PAIRS, MESH)
KINDS: dict[str, Any] = {
    "pairs": PAIRS,
    "Rules": RULES,
    "LogicalRules": LOGICAL,
    "Plan": PLAN,
    "specs": SPECS,
    "shardings": {path: NamedSharding(MESH, spec) for path, spec in SPECS.items()},
}
ANSWER = {"norm": (), "wq": ("tp",)}
FILE = Path(tempfile.mkdtemp()) / "model.safetensors"
FILE.write_bytes(
    header_file(
        {
            "norm": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
            "wq": {"dtype": "F32", "shape": [8, 8], "data_offsets": [32, 288]},
        },
        bytes(288),
    )
)
COMPILED = jax.jit(lambda tree: tree).lower(PLAN.abstract()).compile()
NAMED_PLAN = sr.plan(TREE, LOGICAL, MESH, names=NAMES)


def of_tree(shardings: Any) -> dict[str, Any]:
    is_leaf = lambda node: isinstance(node, P | NamedSharding)  # noqa: E731
    found = jax.tree.leaves(shardings, is_leaf=is_leaf)
    specs = [cuts(getattr(leaf, "spec", leaf)) for leaf in found]
    return dict(zip(sorted(TREE), specs, strict=True))


def of_arrays(arrays: Any) -> dict[str, Any]:
    return of_tree(jax.tree.map(lambda array: array.sharding, arrays))


def is_named(given: Any) -> bool:
    return isinstance(given, sr.LogicalRules)


def with_names(given: Any) -> Any:
    """What takes no names takes a plan of them."""
    return NAMED_PLAN if is_named(given) else given


def names_for(given: Any) -> Any:
    return NAMES if is_named(given) else None


RULES_ALONE = dict.fromkeys(("pairs", "Rules", "LogicalRules"), "shardrules.plan")  # an executable has no paths
BY_PATTERNS = {
    "LogicalRules": "named_shardings, shard or plan", "Plan": "give plan.rules, or take plan.specs()",
    "specs": r"pass list\(rules.items\(\)\), if its keys are patterns", "shardings": "pass list",
}  # fmt: skip

# What each answers; and per kind that it refuses, what the message has of what to give instead.
CENSUS: dict[str, tuple[Callable[[Any], dict[str, Any]], dict[str, str]]] = {
    "named_shardings.rules": (lambda given: of_tree(sr.named_shardings(TREE, given, MESH, names=names_for(given))), {}),
    "shard.rules": (lambda given: of_arrays(sr.shard(TREE, with_names(given), MESH)), {}),
    "with_sharding_constraint.rules": (
        lambda given: of_arrays(sr.with_sharding_constraint(TREE, with_names(given), MESH)), {}),
    # The tree has its names in boxes, where nothing else takes them.
    "reshard.rules": (lambda given: of_arrays(sr.reshard(BOXED if is_named(given) else TREE, given, MESH)), {}),
    "load.rules": (lambda given: of_arrays(sr.load(FILE, given, MESH, tree=SHAPES if is_named(given) else None)), {}),
    "plan.rules": (lambda given: of_tree(sr.plan(TREE, given, MESH, names=names_for(given)).specs()), {}),
    "Plan.with_rules.rules": (
        lambda given: of_tree((NAMED_PLAN if is_named(given) else PLAN).with_rules(given).specs()), {}),
    "spec_for.rules": (
        lambda given: {
            path: cuts(sr.spec_for(path, leaf.shape, given[path] if isinstance(given, dict) else given, MESH))
            for path, leaf in TREE.items()
        },
        {"LogicalRules": r"give shardrules.logical_to_mesh\(names, rules\)"}),
    "match_partition_rules.rules": (lambda given: of_tree(sr.match_partition_rules(given, TREE)), BY_PATTERNS),
    "Rules.rules": (lambda given: of_tree(sr.Rules(given).match(TREE)), BY_PATTERNS),
    # Specs are for whole arrays; these have names and mesh axes.
    "LogicalRules.rules": (
        lambda given: sr.LogicalRules(given) and ANSWER,
        {"pairs": "give an axis", "Rules": "named_shardings, shard or plan", "Plan": "write",
         "specs": "give an axis", "shardings": "give an axis"}),
    "logical_axis_rules.rules": (
        lambda given: sr.logical_axis_rules(given).__enter__() or ANSWER,
        {"Rules": "named_shardings, shard or plan", "Plan": "a tuple of", "specs": "a pair", "shardings": "a pair"}),
    # A plan says as well which leaves there must be, of which shape and dtype.
    "audit.plan": (
        lambda given: sr.audit(sr.shard(TREE, PLAN), given).raise_for("error") or ANSWER,
        dict.fromkeys(KINDS.keys() - {"Plan"}, "shardrules.plan")),
    "inspect.inputs": (lambda given: (sr.inspect(COMPILED, (given,)), ANSWER)[1], RULES_ALONE),
    "prove.inputs": (
        lambda given: sr.prove(lambda tree: tree, PLAN, inputs=(given,)).raise_for() or ANSWER, RULES_ALONE),
    "verify.inputs": (lambda given: sr.verify(COMPILED, (given,)).raise_for("error") or ANSWER, RULES_ALONE),
    # A process has a part of the batch, whose shape says nothing about the whole.
    "shard_local.spec": (
        lambda given: of_arrays(sr.shard_local(TREE, given, MESH)),
        dict.fromkeys(("pairs", "Rules", "LogicalRules", "Plan"), "give a PartitionSpec")),
}  # fmt: skip
# What these take are rules of logical names, or plans for other purposes.
FOR_OTHER_THINGS = {"logical_to_mesh.rules", "with_logical_constraint.rules", "named_shardings.names"}
PARAMETERS = {"rules", "like", "plan", "inputs", "shardings", "spec"}
# Fields of records that we make.
RECORDS = {"RuleFile.rules", "RuleSpec.spec", "PlanDiff.rules", "Kind.spec", "Program.inputs", "Suggestion.plan",
           "Solution.plan", "Activation.spec"}  # fmt: skip


def test_every_callable_that_takes_rules_is_in_the_census():
    found = {f"{name}.{one}" for name, own in api.callables().items() for one in own if one in PARAMETERS}
    assert found - RECORDS - FOR_OTHER_THINGS == CENSUS.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CENSUS)
def test_each_kind_of_rules_gives_the_same_answer_or_says_what_to_give(name, kind):
    call, refused = CENSUS[name]
    if kind not in refused:
        assert call(KINDS[kind]) == ANSWER
        return
    # Of a rule that is no pair, flax's error is a ValueError.
    error = ValueError if refused[kind] == "a pair" else TypeError
    with pytest.raises(error, match=refused[kind]) as caught:
        call(KINDS[kind])
    assert len(str(caught.value)) < 500


def test_pairs_in_an_iterator_are_pairs():
    assert of_tree(sr.named_shardings(TREE, iter(PAIRS), MESH)) == ANSWER
    assert of_tree(sr.plan(TREE, iter(PAIRS), MESH).specs()) == ANSWER


def test_specs_that_look_like_pairs_are_specs():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tp"))
    tree = [TREE["wq"], TREE["wq"]]
    for specs in ([P("fsdp", "tp"), P()], (P("fsdp", "tp"), P("tp", None))):
        found = sr.named_shardings(tree, list(specs), mesh)
        assert [one.spec for one in found] == [sr.named_shardings(TREE["wq"], one, mesh).spec for one in specs]
        assert sr.plan(tree, list(specs), mesh).specs() == [one.spec for one in found]
    both = P(("fsdp", "tp"), None)
    assert sr.named_shardings(TREE["wq"], both, mesh).spec == both
    assert sr.shard_local(TREE["wq"], both, mesh).sharding.spec == both


TAKING_RULES = {
    "plan": lambda given: sr.plan(TREE, given, MESH),
    "shard": lambda given: sr.shard(TREE, given, MESH),
    "load": lambda given: sr.load(FILE, given, MESH),
    "reshard": lambda given: sr.reshard(TREE, given, MESH),
    "match_partition_rules": lambda given: sr.match_partition_rules(given, TREE),
}


@pytest.mark.parametrize("taking", TAKING_RULES)
def test_what_leads_to_rules_is_told_where_they_are(taking, tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text('[[rules]]\npattern = "w"\nspec = ["tp"]\n')
    for path in (file, str(file)):
        with pytest.raises(TypeError, match=r"shardrules\.read_rules\(path\)\.rules"):
            TAKING_RULES[taking](path)
    for given in (sr.read_rules(file), sr.suggest(TREE, MESH)):
        with pytest.raises(TypeError, match=r"give its \.rules"):
            TAKING_RULES[taking](given)
    TAKING_RULES[taking]([*sr.read_rules(file).rules, ("norm", P())])


def test_arguments_in_another_order_are_told():
    for given, told in (
        ({"tp": 2}, "rules first, and then this mesh"),
        (TREE, r"this tree first, and then rules; or jax.tree.map\(lambda x: x.sharding, it"),
    ):
        for taking in TAKING_RULES.values():
            with pytest.raises(TypeError, match=f"not dict; pass {told}"):
                taking(given)
