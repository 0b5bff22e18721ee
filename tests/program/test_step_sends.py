"""What steps send by their jaxprs, and by what the CPU's compiler makes of them."""

from __future__ import annotations

import jax
import pytest

from tests.support import page_table, step_table
from tests.support.step_table import CASES

PAGE_VERSION = (0, 12)
# Some that compile quickly; `make test-all` has them all.
QUICK = (
    "dense, scanned fsdp=4,tp=2",
    "dense, square output transposed tp=4",
    "MoE data=2,ep=4",
    "ring attention fsdp=2,sp=4",
    "pipeline data=2,pp=4",
    "Muon fsdp=4,tp=2",
    "decode data=2,tp=4",
    "fewer heads of keys fsdp=2,tp=4",
)
STEPS = [
    pytest.param(i, id=case.id, marks=() if case.id in QUICK else pytest.mark.slow)
    for i, case in enumerate(CASES)
]


def test_the_quick_ones_are_there():
    assert {case.id for case in CASES}.issuperset(QUICK)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLAs choose other collectives")
@pytest.mark.parametrize("index", STEPS)
def test_a_step_sends_what_its_jaxpr_says(index):
    """In all within 5 %, each collective over the same axes within 10 %; or the page says why not."""
    differences = list(step_table.differences(index))
    assert bool(differences) == (CASES[index].id in step_table.WHY), differences


@pytest.mark.slow
@pytest.mark.skipif(
    jax.__version_info__[:2] != PAGE_VERSION, reason="the page's rows are of JAX 0.12"
)
def test_the_page_has_the_table_of_all_steps():
    assert page_table.shown(step_table.PAGE) == step_table.table()
