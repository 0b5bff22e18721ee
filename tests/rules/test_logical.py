"""Logical axes: what the package adds to flax; tests/compat/test_flax_linen_spmd.py has what is the same."""

from __future__ import annotations

import threading
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import flax_linen_spmd as ours
from tests.support.contexts import legacy
from tests.support.logical_names import ARRAYS, RULES


def test_errors_say_what_is_wrong():
    with pytest.raises(
        ValueError, match=r"Dimensions \('a',\) occur more than once .*\('a', 'a'\)"
    ):
        sr.logical_to_mesh(("a", "a"), [("a", "x")])
    with pytest.raises(TypeError, match="the logical axis names are 'ab'"):
        sr.logical_to_mesh({"w": "ab"}, [("a", "x")])
    with pytest.raises(ValueError, match="logical axis rule 1 is"):
        sr.logical_to_mesh(("a",), [("a", "x"), ("b",)])
    with pytest.raises(ValueError, match="zz"):
        sr.logical_to_mesh_sharding(("a",), {"x": 2}, [("a", "zz")])
    with pytest.raises(ValueError, match="no mesh"):
        sr.logical_to_mesh_sharding(("a",), None, [("a", "zz")])


class TestConstraint:
    RULES = (("batch", "fsdp"), ("heads", "tp"), ("embed", "fsdp"))

    def test_the_error_explains(self, mesh):
        with pytest.raises(ValueError, match=r"\['embed'\] got no mesh axes") as caught:
            sr.with_logical_constraint(
                jnp.zeros((8, 8)), ("batch", "embed"), self.RULES, mesh,
                sr.types.RulesFallback.RAISE_ERROR,
            )  # fmt: skip
        assert "lost: a mesh axis of it is used by dim 0 'batch'" in str(caught.value)

    def test_explicit_and_mixed_meshes(self):
        for types in (("Explicit", "Explicit"), ("Explicit", "Auto")):
            axis_types = tuple(getattr(jax.sharding.AxisType, t) for t in types)
            mesh = Mesh(
                np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"), axis_types=axis_types
            )
            with jax.set_mesh(mesh), sr.logical_axis_rules(self.RULES):
                x = jax.jit(lambda x: sr.with_logical_constraint(x, ("batch", "heads")))(
                    jnp.zeros((8, 8))
                )
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)


class TestVariables:
    RULES = (("embed", "fsdp"), ("mlp", "tp"))

    def state(self):
        nnx = pytest.importorskip("flax.nnx")
        if not hasattr(nnx, "use_eager_sharding"):
            pytest.skip("an older flax, whose Variables are made otherwise")
        with nnx.use_eager_sharding(False):
            init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
            return nnx.state(nnx.Linear(8, 6, rngs=nnx.Rngs(0), kernel_init=init))

    def test_variables_hold_their_specs(self):
        from flax import nnx

        state = self.state()
        specs = sr.logical_to_mesh(state, self.RULES)
        assert specs["kernel"].get_value() == P("fsdp", "tp")
        # The bias has no names: replicated.
        assert jax.tree.leaves(specs) == [P(), P("fsdp", "tp")]
        assert sr.logical_to_mesh(nnx.get_partition_spec(state), self.RULES) == specs

    def test_shardings_place_the_state(self, mesh):
        state = self.state()
        shardings = sr.logical_to_mesh_sharding(state, mesh, self.RULES)
        placed = jax.device_put(state, shardings)
        assert placed["kernel"].get_value().sharding == NamedSharding(mesh, P("fsdp", "tp"))
        odd = sr.logical_to_mesh_sharding(
            state, {"fsdp": 3, "tp": 2}, self.RULES, correction=sr.Correction()
        )
        assert jax.tree.leaves(odd)[1].spec == P(None, "tp")


