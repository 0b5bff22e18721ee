"""The work of programs, against sums by hand: products as TPUs write them, cycles, kernels."""

import json

import pytest

from shardrules._program.hlo import Hlo
from shardrules._program.values import Values
from shardrules._program.work import KERNEL_EFFICIENCY, ProgramTime, product_nodes, program_time

CLOCK, PEAK = 1e9, 1e12
# Of 2 heads, 64 queries of 128 elements, 32 keys, and values of 64; JAX writes a kernel's metadata
# on lines of its own.
SPLASH = """\
  %{name}.1 = ({results}) custom-call(%x, %y), custom_call_target="tpu_custom_call", \
operand_layout_constraints={{s8[1,2,2]{{2,1,0}}, bf16[2,64,128]{{2,1,0}}, bf16[1,32,128]{{2,1,0}}, \
bf16[1,32,64]{{2,1,0}}, f32[2,64,64]{{2,1,0}}}}, frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{\\"block_q\\": 64}}"
}}}}, metadata={{op_name="jit(f)/transpose(jvp(attention))/jit(_splash)/{name}/pallas_call"}}, \
backend_config={{"custom_call_config":{{"body":"AA=="}}}}
"""
PAIRS = 2 * 64 * 32  # halved by the mask, doubled by multiplication and addition


def module(*lines):
    """Return a module with a loop of 3 trips, and these lines behind it."""
    lines = "".join(line if line.endswith("\n") else f"  {line}\n" for line in lines)
    return f"""\
HloModule step, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %q = f32[8]{{0}} negate(%p), backend_config={{"estimated_cycles":"999"}}
}}

%body (p.1: f32[8]) -> f32[8] {{
  %p.1 = f32[8]{{0}} parameter(0)
  ROOT %fusion.1 = f32[8]{{0}} fusion(%p.1), kind=kLoop, calls=%inner, \
metadata={{op_name="jit(f)/jvp(mlp)/while/body/closed_call/mul"}}, \
backend_config={{"estimated_cycles":"100"}}
}}

%cond (p.2: f32[8]) -> pred[] {{
  %p.2 = f32[8]{{0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
{lines}  ROOT %while = f32[8]{{0}} while(%x), condition=%cond, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


def time_of(text):
    return program_time(Hlo(text), 0.0, CLOCK, PEAK)


def test_loops_are_multiplied_and_fusions_count_once():
    time = time_of(module())
    assert time.computing == pytest.approx(3 * 100 / CLOCK)
    assert time.lines == (("jit(f)/jvp(mlp)/while/body/closed_call/mul", time.computing),)


def test_a_kernel_counts_by_the_operations_that_it_estimates():
    line = (
        '%twice = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'metadata={op_name="jit(f)/twice/pallas_call"}, backend_config={"custom_call_config":'
        '{"body":"AA==",COST"needs_layout_passes":true}}'
    )
    known = time_of(module(line.replace("COST", '"cost_estimate":{"flops":"123456789"},')))
    assert known.kernels == pytest.approx(123456789 / (PEAK * KERNEL_EFFICIENCY))
    assert known.computing == pytest.approx(known.kernels + 3 * 100 / CLOCK)
    assert known.uncounted == ()
    assert "of it 247 us in Pallas kernels, by their FLOPs, if they reach 50% of the peak" in str(known)
    unknown = time_of(module(line.replace("COST", "")))
    assert (unknown.kernels, unknown.uncounted) == (0, ("jit(f)/twice/pallas_call",))
    assert "without 1 Pallas kernel, of which it says nothing: jit(f)/twice" in str(unknown)


@pytest.mark.parametrize(
    ("name", "results", "width"),
    [
        ("splash_mha_fwd_residuals", "bf16[2,64,64]{2,1,0}, f32[2,64,128]{2,1,0}", 128 + 64),
        ("splash_mha_dkv_no_residuals",
         "bf16[2,2,64,128]{3,2,1,0}, bf16[1,32,128]{2,1,0}, bf16[1,32,64]{2,1,0}",
         3 * 128 + 2 * 64),
        ("splash_mha_dq_no_residuals", "bf16[2,64,128]{2,1,0}", 2 * 128 + 64),
    ],
)  # fmt: skip
def test_splash_attention_counts_by_its_shapes(name, results, width):
    text = module(SPLASH.format(name=name, results=results))
    time = time_of(text)
    assert time.kernels == pytest.approx(PAIRS * width / (PEAK * KERNEL_EFFICIENCY))


def test_a_text_without_cycles_has_no_time():
    assert time_of(module().replace("estimated_cycles", "cycles")) is None
    roofline = ProgramTime(3.0, 1.0, is_roofline=True)
    assert (roofline.shortest, roofline.longest) == (3.0, 4.0)
    assert str(roofline).startswith("roofline: 3.00 s to 4.00 s a step")
    assert json.loads(json.dumps(roofline.to_json()))["longest"] == 4


MODULE = """HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->{result}}}

ENTRY %main (a: {left}, b: {right}) -> {result} {{
  %a = {left}{{}} parameter(0)
  %b = {right}{{}} parameter(1)
  ROOT %out = {result}{{}} {product}
}}
"""

PRODUCTS = {
    "batches apart": (
        "bf16[4,1024,9,128]", "bf16[4,1024,9,128]", "bf16[4,9,1024,1024]", 4 * 9 * 1024 * 1024 * 128,
        "convolution(%a, %b), window={size=4x9 stride=3x8 lhs_dilate=4x9}, dim_labels=0b1f_0o1i->01bf",
    ),
    "heads in the padding": (
        "bf16[4,1024,2,576,1]", "bf16[9,128,2,576,1]", "bf16[4,1024,9,128,1]", 4 * 1024 * 9 * 128 * 1152,
        "convolution(%a, %b), window={size=1x9x2 pad=0_0x8_8x0_0 rhs_reversal=0x1x0}, dim_labels=0b2f1_1o2i0->0b1f2",
    ),
    "image": (
        "f32[1,4,4,2]", "f32[3,3,2,8]", "f32[1,4,4,8]", (4 * 3 - 2) ** 2 * 2 * 8,
        "convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
    ),
    "library": (
        "f32[64,32]", "f32[32,16]", "f32[64,16]", 64 * 32 * 16, 'custom-call(%a, %b), custom_call_target="__onednn$matmul"'
    ),
    "no product": (
        "bf16[4,512]", "bf16[4,512]", "bf16[8,512]", 0, 'custom-call(%a, %b), custom_call_target="ConcatBitcast"'
    ),
}  # fmt: skip
"""Shapes, multiplications and lines: of libtpu's programs, and of plain convolutions."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_is_multiplied_is_counted(name):
    left, right, result, count, product = PRODUCTS[name]
    text = MODULE.format(left=left, right=right, result=result, product=product)
    assert sum(flops for _, flops in product_nodes(Values(Hlo(text)))) == 2 * count
