"""Classes of dimensions and the price, by brute force: random steps are compiled with each class cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.constraints import spec_of_cuts
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Spread
from shardrules._program.step import factors
from tests.support import hlo_counts
from tests.support.random_programs import RandomStep, Shape

N = 4
MESH = Mesh(np.array(jax.devices()[:N]), ("x",))
FEW, MANY = range(8), range(8, 200)
SEEDS = [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in MANY)]
# Classes of these seeds that are priced otherwise than XLA does it.
UNLIKE = {
    44: "XLA gathers none of what is zero",
    113: "a quarter of 96 is one of 12 x 8 and one of 8 x 12: for us these are two classes",
    122: "XLA cuts an array by what a slice of it is added to, and exchanges rows for it",
}

pytestmark = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="older XLAs choose other collectives")


def unlike(function: Callable[..., Any], shapes: Sequence[Shape]) -> list[list[P]]:
    """The classes of a step that are priced to send something if cut, and do not, or the reverse."""
    wrong = []
    step = jax.jit(function)
    traced = sr.trace(step, *[jax.ShapeDtypeStruct(shape, "float32") for shape in shapes], on=MESH)
    space = Space(traced, {"x": N})
    space._is_weight = [False] * len(space._is_weight)  # or small vectors would be whole
    inputs, dims = traced._equations.body.inputs, traced._equations.dims
    for name in {name for i in inputs for row in space.classes[i] for name in row[:1]}:
        if dims.sizes[name] % N == 0:
            layout = {name: ("x",)}
            specs = [spec_of_cuts(space.cuts(i, layout)) for i in inputs]
            args = [
                jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(MESH, spec))
                for shape, spec in zip(shapes, specs, strict=True)
            ]
            sent = hlo_counts.collectives(step.lower(*args).compile().as_text())
            if bool(sent) != bool(Spread(space, layout).of_step().sent):
                wrong.append(specs)
    return wrong


@pytest.mark.parametrize("seed", SEEDS)
def test_a_class_that_is_cut_alike_is_sent_as_priced(seed):
    """Devices send nothing where the jaxpr says nothing, and something where it says something."""
    step = RandomStep(seed)
    assert bool(unlike(step, step.args)) == (seed in UNLIKE), str(step)


def scored(q: Any, k: Any) -> Any:
    """A product of what is split in two, of which the first part is summed with a turned array."""
    return q.reshape(8, 4, 4) * k.transpose(0, 2, 1)


@pytest.mark.parametrize("name", ["transpose", "reshape"])
def test_a_wrong_rule_makes_classes_that_are_not_sent_as_priced(monkeypatch, name):
    shapes = [(8, 16), (8, 4, 4)]
    assert not unlike(scored, shapes)
    right = factors._RULES[name]

    def wrong(operation):
        rule = right(operation)
        if name == "transpose":  # as if it changed nothing
            return replace(rule, results=rule.operands)
        turned = tuple(tuple(dims[::-1]) for dims in rule.operands[0])  # the minor factor first
        return replace(rule, operands=(turned, *rule.operands[1:]))

    monkeypatch.setitem(factors._RULES, name, wrong)
    assert unlike(scored, shapes)
