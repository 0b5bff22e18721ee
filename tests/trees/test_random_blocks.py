"""Blocks that are alike but for one thing: each leaf gets what it gets alone, on each call.

Of all dialects and their choices, in `match`, `named_shardings`, `plan` and `spec_for`.
"""

from __future__ import annotations

import pytest

from tests.support import random_blocks
from tests.support.slow import some

TREES = 1000
OTHERS = [check for check in random_blocks.CHECKS if check is not random_blocks.check_match]


@pytest.mark.parametrize("seed", some(range(100), every=50))
def test_each_leaf_gets_what_it_gets_alone(seed):
    for number, case in enumerate(random_blocks.cases(seed, TREES)):
        random_blocks.check_match(case)
        if number % 2:  # they take several times as long
            OTHERS[number // 2 % len(OTHERS)](case)
