"""compat.flax_linen_spmd beside the installed flax; and the same functions of the package."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import flax_linen_spmd as ours
from tests.support import corpus
from tests.support.logical_names import ARRAYS, ENTRIES, RULES

theirs = pytest.importorskip("flax.linen.spmd", reason="flax is not installed")
meta = pytest.importorskip("flax.core.meta")
NEW_FLAX = pytest.mark.skipif(
    not hasattr(meta, "global_mesh_defined"),
    reason="a flax that constrains nothing on CPU and takes UNCONSTRAINED for a name",
)


def outcome(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error)


def entries(result):
    return result if isinstance(result, type) else tuple(result)


@NEW_FLAX
@given(ARRAYS, RULES, st.sampled_from([tuple, list, lambda names: P(*names)]))
def test_logical_to_mesh_axes(names, rules, made):
    expected = outcome(theirs.logical_to_mesh_axes, made(names), rules)
    assert entries(outcome(ours.logical_to_mesh_axes, made(names), rules)) == entries(expected)


@NEW_FLAX
@given(st.lists(st.one_of(ENTRIES, st.just(("fsdp", "tp")), st.just(("dp",))), max_size=4), RULES)
def test_mesh_axes_among_the_names(names, rules):
    expected = outcome(theirs.logical_to_mesh_axes, tuple(names), rules)
    assert entries(outcome(ours.logical_to_mesh_axes, tuple(names), rules)) == entries(expected)


def test_no_names_and_no_rules():
    for module in (theirs, ours):
        assert module.logical_to_mesh_axes(None, [("a", "b")]) is None
        assert tuple(module.logical_to_mesh_axes(("a", None), [])) == (None, None)
        with module.logical_axis_rules([("a", "x")]) if module is ours else _theirs_rules():
            assert tuple(module.logical_to_mesh_axes(("a",))) == ("x",)


def _theirs_rules():
    from flax.core.spmd import logical_axis_rules

    return logical_axis_rules([("a", "x")])


LOGICAL_RULE_SETS = corpus.rule_sets("logical")
MAXTEXT = [name for name in corpus.manifest_names() if name.startswith("maxtext-")]


@pytest.mark.parametrize("rule_set", LOGICAL_RULE_SETS)
@pytest.mark.parametrize("model", MAXTEXT)
def test_real_rules_on_real_models(model, rule_set):
    tree = {name: P(*axes) for name, axes in corpus.logical_axes(model).items()}
    rules = corpus.logical_rules(rule_set)
    expected = theirs.logical_to_mesh(tree, rules)
    assert ours.logical_to_mesh(tree, rules) == expected
    assert sr.logical_to_mesh(tree, rules) == expected
    axes = sorted({a for spec in expected.values() for e in spec for a in _axes(e)})
    abstract = sr.resolve_mesh(dict.fromkeys(axes or ["x"], 2))
    shardings = theirs.logical_to_mesh_sharding(tree, abstract, rules)
    assert ours.logical_to_mesh_sharding(tree, abstract, rules) == shardings
    native = sr.logical_to_mesh_sharding(tree, abstract, rules)
    assert native == shardings
    assert len({id(s) for s in native.values()}) == len({s.spec for s in native.values()})


def _axes(entry):
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def test_many_rules_and_many_mesh_axes():
    assert len(corpus.logical_rules("maxtext-0.2.5__base")) == 80


BAD = [
    (("a", "a"), [("a", "x")]),
    (("a", "b"), [("a", "x", "y")]),
    (("a", "b"), ["ab", "a"]),
    (("a", "b"), {"a": "x"}),
    (("a", "b"), [("a",)]),
]


@pytest.mark.parametrize(("names", "rules"), BAD)
def test_flaxs_errors(names, rules):
    expected = outcome(theirs.logical_to_mesh_axes, names, rules)
    if isinstance(expected, type):
        assert issubclass(outcome(ours.logical_to_mesh_axes, names, rules), expected)
    else:  # flax takes the two letters of a string for a pair
        with pytest.raises(ValueError, match="logical axis rule 0 is 'ab'"):
            ours.logical_to_mesh_axes(names, rules)


def test_a_name_alone_is_no_tuple_of_its_letters():
    rules = [("batch", "fsdp"), ("b", "tp")]
    assert theirs.logical_to_mesh_axes("batch", rules) != P("fsdp")
    with pytest.raises(TypeError, match="the logical axis names are 'batch' \\(a str\\)"):
        ours.logical_to_mesh_axes("batch", rules)
    assert ours.logical_to_mesh_axes(("batch",), rules) == P("fsdp")


class TestConstraint:
    RULES = (("batch", "fsdp"), ("heads", "tp"), ("embed", "fsdp"))

    @NEW_FLAX
    @pytest.mark.parametrize("names", [("batch", "heads"), ("batch", "embed"), (None, "heads"), ()])
    @pytest.mark.parametrize("fallback", list(ours.RulesFallback))
    @pytest.mark.parametrize("jitted", [False, True])
    def test_beside_flax(self, mesh, names, fallback, jitted):
        x = jnp.zeros((8, 8))
        results = []
        for module in (theirs, ours, sr):
            function = module.with_logical_constraint
            choice = theirs.RulesFallback(fallback.value) if module is theirs else fallback
            call = lambda x, f=function, c=choice: f(x, names, self.RULES, mesh, c)  # noqa: E731
            result = outcome(jax.jit(call) if jitted else call, x)
            results.append(result if isinstance(result, type) else result.sharding)
        expected, *rest = results
        for got in rest:
            if isinstance(expected, type):
                assert got is expected is ValueError
            else:
                assert got.is_equivalent_to(expected, 2)

    def test_nothing_without_rules_or_mesh(self, mesh):
        x = jnp.zeros((8, 8))
        for module in (theirs, ours, sr):
            assert module.with_logical_constraint(x, ("batch", None), (), mesh) is x
            assert module.with_logical_constraint(x, None, self.RULES, mesh) is x
            assert module.with_logical_constraint(x, ("batch", None), self.RULES) is x

    @NEW_FLAX
    def test_trees(self, mesh):
        tree = {"a": jnp.zeros((8, 8)), "b": [jnp.zeros((4, 4)), jnp.zeros((4, 4))]}
        names = {"a": ("batch", "heads"), "b": ("embed", None)}
        results = [
            m.with_logical_constraint(tree, names, self.RULES, mesh) for m in (theirs, ours, sr)
        ]
        shardings = [[x.sharding for x in jax.tree.leaves(result)] for result in results]
        for other in shardings[1:]:
            assert all(a.is_equivalent_to(b, 2) for a, b in zip(shardings[0], other, strict=True))


class TestBoxes:
    RULES = (("embed", "fsdp"), ("mlp", "tp"))

    @pytest.mark.parametrize("module", [theirs, ours], ids=["flax", "ours"])
    def test_specs_and_shardings_of_trees_of_boxes(self, mesh, module):
        tree = {
            "w": module.LogicallyPartitioned(jnp.zeros((8, 6)), ("embed", "mlp")),
            "b": [module.LogicallyPartitioned(jnp.zeros(6), ("mlp",))],
        }
        specs = sr.logical_to_mesh(tree, self.RULES)
        assert specs == {"w": P("fsdp", "tp"), "b": [P("tp")]}
        shardings = sr.logical_to_mesh_sharding(tree, mesh, self.RULES)
        assert shardings["w"] == NamedSharding(mesh, P("fsdp", "tp"))
        odd = module.LogicallyPartitioned(jnp.zeros((6, 6)), ("embed", "mlp"))
        corrected = sr.logical_to_mesh_sharding(odd, mesh, self.RULES, correction=sr.Correction())
        assert corrected.spec == P(None, "tp")

    @NEW_FLAX
    def test_unboxing_constrains(self, mesh):
        results = []
        for module in (theirs, ours):
            box = module.LogicallyPartitioned(
                jnp.zeros((8, 8)), ("embed", "mlp"), mesh=mesh, rules=self.RULES
            )
            results.append(box.unbox().sharding)
            assert box.unbox(apply_constraint=False) is box.value
        assert results[0].is_equivalent_to(results[1], 2)

    def test_metadata_for_nnx(self):
        for name in ("to_nnx_metadata",):
            boxes = [
                m.LogicallyPartitioned(1, ("embed",), rules=self.RULES) for m in (theirs, ours)
            ]
            metadata = [dict(getattr(box, name)()) for box in boxes]
            if "out_sharding" not in metadata[0]:
                pytest.skip("an older flax, with other names")
            assert metadata[0] == metadata[1]
            assert ours.LogicallyPartitioned.from_nnx_metadata(metadata[1]) == boxes[1]

    def test_initializers(self):
        boxes = [
            m.with_logical_partitioning(
                jax.nn.initializers.ones, ("embed", None), rules=self.RULES
            )(jax.random.key(0), (2, 3))
            for m in (theirs, ours)
        ]
        assert boxes[0].names == boxes[1].names
        assert boxes[0].rules == boxes[1].rules
        stacked = [meta.add_axis(box, 0, {meta.PARTITION_NAME: "layers"}) for box in boxes]
        assert [box.names for box in stacked] == [("layers", "embed", None)] * 2

    def test_a_linen_model_with_our_boxes(self, mesh):
        linen = pytest.importorskip("flax.linen")
        variables = []
        for module in (theirs, ours):
            init = module.with_logical_partitioning(linen.initializers.ones, ("embed", "mlp"))
            model = linen.Dense(8, kernel_init=init)
            variables.append(jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 4))))
        specs = [linen.get_partition_spec(v) for v in variables]
        assert specs[0] == specs[1]
        shardings = [linen.logical_to_mesh_sharding(s, mesh, self.RULES) for s in specs]
        assert sr.logical_to_mesh_sharding(specs[0], mesh, self.RULES) == shardings[0]


def test_without_flax():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "import jax, shardrules as sr\n"
        "from shardrules.compat import flax_linen_spmd as spmd\n"
        "box = spmd.LogicallyPartitioned(jax.numpy.ones((4, 4)), ('embed', None))\n"
        "with spmd.logical_axis_rules([('embed', 'tp')]):\n"
        "    assert tuple(sr.logical_to_mesh({'w': box})['w']) == ('tp', None)\n"
        "    assert tuple(spmd.logical_to_mesh_axes(('embed',))) == ('tp',)\n"
        "assert box.unbox() is box.value\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
