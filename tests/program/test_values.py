"""The graph of values, and its four facts: on texts by hand, on recorded programs, on compiled ones."""

from __future__ import annotations

import gzip

import jax
import jax.numpy as jnp
import pytest

from shardrules._program import dataflow
from shardrules._program.facts import (
    Origin,
    Part,
    Variation,
    all_updated_from,
    batch_dims,
    next_states,
    origins,
    summed_dims,
)
from shardrules._program.hlo import Hlo
from shardrules._program.values import Values
from shardrules._program.variation import Variation as EarlierVariation
from tests.program.test_dataflow import ASYNCHRONOUS, ASYNCHRONOUS_FUSION, ASYNCHRONOUS_SUM, STEP
from tests.support.folders import ROOT

TEXTS = sorted((ROOT / "tests" / "data" / "hlo").glob("*.txt.gz"))


def only(values, computation, name):
    """Return the node of an instruction that makes one array."""
    (node,) = values.of(computation, name)
    return node


@pytest.mark.parametrize(
    ("computation", "name", "origin"),
    [
        ("main", "agd", Origin(1)),
        ("main", "held", Origin(1)),
        ("main", "narrow", Origin(1)),
        ("main", "flat", Origin(2, 4)),
        ("body", "whole", Origin(1)),
        ("wrapped", "to", Origin(1)),
        ("main", "shifted", Origin(1, is_scaled=True)),
        ("main", "fours", None),
        ("main", "computed", None),
        ("main", "total", None),
        ("body", "sum", None),
        ("branch", "in_branch", None),
    ],
)
def test_origins(computation, name, origin):
    values = Values(Hlo(ASYNCHRONOUS))
    assert origins(values)[only(values, computation, name)] == origin


def test_each_result_of_a_collective_of_several_is_made_of_its_own_operand():
    values = Values(Hlo(ASYNCHRONOUS))
    first, second = values.of("main", "two")
    assert [origins(values)[node] for node in (first, second)] == [Origin(2, 4), Origin(1)]
    assert values.outputs == [*values.of("main", "held"), *values.of("main", "total"), first]


def test_an_asynchronous_fusion_is_what_is_in_it():
    values = Values(Hlo(ASYNCHRONOUS_FUSION))
    gathered, total = values.outputs
    assert origins(values)[gathered] == Origin(0, 4)
    assert origins(values)[total] is None
    assert values.opcode(total) == "add"


def test_an_array_that_a_loop_only_hands_on_is_the_one_before_it():
    values = Values(Hlo(STEP))
    (stack,) = values.of("body", "stack")
    assert values.opcode(stack) == "while"
    assert origins(values)[stack] == Origin(0)
    assert origins(values)[only(values, "body", "w")] == Origin(0, 3)


STACKED = """\
HloModule stacked

%body (p: (s32[], f32[3,8], f32[3,8])) -> (s32[], f32[3,8], f32[3,8]) {
  %p = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[3,8]{1,0} get-tuple-element(%p), index=1
  %saved = f32[3,8]{1,0} get-tuple-element(%p), index=2
  %layer = f32[1,8]{1,0} dynamic-slice(%stack, %i, %i), dynamic_slice_sizes={1,8}
  %new = f32[3,8]{1,0} dynamic-update-slice(%saved, %layer, %i, %i)
  ROOT %t = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) tuple(%i, %stack, %new)
}

%condition (p: (s32[], f32[3,8], f32[3,8])) -> pred[] {
  %p = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[3,8]) -> (f32[3,8], f32[3,8]) {
  %a = f32[3,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %zeros = f32[3,8]{1,0} broadcast(%zero), dimensions={}
  %in = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) tuple(%zero, %a, %BEGIN)
  %loop = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) while(%in), condition=%condition, body=%body
  %kept = f32[3,8]{1,0} get-tuple-element(%loop), index=2
  %doubled = f32[3,8]{1,0} add(%a, %a)
  ROOT %out = (f32[3,8]{1,0}, f32[3,8]{1,0}) tuple(%kept, %doubled)
}
"""


@pytest.mark.parametrize(
    ("begin", "origin"), [("zeros", Origin(0, is_stacked=True)), ("a", None), ("doubled", None)]
)
def test_what_a_loop_keeps_of_an_argument_is_a_copy_if_it_begins_with_zeros(begin, origin):
    text = STACKED.replace("%BEGIN", f"%{begin}")
    if begin == "doubled":  # which is defined behind the loop
        line = "  %doubled = f32[3,8]{1,0} add(%a, %a)\n"
        text = text.replace(line, "").replace("  %zero = ", line + "  %zero = ")
    values = Values(Hlo(text))
    assert origins(values)[values.outputs[0]] == origin


def test_next_states():
    values = Values(Hlo(STEP))
    stacked, _, cut = values.parameters
    step, total = values.outputs
    states = next_states(values, [(0, step), (2, total)])
    assert states[stacked] == 0
    assert states[only(values, "main", "gradient")] == 0
    assert states[cut] == states[only(values, "main", "both")] == 2
    assert stacked in set(all_updated_from(values, step))
    assert stacked not in set(all_updated_from(values, only(values, "main", "gradient")))


