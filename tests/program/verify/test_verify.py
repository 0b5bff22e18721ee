"""`verify`: for each finding a program that has the fault, and one that has not."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

RULES = [("layers/w", (None, "data", "model")), ("head", ("model", None))]
PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((4, 64, 64), "float32")},
    "head": jax.ShapeDtypeStruct((64, 16), "float32"),
}
STATE = {"count": jax.ShapeDtypeStruct((), "int32"), "mu": PARAMS}


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


@pytest.fixture(scope="module")
def plan(mesh):
    return sr.plan(PARAMS, RULES, mesh)


@pytest.fixture(scope="module")
def state_plan(plan):
    return plan.for_optimizer(STATE)


@pytest.fixture(scope="module")
def batch(mesh):
    return jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"]["w"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    mu = jax.tree.map(lambda m, g: m * 0.9 + g, state["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, mu)
    return params, {"count": state["count"] + 1, "mu": mu}, value


@pytest.fixture(scope="module")
def compiled_step(plan, state_plan, batch, mesh):
    """compiled_step(donate, replicated): the step; its new parameters are replicated or as planned."""

    @functools.cache
    def compiled(donate=(0, 1), replicated=False):
        out = (NamedSharding(mesh, P()), None, None) if replicated else None
        jitted = jax.jit(step, donate_argnums=donate, out_shardings=out)
        return jitted.lower(plan.abstract(), state_plan.abstract(), batch).compile()

    return compiled


@pytest.fixture(scope="module")
def planned(plan, state_plan):
    return plan, state_plan, None


def found(findings, kind):
    """(level, paths) of the findings of this kind."""
    return [(one.level, one.paths) for one in findings if one.kind == kind]


def test_a_step_that_runs_as_planned(compiled_step, planned, plan, state_plan):
    assert sr.verify(compiled_step(), planned) == ()
    outputs = (plan, state_plan, None)
    assert sr.verify(compiled_step(), planned, outputs, hbm=2**30) == ()
    sr.verify(compiled_step(), planned, outputs).raise_for("info")


def test_what_compares_nothing_is_a_warning(compiled_step, plan, state_plan):
    compiled = compiled_step()
    (finding,) = sr.verify(compiled, (None, None, None))
    assert (finding.level, finding.kind) == ("warning", "input")
    assert finding.message == "nothing is compared: no argument and no result is planned"
    assert not sr.verify(compiled, (plan, None, None))
    assert not sr.verify(compiled, (None, None, None), (plan, state_plan, None))
    assert not sr.verify(compiled, (None, None, None), budget={"total": "1 GB"})


def test_arrays_that_the_function_closes_over_are_told(mesh, batch):
    def told(array):
        compiled = jax.jit(lambda x: x @ array).lower(batch).compile()
        findings = sr.verify(compiled, (P("data"),), large=2**16)
        return [one.bytes for one in findings if "closes over" in one.message]

    assert told(np.random.default_rng(0).random((64, 256), "float32")) == [64 * 256 * 4]
    assert told(np.random.default_rng(0).random((64, 255), "float32")) == []


# Inputs and outputs


def compiled_on(mesh, function, *specs, shape=(16, 64), **options):
    """The function of float32 arrays of these specs, compiled; of None, the sharding is XLA's."""
    args = [
        jax.ShapeDtypeStruct(shape, "float32", sharding=None if spec is None else NamedSharding(mesh, spec))
        for spec in specs
    ]
    return jax.jit(function, **options).lower(*args).compile()


def test_an_input_that_is_not_as_planned(mesh):
    compiled = compiled_on(mesh, lambda x, y: x + y, P("data"), P("model"))
    (finding,) = sr.verify(compiled, (P("data"), P("data", "model")))
    assert (finding.level, finding.kind) == ("error", "input")
    assert finding.paths == ("inputs/1",)
    assert finding.leaves == 1
    assert finding.bytes == 4 * 64 * 4
    assert "planned P('data', 'model')" in finding.message
    assert "takes P('model')" in finding.message
    assert "1.02 kB on each device instead of 512 B" in finding.message
    assert "plan.abstract()" in finding.fix
    assert "jax.jit in_shardings=plan.shardings()" in finding.fix
    assert not sr.verify(compiled, (P("data"), P("model")))