class TestWithShapes:
    MESH = MappingProxyType({"fsdp": 4, "tp": 2})

    def test_a_rule_that_does_not_divide_loses_to_the_next(self):
        rules = [("heads", "fsdp"), ("heads", "tp"), ("embed", "fsdp")]

        def of(shape):
            return tuple(
                sr.logical_to_mesh_sharding(
                    ("heads", "embed"), self.MESH, rules,
                    arrays=jax.ShapeDtypeStruct(shape, "int8"), correction=sr.Correction(),
                ).spec
            )  # fmt: skip

        assert of((8, 8)) == ("fsdp", None)
        assert of((6, 8)) == ("tp", "fsdp")
        assert of((5, 8)) == (None, "fsdp")
        assert of((5, 7)) == ()

    def test_one_object_for_each_names_and_shape(self):
        tree = [("embed",)] * 3
        arrays = [np.zeros(8), np.zeros(8), np.zeros(3)]
        a, b, c = sr.logical_to_mesh_sharding(
            tree, self.MESH, [("embed", "tp")], arrays=arrays, correction=sr.Correction()
        )
        assert a is b
        assert (tuple(a.spec), tuple(c.spec)) == (("tp",), ())

    def test_axes_that_the_mesh_does_not_have(self):
        rules = [("embed", ("stage", "tp"))]
        arrays = np.zeros(8)
        kept = sr.logical_to_mesh_sharding(
            ("embed",), self.MESH, rules, arrays=arrays,
            correction=sr.Correction(absent="drop_axis"),
        )  # fmt: skip
        assert tuple(kept.spec) == ("tp",)
        with pytest.raises(ValueError, match="the mesh has no axis 'stage'"):
            sr.logical_to_mesh_sharding(
                ("embed",), self.MESH, rules, arrays=arrays,
                correction=sr.Correction(absent="error"),
            )  # fmt: skip

    @pytest.mark.parametrize(
        ("indivisible", "expected"),
        [
            ("drop", (None, "fsdp")),  # rule 0 loses to rule 1, which says None
            ("prefix", ("tp", "fsdp")),  # and "fsdp" is free
            ("drop_axis", ("tp", "fsdp")),
            ("keep", (("tp", "fsdp"), None)),
        ],
    )
    def test_logical_rules_honour_every_policy(self, indivisible, expected):
        rules = [("heads", ("tp", "fsdp")), ("heads", None), ("embed", "fsdp")]
        sharding = sr.logical_to_mesh_sharding(
            ("heads", "embed"), self.MESH, rules,
            arrays=np.zeros((6, 8)), correction=sr.Correction(indivisible=indivisible),
        )  # fmt: skip
        assert tuple(sharding.spec) == expected

    @pytest.mark.parametrize("indivisible", ["prefix", "drop_axis"])
    def test_a_rule_that_keeps_nothing_loses_to_the_next(self, indivisible):
        sharding = sr.logical_to_mesh_sharding(
            ("heads",), self.MESH, [("heads", "fsdp"), ("heads", "tp")],
            arrays=np.zeros(6), correction=sr.Correction(indivisible=indivisible),
        )  # fmt: skip
        assert tuple(sharding.spec) == ("tp",)

    @pytest.mark.parametrize("dialect", [sr.dialects.LINEN, sr.dialects.FLAX_CORE])
    def test_indivisible_is_an_error_where_the_correction_says_so(self, dialect):
        with pytest.raises(ValueError, match="1 leaf cannot be sharded") as caught:
            sr.logical_to_mesh_sharding(
                {"wq": ("heads", "embed"), "b": ("embed",)}, self.MESH,
                [("heads", "fsdp"), ("embed", "tp")], dialect=dialect,
                arrays={"wq": np.zeros((6, 8)), "b": np.zeros(8)},
                correction=sr.Correction(indivisible="error"),
            )  # fmt: skip
        message = str(caught.value)
        assert "['wq']  shape (6, 8)  names ('heads', 'embed')" in message
        assert "dim 0 of size 6 is not divisible by fsdp=4" in message
        assert "dim 0 'heads' -> 'fsdp'  (rule 0)" in message

    def test_names_without_shapes(self):
        with pytest.raises(TypeError, match="a correction needs shapes"):
            sr.logical_to_mesh_sharding(
                ("embed",), self.MESH, [("embed", "tp")], correction=sr.Correction()
            )


