"""Which leaf of a tree is that one: every door finds it, in a box or without, whatever was planned."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place.align import match_rows

ARRAY = np.ones((8, 8), "float32")
RULES = [("kernel", ("x", "y")), (".*", ())]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"))


def trees():
    """The same two arrays: plain, in boxes of flax, one of them in a box, in nnx Variables."""
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    box = linen.Partitioned(ARRAY, ("x", "y"))
    param = nnx.Param(ARRAY)
    if jax.tree.leaves(param)[0] is param:  # flax 0.10 has other objects in states
        param = param.to_state()
    return {
        "plain": {"a": {"kernel": ARRAY}, "b": ARRAY},
        "boxed": {"a": {"kernel": box}, "b": linen.Partitioned(ARRAY, (None, None))},
        "half": {"a": {"kernel": box}, "b": ARRAY},
        "nnx": nnx.State({"a": {"kernel": param}, "b": param}),
    }


FORMS = ("plain", "boxed", "half", "nnx")


@pytest.mark.parametrize("planned", FORMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_door_finds_the_leaves(planned, form, mesh):
    tree, plan = trees()[form], sr.plan(trees()[planned], RULES, mesh)
    expected = [P("x", "y"), P()]
    for placed in (sr.shard(tree, plan), sr.reshard(tree, plan)):
        assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == expected
        assert not sr.audit(placed, plan)
    assert [kind.spec for kind in sr.plan(tree, plan).kinds]
    step = jax.jit(lambda given: given, out_shardings=sr.named_shardings(tree, plan))
    assert not sr.verify(step.lower(sr.shard(tree, plan)).compile(), (plan,), plan)


def test_a_box_with_several_arrays(mesh):
    linen = pytest.importorskip("flax.linen")
    plain = {"w": {"q": ARRAY, "scale": ARRAY}}
    boxed = {"w": linen.Partitioned(plain["w"], ("x", "y"))}
    plan = sr.plan(plain, [("q", ("x", "y")), (".*", ())], mesh)
    for placed in (sr.shard(boxed, plan), sr.reshard(boxed, plan)):
        assert [leaf.sharding.spec for leaf in jax.tree.leaves(placed)] == [P("x", "y"), P()]


def test_names_by_path_go_to_leaves_in_boxes(mesh):
    names = {"a/kernel": ("in", "out")}
    rules = sr.LogicalRules([("in", "x"), ("out", "y")])
    specs = sr.named_shardings(trees()["nnx"], rules, mesh, names=names)
    assert next(sharding.spec for sharding in jax.tree.leaves(specs)) == P("x", "y")


def test_equal_paths_are_paired_in_order():
    assert match_rows(["a", "b", "a"], ["a", "c", "a"]) == [0, -1, 2]
    assert match_rows(["a", "a"], ["a"]) == [0, -1]


def test_a_spelling_finds_only_what_is_left():
    assert match_rows(["a/b", "c"], ["a.b", "a/b"], lambda path: path.replace(".", "/")) == [1, -1]
    assert match_rows(["a/b", "c"], ["d", "a.b"], lambda path: path.replace(".", "/")) == [1, -1]
