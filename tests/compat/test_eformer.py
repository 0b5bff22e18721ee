"""compat.eformer beside the installed eformer, on eight devices; and where eformer is broken."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardrules.compat import eformer as ours
from tests.support.contexts import legacy

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
    names = [name for name in ours.__all__ if name.islower()]
    for name in names:
        expected = inspect.signature(getattr(theirs, name)).parameters
        got = inspect.signature(getattr(ours, name)).parameters
        assert [(p.name, p.default, p.kind) for p in got.values()] == [
            (p.name, p.default, p.kind) for p in expected.values()
        ], name
    assert len(names) == 17


@given(SHAPES, SPECS)
def test_get_corrected_named_sharding(mesh, shape, spec):
    with legacy(mesh):
        expected = outcome(theirs.get_corrected_named_sharding, shape, spec)
        got = outcome(ours.get_corrected_named_sharding, shape, spec)
    assert got == expected or same_error(got, expected)


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


@given(st.lists(NAMES, max_size=3) | st.dictionaries(AXES, NAMES, max_size=3))
def test_get_names_from_partition_spec(tree):
    names = ours.get_names_from_partition_spec(tree)
    assert set(names) == set(theirs.get_names_from_partition_spec(tree))
    assert len(set(names)) == len(names)


def test_names_of_specs_with_reduced_axes():
    """They ended in an error of JAX: iterating over such a spec is not allowed."""
    specs = {"a": P("fsdp", ("tp", "dp"), reduced={"sp"}), "b": [P("tp", unreduced={"ep"})]}
    assert ours.get_names_from_partition_spec(specs) == ["fsdp", "tp", "dp"]
    assert ours.get_names_from_partition_spec(specs["a"]) == ["fsdp", "tp", "dp"]


def pattern_specs(text, default=None, names=("a", "bc", "layers/c", "x", "xx", "")):
    def answers(m, mesh):
        spec_of = m.create_pattern_based_partition_spec(text, mesh, default)
        return [outcome(spec_of, name, None) for name in names]

    return answers


SORTED = {"w": np.ones(4), "b": {"z": np.ones(2), "a": np.ones(2)}}
LEAF = jax.ShapeDtypeStruct((8, 8), "int8")
# What both answer alike, or refuse alike; `mesh` is in force, or not.
ALIKE = [
    lambda m, _: m.names_in_current_mesh("dp", "tp"),
    lambda m, _: m.names_in_current_mesh("dp", "absent"),
    lambda m, _: m.names_in_current_mesh(),
    lambda m, _: m.get_incontext_mesh(),
    lambda m, _: m.get_incontext_mesh(False).empty,
    lambda m, _: m.get_axes_size_in_mesh("fsdp"),
    lambda m, _: m.get_axes_size_in_mesh(["fsdp", "tp"]),
    lambda m, mesh: m.get_axes_size_in_mesh((), mesh),
    lambda m, mesh: m.get_axes_size_in_mesh("absent", mesh),
    lambda m, mesh: m.get_axes_size_in_mesh(3, mesh),
    lambda m, _: m.get_mesh_axis_names(),
    lambda m, mesh: m.get_mesh_axis_names(mesh),
    lambda m, _: m.get_mesh_axis_size(()),
    lambda m, _: m.get_mesh_axis_size(3),
    lambda m, _: m.get_mesh_axis_size("unbound"),
    lambda m, _: m.get_submesh_device_index([]),
    lambda m, _: m.get_submesh_device_index(3),
    *(
        lambda m, _, spec=spec, shape=shape: m.get_corrected_named_sharding(shape, spec)
        for spec in (["fsdp", "tp"], ("fsdp", "tp"), [None, "tp"], [("fsdp", "tp")], [], (None,))
        # beyond 64 bits, too
        for shape in ((8, 8), (2**70, 3), (2**70 + 1, 8), (2**63, 2**64))
    ),
    lambda m, _: m.get_corrected_named_sharding((8,), P("tp"), raise_mesh_error=False).spec,
    lambda m, _: m.with_sharding_constraint(jnp.zeros(8), "tp"),
    lambda m, mesh: m.make_shard_and_gather_fns({"w": P("absent")}, mesh),
    lambda m, _: m.create_pattern_based_partition_spec("a->b")("a", None),
    lambda m, mesh: m.create_pattern_based_partition_spec("a->b->c", mesh),
    lambda m, mesh: m.create_pattern_based_partition_spec("(->b", mesh)("a", None),
    *map(pattern_specs, ["a|b->dp.tp,c->fsdp", "^x$->tp,nothing,.*->dp", "", "a->", "->tp"]),
    pattern_specs("a|b->dp.tp,c->fsdp", P("z")),
    # They raised AttributeError: 'int' object has no attribute 'replace'.
    *(pattern_specs(text, None, (3, None, b"a", ["a"])) for text in ("a->b", "none")),
    lambda m, _: m.match_partition_rules([("w", P("x"))], {"w": np.ones(2)}),
    lambda m, _: list(m.match_partition_rules([("z", P("z")), (".*", P("x"))], SORTED)),
    lambda m, _: list(m.match_partition_rules([(".*", P("x"))], SORTED)["b"]),
    lambda m, _: m.match_partition_rules([(".*", P("x"))], {1: LEAF, "a": LEAF}),  # no order
    lambda m, mesh: m.extract_sharding_structure(arrays(mesh)),
    lambda m, mesh: m.get_shardings_with_structure(arrays(mesh)),
    lambda m, mesh: m.extract_shardings(
        {**arrays(mesh), "w": SimpleNamespace(sharding=P("tp"))}, mesh
    ),
    lambda m, mesh: m.get_partition_spec({"a": arrays(mesh)["sharded"], "step": 3, "flag": True}),
    lambda m, _: m.get_partition_spec({"a": np.zeros(2)}),
    lambda m, _: m.get_partition_spec({"a": jnp.zeros(2)}),
]


def arrays(mesh):
    placed = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("fsdp", "tp")))
    return {"sharded": placed, "single": jnp.zeros(4), "numpy": np.zeros(4), "step": 3}


@pytest.mark.filterwarnings("ignore:Active mesh is empty")
@pytest.mark.parametrize("in_force", [False, True])
def test_both_answer_alike(mesh, in_force):
    for number, call in enumerate(ALIKE):
        with legacy(mesh) if in_force else nullcontext():
            expected, got = (outcome(call, module, mesh) for module in (theirs, ours))
        assert got == expected or same_error(got, expected), number


def test_no_constraint_without_a_mesh():
    x = jnp.zeros(8)
    assert theirs.with_sharding_constraint(x, P("tp")) is x
    assert ours.with_sharding_constraint(x, P("tp")) is x


@pytest.mark.parametrize("axes", ["fsdp", ("fsdp", "tp"), ["tp", "fsdp"], ("dp",), ()])
def test_positions_inside_shard_map(mesh, axes):
    def positions(module):
        def body(x):
            size = module.get_mesh_axis_size(axes)
            return x * 0 + module.get_submesh_device_index(axes) + 100 * size

        spec = P(("dp", "fsdp", "tp"))
        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros(8, "int32"))

    np.testing.assert_array_equal(positions(ours), positions(theirs))


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


TRANSFORMATIONS = {
    "jit": lambda f, x: jax.jit(f)(x),
    "a constant in jit": lambda f, x: jax.jit(lambda y: f(x) + y)(x),
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x] * 3)),
    "grad": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "scan": lambda f, x: jax.lax.scan(lambda c, y: (f(c), f(y)), x, jnp.stack([x] * 2)),
    "remat": lambda f, x: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum())(x),
    "eval_shape": jax.eval_shape,
    "make_jaxpr": lambda f, x: jax.make_jaxpr(f)(x).out_avals[0].shape,
}


@pytest.mark.parametrize("which", [0, 1], ids=["shard", "gather"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_shard_and_gather_functions_inside_transformations(mesh, name, which):
    """They raised `'sharding' not available on traced array` and ConcretizationTypeError."""
    x = jnp.arange(16.0).reshape(8, 2)
    expected, got = (
        TRANSFORMATIONS[name](m.make_shard_and_gather_fns(P("fsdp", "tp"), mesh)[which], x)
        for m in (theirs, ours)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        else:
            assert a == b


HELD_BY_NO_DEVICE = [
    jax.ShapeDtypeStruct((8,), "float32"), "text", object, len, None, {}, 2**40, 2**70,
    np.arange(8, dtype=">f4"), np.array(["text"]), np.array([None]), np.datetime64("2020"),
    np.ma.array([1, 2], mask=[0, 1]), (None, None), ({}, None),
]  # fmt: skip


@pytest.mark.parametrize("value", HELD_BY_NO_DEVICE, ids=repr)
def test_shard_functions_give_back_what_jax_cannot_hold(mesh, value):
    """They raised TypeError or OverflowError, where eformer's give it back as it is."""
    tree = {"x": jnp.zeros(8), "other": value}
    for module in (theirs, ours):
        shard_fn = module.make_shard_and_gather_fns(P("tp"), mesh)[0]
        placed = shard_fn(tensor=tree)
        assert placed["x"].sharding.is_equivalent_to(NamedSharding(mesh, P("tp")), 1)
        assert repr(placed["other"]) == repr(value)
        assert type(shard_fn(value)) is type(value)


