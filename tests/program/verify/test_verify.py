"""`verify`: for each finding a program that has the fault, and one that has not."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import array as array_on
from tests.support.compiled import constrained, devices

RULES = [("layers/w", (None, "data", "model")), ("head", ("model", None))]
PARAMS = {
    "layers": {"w": jax.ShapeDtypeStruct((4, 64, 64), "float32")},
    "head": jax.ShapeDtypeStruct((64, 16), "float32"),
}
STATE = {"count": jax.ShapeDtypeStruct((), "int32"), "mu": PARAMS}


MESH = devices(data=2, model=4)
WHOLE = NamedSharding(MESH, P())
PLAN = sr.plan(PARAMS, RULES, MESH)
STATE_PLAN = PLAN.for_optimizer(STATE)
PLANNED = PLAN, STATE_PLAN, None


def array(*spec, dims=(16, 64), dtype="float32"):
    return array_on(MESH, dims, *spec, dtype=dtype)


BATCH = array("data")


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"]["w"])
    return jnp.mean((x @ params["head"]) ** 2)


def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    mu = jax.tree.map(lambda m, g: m * 0.9 + g, state["mu"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, mu)
    return params, {"count": state["count"] + 1, "mu": mu}, value


@functools.cache
def compiled_step(donate=(0, 1), replicated=False):
    """The step; its new parameters are replicated or as planned."""
    jitted = jax.jit(step, donate_argnums=donate, out_shardings=(WHOLE, None, None) if replicated else None)
    return jitted.lower(PLAN.abstract(), STATE_PLAN.abstract(), BATCH).compile()


def of_kind(findings, kind):
    """The first finding of a kind."""
    return next(finding for finding in findings if finding.kind == kind)


def found(findings, kind):
    """(level, paths) of the findings of this kind."""
    return [(one.level, one.paths) for one in findings if one.kind == kind]


def test_a_step_that_runs_as_planned():
    assert sr.verify(compiled_step(), PLANNED) == ()
    outputs = (PLAN, STATE_PLAN, None)
    assert sr.verify(compiled_step(), PLANNED, outputs, hbm=2**30) == ()
    sr.verify(compiled_step(), PLANNED, outputs).raise_for("info")


def test_what_compares_nothing_is_a_warning():
    compiled = compiled_step()
    (finding,) = sr.verify(compiled, (None, None, None))
    assert (finding.level, finding.kind) == ("warning", "input")
    assert finding.message == "nothing is compared: no argument and no result is planned"
    assert not sr.verify(compiled, (PLAN, None, None))
    assert not sr.verify(compiled, (None, None, None), (PLAN, STATE_PLAN, None))
    assert not sr.verify(compiled, (None, None, None), budget={"total": "1 GB"})


def test_arrays_that_the_function_closes_over_are_told():
    def told(array):
        compiled = jax.jit(lambda x: x @ array).lower(BATCH).compile()
        findings = sr.verify(compiled, (P("data"),), large=2**16)
        return [one.bytes for one in findings if "closes over" in one.message]

    assert told(np.random.default_rng(0).random((64, 256), "float32")) == [64 * 256 * 4]
    assert told(np.random.default_rng(0).random((64, 255), "float32")) == []


# Inputs and outputs


def compiled_on(function, *specs):
    """The function of float32 arrays of these specs, compiled."""
    return jax.jit(function).lower(*(array(*spec) for spec in specs)).compile()


def test_an_input_that_is_not_as_planned():
    compiled = compiled_on(lambda x, y: x + y, P("data"), P("model"))
    (finding,) = sr.verify(compiled, (P("data"), P("data", "model")))
    assert (finding.level, finding.kind, finding.paths) == ("error", "input", ("inputs/1",))
    assert (finding.leaves, finding.bytes) == (1, 4 * 64 * 4)
    assert "planned P('data', 'model'), but the executable takes P('model') with 1.02 kB" in finding.message
    assert "on each device instead of 512 B" in finding.message
    assert "(plan.abstract()), or give jax.jit in_shardings=plan.shardings()" in finding.fix
    assert not sr.verify(compiled, (P("data"), P("model")))
    compiled = compiled_on(lambda x: x * 2, P(None, "data"))
    (finding,) = sr.verify(compiled, (P("data"),))
    assert "takes P(None, 'data') with 2.05 kB on each device: it refuses" in finding.message  # said once
    with pytest.raises(ValueError, match="sharding"):  # the oracle: JAX itself
        compiled(jax.device_put(np.ones((16, 64), "float32"), NamedSharding(MESH, P("data"))))


@pytest.mark.parametrize("spec", [P("data"), P("data", None), P(("data",), None)], ids=["short", "long", "tuple"])
def test_specs_that_mean_the_same_are_the_same(spec):
    compiled = compiled_on(lambda x: x * 2, P("data"))
    assert not sr.verify(compiled, (spec,), spec)
    assert not sr.verify(compiled, (NamedSharding(MESH, spec),), NamedSharding(MESH, spec))
    other = Mesh(MESH.devices[::-1], MESH.axis_names)
    (finding,) = sr.verify(compiled, (NamedSharding(other, P("data")),))
    assert finding.kind == "input"
    assert "on the devices in another order" in finding.message


def test_shardings_that_xla_has_chosen_are_compared_as_well():
    free = jax.ShapeDtypeStruct((16, 64), "float32")
    compiled = jax.jit(lambda x: constrained(MESH, x * 2, "data", "model")).lower(free).compile()
    assert not sr.verify(compiled, (P("data", "model"),), P("data", "model"))
    assert found(sr.verify(compiled, (P("model"),)), "input") == [("error", ("inputs/0",))]


def test_an_output_that_is_not_as_planned():
    findings = sr.verify(compiled_step(replicated=True), PLANNED, (PLAN, None, None))
    assert found(findings, "output") == [("error", ("outputs/0/layers/w",)), ("error", ("outputs/0/head",))]
    finding = of_kind(findings, "output")
    assert finding.bytes == 4 * 64 * 64 * 4
    assert "planned P(None, 'data', 'model'), but the executable returns P()" in finding.message
    assert "out_shardings" in finding.fix
    assert not found(sr.verify(compiled_step(replicated=True), PLANNED, (None, None, P())), "output")


def test_arguments_that_jit_has_dropped_are_said_to_be():
    compiled = jax.jit(lambda p, x: p["head"] * 2).lower(PLAN.abstract(), BATCH).compile()
    (finding,) = sr.verify(compiled, (PLAN, None))
    assert (finding.level, finding.kind, finding.paths) == ("info", "input", ("inputs/0/layers/w",))
    assert "not used" in finding.message
    assert "keep_unused" in finding.fix


# What plans may be


def test_all_ways_to_plan_say_the_same():
    swapped = [("layers/w", (None, "model", "data")), ("head", ("data", None))]
    for rules, count in ((RULES, 0), (swapped, 2)):
        plan = sr.plan(PARAMS, rules, MESH)
        abstract = sr.plan(PARAMS, rules, {"data": 2, "model": 4})
        locked = sr.Plan.from_lock(plan.lock())
        for way in (plan, abstract, plan.specs(), plan.shardings(), abstract.shardings(), locked):
            findings = sr.verify(compiled_step(), (way, None, None))
            assert len(found(findings, "input")) == len(findings) == count, way


def test_keyword_arguments():
    compiled = jax.jit(lambda x, *, y, z: x + y + z).lower(BATCH, y=BATCH, z=BATCH).compile()
    assert not sr.verify(compiled, (P("data"),))
    assert not sr.verify(compiled, (P("data"), {"y": P("data")}))
    findings = sr.verify(compiled, (P("data"), {"z": P("model")}))
    assert found(findings, "input") == [("error", ("inputs/z",))]


def test_a_program_of_one_device():
    mesh = devices(data=1)
    tree = {"w": jax.ShapeDtypeStruct((8, 8), "float32")}
    compiled = jax.jit(lambda t: t["w"] * 2).lower(tree).compile()
    assert not sr.verify(compiled, (sr.plan(tree, [("w", "data")], mesh),))
    with pytest.raises(ValueError, match=r"inputs\[0\].*none of its inputs and outputs has a mesh"):
        sr.verify(compiled, (sr.plan(tree, [("w", "data")], {"data": 1}),))


LONG = P("data", None, None, None)
MISFITS = {
    "none": (None, TypeError, "inputs is None.*a tuple with an entry for each positional argument"),
    "one": ((None,), ValueError, "inputs has 1 entry;.*3 positional arguments"),
    "four": ((None,) * 4, ValueError, "inputs has 4 entries.*3 positional arguments"),
    "a name": ((None, None, "data"), TypeError, r"inputs\[2\] is 'data'.*a Plan, a tree"),
    "less": (({"layers": None}, None, None), ValueError, r"inputs\[0\]: the structure.*'layers'.*'head'"),
    "a number": (({"head": 1, "layers": None}, None, None), TypeError, r"inputs\[0\]\['head'\] is 1"),
    "a pair": (({"head": None, "layers": {"w": (P(), P())}}, None, None), ValueError,
               r"inputs\[0\]\['layers'\]\['w'\]\[0\]: the structure is not that of the inputs"),
    "long": ((LONG, None, None), ValueError, r"inputs/0/(head|layers/w): P\('data', None, None, None\) is planned for the"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_an_error(name):
    inputs, error, message = MISFITS[name]
    with pytest.raises(error, match=message):
        sr.verify(compiled_step(), inputs)


HEAD = PARAMS["head"]
OTHER_PLANS = {
    "less": ({"head": HEAD}, None, r"inputs\[0\]: the plan is for another tree.*layers/w"),
    "more": ({**PARAMS, "more": HEAD}, None, r"inputs\[0\].*has the leaf more"),
    "renamed": ({"head": HEAD, "layer": PARAMS["layers"]}, None, "lacks the leaf layers/w; near it: layer/w"),
    "a shape": ({**PARAMS, "head": jax.ShapeDtypeStruct((32, 16), "float32")}, None,
                r"head is planned as \(32, 16\), and there is \(64, 16\)"),
    "a mesh": (PARAMS, {"data": 8}, r"for the mesh data=8, .*data=2,model=4.*on_mesh"),
    "sizes": (PARAMS, {"data": 4, "model": 2}, r"for the mesh data=4,model=2, .*data=2,model=4"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_PLANS)
def test_a_plan_that_does_not_fit_is_an_error(name):
    tree, on, message = OTHER_PLANS[name]
    with pytest.raises(ValueError, match=message):
        sr.verify(compiled_step(), (sr.plan(tree, [(".*", ())], on or MESH), None, None))


def test_a_plan_without_rules_and_one_of_a_tree_for_one_array():
    with pytest.raises(ValueError, match="unmatched"):
        sr.verify(compiled_step(), (sr.plan(PARAMS, [], MESH), None, None))
    compiled = jax.jit(lambda params, x: loss(params, x)).lower(PLAN.abstract(), BATCH).compile()
    with pytest.raises(ValueError, match="outputs: the plan .* lacks the leaf '' of an array that is in no tree: give"):
        sr.verify(compiled, (PLAN, None), PLAN)
    with pytest.raises(ValueError, match=r"inputs\[1\]: the plan .* lacks the leaf '' of an array"):
        sr.verify(compiled, (PLAN, PLAN))


def test_what_is_not_compiled_is_an_error():
    jitted = jax.jit(lambda x: x)
    of_another_library = SimpleNamespace(compiled=compiled_step())  # which may flatten arguments in its way
    for given in (None, jitted, jitted.lower(np.ones(3)), of_another_library):
        with pytest.raises(TypeError, match=r"compiled is .*jax.jit\(f\).lower\(...\).compile\(\)"):
            sr.verify(given, (PLAN,))


# States


def test_a_donated_state_that_comes_out_otherwise():
    findings = sr.verify(compiled_step(replicated=True), PLANNED)
    assert found(findings, "fixed-point") == [("error", ("inputs/0/layers/w",)), ("error", ("inputs/0/head",))]
    finding = of_kind(findings, "fixed-point")
    assert finding.bytes == 4 * 32 * 16 * 4
    assert "of a donated state: in as P(None, 'data', 'model'), out as P(): the next step compiles" in finding.message
    assert "out_shardings" in finding.fix
    with pytest.raises(sr.FindingsError, match="fixed-point"):
        findings.raise_for("error")


def test_a_likely_state_that_comes_out_otherwise_is_a_warning():
    compiled = compiled_step((), replicated=True)
    levels = {level for level, _ in found(sr.verify(compiled, PLANNED), "fixed-point")}
    assert levels == {"warning"}
    findings = sr.verify(compiled, PLANNED, (PLAN, None, None))
    assert {level for level, _ in found(findings, "fixed-point")} == {"error"}
    assert any("the same is planned on both sides" in one.message for one in findings)


@pytest.mark.parametrize("replicated", [False, True])
def test_jit_compiles_again_where_it_is_found(replicated):
    """The oracle: the function's own cache."""
    out = (WHOLE, None) if replicated else None

    def descend(params, x):
        return jax.tree.map(lambda p: p * 0.9, params), jnp.mean(x)

    jitted = jax.jit(descend, out_shardings=out, donate_argnums=0)
    params = jax.device_put(jax.tree.map(lambda s: np.ones(s.shape, s.dtype), PARAMS), PLAN.shardings())
    x = jax.device_put(np.ones((16, 64), "float32"), NamedSharding(MESH, P("data")))
    compiled = jitted.lower(params, x).compile()
    for _ in range(3):
        params, _ = jitted(params, x)
    assert jitted._cache_size() == 1 + replicated
    assert bool(found(sr.verify(compiled, (PLAN, None)), "fixed-point")) == replicated


