"""What steps send by their jaxprs, and by what the TPU's compiler makes of them."""

from __future__ import annotations

import pytest

from tests.support import step_table
from tests.support.step_table import CASES
from tests.tpu.marks import needs_libtpu

# The compiler's bytes by ours. Products of float32 are of bfloat16: so are the operands that are sent.
HALVES = {
    "MoE data=2,ep=4": {("all-to-all", ("ep",))},
    "dense, scanned fsdp=4,tp=2": {("all-gather", ("fsdp",))},
}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", HALVES)
def test_a_step_sends_for_tpus_what_its_jaxpr_says(name):
    index = next(i for i, case in enumerate(CASES) if case.id == name)
    ours, real = step_table.compared_on_tpu(index)
    assert ours.keys() <= real.keys()
    for key, sent in ours.items():
        # Parts of 96 rows on 4 devices are padded to tiles, and permutes bring the rows back.
        most = 1.15 if key[0] == "reduce-scatter" else 1.01
        half = 0.5 if key in HALVES[name] else 1.0
        assert 0.99 * half <= real[key] / sent <= most * half, key
    extra = {kind for kind, _ in real.keys() - ours.keys()}
    assert extra <= {"collective-permute"}