def test_a_next_state_is_made_from_an_asynchronous_sum():
    values = Values(Hlo(ASYNCHRONOUS_SUM))
    sources = set(all_updated_from(values, values.outputs[0]))
    assert sources.issuperset([*values.of("main", "rs"), *values.parameters])


def test_the_axes_along_which_values_differ():
    values = Values(Hlo(STEP))
    variation = Variation(values, {"x": 2, "y": 2}, {0: frozenset("x"), 2: frozenset("y")})
    expected = {"whole": "", "rows": "x", "cut": "y", "id": "xy", "gathered": "", "out": "x"}
    expected |= {"both": "xy", "sum": "y", "all": "", "step": "xy"}
    axes = {name: variation.of(values.of("main", name)) for name in expected}
    assert {name: "".join(sorted(one)) for name, one in axes.items()} == expected
    assert variation.of([only(values, "body", "x"), only(values, "body", "w")]) == {"x"}


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name.removesuffix(".txt.gz"))
def test_origins_and_axes_are_those_of_the_walk_that_takes_fusions_for_one_step(file):
    """The graph knows more: of rings, of branches, and of fusions with several results."""
    hlo = Hlo(gzip.decompress(file.read_bytes()).decode())
    values = Values(hlo)
    axes = {i: frozenset("x" * (i % 2)) for i in range(len(values.parameters))}
    variation = Variation(values, {"x": hlo.partitions}, axes)
    earlier = EarlierVariation(hlo, {"x": hlo.partitions}, axes)
    copied = origins(values)
    compared = 0
    for name, computation in hlo.computations.items():
        for line in computation if hlo.fusion_of(name) is None else ():
            nodes = values.of(name, line.name)
            if len(nodes) != 1:
                continue
            compared += 1
            before = dataflow.origin_of(hlo, dataflow.Value(name, line.name))
            after = copied[nodes[0]]
            assert before in (None, after and (after.parameter, after.layers, after.is_scaled))
            assert variation.of(nodes) <= earlier.of(name, [line.name])
    assert compared >= 10


BATCH = 7
"""A prime that is in no other size."""


def attention(p, x):
    h = p["table"][x]
    q, k = (jnp.einsum("btd,dhk->bthk", h, p[name]) for name in "qk")
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
    return jnp.einsum("bhqs,bshk->bqhk", weights, k).reshape(BATCH, 5, -1)


def images(p, x):
    x = jax.lax.conv_general_dilated(
        x, p, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.transpose(x, (3, 0, 1, 2)), x.sum((1, 2))


def scanned(p, x):
    def layer(h, w):
        return jnp.tanh(h @ w), h[0]

    return jax.lax.scan(layer, x.swapaxes(0, 1), p)


@pytest.mark.parametrize(
    ("function", "params", "batch"),
    [
        (
            attention,
            {"table": (32, 16), "q": (16, 2, 8), "k": (16, 2, 8)},
            jax.ShapeDtypeStruct((BATCH, 5), "int32"),
        ),
        (images, (3, 3, 4, 8), jax.ShapeDtypeStruct((BATCH, 8, 8, 4), "float32")),
        (scanned, (3, 16, 16), jax.ShapeDtypeStruct((BATCH, 5, 16), "float32")),
    ],
)
def test_batch_dimensions_are_those_whose_size_has_the_batch_as_a_factor(function, params, batch):
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        params,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    text = jax.jit(function).lower(params, batch).compile().as_text()
    assert text
    values = Values(Hlo(text))
    number = len(jax.tree.leaves(params))
    dims = batch_dims(values, {number: [0]})
    for node in range(len(values)):
        sizes = values.shape(node).dims
        assert {part.dim for part in dims[node]} <= {
            i for i, size in enumerate(sizes) if size % BATCH == 0
        }
    for node in values.outputs:
        sizes = values.shape(node).dims
        assert {part.dim for part in dims[node]} == {
            i for i, size in enumerate(sizes) if size % BATCH == 0
        }
        assert dims[node]


def test_what_a_product_sums_over():
    values = Values(Hlo(STEP))
    line = values.lines[only(values, "body", "y")]
    assert [summed_dims(line, place) for place in (0, 1)] == [[1], [0]]


def test_a_text_of_20_000_instructions():
    """Neither the depth of calls nor the work for a line grows with it."""
    lines = ["HloModule large", "", "ENTRY %main (a: f32[8,8]) -> f32[8,8] {"]
    lines.append("  %x.0 = f32[8,8]{1,0} parameter(0)")
    lines += [f"  %x.{i} = f32[8,8]{{1,0}} add(%x.{i - 1}, %x.{i // 2})" for i in range(1, 20_000)]
    lines += ["  ROOT %x = f32[8,8]{1,0} copy(%x.19999)", "}", ""]
    values = Values(Hlo("\n".join(lines)))
    copied, dims = origins(values), batch_dims(values, {0: [0]})
    variation = Variation(values, {"x": 2}, {0: frozenset("x")})
    assert (len(values), copied[-1], dims[-1]) == (20_001, None, {Part(0, 1, 8)})
    assert variation.of(values.outputs) == {"x"}