def test_jax_itself_refuses_what_is_found(mesh):
    compiled = compiled_on(mesh, lambda x: x * 2, P("data"))
    array = jax.device_put(np.ones((16, 64), "float32"), NamedSharding(mesh, P("model")))
    assert found(sr.verify(compiled, (array.sharding,)), "input")
    with pytest.raises(ValueError, match="sharding"):
        compiled(array)


def test_bytes_that_are_as_planned_are_said_once(mesh):
    compiled = compiled_on(mesh, lambda x: x * 2, P(None, "data"))
    (finding,) = sr.verify(compiled, (P("data"),))
    assert "takes P(None, 'data') with 2.05 kB on each device: it refuses" in finding.message


@pytest.mark.parametrize("spec", [P("data"), P("data", None), P(("data",), None)], ids=["short", "long", "tuple"])
def test_specs_that_mean_the_same_are_the_same(mesh, spec):
    compiled = compiled_on(mesh, lambda x: x * 2, P("data"))
    assert not sr.verify(compiled, (spec,), spec)
    assert not sr.verify(compiled, (NamedSharding(mesh, spec),), NamedSharding(mesh, spec))


def test_the_same_spec_on_devices_in_another_order_is_another_sharding(mesh):
    other = Mesh(mesh.devices[::-1], mesh.axis_names)
    compiled = compiled_on(mesh, lambda x: x * 2, P("data"))
    (finding,) = sr.verify(compiled, (NamedSharding(other, P("data")),))
    assert finding.kind == "input"
    assert "on the devices in another order" in finding.message


def test_shardings_that_xla_has_chosen_are_compared_as_well(mesh):
    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("data", "model")))

    compiled = compiled_on(mesh, constrained, None)
    assert not sr.verify(compiled, (P("data", "model"),), P("data", "model"))
    assert found(sr.verify(compiled, (P("model"),)), "input") == [("error", ("inputs/0",))]


def test_an_output_that_is_not_as_planned(compiled_step, planned, plan):
    findings = sr.verify(compiled_step(replicated=True), planned, (plan, None, None))
    assert found(findings, "output") == [("error", ("outputs/0/layers/w",)), ("error", ("outputs/0/head",))]
    (finding, _) = (one for one in findings if one.kind == "output")
    assert finding.bytes == 4 * 64 * 64 * 4
    assert "planned P(None, 'data', 'model')" in finding.message
    assert "returns P()" in finding.message
    assert "out_shardings" in finding.fix
    findings = sr.verify(compiled_step(replicated=True), planned, (None, None, P()))
    assert not found(findings, "output")


def test_arguments_that_jit_has_dropped_are_said_to_be(mesh, plan, batch):
    compiled = jax.jit(lambda p, x: p["head"] * 2).lower(plan.abstract(), batch).compile()
    (finding,) = sr.verify(compiled, (plan, None))
    assert (finding.level, finding.kind) == ("info", "input")
    assert finding.paths == ("inputs/0/layers/w",)
    assert "not used" in finding.message
    assert "keep_unused" in finding.fix


# What plans may be


def test_all_ways_to_plan_say_the_same(compiled_step, plan, state_plan, mesh):
    abstract = sr.plan(PARAMS, RULES, {"data": 2, "model": 4})
    ways = (plan, abstract, plan.specs(), plan.shardings(), abstract.shardings())
    ways += (sr.Plan.from_lock(plan.lock()),)
    for way in ways:
        assert not sr.verify(compiled_step(), (way, None, None)), way
    swapped = [("layers/w", (None, "model", "data")), ("head", ("data", None))]
    plan = sr.plan(PARAMS, swapped, mesh)
    abstract = sr.plan(PARAMS, swapped, {"data": 2, "model": 4})
    ways = (plan, abstract, plan.specs(), plan.shardings(), abstract.shardings())
    ways += (sr.Plan.from_lock(plan.lock()),)
    for way in ways:
        findings = sr.verify(compiled_step(), (way, None, None))
        assert len(found(findings, "input")) == 2, way


