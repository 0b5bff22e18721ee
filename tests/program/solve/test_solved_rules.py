"""Rules of a solution: they give each leaf its cuts, and are few."""

from __future__ import annotations

import random

import pytest

import shardrules as sr
from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import Entries, entries_of, entries_of_cuts, entry_axes
from shardrules._plan.suggest.draft import MOST_RULES
from shardrules._program.solve.solution import with_specs
from tests.support import models
from tests.support.models import array

MESH = {"fsdp": 8, "tp": 4}
EXPERTS = {"fsdp": 8, "ep": 4, "tp": 2}


def cuts_of(plan):
    """{path: the axes of each dimension}."""
    rows = {}
    for path in plan.paths:
        kind = plan.kind(path)
        axes = tuple(map(entry_axes, entries_of(kind.spec or ())))
        rows[path] = axes + ((),) * (len(kind.shape) - len(axes))
    return rows


def bare(tree, mesh=MESH):
    return sr.plan(tree, [(".*", ())], mesh)


def with_cuts(plan, cuts, heads=None):
    """Plan by rules that give each path its cuts; heads have units."""
    specs = {path: Entries(entries_of_cuts(rows)) for path, rows in cuts.items()}
    units = {path: RuleSpec(specs[path], units=heads[path]) for path in heads or ()}
    return with_specs(plan, specs | units)


MODELS = {"llama": models.llama(), "mamba": models.mamba(), "gpt_oss": models.gpt_oss()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [MESH, EXPERTS], ids=str)
def test_rules_give_all_leaves_the_cuts_of_another_plan(name, mesh):
    wanted = cuts_of(sr.suggest(MODELS[name], mesh).plan)
    plan = with_cuts(bare(MODELS[name], mesh), wanted)
    assert cuts_of(plan) == wanted
    assert len(plan.rules) <= MOST_RULES
    assert not plan.coverage.dead
    assert not plan.coverage.shadowed
    assert len(plan.rules.all_matches("~")) == 0


def test_many_specs_are_still_exact_where_paths_are_random():
    shuffle = random.Random(7)
    choices = [((), ()), (("fsdp",), ()), ((), ("tp",)), (("fsdp",), ("tp",)), (("tp",), ("fsdp",))]
    for _ in range(60):
        words = [shuffle.choice("abcdefg") * shuffle.randint(1, 3) for _ in range(12)]
        tree = {
            f"{shuffle.choice(words)}/{shuffle.choice(words)}/{shuffle.randint(0, 3)}/{shuffle.choice(words)}": array(
                64, 64
            )
            for _ in range(shuffle.randint(1, 30))
        }
        wanted = {path: shuffle.choice(choices) for path in tree}
        plan = with_cuts(bare(tree), wanted)
        assert cuts_of(plan) == wanted


def test_what_rules_cannot_say_is_refused_with_the_leaf():
    tree = {f"{name}": array(64, 64) for name in ("a", "b")}
    plan = sr.plan(tree, [], {"tp": 8})
    with pytest.raises(ValueError, match="'a': rules of the dialect eformer cannot give it"):
        with_cuts(plan, {"a": ((), ("tp",)), "b": ((), ())}, {"a": (1, 32)})
