"""compat.eformer beside the installed eformer, on eight devices; and where eformer is broken.

`patch` puts the code of compat's functions in the place of eformer's: tests/compat/test_patch.py sees to that.
"""

import inspect
import re
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
from tests.support import contexts
from tests.support.contexts import legacy, nothing
from tests.support.slow import slow

theirs = pytest.importorskip("eformer.escale.partition.constraints", reason="eformer is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

AXES = st.sampled_from(["dp", "fsdp", "tp", "absent"])
ENTRIES = st.one_of(
    st.none(), AXES, st.lists(AXES, min_size=1, max_size=3, unique=True).map(tuple),
    st.just(P.UNCONSTRAINED),
)  # fmt: skip
SPECS = st.lists(ENTRIES, max_size=4).map(lambda entries: P(*entries))
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 24]), max_size=4).map(tuple)


def outcome(call, *args, **kwargs):
    """The result, with where its arrays are and what they hold; or the type of what was raised."""
    result = contexts.outcome(call, *args, **kwargs)
    if isinstance(result, jax.sharding.Mesh | NamedSharding | type):
        return result
    leaves, treedef = jax.tree.flatten(result)
    return (treedef, [described(leaf) for leaf in leaves]) if leaves else result


def described(leaf):
    if isinstance(leaf, jax.Array):
        indices = {device.id: str(at) for device, at in leaf.sharding.devices_indices_map(leaf.shape).items()}
        # JAX cannot fetch all arrays without elements that are cut; what they hold is their shape's.
        values = leaf if leaf.size else np.empty(leaf.shape)
        return indices, leaf.dtype, leaf.weak_type, values.tolist()
    return (type(leaf), repr(leaf)) if isinstance(leaf, np.ndarray | np.generic) else leaf


def same_error(got, expected):
    if not (isinstance(got, type) and isinstance(expected, type)):
        return False
    # JAX's error for an axis used twice is a private class; ours is a ValueError.
    duplicate = expected.__name__ == "DuplicateSpecError" and got is ValueError
    return duplicate or issubclass(got, expected) or issubclass(expected, got)


def test_the_same_functions_with_the_same_signatures():
    names = [name for name in ours.__all__ if name.islower()]
    for name in names:
        expected, got = (inspect.signature(getattr(m, name)).parameters for m in (theirs, ours))
        assert [(p.name, p.default, p.kind) for p in got.values()] == [
            (p.name, p.default, p.kind) for p in expected.values()
        ], name
    assert len(names) == 17


@given(SHAPES, SPECS)
def test_any_spec_on_any_shape(mesh, shape, spec):
    x = jnp.ones(shape)
    with legacy(mesh):
        expected, got = (outcome(m.get_corrected_named_sharding, shape, spec) for m in (theirs, ours))
    assert got == expected or same_error(got, expected)

    def placed(module):
        return module.make_shard_and_gather_fns(spec, mesh)[0](x)

    expected, got = outcome(placed, theirs), outcome(placed, ours)
    if got != expected and not same_error(got, expected):
        # theirs was left where it was
        assert isinstance(placed(theirs).sharding, SingleDeviceSharding)
        assert placed(ours).sharding.is_fully_replicated


NAMES = st.recursive(
    st.none() | AXES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(AXES, inner, max_size=2), max_leaves=8
)


@given(st.lists(NAMES, max_size=3) | st.dictionaries(AXES, NAMES, max_size=3))
def test_get_names_from_partition_spec(tree):
    names = ours.get_names_from_partition_spec(tree)
    assert set(names) == set(theirs.get_names_from_partition_spec(tree))
    assert len(set(names)) == len(names)


def pattern_specs(text, default=None, names=("a", "bc", "layers/c", "x", "xx", "")):
    def answers(m, mesh):
        spec_of = m.create_pattern_based_partition_spec(text, mesh, default)
        return [outcome(spec_of, name, None) for name in names]

    return answers


def numbers(*shape):
    return jnp.arange(np.prod(shape), dtype="float32").reshape(shape)


def constrained(shape, spec, transform=lambda f: f):
    return lambda m, _: transform(lambda x: m.with_sharding_constraint(x, spec))(numbers(*shape))


