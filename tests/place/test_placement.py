"""shard, shard_local and gather in one process; tests/place/test_processes.py has several."""

import functools
import itertools
from collections import OrderedDict, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._place import shard
from shardrules.compat import eformer
from tests.support.entered import entered

RULES = sr.Rules([("w", P("fsdp", "tp")), (".*", P())])


def tree():
    return {
        "w": np.arange(64, dtype="float32").reshape(8, 8),
        "w_odd": np.arange(21, dtype="int32").reshape(3, 7),
        "on_device": {"w": jnp.ones((8, 2))},
        "scalar": np.float32(2),
        "step": 3,
        "lr": 0.5,
        "none": None,
    }


def test_all_leaves_become_arrays_in_their_places_and_back(mesh):
    placed = sr.shard(tree(), RULES, mesh)
    expected = sr.named_shardings(tree(), RULES, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(tree())
    for array, sharding in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert isinstance(array, jax.Array)
        assert array.sharding == sharding
    assert placed["w"].addressable_shards[0].data.shape == (2, 4)
    assert placed["step"].dtype == jnp.asarray(3).dtype
    for got, sent in zip(jax.tree.leaves(sr.gather(placed)), jax.tree.leaves(tree()), strict=True):
        assert isinstance(got, (np.ndarray, np.generic))
        np.testing.assert_array_equal(got, np.asarray(sent))


def test_leaves_that_follow_others(mesh):
    """The shardings with companions are the plan's, corrected and in the leaves' memory."""
    stack = {
        "kernel": np.ones((3, 8, 6), "float32"),
        "lora_a": jnp.ones((3, 8, 2)),
        "lora_b": np.ones((3, 2, 6), "float32"),
    }
    tree = {"layers": {"q": stack}, "norm": np.ones(8, "float32"), "step": 3}
    rules = sr.Rules([(r"layers/\d+/q/kernel", P("fsdp", "tp")), (".*", P())])
    companions = [sr.stacked("layers"), *sr.LORA]
    for correction in (None, sr.Correction(pad=False)):
        given = sr.Rules(rules, correction=correction)
        plan = sr.plan(tree, given, mesh, companions=iter(companions))
        found = sr.named_shardings(tree, plan)
        assert found == plan.shardings()
        placed = sr.shard(tree, plan)
        assert jax.tree.map(lambda array: array.sharding, placed) == found
    assert placed["layers"]["q"]["lora_a"].sharding.spec == P(None, "fsdp", None)
    assert placed["layers"]["q"]["lora_a"].addressable_shards[0].data.shape[1] < 8
    factor = placed["layers"]["q"]["lora_b"]
    there = jax.device_put(factor, factor.sharding.with_memory_kind("pinned_host"))
    again = sr.shard({"layers": {"q": {"lora_b": there}}}, plan)
    assert again["layers"]["q"]["lora_b"].sharding.memory_kind == "pinned_host"


def test_donation_after_shard_is_that_after_device_put(mesh):
    sharding = NamedSharding(mesh, P("fsdp", "tp"))
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    for function in (sr.shard, jax.device_put):
        x = jax.device_put(np.ones((8, 8), "float32"), sharding)
        y = function(x, sharding)
        assert y is x
        donated(y)
        assert x.is_deleted()
    # What is moved is copied.
    x = jax.device_put(np.ones((8, 8), "float32"), sharding)
    y = sr.shard(x, NamedSharding(mesh, P("tp", "fsdp")))
    donated(y)
    assert not x.is_deleted()
    np.testing.assert_array_equal(x, np.ones((8, 8)))


@pytest.mark.parametrize("wanted", [P(), P("fsdp")])
def test_an_array_of_one_device_and_its_shards_are_donated_apart(mesh, wanted):
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)
    for gone in (0, 1):
        x = jnp.arange(64.0).reshape(8, 8)
        arrays = [x, sr.shard(x, wanted, mesh)]
        donated(arrays.pop(gone))
        np.testing.assert_array_equal(arrays[0], np.arange(64.0).reshape(8, 8))


