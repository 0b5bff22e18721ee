"""with_sharding_constraint inside and outside of jit, on auto, explicit, mixed and manual axes."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place import constraint, named_shardings
from tests.support.contexts import legacy, not_on_jax_0_7
from tests.support.entered import entered

constrain = sr.with_sharding_constraint
bare = jax.lax.with_sharding_constraint


pytestmark = pytest.mark.filterwarnings("error")


def is_sharded(array, mesh, *entries):
    return array.sharding.is_equivalent_to(NamedSharding(mesh, P(*entries)), array.ndim)


AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
TYPES = {"auto": (AUTO, AUTO, AUTO), "explicit": (EXPLICIT, EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO, AUTO)}


@pytest.fixture(params=TYPES)
def typed_mesh(request):
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("a", "b", "c"), axis_types=TYPES[request.param])


SPECS = [
    ((8, 8), P("a", "b"), ("a", "b")),
    ((8, 8), P(("a", "b"), "c"), (("a", "b"), "c")),
    ((8, 7), P("a", "b"), ("a",)),
    ((8,), P("b", "a"), ("b",)),
    ((7, 5), P("a", "b"), ()),
    ((8, 8), P(), ()),
    ((8, 8, 3), P("c"), ("c",)),
]


class TestUnderSetMesh:
    @pytest.mark.parametrize(("shape", "spec", "expected"), SPECS)
    def test_in_and_out_of_jit(self, typed_mesh, shape, spec, expected):
        with jax.set_mesh(typed_mesh):
            x = jnp.arange(np.prod(shape), dtype="float32").reshape(shape)
            for call in (constrain, jax.jit(constrain, static_argnums=1)):
                result = call(x, spec)
                assert is_sharded(result, typed_mesh, *expected), (call, result.sharding)
                np.testing.assert_array_equal(np.asarray(result), np.asarray(x))

    @not_on_jax_0_7
    def test_manual_axes_are_left_out(self, typed_mesh):
        """The same as the call of JAX's that a user would have to write for this mesh."""
        seen = []
        strict = sr.Correction(indivisible="error")
        plain = bare if typed_mesh.axis_types[1] is AUTO else jax.sharding.reshard
        by_rules = sr.Rules([("x", P(("a", "b")))], correction=strict)
        bodies = [
            lambda x: plain(2 * x, P("b")),
            lambda x: seen.append(x.shape) or constrain(2 * x, P(("a", "b"))),
            # 2 local rows can be cut by "b" alone.
            lambda x: constrain({"x": 2 * x}, by_rules)["x"],
            lambda x: constrain(2 * x, P(("a", "b")), typed_mesh, correction=strict),
        ]
        with jax.set_mesh(typed_mesh):
            x = constrain(jnp.arange(4.0), P("a"))
            expected, *results = (
                jax.jit(jax.shard_map(body, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))(x) for body in bodies
            )
        assert seen[0] == (2,)
        for result in results:
            assert result.sharding.is_equivalent_to(expected.sharding, 1)
            np.testing.assert_array_equal(np.asarray(result), 2 * np.arange(4.0))

    @not_on_jax_0_7
    @pytest.mark.parametrize("given", ["context", "mesh", "sharding", "rules", "rules and mesh"])
    def test_a_dimension_whose_axis_is_manual_keeps_the_other_axes_cut(self, typed_mesh, given):
        strict = sr.Correction(indivisible="error", unconstrained="drop")
        spec = P("a", "c")
        call = {
            "context": lambda x: constrain(x, spec, correction=strict),
            "mesh": lambda x: constrain(x, spec, typed_mesh, correction=strict),
            "sharding": lambda x: constrain(x, NamedSharding(typed_mesh, spec), correction=strict),
            "rules": lambda x: constrain([x], sr.Rules([("0", spec)], correction=strict))[0],
            "rules and mesh": lambda x: constrain([x], [("0", spec)], typed_mesh)[0],
        }[given]

        def body(x):  # local: [4, 8]; its rows are cut by "b" already
            return 2 * call(constrain(x, P("b", None)))

        with jax.set_mesh(typed_mesh):
            x = constrain(jnp.arange(64.0).reshape(8, 8), P("a"))
            result = jax.jit(jax.shard_map(body, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))(x)
        # JAX has no sharding that leaves a dimension alone where all other axes are Explicit.
        rows = ("a", "b") if AUTO in typed_mesh.axis_types else "a"
        assert is_sharded(result, typed_mesh, rows, "c")
        np.testing.assert_array_equal(np.asarray(result), 2 * np.arange(64.0).reshape(8, 8))

    def test_unconstrained_beside_explicit_axes(self):
        devices = np.array(jax.devices()[:4]).reshape(2, 2)
        mesh = Mesh(devices, ("a", "b"), axis_types=(EXPLICIT, AUTO))
        with jax.set_mesh(mesh):
            x = jax.sharding.reshard(jnp.zeros((8, 8)), P("a", None))
            result = jax.jit(lambda x: constrain(x, P(P.UNCONSTRAINED, "b")))(x)
        assert is_sharded(result, mesh, "a", "b")

    def test_all_axes_manual(self, typed_mesh):
        with jax.set_mesh(typed_mesh):
            x = constrain(jnp.arange(8.0), P("a"))
            mapped = jax.shard_map(lambda x: constrain(x, P("a", "b")), in_specs=P("a"), out_specs=P("a"))
            np.testing.assert_array_equal(np.asarray(jax.jit(mapped)(x)), np.arange(8.0))


