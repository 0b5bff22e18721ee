"""Constraints of a solution: where they are, that values stay, and what XLA makes of them."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.constraints import activations, constrained_step, seams
from shardrules._program.solve.space import STORED, Space
from shardrules._program.solve.spread import Spread
from tests.support.compiled import array, constrained, devices

LAYERS, ROWS, WIDTH, HIDDEN, WORDS = 2, 8, 16, 32, 64
AXES = ("fsdp", "tp")


@jax.custom_vjp
def square(x):
    return x * x


square.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))


def layer(x, w):
    x = x + square(jax.nn.relu(x @ w["up"])) @ w["down"]
    return jax.lax.cond(x[0, 0] > 0, lambda x: x @ w["up"] @ w["down"], lambda x: x, x), None


def loss(params, rows):
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["embed"][rows], params["layers"])
    return (x @ params["head"]).sum()


def train(params, rows):
    value, grads = jax.value_and_grad(loss)(params, rows)
    turn = lambda carry: (carry[0] + 1, carry[1] @ params["turn"])  # noqa: E731
    _, turned = jax.lax.while_loop(lambda carry: carry[0] < 2 + 0 * rows[0], turn, (0, params["embed"][rows]))
    return jax.tree.map(lambda p, g: p - g, params, grads), (value, turned)


def shapes(tree):
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), tree, is_leaf=is_shape)


TREE = shapes({
    "embed": (WORDS, WIDTH), "turn": (WIDTH, WIDTH), "head": (WIDTH, WORDS),
    "layers": {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)},
})  # fmt: skip
RULES = [("embed", ("tp", "fsdp")), ("head|turn", ("fsdp", "tp")),
         ("up", (None, "fsdp", "tp")), ("down", (None, "tp", "fsdp"))]  # fmt: skip


def mesh_of(fsdp=4, tp=2):
    return devices(fsdp=fsdp, tp=tp)


def traced(mesh, function=train):
    rows = array(mesh, (ROWS,), "fsdp", dtype="int32")
    return sr.trace(jax.jit(function, donate_argnums=0), sr.plan(TREE, RULES, mesh), rows)


def layout(step):
    """Rows by fsdp, hidden units by tp, where they divide; as a solution has it for all arrays."""
    space = Space(step, step.mesh.shape)
    spread = Spread(space, space.of_program()).of_step()
    cuts = {n: spread.cuts(n) for n in range(len(step._equations.values))}
    for number, value in enumerate(step._equations.values):
        if value.shape[:1] == (ROWS,):
            cuts[number] = (("fsdp",), *[("tp",) if size == HIDDEN else () for size in value.shape[1:]])
    return SimpleNamespace(cuts=cuts.__getitem__, reads={}, sums=set())


def values(mesh):
    """Small whole numbers, of which sums are the same in whatever order they are added."""
    keys = iter(jax.random.split(jax.random.key(3), 9))
    params = jax.tree.map(lambda s: jax.random.randint(next(keys), s.shape, -1, 2).astype("float32"), TREE)
    params = jax.tree.map(jax.device_put, params, sr.plan(params, RULES, mesh).shardings())
    return params, jax.device_put(jax.numpy.arange(ROWS) * 5, NamedSharding(mesh, P("fsdp")))


@pytest.mark.parametrize("mesh", [(1, 1), (4, 2)])
def test_values_are_those_of_the_step(mesh):
    mesh = mesh_of(*mesh)
    step, (params, rows) = traced(mesh), values(mesh)
    expected = jax.jit(train)(params, rows)
    assert all(np.abs(leaf).max() < 2**24 for leaf in jax.tree.leaves(expected))
    run = constrained_step(step, layout(step), mesh)
    result = run(params, rows)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    with pytest.raises(ValueError, match=r"traced with arrays of .*\(8,\).*given .*\(4,\)"):
        run(values(mesh)[0], rows[:4])


def test_constraints_are_in_loops_branches_rules_of_gradients_and_what_is_recomputed():
    step = traced(mesh_of())
    spread = layout(step)
    rows = seams(step, spread)
    assert len({len(row.operation.site) for row in rows}) > 2
    args = step.plan.abstract(), jax.ShapeDtypeStruct((ROWS,), "int32")
    text = str(constrained_step(step, spread, mesh_of()).trace(*args).jaxpr)
    assert text.count("sharding_constraint[") >= len(rows) > 8
    source = __file__.rpartition("/")[2]
    assert all(row.line.rpartition("/")[2].startswith(source) for row in activations(step, spread))


def test_constraints_of_the_program_are_replaced():
    def forward(params, rows):
        x = params["embed"][rows] @ params["turn"]
        return constrained(mesh_of(), x, None, "tp") * 2

    step, other = traced(mesh_of(), forward), mesh_of(2, 4)
    spread = layout(step)
    params, rows = values(other)
    assert any(row.replaces for row in activations(step, spread))
    result = constrained_step(step, spread, other)(params, rows)
    assert result.sharding.mesh.shape == {"fsdp": 2, "tp": 4}
    np.testing.assert_array_equal(result, forward(jax.device_get(params), jax.device_get(rows)))


def test_shardings_of_the_programs_results_are_replaced():
    mesh = devices(fsdp=8)
    cut = NamedSharding(mesh, P("fsdp"))
    double = jax.jit(lambda w: 2 * w, out_shardings=cut)
    step = sr.trace(jax.jit(lambda w: double(w) + 1, out_shardings=cut), shapes((64, 64)), on=mesh)
    whole = SimpleNamespace(cuts=lambda number: ((), ()), reads={}, sums=set())
    run = constrained_step(step, whole, mesh)
    w = np.arange(64.0 * 64, dtype="float32").reshape(64, 64)
    result = run(w)
    assert result.sharding.spec == P()
    np.testing.assert_array_equal(result, 2 * w + 1)
    compiled = run.lower(jax.device_put(w, NamedSharding(mesh, P()))).compile()
    assert not sr.inspect(compiled, (None,)).collectives


def test_an_explicit_mesh_is_refused():
    types, step = jax.sharding.AxisType, traced(mesh_of())
    with pytest.raises(ValueError, match="mesh: fsdp are Explicit"):
        constrained_step(step, layout(step), Mesh(mesh_of().devices, AXES, axis_types=(types.Explicit, types.Auto)))


@pytest.mark.parametrize("is_constrained", [True, False])
def test_an_operation_reads_as_was_priced(is_constrained):
    """Rows by both axes, hidden units by one: else XLA gathers hidden units, not weights."""
    mesh = mesh_of()
    x = array(mesh, (16, 32, 64), AXES)

    def loss(w, x):
        hidden = jax.nn.silu(x @ w["gate"]) * (x @ w["up"])
        return jax.numpy.mean(jax.numpy.square(x + hidden @ w["down"]))

    tree = shapes({"gate": (64, 256), "up": (64, 256), "down": (256, 64)})
    plan = sr.plan(tree, [("down", ("tp", "fsdp")), (".*", ("fsdp", "tp"))], mesh)
    step = sr.trace(jax.jit(jax.grad(loss)), plan, x)
    axes = {"batch": AXES, "hidden": ("tp",)}
    by_class = {name: axes.get(role, ()) for name, role in step._roles.of.items()}
    spread = Spread(Space(step, mesh.shape), by_class | {STORED: ("fsdp",)}).of_step()
    most = max(sent.payload for sent in spread.sent if sent.kind == "all-gather")
    read = [row for row in activations(step, spread) if row.is_read]
    assert {row.shape for row in read} == {(16, 32, 64), (64, 256), (256, 64)}
    assert "into dot_general" in str(read[0])
    if not is_constrained:
        spread.reads.clear()
    proof = sr.prove(constrained_step(step, spread, mesh), plan, x)
    gathered = [sent.payload for sent in proof.collectives if sent.kind == "all-gather"]
    assert (max(gathered) <= most) == is_constrained