def test_gradients_are_no_certain_state():
    def gradients(params, x):
        return jax.tree.map(lambda p: p * jnp.mean(x), params)

    compiled = {
        spec: jax.jit(gradients, out_shardings=out).lower(PLAN.abstract(), BATCH).compile()
        for spec, out in {"P()": WHOLE, "planned": PLAN.shardings()}.items()
    }
    findings = sr.verify(compiled["P()"], (PLAN, None))
    assert {level for level, _ in found(findings, "fixed-point")} == {"warning"}
    assert "if that is passed back" in findings[-1].message
    assert not sr.verify(compiled["planned"], (PLAN, None))


def test_a_state_may_be_the_whole_result_and_a_keyword():
    def function(x, *, params):
        return jax.tree.map(lambda p: p + jnp.mean(x), params)

    jitted = jax.jit(function, donate_argnames="params", out_shardings=WHOLE)
    findings = sr.verify(jitted.lower(BATCH, params=PLAN.abstract()).compile(), (None,))
    paths = [paths for level, paths in found(findings, "fixed-point") if level == "error"]
    assert paths == [("inputs/params/layers/w",), ("inputs/params/head",)]


def test_a_state_that_comes_out_in_another_dtype():
    def function(t):
        return {"w": t["w"].astype("bfloat16"), "v": t["v"] * 2}

    compiled = jax.jit(function, donate_argnums=0).lower({"w": BATCH, "v": BATCH}).compile()
    findings = sr.verify(compiled, (None,))
    assert found(findings, "fixed-point") == [("error", ("inputs/0/w",))]
    assert "in as float32, out as bfloat16" in of_kind(findings, "fixed-point").message
    other = jax.jit(lambda t: {"w": t["w"].astype("bfloat16")[:8]}, donate_argnums=0).lower({"w": BATCH}).compile()
    assert not found(sr.verify(other, (None,)), "fixed-point")  # of another shape, it is no state


