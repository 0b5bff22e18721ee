"""named_shardings and spec_for: against match and correct leaf by leaf, and their errors."""

import pickle
from types import SimpleNamespace

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._rules.rules import matcher_of


def test_rules_bound_to_meshes_are_remembered_and_let_go():
    rules = sr.Rules([("w", "tp")])
    tree = {"w": np.zeros(64)}
    first = sr.named_shardings(tree, rules, {"tp": 2})["w"]
    assert sr.named_shardings(tree, rules, {"tp": 2})["w"] is first
    for size in range(2, 40):
        assert sr.named_shardings(tree, rules, {"tp": size})["w"].mesh.size == size
    assert len(matcher_of(rules)._remembered) <= 16
    assert pickle.loads(pickle.dumps(rules)) == rules


ERROR = sr.Correction(indivisible="error", rank="error")


def test_all_that_would_fail_is_listed_at_once(mesh):
    tree = {
        "a": {"wk": np.zeros((6, 7))},
        "b": np.zeros(8),
        "c": np.zeros((2, 2)),
        "fine": np.zeros((8, 8)),
        "none": np.zeros(2),
    }
    rules = [("wk", P("fsdp", ("tp", "zz"))), ("b", P("tp", "dp")), ("c", P("tp", "tp")), ("fine", P("fsdp", "tp"))]
    with pytest.raises(ValueError, match="Partition rule not found for param: none") as caught:
        sr.named_shardings(tree, sr.Rules(rules, correction=ERROR), mesh)
    message = str(caught.value)
    for part in (
        "3 leaves cannot be sharded as the rules say, on the mesh dp=1,fsdp=4,tp=2:",
        "a/wk  shape (6, 7)  rule 0: 'wk' -> ",
        "dim 0 of size 6 is not divisible by fsdp=4: use fewer axes",
        "        the mesh has no axis 'zz': rename it, add",
        "b  shape (8,)  rule 1",
        "the spec has 2 entries, the array 1 dimension: shorten the spec",
        "c  shape (2, 2)  rule 2",
        "dim 1: 'tp' is used twice",
    ):
        assert part in message
    assert "fine" not in message


def test_an_axis_used_twice_is_an_error_under_every_policy(mesh):
    for spec in (P("tp", "tp"), P(("tp", "fsdp", "tp"))):
        with pytest.raises(ValueError, match="'tp' is used twice"):
            sr.named_shardings({"w": np.zeros((16, 4))}, [("w", spec)], mesh)
    # Where one of the two goes, nothing is wrong.
    found = sr.named_shardings({"w": np.zeros((4, 3))}, [("w", P("tp", "tp"))], mesh)
    assert found["w"].spec == P("tp", None)


@pytest.mark.parametrize("spec", [3, object(), frozenset({"tp"})])
def test_a_spec_of_the_wrong_type(mesh, spec):
    with pytest.raises(TypeError, match="rule 1: the spec .* cannot be put on a mesh"):
        sr.named_shardings({"w": np.zeros(4)}, [("x", None), ("w", spec)], mesh)


def test_a_mesh_of_zero_devices():
    with pytest.raises(ValueError, match=r"a mesh without devices: its axes are tp=0"):
        sr.named_shardings({"w": np.zeros(4)}, [("w", "tp")], Mesh(np.empty((0,)), ("tp",)))
    with pytest.raises(ValueError, match="its axes are none, as of JAX's mesh where none is in force"):
        sr.named_shardings({"w": np.zeros(4)}, [("w", "tp")], Mesh(np.empty(()), ()))


def test_spec_for():
    rules = [("wk", P("fsdp", "tp"))]
    assert sr.spec_for("layers/0/wk", (8,), rules) == P("fsdp")
    sizes = {"fsdp": 4, "tp": 2}
    with pytest.raises(ValueError, match="Partition rule not found for param: layers/0/wq"):
        sr.spec_for("layers/0/wq", (8,), rules, sizes)
    with pytest.raises(ValueError, match="layers/0/wk  shape"):
        sr.spec_for("layers/0/wk", (8, 7), sr.Rules(rules, correction=ERROR), sizes)
    with pytest.raises(TypeError, match="rules are None"):
        sr.spec_for("a", (8,), None, sizes)


def test_a_tree_of_specs():
    tree = {"a": {"w": jax.ShapeDtypeStruct((8, 3), "float32")}, "b": [np.ones((4, 4)), np.ones(3)]}
    specs = {"a": P("fsdp"), "b": [P(None, "fsdp"), None]}  # a prefix; and a leaf left alone
    found = sr.named_shardings(tree, specs, {"fsdp": 2})
    assert found["a"]["w"].spec == P("fsdp", None)
    assert [one and one.spec for one in found["b"]] == [P(None, "fsdp"), None]
    placed = jax.tree.map(
        lambda x: x.sharding.spec if isinstance(x, jax.Array) else None,
        sr.shard({"b": tree["b"]}, {"b": specs["b"]}, Mesh(np.array(jax.devices()[:2]), ("fsdp",))),
    )
    assert placed == {"b": [P(None, "fsdp"), None]}