class TestWithoutSetMesh:
    def test_legacy(self, mesh):
        with legacy(mesh):
            for call in (constrain, jax.jit(constrain, static_argnums=1)):
                assert is_sharded(call(jnp.zeros((8, 7)), P("fsdp", "tp")), mesh, "fsdp")

    def test_shardings_and_trees_of_them(self, mesh):
        tree = {"a": jnp.zeros((8, 8)), "b": {"c": jnp.zeros(8), "d": jnp.zeros(3)}, "n": 1, "x": jnp.zeros(8)}
        specs = {"a": NamedSharding(mesh, P("fsdp")), "b": P("tp"), "n": P(), "x": None}
        result = constrain(tree, specs, mesh)
        assert is_sharded(result["a"], mesh, "fsdp")
        assert is_sharded(result["b"]["c"], mesh, "tp")
        assert is_sharded(result["b"]["d"], mesh)
        assert result["n"] == 1
        assert result["x"] is tree["x"]

    def test_unconstrained(self, mesh):
        x = jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P(None, "tp")))
        for call in (constrain, jax.jit(constrain, static_argnums=(1, 2))):
            assert is_sharded(call(x, P("fsdp", P.UNCONSTRAINED), mesh), mesh, "fsdp", "tp")

    def test_an_abstract_mesh_inside_jit(self):
        """As when a step is traced before its devices are there."""
        step = jax.jit(lambda x: constrain(x, P("tp"), {"tp": 2}))
        assert "sharding" in str(step.trace(np.zeros(8)).jaxpr)


def test_a_numpy_array_outside_jit_is_copied(mesh):
    """Large ones shared their memory with the result, on all devices."""
    given = np.arange(2.0**16, dtype="float32")
    made = jax.block_until_ready(constrain(given, P(), mesh))
    given[:] = -1
    np.testing.assert_array_equal(made, np.arange(2.0**16))


@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P(), P(P.UNCONSTRAINED, "tp")])
@pytest.mark.parametrize("before", [P("fsdp", "tp"), P("tp"), None])
def test_donating_what_came_back_leaves_the_array_alone(mesh, before, spec):
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    for function in (constrain, jax.lax.with_sharding_constraint):
        x = jnp.arange(64.0).reshape(8, 8)
        if before is not None:
            x = jax.device_put(x, NamedSharding(mesh, before))
        y = function(x, NamedSharding(mesh, spec))
        assert y is not x
        donated(y)
        assert y.is_deleted()
        np.testing.assert_array_equal(x, np.arange(64.0).reshape(8, 8))