def there_and_back(m, mesh):
    specs = {"w": P("fsdp", "tp"), "odd": P("tp"), "n": {"b": P("dp", "tp")}}
    tree = {"w": numbers(8, 8), "odd": numbers(3), "n": {"b": numbers(4, 4)}}
    shard_fns, gather_fns = m.make_shard_and_gather_fns(specs, mesh)
    placed = jax.tree.map(lambda f, x: f(x), shard_fns, tree)
    return placed, jax.tree.map(lambda f, x: f(x), gather_fns, placed)


def transformed(transform, which):
    def answer(m, mesh):
        return transform(m.make_shard_and_gather_fns(P("fsdp", "tp"), mesh)[which], numbers(8, 2))

    return answer


def sharded(value):
    """What JAX cannot hold is given back as it is; it raised TypeError or OverflowError."""

    def answer(m, mesh):
        shard_fn = m.make_shard_and_gather_fns(P("tp"), mesh)[0]
        return (shard_fn(tensor={"x": numbers(8), "other": value}), type(shard_fn(value)), repr(value))

    return answer


def is_argument_kept(m, mesh):
    """An array that was in place came back as it was, not as a copy."""
    x = jax.device_put(jnp.ones(8), NamedSharding(mesh, P("tp")))
    m.make_shard_and_gather_fns(P("tp"), mesh)[0](x).delete()
    return x.is_deleted()


def positions(m, mesh):
    every = ["fsdp", ("fsdp", "tp"), ["tp", "fsdp"], ("dp",), ()]

    def body(x):
        return [x * 0 + m.get_submesh_device_index(axes) + 100 * m.get_mesh_axis_size(axes) for axes in every]

    spec = P(("dp", "fsdp", "tp"))
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(jnp.zeros(8, "int32"))


def exported(text, spec):
    """`'_DimExpr' cannot be interpreted as an integer`."""
    shape = jax.export.symbolic_shape(text)

    def answer(m, mesh):
        def step(x):
            shard_fn, gather_fn = m.make_shard_and_gather_fns(spec, mesh)
            return gather_fn(shard_fn(m.with_sharding_constraint(x, spec)))

        module = jax.export.export(jax.jit(step))(jax.ShapeDtypeStruct(shape, "float32"))
        assert str(module.out_avals[0].shape) == str(module.in_avals[0].shape)
        return outcome(m.get_corrected_named_sharding, shape, spec)

    return answer


def arrays(mesh):
    placed = jax.device_put(jnp.zeros((8, 8)), NamedSharding(mesh, P("fsdp", "tp")))
    return {"sharded": placed, "single": jnp.zeros(4), "numpy": np.zeros(4), "step": 3}