def test_keyword_arguments(mesh):
    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x, *, y, z: x + y + z).lower(x, y=x, z=x).compile()
    assert not sr.verify(compiled, (P("data"),))
    assert not sr.verify(compiled, (P("data"), {"y": P("data")}))
    findings = sr.verify(compiled, (P("data"), {"z": P("model")}))
    assert found(findings, "input") == [("error", ("inputs/z",))]


def test_a_program_of_one_device():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    compiled = jax.jit(lambda t: t["w"] * 2).lower(tree).compile()
    assert not sr.verify(compiled, (sr.plan(tree, [("w", "data")], mesh),))
    with pytest.raises(ValueError, match=r"inputs\[0\].*none of its inputs and outputs has a mesh"):
        sr.verify(compiled, (sr.plan(tree, [("w", "data")], {"data": 1}),))


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (None, TypeError, "inputs is None.*a tuple with an entry for each positional argument"),
        ((None,), ValueError, "inputs has 1 entry;.*3 positional arguments"),
        ((None,) * 4, ValueError, "inputs has 4 entries.*3 positional arguments"),
        ((None, None, "data"), TypeError, r"inputs\[2\] is 'data'.*a Plan, a tree"),
        (({"layers": None}, None, None), ValueError, r"inputs\[0\]: the structure.*'layers'.*'head'"),
        (({"head": 1, "layers": None}, None, None), TypeError, r"inputs\[0\]\['head'\] is 1"),
        (
            ({"head": None, "layers": {"w": (P(), P())}}, None, None),
            ValueError,
            r"inputs\[0\]\['layers'\]\['w'\]\[0\]: the structure is not that of the inputs",
        ),
        (
            (P("data", None, None, None), None, None),
            ValueError,
            r"inputs/0/(head|layers/w): P\('data', None, None, None\) is planned for the shape \(.*64",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(compiled_step, inputs, error, message):
    with pytest.raises(error, match=message):
        sr.verify(compiled_step(), inputs)


def test_a_plan_that_does_not_fit_is_an_error(compiled_step, plan, mesh):
    def planned_as(tree, on=mesh):
        return sr.plan(tree, [(".*", ())], on), None, None

    less = {"head": PARAMS["head"]}
    with pytest.raises(ValueError, match=r"inputs\[0\]: the plan is for another tree.*layers/w"):
        sr.verify(compiled_step(), planned_as(less))
    with pytest.raises(ValueError, match=r"inputs\[0\].*has the leaf more"):
        sr.verify(compiled_step(), planned_as({**PARAMS, "more": PARAMS["head"]}))
    renamed = {**less, "layer": PARAMS["layers"]}
    with pytest.raises(ValueError, match="lacks the leaf layers/w; near it: layer/w"):
        sr.verify(compiled_step(), planned_as(renamed))
    other = {**PARAMS, "head": jax.ShapeDtypeStruct((32, 16), "float32")}
    with pytest.raises(ValueError, match=r"head is planned as \(32, 16\), and there is \(64, 16\)"):
        sr.verify(compiled_step(), planned_as(other))
    with pytest.raises(ValueError, match=r"for the mesh data=8, .*data=2,model=4.*on_mesh"):
        sr.verify(compiled_step(), planned_as(PARAMS, {"data": 8}))
    with pytest.raises(ValueError, match=r"for the mesh data=4,model=2, .*data=2,model=4"):
        sr.verify(compiled_step(), planned_as(PARAMS, {"data": 4, "model": 2}))
    with pytest.raises(ValueError, match="unmatched"):
        sr.verify(compiled_step(), (sr.plan(PARAMS, [], mesh), None, None))


def test_a_plan_of_a_tree_is_not_for_one_array(mesh, plan, batch):
    compiled = jax.jit(lambda params, x: loss(params, x)).lower(plan.abstract(), batch).compile()
    message = "outputs: the plan .* lacks the leaf '' of an array that is in no tree: give a Part"
    with pytest.raises(ValueError, match=message):
        sr.verify(compiled, (plan, None), plan)
    message = r"inputs\[1\]: the plan .* lacks the leaf '' of an array"
    with pytest.raises(ValueError, match=message):
        sr.verify(compiled, (plan, plan))


def test_what_is_not_compiled_is_an_error(plan):
    jitted = jax.jit(lambda x: x)
    for given in (None, jitted, jitted.lower(np.ones(3))):
        with pytest.raises(TypeError, match=r"compiled is .*jax.jit\(f\).lower\(...\).compile\(\)"):
            sr.verify(given, (plan,))


# States


def test_a_donated_state_that_comes_out_otherwise(compiled_step, planned):
    findings = sr.verify(compiled_step(replicated=True), planned)
    assert found(findings, "fixed-point") == [("error", ("inputs/0/layers/w",)), ("error", ("inputs/0/head",))]
    (finding, _) = (one for one in findings if one.kind == "fixed-point")
    assert finding.bytes == 4 * 32 * 16 * 4
    for part in ("in as P(None, 'data', 'model')", "out as P()", "donated", "compiles again"):
        assert part in finding.message
    assert "out_shardings" in finding.fix
    with pytest.raises(sr.FindingsError, match="fixed-point"):
        findings.raise_for("error")


def test_a_likely_state_that_comes_out_otherwise_is_a_warning(compiled_step, planned, plan):
    compiled = compiled_step((), replicated=True)
    levels = {level for level, _ in found(sr.verify(compiled, planned), "fixed-point")}
    assert levels == {"warning"}
    findings = sr.verify(compiled, planned, (plan, None, None))
    assert {level for level, _ in found(findings, "fixed-point")} == {"error"}
    assert any("the same is planned on both sides" in one.message for one in findings)


@pytest.mark.parametrize("replicated", [False, True])
def test_jit_compiles_again_where_it_is_found(mesh, plan, replicated):
    """The oracle: the function's own cache."""
    out = (NamedSharding(mesh, P()), None) if replicated else None

    def descend(params, x):
        return jax.tree.map(lambda p: p * 0.9, params), jnp.mean(x)

    jitted = jax.jit(descend, out_shardings=out, donate_argnums=0)
    params = jax.device_put(jax.tree.map(lambda s: np.ones(s.shape, s.dtype), PARAMS), plan.shardings())
    x = jax.device_put(np.ones((16, 64), "float32"), NamedSharding(mesh, P("data")))
    compiled = jitted.lower(params, x).compile()
    for _ in range(3):
        params, _ = jitted(params, x)
    assert jitted._cache_size() == 1 + replicated
    assert bool(found(sr.verify(compiled, (plan, None)), "fixed-point")) == replicated


def test_gradients_are_no_certain_state(plan, batch, mesh):
    def gradients(params, x):
        return jax.tree.map(lambda p: p * jnp.mean(x), params)

    compiled = {
        spec: jax.jit(gradients, out_shardings=out).lower(plan.abstract(), batch).compile()
        for spec, out in {"P()": NamedSharding(mesh, P()), "planned": plan.shardings()}.items()
    }
    findings = sr.verify(compiled["P()"], (plan, None))
    assert {level for level, _ in found(findings, "fixed-point")} == {"warning"}
    assert "if that is passed back" in findings[-1].message
    assert not sr.verify(compiled["planned"], (plan, None))


def test_a_state_may_be_the_whole_result_and_a_keyword(plan, batch, mesh):
    def function(x, *, params):
        return jax.tree.map(lambda p: p + jnp.mean(x), params)

    jitted = jax.jit(function, donate_argnames="params", out_shardings=NamedSharding(mesh, P()))
    compiled = jitted.lower(batch, params=plan.abstract()).compile()
    findings = sr.verify(compiled, (None,))
    assert found(findings, "fixed-point") == [
        ("error", ("inputs/params/layers/w",)),
        ("error", ("inputs/params/head",)),
    ]


def test_a_state_that_comes_out_in_another_dtype(mesh):
    def function(t):
        return {"w": t["w"].astype("bfloat16"), "v": t["v"] * 2}

    shape = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(function, donate_argnums=0).lower({"w": shape, "v": shape}).compile()
    (finding,) = (one for one in sr.verify(compiled, (None,)) if one.kind == "fixed-point")
    assert (finding.level, finding.paths) == ("error", ("inputs/0/w",))
    assert "in as float32, out as bfloat16" in finding.message


def test_of_alike_arguments_that_at_the_same_place_is_the_state(mesh):
    def function(old, new):
        return jax.tree.map(jnp.sin, old), jax.tree.map(jnp.cos, new)

    def tree(spec):
        return {"w": jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, spec))}

    jitted = jax.jit(function, donate_argnums=(0, 1))
    compiled = jitted.lower(tree(P("data")), tree(P("model"))).compile()
    assert not found(sr.verify(compiled, (None, None)), "fixed-point")