class TestSymbolicDimensions:
    """jax.export: an axis is kept where its size is known to divide, whatever the symbols are."""

    def exported(self, symbols, mesh, wanted, **options):
        shape = jax.export.symbolic_shape(symbols, constraints=options.pop("constraints", ()))
        step = jax.jit(lambda x: constrain({"w": 2 * x}, wanted, mesh, **options)["w"])
        return jax.export.export(step)(jax.ShapeDtypeStruct(shape, "float32"))

    def result(self, exported, mesh, *shape):
        x = jax.device_put(np.ones(shape, "float32"), NamedSharding(mesh, P()))
        after = jax.jit(exported.call)(x)
        np.testing.assert_array_equal(after, 2 * np.ones(shape))
        return after

    @pytest.mark.parametrize("wanted", [P("fsdp", "tp"), [("w", P("fsdp", "tp"))]])
    @pytest.mark.parametrize(
        ("symbols", "shape", "entries"),
        [
            ("b, 4*c", (8, 8), (None, "tp")),
            ("4*b, c", (8, 8), ("fsdp",)),
            ("8*b, 6*c", (8, 12), ("fsdp", "tp")),
            ("b, c", (8, 8), ()),
            ("b, 8", (8, 8), (None, "tp")),
            ("4*b + 8, 7", (16, 7), ("fsdp",)),
        ],
    )
    def test_what_is_known_to_divide_is_cut(self, mesh, symbols, shape, entries, wanted):
        exported = self.exported(symbols, mesh, wanted)
        assert is_sharded(self.result(exported, mesh, *shape), mesh, *entries)

    def test_a_constraint_on_a_symbol_says_that_it_divides(self, mesh):
        exported = self.exported("b, 7", mesh, P("fsdp"), constraints=["mod(b, 4) == 0"])
        assert is_sharded(self.result(exported, mesh, 8, 7), mesh, "fsdp")


def text_of(x, *arguments, **more):
    return str(jax.make_jaxpr(lambda x: constrain(x, *arguments, **more))(x))


def text_by_jax(tree, shardings):
    return str(jax.make_jaxpr(lambda tree: bare(tree, shardings))(tree))


TREE = {
    "q": {"w": np.zeros((8, 8), "float32"), "b": np.zeros(8, "float32")},
    "o": [np.zeros((8, 6), "float32"), np.zeros((7, 4), "float32")],
}
RULES = [("w", P("fsdp", "tp")), ("b", P("tp")), ("o", P("tp", "fsdp"))]


def _named(tree, mesh):
    rules = sr.LogicalRules([("in", "fsdp"), ("out", "tp")])
    names = {"q": {"w": ("in", "out"), "b": ("out",)}, "o": [("out", "in")] * 2}
    return sr.plan(tree, rules, mesh, names=names)


FORMS = {
    "pairs": lambda tree, mesh: RULES,
    "rules": lambda tree, mesh: sr.Rules(RULES),
    "plan": lambda tree, mesh: sr.plan(tree, RULES, mesh),
    "specs": lambda tree, mesh: sr.plan(tree, RULES, mesh).specs(),
    "shardings": lambda tree, mesh: sr.named_shardings(tree, RULES, mesh),
    "logical rules": _named,
}
"""By name, what decides the tree."""


