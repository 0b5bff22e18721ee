"""`solve`: the space of choices, the optimum in it, and what is refused."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.program.solve.test_outcome import TREE, shape, train


def traced(rows=4096):
    plan = sr.plan(TREE, [(".*", ())], {"fsdp": 4, "tp": 2})
    return sr.trace(train, plan, shape(rows, 512))


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ((), "parameters are stored as they are used"),
        (("fsdp", "tp"), "parameters are stored over fsdp,tp and gathered where used"),
    ],
)
def test_a_solution_says_how_parameters_are_stored(stored, text):
    assert str(sr.types.ClassChoice("stored", 0, (), stored, "")) == text


def test_few_rows_leave_the_weights_where_they_are():
    solution = sr.solve(traced(8), {"fsdp": 4, "tp": 2}, hardware="v5p")
    up, down = (solution.plan.kind(name).spec for name in ("up", "down"))
    assert (up, down) == (P(None, ("fsdp", "tp")), P(("fsdp", "tp"), None))


def layers(params, x):
    body = lambda x, w: (x + jnp.tanh(x @ w["a"]) @ w["b"], None)  # noqa: E731
    return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)


def train_layers(params, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(layers)(params, x))


STACKS = {"a": shape(4, 512, 2048), "b": shape(4, 2048, 512)}


def test_what_is_kept_is_so_in_loops_gradients_and_results():
    plan = sr.plan(STACKS, [("a", (None, "tp")), ("b", (None, None, "tp"))], {"fsdp": 4, "tp": 2})
    step = sr.trace(train_layers, plan, shape(2**16, 512))
    solution = sr.solve(step, {"fsdp": 4, "tp": 2}, hardware="v5p", keep=["inputs/0"])
    assert solution.specs["inputs/0/a"] == P(None, "tp")
    assert solution.specs["inputs/0/b"] == P(None, None, "tp")
    gathered = {s.axes for s in solution._spread.sent if s.kind == "all-gather" and s.trips == 4}
    assert gathered == {("tp",)}
    assert [sent for sent in solution._spread.sent if sent.trips == 1] == []


def test_what_does_not_fit_says_by_how_much():
    step = sr.trace(train_layers, STACKS, shape(2**16, 512))
    with pytest.raises(ValueError, match="nothing fits") as error:
        sr.solve(step, {"fsdp": 4}, hardware="v5p", hbm=10**8)
    assert re.search(
        r"needs .* on each device of fsdp=4, .* more than the 100 MB", str(error.value)
    )
    with pytest.raises(ValueError, match="nothing fits of what was tried"):
        sr.solve(step, {"fsdp": 4}, hardware="v5p", hbm=10**8, time_limit=0)


def test_a_time_limit_gives_the_best_so_far_with_its_gap():
    step = traced(64)
    whole = sr.solve(step, {"fsdp": 4, "tp": 2}, hardware="v5p")
    assert (whole.gap, whole.bound) == (0, whole.seconds)
    ended = sr.solve(step, {"fsdp": 4, "tp": 2}, hardware="v5p", time_limit=0)
    assert 0 < ended.bound <= whole.seconds <= ended.seconds
    assert ended.gap == pytest.approx(1 - ended.bound / ended.seconds)
    assert ended.gap > 0


def test_an_interrupt_gives_the_best_so_far(monkeypatch):
    def interrupt(self, most):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardrules._program.solve.search.Search.prove", interrupt)
    solution = sr.solve(traced(64), {"fsdp": 4, "tp": 2}, hardware="v5p")
    assert solution.gap > 0


def test_what_is_not_modelled_is_whole_and_named():
    def call(params, x):
        y = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return y @ params["up"]

    solution = sr.solve(sr.trace(call, TREE, shape(2**16, 512)), {"fsdp": 4}, hardware="v5p")
    assert solution.step.unmodelled == ("pure_callback (1 times)",)
    whole = solution._spread.arrays.local
    assert whole
    assert all(not any(solution._spread.target(n)) for n in whole)


def test_a_step_without_products_and_a_mesh_of_one_device_have_solutions():
    tree = {"w": shape(8, 8)}
    added = sr.trace(lambda params, x: params["w"] + x, tree, shape(8, 8))
    assert sr.solve(added, {"fsdp": 2}, hardware="v5p").seconds == 0
    alone = sr.solve(traced(), {"fsdp": 1}, hardware="v5p")
    assert (alone.gap, alone.candidates[0].predicted.sent) == (0, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hardware": None}, "hardware: give the devices"),
        ({"keep": ["nowhere"]}, "keep: 'nowhere' is in no path"),
        ({"keep": "up"}, "keep is 'up' (a str); it must be a sequence"),
        ({"keep": [("up", P())]}, "keep[0] is ('up', "),
        ({"keep": ["("]}, "is no pattern"),
        ({"time_limit": "long"}, "time_limit"),
        ({"time_limit": float("nan")}, "time_limit"),
        ({"hbm": 0.5}, "hbm is 0.5 (a float); it must be a number of bytes"),
        ({"hbm": 0}, "hbm is 0"),
        ({"hbm": float("inf")}, "hbm is inf"),
        ({"on": None}, "the step was traced without a mesh"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    step = sr.trace(train, TREE, shape(8, 512))
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        sr.solve(step, **{"on": {"fsdp": 4}, "hardware": "v5p", **options})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"fsdp": 3}, "keep: inputs/1: dim 0 of size 8 is not divisible by fsdp=3"),
        ({"tp": 4}, "keep: inputs/1: the mesh has no axis 'fsdp'"),
    ],
)
def test_what_is_kept_must_be_possible_on_the_mesh(sizes, message):
    cut = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("fsdp",)), P("fsdp"))
    step = sr.trace(train, TREE, jax.ShapeDtypeStruct((8, 512), "float32", sharding=cut))
    with pytest.raises(ValueError, match=message):
        sr.solve(step, sizes, hardware="v5p", keep=["inputs/1"])


def test_a_step_without_arrays_is_refused():
    with pytest.raises(ValueError, match="traced without arrays among its arguments"):
        sr.solve(sr.trace(lambda: 1.0), {"fsdp": 4}, hardware="v5p")


def test_what_only_code_by_device_makes_and_reads_is_not_chosen():
    """Such as what its forward pass saves for its backward pass, and constants in it."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))

    def local(w, x):
        return jnp.sin(jnp.sin(x @ w) @ w.T)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("fsdp")), out_specs=P("fsdp"))
    step = sr.trace(jax.grad(lambda w, x: jnp.sum(mapped(w, x))), shape(64, 128), shape(4096, 64))
    made = next(op for op, _ in step._equations.everything() if op.name == "shard_map").outputs
    solution = sr.solve(step, {"fsdp": 8}, hardware="v5p")
    assert len(made) > 2
    assert all(solution._spread.target(number)[0] == ("fsdp",) for number in made)
    assert [row.size for row in solution.choices[1:]] == [4096, 64, 128]


