"""Factors of operations, and classes of dimensions of random steps, against XLA.

What a factor cuts is computed in parts, without a word between devices; a class that is cut is sent as priced.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.constraints import spec_of_cuts
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Spread
from shardrules._program.step import factors
from shardrules._program.step.factors import rule_of
from tests.support import hlo_counts
from tests.support.compiled import array as array_on
from tests.support.compiled import devices
from tests.support.random_programs import RandomStep
from tests.support.slow import slow

N = 8
MESH = devices(x=N)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def kinds(step, args, specs, mesh):
    """The collectives of a step whose arguments are cut so."""
    cut = [array_on(mesh, a.shape, *s, dtype=a.dtype) for a, s in zip(args, specs, strict=False)]
    return {row["kind"] for row in hlo_counts.collectives(step.lower(*cut).compile().as_text())}


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


def collectives(name, factor):
    function, *args = CASES[name]
    before, after = specs_of(rule_of(equation(name)), factor)
    out = [NamedSharding(MESH, spec) for spec in after]
    return kinds(jax.jit(function, out_shardings=out[0] if len(out) == 1 else out), args, before, MESH)


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
        sent = collectives(name, factor)
        assert sent <= ({"all-reduce", "reduce-scatter", "all-gather"} if kind == "summed" else set()), (name, factor)
        assert bool(sent) == (kind == "summed"), (name, factor)


@pytest.mark.parametrize("name", ["cumsum", "sort", "concatenate", "convolution of groups"])
def test_what_is_needed_whole_is_sent(name):
    """The rule does not say too much: along these dimensions devices must exchange something."""
    rule = rule_of(equation(name))
    (factor, *_) = [f for (f,) in rule.results[0] if f in rule.whole]
    assert collectives(name, factor)


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


# Classes of random steps

FOUR = devices(x=4)
# Classes of these seeds that are priced otherwise than XLA does it.
PRICED_UNLIKE = {
    44: "XLA gathers none of what is zero",
    113: "a quarter of 96 is one of 12 x 8 and one of 8 x 12: for us these are two classes",
    122: "XLA cuts an array by what a slice of it is added to, and exchanges rows for it",
}
by_new_xla = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLAs choose other collectives")


def unlike(function, shapes):
    """Specs of a step by which one class is cut that sends something and is not priced so, or the reverse."""
    wrong = []
    step, args = jax.jit(function), [array(*shape) for shape in shapes]
    traced = sr.trace(step, *args, on=FOUR)
    space = Space(traced, {"x": 4})
    space._is_weight = [False] * len(space._is_weight)  # or small vectors would be whole
    inputs, dims = traced._equations.body.inputs, traced._equations.dims
    for name in {name for i in inputs for row in space.classes[i] for name in row[:1]}:
        if dims.sizes[name] % 4 == 0:
            layout = {name: ("x",)}
            specs = [spec_of_cuts(space.cuts(i, layout)) for i in inputs]
            if bool(kinds(step, args, specs, FOUR)) != bool(Spread(space, layout).of_step().sent):
                wrong.append(specs)
    return wrong


@by_new_xla
@pytest.mark.parametrize("seed", [*range(8), *map(slow, range(8, 200))])
def test_a_class_that_is_cut_alike_is_sent_as_priced(seed):
    """Devices send nothing where the jaxpr says nothing, and something where it says something."""
    step = RandomStep(seed)
    assert bool(unlike(step, step.args)) == (seed in PRICED_UNLIKE), str(step)


def scored(q, k):
    """A product of what is split in two, of which the first part is summed with a turned array."""
    return q.reshape(8, 4, 4) * k.transpose(0, 2, 1)


@by_new_xla
@pytest.mark.parametrize("name", ["transpose", "reshape"])
def test_a_wrong_rule_makes_classes_that_are_not_sent_as_priced(monkeypatch, name):
    shapes = [(8, 16), (8, 4, 4)]
    assert not unlike(scored, shapes)
    right = factors._RULES[name]

    def wrong(operation):
        rule = right(operation)
        if name == "transpose":  # as if it changed nothing
            return replace(rule, results=rule.operands)
        turned = tuple(tuple(dims[::-1]) for dims in rule.operands[0])  # the minor factor first
        return replace(rule, operands=(turned, *rule.operands[1:]))

    monkeypatch.setitem(factors._RULES, name, wrong)
    assert unlike(scored, shapes)