TREE = {"a": jnp.zeros((8, 8)), "b": [jnp.zeros(3), 5, "x", np.zeros(8)], "c": None}
CONSTRAINED = [
    ((8, 8), P("fsdp", "tp")), ((8, 7), P("fsdp", "tp")), ((8,), P("tp", "fsdp")),
    ((8, 8, 8), P(("fsdp", "tp"))), ((4, 8), P(("fsdp", "tp"), "dp")), ((8, 8), P("absent", "tp")),
    ((8, 8), P()), ((7, 7), P("tp")), ((8, 8), P("tp", P.UNCONSTRAINED)),
]  # fmt: skip
TRANSFORMATIONS = [
    lambda f, x: jax.jit(f)(x),
    lambda f, x: jax.jit(lambda y: f(x) + y)(x),  # a constant in jit
    lambda f, x: jax.vmap(f)(jnp.stack([x] * 3)),
    lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    lambda f, x: jax.lax.scan(lambda c, y: (f(c), f(y)), x, jnp.stack([x] * 2)),
    lambda f, x: jax.grad(lambda x: (jax.checkpoint(f)(x) ** 2).sum())(x),
    lambda f, x: (jax.eval_shape(f, x).shape, jax.eval_shape(f, x).dtype),
    lambda f, x: jax.make_jaxpr(f)(x).out_avals[0].shape,
]
HELD_BY_NO_DEVICE = [
    jax.ShapeDtypeStruct((8,), "float32"), "text", object, len, None, {}, 2**40, 2**70,
    np.arange(8, dtype=">f4"), np.array(["text"]), np.array([None]), np.datetime64("2020"),
    np.ma.array([1, 2], mask=[0, 1]), (None, None), ({}, None),
]  # fmt: skip
SYMBOLIC = ["b, 8", "8*b + 8, 3", "2*c + 2, 4*c"]
SORTED = {"w": np.ones(4), "b": {"z": np.ones(2), "a": np.ones(2)}}
LEAF = jax.ShapeDtypeStruct((8, 8), "int8")
# What never uses a mesh, or asks for it only.
QUESTIONS = [
    lambda m, _: m.get_incontext_mesh(),
    lambda m, _: m.names_in_current_mesh("dp", "tp"),
    lambda m, _: m.get_axes_size_in_mesh("fsdp"),
    lambda m, _: m.get_mesh_axis_names(),
    lambda m, _: m.get_corrected_named_sharding((8, 8), P("fsdp", "tp")),
    lambda m, _: m.match_partition_rules([("w", P("x"))], {"w": np.ones(2)}),
    lambda m, _: m.create_pattern_based_partition_spec("a->b")("a", None),
    # without a mesh both refuse, eformer by an AssertionError
    lambda m, _: m.extract_shardings({"w": SimpleNamespace(sharding=P("tp")), "step": 3}),
]
ALIKE = [
    *QUESTIONS[:-1],
    lambda m, _: m.names_in_current_mesh("dp", "absent"),
    lambda m, _: m.names_in_current_mesh(),
    lambda m, _: m.get_incontext_mesh(False).empty,
    lambda m, _: m.get_axes_size_in_mesh(["fsdp", "tp"]),
    lambda m, mesh: m.get_axes_size_in_mesh((), mesh),
    lambda m, mesh: m.get_axes_size_in_mesh("absent", mesh),
    lambda m, mesh: m.get_axes_size_in_mesh(3, mesh),
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
    lambda m, mesh: m.analyze_sharding_strategy({"w": PLACED}, {"w": P("absent")}, mesh),
    lambda m, mesh: m.create_pattern_based_partition_spec("a->b->c", mesh),
    lambda m, mesh: m.create_pattern_based_partition_spec("(->b", mesh)("a", None),
    *map(pattern_specs, ["a|b->dp.tp,c->fsdp", "^x$->tp,nothing,.*->dp", "", "a->", "->tp"]),
    pattern_specs("a|b->dp.tp,c->fsdp", P("z")),
    # They raised AttributeError: 'int' object has no attribute 'replace'.
    *(pattern_specs(text, None, (3, None, b"a", ["a"])) for text in ("a->b", "none")),
    lambda m, _: list(m.match_partition_rules([("z", P("z")), (".*", P("x"))], SORTED)),
    lambda m, _: list(m.match_partition_rules([(".*", P("x"))], SORTED)["b"]),
    lambda m, _: m.match_partition_rules([(".*", P("x"))], {1: LEAF, "a": LEAF}),  # no order
    lambda m, mesh: m.extract_sharding_structure(arrays(mesh)),
    lambda m, mesh: m.get_shardings_with_structure(arrays(mesh)),
    lambda m, mesh: m.extract_shardings({**arrays(mesh), "w": SimpleNamespace(sharding=P("tp"))}, mesh),
    lambda m, mesh: m.get_partition_spec({"a": arrays(mesh)["sharded"], "step": 3, "flag": True}),
    lambda m, _: m.get_partition_spec({"a": np.zeros(2)}),
    lambda m, _: m.get_partition_spec({"a": jnp.zeros(2)}),
    *(constrained(shape, spec, t) for shape, spec in CONSTRAINED for t in (lambda f: f, jax.jit)),
    lambda m, _: m.with_sharding_constraint(TREE, P("fsdp", "tp")),
    lambda m, mesh: m.with_sharding_constraint(TREE, NamedSharding(mesh, P("fsdp", "tp"))),
    lambda m, _: m.with_sharding_constraint(TREE["a"], P("tp")) is TREE["a"],  # without a mesh
    there_and_back,
    *(transformed(how, which) for how in TRANSFORMATIONS for which in (0, 1)),
    *map(sharded, HELD_BY_NO_DEVICE),
    is_argument_kept,
    positions,
    *(exported(text, spec) for text in SYMBOLIC for spec in (P("fsdp", "tp"), P(("fsdp", "tp")))),
]


