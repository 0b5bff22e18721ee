"""What the TPU's compiler makes of steps is what `tests/data/step_sends.json` has of them."""

from __future__ import annotations

import json

import pytest

from tests.support import step_table
from tests.support.step_table import CASES
from tests.tpu.marks import needs_libtpu


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["MoE data=2,ep=4", "dense, scanned fsdp=4,tp=2"])
def test_a_step_sends_what_is_recorded(name):
    index = next(i for i, case in enumerate(CASES) if case.id == name)
    recorded = json.loads(step_table.FILE.read_text())[name]
    rows = {(kind, tuple(axes), dtype): sent for kind, axes, dtype, sent in recorded}
    compiled = {tuple(key): sent for *key, sent in step_table.compiled_for_tpu(index)}
    assert compiled == pytest.approx(rows, rel=0.02)
