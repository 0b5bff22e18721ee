"""haliax's axis mappings against haliax itself, where it is installed."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr

PARAMETERS = {"embed": ("data", "replica"), "mlp": "model", "heads": "model"}
COMPUTE = {"batch": ["replica", "data"], "mlp": "model", "heads": "model"}
MESH = {"replica": 1, "data": 2, "model": 2}
AXES = [("embed", "mlp"), ("mlp",), (), ("kv", "heads", "embed"), ("batch", "position", "embed")]
mappings = pytest.mark.parametrize("mapping", [PARAMETERS, COMPUTE], ids=["parameters", "compute"])


@pytest.fixture(scope="module")
def hax():
    return pytest.importorskip("haliax", reason="haliax is not installed", exc_type=ImportError)


@pytest.fixture
def tree(hax):
    batch, embed, mlp, kv = (hax.Axis(n, 8) for n in ("batch", "embed", "mlp", "kv"))
    abstract = jax.eval_shape(
        lambda: {
            "up": hax.nn.Linear.init(embed, (kv, mlp), key=jax.random.key(0)),
            "norm": hax.ones(embed),
            "x": hax.ones((batch, embed)),
        }
    )
    return {**abstract, "plain": jax.ShapeDtypeStruct((3,), "float32")}


@mappings
@pytest.mark.parametrize("axes", AXES)
def test_specs_of_axes_are_those_of_haliax(hax, axes, mapping):
    theirs = hax.partitioning.pspec_for_axis([hax.Axis(name, 8) for name in axes], mapping)
    rules = sr.LogicalRules(mapping, sr.dialects.HALIAX)
    assert sr.logical_to_mesh(P(*axes), rules) == theirs
    shape = jax.ShapeDtypeStruct((8,) * len(axes), "float32")
    plan = sr.plan({"w": shape}, rules, MESH, names={"w": axes})
    assert P(*plan.specs()["w"]) == theirs


@mappings
def test_a_plan_of_named_arrays_is_what_haliax_infers(hax, tree, mapping):
    rules = sr.LogicalRules(mapping, sr.dialects.HALIAX)
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH))
    plan = sr.plan(tree, rules, mesh)
    assert set(plan.paths) == {"norm", "plain", "up/weight", "up/bias", "x"}
    theirs = hax.partitioning.infer_resource_partitions(tree, mapping, preserve_existing_shardings=False, mesh=mesh)
    for ours in (plan.shardings(), sr.named_shardings(tree, rules, mesh)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        both = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        assert all(one.is_equivalent_to(other, 3) for one, other in both)
    assert [finding.paths for finding in plan.check() if finding.kind == "unnamed"] == [("plain",)]


def test_arrays_are_placed_as_haliax_places_them(hax, mesh):
    embed, mlp = hax.Axis("embed", 8), hax.Axis("mlp", 16)
    module = hax.nn.Linear.init(embed, mlp, key=jax.random.key(0))
    mapping = {"embed": "fsdp", "mlp": "tp"}
    theirs = hax.shard(module, mapping, mesh)
    ours = sr.shard(module, sr.LogicalRules(mapping, sr.dialects.HALIAX), mesh)
    assert ours.weight.array.sharding.is_equivalent_to(theirs.weight.array.sharding, 2)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


def test_what_jax_would_refuse_is_an_error():
    rules = sr.LogicalRules({"mlp": "model", "heads": "model", "far": "absent"}, sr.dialects.HALIAX)
    for names, shape in ((("heads", "mlp"), (8, 8)), (("mlp",), (7,)), (("far",), (8,))):
        leaf = jax.ShapeDtypeStruct(shape, "float32")
        plan = sr.plan({"w": leaf}, rules, MESH, names={"w": names})
        assert plan.kinds[0].status == "misfit", names
        with pytest.raises(ValueError, match="w"):
            plan.specs()
