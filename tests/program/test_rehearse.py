"""Rehearsals: steps that are the same whole and sharded, and faults that change the answer."""

import enum
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.command_line import invoke
from tests.support.compiled import array
from tests.support.process_worker import enable_x64
from tests.support.slow import some

SIZES = {"fsdp": 4, "tp": 2}
S = jax.ShapeDtypeStruct


def norm_of(tree: Any) -> Any:
    return jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)))


def trained(mesh: Any, optimizer: Any = None, compute: str = "float32") -> Any:
    """An MLP behind a table, its optimizer's state, tokens, and a key for dropout."""
    shapes = {"table": (32, 16), "up": (16, 64), "down": (64, 16)}
    rules = [("table", P("tp", "fsdp")), ("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))]
    plan = sr.plan({name: S(shape, "float32") for name, shape in shapes.items()}, rules, mesh)
    optimizer = optimizer or optax.adamw(1e-3)
    state = plan.for_optimizer(jax.eval_shape(optimizer.init, plan.abstract()))

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        params = jax.tree.map(lambda p: p.astype(compute), params)
        x = params["table"][tokens]
        hidden = jax.nn.silu(x @ params["up"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
        logits = (x + hidden @ params["down"]) @ params["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype("float32"), tokens[:, 1:]).mean()

    def step(params: Any, state: Any, tokens: Any, key: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens, key)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    key = array(mesh, (), dtype=jax.random.key(0).dtype)
    tokens = array(mesh, (8, 16), "fsdp", dtype="int32")
    return jax.jit(step, donate_argnums=(0, 1)), (plan, state, tokens, key)


def routed(mesh: Any) -> Any:
    """Experts that are chosen by the best two of a router."""
    shapes = {"router": (16, 8), "experts": (8, 16, 16)}
    tree = {name: S(shape, "float32") for name, shape in shapes.items()}
    plan = sr.plan(tree, [("router", P()), ("experts", P("tp", None, "fsdp"))], mesh)

    def step(params: Any, x: Any) -> Any:
        weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        parts = jnp.einsum("nd,edf->nef", x, params["experts"])
        routing = jax.nn.one_hot(chosen, 8) * weights[..., None]
        return jnp.einsum("nke,nef->nf", routing, parts), chosen

    return jax.jit(step), (plan, array(mesh, (32, 16), "fsdp"))


def modules(mesh: Any) -> Any:
    """A module of nnx that the step changes in place."""
    nnx = pytest.importorskip("flax.nnx")
    if not hasattr(nnx, "graphlib"):
        pytest.skip("compiled functions of this flax cannot be read")
    shapes = nnx.eval_shape(lambda: nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    rules = sr.Rules([("kernel", P("fsdp", "tp")), (".*", P())], sr.dialects.NNX)

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(lambda model: ((model(x) - x) ** 2).mean())(model)
        state = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients))
        return value

    return step, (sr.plan(shapes, rules, mesh), array(mesh, (8, 16), "fsdp"))


@jax.custom_vjp
def entered(x: Any) -> Any:
    """What goes into products that are cut by tp: its gradient is the sum of their parts."""
    return x


entered.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, "tp"),))


@jax.custom_vjp
def left(y: Any) -> Any:
    """The sum of such products, whose gradient is the same for all parts."""
    return lax.psum(y, "tp")


left.defvjp(lambda y: (lax.psum(y, "tp"), None), lambda _, gradient: (gradient,))


def by_hand(mesh: Any, fault: str = "") -> Any:
    """Data and tensor parallel training, written for each device; with one of `FAULTS`."""
    specs = {"up": P(None, "tp"), "down": P("tp", None), "scale": P()}
    shapes = {"up": (16, 32), "down": (32, 16), "scale": (16,)}
    tree = {name: S(shape, "float32") for name, shape in shapes.items()}
    plan = sr.plan(tree, list(specs.items()), mesh)

    def loss(params: Any, x: Any, key: Any) -> Any:
        mean = x.mean(0) if fault == "a norm of its own rows" else lax.pmean(x.mean(0), "fsdp")
        x = (x - mean) * params["scale"]
        before = (lambda x: x) if fault == "a gradient in parts" else entered
        behind = (lambda y: y) if fault == "a product in parts" else left
        y = behind(jax.nn.gelu(before(x) @ params["up"]) @ params["down"])
        if fault == "a key that is not folded":
            y += jax.random.normal(key, y.shape)
        square = ((y - x) ** 2).mean()
        return square / lax.psum(1, "fsdp") if fault == "a loss that is divided twice" else square

    def update(params: Any, x: Any, key: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, key)
        if fault == "clipped before the mean":
            norm = norm_of(gradients)
            gradients = jax.tree.map(lambda g: g / norm, gradients)
        axes = {"no mean": (), "a mean over another axis": "tp"}.get(fault, "fsdp")
        gradients = lax.pmean(gradients, axes) if axes else gradients
        if fault == "a sum for a mean":
            gradients = lax.psum(gradients, "fsdp")
        if fault == "one is summed twice":
            gradients["up"] = lax.psum(gradients["up"], "fsdp")
        if fault == "clipped by a norm of its own part":
            norm = norm_of(gradients)
            gradients = jax.tree.map(lambda g: g / norm, gradients)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return params, value if fault == "a loss of its own" else lax.pmean(value, "fsdp")

    def step(params: Any, x: Any, key: Any) -> Any:
        in_specs, out_specs = (specs, P("fsdp"), P()), (specs, P())
        mapped = jax.shard_map(update, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(params, x, key)

    key = array(mesh, (), dtype=jax.random.key(0).dtype)
    return jax.jit(step), (plan, array(mesh, (32, 16), "fsdp"), key)


FAULTS = {
    # fault: whether copies differ, too
    "no mean": True,
    "a loss of its own": True,
    "a mean over another axis": True,
    "clipped by a norm of its own part": True,
    "a product in parts": True,
    "a sum for a mean": False,
    "one is summed twice": False,
    "a norm of its own rows": False,
    "a gradient in parts": True,
    "a loss that is divided twice": False,
    "clipped before the mean": True,
    "a key that is not folded": False,
}
SAME = {
    "adamw": trained,
    "bfloat16": partial(trained, compute="bfloat16"),
    "adafactor": partial(trained, optimizer=optax.adafactor(1e-3)),
    "lion": partial(trained, optimizer=optax.lion(1e-3)),
    "clipped": partial(trained, optimizer=optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))),
    "experts": routed,
    "nnx": modules,
    "by hand": by_hand,
}


