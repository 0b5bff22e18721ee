"""Small dicts that come again: each gets what it would get alone."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import jax
import pytest
from jax import tree_util
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
MESH = {"fsdp": 2, "tp": 2}
RULES = [
    ("w1/kernel", P("fsdp", "tp")),
    ("w2/bias", P("tp")),
    ("kernel", P(None, "fsdp", "tp")),
    (".*", P("tp")),
]


def random_tree(seed):
    draw = random.Random(seed)

    def block(levels):
        keys = draw.sample(KEYS, draw.randint(0, 4))
        return {
            key: block(levels - 1) if levels and draw.random() < 0.7 else draw.choice(LEAVES)
            for key in keys
        }

    def like(node):
        """The same in dicts of its own; now and then another leaf."""
        if not isinstance(node, dict):
            return draw.choice(LEAVES) if draw.random() < 0.02 else node
        return {key: like(child) for key, child in node.items()}

    known = [block(draw.randint(0, 5)) for _ in range(3)]
    return [
        {name: like(draw.choice([*known, block(1)])) for name in ("w1", "w2", "norm")}
        for _ in range(40)
    ]


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
    "min_size": lambda tree: sr.Rules(RULES, min_size=25).match(tree),
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
    assert order(ours) == order(tree)


def order(tree):
    """All keys, as they stand in the dicts."""
    if isinstance(tree, list):
        return [order(child) for child in tree]
    return [(key, order(child)) for key, child in tree.items()] if isinstance(tree, dict) else None


MANY = 40  # what is met a few times is not remembered


def blocks(count, keys=("q", "k"), levels=3):
    """Dicts of the same keys, on that many levels, down to leaves of one kind."""
    if levels == 0:
        return leaf(4, 8)
    return [{key: nested(keys, levels - 1) for key in keys} for _ in range(count)]


def nested(keys, levels):
    return {key: nested(keys, levels - 1) for key in keys} if levels else leaf(4, 8)


SIZES = [(levels, keys) for levels in (1, 2, 4, 5, 9) for keys in (1, 2, 3, 8, 9)]


@pytest.mark.parametrize(("levels", "keys"), [(n, k) for n, k in SIZES if k**n <= 100])
def test_blocks_of_any_size(levels, keys):
    tree = blocks(MANY, [f"k{i}" for i in range(keys)], levels)
    ours = sr.match_partition_rules([("39/.*k1", P("fsdp")), (".*", P(None, "tp"))], tree)
    assert ours[1:-1] == ours[:1] * (MANY - 2)
    expected = tree_util.tree_map_with_path(
        lambda path, _: P("fsdp") if "k1" in [entry.key for entry in path[1:]] else P(None, "tp"),
        tree[-1:],
    )
    assert ours[-1:] == expected
    assert order(ours) == order(tree)


def dicts_of(tree):
    children = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
    return [tree] * isinstance(tree, dict) + [
        found for child in children for found in dicts_of(child)
    ]


def test_each_sibling_is_a_dict_of_its_own():
    ours = sr.match_partition_rules(RULES, blocks(MANY))
    found = dicts_of(ours)
    assert len({id(one) for one in found}) == len(found) == MANY * 7
    for one in found[:-7]:
        one.clear()
    assert ours[-1:] == sr.match_partition_rules(RULES, blocks(1))


class Changing:
    """A node whose unflatten function changes the dicts that it gets."""

    def __init__(self, child):
        self.child = child


def changed(_, children):
    for one in dicts_of(children[0]):
        one["more"] = None
    return Changing(children[0])


tree_util.register_pytree_with_keys(
    Changing, lambda node: ([(tree_util.GetAttrKey("child"), node.child)], None), changed
)


def test_what_a_node_does_to_its_dicts_is_not_copied():
    tree = [node for one in blocks(MANY, "qk", 2) for node in (one, Changing(one))]
    ours = sr.match_partition_rules([("q", P("fsdp")), ("k", P("tp"))], tree)
    assert all("more" in one for node in ours[1::2] for one in dicts_of(node.child))
    q, k = P("fsdp"), P("tp")
    assert ours[::2] == [{"q": {"q": q, "k": q}, "k": {"q": q, "k": k}}] * MANY


def test_siblings_that_take_turns():
    """Where nothing is like what stood before it, and where it then comes again."""
    kinds = [{"kernel": leaf(4, 8)}, {"kernel": leaf(8)}, {"bias": leaf(4, 8)}, {"kernel": leaf()}]
    tree = [dict(kinds[number % 4]) for number in range(40)] + [dict(kinds[0]) for _ in range(40)]
    whole, cut, replicated = P(None, "tp"), P(None), P()
    expected = [{"kernel": whole}, {"kernel": cut}, {"bias": whole}, {"kernel": replicated}]
    ours = sr.match_partition_rules([(".*", P(None, "tp"))], tree)
    assert ours == expected * 10 + expected[:1] * 40


ONE_ELEMENT = {
    "EasyLM": sr.dialects.EASYLM,
    "JAXSeq": sr.dialects.KEYSTR,
    "own dialect": replace(sr.dialects.NNX, scalars="size 1"),
}


@pytest.mark.parametrize("entry", ONE_ELEMENT)
@pytest.mark.parametrize("count", [1, 8, 16, 40])
def test_a_leaf_of_one_element_gets_no_spec_of_larger_siblings(entry, count):
    """It lost its P() once the automaton had states; the same call gave two answers."""
    tree = [{"scale": leaf(64), "w": None} for _ in range(count)]
    tree += [{"scale": leaf(1), "w": None}, {"scale": leaf(2), "w": None}]
    for _ in range(14):
        rules = sr.Rules([("scale", P("fsdp"))], ONE_ELEMENT[entry])
        specs = [node["scale"] for node in rules.match(tree)]
        assert specs == [P("fsdp")] * count + [P(), P("fsdp")]


def test_a_block_at_the_bound_of_depth_is_no_copy():
    """The levels of a copy were not counted: what was too deep alone was taken among siblings."""
    rules = sr.Rules([(".*", P("tp"))])

    def blocks(count):
        return [{"a": {"a": {"a": leaf(4, 8)}}} for _ in range(count)]

    def fits(depth, count, first=0):
        """Whether so many blocks do, under so many lists, behind blocks that are less deep."""
        tree = blocks(count)
        for _ in range(depth):
            tree = [tree]
        try:
            rules.match([*blocks(first), tree])
        except RecursionError:
            return False
        return True

    fitting, too_deep = 5, 6000
    while too_deep - fitting > 1:
        depth = (fitting + too_deep) // 2
        fitting, too_deep = (depth, too_deep) if fits(depth, 1) else (fitting, depth)
    for count, first in [(1, 0), (MANY, 0), (1, MANY), (MANY, MANY)]:
        assert fits(fitting, count, first)
        assert not fits(too_deep, count, first)


def test_every_sibling_without_a_rule_is_counted():
    with pytest.raises(ValueError, match="3 leaves match none"):
        sr.match_partition_rules([("bias", P())], [{"kernel": leaf(4, 8)} for _ in range(3)])
