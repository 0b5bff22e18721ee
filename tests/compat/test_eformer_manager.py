"""compat.eformer_manager beside the installed eformer; and where eformer is broken."""

import copy
import functools
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules.compat import eformer_common_types as names
from shardrules.compat import eformer_manager as ours
from tests.support.contexts import legacy, outcome

theirs = pytest.importorskip("eformer.escale.partition.manager", reason="eformer is not installed")
their_names = pytest.importorskip("eformer.common_types")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MODES = [names.MODE_TRAIN, names.MODE_PREFILL, names.MODE_DECODE, names.MODE_INSERT]
COMPOSITES = [kind.__name__ for kind in names.DynamicShardingAxes.__subclasses__()]
SEMANTIC = [name for name in vars(names).values() if type(name) is str and name in ours._FIELD_OF]
MESH_AXES = ["dp", "fsdp", "tp", "sp", "ep"]


@pytest.fixture
def registry():
    for module in (ours, theirs):
        module.PartitionAxis.clear_registered_axes()
    yield
    for module in (ours, theirs):
        module.PartitionAxis.clear_registered_axes()


@pytest.fixture
def five_axes():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2, 1, 1), MESH_AXES)


def can_be_placed(resolved):
    """Whether the mesh axes that eformer gives dimensions make a spec that JAX can place."""
    parts = (part for one in resolved if isinstance(one, list | tuple) for part in one)
    return all(isinstance(part, str) for part in parts)


class TestNames:
    def test_all_names_are_there(self):
        modules = {"jax", "jnp", "np", "tp"}
        of_theirs = {name for name in vars(their_names) if not name.startswith("_")}
        assert set(names.__all__) == of_theirs - modules

    def test_values(self):
        for name in set(names.__all__) - {"NOT_GIVEN", "EMPTY_VAL", "AxisType", "Shape"}:
            got, expected = getattr(names, name), getattr(their_names, name)
            if name in [*COMPOSITES, "DynamicShardingAxes"]:
                assert got.__name__ == expected.__name__
                assert got._fields == expected._fields
            else:
                assert got == expected, name
        for name in COMPOSITES:
            got, expected = getattr(names, name), getattr(their_names, name)
            assert (got.axes, got.mode) == (expected.axes, expected.mode), name
            assert pickle.loads(pickle.dumps(got)) is got

    def test_what_is_not_given_is_one_object(self):
        assert isinstance(names.NOT_GIVEN, names.EMPTY_VAL)
        for made in (copy.deepcopy(names.NOT_GIVEN), pickle.loads(pickle.dumps(names.NOT_GIVEN))):
            assert made is names.NOT_GIVEN

    @pytest.mark.parametrize("name", ours.__all__)
    def test_signatures(self, name):
        got, expected = getattr(ours, name), getattr(theirs, name)
        pairs = [(got, expected)]
        if inspect.isclass(got):
            methods = {n for n in vars(expected) if callable(getattr(expected, n))}
            public = {n for n in methods & vars(got).keys() if not n.startswith("_")}
            assert "resolve_axis" in public or "shard" in public
            pairs += [(getattr(got, n), getattr(expected, n)) for n in public]
        for pair in pairs:
            mine, their = (list(inspect.signature(one).parameters) for one in pair)
            assert mine == their, pair


FIELDS = {
    field: st.one_of(st.none(), st.sampled_from(MESH_AXES), st.sampled_from([("fsdp", "sp"), ("tp",)]))
    for field in ours._FIELDS[5:]
} | {field: st.sampled_from(["x", "y"]) for field in ours._FIELDS[:5]}
GIVEN_FIELDS = st.fixed_dictionaries({}, optional=FIELDS)
NAMES = st.sampled_from([*SEMANTIC, None, names.EMPTY])
LISTS = st.lists(st.sampled_from([*SEMANTIC, "tp", "mesh_axis"]), min_size=1, max_size=3)
DIMENSIONS = st.lists(st.one_of(NAMES, LISTS), max_size=4)


ARGUMENTS = [
    ((["__BATCH__"], "__train__"), {}), ((["__BATCH__"],), {"mode": "__train__", "shape": (4,)}),
    ((["__BATCH__", "__QUERY_LENGTH__"], 1), {"shape": (4, 1)}),
    ((["__BATCH__", "__QUERY_LENGTH__"], 1), {"shape": (4, 2)}),
    ((["__BATCH__", "__QUERY_LENGTH__"], -1), {"shape": (4, 1)}),
    ((["__BATCH__"], True), {"shape": (4, 1)}), ((["__BATCH__"], 1), {}),
    ((["__BATCH__"], 1), {"shape": (4,)}), ((["__BATCH__"],), {}), ((), {"mode": "__train__"}),
    ((), {}), ((["__BATCH__", "tp"], "__train__"), {}), ((["batch_axis"], "__train__"), {}),
    (([3], "__train__"), {}), (("__BATCH__", "__train__"), {}), (([], "__train__"), {}),
]  # fmt: skip