@given(st.lists(ARRAYS, max_size=4), RULES)
def test_the_dialect_of_flax_core(arrays, rules):
    spmd = pytest.importorskip("flax.core.spmd")
    if not hasattr(spmd, "get_pspec"):
        pytest.skip("a flax without get_pspec")
    tree = [P(*names) for names in arrays]
    expected = [tuple(spmd.get_pspec(names, rules)) for names in tree]
    got = sr.logical_to_mesh(tree, rules, dialect=sr.dialects.FLAX_CORE)
    assert [tuple(spec) for spec in got] == expected


def test_explain_the_dialect_of_flax_core():
    rules = [("a", "x"), ("b", "x"), ("a", "y")]
    text = sr.explain_logical(("a", "b", "c"), rules, dialect=sr.dialects.FLAX_CORE)
    assert text.splitlines() == [
        "dim 0 'a' -> 'y'  (rule 2)",
        "    rule 0 ('a', 'x') lost: the dimension has the mesh axes of rule 2",
        "dim 1 'b' -> 'x'  (rule 1)",
        "dim 2 'c' -> 'c'",
    ]


def test_explain():
    rules = [
        ("batch", ("dp", "fsdp")), ("embed", "fsdp"), ("embed", "tp"), ("embed", None),
        ("heads", "tp"),
    ]  # fmt: skip
    text = sr.explain_logical(("batch", "embed", "heads", "kv"), rules)
    assert text.splitlines() == [
        "dim 0 'batch' -> ('dp', 'fsdp')  (rule 0)",
        "dim 1 'embed' -> 'tp'  (rule 2)",
        "    rule 1 ('embed', 'fsdp') lost: a mesh axis of it is used by dim 0 'batch'",
        "    rule 3 ('embed', None) lost: the dimension has the mesh axes of rule 2",
        "dim 2 'heads' -> no rule's mesh axes",
        "    rule 4 ('heads', 'tp') lost: a mesh axis of it is used by dim 1 'embed'",
        "dim 3 'kv' -> no rule's mesh axes",
    ]
    text = sr.explain_logical(("embed",), rules, {"fsdp": 4, "tp": 3}, (8,))
    assert "dim 0 'embed' -> 'fsdp'  (rule 1)" in text
    text = sr.explain_logical(("embed",), rules, {"fsdp": 4, "tp": 3}, (9,))
    assert "rule 1 ('embed', 'fsdp') lost: its mesh axes do not divide the dimension" in text


def test_the_rules_of_each_thread_are_its_own():
    seen = []
    with sr.logical_axis_rules([("a", "x")]):
        thread = threading.Thread(target=lambda: seen.append(sr.logical_to_mesh(("a",))))
        thread.start()
        thread.join()
        assert tuple(sr.logical_to_mesh(("a",))) == ("x",)
        with sr.logical_axis_rules([("a", "y")]):
            assert tuple(sr.logical_to_mesh(("a",))) == ("y",)
        assert tuple(sr.logical_to_mesh(("a",))) == ("x",)
    assert tuple(sr.logical_to_mesh(("a",))) == (None,)
    assert tuple(seen[0]) == (None,)


def test_the_legacy_context(mesh):
    x = jnp.zeros((8, 8))
    with legacy(mesh):
        y = sr.with_logical_constraint(x, ("batch", "heads"), TestConstraint.RULES)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "tp")), 2)