def test_a_pair_of_plans_on_both_sides_is_a_state(plan, state_plan, batch):
    def of_pair(pair, x):
        *pair, _ = step(*pair, x)
        return tuple(pair)

    lowered = jax.jit(of_pair).lower((plan.abstract(), state_plan.abstract()), batch)
    compiled = lowered.compile()
    (finding,) = sr.verify(compiled, ((plan, state_plan), None), (plan, state_plan))
    assert "the same is planned on both sides" in finding.message
    program = sr.inspect(compiled, ((plan, state_plan), None), (plan, state_plan))
    assert program.batch_axes == {"data"}  # the axes of the model cut no batch


# Donation


def test_a_small_state_that_comes_back_is_info(compiled_step, planned, plan, state_plan):
    (finding,) = sr.verify(compiled_step(()), planned, (plan, state_plan, None))
    assert (finding.level, finding.kind) == ("info", "donation")
    assert "donate_argnums=(0, 1)" in finding.fix
    assert not sr.verify(compiled_step(()), planned)  # that they are states is a guess


def test_a_donated_state_whose_memory_is_not_taken(mesh):
    jitted = jax.jit(lambda x: x * 2, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    findings = sr.verify(jitted.lower(x).compile(), (None,))
    assert found(findings, "donation") == [("error", ("inputs/0",))]
    (finding,) = (one for one in findings if one.kind == "donation")
    assert finding.bytes == 8 * 64 * 4
    assert "no output takes their memory" in finding.message


def test_what_is_donated_and_no_state(mesh):
    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x: jnp.sum(x), donate_argnums=0).lower(x).compile()
    findings = sr.verify(compiled, (None,))
    assert found(findings, "donation") == [("warning", ("inputs/0",))]
    assert "do not donate" in findings[0].fix