class TestResolving:
    @given(GIVEN_FIELDS)
    def test_fields(self, fields):
        got, expected = ours.PartitionAxis(**fields), theirs.PartitionAxis(**fields)
        for field in ours._FIELDS:
            assert getattr(got, field) == getattr(expected, field), field
        assert got.to_dict() == expected.to_dict()
        assert ours.PartitionAxis.from_dict(got.to_dict()) == got

    @given(GIVEN_FIELDS, DIMENSIONS, st.sampled_from([*MODES, "another mode"]))
    def test_dimensions(self, fields, axes, mode):
        got, expected = ours.PartitionAxis(**fields), theirs.PartitionAxis(**fields)
        wanted = expected.resolve_axis(axes, mode)
        if not can_be_placed(wanted):  # see BROKEN
            return
        assert got.resolve_axis(axes, mode) == wanted
        assert got.resolve_spec(axes, mode) == expected.resolve_spec(axes, mode)

    @given(GIVEN_FIELDS, st.sampled_from(COMPOSITES), st.one_of(st.none(), st.tuples(*[st.sampled_from([1, 4])] * 4)))
    def test_composites(self, fields, name, shape):
        got = ours.PartitionManager(ours.PartitionAxis(**fields))
        expected = theirs.PartitionManager(theirs.PartitionAxis(**fields))
        more = {} if shape is None else {"shape": shape}
        theirs_there = getattr(their_names, name)
        wanted = outcome(expected.resolve, theirs_there, **more)
        if wanted is ValueError and shape is not None:  # a nested list
            return
        for composite in (getattr(names, name), theirs_there):
            assert outcome(got.resolve, composite, **more) == wanted
            assert outcome(got.resolve, dynamic_axes=composite, **more) == wanted

    def test_arguments(self):
        """The mode that `mode=1` finds by a shape shows: the answers to decode and train differ."""
        answered, decode = 0, {"decode_query_sequence_axis": "ep"}
        for args, kwargs in ARGUMENTS:
            got, expected = (
                outcome(m.PartitionManager(m.PartitionAxis(**decode)).resolve, *args, **kwargs) for m in (ours, theirs)
            )
            assert got == expected, (args, kwargs)
            answered += not isinstance(expected, type)
        assert 0 < answered < len(ARGUMENTS)

    def test_a_composite_of_ones_own(self):
        manager = ours.PartitionManager(ours.PartitionAxis())
        own = names.DynamicShardingAxes([names.HEAD, names.EMPTY], names.MODE_TRAIN)
        assert manager.resolve(own) == manager.resolve(own, "ignored") == P("tp", None)
        # As in eformer, axes and mode together win.
        assert manager.resolve([names.BATCH], names.MODE_TRAIN, own) == P(("fsdp", "dp"))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["A", "B", names.HEAD, names.EMPTY, " A "]),
        st.sampled_from(
            ["head_axis", "query_sequence_axis", "tp", names.BATCH, names.DP, "A", "B", ["sp", "tp"], ("B",)]
        ),
        st.sampled_from([names.NOT_GIVEN, None, "dp", "decode_head_axis", names.KV_HEAD]),
        st.booleans(),
        st.booleans(),
    ),
    max_size=5,
)


class TestRegistry:
    @given(OPERATIONS, st.lists(st.sampled_from(["A", "B", names.HEAD, ["A", "x"]]), max_size=3))
    def test_registrations(self, operations, axes):
        for module in (ours, theirs):
            module.PartitionAxis.clear_registered_axes()
        for name, rule, generation, override, remove in operations:
            results = []
            for module, types in ((ours, names), (theirs, their_names)):
                axis = module.PartitionAxis
                in_generation = types.NOT_GIVEN if generation is names.NOT_GIVEN else generation
                more = {"generation_axis_rule": in_generation, "override": override}
                results.append(
                    outcome(axis.unregister, name, missing_ok=override)
                    if remove
                    else outcome(axis.register, name, rule, **more)
                )
            assert results[0] == results[1]
        got = ours.PartitionAxis.get_registered_axes()
        expected = theirs.PartitionAxis.get_registered_axes()
        for rules in expected.values():
            if rules["generation_axis_rule"] is their_names.NOT_GIVEN:
                rules["generation_axis_rule"] = names.NOT_GIVEN
        assert got == expected
        for mode in MODES:
            wanted = outcome(theirs.PartitionAxis().resolve_axis, axes, mode)
            found = outcome(ours.PartitionAxis().resolve_axis, axes, mode)
            if wanted is ValueError or can_be_placed(wanted):
                assert found == wanted
        for module in (ours, theirs):
            module.PartitionAxis.clear_registered_axes()

    def test_names_that_stand_for_each_other(self, registry):
        ours.PartitionAxis.register("A", "B")
        ours.PartitionAxis.register("B", ["A", "tp"])
        with pytest.raises(ValueError, match="Cyclic semantic axis registration at 'B'"):
            ours.PartitionAxis().resolve_axis(["A"], names.MODE_TRAIN)


