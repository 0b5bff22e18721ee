"""compat.flax_linen_spmd, and the functions of the package, beside the installed flax."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import flax_linen_spmd as ours
from tests.support import corpus
from tests.support.contexts import outcome

linen = pytest.importorskip("flax.linen", reason="flax is not installed")
theirs = pytest.importorskip("flax.linen.spmd")
meta = pytest.importorskip("flax.core.meta")

NAMES = ["batch", "embed", "heads", "mlp", "layers", "vocab"]
AXES = ["dp", "fsdp", "tp", "sp"]
MESH_AXES = st.one_of(st.none(), st.sampled_from(AXES), st.lists(st.sampled_from(AXES), max_size=3).map(tuple))
RULES = st.lists(st.tuples(st.sampled_from(NAMES), MESH_AXES), max_size=14)
ENTRIES = st.one_of(st.none(), st.sampled_from(NAMES), st.just(P.UNCONSTRAINED))
ARRAYS = st.lists(st.one_of(ENTRIES, st.sampled_from([("fsdp", "tp"), ("dp",)])), max_size=5)


@given(ARRAYS, RULES, st.sampled_from([tuple, list, lambda names: P(*names)]))
def test_logical_to_mesh_axes(names, rules, made):
    expected = outcome(theirs.logical_to_mesh_axes, made(names), rules)
    assert outcome(ours.logical_to_mesh_axes, made(names), rules) == expected
    with ours.logical_axis_rules(rules):
        assert theirs.get_logical_axis_rules() == rules
        assert outcome(ours.logical_to_mesh_axes, made(names)) == expected


@given(st.lists(ARRAYS, max_size=4), RULES)
def test_logical_to_mesh(arrays, rules):
    tree = {"a": [P(*names) for names in arrays], "b": None}
    expected = outcome(theirs.logical_to_mesh, tree, rules)
    for native in (ours, sr):
        assert outcome(native.logical_to_mesh, tree, rules) == expected


@given(st.lists(ARRAYS, max_size=4), RULES)
def test_the_dialect_of_flax_core(arrays, rules):
    from flax.core import spmd

    tree = [P(*names) for names in arrays]
    got = sr.logical_to_mesh(tree, rules, dialect=sr.dialects.FLAX_CORE)
    assert got == [spmd.get_pspec(names, rules) for names in tree]


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="flax of that day keeps names otherwise")
def test_shardings_of_nnx_variables(mesh):
    from flax import nnx
    from flax.core import spmd

    rules = [("embed", "fsdp"), ("mlp", "tp"), ("kv", None)]
    names = {"shorter": ("embed", "kv"), "whole": ("kv", None), "several": ("mlp", "kv"), "scalar": ()}
    params = {
        path: nnx.Param(jax.ShapeDtypeStruct((64, 8, 8)[: len(of) + (path == "shorter")], "float32"))
        for path, of in names.items()
    }
    for path, param in params.items():
        param.set_metadata(out_sharding=names[path])
    state = nnx.State(params)
    with spmd.logical_axis_rules(rules):
        theirs = nnx.get_named_sharding(state, mesh)
    ours = sr.named_shardings(state, sr.LogicalRules(rules, sr.dialects.FLAX_CORE), mesh)
    specs = sr.logical_to_mesh(state, rules, dialect=sr.dialects.FLAX_CORE)
    for path in names:
        assert ours[path].get_value() == theirs[path].get_value(), path
        assert specs[path].get_value() == theirs[path].get_value().spec, path


MAXTEXT = [name for name in corpus.manifest_names() if name.startswith("maxtext-")]


@pytest.mark.parametrize("model", MAXTEXT)
def test_real_rules_on_real_models(model):
    tree = {name: P(*axes) for name, axes in corpus.logical_axes(model).items()}
    assert len(corpus.logical_rules("maxtext-0.2.5__base")) == 80
    for rule_set in corpus.rule_sets("logical"):
        rules = corpus.logical_rules(rule_set)
        expected = theirs.logical_to_mesh(tree, rules)
        for native in (ours, sr):
            assert native.logical_to_mesh(tree, rules) == expected
        axes = {axis for spec in expected.values() for axis in jax.tree.leaves(tuple(spec))}
        mesh = sr.resolve_mesh(dict.fromkeys(sorted(axes) or ["x"], 2))
        shardings = ours.logical_to_mesh_sharding(tree, mesh, rules)
        assert shardings == theirs.logical_to_mesh_sharding(tree, mesh, rules)
        values = shardings.values()
        assert len({id(one) for one in values}) == len({one.spec for one in values})


EDGES = [
    (None, [("a", "b")]), (("a", None), []), (("a", "a"), [("a", "x")]),
    (("a", "b"), [("a", "x", "y")]), (("a", "b"), {"a": "x"}), (("a", "b"), [("a",)]),
]  # fmt: skip


def test_flaxs_edges_and_errors():
    for names, rules in EDGES:
        expected, got = (outcome(m.logical_to_mesh_axes, names, rules) for m in (theirs, ours))
        assert issubclass(got, expected) if isinstance(expected, type) else got == expected
    # Flax takes the letters of strings; tests/compat/test_flax_core.py has our errors.
    assert theirs.logical_to_mesh_axes(("a", "b"), ["ab"]) is not None
    assert theirs.logical_to_mesh_axes("batch", [("batch", "x"), ("b", "y")]) is not None


def test_a_wrong_mesh_axis_names_the_rule(mesh):
    tree = {"a": P("heads"), "b": [P("heads", "embed")]}
    with pytest.raises(ValueError, match=r"names \('heads', 'embed'\) cannot be sharded") as caught:
        ours.logical_to_mesh_sharding(tree, mesh, [("heads", "tp"), ("embed", "fspd")])
    rule = "dim 1: rule 1 ('embed', 'fspd'): the mesh has no axis 'fspd' (did you mean 'fsdp'?)"
    assert rule in str(caught.value)


AXIS_RULES = (("batch", "fsdp"), ("heads", "tp"), ("embed", "fsdp"))


@pytest.mark.parametrize(
    "names",
    [
        ("batch", "heads"), ("batch", "embed"), (None, "heads"), (), ("batch", "heads", None),
        {"a": ("batch", "heads"), "b": ("embed", None)},
        {"a": P("batch"), "b": None},  # flax replicates "b"
    ],
)  # fmt: skip
@pytest.mark.parametrize("fallback", list(theirs.RulesFallback), ids=lambda one: one.name)
@pytest.mark.parametrize("jitted", [False, True])
def test_constraints(mesh, names, fallback, jitted):
    by_tp = jax.device_put(jnp.zeros((8, 8)), jax.NamedSharding(mesh, P("tp")))
    tree = {"a": by_tp, "b": by_tp}

    def result(module):
        def call(tree):
            return module.with_logical_constraint(tree, names, AXIS_RULES, mesh, fallback)

        return outcome(jax.jit(call) if jitted else call, tree)

    with jax.set_mesh(mesh):
        expected, *answers = map(result, (theirs, ours, sr))
    if isinstance(names, dict) and None in names.values():
        assert answers.pop()["b"].sharding.is_equivalent_to(by_tp.sharding, 2)
        if not jitted:  # where flax has an error
            return
    for got in answers:
        if isinstance(expected, type):
            assert got is expected is ValueError
            continue
        for key, array in expected.items():
            assert got[key].sharding.is_equivalent_to(array.sharding, 2)


def test_no_constraint_without_rules_or_mesh(mesh):
    x = jnp.zeros((8, 8))
    for module in (theirs, ours, sr):
        assert module.with_logical_constraint(x, ("batch", None), (), mesh) is x
        assert module.with_logical_constraint(x, None, AXIS_RULES, mesh) is x
        assert module.with_logical_constraint(x, ("batch", None), AXIS_RULES) is x


def init_of(module, rules=None, mesh=None):
    ones = jax.nn.initializers.ones
    return module.with_logical_partitioning(ones, ("embed", "heads"), mesh, rules)


def test_boxes(mesh):
    boxes = [init_of(m, AXIS_RULES, mesh)(jax.random.key(0), (8, 8)) for m in (theirs, ours)]
    assert [(box.names, box.rules, box.mesh) for box in boxes] == [(("embed", "heads"), AXIS_RULES, mesh)] * 2
    assert all(box.unbox(apply_constraint=False) is box.value for box in boxes)
    shardings = [box.unbox().sharding for box in boxes]
    assert shardings[0].is_equivalent_to(shardings[1], 2)
    stacked = [meta.add_axis(box, 0, {meta.PARTITION_NAME: "layers"}) for box in boxes]
    assert [box.names for box in stacked] == [("layers", "embed", "heads")] * 2
    theirs_for_nnx, ours_for_nnx = [dict(box.to_nnx_metadata()) for box in boxes]
    assert {**theirs_for_nnx, "value": 1} == {**ours_for_nnx, "value": 1}
    assert ours.LogicallyPartitioned.from_nnx_metadata(ours_for_nnx) == boxes[1]


def test_a_linen_model_with_our_boxes(mesh):
    models = [linen.Dense(8, kernel_init=init_of(module)) for module in (theirs, ours)]
    key, x = jax.random.key(0), jnp.ones((1, 8))
    variables = [jax.eval_shape(model.init, key, x) for model in models]
    specs = [linen.get_partition_spec(boxed) for boxed in variables]
    assert specs[0] == specs[1]
    expected = linen.logical_to_mesh_sharding(specs[0], mesh, AXIS_RULES)
    assert ours.logical_to_mesh_sharding(specs[1], mesh, AXIS_RULES) == expected
    for boxed in variables:
        assert sr.logical_to_mesh(boxed, AXIS_RULES) == linen.logical_to_mesh(specs[0], AXIS_RULES)
        assert sr.named_shardings(boxed, sr.LogicalRules(AXIS_RULES), mesh) == expected


def test_logical_rules_in_force_serve_flaxs_own_layers(mesh):
    """flax 0.12 takes only tuples and lists: all layers raised "Unknown axis rule"."""
    model = linen.Dense(8, use_bias=False, kernel_init=init_of(theirs))
    pairs = [("embed", "fsdp"), ("heads", "fsdp"), ("heads", "tp")]
    rules = sr.LogicalRules([*pairs, ("heads", None)], sr.dialects.FLAX_CORE)
    x, key = jnp.ones((8, 8)), jax.random.key(0)
    results = []
    for chosen in (rules, tuple(rules)):
        with jax.set_mesh(mesh), sr.logical_axis_rules(chosen):
            variables = jax.jit(lambda x: linen.unbox(model.init(key, x)))(x)
            constrained = jax.jit(lambda x: linen.with_logical_constraint(x, ("embed", "heads")))
            results.append((variables, jax.jit(model.apply)(model.init(key, x), x), constrained(x)))
            assert theirs.get_logical_axis_rules() == tuple(rules)
            # ours also know the dialect
            names = sr.logical_to_mesh(("embed", "heads"))
            assert names == P("fsdp", None if chosen is rules else "tp")
            with linen.logical_axis_rules(theirs.get_logical_axis_rules()):
                assert sr.logical_to_mesh(("embed", "heads")) == names
    assert theirs.get_logical_axis_rules() == ()
    of_rules, of_pairs = map(jax.tree.leaves, results)
    for array, other in zip(of_rules, of_pairs, strict=True):
        assert array.sharding.is_equivalent_to(other.sharding, array.ndim)
    assert of_rules[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, P("fsdp", "tp")), 2)
