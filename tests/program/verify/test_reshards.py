"""XLA's warning of arrays that it cannot reshard, in the forms that it has had."""

from types import SimpleNamespace

import pytest

from shardrules._program.verify.unexpected import resharded

HEAD = "W1123 18:32:58.5 20190 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
OPERATION = (
    "for HLO operation %add.0 = f32[8,16,4]{2,1,0} add(%param, %param), "
    'metadata={op_name="jit(f)/add" stack_frame_id=2}. As the last resort, SPMD will'
)
NEW = "{mesh['x'=4,'y'=2], device_ids=(0), [{'y'}, {}, {'x':(1)2}]}"
OLD = "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate}"
LINES = {
    "new": (f"cannot go from sharding {NEW} to {NEW} efficiently {OPERATION}", f"from {NEW} to {NEW}"),
    "old": (
        f"was not able to go from sharding {OLD} to {{maximal device=0}} without doing a full "
        f"rematerialization of the tensor {OPERATION}",
        f"from {OLD} to {{maximal device=0}}",
    ),
    "without the operation": ("was not able to go from sharding {replicated} to {devices=[8]<=[8]} without ...", None),
    "a hostile line": ("cannot go from sharding {" + "} to {" * 20_000, None),
}


@pytest.mark.parametrize("name", LINES)
def test_forms_of_the_warning(name):
    """What is of no known form is no warning to us."""
    line, way = LINES[name]
    row = SimpleNamespace(op_name="jit(f)/add", kind="all-gather", shape="f32[8]", place=None, times=1, sent_at_least=9)
    found = list(resharded(SimpleNamespace(collectives=[row]), f"first\n{HEAD}{line}\n", large=9))
    assert [f"XLA cannot reshard f32[8] {way}, and" in one.message and rows == [row] for one, rows in found] == [
        True
    ] * bool(way)