def test_a_large_result_that_is_no_state_is_told_and_a_state_is_no_batch():
    jitted = jax.jit(lambda state, x: (state + 1, x * 2), donate_argnums=0)
    compiled = jitted.lower(array("model"), array("data", dims=(64, 64))).compile()
    planned = (P("model"), None), (P("model"), None)
    (finding,) = sr.verify(compiled, *planned, large=8192)
    assert (finding.level, finding.kind, finding.paths) == ("info", "output", ("outputs/1",))
    assert sr.inspect(compiled, *planned).batch_axes == {"data"}


def test_of_alike_arguments_that_at_the_same_place_is_the_state():
    def function(old, new):
        return jax.tree.map(jnp.sin, old), jax.tree.map(jnp.cos, new)

    jitted = jax.jit(function, donate_argnums=(0, 1))
    compiled = jitted.lower({"w": array("data")}, {"w": array("model")}).compile()
    assert not found(sr.verify(compiled, (None, None)), "fixed-point")


def test_a_pair_of_plans_on_both_sides_is_a_state():
    def of_pair(pair, x):
        *pair, _ = step(*pair, x)
        return tuple(pair)

    compiled = jax.jit(of_pair).lower((PLAN.abstract(), STATE_PLAN.abstract()), BATCH).compile()
    planned = ((PLAN, STATE_PLAN), None), (PLAN, STATE_PLAN)
    (finding,) = sr.verify(compiled, *planned)
    assert "the same is planned on both sides" in finding.message
    assert sr.inspect(compiled, *planned).batch_axes == {"data"}  # the axes of the model cut no BATCH


