"""Values beside the leaves of a tree, by the walk of the core and by JAX."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import tree_util

from shardrules._core import aligned_values

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
        ({"a": 0}, {"b": 0}),
        ({"a": 0}, {"a": 0, "b": 0}),
        ([0, 1], [0]),
        ([0], (0,)),
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
