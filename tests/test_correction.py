"""Correction policies: each by hand, and all of them against a plain restatement."""

from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._core import Corrector

MESH = {"dp": 1, "fsdp": 4, "tp": 2, "ep": 3}


def spec_of(shape, spec, mesh=MESH, **policies):
    pairs = [("w", spec if isinstance(spec, sr.RuleSpec) else P(*spec))]
    rules = sr.Rules(pairs, correction=sr.Correction(**policies))
    return tuple(sr.spec_for("w", shape, rules, mesh))


@pytest.mark.parametrize(
    ("shape", "spec", "policies", "expected"),
    [
        ((8, 6), ("fsdp", "tp"), {}, ("fsdp", "tp")),
        ((6, 6), ("fsdp", "tp"), {}, (None, "tp")),
        ((6, 5), ("fsdp", "tp"), {}, ()),
        ((4, 8), (("fsdp", "tp"), None), {}, ()),
        ((4, 8), (("fsdp", "tp"), "tp"), {}, (None, "tp")),
        ((4, 8), (("fsdp", "tp"),), {"indivisible": "prefix"}, ("fsdp", None)),
        ((2, 8), (("fsdp", "tp"),), {"indivisible": "prefix"}, ()),
        ((2, 8), (("fsdp", "tp"),), {"indivisible": "drop_axis"}, ("tp", None)),
        ((6, 8), (("tp", "fsdp", "ep"),), {"indivisible": "drop_axis"}, (("tp", "ep"), None)),
        ((12, 8), (("tp", "fsdp", "ep"),), {"indivisible": "prefix"}, ("tp", None)),
        ((5, 8), ("fsdp",), {"indivisible": "keep"}, ("fsdp", None)),
        ((8,), ("tp", "fsdp"), {}, ("tp",)),
        ((8,), ("tp", "fsdp"), {"rank": "replicate"}, ()),
        ((8, 8), ("dp", "tp"), {}, ("dp", "tp")),
        ((8, 8), ("dp", ("dp", "tp")), {}, None),  # used twice
        ((8, 8, 8), ("tp",), {}, ("tp", None, None)),
        ((8, 8, 8), ("tp",), {"pad": False}, ("tp",)),
        ((7, 8), ("tp",), {"pad": False}, (None,)),
        ((0, 8), ("tp",), {}, ("tp", None)),
        ((8,), (P.UNCONSTRAINED,), {}, (P.UNCONSTRAINED,)),
        ((8,), (P.UNCONSTRAINED,), {"unconstrained": "drop"}, ()),
    ],
)  # fmt: skip
def test_policies(shape, spec, policies, expected):
    if expected is None:
        with pytest.raises(ValueError, match="'dp' is used twice"):
            spec_of(shape, spec, **policies)
    else:
        assert spec_of(shape, spec, **policies) == expected


@pytest.mark.parametrize(("size", "is_cut"), [(512, True), (256, True), (128, False), (384, False)])
def test_a_dimension_is_cut_at_multiples_of_its_unit(size, is_cut):
    assert spec_of((size,), sr.RuleSpec("tp", units=(128,))) == (("tp",) if is_cut else ())
    # An axis of size one cuts nothing.
    assert spec_of((size + 1,), sr.RuleSpec("dp", units=(128,))) == ("dp",)


def test_a_rule_may_have_a_correction_of_its_own():
    strict = sr.RuleSpec(("fsdp",), sr.Correction(indivisible="error"))
    rules = sr.Rules([("a", strict), ("b", P("fsdp"))])
    tree = {"a": np.zeros(8), "b": np.zeros(6)}
    assert tuple(sr.named_shardings(tree, rules, MESH)["b"].spec) == ()
    assert rules.match(tree) == {"a": P("fsdp"), "b": P("fsdp")}
    with pytest.raises(ValueError, match=r"dim 0 of size 6 is not divisible by fsdp=4"):
        sr.named_shardings({"a": np.zeros(6)}, rules, MESH)


