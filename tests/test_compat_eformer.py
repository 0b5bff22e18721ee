"""compat.eformer beside the installed eformer, on eight devices; and where eformer is broken."""

from __future__ import annotations

import inspect
import re
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardrules.compat import eformer as ours
from tests.contexts import legacy, needs_set_mesh

theirs = pytest.importorskip(
    "eformer.escale.partition.constraints", reason="eformer is not installed"
)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

AXES = st.sampled_from(["dp", "fsdp", "tp", "absent"])
ENTRIES = st.one_of(
    st.none(), AXES, st.lists(AXES, min_size=1, max_size=3, unique=True).map(tuple),
    st.just(P.UNCONSTRAINED),
)  # fmt: skip
SPECS = st.lists(ENTRIES, max_size=4).map(lambda entries: P(*entries))
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 24]), max_size=4).map(tuple)
RUNS = {
    "max_examples": 400,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


def outcome(call, *args, **kwargs):
    """The result, or the type of what was raised."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return type(error)


def same_error(got, expected):
    if not (isinstance(got, type) and isinstance(expected, type)):
        return False
    # JAX's error for an axis used twice is a private class; ours is a ValueError.
    duplicate = expected.__name__ == "DuplicateSpecError" and got is ValueError
    return duplicate or issubclass(got, expected) or issubclass(expected, got)


def test_the_same_functions_with_the_same_signatures():
    for name in ours.__all__:
        expected = inspect.signature(getattr(theirs, name)).parameters
        got = inspect.signature(getattr(ours, name)).parameters
        assert [(p.name, p.default, p.kind) for p in got.values()] == [
            (p.name, p.default, p.kind) for p in expected.values()
        ], name
    assert len(ours.__all__) == 17


@settings(**RUNS)
@given(SHAPES, SPECS)
def test_get_corrected_named_sharding(mesh, shape, spec):
    with legacy(mesh):
        expected = outcome(theirs.get_corrected_named_sharding, shape, spec)
        got = outcome(ours.get_corrected_named_sharding, shape, spec)
    assert got == expected or same_error(got, expected)


def test_get_corrected_named_sharding_without_a_mesh():
    for module in (theirs, ours):
        with pytest.raises(AssertionError, match="No mesh found under this context manager"):
            module.get_corrected_named_sharding((8,), P("tp"))
        with pytest.warns(UserWarning, match="Active mesh is empty"):
            sharding = module.get_corrected_named_sharding((8,), P("tp"), raise_mesh_error=False)
        assert sharding.spec == P()
        assert sharding.mesh.empty


CONSTRAINED = [
    ((8, 8), P("fsdp", "tp")),
    ((8, 7), P("fsdp", "tp")),
    ((8,), P("tp", "fsdp")),
    ((8, 8, 8), P(("fsdp", "tp"))),
    ((4, 8), P(("fsdp", "tp"), "dp")),
    ((8, 8), P("absent", "tp")),
    ((8, 8), P()),
    ((7, 7), P("tp")),
    ((8, 8), P("tp", P.UNCONSTRAINED)),
]


@pytest.mark.parametrize(("shape", "spec"), CONSTRAINED)
@pytest.mark.parametrize("jitted", [False, True])
def test_with_sharding_constraint(mesh, shape, spec, jitted):
    x = jnp.arange(np.prod(shape), dtype="float32").reshape(shape)
    results = []
    with legacy(mesh):
        for module in (theirs, ours):
            call = lambda x, module=module: module.with_sharding_constraint(x, spec)  # noqa: E731
            results.append((jax.jit(call) if jitted else call)(x))
    expected, got = results
    assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def test_with_sharding_constraint_on_trees(mesh):
    tree = {"a": jnp.zeros((8, 8)), "b": [jnp.zeros(3), 5, "x", np.zeros(8)], "c": None}
    results = []
    for sharding in (P("fsdp", "tp"), NamedSharding(mesh, P("fsdp", "tp"))):
        for module in (theirs, ours):
            with legacy(mesh):
                results.append(module.with_sharding_constraint(tree, sharding))
    first, *rest = (jax.tree.map(lambda x: getattr(x, "sharding", x), r) for r in results)
    for other in rest:
        assert other["a"].is_equivalent_to(first["a"], 2)
        assert other["b"][0].is_equivalent_to(first["b"][0], 1)
        assert other["b"][1:3] == [5, "x"]
        assert isinstance(other["b"][3], np.ndarray)


def test_with_sharding_constraint_without_a_mesh():
    x = jnp.zeros(8)
    for module in (theirs, ours):
        assert module.with_sharding_constraint(x, P("tp")) is x


def test_with_sharding_constraint_of_the_wrong_type(mesh):
    for module in (theirs, ours):
        with legacy(mesh), pytest.raises(TypeError, match="Unsupported sharding type"):
            module.with_sharding_constraint(jnp.zeros(8), "tp")


def test_shard_and_gather_functions(mesh):
    specs = {"w": P("fsdp", "tp"), "odd": P("tp"), "n": {"b": P("dp")}}
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "odd": jnp.arange(3.0), "n": {"b": jnp.ones(4)}}
    fetched = []
    for module in (theirs, ours):
        shard_fns, gather_fns = module.make_shard_and_gather_fns(specs, mesh)
        placed = jax.tree.map(lambda f, x: f(x), shard_fns, tree)
        fetched.append((placed, jax.tree.map(lambda f, x: f(x), gather_fns, placed)))
    for (a, b), (c, d) in [fetched]:
        for expected, got in zip(jax.tree.leaves(a), jax.tree.leaves(c), strict=True):
            assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)
        for expected, got in zip(jax.tree.leaves(b), jax.tree.leaves(d), strict=True):
            assert type(got) is type(expected) is np.ndarray
            np.testing.assert_array_equal(got, expected)
    for module in (theirs, ours):
        with pytest.raises(ValueError, match="absent"):
            module.make_shard_and_gather_fns({"w": P("absent")}, mesh)


@settings(**RUNS)
@given(SHAPES, SPECS)
def test_shard_functions_on_any_spec(mesh, shape, spec):
    x = jnp.ones(shape)
    placed = []
    for module in (theirs, ours):
        placed.append(outcome(lambda m=module: m.make_shard_and_gather_fns(spec, mesh)[0](x)))
    expected, got = placed
    if isinstance(expected, type):
        assert same_error(got, expected)
    elif isinstance(expected.sharding, SingleDeviceSharding):
        assert got.sharding.is_fully_replicated  # theirs was left where it was
    else:
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)


NAMES = st.recursive(
    st.none() | AXES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(AXES, inner, max_size=2),
    max_leaves=8,
)


@settings(**RUNS)
@given(st.lists(NAMES, max_size=3) | st.dictionaries(AXES, NAMES, max_size=3))
def test_get_names_from_partition_spec(tree):
    names = ours.get_names_from_partition_spec(tree)
    assert set(names) == set(theirs.get_names_from_partition_spec(tree))
    assert len(set(names)) == len(names)


def test_create_pattern_based_partition_spec(mesh):
    texts = ["a|b->dp.tp,c->fsdp", "^x$->tp,nothing,.*->dp", "", "a->", "->tp"]
    names = ["a", "bc", "layers/c", "x", "xx", ""]
    for text in texts:
        for default in (None, P("z")):
            expected = theirs.create_pattern_based_partition_spec(text, mesh, default)
            got = ours.create_pattern_based_partition_spec(text, mesh, default)
            assert [got(n, None) for n in names] == [expected(n, None) for n in names]
    for module in (theirs, ours):
        with pytest.raises(ValueError, match="many|more than one"):
            module.create_pattern_based_partition_spec("a->b->c", mesh)
        with pytest.raises(AssertionError):
            module.create_pattern_based_partition_spec("a->b")
        with pytest.raises(re.error):
            module.create_pattern_based_partition_spec("(->b", mesh)("a", None)


def test_mesh_questions(mesh):
    calls = [
        lambda m: m.names_in_current_mesh("dp", "tp"),
        lambda m: m.names_in_current_mesh("dp", "absent"),
        lambda m: m.names_in_current_mesh(),
        lambda m: m.get_incontext_mesh(),
        lambda m: m.get_incontext_mesh(False).empty,
        lambda m: m.get_axes_size_in_mesh("fsdp"),
        lambda m: m.get_axes_size_in_mesh(["fsdp", "tp"]),
        lambda m: m.get_axes_size_in_mesh((), mesh),
        lambda m: m.get_axes_size_in_mesh("absent", mesh),
        lambda m: m.get_axes_size_in_mesh(3, mesh),
        lambda m: m.get_mesh_axis_names(),
        lambda m: m.get_mesh_axis_names(mesh),
        lambda m: m.get_mesh_axis_size(()),
        lambda m: m.get_mesh_axis_size(3),
        lambda m: m.get_mesh_axis_size("unbound"),
        lambda m: m.get_submesh_device_index([]),
        lambda m: m.get_submesh_device_index(3),
    ]
    for number, call in enumerate(calls):
        expected, got = outcome(call, theirs), outcome(call, ours)
        assert got == expected or same_error(got, expected), number
        with legacy(mesh):
            expected, got = outcome(call, theirs), outcome(call, ours)
        assert got == expected or same_error(got, expected), number


@pytest.mark.parametrize("axes", ["fsdp", ("fsdp", "tp"), ["tp", "fsdp"], ("dp",), ()])
def test_positions_inside_shard_map(mesh, axes):
    from jax.experimental.shard_map import shard_map as old_shard_map

    shard_map = getattr(jax, "shard_map", old_shard_map)

    def positions(module):
        def body(x):
            size = module.get_mesh_axis_size(axes)
            return x * 0 + module.get_submesh_device_index(axes) + 100 * size

        spec = P(("dp", "fsdp", "tp"))
        return shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros(8, "int32"))

    np.testing.assert_array_equal(positions(ours), positions(theirs))


def arrays(mesh):
    return {
        "sharded": jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("fsdp", "tp"))),
        "single": jnp.zeros(4),
        "numpy": np.zeros(4),
        "step": 3,
        "lr": 0.5,
    }


def test_extracting(mesh):
    tree = arrays(mesh)
    for name in ("extract_sharding_structure", "get_shardings_with_structure"):
        assert getattr(ours, name)(tree) == getattr(theirs, name)(tree)
    tree["abstract"] = SimpleNamespace(sharding=P("tp"))
    assert ours.extract_shardings(tree, mesh) == theirs.extract_shardings(tree, mesh)
    specs = {"sharded": tree["sharded"], "step": 3, "lr": 0.5, "flag": True}
    assert ours.get_partition_spec(specs) == theirs.get_partition_spec(specs)
    for module in (theirs, ours):
        with pytest.raises(ValueError, match="Unsupported leaf type for get_partition_spec"):
            module.get_partition_spec({"a": np.zeros(2)})
        with pytest.raises(AttributeError):
            module.get_partition_spec({"a": jnp.zeros(2)})


def test_analyze_sharding_strategy(mesh):
    tree = {"w": np.zeros((8, 8), "float32"), "b": np.zeros(6, "float16"), "s": np.zeros(())}
    specs = {"w": P("fsdp", "tp"), "b": P(), "s": P()}
    expected = theirs.analyze_sharding_strategy(tree, specs, mesh)
    got = ours.analyze_sharding_strategy(tree, specs, mesh)
    assert got.keys() == expected.keys()
    for key in ("total_parameters", "sharded_parameters"):
        assert got[key] == expected[key]
    per_device = 64 * 4 // 8 + 6 * 2 + 8
    assert got["memory_per_device"] == {str(d): per_device for d in mesh.devices.ravel()}
    assert got["balance_score"] == 1.0
    assert got["partition_stats"][str(P())] == {"leaves": 2, "parameters": 7, "bytes": 20}
    with pytest.raises(KeyError):
        theirs.analyze_sharding_strategy(tree, specs | {"w": P("absent")}, mesh)
    with pytest.raises(KeyError, match="absent"):
        ours.analyze_sharding_strategy(tree, specs | {"w": P("absent")}, mesh)


def test_logged_corrections(mesh, monkeypatch):
    monkeypatch.setattr(theirs, "LOG_SHARDING_MOVE", True)
    monkeypatch.setenv("LOG_SHARDING_MOVE", "true")
    counts = []
    for module in (theirs, ours):
        with legacy(mesh), warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            module.get_corrected_named_sharding((8, 7, 4), P("absent", "tp", "fsdp"))
            module.with_sharding_constraint({"x": jnp.zeros((8, 7))}, P("absent", "tp", "fsdp"))
        counts.append([w.filename for w in record if w.category is UserWarning])
    assert len(counts[0]) == len(counts[1]) == 5
    assert set(counts[1]) == {__file__}


class TestWhereEformerIsBroken:
    """The table of docs/migration/eformer.md, row by row: eformer's fault first, then ours working."""

    @needs_set_mesh
    def test_no_mesh_is_seen_under_set_mesh(self, mesh):
        x = jnp.zeros((8, 8))
        with jax.set_mesh(mesh):
            with pytest.raises(AssertionError):
                theirs.get_incontext_mesh()
            assert theirs.with_sharding_constraint(x, P("fsdp")) is x
            assert not theirs.names_in_current_mesh("fsdp")
            assert ours.get_incontext_mesh() is mesh
            assert ours.with_sharding_constraint(x, P("fsdp")).sharding.spec[0] == "fsdp"
            assert ours.names_in_current_mesh("fsdp")
            sharding = ours.get_corrected_named_sharding((8, 7), P("fsdp", "tp"))
            assert sharding == NamedSharding(mesh, P("fsdp", None))

    def test_numpy_leaves_stay_unsharded(self, mesh):
        w = np.arange(8.0, dtype="float32")
        assert theirs.make_shard_and_gather_fns(P("tp"), mesh)[0](w) is w
        assert ours.make_shard_and_gather_fns(P("tp"), mesh)[0](w).sharding.spec == P("tp")

    def test_gather_functions_compile_once_per_leaf(self, mesh):
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
        )
        counts = {}
        for module in (theirs, ours):
            _, gather_fns = module.make_shard_and_gather_fns({i: P("tp") for i in range(3)}, mesh)
            placed = {
                i: jax.device_put(np.ones(8, "float32"), NamedSharding(mesh, P("tp")))
                for i in range(3)
            }
            compiled.clear()
            jax.tree.map(lambda f, x: f(x), gather_fns, placed)
            counts[module] = len(compiled)
        assert counts[theirs] >= 3
        assert counts[ours] == 0

    def test_analyze_raises_on_axes_in_a_tuple_and_fills_nothing(self, mesh):
        tree, specs = {"w": np.zeros((8, 8), "float32")}, {"w": P(("fsdp", "tp"))}
        with pytest.raises(KeyError):
            theirs.analyze_sharding_strategy(tree, specs, mesh)
        analysis = theirs.analyze_sharding_strategy(tree, {"w": P("fsdp")}, mesh)
        assert (analysis["memory_per_device"], analysis["balance_score"]) == ({}, 0.0)
        analysis = ours.analyze_sharding_strategy(tree, specs, mesh)
        assert set(analysis["memory_per_device"].values()) == {32}
        uneven = ours.analyze_sharding_strategy(
            {"w": np.zeros(12, "int8")}, {"w": P("dp")}, AbstractMesh((8,), ("dp",))
            if hasattr(jax, "set_mesh") else mesh
        )  # fmt: skip
        assert list(uneven["memory_per_device"].values()) == [2, 2, 2, 2, 2, 2, 0, 0]
        assert uneven["balance_score"] == 0.75

    def test_errors_inside_a_tree_are_swallowed(self, mesh):
        tree = {"a": jnp.zeros((8, 8))}
        with legacy(mesh):
            assert theirs.with_sharding_constraint(tree, "tp") is tree
            with pytest.raises(TypeError, match="Unsupported sharding type"):
                ours.with_sharding_constraint(tree, "tp")

    def test_extract_shardings_asks_for_a_mesh_that_it_does_not_need(self):
        with pytest.raises(AssertionError):
            theirs.extract_shardings({"step": 3})
        assert ours.extract_shardings({"step": 3}) == {"step": None}
        with pytest.raises(ValueError, match="Mesh can not be None"):
            ours.extract_shardings({"w": SimpleNamespace(sharding=P("tp"))})

    def test_unreduced_axes_are_lost(self):
        explicit = (jax.sharding.AxisType.Explicit,) * 2
        mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=explicit)
        spec = P("fsdp", unreduced={"tp"})
        with legacy(mesh):
            assert isinstance(outcome(theirs.get_corrected_named_sharding, (8,), spec), type)
            assert ours.get_corrected_named_sharding((8,), spec).spec.unreduced == {"tp"}

    def test_names_of_unconstrained_specs(self):
        with pytest.raises(TypeError):
            theirs.get_names_from_partition_spec({"w": P(P.UNCONSTRAINED, "tp")})
        assert ours.get_names_from_partition_spec({"w": P(P.UNCONSTRAINED, "tp")}) == ["tp"]