class TestMistakes:
    MESH = MappingProxyType({"fsdp": 4, "tp": 2})

    @pytest.mark.parametrize(
        "to_mesh", [sr.logical_to_mesh_sharding, ours.logical_to_mesh_sharding]
    )
    def test_a_wrong_mesh_axis_names_the_path_and_the_rule(self, mesh, to_mesh):
        tree = {"a": P("heads"), "b": [P("heads", "embed")], "c": P("embed")}
        with pytest.raises(ValueError, match="2 leaves cannot be sharded") as caught:
            to_mesh(tree, mesh, [("heads", "tp"), ("embed", "fspd")])
        message = str(caught.value)
        assert "['b'][0]  names ('heads', 'embed')" in message
        assert "['c']  names ('embed',)" in message
        assert "dim 1: rule 1 ('embed', 'fspd'): the mesh has no axis 'fspd'" in message
        assert "did you mean 'fsdp'?" in message

    def test_a_wrong_mesh_axis_with_a_correction_names_the_rule(self):
        with pytest.raises(
            ValueError, match="did you mean 'fsdp'(?s:.*)'embed' -> 'fspd'  \\(rule 0"
        ):
            sr.logical_to_mesh_sharding(
                {"w": ("embed",)}, self.MESH, [("embed", "fspd")],
                arrays={"w": np.zeros(8)}, correction=sr.Correction(absent="error"),
            )  # fmt: skip

    def test_a_name_without_a_rule_that_stays(self):
        with pytest.raises(ValueError, match="no rule for 'hedas'.*did you mean 'heads'"):
            sr.logical_to_mesh_sharding(
                {"w": ("hedas",)}, self.MESH, [("heads", "tp")], dialect=sr.dialects.FLAX_CORE
            )

    def test_a_constraint_to_a_wrong_mesh_axis_names_the_rule(self, mesh):
        with pytest.raises(ValueError, match="rule 0 .*'fspd' \\(did you mean 'fsdp'"):
            sr.with_logical_constraint(np.zeros(8), ("embed",), [("embed", "fspd")], mesh)

    def test_an_unboxed_tree_has_no_names(self):
        arrays = {"w": jax.ShapeDtypeStruct((8, 8), "int8"), "b": np.zeros(8)}
        for call in (
            lambda: sr.logical_to_mesh(arrays, [("embed", "tp")]),
            lambda: sr.logical_to_mesh_sharding(arrays, self.MESH, [("embed", "tp")]),
            lambda: sr.logical_to_mesh_sharding(
                arrays, self.MESH, [("embed", "tp")], arrays=arrays, correction=sr.Correction()
            ),
        ):
            with pytest.raises(TypeError, match="nothing in the tree has logical axis names") as e:
                call()
            assert "arrays=..." in str(e.value)
            assert "boxes" in str(e.value)
        assert sr.logical_to_mesh({}, [("embed", "tp")]) == {}

    RULES = (("batch", "fsdp"), ("embed", "fsdp"), ("mlp", "tp"))

    def test_a_plan_of_boxes_takes_no_names_for_patterns(self):
        meta = pytest.importorskip("flax.core.meta")
        for box in (meta.Partitioned, ours.LogicallyPartitioned):
            tree = {"embed": {"kernel": box(np.zeros((8, 8)), ("embed", "mlp"))}, "b": np.zeros(8)}
            with pytest.raises(TypeError, match="rules are for the logical axis names") as caught:
                sr.plan(tree, self.RULES, self.MESH)
            assert "shardrules.LogicalRules" in str(caught.value)
            assert "unbox" in str(caught.value)

    def test_a_plan_of_variables_takes_no_names_for_patterns(self):
        nnx = pytest.importorskip("flax.nnx")
        state = {"w": nnx.Param(np.zeros((8, 8)), sharding=("embed", "mlp"), eager_sharding=False)}
        with pytest.raises(TypeError, match="rules are for the logical axis names"):
            sr.plan(state, self.RULES, self.MESH)

    @pytest.mark.parametrize(
        "rules", [[("kernel", "tp"), ("embed", None)], [*RULES, (".*", None)], [("kernel", "tp")]]
    )
    def test_a_plan_of_boxes_takes_patterns(self, rules):
        meta = pytest.importorskip("flax.core.meta")
        tree = {"kernel": meta.Partitioned(np.zeros((8, 8)), ("embed", "mlp"))}
        assert len(sr.plan(tree, rules, self.MESH).paths) == 1