@pytest.mark.parametrize("door", [sr.named_shardings, sr.shard, sr.plan, sr.with_sharding_constraint])
def test_rules_have_their_own_correction(door):
    """A keyword beside them would say it a second time."""
    pairs, tree, mesh = [("", "tp")], {"w": np.ones(8)}, {"tp": 2}
    for rules, instead in (
        (pairs, "Rules"),
        (sr.Rules(pairs), "Rules"),
        (sr.LogicalRules({"x": "tp"}), "LogicalRules"),
        (sr.plan(tree, pairs, mesh), "a plan of Rules"),
    ):
        error = rf"rules are no specs; rules have their own: give {instead}\(pairs, correction="
        with pytest.raises(ValueError, match=error):
            door(tree, rules, mesh, correction=ERROR)


@pytest.mark.parametrize(
    ("specs", "place"),
    [
        ({"a": P(), "c": P()}, r"at the root the specs alone have .*\['c'\].*the tree alone .*\['b'\]"),
        ({"a": {"x": P()}, "b": P()}, r"at \['a'\] the specs alone have .*'x'.*alone .*'w'"),
        ({"a": P(), "b": (P(), P())}, r"at \['b'\] the specs have a tuple, and the tree a list"),
        ({"a": {"w": [P()]}, "b": P()}, r"at \['a'\]\['w'\] the specs go on, where the tree has Shape"),
        ([P(), P()], r"at the root the specs alone have .*\[0\]"),
    ],
)  # fmt: skip
def test_a_tree_of_specs_of_another_structure(specs, place):
    leaf = jax.ShapeDtypeStruct((8,), "float32")
    tree = {"a": {"w": leaf}, "b": [leaf, leaf]}
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    for function in (sr.named_shardings, sr.with_sharding_constraint, sr.shard):
        with pytest.raises(ValueError, match=f"tree of specs does not fit the tree: {place}"):
            function(tree, specs, mesh)


def test_a_spec_is_no_list_of_rules():
    with pytest.raises(TypeError, match=r"pairs, not a spec; write \[\('\.\*', P"):
        sr.match_partition_rules(P("fsdp"), {"w": np.ones(8)})


RULE = [("x", P("dp", "tp"))]
SIZES = {"dp": 2, "tp": 4}


def test_symbolic_dimensions():
    """A dimension is cut where every value of its variables divides."""
    batch, width = jax.export.symbolic_shape("b, 8*c")
    tree = {"x": jax.ShapeDtypeStruct((batch, width), "float32")}
    assert sr.match_partition_rules(RULE, tree) == {"x": P("dp", "tp")}
    assert sr.named_shardings(tree, RULE, SIZES)["x"].spec == P(None, "tp")
    assert sr.spec_for("x", (batch, width), RULE, {"dp": 1, "tp": 8}) == P("dp", "tp")
    error = sr.Correction(indivisible="error")
    with pytest.raises(ValueError, match="dim 0 of size b is not divisible by dp=2"):
        sr.named_shardings(tree, sr.Rules(RULE, correction=error), SIZES)
    with pytest.raises(TypeError, match=r"x: a dimension of the shape .* is b \(a _DimExpr\), not an int"):
        sr.plan(tree, RULE, SIZES)
    rules = sr.LogicalRules([("batch", "dp"), ("mlp", "tp")])
    found = sr.named_shardings(tree, rules, SIZES, names={"x": ("batch", "mlp")})
    assert found["x"].spec == P(None, "tp")


@pytest.mark.parametrize("size", [2**63 - 1, 2**63, 2**63 + 2, 2**64, 2**64 + 4, 3 * 2**70])
def test_dimensions_beyond_an_int64(size):
    tree = {"x": SimpleNamespace(shape=(size, 4))}
    assert sr.match_partition_rules(RULE, tree) == {"x": P("dp", "tp")}
    spec = sr.named_shardings(tree, RULE, SIZES)["x"].spec
    assert spec == P("dp" if size % 2 == 0 else None, "tp")
    prefix = sr.Correction(indivisible="prefix")
    both = [("x", P(("dp", "tp")))]
    spec = sr.named_shardings(tree, sr.Rules(both, correction=prefix), SIZES)["x"].spec
    kept = ("dp", "tp") if size % 8 == 0 else "dp"
    assert spec == (P(kept, None) if size % 2 == 0 else P())
