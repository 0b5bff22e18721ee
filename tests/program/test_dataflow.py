"""Where values come from: forms that programs of the CPU backend do not have. `test_verify.py` has the others."""

from __future__ import annotations

import pytest

from shardrules._program.dataflow import (
    Origin,
    Value,
    held_by_loops,
    is_made_from,
    origin_of,
    output_values,
    updated_values,
    value_uses,
)
from shardrules._program.flow import Consumer, elements, is_summed, uses
from shardrules._program.hlo import Hlo
from shardrules._program.variation import Variation

ASYNCHRONOUS = """\
HloModule asynchronous, num_partitions=4

%body (p: (s32[], f32[8,8], f32[8,8])) -> (s32[], f32[8,8], f32[8,8]) {
  %p = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %whole = f32[8,8]{1,0} get-tuple-element(%p), index=1
  %sum = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %next = f32[8,8]{1,0} add(%sum, %whole)
  ROOT %t = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%i, %whole, %next)
}

%condition (p: (s32[], f32[8,8], f32[8,8])) -> pred[] {
  %p = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

%wrapped (w: f32[2,8]) -> bf16[2,8] {
  %w = f32[2,8]{1,0} parameter(0)
  ROOT %to = bf16[2,8]{1,0} convert(%w)
}

%branch (b: f32[2,8]) -> f32[8,8] {
  %b = f32[2,8]{1,0} parameter(0)
  ROOT %in_branch = f32[8,8]{1,0} all-gather(%b), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (a: s32[], w: f32[2,8], v: f32[4,2,8]) -> (f32[8,8], f32[8,8], f32[8,8]) {
  %a = s32[] parameter(0)
  %w = f32[2,8]{1,0} parameter(1)
  %v = f32[4,2,8]{2,1,0:S(5)} parameter(2)
  %cs = (f32[4,2,8]{2,1,0}, f32[4,2,8]{2,1,0:S(5)}, u32[]) copy-start(%v)
  %cd = f32[4,2,8]{2,1,0} copy-done(%cs)
  %layer = f32[1,2,8]{2,1,0} dynamic-slice(%cd, %a, %a, %a), dynamic_slice_sizes={1,2,8}
  %flat = f32[2,8]{1,0} bitcast(%layer)
  %ags = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %agd = f32[8,8]{1,0} all-gather-done(%ags)
  %narrow = bf16[2,8]{1,0} call(%w), to_apply=%wrapped
  %computed = f32[2,8]{1,0} add(%w, %w)
  %c = f32[] constant(2)
  %twos = f32[2,8]{1,0} broadcast(%c), dimensions={}
  %moved = f32[2,8]{1,0} copy(%twos)
  %scaled = f32[2,8]{1,0} multiply(%moved, %w)
  %shifted = f32[2,8]{1,0} subtract(%scaled, %twos)
  %fours = f32[2,8]{1,0} multiply(%twos, %moved)
  %two = (f32[8,8]{1,0}, bf16[8,8]{1,0}) all-gather(%flat, %narrow), replica_groups={{0,1,2,3}}, dimensions={0}
  %first = f32[8,8]{1,0} get-tuple-element(%two), index=0
  %chosen = f32[8,8]{1,0} conditional(%a, %w, %computed), branch_computations={%branch, %branch}
  %in = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%a, %agd, %first)
  %loop = (s32[], f32[8,8]{1,0}, f32[8,8]{1,0}) while(%in), condition=%condition, body=%body
  %held = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %total = f32[8,8]{1,0} get-tuple-element(%loop), index=2
  ROOT %out = (f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8,8]{1,0}) tuple(%held, %total, %first)
}
"""


@pytest.fixture
def hlo():
    return Hlo(ASYNCHRONOUS)


@pytest.mark.parametrize(
    ("value", "origin"),
    [
        (Value("main", "agd"), Origin(1, 1)),
        (Value("main", "held"), Origin(1, 1)),
        (Value("main", "narrow"), Origin(1, 1)),
        (Value("main", "two", 1), Origin(1, 1)),
        (Value("main", "flat"), Origin(2, 4)),
        (Value("body", "whole"), Origin(1, 1)),
        (Value("wrapped", "to"), Origin(1, 1)),
        (Value("main", "shifted"), Origin(1, 1, is_scaled=True)),
        (Value("main", "fours"), None),
        (Value("main", "computed"), None),
        (Value("main", "total"), None),
        (Value("body", "sum"), None),
        (Value("branch", "in_branch"), None),
    ],
)
def test_origins(hlo, value, origin):
    assert origin_of(hlo, value) == origin


