"""The search by CP-SAT against all assignments, and where OR-tools is missing."""

from __future__ import annotations

import random
from math import prod

import jax
import jax.numpy as jnp
import pytest

import shardrules as sr
from shardrules._program.solve import search
from shardrules._program.solve.search import Tables, has_solver
from shardrules._program.solve.terms import Resident, Terms
from tests.program.solve.test_optimum import ROOM, assignments, price, space_of

needs_solver = pytest.mark.skipif(not has_solver(), reason="OR-tools is not installed")


def is_optimum(seed):
    """Whether tables alone lead from a bad assignment to the best; None if there are too many."""
    rng = random.Random(seed)
    space = space_of(seed)
    if prod(map(len, space.values.values())) > 128:
        return None
    resident = Resident(space)
    costs = [(price(space, a), resident.least(a), a) for a in assignments(space)]
    peaks = sorted(memory for _, memory, _ in costs)
    space.hbm = rng.choice((ROOM, rng.choice(peaks), peaks[len(peaks) // 2]))
    fitting = [(seconds, a) for seconds, memory, a in costs if memory <= space.hbm]
    seconds, worst = max(fitting, key=lambda row: row[0])
    found = Tables(Terms(space), resident, space.values, seconds).search(worst)
    least = pytest.approx(min(t for t, _ in fitting), rel=1e-7, abs=1e-11)
    return price(space, found.assignment) == least == found.bound


@needs_solver
def test_tables_lead_to_the_best_of_all():
    verdicts = [is_optimum(seed) for seed in range(60)]
    assert [seed for seed, verdict in enumerate(verdicts) if verdict is False] == []
    assert verdicts.count(True) >= 15


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


def test_without_the_solver_the_gap_is_printed_with_what_closes_it(monkeypatch):
    monkeypatch.setattr(search, "has_solver", lambda: False)
    monkeypatch.setattr("shardrules._program.solve.solution.has_solver", lambda: False)
    solution = sr.solve(gated_step(), {"fsdp": 4, "tp": 4}, hardware="v5e", time_limit=0)
    assert solution.gap > 0
    assert f"at most {solution.gap:.1%} from the best" in solution.summary
    assert solution.summary.endswith("pip install ortools, which proves more")
