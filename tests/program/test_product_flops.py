"""The operations of products, as TPUs' programs write them: as windows over batches."""

from __future__ import annotations

import pytest

from shardrules._program.facts import Variation
from shardrules._program.hlo import Hlo
from shardrules._program.values import Values
from shardrules._program.work import products

MODULE = """HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->{result}}}

ENTRY %main (a: {left}, b: {right}) -> {result} {{
  %a = {left}{{}} parameter(0)
  %b = {right}{{}} parameter(1)
  ROOT %out = {result}{{}} {product}
}}
"""

# (left, right, result, product, multiplications): of libtpu's programs, and of plain convolutions.
SCORES = 4 * 9 * 1024 * 1024 * 128
PRODUCTS = {
    "batches apart": (
        "bf16[4,1024,9,128]",
        "bf16[4,1024,9,128]",
        "bf16[4,9,1024,1024]",
        "convolution(%a, %b), window={size=4x9 stride=3x8 lhs_dilate=4x9}, dim_labels=0b1f_0o1i->01bf",
        SCORES,
    ),
    "heads in the padding": (
        "bf16[4,1024,2,576,1]",
        "bf16[9,128,2,576,1]",
        "bf16[4,1024,9,128,1]",
        "convolution(%a, %b), window={size=1x9x2 pad=0_0x8_8x0_0 rhs_reversal=0x1x0}, dim_labels=0b2f1_1o2i0->0b1f2",
        4 * 1024 * 9 * 128 * 1152,
    ),
    "image": (
        "f32[1,4,4,2]",
        "f32[3,3,2,8]",
        "f32[1,4,4,8]",
        "convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
        (4 * 3 - 2) ** 2 * 2 * 8,
    ),
    "library": (
        "f32[64,32]",
        "f32[32,16]",
        "f32[64,16]",
        'custom-call(%a, %b), custom_call_target="__onednn$matmul"',
        64 * 32 * 16,
    ),
    "no product": (
        "bf16[4,512]",
        "bf16[4,512]",
        "bf16[8,512]",
        'custom-call(%a, %b), custom_call_target="ConcatBitcast"',
        0,
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_multiplied_is_counted(name):
    left, right, result, product, count = PRODUCTS[name]
    text = MODULE.format(left=left, right=right, result=result, product=product)
    values = Values(Hlo(text))
    rows = products(values, Variation(values, {}, {}), lambda _: frozenset())
    assert sum(row.flops for row in rows) == 2 * count
