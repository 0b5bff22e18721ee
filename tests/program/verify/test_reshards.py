"""XLA's warning of arrays that it cannot reshard, in the forms that it has had."""

from __future__ import annotations

import pytest

from shardrules._program.verify.resharded import Reshard, reshards_in

HEAD = "W1123 18:32:58.5 20190 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. "
LINES = {
    "new": (
        HEAD + "The compiler cannot go from sharding {mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]} to "
        "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]} efficiently for HLO operation %add.0 = "
        "f32[8,16,4]{2,1,0} add(%param, %param), sharding={mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}"
        ', metadata={op_name="jit(f)/add" stack_frame_id=2}. As the last resort, SPMD will',
        Reshard(
            "f32[16,16,16]", "P('y', None, 'x')", "P(None, ('x', 'y'), None)", "jit(f)/add"
        ),
    ),
    "parts of axes": (
        HEAD + "The compiler cannot go from sharding {mesh['a'=8], [{'a':(1)2}, {}]} to "
        "{mesh['a'=8], [{}, {'a':(2)4}]} efficiently for HLO operation %x = bf16[8,16]{1,0} "
        "copy(%y)",
        Reshard("bf16[16,16]", "P('a', None)", "P(None, 'a')", ""),
    ),
    "old": (
        "2026-11-23 18:32:59: E external/xla/spmd_partitioner.cc:614] [spmd] Involuntary full "
        "rematerialization. The compiler was not able to go from sharding "
        "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate} to {devices=[1,8,1]<=[8]} without "
        "doing a full rematerialization of the tensor for HLO operation: %get-tuple-element = "
        "f32[8,16,4]{2,1,0} get-tuple-element((s32[], f32[8,16,4]{2,1,0}) %param), index=1",
        Reshard(
            "f32[16,16,8]", "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate}",
            "{devices=[1,8,1]<=[8]}", "",
        ),
    ),
    "one device": (
        HEAD + "The compiler was not able to go from sharding {maximal device=0} to "
        "{devices=[4,1]<=[4]} without doing a full rematerialization of the tensor for HLO "
        "operation: %g = f32[257152,2048]{1,0} get-tuple-element(%t)",
        Reshard("f32[257152,2048]", "{maximal device=0}", "{devices=[4,1]<=[4]}", ""),
    ),
    "a number": (
        HEAD + "The compiler cannot go from sharding {replicated} to {maximal device=0} "
        "efficiently for HLO operation %c = s32[] constant(3)",
        Reshard("s32[]", "{replicated}", "{maximal device=0}", ""),
    ),
    "before it named the operation": (
        HEAD + "The compiler was not able to go from sharding {devices=[2,1,4]<=[4,2]T(1,0)} to "
        "{devices=[1,8,1]<=[8]} without doing a full rematerialization of the tensor. You",
        None,
    ),
    "unknown sharding": (HEAD + "The compiler cannot go from sharding {cubes=3} to {replicated} "
        "efficiently for HLO operation %c = s32[4] constant(3)", None),
    "unknown axis": (HEAD + "The compiler cannot go from sharding {mesh['x'=4], [{'z'}]} to "
        "{replicated} efficiently for HLO operation %c = s32[4] constant(3)", None),
    "a tuple": (HEAD + "The compiler cannot go from sharding {replicated} to {replicated} "
        "efficiently for HLO operation %c = (s32[4], s32[4]) tuple(%a, %b)", None),
    "fewer tiles": (HEAD + "The compiler cannot go from sharding {devices=[2]<=[2]} to "
        "{replicated} efficiently for HLO operation %c = s32[4,4] add(%a, %b)", None),
    "words": ("Involuntary full rematerialization", None),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_forms_of_the_warning(name):
    """What is of no known form is no warning to us."""
    line, reshard = LINES[name]
    assert reshards_in(line) == ((reshard,) if reshard else ())


def test_lines_between_others():
    text = "\n".join(["first", LINES["new"][0], LINES["words"][0], LINES["old"][0], ""])
    assert reshards_in(text) == (LINES["new"][1], LINES["old"][1])


def test_a_hostile_line_is_read_in_no_time():
    assert reshards_in(HEAD + "The compiler cannot go from sharding {" + "} to {" * 20_000) == ()
