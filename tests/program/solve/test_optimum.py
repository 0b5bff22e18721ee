"""The optimum of `solve` against all assignments, tried one by one with the step's own price."""

from __future__ import annotations

import random
from itertools import islice, product
from math import inf, prod

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules._program.solve import search as searching
from shardrules._program.solve.search import Search, best_of, has_solver
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Machine, Price
from shardrules._program.solve.terms import Resident, Terms
from tests.support.random_steps import random_step

needs_solver = pytest.mark.skipif(not has_solver(), reason="OR-tools is not installed")
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


def is_optimum(seed):
    """Whether what is found is the best of all; None if there are too many to try."""
    rng = random.Random(seed)
    space = space_of(seed)
    if prod(map(len, space.values.values())) > 128:
        return None
    resident = Resident(space)
    costs = [(price(space, a), resident.bytes(a), a) for a in assignments(space)]
    peaks = sorted(memory for _, memory, _ in costs)
    space.hbm = rng.choice((ROOM, rng.choice(peaks), peaks[len(peaks) // 10], peaks[0] - 1))
    fitting = [(seconds, a) for seconds, memory, a in costs if memory <= space.hbm]
    search = Search(space)
    if not fitting:
        search.prove(inf)
        return search.assignment is None and search.bound == inf
    # From the worst one: tables alone lead to the best.
    search.seconds, search.assignment = max(fitting, key=lambda row: row[0])
    search.prove(search.seconds)
    least = pytest.approx(min(seconds for seconds, _ in fitting), rel=1e-7, abs=1e-11)
    is_best = price(space, search.assignment) == least == search.bound
    return is_best and resident.bytes(search.assignment) <= space.hbm


@needs_solver
def test_the_optimum_is_the_best_of_all():
    verdicts = [is_optimum(seed) for seed in range(90)]
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


@pytest.mark.parametrize("seed", range(8))
def test_without_the_solver_the_bound_is_below_what_is_found(monkeypatch, seed):
    monkeypatch.setattr(searching, "has_solver", lambda: False)
    search = Search(space_of(seed))
    found, bound = best_of([search])
    rows = list(islice(assignments(search.space), 200))
    assert Terms(search.space).least <= bound * (1 + 1e-9)
    assert bound <= min(price(search.space, a) for a in rows) * (1 + 1e-9)
    assert found.seconds == pytest.approx(price(search.space, found.assignment), rel=1e-7)


@needs_solver
@pytest.mark.parametrize("most", [searching._MOST_ROWS, 3])
def test_terms_of_too_many_variables_are_left_out_of_the_bound(monkeypatch, most):
    monkeypatch.setattr(searching, "_MOST_ROWS", most)
    searches = [Search(space_of(seed)) for seed in range(4)]
    gaps = [1 - bound / found.seconds for found, bound in map(best_of, zip(searches))]
    assert (max(gaps) > 0) == (most == 3)
    assert max(gaps) < 1


@needs_solver
@pytest.mark.parametrize("seed", range(4))
def test_the_best_mesh_is_that_of_the_best_solution(seed):
    meshes = ({"a": 7}, {"a": 4}, {"a": 2, "b": 2})
    step = random_step(seed)

    def searches():
        return [Search(Space(step, machine_on(sizes), 10**15), sizes) for sizes in meshes]

    alone = [best_of([search])[0].seconds for search in searches()]
    best, bound = best_of(searches())
    least = pytest.approx(min(alone), rel=1e-7, abs=1e-11)
    assert best.seconds == bound == alone[meshes.index(best.mesh)] == least


def test_the_first_of_equal_axes_is_on_data():
    def train(params, x):
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(mlp)(params, x))

    def mlp(params, x):
        return jnp.sum(jax.nn.relu(x @ params["up"]) @ params["down"])

    tree = {"up": jax.ShapeDtypeStruct((512, 2048), "float32"),
            "down": jax.ShapeDtypeStruct((2048, 512), "float32")}  # fmt: skip
    # The batch has one factor of 2.
    step = sr.trace(train, tree, jax.ShapeDtypeStruct((2 * (2**17 - 1), 512), "float32"))
    search, _ = best_of([Search(Space(step, machine_on({"fsdp": 2, "tp": 2}), ROOM))])
    (batch,) = [name for name in search.space.values if step._roles.of.get(name) == "batch"]
    assert search.assignment[batch] == ("fsdp",)


def gated(params, tokens):
    """The loss of layers whose state is a scan over the sequence."""

    def layer(x, w):
        kept = jax.nn.sigmoid(x @ w["kept"])
        pair = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        _, state = jax.lax.associative_scan(pair, (kept, (1 - kept) * (x @ w["in"])), axis=1)
        return x + (state * jax.nn.silu(x @ w["gate"])) @ w["out"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][tokens], params["layers"])
    return jnp.mean(jax.nn.logsumexp(x @ params["head"], -1))


def gated_step(width=256, hidden=1024):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "bfloat16")  # noqa: E731
    layers = {name: shape(4, width, hidden) for name in ("kept", "in", "gate")}
    tree = {
        "embed": shape(4096, width), "head": shape(width, 4096),
        "layers": layers | {"out": shape(4, hidden, width)},
    }  # fmt: skip
    update = lambda p, t: jax.tree.map(lambda a, g: a - g, p, jax.grad(gated)(p, t))  # noqa: E731
    return sr.trace(jax.jit(update), tree, jax.ShapeDtypeStruct((64, 256), "int32"))


@needs_solver
def test_no_gap_is_left_of_a_state_space_model():
    solution = sr.solve(gated_step(), {"fsdp": 4, "tp": 4}, hardware="v5e")
    assert solution.gap == 0
    assert "none takes less" in solution.summary


def test_without_the_solver_the_gap_is_printed_with_what_closes_it(monkeypatch):
    for module in ("search", "solution"):
        monkeypatch.setattr(f"shardrules._program.solve.{module}.has_solver", lambda: False)
    solution = sr.solve(gated_step(), {"fsdp": 4, "tp": 4}, hardware="v5e")
    assert solution.gap > 0
    assert f"at most {solution.gap:.1%} from the best" in solution.summary
    assert solution.summary.endswith("pip install ortools, which proves more")