@pytest.mark.filterwarnings("ignore:Active mesh is empty")
@pytest.mark.parametrize("in_force", [slow(False), True])
def test_both_answer_alike(mesh, in_force):
    answered = 0
    for number, call in enumerate(ALIKE):
        with legacy(mesh) if in_force else nullcontext():
            expected, got = (outcome(call, module, mesh) for module in (theirs, ours))
        assert got == expected or same_error(got, expected), number
        answered += not isinstance(expected, type)
    assert answered > (80 if in_force else 40)


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


@pytest.mark.parametrize("name", CONTEXTS_OF_TWO)
def test_two_contexts_that_disagree(mesh, name):
    """All raised "two meshes are in force", even what never uses a mesh."""
    other = jax.make_mesh((2, 4), ("a", "b"))
    for question in QUESTIONS:
        outer, inner = CONTEXTS_OF_TWO[name](mesh, other)
        with outer, inner:
            assert question(ours, mesh) == question(theirs, mesh)


@pytest.mark.parametrize("manual", [{"dp", "fsdp", "tp"}, {"fsdp"}])
def test_with_mesh_around_shard_map(mesh, manual):
    """get_incontext_mesh gave an AbstractMesh without devices, and specs became P()."""
    answers = []

    def body(x):
        answers.extend([call(module, mesh) for call in QUESTIONS] for module in (ours, theirs))
        return x

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names=manual)
    with legacy(mesh):
        jax.jit(mapped)(jnp.zeros((8, 8)))
    assert answers[0] == answers[1]
    assert answers[0][0].devices.shape == (1, 4, 2)
    assert answers[0][4].spec == P("fsdp", "tp")


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


# --- the tables of docs/guides: eformer's fault or answer, then ours ---

PLACED = jnp.zeros((8, 8))
HOST = np.arange(8.0, dtype="float32")
REDUCED = {"a": P("fsdp", ("tp", "dp"), reduced={"sp"}), "b": [P("tp", unreduced={"ep"})]}
EXPLICIT = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)


def on_fsdp(m, mesh):
    x = m.with_sharding_constraint(PLACED, P("fsdp"))
    return x.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 2)


def analyzed(leaf, spec, mesh=None):
    def answer(m, fixture):
        found = m.analyze_sharding_strategy({"w": leaf}, {"w": spec}, mesh or fixture)
        return [*found["memory_per_device"].values()], found["balance_score"]

    return answer


def specs(rules):
    return lambda m, _: m.match_partition_rules(rules, {"a": LEAF})


def spec_of(shape, spec):
    return lambda m, _: m.get_corrected_named_sharding(shape, spec).spec