TRACED = {
    "jit": lambda function: jax.jit(function),
    "vmap": lambda function: jax.vmap(function),
    "grad": lambda function: jax.grad(lambda x: function(x).sum()),
    "eval_shape": lambda function: functools.partial(jax.eval_shape, function),
}


@pytest.mark.parametrize("traced", TRACED)
def test_inside_jit_the_message_names_with_sharding_constraint(mesh, traced):
    call = TRACED[traced]
    with pytest.raises(TypeError, match="use with_sharding_constraint, which takes the same"):
        call(lambda x: sr.shard({"w": x}, RULES, mesh)["w"])(jnp.ones((8, 8)))
    with pytest.raises(TypeError, match="gather fetches arrays from devices, and inside jit"):
        call(lambda x: sr.gather({"w": x})["w"])(jnp.ones((8, 8)))


class TestModules:
    """What is data becomes arrays; functions, flags and the attributes of modules stay."""

    def test_functions_flags_and_text(self, mesh):
        eqx = pytest.importorskip("equinox")

        class Model(eqx.Module):
            linear: eqx.nn.Linear
            name: str = "dense"
            is_causal: bool = True
            scales: tuple = (2.0, np.True_)
            activation: object = jax.nn.relu
            dtype: object = jnp.float32

        given = Model(eqx.nn.Linear(8, 8, key=jax.random.key(0)))
        placed = sr.shard({"use_bias": True, "model": given}, RULES, mesh)
        assert placed["use_bias"] is True
        model = placed["model"]
        assert model.linear.weight.sharding == NamedSharding(mesh, P("fsdp", "tp"))
        assert all(isinstance(scale, jax.Array) for scale in model.scales)
        for name in ("name", "is_causal", "activation", "dtype"):
            assert getattr(model, name) is getattr(given, name)
        np.testing.assert_allclose(model.linear(jnp.ones(8)), given.linear(jnp.ones(8)), rtol=1e-5)

    def test_mistakes_name_the_fix(self, mesh):
        eqx = pytest.importorskip("equinox")

        class Model(eqx.Module):
            params: object

        fix = r"leaf .params\['w'\] is 'x' .*scalars='keep', which .* equinox module"
        with pytest.raises(TypeError, match=fix):
            sr.shard(Model({"w": "x", "b": jnp.ones(8)}), RULES, mesh)
        abstract = eqx.filter_eval_shape(Model, jnp.ones(8))
        with pytest.raises(TypeError, match="leaf .params is ShapeDtypeStruct"):
            sr.shard(abstract, [("", P())], mesh)


class Layer:
    """A node that names its children as attributes."""

    def __init__(self, rate):
        self.rate = rate


class Unnamed(Layer):
    """A node without names."""


jax.tree_util.register_pytree_with_keys(
    Layer, lambda layer: ([(jax.tree_util.GetAttrKey("rate"), layer.rate)], None), lambda _, children: Layer(*children)
)
jax.tree_util.register_pytree_node(Unnamed, lambda layer: ([layer.rate], None), lambda _, children: Unnamed(*children))


DATA = {
    "number": lambda: 3,
    "dict": lambda: {"step": 3},
    "list": lambda: [3],
    "OrderedDict": lambda: OrderedDict(step=3),
    "FrozenDict": lambda: pytest.importorskip("flax.core").FrozenDict(step=3),
    "namedtuple": lambda: namedtuple("State", "count")(3),
    "dataclass of flax": lambda: pytest.importorskip("flax").struct.dataclass(
        type("TrainState", (), {"__annotations__": {"step": int}})
    )(3),
    "State of nnx": lambda: (nnx := pytest.importorskip("flax.nnx")).State({"count": nnx.Variable(3)}),
    "dict in a module": lambda: Layer({"step": 3}),
}
MODULES = {
    "equinox": lambda: pytest.importorskip("equinox").nn.Dropout(0.1),
    "node": lambda: Layer(0.1),
    "node without names": lambda: Unnamed(0.1),
}