def test_donated_arguments_are_known_by_their_place_among_those_that_are_kept(mesh):
    def function(unused, x, y):
        return x * 2, jnp.sum(y)

    x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    y = jax.ShapeDtypeStruct((4,), "float32")
    compiled = jax.jit(function, donate_argnums=(0, 1, 2)).lower(y, x, y).compile()
    findings = sr.verify(compiled, (None,) * 3)
    assert found(findings, "donation") == [("warning", ("inputs/2",))]


# Memory kinds


def test_memory_kinds(mesh):
    tree = {"w": jax.ShapeDtypeStruct((16, 64), "float32")}
    on_host = sr.plan(tree, [("w", sr.RuleSpec(("data",), memory_kind="pinned_host"))], mesh)
    on_device = sr.plan(tree, [("w", sr.RuleSpec(("data",), memory_kind="device"))], mesh)
    either = sr.plan(tree, [("w", ("data",))], mesh)

    def function(t):
        return {"w": jax.device_put(t["w"], either.shardings()["w"]) * 2}

    compiled = {
        name: jax.jit(function).lower(plan.abstract()).compile()
        for name, plan in {"host": on_host, "device": on_device}.items()
    }
    findings = sr.verify(compiled["device"], (on_host,))
    assert found(findings, "memory-kind") == [("error", ("inputs/0/w",))]
    (finding,) = (one for one in findings if one.kind == "memory-kind")
    assert finding.bytes == 8 * 64 * 4
    assert "planned in pinned_host memory" in finding.message
    assert "takes them in device memory" in finding.message
    findings = sr.verify(compiled["host"], (on_device,))
    assert found(findings, "memory-kind") == [("error", ("inputs/0/w",))]
    for name, plan in (("host", on_host), ("device", on_device), ("host", either)):
        assert not found(sr.verify(compiled[name], (plan,)), "memory-kind")


# Gathers