def test_shard_functions_place_numbers_with_their_weak_types(mesh):
    placed = ours.make_shard_and_gather_fns(P("tp"), mesh)[0]([3, 2.5, True, np.int8(3)])
    assert [x.sharding.is_fully_replicated for x in placed] == [True] * 4
    assert [(str(x.dtype), x.weak_type) for x in placed] == [
        ("int32", True), ("float32", True), ("bool", False), ("int8", False),
    ]  # fmt: skip


CONTEXTS_OF_TWO = {
    "with mesh inside": lambda mesh, other: (jax.set_mesh(other), mesh),
    "with mesh outside": lambda mesh, other: (mesh, jax.set_mesh(other)),
    "an abstract one inside": lambda mesh, other: (
        mesh, jax.sharding.use_abstract_mesh(other.abstract_mesh),
    ),
}  # fmt: skip
QUESTIONS = [
    lambda m: m.get_incontext_mesh(),
    lambda m: m.names_in_current_mesh("dp", "tp"),
    lambda m: m.get_axes_size_in_mesh("fsdp"),
    lambda m: m.get_mesh_axis_names(),
    lambda m: m.get_corrected_named_sharding((8, 8), P("fsdp", "tp")),
    lambda m: m.extract_shardings({"w": SimpleNamespace(sharding=P("tp")), "step": 3}),
    lambda m: m.match_partition_rules([("w", P("x"))], {"w": np.ones(2)}),
    lambda m: m.create_pattern_based_partition_spec("a->b")("a", None),
]


