"""Specs that are made from shapes: against what big_vision and openpi do, and wherever a spec goes."""

import pickle
from types import SimpleNamespace

import jax
import jax.export
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus
from tests.support.plans import cuts
from tests.support.references import big_vision_fsdp, openpi_fsdp
from tests.support.slow import MODELS
from tests.support.trees import array

MESHES = [{"fsdp": 8}, {"fsdp": 256}, {"data": 2, "fsdp": 12}, {"fsdp": 1, "tp": 8}, {"replica": 2, "fsdp": 7, "tp": 4}]
MIB = 2**20


def specs(tree, spec, mesh, **policy):
    """The cuts of each leaf, which are the same from named_shardings and from a plan."""
    rules = sr.Rules([(".*", spec)], **policy)
    placed = sr.named_shardings(tree, rules, mesh)
    planned = sr.plan(tree, rules, mesh).specs()
    assert {path: one.spec for path, one in placed.items()} == planned
    return {path: cuts(spec) for path, spec in planned.items()}


def expected(tree, reference):
    """The cuts that the reference gives, asked once for each shape and dtype."""
    of_kind = {}
    for leaf in tree.values():
        if (leaf.shape, leaf.dtype) not in of_kind:
            of_kind[leaf.shape, leaf.dtype] = cuts(reference(leaf))
    return {path: of_kind[leaf.shape, leaf.dtype] for path, leaf in tree.items()}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_real_models_get_the_specs_of_big_vision_and_openpi(model, sizes):
    tree = corpus.manifest(model).flat(corpus.with_dtype)
    theirs = expected(tree, lambda leaf: big_vision_fsdp(leaf, sizes, "fsdp"))
    assert specs(tree, sr.fsdp("fsdp", min_bytes=4 * MIB + 1), sizes) == theirs
    theirs = expected(tree, lambda leaf: openpi_fsdp(leaf, sizes))
    ours = specs(tree, sr.fsdp("fsdp", min_bytes=4 * MIB, min_rank=2), sizes)
    # openpi does not name an axis of one device.
    assert {p: () if sizes["fsdp"] == 1 else spec for p, spec in ours.items()} == theirs


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]), max_size=5),
    st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4])),
    st.integers(0, 5000),
    st.sampled_from([(), ("tp",), (None, "tp")]),
)
def test_any_shape_gets_the_spec_of_big_vision(shape, sizes, threshold, within):
    mesh = {"replica": sizes[0], "fsdp": sizes[1], "tp": 1}
    leaf, fixed = array(*shape), within[: len(shape)]
    entries = [*fixed, *[None] * (len(shape) - len(fixed))]
    axes = ("replica", "fsdp")
    theirs = big_vision_fsdp(leaf, mesh, axes, threshold / MIB, entries)
    spec = sr.fsdp(axes, min_bytes=threshold + 1, within=within)
    if shape:  # a scalar needs no rule
        assert specs({"w": leaf}, spec, mesh) == {"w": cuts(theirs)}


WHOLE = sr.fsdp("fsdp", min_bytes=0)
WHOLE_HEADS = sr.RuleSpec(WHOLE, units=(None, 256))
BOTH = sr.fsdp(("replica", "fsdp"), min_bytes=0)
BY_CORRECTION = {policy: sr.RuleSpec(BOTH, sr.Correction(indivisible=policy)) for policy in ("drop", "prefix", "keep")}


@pytest.mark.parametrize(
    ("spec", "mesh", "leaf", "expected"),
    [
        (WHOLE, {"fsdp": 8}, array(3, 64, 64, 5), (None, None, "fsdp")),  # of equal ones the last
        (sr.fsdp("fsdp", min_bytes=0, within=P("tp")), {"fsdp": 8, "tp": 4}, array(4096, 2048), ("tp", "fsdp")),
        (sr.fsdp("fsdp", min_bytes=0, within=P("tp")), {"fsdp": 8, "tp": 4}, array(4096), ("tp",)),
        (WHOLE_HEADS, {"fsdp": 8}, array(64, 1024), ("fsdp",)),
        (WHOLE_HEADS, {"fsdp": 4}, array(64, 1024), (None, "fsdp")),
        (sr.fsdp("fsdp", min_bytes=2 * MIB), {"fsdp": 8}, array(1024, 1024, dtype="bfloat16"), (None, "fsdp")),
        (sr.fsdp("fsdp", min_bytes=2 * MIB), {"fsdp": 8}, array(1024, 1024, dtype="int4"), ()),
        (WHOLE, {"fsdp": 8}, array(0, 16), (None, "fsdp")),
        (BY_CORRECTION["drop"], {"replica": 2, "fsdp": 8}, array(9, 10), ()),
        (BY_CORRECTION["prefix"], {"replica": 2, "fsdp": 8}, array(9, 10), (None, "replica")),
        (BY_CORRECTION["keep"], {"replica": 2, "fsdp": 8}, array(9, 10), (None, ("replica", "fsdp"))),
    ],
    ids=str,
)  # fmt: skip
def test_the_dimension_that_is_cut(spec, mesh, leaf, expected):
    assert specs({"w": leaf}, spec, mesh) == {"w": expected}


def shaped(*shape, **dtype):
    return SimpleNamespace(shape=shape, **dtype)


