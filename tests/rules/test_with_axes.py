"""`with_axes`: axes made of several, by which arrays of few heads are cut and the rest as before."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import corpus

PREFIX = sr.Correction(indivisible="prefix")
PARTS = {"tp": ("kv", "rep")}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, "bfloat16")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("tp", (("kv", "rep"),)),
        ((None, ("fsdp", "tp")), (None, ("fsdp", "kv", "rep"))),
        (P(None, ("fsdp", "tp")), P(None, ("fsdp", "kv", "rep"))),
        (P("fsdp", P.UNCONSTRAINED), P("fsdp", P.UNCONSTRAINED)),
        (P("fsdp", reduced={"tp"}), P("fsdp", reduced={"kv", "rep"})),
        (None, None),
        (sr.fsdp("tp", within=(None, "tp2")), sr.fsdp(("kv", "rep"), within=(None, "tp2"))),
        (
            sr.RuleSpec("tp", PREFIX, units=(2,), memory_kind="pinned_host", optional_axes=["tp"]),
            sr.RuleSpec((("kv", "rep"),), PREFIX, units=(2,), memory_kind="pinned_host", optional_axes=["kv", "rep"]),
        ),
        (frozenset({"tp"}), frozenset({"tp"})),  # an object of the user's own
    ],
)  # fmt: skip
def test_each_spec(spec, expected):
    rules = sr.Rules([("w", spec), ("v", "tp")], min_size=8, memory_budget=0)
    assert rules.with_axes(PARTS) == sr.Rules([("w", expected), ("v", (("kv", "rep"),))], min_size=8)


def test_logical_rules():
    rules = sr.LogicalRules(
        [("kv_heads", "tp"), ("mlp", ("fsdp", "tp")), ("embed", "fsdp"), ("norm", None), ("x", P.UNCONSTRAINED)],
        sr.dialects.MAXTEXT,
    )  # fmt: skip
    split = rules.with_axes(PARTS)
    assert split.dialect == rules.dialect
    assert tuple(split) == (
        ("kv_heads", ("kv", "rep")),
        ("mlp", ("fsdp", "kv", "rep")),
        ("embed", "fsdp"),
        ("norm", None),
        ("x", P.UNCONSTRAINED),
    )


@pytest.mark.parametrize("tp", [8, 16, 64])
@pytest.mark.parametrize(
    ("model", "projections", "spec", "units"),
    [
        # Heads have a dimension of their own, or share one with what a head holds.
        ("maxtext-llama3.1-405b-scanned", "(query|key|value)/kernel", (None, None, "tp"), ()),
        ("easydel-mixtral-8x22b", "[qkv]_proj/kernel", (None, "tp"), (None, 128)),
        ("llama-3.1-405b", r"[qkv]_proj\.weight", ("tp",), (128,)),
    ],
)
def test_real_models_with_eight_kv_heads(model, projections, spec, units, tp):
    """Neighbours share a head, and each other array is cut as before."""
    tree = corpus.manifest(model).flat(corpus.abstract)
    others = [("embed|mlp", (None, "tp")), (".*", ())]
    rules = sr.Rules([(projections, sr.RuleSpec(spec, PREFIX, units)), *others])
    mesh = {"fsdp": 2, "kv": 8, "rep": tp // 8}
    found = sr.plan(tree, rules.with_axes(PARTS), mesh)
    before = sr.plan(tree, others, {"fsdp": 2, "tp": tp})
    dim, kv = len(spec) - 1, 0
    for path, leaf in tree.items():
        if re.search(projections, path):
            heads = leaf.shape[dim] // (units[-1] if units else 1)
            kv += heads == 8
            cut = tp if heads % tp == 0 else 8
            assert found.kind(path).device_bytes * cut == found.kind(path).bytes
            assert found.kind(path).spec[dim] == (("kv", "rep") if cut == tp else "kv")
        else:
            assert found.kind(path).device_bytes == before.kind(path).device_bytes
    assert kv > 0


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_four_kv_heads_on_eight_devices_in_a_step(kind):
    """One mesh for all arrays, whose axes the step names too."""
    mesh = jax.make_mesh((4, 2), ("kv", "rep"), axis_types=(kind,) * 2)
    rules = sr.Rules([("w", (None, "tp"))]).with_axes(PARTS)
    values = {"wq": np.arange(64.0).reshape(4, 16), "wk": np.arange(16.0).reshape(4, 4)}
    arrays = sr.shard(values, sr.Rules(rules, correction=PREFIX), mesh)
    assert arrays["wk"].sharding.spec == P(None, "kv")
    assert {s.device: s.index for s in arrays["wk"].addressable_shards} == {
        device: (slice(None), slice(i // 2, i // 2 + 1)) for i, device in enumerate(mesh.devices.flat)
    }  # fmt: skip
    with jax.set_mesh(mesh):
        found = jax.jit(lambda p: jax.tree.map(lambda w: w * 2, p))(arrays)
    for name, value in values.items():
        assert found[name].sharding.is_equivalent_to(arrays[name].sharding, 2)
        np.testing.assert_array_equal(found[name], value * 2)
