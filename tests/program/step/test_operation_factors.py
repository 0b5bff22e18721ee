"""Rules of primitives, against XLA: what a factor cuts is computed in parts, without a word between devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules._program.step.factors import rule_of
from tests.support import hlo_counts

N = 8
MESH = Mesh(np.array(jax.devices()[:N]), ("x",))


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


NHWC = "NHWC", "HWIO", "NHWC"


def dot(summed, batch=((), ())):
    return lambda a, b: lax.dot_general(a, b, (summed, batch))


def convolution(strides=(1, 1), padding="SAME", **options):
    return lambda a, k: lax.conv_general_dilated(a, k, strides, padding, dimension_numbers=NHWC, **options)


def gathered(t, i):
    return lax.gather(t, i, lax.GatherDimensionNumbers((1,), (0,), (0,)), (1, 24), mode="clip")


def scattered(t, i, u):
    return lax.scatter_add(t, i, u, lax.ScatterDimensionNumbers((1,), (0,), (0,)), mode="clip")


MATRIX, CUBE, IMAGE = array(16, 24), array(16, 32, 24), array(16, 8, 8, 24)
TABLE, ROWS = array(64, 24), array(16, 1, dtype="int32")
# One primitive each, whose dimensions 8 devices divide.
CASES = {
    "elementwise": (lax.add, MATRIX, MATRIX),
    "select": (lambda a, b: lax.select_n(a, b, b), array(16, 24, dtype="bool"), MATRIX),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (16, 32, 24), (0, 2)), MATRIX),
    "transpose": (lambda a: lax.transpose(a, (2, 0, 1)), CUBE),
    "merge": (lambda a: lax.reshape(a, (16, 32 * 24)), CUBE),
    "split": (lambda a: lax.reshape(a, (16, 32, 24)), array(16, 32 * 24)),
    "squeeze": (lambda a: lax.squeeze(a, (1,)), array(16, 1, 24)),
    "sum": (lambda a: lax.reduce(a, 0.0, lax.add, (1,)), CUBE),
    "max": (lambda a: lax.reduce(a, -np.inf, lax.max, (0,)), MATRIX),
    "dot": (dot(((1,), (0,))), array(16, 32), array(32, 24)),
    "batched dot": (dot(((2,), (2,)), ((0,), (0,))), array(16, 32, 40), array(16, 24, 40)),
    "gather rows": (gathered, TABLE, ROWS),
    "scatter rows": (scattered, TABLE, ROWS, MATRIX),
    "slice": (lambda a: lax.slice(a, (0, 0), (16, 8)), MATRIX),
    "pad": (lambda a: lax.pad(a, 0.0, [(0, 0, 0), (0, 8, 0)]), MATRIX),
    "update": (lambda a, b: lax.dynamic_update_slice(a, b, (0, 3)), MATRIX, array(16, 1)),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 1), MATRIX, array(16, 8)),
    "cumsum": (lambda a: lax.cumsum(a, 1), MATRIX),
    "sort": (lambda a: lax.sort(a, dimension=1), MATRIX),
    "top_k": (lambda a: lax.top_k(a, 8), MATRIX),
    "argmax": (lambda a: lax.argmax(a, 1, "int32"), MATRIX),
    "convolution": (convolution(), IMAGE, array(3, 3, 24, 32)),
    "convolution of patches": (convolution((4, 4), "VALID"), IMAGE, array(4, 4, 24, 32)),
    "gradient of patches": (
        convolution(padding=[(3, 3), (3, 3)], lhs_dilation=(4, 4)), array(16, 2, 2, 32),
        array(4, 4, 32, 24),
    ),
    "convolution with holes": (convolution(rhs_dilation=(2, 2)), IMAGE, array(3, 3, 24, 32)),
    "convolution of each channel": (
        convolution(feature_group_count=24), IMAGE, array(3, 3, 1, 24),
    ),
    "convolution of groups": (
        convolution(feature_group_count=4), array(16, 8, 8, 32), array(3, 3, 8, 64),
    ),
    "largest of windows": (lambda a: lax.reduce_window(
        a, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), IMAGE),
    "Fourier": (lambda a: lax.fft(a, "FFT", (32,)), array(16, 24, 32, dtype="complex64")),
    "ragged dot": (lax.ragged_dot, array(16, 32), array(8, 32, 24), array(8, dtype="int32")),
}  # fmt: skip


def equation(name):
    function, *args = CASES[name]
    (eqn, *rest) = (e for e in equations(function, args) if rule_of(e) and len(e.invars) >= len(args))
    assert not rest
    return eqn


def equations(function, args):
    """Return the equations of a function, or of the jitted one that it calls."""
    eqns = jax.make_jaxpr(function)(*args).eqns
    return eqns[0].params["jaxpr"].eqns if "jaxpr" in eqns[0].params else eqns


def specs_of(rule, factor):
    """Return the specs of all operands and results for which one factor, and its parts, are cut."""
    cut = {(factor,), *((part,) for part, whole in rule.parts if whole == factor)}
    return [
        [P(*("x" if dims[:1] in cut else None for dims in array)) for array in arrays]
        for arrays in (rule.operands, rule.results)
    ]


def collectives(name, rule, factor):
    function, *args = CASES[name]
    before, after = specs_of(rule, factor)
    placed = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(MESH, spec))
        for a, spec in zip(args, before, strict=False)
    ]
    out = [NamedSharding(MESH, spec) for spec in after]
    made = jax.jit(function, out_shardings=out[0] if len(out) == 1 else out)
    return {row["kind"] for row in hlo_counts.collectives(made.lower(*placed).compile().as_text())}


# XLA sends something for these, where nothing needs it: it moves groups of experts as a whole.
UNLIKE = {("ragged dot", "kept"), ("ragged dot", "summed"), ("top_k", "kept")}
if jax.__version_info__ < (0, 12):  # it gathers all that is transformed
    UNLIKE.add(("Fourier", "kept"))


@pytest.mark.parametrize("name", CASES)
def test_what_a_factor_cuts_is_computed_in_parts(name):
    """A kept factor needs no collective, a sum one that adds; each is compiled on 8 devices."""
    rule = rule_of(equation(name))
    for factor in {*range(len(rule.sizes))} - rule.whole - rule.minor:
        if rule.sizes[factor] % N:
            continue
        kind = "summed" if factor in rule.summed else "kept"
        if (name, kind) in UNLIKE:
            continue
        found = collectives(name, rule, factor)
        if kind == "kept":
            assert not found, (name, factor, rule)
        else:
            assert found <= {"all-reduce", "reduce-scatter", "all-gather"}, (name, factor, found)
            assert found, (name, factor)


@pytest.mark.parametrize("name", ["cumsum", "sort", "concatenate"])
def test_what_is_needed_whole_is_sent(name):
    """The rule does not say too much: along these dimensions devices must exchange something."""
    rule = rule_of(equation(name))
    (factor,) = {f for f in rule.whole if any((f,) == dims for dims in rule.results[0])}
    assert collectives(name, rule, factor)


def test_rows_of_grouped_convolutions_are_gathered():
    rule = rule_of(equation("convolution of groups"))
    rows = rule.operands[0][0][0]
    assert rows in rule.whole
    assert "all-gather" in collectives("convolution of groups", rule, rows)


PRODUCTS = [name for name in CASES if "dot" in name or "conv" in name or "patches" in name]


@pytest.mark.parametrize("name", sorted({*PRODUCTS} - {"ragged dot"}))
def test_products_are_counted_as_by_xla(name):
    function, *args = CASES[name]
    counted = rule_of(equation(name)).flops
    cost = jax.jit(function).lower(*args).cost_analysis()
    flops = (cost[0] if isinstance(cost, list) else cost or {}).get("flops", 0.0)
    assert counted == pytest.approx(flops, rel=0.01) != 0


def test_gradients_of_experts_multiply_each_row_once():
    def loss(rows, kernels, sizes):
        return lax.ragged_dot(rows, kernels, sizes).sum()

    closed = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*CASES["ragged dot"][1:])
    rules = [rule_of(eqn) for eqn in closed.eqns if eqn.primitive.name.startswith("ragged_dot")]
    by_result = {tuple(rule.sizes[f] for (f,) in rule.results[0]): rule for rule in rules}
    of_rows, of_kernels = by_result[16, 32], by_result[8, 32, 24]
    assert {rule.flops for rule in rules} == {2 * 16 * 32 * 24}
    # A device with some experts has a term of each row; one with some rows has one of each kernel.
    assert sorted(of_rows.sizes[f] for f in of_rows.summed) == [8, 24]
    assert [of_kernels.sizes[f] for f in of_kernels.summed] == [16]
    assert of_kernels.operands[2] == of_kernels.results[0][:1]


def test_what_is_not_known_has_no_rule():
    (eqn,) = equations(lambda x: jax.pure_callback(np.sin, x, x), [array(8)])
    assert rule_of(eqn) is None