@pytest.mark.parametrize("name", some(SAME, every=3))
def test_a_step_that_is_the_same(name):
    rehearsal = sr.rehearse(SAME[name], SIZES)
    assert not rehearsal.at_least("warning"), rehearsal


@pytest.mark.parametrize("fault", some(FAULTS, every=3))
def test_a_fault_that_changes_the_answer(fault):
    findings = sr.rehearse(partial(by_hand, fault=fault), SIZES)
    kinds = {finding.kind for finding in findings if finding.level == "error"}
    assert "unequal" in kinds
    assert ("differs" in kinds) == FAULTS[fault]


def scaled(mesh: Any, call: Any, shape: tuple[int, ...] = (8, 8), dtype: str = "float32") -> Any:
    """A step that calls a function of the rows that a device has."""
    x = array(mesh, shape, "fsdp", dtype=dtype)
    specs = {"in_specs": P("fsdp"), "out_specs": P("fsdp"), "check_vma": False}
    return jax.jit(jax.shard_map(call, mesh=mesh, **specs)), (x,)


def of_arrays(mesh: Any, call: Any, *arrays: tuple[Any, ...]) -> Any:
    """A step of arrays, each of a shape, a dtype, and its axes."""
    return jax.jit(call), tuple(array(mesh, shape, *axes, dtype=dtype) for shape, dtype, *axes in arrays)


def summed_late(mesh: Any) -> Any:
    """Sums behind what is not linear; of positive values alone they are the same."""
    specs = (P("fsdp", "tp"), P("tp"))
    layer = jax.shard_map(
        lambda x, w: lax.psum(jax.nn.relu(x @ w), "tp"), mesh=mesh, in_specs=specs, out_specs=P("fsdp")
    )
    return of_arrays(mesh, layer, ((8, 64), "float32", "fsdp", "tp"), ((64, 64), "float32", "tp"))


