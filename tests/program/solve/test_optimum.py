"""The optimum of `solve` against all assignments, tried one by one with the step's own price."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules._program.solve.price import Machine, Price
from shardrules._program.solve.search import Search, Task, best_of
from shardrules._program.solve.space import Space
from shardrules._program.solve.terms import Resident, Terms
from tests.support.random_steps import random_step

HARDWARE = sr.Hardware.named("v5p")
ROOM = 10**18
MESHES = ({"a": 4}, {"a": 2, "b": 2}, {"a": 4, "b": 2}, {"a": 2, "b": 3})


def machine_on(sizes):
    return Machine(HARDWARE, sizes)


def space_of(seed):
    return Space(random_step(seed), machine_on(MESHES[seed % len(MESHES)]), ROOM)


def price(space, assignment):
    """Seconds of the step as a whole, and not term by term."""
    return Price(space.spread(assignment), space.machine).of_step().total


def assignments(space):
    for row in product(*space.values.values()):
        yield dict(zip(space.values, row, strict=True))


def random_assignment(space, rng):
    return {name: rng.choice(values) for name, values in space.values.items()}


def is_optimum(seed, most=1024):
    """Whether what is found is the best of all; None if there are too many to try."""
    rng = random.Random(seed)
    space = space_of(seed)
    if prod(map(len, space.values.values())) > most:
        return None
    resident = Resident(space)
    costs = [(price(space, a), resident.least(a)) for a in assignments(space)]
    peaks = sorted(memory for _, memory in costs)
    space.hbm = rng.choice((ROOM, rng.choice(peaks), peaks[len(peaks) // 10], peaks[0] - 1))
    fitting = [seconds for seconds, memory in costs if memory <= space.hbm]
    search = Search(space)
    search.begin()
    search.run()
    if not fitting:
        return search.assignment is None
    return (
        price(space, search.assignment) == pytest.approx(min(fitting), rel=1e-7, abs=1e-11)
        and search.bound == pytest.approx(min(fitting), rel=1e-7, abs=1e-11)
        and resident.least(search.assignment) <= space.hbm
    )


def test_the_optimum_is_the_best_of_all():
    verdicts = [is_optimum(seed, 128) for seed in range(90)]
    assert [seed for seed, verdict in enumerate(verdicts) if verdict is False] == []
    assert verdicts.count(True) >= 20


@pytest.mark.parametrize("seed", range(20))
def test_terms_add_up_to_the_price_of_the_step(seed):
    space, rng = space_of(seed), random.Random(seed)
    terms = Terms(space)
    for _ in range(6):
        assignment = random_assignment(space, rng)
        whole = pytest.approx(price(space, assignment), rel=1e-7, abs=1e-11)
        assert terms.total(assignment).total == whole


def test_terms_have_what_a_square_array_sends_when_it_is_transposed():
    square = jax.ShapeDtypeStruct((1024, 1024), "float32")
    # One class for both dimensions, whose axes cut the first of them before and behind.
    traced = sr.trace(lambda w: w @ w + jnp.sin(w.T), square)
    space = Space(traced, machine_on({"a": 4}), None)
    for axes in ((), ("a",)):
        assignment = dict.fromkeys(space.values, axes)
        rows = space.spread(assignment).sent
        sent = {row.kind for row in rows if row.operation.name == "transpose"}
        assert sent == ({"all-to-all"} if axes else set())
        whole = pytest.approx(price(space, assignment), rel=1e-7)
        assert Terms(space).total(assignment).total == whole


def test_terms_have_two_sums_of_one_operation_once():
    """Each is left to an addition of its own, which has another sum as well."""

    def step(a, b, w):
        added = lambda x, y: (x[0] + y[0], x[1] + y[1])  # noqa: E731
        before = b.sum(0)
        first, second = jax.lax.reduce((a, b), (0.0, 0.0), added, (0,))
        return w.sum(0) + first, before + second

    traced = sr.trace(step, *[jax.ShapeDtypeStruct((1024, 512), "float32")] * 3)
    space = Space(traced, machine_on({"a": 2, "b": 2}), ROOM)
    for assignment in assignments(space):
        whole = pytest.approx(price(space, assignment), rel=1e-7)
        assert Terms(space).total(assignment).total == whole


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_below_what_they_bound(seed):
    space, rng = space_of(seed), random.Random(seed)
    terms, resident = Terms(space), Resident(space)
    for _ in range(6):
        whole = random_assignment(space, rng)
        part = {name: value for name, value in whole.items() if rng.random() < 0.5}
        rows = [terms.least(place, part) for place in range(len(terms.terms))]
        assert max(map(sum, zip(*rows, strict=True))) <= terms.total(whole).total * (1 + 1e-9)
        assert resident.least(part) <= resident.least(whole)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_mesh_is_that_of_the_best_solution(seed):
    meshes = ({"a": 7}, {"a": 4}, {"a": 2, "b": 2})
    task = Task(random_step(seed), HARDWARE, 10**15)
    alone = [best_of(task, [mesh], None).search.found for mesh in meshes]
    best = best_of(task, meshes, None)
    assert best.search.found == pytest.approx(min(alone), rel=1e-7, abs=1e-11)
    assert best.bound == pytest.approx(min(alone), rel=1e-7, abs=1e-11)
    assert alone[meshes.index(best.search.mesh)] == pytest.approx(min(alone), rel=1e-7, abs=1e-11)


def test_the_first_of_equal_axes_is_on_data():
    def train(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(mlp)(params, x))

    def mlp(params, x):
        return jnp.sum(jax.nn.relu(x @ params["up"]) @ params["down"])

    tree = {"up": jax.ShapeDtypeStruct((512, 2048), "float32"),
            "down": jax.ShapeDtypeStruct((2048, 512), "float32")}  # fmt: skip
    # The batch has one factor of 2.
    step = sr.trace(train, tree, jax.ShapeDtypeStruct((2 * (2**17 - 1), 512), "float32"))
    search = Search(Space(step, machine_on({"fsdp": 2, "tp": 2}), ROOM))
    search.begin()
    search.run()
    (batch,) = [name for name in search.space.values if step._roles.of.get(name) == "batch"]
    other = {"fsdp": "tp", "tp": "fsdp"}
    ties = []
    for axis in ("fsdp", "tp"):
        if search.assignment[batch] != (axis,):
            search.assignment = {
                name: tuple(sorted(map(other.get, axes)))
                for name, axes in search.assignment.items()
            }
        search.simplify()
        ties.append(search.assignment[batch])
    assert ties == [("fsdp",), ("fsdp",)]