# Donation


def test_a_small_state_that_comes_back_is_info():
    (finding,) = sr.verify(compiled_step(()), PLANNED, (PLAN, STATE_PLAN, None))
    assert (finding.level, finding.kind) == ("info", "donation")
    assert "donate_argnums=(0, 1)" in finding.fix
    assert not sr.verify(compiled_step(()), PLANNED)  # that they are states is a guess


DONATED = {
    # name: (function, donated, level, path, bytes, fragment); y is small and replicated
    "a state": (lambda x, y: x * 2, (0,), "error", "inputs/0", 8 * 64 * 4, "no output takes their memory: the old"),
    "no state": (lambda x, y: x.sum(), (0,), "warning", "inputs/0", 8 * 64 * 4, "none is like them"),
    "behind one that is dropped": (lambda x, y, z: (z * 2, y.sum()), (0, 1, 2), "warning", "inputs/1", 4 * 64, ""),
}


@pytest.mark.parametrize("name", DONATED)
def test_what_is_donated_and_not_taken(name):
    function, donated, level, path, size, fragment = DONATED[name]
    is_state = name == "a state"
    jitted = jax.jit(function, donate_argnums=donated, out_shardings=WHOLE if is_state else None)
    args = [array("data"), array(dims=(64,)), array("data")][: len(donated) if len(donated) > 1 else 2]
    findings = sr.verify(jitted.lower(*args).compile(), (None,) * len(args))
    assert found(findings, "donation") == [(level, (path,))]
    finding = of_kind(findings, "donation")
    assert (finding.bytes, fragment in finding.message) == (size, True)


