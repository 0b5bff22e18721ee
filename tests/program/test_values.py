"""The graph of values, and its facts: on texts by hand, on recorded programs, on compiled ones."""

import gzip

import pytest

from shardrules._program.facts import Facts, Origin, Variation
from shardrules._program.hlo import Hlo
from shardrules._program.values import Values
from tests.support.folders import ROOT

TEXTS = sorted((ROOT / "tests" / "data" / "hlo").glob("*.txt.gz"))


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
    assert Facts(values).origins[only(values, computation, name)] == origin


def test_each_result_of_a_collective_of_several_is_made_of_its_own_operand():
    values = Values(Hlo(ASYNCHRONOUS))
    first, second = values.of("main", "two")
    assert values.shapes[only(values, "main", "agd")].dims == (8, 8)  # a start has its operand, too
    assert [Facts(values).origins[node] for node in (first, second)] == [Origin(2, 4), Origin(1)]
    assert values.outputs == [*values.of("main", "held"), *values.of("main", "total"), first]


def test_an_array_that_a_loop_only_hands_on_is_the_one_before_it():
    values = Values(Hlo(STEP))
    (stack,) = values.of("body", "stack")
    assert values.opcodes[stack] == "while"
    assert Facts(values).origins[stack] == Origin(0)
    assert Facts(values).origins[only(values, "body", "w")] == Origin(0, 3)


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

%condition (q: (s32[], f32[3,8], f32[3,8])) -> pred[] {
  %q = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (a: f32[3,8]) -> f32[3,8] {
  %a = f32[3,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %zeros = f32[3,8]{1,0} broadcast(%zero), dimensions={}
  %doubled = f32[3,8]{1,0} add(%a, %a)
  %in = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) tuple(%zero, %a, %BEGIN)
  %loop = (s32[], f32[3,8]{1,0}, f32[3,8]{1,0}) while(%in), condition=%condition, body=%body
  ROOT %kept = f32[3,8]{1,0} get-tuple-element(%loop), index=2
}
"""


@pytest.mark.parametrize(("begin", "origin"), [("zeros", Origin(0)), ("a", Origin(0)), ("doubled", None)])
def test_what_a_loop_keeps_of_an_argument_is_a_copy_unless_it_begins_with_another(begin, origin):
    values = Values(Hlo(STACKED.replace("%BEGIN", f"%{begin}")))
    assert Facts(values).origins[values.outputs[0]] == origin


def test_next_states():
    values = Values(Hlo(STEP))
    stacked, _, cut = values.parameters
    step, total = values.outputs
    states = Facts(values).next_states([(0, step), (2, total)])
    assert states[stacked] == 0
    assert states[only(values, "main", "gradient")] == 0
    assert states[cut] == states[only(values, "main", "both")] == 2
    assert step in Facts(values).results([stacked])
    assert only(values, "main", "gradient") not in Facts(values).results([stacked])


def test_the_axes_along_which_values_differ():
    values = Values(Hlo(STEP))
    variation = Variation(values, {"x": 2, "y": 2}, {0: frozenset("x"), 2: frozenset("y")})
    expected = {"whole": "", "rows": "x", "cut": "y", "id": "xy", "gathered": "", "out": "x"}
    expected |= {"both": "xy", "sum": "y", "all": "", "step": "xy"}
    axes = {name: variation.of(values.of("main", name)) for name in expected}
    assert {name: "".join(sorted(one)) for name, one in axes.items()} == expected
    assert variation.of([only(values, "body", "x"), only(values, "body", "w")]) == {"x"}


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: file.name.removesuffix(".txt.gz"))
def test_each_line_that_is_executed_has_its_arrays(file):
    """What a collective moves has the shapes of its line, before it and behind."""
    hlo = Hlo(gzip.decompress(file.read_bytes()).decode())
    values = Values(hlo)
    for exchange in hlo.exchanges({}):
        results, line = values.results(exchange), exchange.instruction
        shapes = [values.shapes[node] for node in results]
        assert shapes == list(line.results)[-len(results) :] or line.opcode.endswith("-start")
        assert values.operand(exchange) in values.made_of[results[exchange.number]]


FOLLOWED = """\
HloModule followed

ENTRY %main (a: f32[2,3,4,5]) -> f32[7] {
  %a = f32[2,3,4,5]{3,2,1,0} parameter(0)
  %turned = f32[4,2,3,5]{3,2,1,0} transpose(%a), dimensions={2,0,1,3}
  %back = f32[2,4,3,5]{3,1,2,0} bitcast(%a)
  %joined = f32[2,3,20]{2,1,0} reshape(%a)
  %split = f32[6,2,2,5]{3,2,1,0} reshape(%joined)
  %w = f32[20,7]{1,0} constant(0)
  %product = f32[2,3,7]{2,1,0} dot(%joined, %w), lhs_contracting_dims={2}, rhs_contracting_dims={0}
  %other = f32[4,2,3,1]{3,2,1,0} slice(%turned), slice={[0:4], [0:2], [0:3], [0:1]}
  %moved = f32[2,4,3,1]{3,1,2,0} slice(%back), slice={[0:2], [0:4], [0:3], [0:1]}
  %outer = f32[6,2,1,5]{3,2,1,0} slice(%split), slice={[0:6], [0:2], [0:1], [0:5]}
  ROOT %out = f32[7]{0} reduce(%product, %other, %moved, %outer), dimensions={0}
}
"""


def test_a_dimension_is_followed_to_where_it_is_used():
    """Heads that are joined with their size, transposed, and split."""
    values = Values(Hlo(FOLLOWED))
    found = Facts(values).uses(values.parameters[0], 2, lambda _: False)
    assert {values.lines[use.user].name: use.dim for use in found} == {"product": 2, "other": 0, "moved": 1, "outer": 1}


def test_a_text_of_20_000_instructions():
    """Neither the depth of calls nor the work for a line grows with it."""
    lines = ["HloModule large", "", "ENTRY %main (a: f32[8,8]) -> f32[8,8] {"]
    lines.append("  %x.0 = f32[8,8]{1,0} parameter(0)")
    lines += [f"  %x.{i} = f32[8,8]{{1,0}} add(%x.{i - 1}, %x.{i // 2})" for i in range(1, 20_000)]
    lines += ["  ROOT %x = f32[8,8]{1,0} copy(%x.19999)", "}", ""]
    values = Values(Hlo("\n".join(lines)))
    variation = Variation(values, {"x": 2}, {0: frozenset("x")})
    assert (len(values), Facts(values).origins[-1]) == (20_001, None)
    assert Facts(values).next_states([(0, values.outputs[0])])[values.parameters[0]] == 0
    assert variation.of(values.outputs) == {"x"}
