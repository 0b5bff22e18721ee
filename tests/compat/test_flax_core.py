"""Differential: the installed flax.core.meta and flax.core.spmd, on the same inputs."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from contextlib import nullcontext, suppress

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules.compat import flax_core_meta as our_meta
from shardrules.compat import flax_core_spmd as our_spmd
from shardrules.compat import flax_linen_spmd as our_linen
from tests.support.contexts import legacy, nothing

flax_meta = pytest.importorskip("flax.core.meta", reason="flax is not installed")
flax_spmd = pytest.importorskip("flax.core.spmd")
flax_errors = pytest.importorskip("flax.errors")
nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")

IS_NEWER = hasattr(flax_spmd, "apply_rules")
newer_flax = pytest.mark.skipif(
    not IS_NEWER, reason="flax before 0.12: no get_pspec and shard_value, other results of the rest"
)
MESH = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("fsdp", "tp"))
LAYERS = {our_meta.PARTITION_NAME: "layers"}


def outcome(call, *args, **kwargs):
    try:
        return described(call(*args, **kwargs))
    except Exception as error:
        return type(error).__name__


def described(tree):
    """Structure and leaves, with boxes of ours and of flax's as the same thing."""
    leaves, treedef = jax.tree_util.tree_flatten(tree, is_leaf=our_meta.is_axis_metadata)
    return treedef, [described_leaf(leaf) for leaf in leaves]


def described_leaf(leaf):
    if our_meta.is_axis_metadata(leaf):
        fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        return type(leaf).__name__, {**fields, "value": described(leaf.value)}
    if isinstance(leaf, jax.Array):
        return leaf.sharding, leaf.dtype, leaf.tolist()
    return leaf.tolist() if isinstance(leaf, np.ndarray) else leaf


def public_names(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    } - {"A", "B", "TAxisMetadata"}


@pytest.mark.parametrize(("ours", "theirs"), [(our_meta, flax_meta), (our_spmd, flax_spmd)])
def test_every_public_name_is_here(ours, theirs):
    assert public_names(theirs) <= set(ours.__all__)
    assert our_meta.PARTITION_NAME == flax_meta.PARTITION_NAME


ENTRIES = st.sampled_from([None, "", "embed", "mlp", "batch", "fsdp", "tp", ("embed", "mlp"), ("fsdp", "tp"), ()])
NAMES = st.lists(ENTRIES, max_size=4).map(tuple)
MESH_AXES = st.sampled_from([None, "", "fsdp", "tp", "dp", ("fsdp", "tp"), ["fsdp", "tp"], ()])
BAD_RULES = st.sampled_from([(), ("embed",), ("a", "b", "c"), "embed", 3, None, (["a"], "fsdp")])
RULE = st.tuples(ENTRIES, MESH_AXES) | st.tuples(ENTRIES, MESH_AXES).map(list)
RULES = st.lists(RULE, max_size=5)
MAYBE_BAD_RULES = RULES | st.lists(RULE | BAD_RULES, max_size=4) | st.none()


def rules_context(rules):
    """Rules in force for flax and us; what cannot be put in force stays outside."""
    try:
        with our_spmd.logical_axis_rules(rules):
            pass
    except (TypeError, ValueError):
        return nullcontext()
    return our_spmd.logical_axis_rules(rules)


OF_NAMES = ["from_sharding_rules", "get_pspec", "composite_rules"][: 3 if IS_NEWER else 1]


@given(NAMES, MAYBE_BAD_RULES, MAYBE_BAD_RULES, st.booleans())
def test_names_and_rules(names, rules, in_force, as_spec):
    arguments = {
        "from_sharding_rules": (names, rules),
        "get_pspec": (P(*names) if as_spec else names, rules),
        "composite_rules": (rules, in_force),
    }
    with rules_context(in_force):
        for name in OF_NAMES:
            expected, got = (outcome(getattr(m, name), *arguments[name]) for m in (flax_spmd, our_spmd))
            assert got == expected, name
    if rules and not in_force:
        assert our_spmd.composite_rules(rules, in_force) is rules


