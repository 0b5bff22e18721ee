"""The compiler still says of steps what `tests/data/step_memory.json` has of them."""

from __future__ import annotations

import pytest

from tests.support import memory_steps
from tests.tpu.marks import needs_libtpu


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["decode, v5e:4x4, data=4,tp=4", "forward, v5e:4x4, fsdp=16", "LoRA, v5e:4x4, fsdp=16"]
)
def test_the_compiler_says_what_is_recorded(name):
    pair = next(pair for pair in memory_steps.PAIRS if memory_steps.key(pair) == name)
    said, recorded = memory_steps.compiled(pair), memory_steps.recorded()[name]
    for number in ("peak", "arguments"):
        assert said[number] == pytest.approx(recorded[number], rel=0.02)
    assert memory_steps.traced(pair).memory().peak == pytest.approx(said["peak"], rel=0.07)
