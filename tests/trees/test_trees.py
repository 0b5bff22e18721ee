"""Every kind of pytree node, and values beside the leaves: the result is what jax.tree_util gives."""

import re
from collections import OrderedDict, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import tree_util
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._core import aligned_values
from tests.support.references import SLASHED
from tests.support.trees import array, kinds_of_trees, trees_of_libraries


def assert_same_tree(tree):
    """Each leaf's rule is found by its path; the trees have equal structures."""
    paths = [p for p, _ in tree_util.tree_flatten_with_path(tree)[0]]
    texts = list(map(SLASHED, paths))
    # One rule a leaf, whose spec is its number: the result shows which path each leaf had.
    rules = sr.Rules([(rf"\A{re.escape(text)}\Z", number) for number, text in enumerate(texts)])
    result = rules.match(tree, strict=False)
    expected = tree_util.tree_map_with_path(lambda path, _: texts.index(SLASHED(path)), tree)
    assert tree_util.tree_structure(result) == tree_util.tree_structure(expected)
    assert tree_util.tree_leaves(result) == tree_util.tree_leaves(expected)
    return result


LIBRARY_KINDS = [
    "FrozenDict", "nnx.State", "nnx pure dict", "equinox Module", "equinox arrays", "optax Adam",
    "optax MultiSteps", "optax masked", "optax chain",
]  # fmt: skip


@pytest.mark.parametrize("kind", [*kinds_of_trees(), *LIBRARY_KINDS])
def test_structure_and_paths(kind):
    tree = (trees_of_libraries() if kind in LIBRARY_KINDS else kinds_of_trees())[kind]
    result = assert_same_tree(tree)
    assert type(result) is type(tree) or kind not in LIBRARY_KINDS


@pytest.mark.parametrize("kind", [dict, lambda items: defaultdict(list, items)])
def test_keys_that_jax_cannot_sort_are_refused(kind):
    tree = {"outer": kind({1: array(2), "a": array(2)})}
    with pytest.raises((ValueError, TypeError), match="sort|not supported between"):
        tree_util.tree_map(lambda x: x, tree)
    with pytest.raises(ValueError, match="cannot sort the keys") as info:
        sr.match_partition_rules([(".*", P())], tree)
    assert info.value.__notes__ == ["shardrules: at 'outer' in the tree"]


def test_types_registered_between_two_calls_are_seen():
    class Late:
        def __init__(self, inner):
            self.inner = inner

    rules = [(".*", P())]
    assert sr.match_partition_rules(rules, {"late": Late(array(2))}) == {"late": P()}
    tree_util.register_pytree_node(Late, lambda n: ((n.inner,), None), lambda _, children: Late(*children))
    result = sr.match_partition_rules(rules, {"late": Late(array(2))})
    assert result["late"].inner == P()


def test_an_ordered_dict_with_items_of_its_own():
    """It crashed; JAX does not look at them either."""
    for own in ([1, 2], [()], None):
        tree = OrderedDict(a=array(2), b=array(3))
        tree.items = lambda own=own: own
        assert sr.match_partition_rules([("a", P("tp")), ("b", P())], tree) == OrderedDict(a=P("tp"), b=P())


KEYS = st.text("abc", max_size=2)
TREES = st.recursive(
    st.just("leaf"),
    lambda inner: st.one_of(
        st.dictionaries(KEYS, inner, max_size=4), st.lists(inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=20,
)


@given(TREES, TREES)
def test_it_finds_what_jax_finds(tree, other):
    leaves, treedef = tree_util.tree_flatten(tree)
    rows = treedef.unflatten(range(len(leaves)))
    values = tree_util.tree_map(lambda row: ("name", row), rows)
    found = aligned_values(rows, values, len(leaves))
    assert found == treedef.flatten_up_to(values) == [("name", row) for row in range(len(leaves))]
    try:
        theirs = treedef.flatten_up_to(other)
    except (TypeError, ValueError):
        theirs = None
    assert aligned_values(rows, other, len(leaves)) == theirs


class Mapping(dict):
    pass


@pytest.mark.parametrize(
    ("rows", "values"),
    [
        ({"a": None}, {"a": None}),
        (Mapping(a=0), Mapping(a=0)),
        ({"a": True}, {"a": 3}),
        ([5], [3]),
        ([-1], [3]),
        ({"a": [0]}, {"a": 3}),
    ],
    ids=str,
)
def test_whatever_it_does_not_know_is_for_jax(rows, values):
    assert aligned_values(rows, values, 1) is None


class Key:
    """Equal to all, after it has done something."""

    def __init__(self, act):
        self.act = act

    def __hash__(self):
        return 1

    def __eq__(self, other):
        self.act()
        return True


def test_errors_come_through():
    def fail():
        raise RuntimeError("compared")

    with pytest.raises(RuntimeError, match="compared"):
        aligned_values({Key(fail): 0}, {Key(fail): 0}, 1)
    with pytest.raises(OverflowError):
        aligned_values([2**100], [3], 1)


def test_keys_that_change_the_trees_while_they_are_compared_do_no_harm():
    rows, values = {}, {}
    key = lambda: Key(lambda: (rows.clear(), values.clear()))  # noqa: E731
    rows[key()] = 0
    values[key()] = ["name"]
    assert aligned_values(rows, values, 1) in ([["name"]], None)


def test_deep_trees_are_for_jax():
    rows, values = 0, "name"
    for _ in range(10**5):
        rows, values = [rows], [values]
    assert aligned_values(rows, values, 1) is None
    while isinstance(rows, list):  # so that the interpreter need not free them in depth
        rows, values = rows[0], values[0]