@newer_flax
@pytest.mark.parametrize("rules", [(), [("tp", "fsdp"), ("fsdp", "tp")], [("tp", None)]])
def test_shardings_and_formats_are_renamed(rules):
    from jax.experimental.layout import Format, Layout

    named = NamedSharding(MESH, P("fsdp", None, "tp"))
    for sharding in (named, Format(None, named), Format(Layout((0, 1, 2)), named), None):
        assert our_spmd.get_pspec(sharding, rules) == flax_spmd.get_pspec(sharding, rules)
        assert our_spmd.get_mesh(sharding) == flax_spmd.get_mesh(sharding)

        def upper(name):
            return name and name.lower()

        assert our_spmd.map_sharding(upper, sharding) == flax_spmd.map_sharding(upper, sharding)


def test_what_flax_loses_is_kept():
    host = NamedSharding(MESH, P("fsdp"), memory_kind="unpinned_host")
    assert our_spmd.get_pspec(host, [("fsdp", "tp")]).memory_kind == "unpinned_host"
    spec = our_spmd.get_pspec(P("embed", unreduced={"tp"}), [("embed", "fsdp")])
    assert spec == P("fsdp", unreduced={"tp"})
    assert our_spmd.map_sharding(str.upper, spec) == P("FSDP", unreduced={"tp"})


@our_spmd.logical_axis_rules([("a", "fsdp")])
def decorated():
    return our_spmd.get_pspec(("a",))


def test_rules_are_those_of_flax_too():
    outer, inner = (("a", "fsdp"),), [("a", "tp")]
    with flax_spmd.logical_axis_rules(outer):
        assert our_spmd.get_logical_axis_rules() is outer
        with suppress(KeyError), our_spmd.logical_axis_rules(inner):
            assert flax_spmd.get_logical_axis_rules() is inner
            raise KeyError
        assert nn.get_logical_axis_rules() is outer
        our_spmd.set_logical_axis_rules(inner)
        assert nn.get_logical_axis_rules() is inner
    assert decorated() == decorated() == P("fsdp")
    assert our_spmd.get_logical_axis_rules() == ()


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
VALUES = st.one_of(
    SHAPES.map(lambda shape: jax.ShapeDtypeStruct(shape, "float32")),
    SHAPES.map(np.ones),
    st.sampled_from([0, 1.5, "text", None]),
)


@dataclasses.dataclass
class Boxed:
    """A box that has not been made yet: of ours and of flax's."""

    value: object
    names: tuple
    mesh: object


TREES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.builds(Boxed, inner, NAMES, st.none()),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=8,
)
INDEX = st.integers(-3, 4)
PARAMS = st.sampled_from([LAYERS, {**LAYERS, "other": 1}, {our_meta.PARTITION_NAME: None}, {}, {"other": 1}])


def made(tree, meta):
    return jax.tree_util.tree_map(
        lambda x: meta.Partitioned(made(x.value, meta), x.names, x.mesh) if isinstance(x, Boxed) else x, tree
    )


def check_same(name, tree, *args):
    """Ours with our boxes, ours with flax's, and flax with ours, all as flax with flax's."""
    ours, theirs = made(tree, our_meta), made(tree, flax_meta)
    expected = outcome(getattr(flax_meta, name), theirs, *args)
    assert outcome(getattr(our_meta, name), ours, *args) == expected
    assert outcome(getattr(our_meta, name), theirs, *args) == expected
    assert outcome(getattr(flax_meta, name), ours, *args) == expected
    assert described(ours) == described(theirs) == described(made(tree, our_meta))


@given(TREES, INDEX, PARAMS)
def test_add_and_remove_axis(tree, index, params):
    check_same("add_axis", tree, index, params)
    check_same("remove_axis", tree, index, params)
    if our_meta.PARTITION_NAME in params and index >= 0:
        longer = our_meta.add_axis(made(tree, our_meta), index, params)
        check_removed = our_meta.remove_axis(longer, index, params)
        assert outcome(our_meta.unbox, check_removed) == outcome(our_meta.unbox, longer)