# Memory kinds


def test_memory_kinds():
    tree = {"w": jax.ShapeDtypeStruct((16, 64), "float32")}
    on_host, on_device, either = (
        sr.plan(tree, [("w", sr.RuleSpec(("data",), memory_kind=kind))], MESH)
        for kind in ("pinned_host", "device", None)
    )

    def function(t):
        return {"w": jax.device_put(t["w"], either.shardings()["w"]) * 2}

    for lowered_for, other in ((on_device, on_host), (on_host, on_device)):
        compiled = jax.jit(function).lower(lowered_for.abstract()).compile()
        findings = sr.verify(compiled, (other,))
        assert found(findings, "memory-kind") == [("error", ("inputs/0/w",))]
        assert of_kind(findings, "memory-kind").bytes == 8 * 64 * 4
        words = ("pinned_host", "device") if other is on_host else ("device", "pinned_host")
        message = of_kind(findings, "memory-kind").message
        assert "planned in {} memory, but the executable takes them in {} memory".format(*words) in message
        for plan in (lowered_for, either):
            assert not found(sr.verify(compiled, (plan,)), "memory-kind")


# Gathers


def test_layers_that_are_gathered_one_at_a_time_are_info():
    findings = sr.verify(compiled_step(), PLANNED, large=64 * 16 * 4)
    assert found(findings, "gathered") == [("info", ("inputs/0/layers/w",))]
    assert findings[0].bytes == 64 * 16 * 4
    assert "gathered over data" in findings[0].message
    assert "a slice at a time" in findings[0].message
    assert not sr.verify(compiled_step(), PLANNED, large=64 * 16 * 4 + 1)
    assert not found(sr.verify(compiled_step(), (None, None, None), large=1), "gathered")