def test_what_is_returned_and_held(hlo):
    assert [(one.name, one.element) for one in output_values(hlo)] == [
        ("ags", None),
        ("loop", 2),
        ("two", 0),
    ]
    held = {Value("main", "a"), Value("main", "ags"), Value("main", "two", 0)}
    assert held_by_loops(hlo, "main") == held
    assert held_by_loops(hlo, "body") == set()


STEP = """\
HloModule step, num_partitions=4

%fused_slice (q: f32[3,8,8], r: s32[]) -> f32[8,8] {
  %q = f32[3,8,8]{2,1,0} parameter(0)
  %r = s32[] parameter(1)
  %layer = f32[1,8,8]{2,1,0} dynamic-slice(%q, %r, %r, %r), dynamic_slice_sizes={1,8,8}
  ROOT %flat = f32[8,8]{1,0} bitcast(%layer)
}

%fused_offset (table: s32[4], id: u32[], batch: f32[8,8]) -> f32[4,8] {
  %table = s32[4]{0} parameter(0)
  %id = u32[] parameter(1)
  %batch = f32[8,8]{1,0} parameter(2)
  %entry = s32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
  %offset = s32[] bitcast(%entry)
  ROOT %rows = f32[4,8]{1,0} dynamic-slice(%batch, %offset, %offset), dynamic_slice_sizes={4,8}
}

%body (p: (s32[], f32[4,8], f32[3,8,8])) -> (s32[], f32[4,8], f32[3,8,8]) {
  %p = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %stack = f32[3,8,8]{2,1,0} get-tuple-element(%p), index=2
  %w = f32[8,8]{1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_slice
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) tuple(%i, %y, %stack)
}

%condition (p: (s32[], f32[4,8], f32[3,8,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (stacked: f32[3,2,8], whole: f32[8,8], cut: f32[4,8]) -> (f32[3,2,8], f32[4,8]) {
  %stacked = f32[3,2,8]{2,1,0} parameter(0)
  %whole = f32[8,8]{1,0} parameter(1)
  %cut = f32[4,8]{1,0} parameter(2)
  %id = u32[] partition-id()
  %offsets = s32[4]{0} constant({0, 0, 4, 4})
  %rows = f32[4,8]{1,0} fusion(%offsets, %id, %whole), kind=kLoop, calls=%fused_offset
  %zero = s32[] constant(0)
  %gathered = f32[3,8,8]{2,1,0} all-gather(%stacked), replica_groups={{0,1,2,3}}, dimensions={1}
  %in = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) tuple(%zero, %rows, %gathered)
  %loop = (s32[], f32[4,8]{1,0}, f32[3,8,8]{2,1,0}) while(%in), condition=%condition, body=%body
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %both = f32[4,8]{1,0} add(%out, %cut)
  %sum = f32[4,8]{1,0} all-reduce(%both), replica_groups={{0,2},{1,3}}, to_apply=%condition
  %all = f32[4,8]{1,0} all-reduce(%both), replica_groups={{0,1,2,3}}, to_apply=%condition
  %gradient = f32[3,2,8]{2,1,0} custom-call(%stacked, %sum), custom_call_target="product"
  %step = f32[3,2,8]{2,1,0} subtract(%stacked, %gradient)
  ROOT %result = (f32[3,2,8]{2,1,0}, f32[4,8]{1,0}) tuple(%step, %sum)
}
"""


def test_what_a_gathered_value_is_used_for():
    hlo = Hlo(STEP)
    uses = {one.opcode: one for one in value_uses(hlo, Value("main", "gathered"))}
    assert uses.keys() == {"dynamic-slice", "dot"}
    assert uses["dynamic-slice"].is_layer
    assert uses["dot"].site == ("body", "y", "w")
    assert not uses["dot"].is_layer


def test_a_new_state_is_made_from_the_old_one_and_a_gradient_is_not():
    hlo = Hlo(STEP)
    assert is_made_from(hlo, Value("main", "step"), 0)
    assert is_made_from(hlo, Value("main", "sum"), 2)
    assert not is_made_from(hlo, Value("main", "gradient"), 0)
    assert not is_made_from(hlo, Value("main", "sum"), 0)


def test_the_axes_along_which_values_differ():
    hlo = Hlo(STEP)
    variation = Variation(hlo, {"x": 2, "y": 2}, {0: frozenset("x"), 2: frozenset("y")})
    expected = {"whole": "", "rows": "x", "cut": "y", "id": "xy", "gathered": "", "out": "x"}
    expected |= {"both": "xy", "sum": "y", "all": "", "step": "xy"}
    assert {name: "".join(sorted(variation.of("main", [name]))) for name in expected} == expected
    assert variation.of("body", ["x", "w"]) == {"x"}