@given(TREES)
def test_trees_of_boxes(tree):
    for name in ("unbox", "get_partition_spec"):
        check_same(name, tree)
    ours, theirs = made(tree, our_meta), made(tree, flax_meta)
    updates = jax.tree_util.tree_map(lambda x: (x, 1), flax_meta.unbox(theirs))
    both = ((our_meta, ours), (flax_meta, theirs))
    for changes in (flax_meta.unbox(theirs), updates, [1]):
        got, expected = (outcome(meta.replace_boxed, boxes, changes) for meta, boxes in both)
        assert got == expected
    got, expected = (outcome(meta.map_axis_meta, lambda box: box.names, boxes) for meta, boxes in both)
    assert got == expected


@newer_flax
@given(TREES)
def test_get_sharding(tree):
    check_same("get_sharding", tree, MESH)
    check_same("get_sharding", tree, MESH.abstract_mesh)


def test_boxes_are_the_same_pytree_nodes():
    for names, mesh in ((("a", None), None), ((), MESH)):
        ours = our_meta.Partitioned({"w": 1, "b": 2}, names, mesh)
        theirs = flax_meta.Partitioned({"w": 1, "b": 2}, names, mesh)
        with_paths = [jax.tree_util.tree_flatten_with_path(box) for box in (ours, theirs)]
        assert with_paths[0][0] == with_paths[1][0]
        assert str(with_paths[0][1]) == str(with_paths[1][1])
        assert repr(ours) == repr(theirs)
        other = ours.replace(names=("x",))
        assert jax.tree_util.tree_structure(ours) != jax.tree_util.tree_structure(other)
    assert with_paths[0][0][0][0][0] == jax.tree_util.GetAttrKey("value")
    assert jax.jit(lambda box: box)(our_meta.Partitioned(1.0, ("a",))).names == ("a",)
    assert copy.copy(ours) == ours == our_meta.Partitioned({"w": 1, "b": 2}, (), MESH)
    assert pickle.loads(pickle.dumps(ours.replace(mesh=None))) == ours.replace(mesh=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ours.value = 3


def subclass(meta):
    class Named(meta.Partitioned):
        rules: tuple = dataclasses.field(default=(), metadata={"pytree_node": False})
        scale: float = 1.0

    box = Named(1, ("a",), rules=(("a", "tp"),))
    doubled = jax.tree_util.tree_map(lambda x: 2 * x, box.add_axis(0, LAYERS))
    assert doubled == Named(2, ("layers", "a"), None, (("a", "tp"),), 2.0)
    return jax.tree_util.tree_leaves(box)


def own_partition_name(meta):
    methods = {"_get_partition_name": lambda self, params: params.get("mine", "own")}
    box = type("Named", (meta.Partitioned,), methods)(1, ("a",))
    stacked = meta.add_axis(box, 0, {"mine": "x"})
    return [stacked.names, meta.add_axis(box, 1, {}).names, meta.remove_axis(stacked, 0, {"mine": "x"}).names]


def class_options(meta):
    class Keywords(meta.Partitioned, kw_only=True):
        extra: int = 0

    return Keywords(1, ("a",), extra=2).extra, outcome(Keywords, 1, ("a",), None, 2)


CALLS = []


def box_of_the_users_own(meta):
    """A box that is told of its axes, and says nothing about sharding."""
    methods = {
        "unbox": lambda self: 7,
        "replace_boxed": lambda self, val: ("replaced", val),
        "add_axis": lambda self, index, params: CALLS.append(("add", index, params)),
        "remove_axis": lambda self, index, params: CALLS.append(("remove", index, params)),
    }
    answers = []
    for base in (our_meta.AxisMetadata, flax_meta.AxisMetadata):
        box = type("Own", (base,), methods)()
        meta.add_axis(box, 1, LAYERS)
        meta.remove_axis(box, 2, {})
        specs = meta.get_partition_spec([box, np.ones(1)])
        answers.append((meta.is_axis_metadata(box), meta.unbox([box]), meta.replace_boxed([box], [8]), specs))
    return answers, outcome(meta.AxisMetadata)


BOTH_ALIKE = [subclass, own_partition_name, class_options, box_of_the_users_own]


@pytest.mark.parametrize("answer", BOTH_ALIKE)
def test_both_answer_alike(answer):
    got, expected = answer(our_meta), answer(flax_meta)
    assert got == expected
    assert CALLS in ([], [("add", 1, LAYERS), ("remove", 2, {})] * 4)


BOXES = [
    (our_meta.AxisMetadata, flax_meta.AxisMetadata),
    (our_meta.Partitioned, flax_meta.Partitioned),
    (our_linen.LogicallyPartitioned, nn.LogicallyPartitioned),
]


def test_isinstance_both_ways():
    made = [kind(1, ("a",)) for pair in BOXES[1:] for kind in pair]
    for ours, theirs in BOXES:
        assert issubclass(ours, theirs)
        assert issubclass(theirs, ours)
        assert [isinstance(box, ours) for box in made] == [isinstance(box, theirs) for box in made]
        assert not isinstance(1, ours)

    class OfOurs(our_meta.Partitioned):
        pass

    class OfTheirs(flax_meta.Partitioned):
        pass

    for kind in (OfOurs, OfTheirs):
        assert isinstance(kind(1, ()), flax_meta.Partitioned)
        assert isinstance(kind(1, ()), our_meta.Partitioned)
        assert not isinstance(made[0], kind)
        assert not isinstance(kind(1, ()), our_linen.LogicallyPartitioned)
        assert not isinstance(kind(1, ()), nn.LogicallyPartitioned)


@newer_flax
@pytest.mark.parametrize("kinds", BOXES[1:])
def test_nnx_metadata_with_both_names_and_out_sharding(kinds):
    """`out_sharding` wins, as in flax; and so does `sharding_rules`."""
    metadata = {"value": 1, "names": ("old",), "out_sharding": ("new",), "mesh": None}
    metadata |= {"rules": "old", "sharding_rules": "new", "on_get_value": ()}
    before = dict(metadata)
    ours = kinds[0].from_nnx_metadata(metadata)
    theirs = kinds[1].from_nnx_metadata(dict(metadata))  # which flax changes
    assert dataclasses.asdict(ours) == dataclasses.asdict(theirs)
    assert dict(ours.to_nnx_metadata()) == dict(theirs.to_nnx_metadata())
    assert metadata == before


@newer_flax
def test_equality_of_logically_partitioned():
    array = np.ones(3)
    arguments = [(1, ("a",)), (1, ("b",)), (2, ("a",)), (1, ("a",), None, "r"), (array, ("a",))]
    kinds = (our_linen.LogicallyPartitioned, nn.LogicallyPartitioned)
    ours, theirs = ([kind(*given) for given in arguments] for kind in kinds)
    equal = [[a == b for a in kind[:4] for b in kind[:4]] for kind in (ours, theirs)]
    assert equal[0] == equal[1]
    assert ours[0] == kinds[0](1, ("b",))
    assert kinds[0](array, ()) == kinds[0](array, ())  # the same array
    assert (ours[0] == theirs[0]) == (theirs[0] == ours[0]) == False  # noqa: E712
    assert ours[0] != our_meta.Partitioned(1, ("a",))
    assert hash(ours[0]) == hash(kinds[0](1, ("a",)))


def variable(value, names, **metadata):
    return nnx.Param(value, out_sharding=names, eager_sharding=False, **metadata)


def test_nnx_variables_keep_their_shardings():
    rules = (("mlp", "tp"),)
    tree = {
        "named": variable(np.ones((4, 2)), ("fsdp", None)),
        "ruled": variable(np.ones((4, 2)), ("embed", "mlp"), sharding_rules=rules),
        "plain": variable(np.ones(2), None),
        "box": our_meta.Partitioned(1, ("tp",)),
    }
    with our_spmd.logical_axis_rules([("embed", "fsdp")]):
        specs = our_meta.get_partition_spec(tree)
        shardings = our_meta.get_sharding(tree, MESH)
        expected = nnx.get_partition_spec({k: v for k, v in tree.items() if k != "box"})
    assert jax.tree_util.tree_leaves(expected) == [P("fsdp", None), P(), P("fsdp", "tp")]
    assert jax.tree_util.tree_leaves(specs) == [P("tp"), *jax.tree_util.tree_leaves(expected)]
    assert type(specs["named"]) is type(tree["named"])
    for name in ("named", "ruled", "plain"):
        of = jax.tree_util.tree_leaves(shardings[name])
        assert of == [NamedSharding(MESH, *jax.tree_util.tree_leaves(specs[name]))]


def test_axes_of_nnx_variables():
    def names(of):
        return of.get_metadata()["out_sharding"]

    tree = {"v": variable(np.ones((4, 2)), ("fsdp", "tp")), "plain": variable(np.ones(2), None)}
    longer = our_meta.add_axis(tree, 1, LAYERS)
    assert names(longer["v"]) == ("fsdp", "layers", "tp")
    assert names(tree["v"]) == ("fsdp", "tp")
    assert names(our_meta.remove_axis(longer, 1, LAYERS)["v"]) == ("fsdp", "tp")
    for meta in (our_meta, flax_meta):  # no sharding, no name needed
        meta.add_axis({"plain": tree["plain"]}, 1, {})
    with pytest.raises(ValueError, match="partition_name"):
        our_meta.add_axis(tree, 1, {})
    assert names(tree["v"]) == ("fsdp", "tp")


def mesh_of(kind):
    auto, explicit = AxisType.Auto, AxisType.Explicit
    types = {"auto": (auto, auto), "explicit": (explicit, explicit), "mixed": (auto, explicit)}
    return Mesh(MESH.devices, MESH.axis_names, axis_types=types[kind])


ARRAYS = st.sampled_from([(), (8,), (8, 4), (7, 4), (4, 8, 2)])
LOGICAL = st.lists(st.sampled_from([None, "embed", "mlp", "fsdp", "tp", "nope"]), max_size=3)
TO_MESH = st.lists(st.tuples(st.sampled_from(["embed", "mlp"]), st.sampled_from(["fsdp", "tp", None])), max_size=3)


@newer_flax
@pytest.mark.parametrize("kind", ["auto", "explicit", "mixed"])
@given(ARRAYS, LOGICAL, TO_MESH, TO_MESH, st.booleans(), st.booleans(), st.booleans())
def test_shard_value(kind, shape, names, rules, in_force, in_jit, on_host, given_mesh):
    """What nnx does by default when a Variable is made."""
    value = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    mesh = mesh_of(kind)

    def sharded(spmd):
        def shard(x):
            return spmd.shard_value(x, tuple(names), rules, mesh if given_mesh else None)

        return (jax.jit(shard) if in_jit else shard)(value if on_host else jnp.asarray(value))

    on_mesh = nullcontext() if given_mesh else jax.set_mesh(mesh)
    with on_mesh, our_spmd.logical_axis_rules(in_force):
        assert outcome(sharded, our_spmd) == outcome(sharded, flax_spmd)


@newer_flax
@pytest.mark.parametrize("kind", ["auto", "explicit", "mixed"])
@given(ARRAYS, LOGICAL, st.booleans(), st.booleans(), st.booleans())
def test_unbox_constrains(kind, shape, names, in_jit, apply_constraint, context):
    value = jnp.ones(shape)
    mesh = mesh_of(kind)

    def unboxed(meta):
        def call(x):
            box = meta.Partitioned(x, tuple(names), None if context else mesh)
            return box.unbox() if apply_constraint else box.unbox(apply_constraint=False)

        return (jax.jit(call) if in_jit else call)(value)

    with jax.set_mesh(mesh) if context else nullcontext():
        assert outcome(unboxed, our_meta) == outcome(unboxed, flax_meta)
        assert our_meta.global_mesh_defined() is flax_meta.global_mesh_defined() is context
        assert (our_meta.get_global_mesh() is None) is (flax_meta.get_global_mesh() is None)


VALUE = np.ones((8, 4), np.float32)
NAMED = NamedSharding(MESH, P("fsdp", "tp"))


def placements():
    """(context, value, sharding, mesh, what flax makes of it, what we do): a sharding, an error, or the value."""
    from jax.experimental.layout import Format, Layout

    other = Mesh(MESH.devices.reshape(2, 4), MESH.axis_names)
    for sharding in (NAMED, Format(None, NAMED), Format(Layout((0, 1)), NAMED)):
        yield nothing, VALUE, sharding, None, NAMED, NAMED
        # There flax stumbles: it compares the mesh with its abstract one, or asks a Format for it.
        error = AssertionError if sharding is NAMED else AttributeError
        yield jax.set_mesh, VALUE, sharding, None, error, NAMED
    yield nothing, VALUE, NAMED, other, AssertionError, AssertionError
    # Flax has only the abstract mesh of the context, on which JAX puts no array from outside of it.
    yield jax.set_mesh, jnp.asarray(VALUE), ("fsdp", "tp"), None, TypeError, NAMED
    for empty in (None, (), P(), []):
        yield nothing, "anything", empty, None, "anything", "anything"


@newer_flax
def test_placements():
    for context, value, sharding, mesh, *expected in placements():
        for spmd, answer in zip((flax_spmd, our_spmd), expected, strict=True):
            with context(MESH):
                if isinstance(answer, type):
                    with pytest.raises(answer):
                        spmd.shard_value(value, sharding, None, mesh)
                    continue
                placed = spmd.shard_value(value, sharding, None, mesh)
            if answer is NAMED:
                np.testing.assert_array_equal(placed, value)
            assert (placed.sharding if answer is NAMED else placed) == answer


def test_legacy_mesh():
    """Newer flax does not look at `with mesh:`; flax 0.10 does, and so do we."""
    value = jnp.ones((8, 4))
    with legacy(MESH):
        placed = [
            our_spmd.shard_value(value, ("fsdp", "tp"), None, None),
            our_meta.Partitioned(value, ("fsdp", "tp")).unbox(),
        ]
        assert our_meta.get_global_mesh() == MESH
    assert all(array.sharding.is_equivalent_to(NAMED, 2) for array in placed)


def test_manual_axes_are_refused():
    mesh = mesh_of("auto")

    def body(x):
        return our_spmd.shard_value(x, ("fsdp",), None, None)

    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"axes .* Auto or all Explicit"):
        jax.shard_map(body, in_specs=P("tp"), out_specs=P("tp"), axis_names={"tp"})(jnp.ones(8))


