"""Memory kinds: a NamedSharding or a rule sets one; otherwise an array keeps its own."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.contexts import not_on_jax_0_7

RULES = [("w", P("fsdp", "tp"))]
KINDS = [memory.kind for memory in jax.devices()[0].addressable_memories()]
DEFAULT = jax.devices()[0].default_memory().kind
needs_unpinned = pytest.mark.skipif("unpinned_host" not in KINDS, reason="GPUs have no such kind")

functions = pytest.mark.parametrize("function", [sr.shard, sr.with_sharding_constraint])


def of_kind(mesh, kind, *entries):
    return NamedSharding(mesh, P(*entries), memory_kind=kind)


def placed(mesh, kind, *entries):
    array = np.arange(64, dtype="float32").reshape(8, 8)
    return jax.device_put(array, of_kind(mesh, kind, *entries))


@functions
@pytest.mark.parametrize("kind", KINDS)
def test_what_says_nothing_about_memory_does_not_move_it(mesh, function, kind):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3], memory_kind=kind)
    arrays = [placed(mesh, kind, *before) for before in ((), ("fsdp", "tp"), ("tp",))]
    for array in (*arrays, jax.device_put(arrays[0], one)):
        for wanted in (RULES, P("fsdp", "tp"), {"w": P("fsdp", "tp")}):
            after = function({"w": array}, wanted, mesh)["w"]
            assert after.sharding == of_kind(mesh, kind, "fsdp", "tp")
            np.testing.assert_array_equal(after, array)


def array_in(mesh, before):
    array = placed(mesh, None if before == "numpy" else before)
    return np.asarray(array) if before == "numpy" else array


@functions
@pytest.mark.parametrize("before", ["numpy", *KINDS])
@pytest.mark.parametrize("after", [None, *KINDS])
def test_a_named_sharding_moves_an_array_to_its_memory(mesh, function, before, after):
    moved = function(array_in(mesh, before), of_kind(mesh, after, "fsdp", "tp"))
    assert moved.sharding == of_kind(mesh, after or DEFAULT, "fsdp", "tp")


@not_on_jax_0_7
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "unpinned_host"])  # where JAX constrains nothing
def test_free_dimensions_keep_the_memory(mesh, kind):
    free = P(P.UNCONSTRAINED, "tp")
    after = sr.with_sharding_constraint(placed(mesh, kind), free, mesh)
    assert after.sharding.memory_kind == kind
    there = NamedSharding(mesh, free, memory_kind=kind)
    assert sr.with_sharding_constraint(placed(mesh, DEFAULT), there).sharding.memory_kind == kind


def rules_of_kind(kind):
    return [("w", sr.RuleSpec(("fsdp", "tp"), memory_kind=kind)), (".*", ())]


class TestRules:
    @pytest.mark.parametrize("kind", [None, *KINDS])
    def test_shardings_have_the_kind_of_their_rule(self, mesh, kind):
        tree = {"w": np.ones((8, 8)), "wide": {"w": np.ones((16, 7))}, "b": np.ones(4), "n": 3}
        found = sr.named_shardings(tree, rules_of_kind(kind), mesh)
        assert found == {
            "w": of_kind(mesh, kind, "fsdp", "tp"),
            "wide": {"w": of_kind(mesh, kind, "fsdp", None)},
            "b": of_kind(mesh, None),
            "n": of_kind(mesh, None),
        }

    @functions
    @pytest.mark.parametrize("before", [None, "numpy", *KINDS])
    @pytest.mark.parametrize("after", KINDS)
    def test_an_array_moves_to_the_memory_of_its_rule(self, mesh, function, before, after):
        """Also to that of the device, which JAX cannot tell from none."""
        array = array_in(mesh, before)
        moved = function({"w": array, "b": array}, rules_of_kind(after), mesh)
        assert moved["w"].sharding == of_kind(mesh, after, "fsdp", "tp")
        assert moved["b"].sharding == of_kind(mesh, None if before == "numpy" else before)
        np.testing.assert_array_equal(moved["w"], array)

    @pytest.mark.parametrize("before", [None, *KINDS])
    @pytest.mark.parametrize("after", [None, *KINDS])
    def test_companions_move_with_their_base(self, mesh, before, after):
        tree = {"w": {"kernel": placed(mesh, before), "lora_a": placed(mesh, before)}}
        rules = [("w/kernel", sr.RuleSpec(("fsdp", "tp"), memory_kind=after))]
        plan = sr.plan(tree, rules, mesh, companions=sr.LORA)
        moved = sr.shard(tree, plan)
        assert moved["w"]["kernel"].sharding == of_kind(mesh, after or before, "fsdp", "tp")
        assert moved["w"]["lora_a"].sharding == of_kind(mesh, after or before, "fsdp", None)
        wanted = sr.named_shardings(tree, plan)
        assert wanted["w"]["lora_a"] == of_kind(mesh, after, "fsdp", None)

    def test_two_rules_of_one_spec_and_two_kinds(self, mesh):
        kinds = dict.fromkeys([None, *KINDS])
        rules = [(f"^{kind}$", sr.RuleSpec("tp", memory_kind=kind)) for kind in kinds]
        found = sr.named_shardings({str(kind): np.ones(8) for kind in kinds}, rules, mesh)
        assert found == {str(kind): of_kind(mesh, kind, "tp") for kind in kinds}

    def test_a_spec_says_nothing_of_memory(self, mesh):
        assert sr.spec_for("w", (8, 8), rules_of_kind(KINDS[-1]), mesh) == P("fsdp", "tp")

    def test_a_kind_that_the_devices_do_not_have(self, mesh, monkeypatch):
        lacking = "a_kind_of_other_devices"
        monkeypatch.setattr("shardrules._base.rule_specs.check_memory_kind", lambda *_: None)
        rules, tree = [("b", "tp"), *rules_of_kind(lacking)], {"w": np.ones((8, 8))}
        for function in (sr.named_shardings, sr.shard, sr.with_sharding_constraint, sr.plan):
            with pytest.raises(ValueError, match=f"^rule 1 'w': memory_kind='{lacking}' is not on"):
                function(tree, rules, mesh)

    def test_a_mesh_without_devices(self, mesh):
        tree, rules = {"w": np.ones((8, 8))}, rules_of_kind("pinned_host")
        abstract = sr.resolve_mesh({"fsdp": 4, "tp": 2})
        there = of_kind(abstract, "pinned_host", "fsdp", "tp")
        assert sr.named_shardings(tree, rules, abstract) == {"w": there}
        assert sr.plan(tree, rules, dict(abstract.shape)).shardings() == {"w": there}


BY = {
    "specs": lambda mesh, kind: P("fsdp", "tp"),
    "rules": lambda mesh, kind: rules_of_kind(kind),
    "a sharding": lambda mesh, kind: of_kind(mesh, kind, "fsdp", "tp"),
}


@not_on_jax_0_7
class TestInsideJit:
    def constrained(self, mesh, wanted, before):
        step = jax.jit(lambda x: sr.with_sharding_constraint({"w": 2 * x}, wanted, mesh)["w"])
        return step(placed(mesh, before))

    @pytest.mark.parametrize(
        ("by", "kind", "before", "after"),
        [
            ("specs", None, "device", "device"),
            ("specs", None, "pinned_host", "pinned_host"),
            ("rules", "pinned_host", "device", "pinned_host"),
            ("rules", "device", "pinned_host", "pinned_host"),
            ("a sharding", "pinned_host", "device", "pinned_host"),
            # As in JAX the default kind leaves an array where it is.
            ("a sharding", None, "pinned_host", "pinned_host"),
        ],
    )
    def test_an_array_moves_to_the_host_alone(self, mesh, by, kind, before, after):
        wanted = BY[by](mesh, kind)
        found = self.constrained(mesh, wanted, before)
        assert found.sharding == of_kind(mesh, after, "fsdp", "tp")
        np.testing.assert_array_equal(found, 2 * np.arange(64).reshape(8, 8))
        if by == "a sharding" and kind is None:
            by_jax = jax.jit(lambda x: jax.lax.with_sharding_constraint(2 * x, wanted))
            assert by_jax(placed(mesh, before)).sharding == found.sharding

    @needs_unpinned
    @pytest.mark.parametrize("by", ["rules", "a sharding"])
    def test_a_kind_that_jax_does_not_have_there_is_refused(self, mesh, by):
        with pytest.raises(ValueError, match="'unpinned_host' memory inside jit, where JAX has"):
            self.constrained(mesh, BY[by](mesh, "unpinned_host"), "device")

    @pytest.mark.parametrize("types", ["Explicit Explicit", "Explicit Auto", "Manual Auto"])
    def test_on_axes_of_all_types(self, types):
        first, second = (getattr(jax.sharding.AxisType, name) for name in types.split())
        manual = first is jax.sharding.AxisType.Manual
        kinds = (second if manual else first, second)
        devices = np.array(jax.devices()[:8]).reshape(4, 2)
        mesh = Mesh(devices, ("a", "b"), axis_types=kinds)
        there = of_kind(mesh, "pinned_host", "a", "b")

        def step(x):
            return sr.with_sharding_constraint(2 * x, there)

        with jax.set_mesh(mesh):
            if manual:
                step = jax.shard_map(step, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
            after = jax.jit(step)(placed(mesh, "device", "a"))
        assert after.sharding == there