def test_layers_that_are_gathered_before_their_loop():
    def function(params, x):
        whole = jax.lax.with_sharding_constraint(params["layers"]["w"], WHOLE)
        return loss({**params, "layers": {"w": whole}}, x)

    # With rows on all devices: otherwise each takes its part of the layers again.
    compiled = jax.jit(function).lower(PLAN.abstract(), array(("data", "model"))).compile()
    findings = sr.verify(compiled, (PLAN, None), large=5000)
    assert found(findings, "gathered") == [("warning", ("inputs/0/layers/w",))]
    assert findings[0].bytes == 4 * 64 * 64 * 4
    assert "gathered over data, model to 65.5 kB" in findings[0].message
    assert "before a loop" in findings[0].message


def test_weights_that_are_gathered_over_an_axis_that_cuts_nothing_else():
    step = jax.jit(lambda w, x: x @ constrained(MESH, w))
    for spec, level in ((P("model"), "warning"), (P("data"), "info")):
        compiled = step.lower(array(*spec, dims=(64, 64)), array("data")).compile()
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
def test_quantized_weights_that_are_gathered_after_they_are_scaled(dtype, rows, is_wide):
    def product(w, scale, x):
        return x @ (w.astype(x.dtype) if scale is None else dequantized(w, scale))

    def gathered_first(w, scale, x):
        return product(constrained(MESH, w), scale, x)

    w, x = array("data", dims=(64, 256), dtype=dtype), array("data", dims=(512, 64))
    scale = rows and array(dims=(rows, 256))
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


def test_experts_that_are_gathered():
    def by_index(params, chosen, x):
        up = constrained(MESH, params["experts"]["up"])
        return jnp.einsum("td,tdh->th", x, up[chosen]) @ params["head"]

    def sent(params, chosen, x):
        chosen = jax.nn.one_hot(chosen, 8)
        inbox = constrained(MESH, jnp.einsum("te,td->etd", chosen, x), "data")
        outbox = jnp.einsum("etd,edh->eth", inbox, params["experts"]["up"])
        return jnp.einsum("te,eth->th", chosen, outbox) @ params["head"]

    def levels(function, spec_of_head):
        rules = [("experts", P("data")), ("head", spec_of_head)]
        kernels = {"up": jax.ShapeDtypeStruct((8, 16, 16), "float32")}
        tree = {"experts": kernels, "head": jax.ShapeDtypeStruct((16, 16), "float32")}
        plan = sr.plan(tree, rules, MESH)
        tokens, x = array("data", dims=(512,), dtype="int32"), array("data", dims=(512, 16))
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


def test_the_peak():
    peak = sr.inspect(compiled_step(), PLANNED).memory.peak
    assert not sr.verify(compiled_step(), PLANNED, hbm=peak)
    (finding,) = sr.verify(compiled_step(), PLANNED, hbm=peak - 1)
    assert (finding.level, finding.kind, finding.bytes) == ("error", "peak", 1)
    assert all(word in finding.message for word in ("over the memory of", "argument", "temp", "alias"))


def test_a_backend_that_tells_nothing(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    (finding,) = sr.verify(compiled_step(), PLANNED, hbm=2**20)
    assert (finding.level, finding.kind) == ("warning", "peak")
    assert "not known" in finding.message
    assert sr.inspect(compiled_step(), PLANNED).memory is None
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda _: None)
    for read in (sr.verify, sr.inspect):
        with pytest.raises(ValueError, match="does not show the text of executables"):
            str(read(compiled_step(), PLANNED))


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("query", [("kv", "rep"), "kv"])
def test_heads_that_are_shared_are_no_work_done_twice(query, trains):
    """Two KV heads on four devices. The products of eight query heads are, if kv alone cuts them."""
    mesh = devices(data=2, kv=2, rep=2)
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
    findings = sr.verify(step.lower(plan.abstract(), array_on(mesh, (32, 64), "data")).compile(), (plan, None))
    told = [one.message for one in findings if one.kind == "batch"]
    assert [message.partition("computed ")[2].partition(":")[0] for message in told] == (
        ["alike by all devices along rep"] if query == "kv" else []
    )
