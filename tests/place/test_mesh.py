"""The mesh that is used; and axes that it lacks, or that cut nothing: errors of one form, unless they are declared."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.arguments import parse_mesh
from tests.support.contexts import legacy


@pytest.fixture
def other():
    return Mesh(np.array(jax.devices()[:8]).reshape(8), ("x",))


pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("context", [legacy, jax.set_mesh])
def test_the_context_s_mesh(mesh, other, context):
    with context(mesh):
        assert sr.resolve_mesh() is mesh
        with context(other):
            assert sr.resolve_mesh() is other
        seen = []
        jax.jit(lambda x: seen.append(sr.resolve_mesh()) or x)(1.0)
        assert seen == [mesh]


def test_abstract_mesh():
    abstract = AbstractMesh((4, 2), ("fsdp", "tp"))
    with jax.sharding.use_abstract_mesh(abstract):
        assert sr.resolve_mesh() == abstract


def test_inside_shard_map_manual_axes_are_seen(mesh):
    seen = []

    def body(x):
        seen.append(sr.resolve_mesh())
        return x

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names={"fsdp"})
        jax.jit(mapped)(np.zeros(8, "float32"))
    assert isinstance(seen[0], AbstractMesh)
    assert [type_.name for type_ in seen[0].axis_types] == ["Auto", "Manual", "Auto"]


def test_two_contexts(mesh, other):
    with legacy(mesh), jax.set_mesh(mesh):
        assert sr.resolve_mesh() is mesh
    with legacy(other), jax.set_mesh(mesh), pytest.raises(ValueError, match="two meshes") as caught:
        sr.resolve_mesh()
    assert "jax.set_mesh's dp=1,fsdp=4,tp=2 and `with mesh:`'s x=8" in str(caught.value)
    devices = mesh.devices[:, ::-1]
    reordered = Mesh(devices, mesh.axis_names)
    with legacy(reordered), jax.set_mesh(mesh), pytest.raises(ValueError, match="other devices"):
        sr.resolve_mesh()
    with legacy(other), jax.set_mesh(mesh):
        assert sr.resolve_mesh(mesh) is mesh


TAKING_SIZES = {
    "resolve_mesh": sr.resolve_mesh,
    "text": lambda sizes: parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items())),
    "plan": lambda sizes: sr.plan({"w": np.ones(8)}, [("w", None)], sizes),
    "named_shardings": lambda sizes: sr.named_shardings({"w": np.ones(8)}, [("w", None)], sizes),
}


@pytest.mark.parametrize("door", TAKING_SIZES)
def test_one_bound_on_meshes(door):
    """Text allowed 2**31 - 1 devices, and plans 2**24."""
    use = TAKING_SIZES[door]
    use({"dp": 2**20, "tp": 2**4})
    with pytest.raises(ValueError, match="33554432 devices; it can have at most 16,777,216"):
        use({"dp": 2**20, "tp": 2**5})
    with pytest.raises(ValueError, match="a mesh of 33 axes; it can have at most 32"):
        use({f"a{i}": 1 for i in range(33)})


ARRAY = np.arange(64, dtype="float32").reshape(8, 8)
TREE = {"a": {"kernel": ARRAY}, "b": ARRAY}
NAMES = {"a/kernel": ("embed", None), "b": ("embed", None)}


@pytest.fixture(scope="module")
def explicit():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)


def rules_of(spec, optional=()):
    return sr.Rules([(".*", spec)], optional_axes=optional)


def logical_of(spec, optional):
    return sr.LogicalRules([("embed", spec[0])], optional_axes=optional)


# What each door says of a spec, by rules that declare optional axes. Specs declare none.
DOORS = {
    "named_shardings by rules": lambda spec, mesh, *axes: sr.named_shardings(TREE, rules_of(spec, *axes), mesh),
    "named_shardings by names": lambda spec, mesh, axes=(): sr.named_shardings(TREE, logical_of(spec, axes), mesh, names=NAMES),
    "plan by rules": lambda spec, mesh, *axes: sr.plan(TREE, rules_of(spec, *axes), mesh).shardings(),
    "plan with companions": lambda spec, mesh, *axes: sr.plan(TREE, rules_of(spec, *axes), mesh, companions=sr.LORA).shardings(),
    "plan by names": lambda spec, mesh, axes=(): sr.plan(TREE, logical_of(spec, axes), mesh, names=NAMES).shardings(),
    "shard": lambda spec, mesh, *axes: placed(sr.shard(TREE, rules_of(spec, *axes), mesh)),
    "shard by a plan": lambda spec, mesh, *axes: placed(sr.shard(TREE, sr.plan(TREE, rules_of(spec, *axes), mesh))),
    "reshard": lambda spec, mesh, *axes: placed(sr.reshard(jax.tree.map(jax.numpy.asarray, TREE), rules_of(spec, *axes), mesh)),
    "with_sharding_constraint": lambda spec, mesh, *axes: placed(sr.with_sharding_constraint(TREE, rules_of(spec, *axes), mesh)),
    "with_sharding_constraint in jit": lambda spec, mesh, *axes: placed(
        jax.jit(lambda tree: sr.with_sharding_constraint(tree, rules_of(spec, *axes), mesh))(TREE)
    ),
    "spec_for": lambda spec, mesh, *axes: {
        path: NamedSharding(mesh, sr.spec_for(path, (8, 8), rules_of(spec, *axes), mesh))
        for path in ("a/kernel", "b")
    },
}  # fmt: skip
BY_SPECS = {
    "named_shardings by specs": lambda spec, mesh: sr.named_shardings(TREE, spec, mesh),
    "plan by specs": lambda spec, mesh: sr.plan(TREE, spec, mesh).shardings(),
    "specs of a plan": lambda spec, mesh: sharded_by(mesh, sr.plan(TREE, rules_of(spec), mesh).specs()),
    "shard by specs": lambda spec, mesh: placed(sr.shard(TREE, spec, mesh)),
    "shard_local": lambda spec, mesh: placed(sr.shard_local(TREE, spec, mesh)),
    "with_sharding_constraint by specs": lambda spec, mesh: placed(sr.with_sharding_constraint(TREE, spec, mesh)),
}  # fmt: skip


PLACING = ("shard", "shard by a plan", "reshard", "shard by specs", "shard_local")


def sharded_by(mesh, specs):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda node: isinstance(node, P))


def placed(tree):
    return jax.tree.map(lambda array: array.sharding, tree)


def is_placed(found, mesh, spec):
    on = NamedSharding(mesh, spec)
    return all(sharding.is_equivalent_to(on, 2) for sharding in jax.tree.leaves(found))


@pytest.mark.parametrize("door", {**DOORS, **BY_SPECS}.items(), ids=[*DOORS, *BY_SPECS])
class TestEveryDoor:
    def test_a_misspelt_axis_is_an_error_of_one_form(self, door, mesh):
        with pytest.raises(ValueError, match=r"the mesh has no axis 'tpp' \(did you mean 'tp'\?\)") as caught:
            door[1](P("tpp"), mesh)
        for part in ("\n    a/kernel", "declare that a mesh may lack it: optional_axes=['tpp']"):
            assert part in str(caught.value)

    def test_one_that_is_there_is_none(self, door, mesh):
        assert is_placed(door[1](P("tp"), mesh), mesh, P("tp"))


@pytest.mark.parametrize("door", DOORS)
def test_one_that_is_declared_is_dropped_alone(door, mesh):
    found = DOORS[door](P(("fsdp", "sp")), mesh, ["sp"])
    assert is_placed(found, mesh, P("fsdp"))
    with pytest.raises(ValueError, match="the mesh has no axis 'tpp'"):
        DOORS[door](P(("fsdp", "sp", "tpp")), mesh, ["sp"])


def test_a_rule_declares_its_own(mesh):
    rules = [("a", sr.RuleSpec(("fsdp", "sp"), optional_axes=["sp"])), (".*", ("tp", "sp"))]
    with pytest.raises(ValueError, match="(?s)^1 leaf .* b  shape .* no axis 'sp'"):
        sr.named_shardings(TREE, rules, mesh)
    found = sr.named_shardings(TREE, sr.Rules(rules, optional_axes=("sp",)), mesh)
    assert found["a"]["kernel"].spec == P("fsdp", None)
    assert found["b"].spec == P("tp", None)


def test_a_spec_of_shapes_names_an_axis_too(mesh):
    rules = [(".*", sr.fsdp("fdsp", min_bytes=0))]
    with pytest.raises(ValueError, match="did you mean 'fsdp'"):
        sr.named_shardings(TREE, rules, mesh)
    assert sr.named_shardings(TREE, sr.Rules(rules, optional_axes=["fdsp"]), mesh)["b"].spec == P()


def test_more_than_twenty_are_counted():
    tree = {f"w{index:02}": ARRAY for index in range(1, 24)}
    on = {"tp": 2}
    for rules in (rules_of(P("nope")), P("nope")):
        told = r"^23 leaves(?s:.*)    w20 .*\n.*\n    \.\.\. and 3 more leaves$"
        with pytest.raises(ValueError, match=told):
            sr.named_shardings(tree, rules, on)
        with pytest.raises(ValueError, match=r"\.\.\. and 5 more patterns"):
            sr.plan(tree, rules, on).shardings()


def test_a_logical_rule_that_has_lost_its_axes_leaves_the_name_to_the_next():
    """As an axis of one device would, it takes nothing from the rules after it."""
    rules = [("embed", "sp"), ("embed", "tp")]
    for optional, spec in ((["sp"], P("tp", None)), ([], None)):
        given = sr.LogicalRules(rules, optional_axes=optional)
        plan = sr.plan(TREE, given, {"tp": 2}, names=NAMES)
        if spec is None:
            assert {one.kind for one in plan.check().at_least("error")} == {"unknown-axis"}
        else:
            found = sr.named_shardings(TREE, given, {"tp": 2}, names=NAMES)
            assert plan.specs()["b"] == found["b"].spec == spec


@pytest.mark.parametrize("door", PLACING)
def test_reduced_axes_are_placed_and_unreduced_ones_not(explicit, door):
    """The first ended in a bare error of JAX."""
    call = {**DOORS, **BY_SPECS}[door]
    reduced = NamedSharding(explicit, P("x", reduced={"y"}))
    for found in jax.tree.leaves(call(reduced.spec, explicit)):
        assert found.is_equivalent_to(reduced, 2)
        assert found.spec.reduced == {"y"}
    np.testing.assert_array_equal(sr.shard({"a": ARRAY}, reduced)["a"], ARRAY)
    with pytest.raises(ValueError, match=r"the leaf \['a'\].* cannot be placed .* sum over y"):
        call(P("x", unreduced={"y"}), explicit)


@pytest.mark.parametrize("tag", ["reduced", "unreduced"])
@pytest.mark.parametrize("door", [door for door in {**DOORS, **BY_SPECS} if "names" not in door])
def test_one_that_cuts_nothing_and_that_the_mesh_lacks(explicit, door, tag):
    with pytest.raises(ValueError, match="the mesh has no axis 'z'") as caught:
        {**DOORS, **BY_SPECS}[door](P("x", **{tag: {"z"}}), explicit)
    for part in ("\n    a/kernel", "(8, 8)", f"{tag}=['z']"):
        assert part in str(caught.value)


@pytest.mark.skipif(
    (0, 8) <= jax.__version_info__ < (0, 12), reason="JAX 0.10 takes them outside jit, and no error ends it"
)
@pytest.mark.parametrize("make", [np.asarray, jax.numpy.asarray], ids=["numpy", "jax"])
def test_constraints_outside_jit_ended_in_a_bare_error_of_jax(explicit, make):
    given, spec = {"b": make(ARRAY), "a": make(ARRAY)}, P("x", unreduced={"y"})
    with pytest.raises(ValueError, match=r"the leaf \['a'\] cannot be placed .* sum over y"):
        sr.with_sharding_constraint(given, [("a", spec), ("b", P("x"))], explicit)


def test_a_constraint_to_the_unreduced_axes_that_an_array_has_keeps_it(explicit):
    factors = [jax.device_put(ARRAY, NamedSharding(explicit, spec)) for spec in (P("x", "y"), P("y"))]
    target = NamedSharding(explicit, P("x", None, unreduced={"y"}))
    sums = jax.jit(lambda a, b: jax.numpy.einsum("ij,jk->ik", a, b, out_sharding=target))(*factors)
    assert sr.with_sharding_constraint({"a": sums}, target)["a"].sharding == target


def test_one_that_is_not_explicit_is_told_with_path_and_rule():
    for call in (sr.named_shardings, lambda *given: sr.plan(*given).shardings()):
        with pytest.raises(ValueError, match=r"(?s)rule 0.*Explicit"):
            call({"a": ARRAY}, [("a", P(None, unreduced={"x"}))], {"x": 2})


def test_zero1_cuts_along_a_reduced_axis(explicit):
    """The moments are cut by what the parameter is whole along."""
    plan = sr.plan({"a": ARRAY}, [("a", P("x", reduced={"y"}))], explicit)
    assert plan.for_optimizer({"mu": {"a": ARRAY}}, zero1="y").specs()["mu"]["a"] == P("x", "y")