WITHOUT = {
    "without flax": """
import doctest, sys
sys.modules["flax"] = None
from shardrules.compat import flax_core_meta as meta, flax_core_spmd as spmd
assert doctest.testmod(meta).failed == doctest.testmod(spmd).failed == 0
import jax, shardrules as sr
from shardrules.compat import flax_linen_spmd as linen
box = linen.LogicallyPartitioned(jax.numpy.ones((4, 4)), ("embed", None))
with linen.logical_axis_rules([("embed", "tp")]):
    assert tuple(sr.logical_to_mesh({"w": box})["w"]) == ("tp", None)
    assert tuple(linen.logical_to_mesh_axes(("embed",))) == ("tp",)
assert box.unbox() is box.value
assert not [name for name in sys.modules if name.startswith("flax.")]
""",
    "importing is light": """
import sys
from shardrules.compat import flax_core_spmd
assert flax_core_spmd.from_sharding_rules(("a",), [("a", "tp")]) == ("tp",)
assert "jax" not in sys.modules and "flax" not in sys.modules
from shardrules.compat import flax_core_meta
assert "flax" not in sys.modules
""",
    "flax may come later": """
from shardrules.compat import flax_core_meta as meta, flax_core_spmd as spmd
early = meta.Partitioned(1, ("a",))
with spmd.logical_axis_rules([("b", "tp")]):
    spmd.set_logical_axis_rules([("a", "tp")])
    import flax.core.meta, flax.core.spmd
    assert spmd.get_logical_axis_rules() == [("a", "tp")]
    assert flax.core.spmd.get_logical_axis_rules() == [("a", "tp")]
assert spmd.get_logical_axis_rules() == flax.core.spmd.get_logical_axis_rules() == ()
assert meta.unbox([early, flax.core.meta.Partitioned(2, ())]) == [1, 2]
assert flax.core.meta.unbox([early]) == [1]
assert isinstance(early, flax.core.meta.Partitioned)
""",
}