def test_layers_that_are_gathered_one_at_a_time_are_info(compiled_step, planned):
    findings = sr.verify(compiled_step(), planned, large=64 * 16 * 4)
    assert found(findings, "gathered") == [("info", ("inputs/0/layers/w",))]
    assert findings[0].bytes == 64 * 16 * 4
    assert "gathered over data" in findings[0].message
    assert "a slice at a time" in findings[0].message
    assert not sr.verify(compiled_step(), planned, large=64 * 16 * 4 + 1)
    assert not found(sr.verify(compiled_step(), (None, None, None), large=1), "gathered")


@pytest.fixture(scope="module")
def holding(plan, batch, mesh):
    def function(params, x):
        whole = jax.lax.with_sharding_constraint(params["layers"]["w"], NamedSharding(mesh, P()))
        return loss({**params, "layers": {"w": whole}}, x)

    # With rows on all devices: otherwise each takes its part of the layers again.
    rows = jax.ShapeDtypeStruct(batch.shape, batch.dtype, sharding=NamedSharding(mesh, P(("data", "model"))))
    return jax.jit(function).lower(plan.abstract(), rows).compile()


def test_layers_that_are_gathered_before_their_loop(holding, plan):
    findings = sr.verify(holding, (plan, None), large=5000)
    assert found(findings, "gathered") == [("warning", ("inputs/0/layers/w",))]
    assert findings[0].bytes == 4 * 64 * 64 * 4
    assert "gathered over data, model to 65.5 kB" in findings[0].message
    assert "before a loop" in findings[0].message


def of_kind(findings, kind):
    """The first finding of a kind; there may be others about an axis that nothing is cut by."""
    return next(finding for finding in findings if finding.kind == kind)


def test_weights_that_are_gathered_over_an_axis_that_cuts_nothing_else(mesh):
    def function(w, x):
        return x @ jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))

    for spec, level in ((P("model"), "warning"), (P("data"), "info")):
        w = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec))
        x = jax.ShapeDtypeStruct((16, 64), "float32", sharding=NamedSharding(mesh, P("data")))
        compiled = jax.jit(function).lower(w, x).compile()
        findings = sr.verify(compiled, (spec, None), large=1)
        assert found(findings, "gathered") == [(level, ("inputs/0",))]
        assert of_kind(findings, "gathered").bytes == 64 * 64 * 4


def dequantized(weight, scale):
    """A scale for each group of rows."""
    grouped = weight.astype(scale.dtype).reshape(len(scale), -1, weight.shape[1])
    return (grouped * scale[:, None]).reshape(weight.shape)


@pytest.mark.parametrize(
    ("dtype", "rows", "is_wide"), [("int8", 1, True), ("int8", 4, True), ("uint8", None, True), ("float32", 4, False)]
)
def test_quantized_weights_that_are_gathered_after_they_are_scaled(mesh, dtype, rows, is_wide):
    def product(w, scale, x):
        return x @ (w.astype(x.dtype) if scale is None else dequantized(w, scale))

    def gathered_first(w, scale, x):
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return product(w, scale, x)

    cut = NamedSharding(mesh, P("data"))
    w = jax.ShapeDtypeStruct((64, 256), dtype, sharding=cut)
    scale = rows and jax.ShapeDtypeStruct((rows, 256), "float32", sharding=NamedSharding(mesh, P()))
    x = jax.ShapeDtypeStruct((512, 64), "float32", sharding=cut)
    compiled = jax.jit(product).lower(w, scale, x).compile()
    findings = sr.verify(compiled, (P("data"), None, None), large=1)
    level = "warning" if is_wide else "info"
    assert found(findings, "gathered") == [(level, ("inputs/0",))]
    if is_wide:
        finding = of_kind(findings, "gathered")
        assert finding.bytes == 64 * 256 * 4
        assert "of a wider dtype than what is stored" in finding.message
        assert "gather what is stored" in finding.fix
    compiled = jax.jit(gathered_first).lower(w, scale, x).compile()
    findings = sr.verify(compiled, (P("data"), None, None), large=1)
    assert found(findings, "gathered") == [("info", ("inputs/0",))]
    assert of_kind(findings, "gathered").bytes == 64 * 256 * np.dtype(dtype).itemsize