STRICT = sr.Correction(indivisible="error")
(SYMBOL,) = jax.export.symbolic_shape("n")
WITHOUT_SPEC = {
    "must be cut": (
        sr.RuleSpec(WHOLE, STRICT), {"w": array(9, 10)}, "w  shape (9, 10)",
        "rule 0: '.*' -> fsdp('fsdp', min_bytes=0)", "dim 1 of size 10 is not divisible by fsdp=8"),
    # The second took the place of the first.
    "two of one shape": (
        sr.RuleSpec(sr.fsdp("fsdp", min_bytes=8), STRICT), {"a": shaped(9, 10), "b": array(9, 10)},
        "2 leaves cannot be sharded", "without dtype: it has no dtype",
        "of dtype float32: dim 1 of size 10 is not"),
    "no dtype": (
        sr.fsdp("fsdp"), {"w": shaped(64, 64), "v": shaped(8, dtype="f23")},
        "w  shape (64, 64)", "it has no dtype", "min_bytes=0", "unknown dtype 'f23'"),
    "no integers": (
        sr.fsdp("fsdp"), {"w": shaped(SYMBOL, 64, dtype="float32")},
        "a dimension is not an integer", "write the spec out"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_SPEC)
def test_leaves_that_get_no_spec(case):
    spec, tree, *parts = WITHOUT_SPEC[case]
    with pytest.raises(ValueError, match="cannot be sharded") as info:
        sr.named_shardings(tree, [(".*", spec)], {"fsdp": 8})
    for part in parts:
        assert part in str(info.value)


def test_without_a_mesh_there_is_no_spec():
    rules = sr.Rules([("v", P()), ("w", sr.fsdp("fsdp"))])
    for call in (
        lambda: sr.match_partition_rules(rules, {"w": array(8)}),
        lambda: rules.match({"w": array(8)}),
        lambda: sr.spec_for("w", (8,), rules),
    ):
        with pytest.raises(TypeError, match="rule 1: 'w' -> fsdp.*only a mesh makes.*plan"):
            call()


def test_the_spec_of_one_array():
    rules = [("w", sr.fsdp("fsdp"))]
    for dtype in ("float32", np.float32, jax.numpy.float32, np.dtype("float32")):
        spec = sr.spec_for("w", (1024, 1024), rules, {"fsdp": 8}, dtype=dtype)
        assert cuts(spec) == (None, "fsdp")
    assert cuts(sr.spec_for("w", (1024, 1024), rules, {"fsdp": 8}, dtype="bfloat16")) == ()
    with pytest.raises(ValueError, match="it has no dtype"):
        sr.spec_for("w", (1024, 1024), rules, {"fsdp": 8})


def test_arrays_are_placed_and_constrained_by_it(mesh):
    tree, spec = {"w": np.ones((16, 8), np.float32)}, sr.fsdp("fsdp", min_bytes=0)
    for given_as in ([("w", spec)], spec, {"w": spec}):
        assert cuts(sr.shard(tree, given_as, mesh)["w"].sharding.spec) == ("fsdp",)
        constrained = jax.jit(lambda t, s=given_as: sr.with_sharding_constraint(t, s, mesh))(tree)
        assert cuts(constrained["w"].sharding.spec) == ("fsdp",)
    assert cuts(sr.named_shardings(tree, spec, mesh)["w"].spec) == ("fsdp",)


def test_inside_a_shard_map_shapes_are_local(mesh):
    def body(x):
        return sr.with_sharding_constraint(x, [("", sr.fsdp("fsdp"))], mesh)

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))
    with pytest.raises(ValueError, match="fsdp.*goes by whole shapes.*shard_map over fsdp"):
        jax.eval_shape(mapped, array(16, 8))


def test_it_is_a_value():
    spec = sr.fsdp("fsdp", within=P(None, "tp"))
    assert spec == sr.fsdp(("fsdp",), min_bytes=4 * MIB, within=[None, "tp"])
    assert len({spec, sr.fsdp("fsdp", within=(None, "tp")), sr.fsdp("fsdp")}) == 2
    assert pickle.loads(pickle.dumps(sr.Rules([("w", spec)])))[0][1] == spec
    assert repr(spec) == "fsdp('fsdp', min_bytes=4194304, within=P(None, 'tp'))"
    with pytest.raises(AttributeError):
        spec.min_bytes = 3


def test_an_axis_is_named_once():
    for axis, within in (((), ()), (("a", "a"), ()), ("tp", (None, "tp")), ("a", ("b", "b"))):
        with pytest.raises(ValueError, match="at least one mesh axis, and each only once"):
            sr.fsdp(axis, within=within)


def test_shapes_are_asked_about_once_and_forgotten_at_last():
    """A process that meets ever new shapes must not keep them all."""
    rules = sr.Rules([(".*", sr.fsdp("fsdp", min_bytes=0))])
    first = [sr.named_shardings([array(8 * n)], rules, {"fsdp": 8})[0] for n in (1, 2, 1)]
    assert first[0] is first[1] is first[2]
    many = [array(n) for n in range(1, 70_000)]
    assert cuts(sr.named_shardings(many, rules, {"fsdp": 8})[7].spec) == ("fsdp",)
    of_many_dtypes = [shaped(1 + n % 3, 64, dtype=np.dtype(f"S{n}")) for n in range(1, 200)]
    found = sr.named_shardings(of_many_dtypes, sr.fsdp("fsdp", min_bytes=6400), {"fsdp": 8})
    for leaf, one in zip(of_many_dtypes, found, strict=True):
        assert (cuts(one.spec) != ()) == (leaf.shape[0] * 64 * leaf.dtype.itemsize >= 6400)
