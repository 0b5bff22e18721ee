"""`solve`: the space of choices, the optimum in it, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def mlp(params, x):
    return jnp.sum(jax.nn.relu(x @ params["up"]) @ params["down"])


def train(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(mlp)(params, x))


TREE = {"up": shape(512, 2048), "down": shape(2048, 512)}


def traced(rows=4096):
    plan = sr.plan(TREE, [(".*", ())], {"fsdp": 4, "tp": 2})
    return sr.trace(train, plan, shape(rows, 512))


def axes_of(solution, role):
    return [choice.axes for choice in solution.choices if choice.role == role]


def test_many_rows_are_cut_by_all_axes():
    solution = sr.solve(traced(2**20), {"fsdp": 4, "tp": 2}, hardware="v5p")
    assert axes_of(solution, "batch") == [("fsdp", "tp")]
    assert solution.specs["inputs/1"] == P(("fsdp", "tp"))


def test_few_rows_leave_the_weights_where_they_are():
    solution = sr.solve(traced(8), {"fsdp": 4, "tp": 2}, hardware="v5p")
    up, down = (solution.plan.kind(name).spec for name in ("up", "down"))
    assert (up, down) == (P(None, ("fsdp", "tp")), P(("fsdp", "tp"), None))


def test_what_is_kept_and_forbidden_is():
    step = traced(2**20)
    solution = sr.solve(
        step,
        {"fsdp": 4, "tp": 2},
        hardware="v5p",
        keep=[("inputs/0/up", P("tp"))],
        forbid=[("batch", "fsdp")],
    )
    assert solution.specs["inputs/0/up"] == P("tp")
    assert axes_of(solution, "batch") == [("tp",)]


def test_bad_arguments_are_told():
    step = traced()
    with pytest.raises(TypeError, match="hardware: give the devices"):
        sr.solve(step, {"fsdp": 4})
    with pytest.raises(ValueError, match="keep: 'nowhere' is in no path"):
        sr.solve(step, {"fsdp": 4}, hardware="v5p", keep=["nowhere"])
    with pytest.raises(ValueError, match="forbid: an axis"):
        sr.solve(step, {"fsdp": 4}, hardware="v5p", forbid=[("batch", "tp")])
    with pytest.raises(TypeError, match="step is 3"):
        sr.solve(3, {"fsdp": 4}, hardware="v5p")