MESSAGES = [
    (lambda axis: axis().resolve_axis(["heads"], "m"), ValueError, "Unknown semantic axis name: 'heads'; register it"),
    (lambda axis: axis(attention_dim_axis=names.NOT_GIVEN), ValueError, "attention_dim_axis is NOT_GIVEN; give mesh axes"),
    (lambda axis: ours.PartitionManager({"head_axis": "tp"}), TypeError, "Expected PartitionAxis, got <class 'dict'>"),
    (lambda axis: axis.register(names.HEAD, "tp"), ValueError, "exists; give another, or override=True"),
    (lambda axis: axis.register(names.EMPTY, "tp"), ValueError, "exists; give another, or override=True"),
    (lambda axis: axis.register(" ", "tp"), ValueError, "must be a non-empty string"),
    (lambda axis: axis.unregister("A", missing_ok=False), KeyError, "the name 'A' is not registered"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), MESSAGES, ids=range(len(MESSAGES)))
def test_messages(registry, call, error, message):
    with pytest.raises(error, match=message):
        call(ours.PartitionAxis)


class TestSharding:
    @given(
        st.sampled_from(COMPOSITES),
        st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4).map(tuple),
        st.booleans(),
        st.booleans(),
    )
    def test_composites_on_a_mesh(self, five_axes, name, shape, auto_correct, inside):
        x = jnp.arange(np.prod(shape), dtype="float32").reshape(shape)

        def constrained(module, types):
            more = {"partition_manager": module.PartitionManager(module.PartitionAxis())}
            more |= {"dynamic_axes": getattr(types, name), "auto_correct": auto_correct}
            call = functools.partial(module.apply_logical_sharding, **more)
            with legacy(five_axes):
                return outcome(jax.jit(call) if inside else call, x)

        got, expected = constrained(ours, names), constrained(theirs, their_names)
        if isinstance(expected, type):
            assert got == expected
            return
        assert got.sharding.is_equivalent_to(expected.sharding, len(shape))
        np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
    def test_under_set_mesh(self, axis_type):
        """Where eformer's finds no mesh."""
        types = (getattr(jax.sharding.AxisType, axis_type),) * 2
        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"), axis_types=types)
        manager = ours.PartitionManager(ours.PartitionAxis())
        step = jax.jit(lambda x: manager.shard(2 * x, dynamic_axes=names.ColumnWise))
        with jax.set_mesh(mesh):
            found = step(jnp.ones((8, 8))).sharding
        # The mesh has no "sp" to go with "fsdp".
        assert found.is_equivalent_to(NamedSharding(mesh, P(None, "tp")), 2)

    def test_without_a_mesh(self):
        x = jnp.ones((4, 4))
        manager = ours.PartitionManager(ours.PartitionAxis())
        with pytest.raises(AssertionError):
            manager.shard(x, [names.BATCH, None], names.MODE_TRAIN)
        assert manager.shard(x, [names.BATCH, None], names.MODE_TRAIN, auto_correct=False) is x