FUSED_CONVOLUTION = """\
HloModule convolution, num_partitions=2

%wrapped (x: f32[1,4,4,8], k: f32[3,3,8,8]) -> f32[1,4,4,8] {
  %x = f32[1,4,4,8]{3,2,1,0} parameter(0)
  %k = f32[3,3,8,8]{3,2,1,0} parameter(1)
  %turned = f32[1,4,4,8]{3,2,1,0} copy(%x)
  ROOT %conv = f32[1,4,4,8]{3,2,1,0} convolution(%turned, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
}

ENTRY %main (a: f32[1,4,4,8], b: f32[3,3,8,8]) -> f32[1,4,4,8] {
  %a = f32[1,4,4,8]{3,2,1,0} parameter(0)
  %b = f32[3,3,8,8]{3,2,1,0} parameter(1)
  ROOT %outer = f32[1,4,4,8]{3,2,1,0} fusion(%a, %b), kind=kOutput, calls=%wrapped
}
"""


def test_of_a_convolution_in_a_fusion_it_is_not_known_what_it_sums():
    hlo = Hlo(FUSED_CONVOLUTION)
    use = Consumer("product", Value("main", "a"), hlo["main"]["outer"])
    assert not is_summed(hlo, use, 1, 8)


ASYNCHRONOUS_FUSION = """\
HloModule asynchronous_fusion, num_partitions=4

%sliced (s: f32[4,2,8], i: s32[]) -> (f32[1,2,8], f32[2,8]) {
  %s = f32[4,2,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %layer = f32[1,2,8]{2,1,0} dynamic-slice(%s, %i, %i, %i), dynamic_slice_sizes={1,2,8}
  %flat = f32[2,8]{1,0} bitcast(%layer)
  %sum = f32[2,8]{1,0} add(%flat, %flat)
  ROOT %both = (f32[1,2,8]{2,1,0}, f32[2,8]{1,0}) tuple(%layer, %sum)
}

ENTRY %main (v: f32[4,2,8], i: s32[]) -> (f32[4,2,8], f32[2,8]) {
  %v = f32[4,2,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %fs = ((f32[4,2,8]{2,1,0}, s32[]), (f32[1,2,8]{2,1,0}, f32[2,8]{1,0}), u32[]) fusion-start(%v, %i), kind=kLoop, calls=%sliced
  %fd = (f32[1,2,8]{2,1,0}, f32[2,8]{1,0}) fusion-done(%fs)
  %layer = f32[1,2,8]{2,1,0} get-tuple-element(%fd), index=0
  %sum = f32[2,8]{1,0} get-tuple-element(%fd), index=1
  %gathered = f32[4,2,8]{2,1,0} all-gather(%layer), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %out = (f32[4,2,8]{2,1,0}, f32[2,8]{1,0}) tuple(%gathered, %sum)
}
"""


def test_an_asynchronous_fusion_is_one_of_the_elements_of_its_results():
    hlo = Hlo(ASYNCHRONOUS_FUSION)
    assert origin_of(hlo, Value("main", "gathered")) == Origin(0, 4)
    assert origin_of(hlo, Value("main", "sum")) is None
    assert {use.opcode for use in value_uses(hlo, Value("main", "v"))} == {"dynamic-slice", "add"}


ASYNCHRONOUS_SUM = """\
HloModule asynchronous_sum, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (old: f32[2,8], g: f32[8,8]) -> f32[2,8] {
  %old = f32[2,8]{1,0} parameter(0)
  %g = f32[8,8]{1,0} parameter(1)
  %rs = ((f32[8,8]{1,0}), f32[2,8]{1,0}) reduce-scatter-start(%g), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add
  %rd = f32[2,8]{1,0} reduce-scatter-done(%rs)
  ROOT %new = f32[2,8]{1,0} subtract(%old, %rd)
}
"""


def test_a_new_state_is_made_from_an_asynchronous_sum():
    hlo = Hlo(ASYNCHRONOUS_SUM)
    assert Value("main", "rs") in set(updated_values(hlo, Value("main", "new"), ()))
    assert is_made_from(hlo, Value("main", "new"), 1)


def test_uses_behind_a_copy_have_a_shape(hlo):
    ends = list(uses(hlo, Value("main", "v"), lambda value: False))
    assert "cd" in {end.value.name for end in ends}
    assert all(elements(hlo, end.value) for end in ends)