@pytest.mark.parametrize("name", CONTEXTS_OF_TWO)
def test_two_contexts_that_disagree(mesh, name):
    """All raised "two meshes are in force", even what never uses a mesh."""
    other = jax.make_mesh((2, 4), ("a", "b"))
    for question in QUESTIONS:
        outer, inner = CONTEXTS_OF_TWO[name](mesh, other)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with outer, inner:
                assert question(ours) == question(theirs)


@pytest.mark.parametrize("manual", [{"dp", "fsdp", "tp"}, {"fsdp"}])
def test_with_mesh_around_shard_map(mesh, manual):
    """get_incontext_mesh gave an AbstractMesh without devices, and specs became P()."""
    answers = []

    def body(x):
        answers.append([[question(module) for question in QUESTIONS] for module in (ours, theirs)])
        return x

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names=manual
    )
    with legacy(mesh):
        jax.jit(mapped)(jnp.zeros((8, 8)))
    assert answers[0][0] == answers[0][1]
    assert answers[0][0][0].devices.shape == (1, 4, 2)
    assert answers[0][0][4].spec == P("fsdp", "tp")


def test_a_spec_in_a_rule_means_what_it_means_alone(mesh):
    """A list raised `unhashable type`, though a list stands for a spec."""
    with legacy(mesh):
        for spec in (["fsdp", "tp"], [["fsdp", "tp"]], "tp", None):
            [found] = ours.match_partition_rules([("w", spec)], {"w": np.ones((8, 8))}).values()
            assert ours.get_corrected_named_sharding((8, 8), spec) == (
                ours.get_corrected_named_sharding((8, 8), found)
            )


