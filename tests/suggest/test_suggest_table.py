"""Suggested rules beside hand-written ones, on all models and meshes: the table of tests/data/suggested.md."""

from __future__ import annotations

import pytest

from tests.support import corpus, suggested
from tests.support.slow import some

# The models of 45,000 and more arrays take a second each.
SMALL = [case for case in suggested.cases() if case[0] not in corpus.LARGEST]
CASES = [
    *some(SMALL, 6),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in suggested.cases()
        if case not in SMALL
    ),
]
SHOWN = {
    tuple(cell.strip(" `") for cell in line.split("|")[1:3]): line for line in suggested.printed()
}


def test_the_page_has_a_row_for_each_model_and_mesh():
    assert list(SHOWN) == suggested.cases()


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_the_row_of_the_page_is_true(model, mesh):
    line = SHOWN[model, mesh]
    hand = line.split("|")[6].strip()
    found = suggested.row(model, mesh, hand)
    assert str(found) == line
    # Routers and projections to a latent space are whole over tensor axes, whatever they hold.
    spared = suggested.least(model, mesh, spares=True) - found.least
    assert found.bytes <= 1.01 * (found.least + spared)
    assert found.bytes <= 1.02 * found.least
    assert found.rules <= 19
    if found.hand:
        assert found.bytes <= 1.01 * (found.hand_bytes + spared)
        assert found.rules <= 1.5 * found.hand_rules


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_the_rules_are_clean(model, mesh):
    found = suggested.suggested(model, mesh)
    assert not found.plan.check(**found.declared).at_least("warning")
    assert not found.warnings
    # Without what it declares: nothing large is replicated but what tensor axes are kept from.
    bare = found.plan.with_rules(found.rules).check(data_axes=suggested.DATA_AXES)
    kept = [path for one in bare.at_least("warning") for path in one.paths]
    assert all(map(suggested.SPARED.search, kept)), kept
    coverage = found.plan.coverage
    assert coverage.unmatched == 0
    assert not coverage.dead
    assert not coverage.shadowed
    assert not found.unknown
    assert [reason.leaves for reason in found.reasons] == list(coverage.won)


@pytest.mark.slow
@pytest.mark.parametrize("model", corpus.manifest_names())
def test_no_hand_written_set_fits_better_than_the_one_on_the_page(model):
    for mesh in suggested.meshes_for(model):
        best = suggested.best_hand(model, mesh)
        shown = SHOWN[model, mesh].split("|")[6].strip()
        assert (best[0] if best else suggested.NONE) == shown
