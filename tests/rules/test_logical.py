"""Logical axes: what the package adds to flax, whose own is in tests/compat; and haliax's mappings beside haliax."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import flax_linen_spmd as ours
from tests.support.contexts import legacy

RULES = (("batch", "fsdp"), ("heads", "tp"), ("embed", "fsdp"))
MESH = {"fsdp": 4, "tp": 2}
X = np.zeros((8, 8), "float32")
TWICE = r"Dimensions \('a',\) occur more than once .*\('a', 'a'\)"
UNBOXED = r"nothing in the tree has logical axis names; .*boxes"
A_RULE = sr.types.RulesFallback.RAISE_ERROR


def shardings(names, rules, mesh=MESH, shape=(8, 8), dialect=sr.dialects.LINEN, **options):
    tree = {"w": jax.ShapeDtypeStruct(shape, "int8")}
    rules = sr.LogicalRules(rules, dialect, **options)
    return sr.named_shardings(tree, rules, mesh, names={"w": names})["w"]


WRONG = {
    "a name twice": (lambda _: sr.logical_to_mesh(("a", "a"), RULES), TWICE),
    "a name twice in an array": (lambda _: shardings(("a", "a"), RULES), f"w  shape.*(?s:.*){TWICE}"),
    "arrays": (lambda _: sr.logical_to_mesh({"w": X, "b": X}, RULES), UNBOXED),
    "arrays on a mesh": (lambda _: sr.named_shardings({"w": X}, sr.LogicalRules(RULES), MESH), UNBOXED),
    "no mesh": (lambda _: shardings(("a",), RULES, None), "no mesh"),
    "an axis that the mesh lacks": (
        lambda _: shardings(("embed",), [("embed", "fspd")]),
        r"w  shape.*names \('embed',\)(?s:.*)did you mean 'fsdp'(?s:.*)'embed': rule 0 -> 'fspd' wins"),
    "a name without a rule that stays": (
        lambda _: shardings(("hedas",), RULES, dialect=sr.dialects.FLAX_CORE), "no axis 'hedas'"),
    "indivisible": (
        lambda _: shardings(("heads", "embed"), [("heads", "fsdp")], shape=(6, 8),
                            correction=sr.Correction(indivisible="error")),
        r"1 leaf cannot(?s:.*)w  shape \(6, 8\)  names \('heads', 'embed'\)(?s:.*)dim 0 of size 6 is not "
        r"divisible by fsdp=4(?s:.*)dim 0 'heads': rule 0 -> 'fsdp' wins"),
    "a constraint to a wrong axis": (
        lambda mesh: sr.with_logical_constraint(X, ("embed",), [("embed", "fspd")], mesh),
        r"names \('embed',\) cannot.*(?s:.*)rule 0 .*'fspd' \(did you mean 'fsdp'"),
    "a constraint by a name without a rule": (
        lambda mesh: sr.with_logical_constraint(X, ("batch", "embed"), RULES, mesh, A_RULE),
        r"\['embed'\] got no mesh axes(?s:.*)dim 1 'embed': rule 2 -> 'fsdp' loses: a mesh axis of it cuts dim 0 'batch'"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_say_what_is_wrong(case, mesh):
    call, match = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=match):
        call(mesh)


@pytest.mark.parametrize("types", [("Explicit", "Explicit"), ("Explicit", "Auto"), "legacy"])
def test_constraints_in_every_context(types):
    devices = np.array(jax.devices()[:8]).reshape(4, 2)
    context, names = (legacy, ("Auto", "Auto")) if types == "legacy" else (jax.set_mesh, types)
    axis_types = tuple(getattr(jax.sharding.AxisType, name) for name in names)
    mesh = Mesh(devices, ("fsdp", "tp"), axis_types=axis_types)
    with context(mesh), sr.logical_axis_rules(RULES):
        for module in (sr, ours):
            call = jax.jit(lambda x, m=module: m.with_logical_constraint(x, ("batch", "heads")))
            x = call(jnp.zeros((8, 8)))
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)


@pytest.mark.parametrize("indivisible", ["drop", "prefix", "error"])
@pytest.mark.parametrize("dialect", [sr.dialects.LINEN, sr.dialects.MAXTEXT], ids=repr)
def test_a_constraint_follows_the_policy_of_its_rules(indivisible, dialect, mesh):
    """It took the dialect alone: JAX refused 6 heads on 8 devices, and an axis that a mesh may lack."""
    policy = {"correction": sr.Correction(indivisible=indivisible), "optional_axes": ["sp"]}
    rules = sr.LogicalRules([("batch", "sp"), *BOTH], dialect, **policy)
    tree, names = {"b": jnp.ones(8), "n": 3, "w": jnp.ones((6, 8))}, ("heads", "embed")

    def constrained(tree):  # flax takes the rules in force for pairs
        with sr.logical_axis_rules(rules):
            return sr.with_logical_constraint(tree, {"b": None, "n": (), "w": names}, mesh=mesh)["w"]

    def expected():
        return sr.named_shardings(tree["w"], rules, mesh, names=names)

    for call in (jax.jit(constrained), constrained):
        if indivisible == "error":
            with pytest.raises(ValueError, match=r"dim 0 of size 6 is not divisible by tp=2 \* fsdp=4"):
                call(tree)
            continue
        assert call(tree).sharding.is_equivalent_to(expected(), 2)
        assert [*expected().spec, None][0] == (None if indivisible == "drop" else "tp")


HEADS = [("heads", "fsdp"), ("heads", "tp"), ("embed", "fsdp")]
BOTH = [("heads", ("tp", "fsdp")), ("heads", None), ("embed", "fsdp")]
SEQ = [("heads", ("sp", "fsdp")), ("heads", "tp")]
MAXTEXT = sr.dialects.MAXTEXT


@pytest.mark.parametrize(
    ("rules", "shape", "options", "spec"),
    [
        (HEADS, (8, 8), {}, P("fsdp", None)),
        (HEADS, (6, 8), {}, P("tp", "fsdp")),  # rule 0 loses to rule 1, and "fsdp" is free
        (HEADS, (5, 8), {}, P(None, "fsdp")),
        (HEADS, (5, 7), {}, P(None, None)),
        (HEADS, (6, 8), {"indivisible": "prefix"}, P("tp", "fsdp")),  # it keeps nothing
        (HEADS, (6, 8), {"indivisible": "drop_axis"}, P("tp", "fsdp")),
        (BOTH, (6, 8), {"indivisible": "drop"}, P(None, "fsdp")),  # rule 0 loses to None
        (BOTH, (6, 8), {"indivisible": "prefix"}, P("tp", "fsdp")),
        (BOTH, (6, 8), {"indivisible": "drop_axis"}, P("tp", "fsdp")),
        (BOTH, (6, 8), {"indivisible": "keep"}, P(("tp", "fsdp"), None)),
        (BOTH, (6, 8), {"dialect": MAXTEXT}, P("tp", None)),  # it wins, and is cut
        (SEQ, (8, 8), {"optional_axes": ["sp"]}, P("fsdp", None)),
        ([("heads", "sp"), *HEADS[1:]], (8, 8), {"optional_axes": ["sp"]}, P("tp", "fsdp")),
    ],
)
def test_rules_that_do_not_fit(rules, shape, options, spec):
    options = dict(options)
    if indivisible := options.pop("indivisible", None):
        options["correction"] = sr.Correction(indivisible=indivisible, pad=False)
    assert shardings(("heads", "embed"), rules, shape=shape, **options).spec == spec


def test_the_rules_of_each_thread_are_its_own():
    with sr.logical_axis_rules([("a", "x")]), ThreadPoolExecutor(1) as pool:
        assert pool.submit(sr.logical_to_mesh, ("a",)).result() == P(None)
        with sr.logical_axis_rules([("a", "y")]):
            assert sr.logical_to_mesh(("a",)) == P("y")
        assert sr.logical_to_mesh(("a",)) == P("x")
    assert sr.logical_to_mesh(("a",)) == P(None)


VALUE_RULES = [("b", ("dp", "fsdp")), ("embed", ["fsdp"]), ("embed", "tp"), ("kv", None), ("q", [])]


def test_they_are_a_value():
    rules, same = sr.LogicalRules(VALUE_RULES), sr.LogicalRules(tuple(map(tuple, VALUE_RULES)))
    assert (rules, hash(rules)) == (same, hash(same))
    assert tuple(rules)[1:] == (("embed", ("fsdp",)), ("embed", "tp"), ("kv", None), ("q", None))
    assert (rules[2], len(rules)) == (("embed", "tp"), 5)
    mapping = {"embed": "fsdp", "heads": ("tp", "sp")}
    assert sr.LogicalRules(mapping) == sr.LogicalRules(list(mapping.items()))
    other = sr.LogicalRules(VALUE_RULES, sr.dialects.MAXTEXT)
    assert other != rules
    assert pickle.loads(pickle.dumps(other)) == other
    with pytest.raises(AttributeError):
        rules.dialect = sr.dialects.MAXTEXT
    with pytest.raises(TypeError, match=r"rules must be rules for paths.*named_shardings"):
        sr.match_partition_rules(rules, {"w": X})


def test_their_dialect_counts_if_none_is_given():
    rules = sr.LogicalRules([("embed", "tp"), ("embed", "fsdp")], sr.dialects.FLAX_CORE)
    assert sr.logical_to_mesh(("embed",), rules) == P("fsdp")
    assert sr.logical_to_mesh(("embed",), rules, dialect=sr.dialects.LINEN) == P("tp")
    with sr.logical_axis_rules(rules):
        assert sr.logical_to_mesh(("embed",)) == P("fsdp")


PARAMETERS = {"embed": ("data", "replica"), "mlp": "model", "heads": "model"}
COMPUTE = {"batch": ["replica", "data"], "mlp": "model", "heads": "model"}
HALIAX_MESH = {"replica": 1, "data": 2, "model": 2}
HALIAX_AXES = [("embed", "mlp"), ("mlp",), (), ("kv", "heads", "embed"), ("batch", "position", "embed")]
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
@pytest.mark.parametrize("axes", HALIAX_AXES)
def test_specs_of_axes_are_those_of_haliax(hax, axes, mapping):
    theirs = hax.partitioning.pspec_for_axis([hax.Axis(name, 8) for name in axes], mapping)
    rules = sr.LogicalRules(mapping, sr.dialects.HALIAX)
    assert sr.logical_to_mesh(P(*axes), rules) == theirs
    shape = jax.ShapeDtypeStruct((8,) * len(axes), "float32")
    plan = sr.plan({"w": shape}, rules, HALIAX_MESH, names={"w": axes})
    assert P(*plan.specs()["w"]) == theirs


@mappings
def test_a_plan_of_named_arrays_is_what_haliax_infers(hax, tree, mapping):
    rules = sr.LogicalRules(mapping, sr.dialects.HALIAX)
    mesh = jax.sharding.AbstractMesh(tuple(HALIAX_MESH.values()), tuple(HALIAX_MESH))
    plan = sr.plan(tree, rules, mesh)
    assert set(plan.paths) == {"norm", "plain", "up/weight", "up/bias", "x"}
    theirs = hax.partitioning.infer_resource_partitions(tree, mapping, preserve_existing_shardings=False, mesh=mesh)
    for found in (plan.shardings(), sr.named_shardings(tree, rules, mesh)):
        assert jax.tree.structure(found) == jax.tree.structure(theirs)
        both = zip(jax.tree.leaves(found), jax.tree.leaves(theirs), strict=True)
        assert all(one.is_equivalent_to(other, 3) for one, other in both)
    assert [finding.paths for finding in plan.check() if finding.kind == "unnamed"] == [("plain",)]


def test_what_jax_would_refuse_is_an_error():
    rules = sr.LogicalRules({"mlp": "model", "heads": "model", "far": "absent"}, sr.dialects.HALIAX)
    for names, shape in ((("heads", "mlp"), (8, 8)), (("mlp",), (7,)), (("far",), (8,))):
        leaf = jax.ShapeDtypeStruct(shape, "float32")
        plan = sr.plan({"w": leaf}, rules, HALIAX_MESH, names={"w": names})
        assert plan.kinds[0].status == "misfit", names
        with pytest.raises(ValueError, match="w"):
            plan.specs()