def test_unreduced_axes_are_kept():
    explicit = (jax.sharding.AxisType.Explicit,) * len(MESH)
    mesh = jax.sharding.AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=explicit)
    spec = sr.spec_for("w", (6, 8), [("w", P("fsdp", "tp", unreduced={"ep"}))], mesh)
    assert spec == P(None, "tp", unreduced={"ep"})
    cut = sr.match_partition_rules([("w", P("fsdp", "tp", unreduced={"ep"}))], {"w": np.zeros(4)})
    assert cut == {"w": P("fsdp", unreduced={"ep"})}


def test_more_axes_than_fit():
    with pytest.raises(ValueError, match="at most 64 axes"):
        sr.named_shardings({"w": np.zeros(2)}, [("w", ("tp",) * 65)], MESH)


def restated(shape, dims, absent, indivisible):
    """The kept axes, entry by entry, by the words of the contract."""
    kept = []
    for dim, (sizes, unit) in enumerate(dims):
        if dim >= len(shape):
            kept.append([False] * len(sizes))
            continue

        def fits(chosen, dim=dim, unit=unit):
            parts = prod(max(n, 1) for n in chosen)
            return shape[dim] % (parts * unit if parts > 1 else 1) == 0

        alive = [True] * len(sizes)
        if 0 in sizes:
            first = sizes.index(0)
            alive = {
                "drop": [False] * len(sizes),
                "drop_axis": [n > 0 for n in sizes],
                "prefix": [i < first for i in range(len(sizes))],
                "keep": alive,
            }[absent]
        candidates = [i for i, is_alive in enumerate(alive) if is_alive]
        if not fits([sizes[i] for i in candidates]):
            if indivisible == "drop":
                candidates = []
            elif indivisible == "prefix":
                lengths = range(len(candidates), -1, -1)
                candidates = next(candidates[:n] for n in lengths if fits([sizes[i] for i in candidates[:n]]))
            elif indivisible == "drop_axis":
                chosen = []
                for i in candidates:
                    if fits([sizes[j] for j in [*chosen, i]]):
                        chosen.append(i)
                candidates = chosen
        kept.append([i in candidates for i in range(len(sizes))])
    return sum(bit << i for i, bit in enumerate(bit for entry in kept for bit in entry))


POLICIES = st.sampled_from(["drop", "drop_axis", "prefix", "keep"])


@given(
    st.lists(st.integers(0, 48), max_size=4).map(tuple),
    st.lists(
        st.tuples(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, 8]), max_size=4), st.sampled_from([1, 1, 2, 3])),
        max_size=4,
    ),
    POLICIES,
    POLICIES,
)
def test_against_the_restatement(shape, dims, absent, indivisible):
    corrector = Corrector(dims, absent, indivisible)
    assert corrector.kept(shape) == restated(shape, dims, absent, indivisible)


def test_sizes_that_overflow():
    huge = 2**62
    corrector = Corrector([([huge, huge], huge)], "drop", "prefix")
    assert corrector.kept((2**63 - 1,)) == 0
    assert corrector.kept((0,)) == 3


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((-2,), ValueError, "dimension 0 of the shape (-2,) is negative"),
        ((-(2**70),), ValueError, "negative"),
        ((None,), TypeError, "'NoneType' object cannot be interpreted as an integer"),
        (("x",), TypeError, "'str' object cannot be interpreted as an integer"),
        ((1.5,), TypeError, "'float' object cannot be interpreted as an integer"),
    ],
)
def test_dimensions_that_are_none(shape, error, message):
    with pytest.raises(error) as caught:
        sr.named_shardings({"a": {"w": SimpleNamespace(shape=shape)}}, [("w", "tp")], MESH)
    assert message in str(caught.value)
    assert any("a/w" in note for note in caught.value.__notes__)


def test_numpy_integers_and_lists_are_shapes():
    leaf = SimpleNamespace(shape=[np.int64(8), np.int32(6)])
    found = sr.named_shardings({"w": leaf}, [("w", P("tp", "fsdp"))], MESH)
    assert found["w"].spec == P("tp", None)