def of_layers(layers, width, hidden, experts):
    """Trace the training of layers of attention and an MLP, or of experts that are weighed."""
    tree = {"up": shape(layers, width, hidden), "down": shape(layers, hidden, width)}
    if experts:
        tree = {name: shape(layers, experts, *leaf.shape[1:]) for name, leaf in tree.items()}
        tree["router"] = shape(layers, width, experts)
    else:
        tree |= {name: shape(layers, width, width) for name in "qkvo"}

    def mixed(x, w):
        rows, length, _ = x.shape
        q, k, v = ((x @ w[name]).reshape(rows, length, -1, 128) for name in "qkv")
        chances = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k))
        x = x + jnp.einsum("bhts,bshd->bthd", chances, v).reshape(x.shape) @ w["o"]
        return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

    def routed(x, w):
        shares = jax.nn.softmax(x @ w["router"])
        inner = jax.nn.relu(jnp.einsum("btd,edf->btef", x, w["up"])) * shares[..., None]
        return x + jnp.einsum("btef,efd->btd", inner, w["down"]), None

    def loss(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(routed if experts else mixed), x, params)
        return jnp.mean(jnp.square(x))

    def update(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    mesh = {"fsdp": 8, "tp": 2}
    x = shape(16, 64, width) if experts else shape(64, 1024, width)
    return sr.trace(update, sr.plan(tree, [(".*", ())], mesh), x), mesh


@pytest.mark.slow
@pytest.mark.parametrize(("experts", "hbm"), [(0, 9 * 10**8), (8, 10**10)])
def test_a_slightly_larger_model_gets_the_same_rules(experts, hbm):
    texts, sizes = [], []
    for layers, width, hidden in ((4, 1024, 4096), (5, 1280, 5120)):
        step, mesh = of_layers(layers, width, hidden, experts)
        solution = sr.solve(step, mesh, hardware="v5p", hbm=hbm)
        texts.append(str(solution.rules))
        sizes.append(solution.plan.total_bytes)
        assert solution.gap == 0
    assert texts[0] == texts[1]
    assert "'fsdp', 'tp'" in texts[0]
    assert sizes[0] < sizes[1]