@pytest.mark.parametrize("kind", DATA)
def test_numbers_of_data_become_arrays(mesh, kind):
    placed = sr.shard([DATA[kind](), np.ones(8)], [("", P())], mesh)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(placed))


@pytest.mark.parametrize("kind", MODULES)
def test_numbers_of_modules_stay(mesh, kind):
    """A dropout rate of 0.1 became an array, which three steps of AdamW trained to 0.097."""
    given = [MODULES[kind](), {"step": 3}, np.ones(8)]
    rate, *others = jax.tree.leaves(sr.shard(given, [("", P())], mesh))
    assert type(rate) is float
    placed = sr.shard(given, [("", P())], mesh, scalars="place")
    for leaf in (*others, *jax.tree.leaves(placed)):
        assert isinstance(leaf, jax.Array | bool)  # `inference` of Dropout


def test_nothing_is_compiled(mesh):
    arrays = {f"w{i}": np.ones((8, 8 * (i + 1)), "float32") for i in range(20)}
    arrays |= {f"on_device/w{i}": jnp.asarray(array) for i, array in enumerate(arrays.values())}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "compile" in event else None
    )
    fetched = sr.gather(sr.shard(arrays, RULES, mesh))
    resharded = sr.shard(sr.shard(arrays, RULES, mesh), [("w", P("tp"))], mesh)
    assert resharded["w0"].sharding.spec == P("tp", None)
    renamed = sr.reshard(resharded, [("", P("fsdp"))], mesh, renames=[sr.Rename("w{i}", "{i}/kernel", optional=True)])
    assert renamed["0"]["kernel"].sharding.spec == P("fsdp", None)
    eformer.make_shard_and_gather_fns(P("tp"), mesh)[1](renamed["0"]["kernel"])
    assert compiled == []
    jax.jit(lambda x: x + 1)(fetched["w0"])
    assert compiled  # the listener would have seen it


@pytest.mark.parametrize("door", [sr.shard, sr.shard_local, sr.with_sharding_constraint])
def test_a_mesh_without_devices(door):
    with pytest.raises(TypeError, match="arrays can be placed on a jax.sharding.Mesh of devices"):
        door({"w": np.zeros(8)}, P("fsdp"), {"fsdp": 4, "tp": 2})


def test_scalars_are_kept_where_asked(mesh):
    given = {**tree(), "name": "relu", "flag": True, "f": len, "d": jax.devices()[0]}
    with pytest.raises(TypeError, match=r"\['d'\] is .*scalars='keep', which leaves all that is not an array"):
        sr.shard(given, RULES, mesh)
    placed = sr.shard(given, RULES, mesh, scalars="keep")
    for name in ("step", "lr", "name", "flag", "f", "d"):
        assert placed[name] is given[name]
    assert placed["w"].sharding == sr.named_shardings(given, RULES, mesh)["w"]
    assert isinstance(placed["scalar"], jax.Array)
    with pytest.raises(TypeError, match=r"\['w'\] is Ref.* no array with data.*of a Ref what is in it"):
        sr.shard({"w": jax.new_ref(jnp.ones((8, 8)))}, RULES, mesh)
    abstract = {"w": jax.ShapeDtypeStruct((8, 8), "float32"), "step": 3}
    with pytest.raises(TypeError, match=r"\['w'\] is ShapeDtypeStruct"):
        sr.shard(abstract, RULES, mesh, scalars="keep")


def test_what_only_a_compiler_can_decide_is_not_placed(mesh):
    """JAX's own error was a bare KeyError: UNCONSTRAINED."""
    rules = [("k", P(P.UNCONSTRAINED, "fsdp"))]
    given = {"k": np.zeros((8, 8))}
    with pytest.raises(ValueError, match=r"leaf \['k'\] cannot be placed as P\(UNCONSTRAINED, 'fsdp'"):
        sr.shard(given, rules, mesh)
    placed = sr.shard(given, sr.Rules(rules, correction=sr.Correction(unconstrained="drop")), mesh)
    assert tuple(placed["k"].sharding.spec) == (None, "fsdp")