BROKEN = [
    # no mesh is seen under set_mesh
    (jax.set_mesh, lambda m, mesh: m.get_incontext_mesh() is mesh, AssertionError, True),
    (jax.set_mesh, on_fsdp, False, True),
    (jax.set_mesh, lambda m, _: m.names_in_current_mesh("fsdp"), False, True),
    (jax.set_mesh, spec_of((8, 7), P("fsdp", "tp")), AssertionError, P("fsdp", None)),
    # numpy arrays stay unsharded
    (nothing, lambda m, mesh: m.make_shard_and_gather_fns(P("tp"), mesh)[0](HOST) is HOST, True, False),
    (nothing, lambda m, mesh: m.make_shard_and_gather_fns(P("tp"), mesh)[0](HOST).sharding.spec,
     AttributeError, P("tp")),
    # analyze_sharding_strategy raises on axes in a tuple, and fills in nothing
    (nothing, analyzed(np.zeros((8, 8), "float32"), P(("fsdp", "tp"))), KeyError, ([32] * 8, 1.0)),
    (nothing, analyzed(np.zeros((8, 8), "float32"), P("fsdp")), ([], 0.0), ([64] * 8, 1.0)),
    (nothing, analyzed(np.zeros(12, "int8"), P("dp"), AbstractMesh((8,), ("dp",))), ([], 0.0),
     ([2, 2, 2, 2, 2, 2, 0, 0], 0.75)),
    # errors inside a tree are swallowed
    (legacy, lambda m, _: m.with_sharding_constraint({"a": PLACED}, "tp") == {"a": PLACED}, True, TypeError),
    # extract_shardings asks for a mesh that it does not need
    (nothing, lambda m, _: m.extract_shardings({"step": 3}) == {"step": None}, AssertionError, True),
    # axes of a spec are lost: unreduced, reduced, beside UNCONSTRAINED
    (lambda _: legacy(EXPLICIT), spec_of((8,), P("fsdp", unreduced={"tp"})), ValueError, P("fsdp", unreduced={"tp"})),
    (nothing, lambda m, _: m.get_names_from_partition_spec({"w": P(P.UNCONSTRAINED, "tp")}) == ["tp"], TypeError, True),
    (nothing, lambda m, _: m.get_names_from_partition_spec(REDUCED) == ["fsdp", "tp", "dp"], Exception, True),
    (nothing, lambda m, _: m.get_names_from_partition_spec(REDUCED["a"]) == ["fsdp", "tp", "dp"], Exception, True),
    # the other rows of docs/guides/eformer.md
    (legacy, specs([(".*", ("tp", None))]), {"a": ("tp", None)}, {"a": P("tp", None)}),
    (legacy, specs([(".*", P("tp")), ("(", P())]), {"a": P("tp")}, re.error),
    (legacy, lambda m, _: m.match_partition_rules([(".*", P("tp"))], {"a": SimpleNamespace(shape=(8,))}), AttributeError, {"a": P("tp")}),
    (legacy, spec_of((8, 8), [["fsdp", "tp"]]), P(), P(("fsdp", "tp"), None)),
    (legacy, spec_of(8, P()), TypeError, P()),
    (legacy, spec_of((8,), P(3)), P(), TypeError),
    (legacy, spec_of((8,), "tp"), P(), P("tp")),
    (legacy, lambda m, _: m.get_corrected_named_sharding((-8,), P("tp")) is None, False, ValueError),
    (legacy, lambda m, _: len(m.with_sharding_constraint({1: PLACED, "a": PLACED}, P("tp"))), 2, ValueError),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_where_eformer_is_broken(mesh, number):
    context, call, *expected = BROKEN[number]
    for module, answer in zip((theirs, ours), expected, strict=True):
        with context(mesh):
            if isinstance(answer, type):
                with pytest.raises(answer):
                    call(module, mesh)
            else:
                assert call(module, mesh) == answer


def test_analyze_sharding_strategy(mesh):
    tree = {"w": np.zeros((8, 8), "float32"), "b": np.zeros(6, "float16"), "s": np.zeros(())}
    expected, got = (
        m.analyze_sharding_strategy(tree, {"w": P("fsdp", "tp"), "b": P(), "s": P()}, mesh) for m in (theirs, ours)
    )
    assert got.keys() == expected.keys()
    for key in ("total_parameters", "sharded_parameters"):
        assert got[key] == expected[key]
    per_device = 64 * 4 // 8 + 6 * 2 + 8
    assert got["memory_per_device"] == {str(d): per_device for d in mesh.devices.ravel()}
    assert got["partition_stats"][str(P())] == {"leaves": 2, "parameters": 7, "bytes": 20}


def test_messages(mesh):
    with pytest.warns(UserWarning, match="Active mesh is empty") as empty:
        ours.get_corrected_named_sharding((8,), P("tp"), raise_mesh_error=False)
    assert [w.filename for w in empty] == [__file__]
    with legacy(mesh), pytest.raises(TypeError, match="Unsupported sharding type"):
        ours.with_sharding_constraint(PLACED, "tp")
    with pytest.raises(KeyError, match="absent"):
        ours.analyze_sharding_strategy({"w": PLACED}, {"w": P("absent")}, mesh)
    with pytest.raises(ValueError, match="Mesh can not be None"):
        ours.extract_shardings({"w": SimpleNamespace(sharding=P("tp"))})
