"""XLA's warning of arrays that it cannot reshard, in the forms that it has had."""

from __future__ import annotations

import pytest

from shardrules._program.verify.unexpected import reshards_in

HEAD = "W1123 18:32:58.5 20190 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. "
OPERATION = (
    "for HLO operation %add.0 = f32[8,16,4]{2,1,0} add(%param, %param), "
    'metadata={op_name="jit(f)/add" stack_frame_id=2}. As the last resort, SPMD will'
)
OLD = "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate}"
LINES = {
    "new": (
        "The compiler cannot go from sharding {mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]} to "
        f"{{mesh['x'=4,'y'=2], [{{}}, {{'x', 'y'}}, {{}}]}} efficiently {OPERATION}",
        "from P('y', None, 'x') to P(None, ('x', 'y'), None)",
    ),
    "parts of axes": (
        "The compiler cannot go from sharding {mesh['a'=8], device_ids=(0), [{'a':(1)2}, {}]} to "
        f"{{mesh['a'=8], [{{}}, {{'a':(2)4}}]}} efficiently {OPERATION}",
        "from P('a', None) to P(None, 'a')",
    ),
    "old": (
        f"The compiler was not able to go from sharding {OLD} to {{maximal device=0}} without "
        f"doing a full rematerialization of the tensor {OPERATION}",
        "from 2 x 1 x 2 parts to {maximal device=0}",
    ),
    "before it named the operation": (
        "The compiler was not able to go from sharding {replicated} to {devices=[1,8,1]<=[8]} "
        "without doing a full rematerialization of the tensor. You", None,
    ),
    "words": ("", None),
    "a hostile line": ("The compiler cannot go from sharding {" + "} to {" * 20_000, None),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_forms_of_the_warning(name):
    """What is of no known form is no warning to us."""
    line, way = LINES[name]
    assert list(reshards_in(f"first\n{HEAD}{line}\n")) == ([("jit(f)/add", way)] if way else [])
