"""Which leaf of a tree is that one: every door finds it, in a box or without, whatever was planned."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._plan.align import match_rows

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
    half = sr.reshard(tree, plan, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}
    if planned == form or (planned, form) == ("plain", "boxed"):  # else the tree is as the plan's
        assert jax.tree.structure(placed) == jax.tree.structure(half) == jax.tree.structure(tree)
    again = sr.plan(tree, plan).shardings()
    assert [sharding.spec for sharding in jax.tree.leaves(again)] == expected
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


ONE_PATH = {"a/b": np.ones((8, 4), "float32"), "a": {"b": np.ones((8, 2), "float32")}}


def test_two_leaves_of_one_path_are_told_apart_by_nothing(mesh, tmp_path):
    plan = sr.plan(ONE_PATH, [("", "x")], mesh)
    for act in (
        lambda: sr.named_shardings(ONE_PATH, plan),
        lambda: sr.named_shardings(ONE_PATH, sr.plan({"c": np.ones(8)}, [("", ())], mesh)),
        lambda: plan.diff(plan),
        plan.lock,
        lambda: plan.for_optimizer({"mu": ONE_PATH}),
        lambda: sr.save(ONE_PATH, tmp_path / "saved"),
        lambda: sr.reshard(ONE_PATH, plan, renames=[sr.Rename("c", "d")]),
    ):
        with pytest.raises(ValueError, match="two leaves have the path 'a/b', .* rename a key"):
            act()


def test_a_path_that_stands_twice_is_found_nowhere():
    assert match_rows(["a", "b", "a"], ["a", "b"]) == [-1, 1, -1]
    assert match_rows(["a"], ["a", "a"]) == [-1]
    assert match_rows(["a.b", "a/b"], ["a:b"], lambda _: "ab") == [-1, -1]


def test_a_spelling_finds_only_what_is_left():
    assert match_rows(["a/b", "c"], ["a.b", "a/b"], lambda path: path.replace(".", "/")) == [1, -1]
    assert match_rows(["a/b", "c"], ["d", "a.b"], lambda path: path.replace(".", "/")) == [1, -1]
