"""Constraints of a solution: where they are, that values stay, and what XLA makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.constraints import activations, constrained_step, seams
from shardrules._program.solve.layout import STORED, StepArrays
from shardrules._program.solve.space import Space
from shardrules._program.solve.spread import Machine, Spread

LAYERS, ROWS, WIDTH, HIDDEN, WORDS = 2, 8, 16, 32, 64


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def layer(x, w):
    def passed(x):
        return x @ w["up"] @ w["down"]

    x = x + square(jax.nn.relu(x @ w["up"])) @ w["down"]
    return jax.lax.cond(x[0, 0] > 0, passed, lambda x: x, x), None


def loss(params, rows):
    x = params["embed"][rows]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return (x @ params["head"]).sum()


def train(params, rows):
    value, grads = jax.value_and_grad(loss)(params, rows)
    _, turned = jax.lax.while_loop(
        lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, carry[1] @ params["turn"]), (0, params["embed"][rows])
    )
    return jax.tree.map(lambda p, g: p - g, params, grads), (value, turned)


SHAPES = {
    "embed": (WORDS, WIDTH),
    "turn": (WIDTH, WIDTH),
    "head": (WIDTH, WORDS),
    "layers": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
}
RULES = [("embed", ("tp", "fsdp")), ("head|turn", ("fsdp", "tp")),
         ("up", (None, "fsdp", "tp")), ("down", (None, "tp", "fsdp"))]  # fmt: skip


def mesh_of(fsdp, tp):
    return Mesh(np.array(jax.devices()[: fsdp * tp]).reshape(fsdp, tp), ("fsdp", "tp"))


def shapes(tree):
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), tree, is_leaf=is_shape)


def traced(mesh, function=train):
    plan = sr.plan(shapes(SHAPES), RULES, mesh)
    rows = jax.ShapeDtypeStruct((ROWS,), "int32", sharding=NamedSharding(mesh, P("fsdp")))
    return sr.trace(jax.jit(function, donate_argnums=0), plan, rows)


def layout(step):
    """Rows by fsdp, hidden units by tp, where they divide; as a solution has it for all arrays."""
    space = Space(step, Machine(sr.Hardware.named("v5p"), dict(step.mesh.shape)), 10**12)
    spread = space.spread(space.traced())
    cuts = {n: spread.cuts(n) for n in range(len(step._equations.values))}
    for number, value in enumerate(step._equations.values):
        if value.shape[:1] == (ROWS,):
            tail = [("tp",) if size == HIDDEN else () for size in value.shape[1:]]
            cuts[number] = (("fsdp",), *tail)
    return SimpleNamespace(cuts=cuts.__getitem__, reads={}, sums=set())


def shaped(step):
    return step.plan.abstract(), jax.ShapeDtypeStruct((ROWS,), "int32")


def values(mesh, most):
    keys = iter(jax.random.split(jax.random.key(3), 9))
    params = jax.tree.map(
        lambda s: jax.random.randint(next(keys), s.shape, -most, most + 1).astype("float32"), shapes(SHAPES)
    )
    params = jax.tree.map(jax.device_put, params, sr.plan(params, RULES, mesh).shardings())
    return params, jax.device_put(jax.numpy.arange(ROWS) * 5, NamedSharding(mesh, P("fsdp")))


@pytest.mark.parametrize(("fsdp", "tp"), [(1, 1), (4, 2)])
def test_values_are_those_of_the_step(fsdp, tp):
    """Whole numbers, of which sums are the same in whatever order they are added."""
    mesh = mesh_of(fsdp, tp)
    step = traced(mesh)
    params, rows = values(mesh, 1)
    expected = jax.jit(train)(params, rows)
    assert all(np.abs(leaf).max() < 2**24 for leaf in jax.tree.leaves(expected))
    result = constrained_step(step, layout(step), mesh)(params, rows)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for mine, theirs in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_constraints_are_in_loops_branches_rules_of_gradients_and_what_is_recomputed():
    mesh = mesh_of(4, 2)
    step = traced(mesh)
    spread = layout(step)
    rows = seams(step, spread)
    depths = {len(row.operation.site) for row in rows}
    assert len(depths) > 2
    text = str(constrained_step(step, spread, mesh).trace(*shaped(step)).jaxpr)
    assert text.count("sharding_constraint[") >= len(rows) > 8
    lines = {row.line.rpartition("/")[2] for row in activations(step, spread)}
    source = __file__.rpartition("/")[2]
    assert all(line.startswith(source) for line in lines)


def test_constraints_of_the_program_are_replaced():
    mesh = mesh_of(4, 2)

    def forward(params, rows):
        x = params["embed"][rows] @ params["turn"]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, "tp"))) * 2

    step = traced(mesh, forward)
    spread = layout(step)
    other = mesh_of(2, 4)
    params, rows = values(other, 1)
    assert any(row.replaces for row in activations(step, spread))
    result = constrained_step(step, spread, other)(params, rows)
    assert result.sharding.mesh.shape == {"fsdp": 2, "tp": 4}
    np.testing.assert_array_equal(result, forward(jax.device_get(params), jax.device_get(rows)))


def test_shardings_of_the_programs_results_are_replaced():
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    held = NamedSharding(mesh, P("fsdp"))
    double = jax.jit(lambda w: 2 * w, out_shardings=held)
    step = sr.trace(jax.jit(lambda w: double(w) + 1, out_shardings=held), shapes((64, 64)), on=mesh)
    solution = sr.solve(step, {"fsdp": 8}, hardware="v5p", keep=[""])
    w = np.arange(64.0 * 64, dtype="float32").reshape(64, 64)
    with solution.constraints(mesh) as constrained:
        result = constrained(w)
        compiled = constrained.lower(jax.device_put(w, NamedSharding(mesh, P()))).compile()
    assert result.sharding.spec == P()
    np.testing.assert_array_equal(result, 2 * w + 1)
    assert not sr.inspect(compiled, (None,)).collectives


def test_other_arguments_are_refused():
    mesh = mesh_of(4, 2)
    step = traced(mesh)
    run = constrained_step(step, layout(step), mesh)
    params, rows = values(mesh, 1)
    with pytest.raises(ValueError, match=r"traced with arrays of .*\(8,\).*given .*\(4,\)"):
        run(params, rows[:4])


def test_an_explicit_mesh_is_refused():
    types = jax.sharding.AxisType
    devices = np.array(jax.devices()).reshape(4, 2)
    explicit = Mesh(devices, ("fsdp", "tp"), axis_types=(types.Explicit, types.Auto))
    step = traced(mesh_of(4, 2))
    with pytest.raises(ValueError, match="mesh: fsdp are Explicit"):
        constrained_step(step, layout(step), explicit)


@pytest.mark.parametrize("is_constrained", [True, False])
def test_an_operation_reads_as_was_priced(is_constrained):
    """Rows by both axes, hidden units by one: else XLA gathers hidden units, not weights."""
    mesh = mesh_of(4, 2)
    sizes = {"gate": (64, 256), "up": (64, 256), "down": (256, 64)}
    x = jax.ShapeDtypeStruct((16, 32, 64), "float32", sharding=NamedSharding(mesh, P(mesh.axis_names)))

    def loss(w, x):
        hidden = jax.nn.silu(x @ w["gate"]) * (x @ w["up"])
        return jax.numpy.mean(jax.numpy.square(x + hidden @ w["down"]))

    plan = sr.plan(shapes(sizes), [("down", ("tp", "fsdp")), (".*", ("fsdp", "tp"))], mesh)
    step = sr.trace(jax.jit(jax.grad(loss)), plan, x)
    axes = {"batch": ("fsdp", "tp"), "hidden": ("tp",)}
    by_class = {name: axes.get(role, ()) for name, role in step._roles.of.items()}
    arrays = StepArrays(step._equations, step._roles, dict(mesh.shape))
    spread = Spread(arrays, by_class | {STORED: ("fsdp",)}).of_step()
    most = max(sent.payload for sent in spread.sent if sent.kind == "all-gather")
    read = [row for row in activations(step, spread) if row.is_read]
    assert {row.shape for row in read} == {(16, 32, 64), (64, 256), (256, 64)}
    assert "into dot_general" in str(read[0])
    if not is_constrained:
        spread.reads.clear()
    run = constrained_step(step, spread, mesh)
    proof = sr.prove(run, plan, x)
    gathered = [sent.payload for sent in proof.collectives if sent.kind == "all-gather"]
    assert (max(gathered) <= most) == is_constrained