def test_the_dtype_of_floating_arrays(mesh):
    given = {
        **tree(), "half": np.ones(4, "float16"), "code": jnp.ones(4, "float8_e4m3fn"), "key": jax.random.key(0),
    }  # fmt: skip
    placed = sr.shard(given, RULES, mesh, dtype=jnp.bfloat16)
    dtypes = {name: str(leaf.dtype) for name, leaf in placed.items() if hasattr(leaf, "dtype")}
    assert {name for name, dtype in dtypes.items() if dtype == "bfloat16"} == {"w", "half"}
    assert placed["on_device"]["w"].dtype == "bfloat16"
    assert dtypes["code"] == "float8_e4m3fn"
    assert dtypes["lr"] == "float32"
    assert placed["lr"].weak_type


@pytest.mark.filterwarnings("error")
def test_donated_arrays_are_given_up(mesh):
    one = {"w": jnp.arange(64.0).reshape(8, 8), "host": np.ones((8, 8), "float32")}
    there = sr.shard(one, [("w", P("fsdp", "tp")), ("", P())], mesh, donate=True)
    assert one["w"].is_deleted()
    again = sr.shard(there, [("w", P("tp", "fsdp")), ("", P("fsdp"))], mesh, donate=True)
    assert there["w"].is_deleted()
    np.testing.assert_array_equal(again["w"], np.arange(64.0).reshape(8, 8))
    np.testing.assert_array_equal(again["host"], one["host"])
    same = sr.shard(again, [("w", P("tp", "fsdp")), ("", P("fsdp"))], mesh, donate=True)
    np.testing.assert_array_equal(same["w"], np.arange(64.0).reshape(8, 8))


CUTS = (P("fsdp"), P(("fsdp", "tp")), P("tp", "fsdp"), P())
SAME = {
    "itself": lambda w, mesh: w,
    "other object": lambda w, mesh: jax.device_put(w, NamedSharding(mesh, P("fsdp", None))),
}


class TestOneArrayUnderTwoPaths:
    """With donation the result had a deleted array: only its own result was asked for its memory."""

    @pytest.mark.parametrize("function", [sr.shard, sr.reshard])
    @pytest.mark.parametrize("donate", [True, False])
    @pytest.mark.parametrize("second", SAME)
    def test_both_are_there(self, mesh, function, donate, second):
        values = np.arange(64.0, dtype="float32").reshape(8, 8)
        for specs in itertools.product(CUTS, CUTS):
            w = jax.device_put(values, NamedSharding(mesh, P("fsdp")))
            tree = {"ema": w, "params": SAME[second](w, mesh)}
            rules = dict(zip(tree, specs, strict=True))
            placed = function(tree, rules, mesh, donate=donate)
            for path, spec in rules.items():
                assert placed[path].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
                np.testing.assert_array_equal(placed[path], values)
            assert w.is_deleted() == (donate and P("fsdp") not in specs)

    @pytest.mark.parametrize("function", [sr.shard, sr.reshard])
    def test_what_stays_is_there(self, mesh, function):
        key = jax.random.split(jax.random.key(0), 8)
        for w in (np.ones((8, 8)), key, np.ones((0, 8))):
            placed = jax.device_put(w, NamedSharding(mesh, P("fsdp")))
            moved = function({"a": placed, "b": placed}, {"a": None, "b": P()}, mesh, donate=True)
            assert not placed.is_deleted()
            assert moved["a"] is placed
            assert bool((moved["b"] == w).all())

    def test_in_batches(self, mesh):
        """An array is deleted after the batch of its last path, here and under other objects."""
        values = np.ones((8, 8), "float32")
        w = jax.device_put(values, NamedSharding(mesh, P("fsdp")))
        v = jax.device_put(w, NamedSharding(mesh, P("fsdp", None)))
        tree = {"a": w, "b": v, "c": w, "d": values}
        moved = sr.reshard(tree, P("tp"), mesh, donate=True, max_bytes_in_flight=values.nbytes)
        assert w.is_deleted()
        assert v.is_deleted()
        for array in moved.values():
            np.testing.assert_array_equal(array, values)

    def test_with_a_dtype_the_arrays_are_given_up_too(self, mesh):
        w = jax.device_put(np.ones((8, 8), "float32"), NamedSharding(mesh, P("fsdp")))
        placed = sr.shard({"a": w, "b": w}, P("fsdp"), mesh, donate=True, dtype="bfloat16")
        assert w.is_deleted()
        assert placed["a"].dtype == placed["b"].dtype == "bfloat16"
        assert float(placed["a"].sum()) == 64


