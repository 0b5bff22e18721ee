"""Small dicts that come again: each gets what it would get alone."""

import jax
import pytest
from jax import tree_util
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import random_blocks
from tests.support.slow import some


def leaf(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


MANY = 40  # what is met a few times is not remembered


def blocks(count, keys=("q", "k"), levels=3):
    """Dicts of the same keys, on that many levels, down to leaves of one kind."""
    return [nested(keys, levels) for _ in range(count)]


def nested(keys, levels):
    return {key: nested(keys, levels - 1) for key in keys} if levels else leaf(4, 8)


SIZES = [(levels, keys) for levels in (1, 2, 4, 5, 9) for keys in (1, 2, 3, 8, 9)]


@pytest.mark.parametrize(("levels", "keys"), [(n, k) for n, k in SIZES if k**n <= 100])
def test_blocks_of_any_size(levels, keys):
    tree = blocks(MANY, [f"k{i}" for i in range(keys)], levels)
    ours = sr.match_partition_rules([("39/.*k1", P("fsdp")), (".*", P(None, "tp"))], tree)
    assert ours[1:-1] == ours[:1] * (MANY - 2)
    expected = tree_util.tree_map_with_path(
        lambda path, _: P("fsdp") if "k1" in [entry.key for entry in path[1:]] else P(None, "tp"), tree[-1:]
    )
    assert ours[-1:] == expected
    assert random_blocks.orders(ours) == random_blocks.orders(tree)


def dicts_of(tree):
    children = tree if isinstance(tree, list) else tree.values() if isinstance(tree, dict) else ()
    return [tree] * isinstance(tree, dict) + [found for child in children for found in dicts_of(child)]


def test_each_sibling_is_a_dict_of_its_own():
    rules = [("q", P("tp")), (".*", P())]
    ours = sr.match_partition_rules(rules, blocks(MANY))
    found = dicts_of(ours)
    assert len({id(one) for one in found}) == len(found) == MANY * 7
    for one in found[:-7]:
        one.clear()
    assert ours[-1:] == sr.match_partition_rules(rules, blocks(1))


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


TREES = 1000
OTHERS = [check for check in random_blocks.CHECKS if check is not random_blocks.check_match]


@pytest.mark.parametrize("seed", some(range(100), every=100))
def test_each_leaf_of_random_blocks_gets_what_it_gets_alone(seed):
    """Of blocks alike but for one thing, in all dialects: on each call, and at each door."""
    for number, case in enumerate(random_blocks.cases(seed, TREES)):
        random_blocks.check_match(case)
        if number % 2:  # they take several times as long
            OTHERS[number // 2 % len(OTHERS)](case)
