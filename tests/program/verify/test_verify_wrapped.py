"""`verify` of what `flax.nnx.jit` and `equinox.filter_jit` compile: steps that compile once, and twice."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import devices

RULES = [("kernel$|weight$", P("fsdp", "tp")), ("bias$", P())]


MESH = devices(fsdp=4, tp=2)
BATCH = jax.device_put(np.ones((16, 64), "float32"), NamedSharding(MESH, P("fsdp")))


def kinds(findings):
    """The kinds of what is a warning or worse."""
    return {one.kind for one in findings.at_least("warning")}


def paths(findings, kind):
    """The paths of the findings of a kind."""
    return {path for one in findings if one.kind == kind for path in one.paths}


# flax nnx


@pytest.fixture(scope="module")
def nnx():
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    if not hasattr(nnx, "graphlib"):
        pytest.skip("this flax is older than those that verify reads")
    return nnx


def adam():
    return pytest.importorskip("optax", reason="optax is not installed").adam(1e-3)


@pytest.fixture(scope="module")
def create(nnx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(64, 128, rngs=rngs)
            self.down = nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    def create():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, adam(), wrt=nnx.Param)

    return create


@pytest.fixture(scope="module")
def plans(nnx, create):
    model, optimizer = nnx.eval_shape(create)
    plan = sr.plan(nnx.state(model), sr.Rules(RULES, sr.dialects.NNX), MESH)
    return plan, plan.for_optimizer(nnx.state(optimizer))


@pytest.fixture
def parts(nnx, create, plans):
    """A model and its optimizer, as planned."""
    parts = create()
    for part, plan in zip(parts, plans, strict=True):
        nnx.update(part, sr.shard(nnx.state(part), plan.shardings()))
    return parts


@pytest.fixture
def compiled(nnx, plans, parts):
    """(the step with these options, with the plans' shardings if it is planned; its executable)."""

    def train(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    def compiled(*, is_planned=True, **options):
        if is_planned:
            states = (nnx.StateSharding(plan.shardings()) for plan in plans)
            options["in_shardings"] = (*states, None)
        step = nnx.jit(train, **options)
        return step, step.lower(*parts, BATCH).compile()

    return compiled


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_step_of_nnx_compiles_again_where_it_is_told(compiled, plans, parts, is_planned):
    step, executable = compiled(is_planned=is_planned, donate_argnums=(0, 1))
    findings = sr.verify(executable, (*plans, None))
    assert kinds(findings) == (set() if is_planned else {"fixed-point", "output", "donation"})
    for _ in range(3):
        step(*parts, BATCH)
    assert step.jitted_fn._cache_size() == 2 - is_planned
    if not is_planned:
        assert "inputs/0/up/bias/value" in paths(findings, "fixed-point")
        assert "updates/0/up/bias/value" in paths(findings, "output")
        assert "StateSharding" in findings[0].fix


def test_leaves_are_in_the_order_of_the_plan(compiled, plans):
    """StateSharding splits a state by its shardings."""
    _, executable = compiled(donate_argnums=(0, 1))
    model, of_optimizer = plans
    for planned in (model, model.shardings(), model.specs()):
        findings = sr.verify(executable, (planned, of_optimizer, None))
        assert not kinds(findings)
        assert "14 of 15 inputs planned, 14 of 15 outputs planned" in findings.scope
    specs = jax.tree.map(lambda _: P("tp"), model.shardings())
    findings = sr.verify(executable, (specs, None, None))
    assert len(paths(findings, "input")) == len(paths(findings, "output")) == 4


def test_modules_that_are_not_donated(compiled, plans):
    _, executable = compiled()
    findings = sr.verify(executable, (*plans, None), large=2**10)
    assert kinds(findings) == {"donation"}
    assert "nnx.jit donate_argnums=(0, 1)" in findings[0].fix
    assert not kinds(sr.verify(executable, (*plans, None)))


@pytest.mark.parametrize("options", [{"graph": False}, {"graph": True, "graph_updates": False}])
@pytest.mark.parametrize("donated", [(), (0, 1)])
def test_modules_that_are_trees(compiled, plans, options, donated):
    try:
        _, executable = compiled(is_planned=False, donate_argnums=donated, **options)
    except TypeError:
        pytest.skip("nnx.jit of this flax has no such modules")
    findings = sr.verify(executable, (*plans, None), large=2**10)
    assert kinds(findings) == {"fixed-point", "output", "donation"}
    assert "updates/0/up/bias/value" in paths(findings, "output")
    assert "14 of 15 outputs planned" in findings.scope


def test_what_is_returned_is_planned_by_outputs(nnx, plans, parts):
    forward = nnx.jit(lambda model, x: {"y": model(x)})
    executable = forward.lower(parts[0], BATCH).compile()
    findings = sr.verify(executable, (plans[0], P("fsdp")), {"y": P("tp")})
    assert paths(findings, "output") == {"outputs/y"}
    assert not sr.verify(executable, (plans[0], P("fsdp")), {"y": None})


def test_modules_in_containers_with_keys_and_tied_parameters(nnx):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = self.tied = nnx.Linear(64, 64, rngs=rngs)
            self.norm = nnx.BatchNorm(64, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.tied(self.drop(self.norm(self.up(x))))

    def forward(models, x, *, scale):
        return {"y": models["a"](x) * scale, "state": nnx.state(models["a"], nnx.BatchStat)}

    model = Model(nnx.Rngs(0))
    rules = sr.Rules([("kernel", "fsdp"), (".*", P())], sr.dialects.NNX)
    plan = sr.plan(nnx.state(model), rules, MESH)
    nnx.update(model, sr.shard(nnx.state(model), plan.shardings()))
    executable = nnx.jit(forward).lower({"a": model}, BATCH, scale=jnp.ones(())).compile()
    findings = sr.verify(executable, ({"a": plan}, None, {"scale": None}), large=2**10)
    count = len(plan.paths)
    assert f"{count} of {count + 2} inputs planned" in findings.scope
    assert f"{count} of {count + 3} outputs planned" in findings.scope
    assert not paths(findings, "input")
    assert "inputs/0/a/norm/mean/value" in paths(findings, "donation")


# equinox


@pytest.fixture(scope="module")
def eqx():
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")
    if tuple(map(int, eqx.__version__.split(".")[:2])) < (0, 13):
        pytest.skip("this equinox is older than those that verify reads")
    return eqx


@pytest.fixture(scope="module")
def placed(eqx):
    """A model and its optimizer's state as planned, and their plans."""
    whole = eqx.nn.MLP(64, 64, 128, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(whole, eqx.is_array)
    plan = sr.plan(arrays, RULES, MESH)
    state = adam().init(arrays)
    of_state = plan.for_optimizer(state)
    model = eqx.combine(sr.shard(arrays, plan.shardings()), static)
    return model, sr.shard(state, of_state.shardings()), plan, of_state


@pytest.fixture(scope="module")
def train(eqx):
    def train(x, model, state, *, shardings=None, scale=1.0):
        def loss(model):
            return scale * jnp.mean(jax.vmap(model)(x) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = adam().update(gradients, state)
        model = eqx.apply_updates(model, updates)
        if shardings is not None:
            arrays, static = eqx.partition(model, eqx.is_array)
            arrays, state = jax.lax.with_sharding_constraint((arrays, state), shardings)
            model = eqx.combine(arrays, static)
        return model, state, value

    return train


@pytest.fixture(scope="module")
def compiled_step(eqx, placed, train):
    return eqx.filter_jit(train).lower(BATCH, *placed[:2]).compile()


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_step_of_equinox_compiles_again_where_it_is_told(eqx, placed, train, is_planned):
    model, state, *planned = placed
    shardings = tuple(plan.shardings() for plan in planned) if is_planned else None
    step = eqx.filter_jit(lambda *args: train(*args, shardings=shardings))
    compiled = step.lower(BATCH, model, state).compile()
    findings = sr.verify(compiled, (None, *planned), (*planned, None))
    assert kinds(findings) == (set() if is_planned else {"fixed-point", "output"})
    before = step._cached._cache_size()
    for _ in range(3):
        model, state, _ = step(BATCH, model, state)
    assert step._cached._cache_size() - before == 2 - is_planned
    if not is_planned:
        assert paths(findings, "fixed-point") >= {"inputs/1/layers/{0,1}/bias"}
        assert "outputs/0/layers/{0,1}/bias" in paths(findings, "output")
        assert "with_sharding_constraint" in findings[0].fix


def test_what_is_planned_is_found_among_flat_arguments(eqx, placed, train):
    model, state, plan, of_state = placed
    whole = sr.plan(model, RULES, plan.mesh)
    compiled = eqx.filter_jit(train).lower(BATCH, model, state, scale=jnp.ones(())).compile()
    for planned in (plan, whole, plan.shardings(), plan.specs()):
        findings = sr.verify(compiled, (P("fsdp"), planned, of_state, {"scale": P()}))
        assert not paths(findings, "input")
        assert "15 of 15 inputs planned" in findings.scope
    findings = sr.verify(compiled, (P("tp"), plan, of_state, {"scale": P()}))
    assert paths(findings, "input") == {"inputs/0"}
    findings = sr.verify(compiled, (None, swapped(eqx, model, plan), None))
    assert "inputs/1/layers/{0,1}/weight" in paths(findings, "input")


def swapped(eqx, model, plan):
    return sr.plan(eqx.filter(model, eqx.is_array), [(".*", P("tp"))], plan.mesh)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (lambda plan, state: 3, "inputs is 3"),
        (lambda plan, state: (None, plan), r"inputs has 2 entries.*missing a required argument: 'state'"),
        (lambda plan, state: (None, plan, state, None), r"inputs has 4 entries.*too many positional arguments"),
        (lambda plan, state: (None, state, plan), "does not say which of 13 arrays"),
        (lambda plan, state: (None, P(), P()), "does not say which of 13 arrays"),
        (lambda plan, state: (plan, None, state), "does not say which of 1 array"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(compiled_step, placed, chosen, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sr.verify(compiled_step, chosen(*placed[2:]))


def test_a_key_that_is_keyword_only_needs_no_entry(eqx, placed):
    model, _, plan, _ = placed
    key = jax.device_put(jax.random.key(0), NamedSharding(MESH, P()))
    step = eqx.filter_jit(lambda model, x, *, key: jax.vmap(model)(x) + jax.random.normal(key, x.shape))
    compiled = step.lower(model, BATCH, key=key).compile()
    scopes = [sr.verify(compiled, inputs).scope for inputs in ((plan, None), (plan, None, {"key": None}))]
    assert scopes[0] == scopes[1]
    assert "2 of 6 inputs planned" in sr.verify(compiled, (None, P("fsdp"), {"key": P()})).scope
    with pytest.raises(TypeError, match=r"such as \(plan, None\): "):
        sr.verify(compiled, plan)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_argument_may_have_a_pair_of_plans(eqx, placed, train, order):
    """step((model, opt_state), (x, y)), or the other way round."""
    model, state, plan, of_state = placed

    def step(*args):
        (model, state), (x, y) = (args[i] for i in order)
        return train(x + y, model, state)

    arguments, specs = [(model, state), (BATCH, BATCH)], (P("fsdp"), P("fsdp"))
    compiled = eqx.filter_jit(step).lower(*(arguments[i] for i in order)).compile()
    right, wrong = (
        sr.verify(compiled, [[(of_model, of_state), specs][i] for i in order])
        for of_model in (plan, swapped(eqx, model, plan))
    )
    assert not paths(right, "input")
    assert "15 of 15 inputs planned" in right.scope
    assert f"inputs/{order[0]}/0/layers/{{0,1}}/weight" in paths(wrong, "input")


# Other libraries, and other versions of these


def test_another_flax_is_an_error_that_says_so(nnx, plans, parts, monkeypatch):
    compiled = nnx.jit(lambda model, x: model(x)).lower(parts[0], BATCH).compile()
    compilation = pytest.importorskip("flax.nnx.transforms.compilation")
    monkeypatch.delattr(compilation, "_jit_merge_fn")
    with pytest.raises(TypeError, match=r"of flax \d.*_jit_merge_fn.*by jax.jit"):
        sr.verify(compiled, (plans[0], None))


def test_another_equinox_is_an_error_that_says_so(compiled_step, placed):
    other = types.new_class("Compiled")
    other.__module__ = "equinox.other"
    changed = other()
    changed.compiled = compiled_step.compiled
    with pytest.raises(TypeError, match=r"of equinox \d.*'info'.*by jax.jit"):
        sr.verify(changed, (None, placed[2], None))