SYMBOLIC = ["b, 8", "4*b, 8", "8*b + 8, 3", "b, 2*b", "2*c + 2, 4*c"]


@pytest.mark.parametrize("text", SYMBOLIC)
@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P(("fsdp", "tp"))], ids=str)
def test_symbolic_dimensions(mesh, text, spec):
    """`'_DimExpr' cannot be interpreted as an integer`."""
    shape = jax.export.symbolic_shape(text)
    with legacy(mesh):
        expected, got = (m.get_corrected_named_sharding(shape, spec) for m in (theirs, ours))
        assert got == expected
        for module in (theirs, ours):

            def there_and_back(x, module=module):
                shard_fn, gather_fn = module.make_shard_and_gather_fns(spec, mesh)
                return gather_fn(shard_fn(module.with_sharding_constraint(x, spec)))

            abstract = jax.ShapeDtypeStruct(shape, "float32")
            exported = jax.export.export(jax.jit(there_and_back))(abstract)
            assert str(exported.out_avals[0].shape) == str(exported.in_avals[0].shape)


def test_donating_what_a_shard_function_gives_leaves_its_argument(mesh):
    """An array that was in place came back as it was, not as a copy, as eformer's."""
    for module in (theirs, ours):
        x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("tp")))
        module.make_shard_and_gather_fns(P("tp"), mesh)[0](x).delete()
        assert not x.is_deleted()


def test_the_names_of_the_settings(monkeypatch):
    for name in ("MIN_SHARDING_SIZE", "LOG_SHARDING_MOVE"):
        monkeypatch.delenv(name, raising=False)
        assert getattr(ours, name) == getattr(theirs, name)
        assert type(getattr(ours, name)) is type(getattr(theirs, name))
    monkeypatch.setenv("MIN_SHARDING_SIZE", "7")
    monkeypatch.setenv("LOG_SHARDING_MOVE", "on")
    from shardrules.compat.eformer import LOG_SHARDING_MOVE, MIN_SHARDING_SIZE

    assert (MIN_SHARDING_SIZE, LOG_SHARDING_MOVE) == (7, True)
    with pytest.raises(AttributeError, match="no attribute 'MAX_SHARDING_SIZE'"):
        ours.MAX_SHARDING_SIZE  # noqa: B018


@given(SHAPES, SPECS)
def test_as_many_warnings_of_corrections(mesh, shape, spec):
    """UNCONSTRAINED, which becomes None, was not counted."""
    calls = [
        lambda m: m.get_corrected_named_sharding(shape, spec),
        lambda m: m.with_sharding_constraint(jnp.ones(shape), spec),
    ]
    with pytest.MonkeyPatch.context() as patched, legacy(mesh):
        patched.setattr(theirs, "LOG_SHARDING_MOVE", True)
        patched.setenv("LOG_SHARDING_MOVE", "true")
        for call in calls:
            counts = []
            for module in (theirs, ours):
                with warnings.catch_warnings(record=True) as record:
                    warnings.simplefilter("always")
                    failed = isinstance(outcome(call, module), type)
                counts.append(failed or sum(w.category is UserWarning for w in record))
                assert failed or module is theirs or {w.filename for w in record} <= {__file__}
            assert counts[0] == counts[1]


class TestWhereEformerIsBroken:
    """The table of docs/guides/eformer.md, row by row: eformer's fault first, then ours working."""

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