class TestWhatIsInPlace:
    """JAX returns such an array itself; shard leaves it out of JAX's call."""

    def test_jax_is_not_asked(self, mesh, monkeypatch):
        placed = sr.shard(tree(), RULES, mesh)
        asked, put = [], jax.device_put

        def device_put(arrays, *rest, **more):
            asked.extend(arrays)
            return put(arrays, *rest, **more)

        monkeypatch.setattr(jax, "device_put", device_put)
        sr.shard(placed, RULES, mesh)
        assert asked == []
        sr.shard({**placed, "more": 1.0}, RULES, mesh)
        assert asked == [1.0]

    def test_an_array_that_is_not_committed_becomes_so_as_in_jax(self):
        one = Mesh(np.array(jax.devices()[:1]), ("x",))
        made = jax.jit(lambda: jnp.ones(4), out_shardings=None)()
        for function in (sr.shard, jax.device_put):
            assert function(made, NamedSharding(one, P("x"))).committed


@pytest.mark.parametrize(("function", "most"), [(sr.shard, 60), (sr.with_sharding_constraint, 55)])
@pytest.mark.parametrize("given", ["on the host", "on one device", "in place", "cut otherwise"])
@pytest.mark.parametrize("rules", [RULES, P("fsdp")])
def test_25_arrays_cost_few_calls_of_ours(mesh, function, most, given, rules):
    """So placement costs little beside JAX's own call: what repeats is asked once."""
    tree = {str(i): {"w": np.ones((8, 8), "float32")} for i in range(25)}
    if given == "on one device":
        tree = jax.tree.map(jnp.asarray, tree)
    elif given != "on the host":
        tree = sr.shard(tree, P(None, "tp") if given == "cut otherwise" else rules, mesh)
    for _ in range(2):
        with entered() as calls:
            function(tree, rules, mesh)
    assert 10 < len(calls) <= most


def test_a_wrong_spec_is_told_by_the_first_leaf_that_has_it(mesh):
    wrong = object()
    with pytest.raises(TypeError, match=r"for the leaf \['b'\] the spec is"):
        sr.shard(dict.fromkeys("abc", np.ones(8)), {"a": P(), "b": wrong, "c": wrong}, mesh)


def test_numbers_of_modules_were_found_from_the_root_each(mesh, monkeypatch):
    """In a list of n modules with a number each, n modules were taken apart n times."""
    equinox = pytest.importorskip("equinox")
    looked_at, flatten = [], shard.tree_flatten_with_path

    def counted(tree, is_leaf=None):
        found = flatten(tree, is_leaf=is_leaf)
        looked_at.append(len(found[0]))
        return found

    monkeypatch.setattr(shard, "tree_flatten_with_path", counted)
    modules = [equinox.nn.Dropout(0.1) for _ in range(100)]
    placed = sr.shard([*modules, np.ones(8)], [("", P())], mesh)
    assert all(type(module.p) is float for module in placed[:-1])
    assert 100 < sum(looked_at) < 1000


