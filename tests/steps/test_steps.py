"""The score of `verify` on whole steps: the costly faults of real steps are in its findings."""

from __future__ import annotations

import re

import pytest

from tests.steps.score import Cost, outcome, score, warnings
from tests.steps.table import Built, Step, steps
from tests.support.folders import ROOT
from tests.support.slow import slow

SMALL = {
    "a Llama in plain JAX": ("no constraints", "hidden is whole over tp", "not donated"),
    "decoding with a KV cache": (
        "the cache is constrained to be whole inside",
        "keys and values are gathered to be used",
        "the cache is not donated",
    ),
    "contrastive towers": ("hidden is whole over tp",),
    "an LSTM": ("the recurrent kernel is gathered in each step",),
    "a mixer": ("kernels are cut by fsdp before tp", "the residual is cut over channels"),
}

pytest.importorskip("flax.nnx", reason="flax is not installed")
pytest.importorskip("optax", reason="optax is not installed")
pytest.importorskip("equinox", reason="equinox is not installed")


def small() -> list[Step]:
    """A few steps, with some of their faults."""
    by_name = {step.name: step for step in steps("tuned", "small")}
    return [
        by_name[name]._replace(faults={fault: by_name[name].faults[fault] for fault in faults})
        for name, faults in SMALL.items()
    ]


@pytest.mark.parametrize(
    "step", [step if step.name == "a mixer" else slow(step) for step in small()], ids=lambda step: step.name
)
def test_some_faults_of_steps_are_told(step):
    (row,) = score([step])
    assert not warnings(row.clean)
    assert row.clean.unexplained == 0
    assert len(row.costly) == len(step.faults)
    assert not row.missed


@pytest.mark.slow
@pytest.mark.parametrize("step", steps("tuned", "small"), ids=lambda step: step.name)
def test_costly_faults_are_told(step):
    (row,) = score([step])
    assert set(row.missed) <= step.missed
    assert len(row.costly) >= 10
    assert not warnings(row.clean)
    assert row.clean.unexplained < 0.01


def test_the_page_says_how_many_are_missed():
    page = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    missed = [int(costly) - int(found) for costly, found in re.findall(r"\| (\d+) \| (\d+) \(\d+ %\) \|", page)]
    assert missed[::3] == [sum(len(one.missed) for one in steps(group)) for group in ("tuned", "small")]


def test_a_fault_that_jax_refuses_is_not_counted():
    def build(refused: bool = False) -> Built:
        if refused:
            raise ValueError("no")
        return small()[1].build()

    (row,) = score([Step("refused", build, {"it is refused": {"refused": True}})])
    assert row.outcomes["it is refused"].error == "ValueError: no"
    assert not row.costly


def test_a_fault_that_the_step_knows_nothing_of_is_an_error():
    with pytest.raises(AssertionError, match="does not know {'hiden'}"):
        small()[0].build(hiden=None)


def test_costs_are_compared_with_the_clean_step():
    clean = Cost(sent=2**20, peak=2**20)
    assert not Cost(sent=2**20 + 2**15, peak=2**20).exceeds(clean)
    assert Cost(sent=2**20 + 2**17, peak=2**20).exceeds(clean)
    assert Cost(sent=0, peak=2**20 + 2**15).exceeds(clean)
    assert not Cost(sent=2**16 - 1, peak=2**20).exceeds(Cost(0, 2**20))


def test_loops_are_counted():
    """Three layers send three times what one does."""
    clean = outcome(small()[0]).cost
    assert clean
    assert clean.sent > 3 * 8 * 8 * 128 * 256 * 4