@pytest.mark.parametrize("name", WITHOUT)
def test_with_flax_out_of_reach(name):
    command = [sys.executable, "-c", WITHOUT[name]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


BAD_RULE_LISTS = [
    (["ab"], ValueError, r"logical axis rule 0 is 'ab' \(a str\); a rule is a pair"),
    ({"ab": "tp"}, ValueError, r"rule 0 is 'ab' .*; of a dict, give \.items\(\)$"),
    ([("a", "tp"), ("a",)], ValueError, r"rule 1 is \('a',\)"),
    ([("a", "b", "c")], ValueError, r"rule 0 is \('a', 'b', 'c'\)"),
    ([None], TypeError, r"rule 0 is None"),
    ([{"a", "b"}], TypeError, r"rule 0 is \{"),
    ([(["a"], "tp")], TypeError, r"rule 0 is for the name \['a'\] .*unhashable"),
]  # fmt: skip
TAKE_RULES = [
    lambda rules: our_linen.logical_to_mesh_axes(("a", "b"), rules),  # refuses a dict as flax does
    lambda rules: our_spmd.get_pspec(("a",), rules),
    lambda rules: our_spmd.from_sharding_rules(("a",), rules),
    our_spmd.set_logical_axis_rules,
    lambda rules: our_spmd.logical_axis_rules(rules).__enter__(),
]
BOX = our_meta.Partitioned(1, ("layers", "a"))
NAMES_AND_RULES = [our_spmd.get_pspec, our_spmd.from_sharding_rules, our_linen.logical_to_mesh_axes]
NOT_NAMES = "the logical axis names are .* give a tuple"
BAD = [
    *((lambda take=take, rules=rules: take(rules), error, message)
      for rules, error, message in BAD_RULE_LISTS for take in TAKE_RULES[isinstance(rules, dict):]),
    (lambda: our_spmd.set_logical_axis_rules(iter([("a", "tp")])), TypeError, "can be read only once; give a tuple"),
    (lambda: our_spmd.composite_rules([("a", "tp")], [("b", None), ("a", "dp")]), ValueError,
     r"for 'a': 'tp' .*, and 'dp' .* in rule 1 of the second"),
    *((lambda names=names, call=call: call(names, [("a", "tp")]), TypeError, NOT_NAMES)
      for names in ("embed", 3, {"embed"}) for call in NAMES_AND_RULES),
    *((lambda names=names: our_meta.get_partition_spec([our_meta.Partitioned(1, names)]), TypeError, NOT_NAMES)
      for names in ("embed", 3, {"embed"})),
    (lambda: our_spmd.get_pspec((["a"],)), TypeError, "an entry of the logical axis names .* cannot be looked up"),
    (lambda: our_spmd.shard_value(jnp.ones(1), ("a",), None, None), ValueError, r"sharding \('a',\) .* needs a mesh: .*jax\.set_mesh"),
    (lambda: our_meta.remove_axis(BOX, 0, {}), our_meta.PartitioningUnspecifiedError, "metadata_params={'partition_name': 'layers'}"),
    (lambda: our_meta.remove_axis(BOX, 1, LAYERS), AssertionError, r"axis 1 of \('layers', 'a'\) is 'a'; .* 'layers'"),
    (lambda: our_meta.remove_axis(BOX, 5, LAYERS), IndexError, r"no axis 5 to remove: the names are"),
    (lambda: our_meta.get_sharding(BOX, 3), TypeError, "mesh is 3"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=range(len(BAD)))
def test_messages(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert our_spmd.get_logical_axis_rules() == ()
    if error is our_meta.PartitioningUnspecifiedError:
        assert isinstance(raised.value, flax_errors.PartitioningUnspecifiedError)
        assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_what_is_no_error():
    assert our_spmd.get_pspec(("a",), iter([("a", "tp")])) == P("tp")
    found = our_meta.get_sharding({"w": BOX, "step": 3}, {"a": 2, "layers": 1})
    assert found["w"].spec == P(*BOX.names)