def clipped(mesh: Any) -> Any:
    """Gradients that are clipped by a local norm: those of values whose sums cancel are too small for that."""

    def updated(w: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: (jax.nn.relu(x @ w) ** 2).sum() / x.size)(w)
        grads = lax.pmean(grads, "fsdp")
        return w - 0.1 * grads * jnp.minimum(1, 0.02 / jnp.linalg.norm(grads))

    specs = (P(None, "tp"), P("fsdp"))
    step = jax.shard_map(updated, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return of_arrays(mesh, step, ((64, 64), "float32", None, "tp"), ((64, 64), "float32", "fsdp"))


def without_its_first_row(x: Any) -> Any:
    """A mean of rows without the first, of which a device has none."""
    return x[1:].sum(0, keepdims=True) / (len(x) - 1) + 0 * x


def numbered(x: Any) -> Any:
    return x + lax.axis_index("fsdp").astype(x.dtype)


FLOATS = ((8, 8), "float32", "fsdp")
LARGE = partial(scaled, call=lambda x: jnp.where(x > 10, 1 + lax.axis_index("fsdp"), x))
MASKED = partial(scaled, call=lambda x: jnp.where(x > 0.1, x, -jnp.inf))
INFINITE = partial(scaled, call=lambda x: x.at[0, 0].set(jnp.inf))
SLOW = partial(scaled, call=lambda x: x - 1e-3 * x.astype("bfloat16").sum(0).astype("float32"))
ROWS = np.full((8, 8), 11, "float32")
REPORTED = {
    "sums behind what is not linear": (summed_late, {}, "error[unequal]"),
    "sums of positive values": (partial(scaled, call=lambda x: x * jnp.where(x.min() > 0, x.sum(), 1)), {}, "error[unequal]"),
    "a norm of what a device has, that limits what is large": (clipped, {}, "error[unequal]"),
    "roots of variances": (lambda mesh: of_arrays(mesh, lambda a, b: (a + 0, jnp.sqrt(b)), FLOATS, FLOATS), {}, ""),
    "complex": (lambda mesh: of_arrays(mesh, lambda x: (x @ x, x.real), ((8, 8), "complex64", "fsdp", "tp")), {}, ""),
    "complex, other": (partial(scaled, call=numbered, dtype="complex64"), {}, "error[unequal]"),
    "nan": (partial(scaled, call=without_its_first_row, shape=(4, 8)), {}, "error[nan]: outputs[0, 0] is nan sharded, and"),
    "nan of both": (partial(scaled, call=lambda x: x * jnp.nan), {}, "warning[nan]"),
    "infinities of a mask": (MASKED, {}, ""),
    "infinities of each": (INFINITE, {}, "error[unequal]: outputs[2, 0] is inf sharded, and"),
    "choices": (partial(scaled, call=numbered, dtype="int32"), {}, "; 75% of the values differ"),
    "a small change, by coarse floats": (SLOW, {}, " of its change, where rounding"),
    "small values": (LARGE, {}, ""),
    "large values": (LARGE, {"args": (ROWS,)}, "error[unequal]"),
    "as much as is accepted": (LARGE, {"args": (ROWS,), "rtol": 100}, ""),
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", REPORTED)
def test_what_a_rehearsal_says(name):
    step_on, named, expected = REPORTED[name]
    findings = sr.rehearse(step_on, SIZES, **named)
    assert len(findings) == bool(expected)
    assert expected in str(findings)


def of_its_own_rows(mesh: Any) -> Any:
    return scaled(mesh, lambda x: x, shape=(8 * mesh.shape["fsdp"], 8))


def too_large(mesh: Any) -> Any:
    return of_arrays(mesh, lambda x: jnp.broadcast_to(x, (2**32, 2**10)) * 2, ((2**10,), "float32", "fsdp"))


def too_many(mesh: Any, dtype: str = "float32") -> Any:
    return scaled(mesh, lambda x: x, shape=(2**32, 2**10), dtype=dtype)


SAME_ROWS = partial(scaled, call=lambda x: x)
LONG = partial(scaled, call=lambda x: x, shape=(2**21, 2**8))
INTEGERS = partial(scaled, call=numbered, dtype="int32")
REFUSED = {
    "fewer rows": (SAME_ROWS, (ROWS[:4],), r"args has float32\[4, 8\] where the step takes float32\[8, 8\]"),
    "two": (SAME_ROWS, (ROWS, ROWS), "args has 2 arrays, not 1"),
    "none": (SAME_ROWS, (), "args has 0 arrays, not 1"),
    "cut to integers": (INTEGERS, (ROWS + 0.5,), r"args has float32\[8, 8\] where the step takes int32\[8, 8\]"),
    "another step": (of_its_own_rows, None, "whose arguments are others, or .* let it use the mesh"),
    "more results": (lambda mesh: scaled(mesh, lambda x: (x,) * mesh.size), None, "whose results are others"),
    "shapes of results": (partial(scaled, call=lambda x: x @ x.T), None, "whose results are others"),
    "no array": (lambda mesh: (jax.jit(lambda: jnp.ones(4)), ()), None, "the step needs no array on"),
    "too large": (too_large, None, r"it needs \S+ TB, of .* let step_on take its sizes"),
    "an array": (LONG, (np.broadcast_to(np.float32(1), (2**21, 2**8)),), r"args has an array of 2\.15 GB, of at most"),
    "arguments": (too_many, None, r"for its arguments it needs \S+ TB, of .* let step_on take its sizes"),
    "bytes": (partial(too_many, dtype="int8"), None, r"for its arguments it needs \S+ TB, of .* let step_on take"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_rehearsed(name):
    step_on, args, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        sr.rehearse(step_on, SIZES, args=args)


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.7 lowers Explicit axes for devices alone")
def test_types_of_axes():
    def step_on(mesh: Any) -> Any:
        product = partial(jnp.einsum, "ij,jk->ik", out_sharding=P("fsdp", None))
        return of_arrays(mesh, product, *(((8, 8), "float32", axis, None) for axis in SIZES))

    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), tuple(SIZES), axis_types=explicit)
    assert not sr.rehearse(step_on, mesh)


def test_axes_of_an_enum_and_a_number_of_numpy():
    names = enum.StrEnum("names", ["FSDP", "TP"])

    def step_on(mesh: Any) -> Any:
        return of_arrays(mesh, lambda x: x * 2, ((8, 8), "float32", (names.FSDP, names.TP)))

    assert not sr.rehearse(step_on, {names.FSDP: 4, names.TP: 2}, rtol=np.float64(1e-5))


def test_a_library_that_keeps_arrays_of_the_mesh_before():
    """JAX refused the second mesh: the sines of equinox's embedding are made once in a process."""
    embed = pytest.importorskip("equinox").nn.RotaryPositionalEmbedding(8)
    rows = (8, 4, 8), "float32", "fsdp"
    assert not sr.rehearse(lambda mesh: of_arrays(mesh, jax.vmap(embed), rows), SIZES)


def test_wide_numbers_and_how_many_devices_the_environment_says_there_are(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    with enable_x64(True):
        assert not sr.rehearse(partial(scaled, call=lambda x: x * 2, dtype="float64"), SIZES)


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    sr.rehearse(partial(scaled, call=lambda x: x), SIZES)
    monkeypatch.setattr("shardrules._program.child.__file__", str(tmp_path / "none.py"))
    with pytest.raises(RuntimeError, match="the step has crashed, by exit code 2. Its last words"):
        sr.rehearse(partial(scaled, call=lambda x: x), {"fsdp": 4})
    assert list(tmp_path.iterdir()) == []


def forgetful(mesh: Any) -> Any:
    return by_hand(mesh, "no mean")


def test_the_command():
    done = invoke("rehearse", f"{__name__}:by_hand", "--mesh", "fsdp=4,tp=2")
    assert done.exit_code == 0
    assert "nothing found: 4 results on fsdp=4,tp=2 and on one device" in done.output
    done = invoke("rehearse", f"{__name__}:forgetful", "--mesh", "fsdp=4,tp=2", "--format", "json")
    assert done.exit_code == 1
    assert {finding["kind"] for finding in json.loads(done.stdout)["findings"]} == {"unequal", "differs"}