class TestWhatIsRemembered:
    """A constraint is decided once for each structure, shapes, rules, mesh and context."""

    def test_a_context_that_has_changed(self):
        devices = np.array(jax.devices()[:4])
        for sizes in ((4, 1), (2, 2), (4, 1)):
            mesh = Mesh(devices.reshape(sizes), ("a", "b"))
            with legacy(mesh):
                made = jax.jit(lambda x: constrain(x, P("a")))(jnp.ones(8))
            assert is_sharded(made, mesh, "a")

    def test_what_is_an_error_is_one_each_time(self):
        mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
        with legacy(mesh):
            text_of(jnp.ones(8), P("a"))
        for _ in range(2):
            with pytest.raises(ValueError, match="no mesh"):  # as there is no context any more
                text_of(jnp.ones(8), P("a"))
            with pytest.raises(ValueError, match=r"(?s)\(the tree\).*not divisible by a=4"):
                text_of(jnp.ones(6), P("a"), mesh, correction=sr.Correction(indivisible="error"))

    @pytest.mark.parametrize("form", FORMS)
    def test_a_tree_is_constrained_as_by_jax_itself_each_time(self, mesh, form):
        decided = FORMS[form](TREE, mesh)
        shardings = sr.named_shardings(TREE, RULES, mesh)
        expected = text_by_jax(TREE, shardings)
        counted = []

        def body(tree):
            with entered() as calls:
                constrained = constrain(tree, decided, mesh)
            counted.append(sum(file == named_shardings.__file__ for file, _ in calls))
            return constrained

        for _ in range(2):
            assert str(jax.make_jaxpr(lambda tree: body(tree))(TREE)) == expected
        assert counted[1] == 0 < counted[0]

    def test_other_trees_rules_corrections_and_meshes_are_decided_anew(self, mesh):
        big, strict = sr.fsdp("fsdp", min_bytes=200), sr.Correction(indivisible="prefix")
        turned, spec = Mesh(mesh.devices.reshape(1, 2, 4), mesh.axis_names), P(("tp", "fsdp"))
        trees = [
            {"w": jnp.zeros(shape, dtype), **more}
            for shape in ((8, 8), (6, 6), (7, 8))
            for dtype in ("float32", "bfloat16")
            for more in ({}, {"v": jnp.zeros(8)})
        ]
        for pairs in ([("w", big), ("", P())], [("w", P("tp", "fsdp")), ("", P(("tp", "fsdp")))]):
            ways = [(pairs, None), (sr.Rules(pairs, correction=strict), None), (spec, None), (spec, strict)]
            for (rules, own), on, tree in itertools.product(ways, (mesh, turned), [*trees, *trees]):
                expected = text_by_jax(tree, sr.named_shardings(tree, rules, on, correction=own))
                assert text_of(tree, rules, on, correction=own) == expected

    def test_rules_that_come_and_go_are_told_apart(self, mesh):
        """Other rules may get the address of those that are gone."""
        tree = {"w": jnp.zeros(8)}
        expected = {
            entry: text_by_jax(tree, sr.named_shardings(tree, P(entry), mesh)) for entry in ("fsdp", "tp", None)
        }
        for _ in range(20):
            for entry, text in expected.items():
                assert text_of(tree, sr.Rules([("w", P(entry))]), mesh) == text

    def test_pairs_that_can_be_read_once_are_not_remembered(self, mesh):
        pairs = iter([("w", P("tp"))])
        text_of({"w": jnp.zeros(8)}, pairs, mesh)
        with pytest.raises(ValueError, match="matches none of the 0 rules"):
            text_of({"w": jnp.zeros(8)}, pairs, mesh)

    def test_what_is_changed_in_place_is_seen(self, mesh):
        pairs = [("w", P("tp"))]
        first = text_of({"w": jnp.zeros(8)}, pairs, mesh)
        pairs[0] = ("w", P("fsdp"))
        assert text_of({"w": jnp.zeros(8)}, pairs, mesh) != first

    def test_arrays_beside_traced_ones_are_constrained_too(self, mesh):
        here = jnp.ones(8)
        for _ in range(2):
            made = jax.jit(lambda x: constrain({"x": x, "y": here}, P("tp"), mesh))(jnp.ones(8))
            assert is_sharded(made["x"], mesh, "tp")
            assert is_sharded(made["y"], mesh, "tp")

    def test_rules_that_are_made_anew_are_not_all_kept(self, mesh):
        """Each trace with its own Rules kept them, 113 kB at a time."""
        for _ in range(constraint._MOST_ENTRIES + 50):
            rules = sr.Rules([("w", P("tp"))])
            jax.eval_shape(lambda x, r=rules: constrain({"w": x}, r, mesh), jnp.zeros(8))
        assert 0 < len(constraint._memory.known) <= constraint._MOST_ENTRIES

    def test_little_is_remembered(self, mesh, monkeypatch):
        monkeypatch.setattr(constraint, "_MOST_LEAVES", 10)
        memory = constraint._Memory()
        monkeypatch.setattr(constraint, "_memory", memory)
        for size in range(1, 8):
            text_of([jnp.zeros(size)] * 4, P("tp"), mesh)
            assert len(memory.known) <= 3
