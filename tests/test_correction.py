"""Correction policies: each by hand, and all of them against a plain restatement."""

from math import prod
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import assume, given
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
        ((6, 6), ("fsdp", "tp"), {}, (None, "tp")),
        ((6, 5), ("fsdp", "tp"), {}, ()),
        ((4, 8), (("fsdp", "tp"), "tp"), {}, (None, "tp")),
        ((4, 8), (("fsdp", "tp"),), {"indivisible": "prefix"}, ("fsdp", None)),
        ((8,), ("tp", "fsdp"), {}, ("tp",)),
        ((8,), ("tp", "fsdp"), {"rank": "replicate"}, ()),
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


def restated(shape, dims, indivisible):
    """The kept axes of each dimension, by the words of the contract."""
    kept = []
    for size, (axes, unit) in zip(shape, dims, strict=False):

        def fits(chosen, size=size, unit=unit):
            parts = prod(sizes for _, sizes in chosen)
            return size % (parts * unit if parts > 1 else 1) == 0

        chosen = list(axes)
        if not fits(chosen):
            if indivisible == "drop":
                chosen = []
            elif indivisible == "prefix":
                chosen = next(chosen[:n] for n in range(len(chosen), -1, -1) if fits(chosen[:n]))
            elif indivisible == "drop_axis":
                chosen = []
                for axis in axes:
                    chosen += [axis] if fits([*chosen, axis]) else []
        kept.append([name for name, _ in chosen])
    return kept


@given(
    st.lists(st.integers(0, 48), max_size=4).map(tuple),
    st.lists(
        st.tuples(st.lists(st.sampled_from([1, 2, 2, 3, 4, 8]), max_size=4), st.sampled_from([1, 1, 2, 3])), max_size=4
    ),
    st.sampled_from(["drop", "drop_axis", "prefix", "keep"]),
)
def test_against_the_restatement(shape, sizes, indivisible):
    dims = [
        ([(f"{dim}{i}", n) for i, n in enumerate(own)], unit) for dim, (own, unit) in zip("abcd", sizes, strict=False)
    ]
    mesh = {"x": 1} | dict(axis for axes, _ in dims for axis in axes)
    assume(prod(mesh.values()) <= 2**24)  # a mesh of more devices is refused
    spec = sr.RuleSpec([tuple(name for name, _ in axes) for axes, _ in dims], units=[unit for _, unit in dims])
    found = [
        [one] if isinstance(one, str) else [*(one or ())] for one in spec_of(shape, spec, mesh, indivisible=indivisible)
    ]
    expected = restated(shape, dims, indivisible)
    assert found + [[]] * (len(expected) - len(found)) == expected + [[]] * (len(found) - len(expected))


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