def test_experts_that_are_gathered(mesh):
    def by_index(params, chosen, x):
        up = jax.lax.with_sharding_constraint(params["experts"]["up"], NamedSharding(mesh, P()))
        return jnp.einsum("td,tdh->th", x, up[chosen]) @ params["head"]

    def sent(params, chosen, x):
        chosen = jax.nn.one_hot(chosen, 8)
        inbox = jnp.einsum("te,td->etd", chosen, x)
        inbox = jax.lax.with_sharding_constraint(inbox, NamedSharding(mesh, P("data")))
        outbox = jnp.einsum("etd,edh->eth", inbox, params["experts"]["up"])
        return jnp.einsum("te,eth->th", chosen, outbox) @ params["head"]

    def levels(function, spec_of_head):
        rules = [("experts", P("data")), ("head", spec_of_head)]
        kernels = {"up": jax.ShapeDtypeStruct((8, 16, 16), "float32")}
        tree = {"experts": kernels, "head": jax.ShapeDtypeStruct((16, 16), "float32")}
        plan = sr.plan(tree, rules, mesh)
        cut = NamedSharding(mesh, P("data"))
        tokens = jax.ShapeDtypeStruct((512,), "int32", sharding=cut)
        x = jax.ShapeDtypeStruct((512, 16), "float32", sharding=cut)
        compiled = jax.jit(function).lower(plan.abstract(), tokens, x).compile()
        return sr.verify(compiled, (plan, None, None), large=8 * 16 * 16 * 4)

    findings = levels(by_index, P())
    assert found(findings, "gathered") == [("warning", ("inputs/0/experts/up",))]
    assert "these axes cut experts: each device gets all" in findings[0].message
    assert "all_to_all" in findings[0].fix
    # The axis cuts another kernel as well: that is FSDP.
    findings = levels(by_index, P("data"))
    assert found(findings, "gathered") == [("info", ("inputs/0/experts/up",))]
    assert not found(levels(sent, P()), "gathered")


# The peak, and backends that do not tell


def test_the_peak(compiled_step, planned):
    memory = compiled_step().memory_analysis()
    total = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
    total = getattr(memory, "total_allocation_bytes", total) + memory.generated_code_size_in_bytes
    assert not sr.verify(compiled_step(), planned, hbm=total)
    (finding,) = sr.verify(compiled_step(), planned, hbm=total - 1)
    assert (finding.level, finding.kind, finding.bytes) == ("error", "peak", 1)
    assert "argument" in finding.message
    assert "temp" in finding.message
    assert "alias" in finding.message


def test_a_backend_that_tells_nothing(compiled_step, planned, monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    (finding,) = sr.verify(compiled_step(), planned, hbm=2**20)
    assert (finding.level, finding.kind) == ("warning", "peak")
    assert "not known" in finding.message
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda _: None)
    for read in (sr.verify, sr.inspect):
        with pytest.raises(ValueError, match="does not show the text of executables"):
            str(read(compiled_step(), planned))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("query", [("kv", "rep"), "kv"])
def test_heads_that_are_shared_are_no_work_done_twice(query, trains):
    """Two KV heads on four devices. The products of eight query heads are, if kv alone cuts them."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "kv", "rep"))
    shapes = {"wq": (64, 8, 32), "wk": (64, 2, 32)}
    tree = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    prefix = sr.Correction(indivisible="prefix")
    rules = sr.Rules([("wq", (None, query)), ("wk", (None, ("kv", "rep")))], correction=prefix)
    plan = sr.plan(tree, rules, mesh)

    def scores(params, x):
        q, k = (jnp.einsum("td,dhk->thk", x, params[name]) for name in ("wq", "wk"))
        return jnp.einsum("tkgh,skh->kgts", q.reshape(x.shape[0], 2, 4, 32), k)

    def train(params, x):
        gradients = jax.grad(lambda params: jnp.mean(scores(params, x) ** 2))(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)

    step = jax.jit(train, out_shardings=plan.shardings()) if trains else jax.jit(scores)
    x = jax.ShapeDtypeStruct((32, 64), "float32", sharding=NamedSharding(mesh, P("data")))
    findings = sr.verify(step.lower(plan.abstract(), x).compile(), (plan, None))
    told = [one.message for one in findings if one.kind == "batch"]
    assert [message.partition("computed ")[2].partition(":")[0] for message in told] == (
        ["alike by all devices along rep"] if query == "kv" else []
    )
