"""Small dicts of leaves that come again: each gets what it would get alone."""

from __future__ import annotations

import itertools
import random

import jax
import pytest
from jax import tree_util
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import shardrules as sr


class Text(str):
    __slots__ = ()


class Odd:
    """A leaf whose shape is no tuple in a slot."""

    shape = (4, 8)


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


LEAVES = [
    leaf(4, 8),
    leaf(8, 4),
    leaf(3, 8),
    leaf(8),
    leaf(),
    leaf(2, 2, 2),
    Odd(),
    {"a": leaf(4, 8)},
]
KEYS = ["kernel", "bias", "a", Text("kernel"), "".join(["ker", "nel"])]
MESH = AbstractMesh((2, 2), ("fsdp", "tp"))
RULES = [
    ("w1/kernel", P("fsdp", "tp")),
    ("w2/bias", P("tp")),
    ("kernel", P(None, "fsdp", "tp")),
    (".*", P("tp")),
]


def random_tree(seed):
    draw = random.Random(seed)

    def block():
        keys = draw.sample(KEYS, draw.randint(0, 4))
        return {key: draw.choice(LEAVES) for key in keys}

    return [{name: block() for name in ("w1", "w2", "norm")} for _ in range(40)]


def alone(match, tree):
    """Each leaf in a tree of its own, so that it has no siblings."""
    flat, structure = tree_util.tree_flatten_with_path(tree)

    def of(path, value):
        nested = value
        for key in reversed(path):
            nested = [None] * key.idx + [nested] if hasattr(key, "idx") else {key.key: nested}
        is_answer = lambda x: isinstance(x, P) or hasattr(x, "spec")  # noqa: E731
        return tree_util.tree_leaves(match(nested), is_leaf=is_answer)[0]

    return structure.unflatten([of(path, value) for path, value in flat])


WAYS = {
    "specs": lambda tree: sr.Rules(RULES).match(tree),
    "min_size": lambda tree: sr.Rules(RULES).match(tree, min_size=25),
    "not strict": lambda tree: sr.Rules(RULES).match(tree, strict=False),
    "searched": lambda tree: sr.Rules([(r"^\d*[02468]/.*(?=kernel)", P("fsdp")), *RULES]).match(
        tree
    ),
    "shardings": lambda tree: sr.named_shardings(tree, sr.Rules(RULES), MESH),
    "no memory": lambda tree: sr.Rules(RULES, memory_budget=0).match(tree),
}


@pytest.mark.parametrize(("way", "seed"), list(itertools.product(WAYS, range(2))))
def test_siblings_get_what_they_get_alone(way, seed):
    tree = random_tree(seed)
    ours = WAYS[way](tree)
    assert ours == alone(WAYS[way], tree)
    for made, block in zip(ours, tree, strict=True):
        for name, before in block.items():
            assert list(made[name]) == list(before)


def test_each_sibling_is_a_dict_of_its_own():
    ours = sr.match_partition_rules(RULES, [{"kernel": leaf(4, 8)}, {"kernel": leaf(4, 8)}])
    ours[0]["kernel"] = "changed"
    assert ours[1] == {"kernel": P(None, "fsdp")}


def test_every_sibling_without_a_rule_is_counted():
    with pytest.raises(ValueError, match="3 leaves match none"):
        sr.match_partition_rules([("bias", P())], [{"kernel": leaf(4, 8)} for _ in range(3)])