class TestContext:
    def manager(self, **fields):
        return ours.PartitionManager(ours.PartitionAxis(**fields))

    def test_which_manager_counts(self, five_axes):
        first, second = self.manager(head_axis="dp"), self.manager(head_axis="fsdp")
        x = jnp.ones((8,))

        def axis():
            with legacy(five_axes):
                found = ours.apply_logical_sharding(x, axes=[names.HEAD], mode=names.MODE_TRAIN)
            return found.sharding.spec[0]

        assert ours.get_current_partition_manager() is None
        assert ours.get_partition_manager() is second
        assert axis() == "fsdp"
        with first as entered:
            assert entered is first
            assert ours.get_current_partition_manager() is ours.get_partition_manager() is first
            assert axis() == "dp"
            with second:
                assert axis() == "fsdp"
            assert axis() == "dp"
        assert ours.get_current_partition_manager() is None
        assert ours.get_partition_manager() is second

    def test_threads(self):
        with self.manager(), ThreadPoolExecutor(1) as pool:
            assert pool.submit(ours.get_current_partition_manager).result() is None

    def test_none_at_all(self, monkeypatch):
        monkeypatch.setattr(ours, "_last", [])
        with pytest.raises(ValueError, match="No PartitionManager is available"):
            ours.apply_logical_sharding(jnp.ones(4), None, [names.BATCH], names.MODE_TRAIN)

    def test_values(self):
        manager = self.manager(head_axis="x")
        assert manager == self.manager(head_axis="x") != self.manager()
        assert len({manager, self.manager(head_axis="x"), self.manager()}) == 2
        assert pickle.loads(pickle.dumps(manager)) == manager
        assert manager.paxis.replace(vocab_axis=["a", "b"]).vocab_axis == ("a", "b")
        # As an argument of jit, which eformer's cannot be.
        assert jax.jit(lambda m, x: x + len(m.resolve([names.HEAD], "m")))(manager, 1) == 2


@pytest.mark.parametrize("mode", MODES)
def test_as_logical_rules(mode, registry):
    """What `rules` gives resolves the same names to the same axes, and can be planned."""
    axes = ours.PartitionAxis(decode_head_axis="ep", attention_dim_axis="x")
    ours.PartitionAxis.register("__PAGES__", ["dp"])
    rules = sr.LogicalRules(axes.rules(mode))
    for one in (names.HiddenStateSharding, names.AttnQSharding, names.ExpertColumnWise):
        assert sr.logical_to_mesh(tuple(one.axes), rules) == axes.resolve_spec(one.axes, mode)
    assert dict(rules)["__PAGES__"] == "dp"
    hidden = names.HiddenStateSharding.axes
    activations = {"hidden": jax.ShapeDtypeStruct((8, 4, 16), "bfloat16")}
    sizes = {"dp": 2, "fsdp": 2, "tp": 2, "sp": 1, "ep": 1}
    plan = sr.plan(activations, rules, sizes, names={"hidden": tuple(hidden)})
    assert plan.specs()["hidden"] == axes.resolve_spec(hidden, mode)


def under_set_mesh(m):
    with jax.set_mesh(Mesh(jax.devices()[:1], ("tp",))):
        manager = m.PartitionManager(m.PartitionAxis())
        return manager.shard(jnp.ones((4, 4)), dynamic_axes=their_names.ColumnWise).shape


def entered_twice(m):
    with m.PartitionManager(m.PartitionAxis()) as manager, manager:
        pass
    return m.get_current_partition_manager() is manager


def registered_as_not_sharded(m):
    m.PartitionAxis.register("__PLAIN__", None)
    return m.PartitionAxis().resolve_axis(["__PLAIN__"], names.MODE_TRAIN)


def spec(*axes):
    return lambda m: m.PartitionAxis().resolve_spec(list(axes), names.MODE_TRAIN)


def axis(*axes):
    return lambda m: m.PartitionAxis().resolve_axis(list(axes), names.MODE_TRAIN)


# The table of docs/guides/eformer.md: eformer's answer, and ours.
BROKEN = [
    (under_set_mesh, AssertionError, (4, 4)),
    # A batch axis in a list is a tuple in a list, of which JAX makes no spec.
    (spec([names.BATCH, "tp"]), ValueError, P(("fsdp", "dp", "tp"))),
    (axis([names.BATCH, "tp"]), [[("fsdp", "dp"), "tp"]], [["fsdp", "dp", "tp"]]),
    (axis(["tp", names.EMPTY]), [["tp", "_"]], [["tp"]]),
    (axis(["tp", None]), [["tp", None]], [["tp"]]),
    (axis(["tp", names.HEAD_DIM]), [["tp", None]], [["tp"]]),
    (registered_as_not_sharded, ValueError, [None]),
    # the method of this name becomes the axis
    (lambda m: spec(["replace"])(m) == P("replace"), False, True),
    (entered_twice, True, False),
    (lambda m: jax.jit(lambda m, x: x)(m.PartitionManager(m.PartitionAxis()), 1) == 1, TypeError, True),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_where_eformer_is_broken(registry, number):
    call, *expected = BROKEN[number]
    for module, answer in zip((theirs, ours), expected, strict=True):
        found = outcome(call, module)
        is_error = isinstance(answer, type)
        assert issubclass(found, answer) if is_error else found == answer
    theirs._CURRENT_PARTITION_MANAGER.set(None)