DOORS = {
    "shard": sr.shard,
    "constraint": sr.with_sharding_constraint,
    "inside jit": lambda tree, *rest: jax.jit(lambda: sr.with_sharding_constraint(tree, *rest))(),
    "shard_local": sr.shard_local,
}
WHAT_JAX_HAS_NOT = [
    (np.array([None] * 8), "ndarray of dtype 'object'", "give numbers for it"),
    (np.array(["x"] * 8), "ndarray of dtype '<U1'", "give numbers for it"),
    (np.zeros(8, "M8[s]"), "ndarray of dtype 'datetime64[s]'", "give numbers for it"),
    (np.zeros(8, [("a", "f4")]), "ndarray of dtype", "give numbers for it"),
    (np.zeros(8, ">f4"), "ndarray of dtype '>f4'", "give array.astype('float32')"),
    (np.zeros(8, np.longdouble), "ndarray of dtype 'float128'", "give array.astype('float64')"),
    (np.ma.zeros(8), "MaskedArray of dtype 'float64'", "give array.filled(value)"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("leaf", "what", "instead"), WHAT_JAX_HAS_NOT)
def test_arrays_that_jax_does_not_hold_were_told_without_a_path(mesh, door, leaf, what, instead):
    """`shard_local` took masked arrays for whole ones, without a word."""
    with pytest.raises(TypeError) as caught:
        DOORS[door]({"ok": np.ones(8), "layers": {"w": leaf}}, P("fsdp"), mesh)
    assert f"leaf ['layers']['w'] is a {what}" in str(caught.value)
    assert instead in str(caught.value)


REFUSALS = [
    "UNIMPLEMENTED: MakeArraysFromHostBufferShards not available with compile-only client.",
    "device_put's second argument must be a Device or a Sharding which represents addressable "
    "devices, but got NamedSharding(...).",
]


@pytest.mark.parametrize("words", REFUSALS, ids=["host", "device"])
@pytest.mark.parametrize("door", ["shard", "constraint", "shard_local", "reshard", "load"])
def test_devices_that_are_only_described_were_told_in_the_words_of_the_compiler(
    mesh, door, words, monkeypatch, tmp_path
):
    given = {"w": np.ones((8, 8), "float32")}
    source = tmp_path / "model.safetensors"
    pytest.importorskip("safetensors.numpy").save_file(given, source)

    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError(words)

    doors = {**DOORS, "reshard": sr.reshard, "load": lambda _, *rest: sr.load(source, *rest)}
    for name in ("device_put", "make_array_from_process_local_data", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, refuse)
    with pytest.raises(TypeError, match=r"only described: they hold no arrays; .*plan.on_mesh"):
        doors[door](given, P("fsdp"), mesh)


BATCH = {"x": np.arange(64).reshape(16, 4), "y": np.arange(16.0, dtype="float32")}


def test_a_local_batch_in_one_process_is_the_whole(mesh):
    for spec in (P("fsdp"), {"x": P(("fsdp", "tp")), "y": NamedSharding(mesh, P())}):
        placed = sr.shard_local(BATCH, spec, mesh)
        for name, array in BATCH.items():
            np.testing.assert_array_equal(placed[name], array)
        assert placed["x"].sharding.spec == (spec if isinstance(spec, P) else spec["x"])


@pytest.mark.parametrize(
    ("batch", "spec", "expected"),
    [
        ({"x": np.ones(6)}, P("fsdp"), r"batch: \['x'\] has the shape \[6\], .* hold 4 parts of dimension 0"),
        ({"x": np.ones(8)}, P(None, "fsdp"), r"spec: for \['x'\] it has 2 dimensions, and the array 1"),
        ({"x": np.ones(8)}, P("pp"), r"(?s)sharded as the specs say.*x  shape \(8,\)  P\('pp'\)\n.*no axis 'pp'"),
        ({"x": 3}, P(), r"batch: \['x'\] is 3 "),
        ({"x": np.ones(8)}, {"x": "fsdp"}, r"spec: for \['x'\] it is 'fsdp'"),
        ({"x": np.float32(1)}, P("fsdp"), r"spec: for \['x'\] it has 1 dimension, and the array 0"),
        ({"x": np.ones(8)}, {"y": P()}, r"the tree of specs does not fit"),
        ({"x": np.ones(8)}, P(P.UNCONSTRAINED), r"the leaf \['x'\] cannot be placed as P.UNCONS"),
    ],
)  # fmt: skip
def test_a_local_batch_that_does_not_fit(mesh, batch, spec, expected):
    with pytest.raises((TypeError, ValueError), match=expected):
        sr.shard_local(batch, spec, mesh)
