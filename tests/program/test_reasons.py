"""Reasons that programs by hand show; `verify/test_verify_steps.py` has those of whole steps."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.causes import REASONS
from tests.support import compiled as support
from tests.support.compiled import devices

MESH = devices(data=2, tp=4)
array, constrained = partial(support.array, MESH), partial(support.constrained, MESH)


def reasons(compiled, inputs):
    return {row.kind: row.reason for row in sr.inspect(compiled, inputs).collectives}


def test_a_cache_that_is_updated_and_then_gathered_is_told():
    """The gathered copy is not what is returned."""

    def decode(kernel, cache, x, place):
        cache = constrained(jax.lax.dynamic_update_slice(cache, (x @ kernel)[:, None], (0, place, 0)), *cut)
        whole = constrained(cache, "data")
        weights = jax.nn.softmax(jnp.einsum("bd,btd->bt", x, whole))
        return cache, jnp.einsum("bt,btd->bd", weights, whole)

    cut = ("data", None, "tp")
    args = (array((256, 256), None, "tp"), array((8, 512, 256), *cut), array((8, 256), "data"), 3)
    step = jax.jit(decode, donate_argnums=1, out_shardings=(args[1].sharding, None))
    compiled, inputs = step.lower(*args).compile(), (P(None, "tp"), P(*cut), None, None)
    assert reasons(compiled, inputs)["all-gather"] == REASONS["cache"].text
    assert any(REASONS["cache"].text in finding.message for finding in sr.verify(compiled, inputs, large=2**16))


def test_pages_of_a_cache_that_other_devices_have_are_told():
    def serve(pages, new, table):
        pages = constrained(jax.lax.dynamic_update_slice(pages, new, (3, 0)), "tp")
        return pages, constrained(jnp.tanh(pages[table]).sum(1), "data")

    pages, table = array((64, 1024), "tp"), jax.ShapeDtypeStruct((32, 8), "int32")
    step = jax.jit(serve, donate_argnums=0, out_shardings=(pages.sharding, None))
    compiled = step.lower(pages, array((1, 1024)), table).compile()
    assert REASONS["cache"].text in reasons(compiled, (P("tp"), None, None)).values()


def gradient_step(loss, params, batch):
    def step(params, batch):
        gradients = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return jax.jit(step, donate_argnums=0).lower(params, batch).compile()


def test_layers_that_the_step_stacks_are_no_micro_batches():
    def loss(params, x):
        stack = jnp.stack([params[f"layer{i}"] for i in range(4)])
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2).mean()

    params = {f"layer{i}": array((256, 256)) for i in range(4)}
    compiled = gradient_step(loss, params, array((64, 256), "data"))
    assert reasons(compiled, (P(), None))["all-reduce"] == REASONS["gradient"].text


def test_micro_batches_that_sum_in_each_trip_are_told():
    def step(kernel, x):
        def micro(total, rows):
            gradient = jax.grad(lambda w: (jnp.tanh(rows @ w) ** 2).mean())(kernel)
            return constrained(total + gradient), None

        rows = constrained(x.reshape(4, 64, 256), None, "data")
        return kernel - jax.lax.scan(micro, jnp.zeros_like(kernel), rows)[0]

    args = (array((256, 256)), array((256, 256), "data"))
    compiled = jax.jit(step, donate_argnums=0).lower(*args).compile()
    assert REASONS["microbatch"].text in reasons(compiled, (P(), None)).values()


def on_tp(function, specs, out):
    return jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=out, check_vma=False)


def own_part_of_a_sum(kernel, x):
    def local(x):
        place = jax.lax.axis_index("tp")
        spread = jnp.zeros((4, *x.shape)).at[(place + 1) % 4].set(x)
        return jax.lax.psum(spread, "tp")[place]

    return on_tp(local, P("tp"), P("tp"))(x @ kernel)


def summed_in_each_trip(kernel, x):
    def local(x):
        is_last = jax.lax.axis_index("tp") == 3

        def trip(total, row):
            return jax.lax.psum(jnp.where(is_last, total + jnp.tanh(row), 0), "tp"), None

        return jax.lax.scan(trip, jnp.zeros_like(x[0]), x)[0]

    return on_tp(local, P(None, "tp"), P())(jnp.reshape(x, (8, 32, 256))) @ kernel


def summed_for_the_next_trip(kernel, x):
    def local(x):
        def trip(state, stage):
            is_its_own = jax.lax.axis_index("tp") == stage
            return jax.lax.psum(jnp.where(is_its_own, jnp.tanh(state + stage), 0), "tp"), None

        return jax.lax.scan(trip, x, jnp.arange(4))[0]

    return on_tp(local, P(), P())(x) @ kernel


def largest_of_two(kernel, x):
    def local(kernel):
        return jax.lax.all_gather(kernel, "data").max(0)

    return jax.shard_map(local, mesh=MESH, in_specs=P("data"), out_specs=P(), check_vma=False)(kernel)


def penalty(kernel, x):
    value, gradient = jax.value_and_grad(lambda kernel: (constrained(kernel) ** 2).sum())(kernel)
    return kernel - 0.1 * gradient, value + (x**2).sum()


def products_in_another_order(kernel, x):
    return constrained(x.T @ jnp.tanh(x)) @ kernel[:, :16]


def a_sum_that_is_returned(kernel, x):
    total = constrained(x.T @ jnp.tanh(x))
    return total, total @ kernel[:, :16]


def kernel_cut_by_its_rows(kernel, x):
    hidden = constrained(jnp.tanh(x @ kernel[:, :256].T), "data", "tp")
    return constrained(hidden @ kernel, "data")


def products_in_the_only_order(kernel, x):
    return jnp.tanh(constrained(jnp.sin(x).T @ jnp.tanh(x))) @ kernel[:, :16]


# A function of a kernel, 256 x 1024, and of x, 256 x 256, their specs, and which collective has the reason.
OF_FUNCTIONS = [
    ("sliced", own_part_of_a_sum, P(), P("tp"), "all-reduce"),
    ("sliced", penalty, P("tp"), P("data"), "all-gather"),
    ("trips", summed_in_each_trip, P(), P(), "all-reduce"),
    ("called", summed_for_the_next_trip, P(), P(), "all-reduce"),
    ("gather", largest_of_two, P("data"), P(), "all-gather"),
    ("early", products_in_another_order, P(), P("data"), "all-reduce"),
    ("partial", products_in_the_only_order, P(), P("data"), "all-reduce"),
    ("batch", a_sum_that_is_returned, P(), P("data"), "all-reduce"),
    ("turned", kernel_cut_by_its_rows, P("tp"), P("data"), "all-reduce"),
]


@pytest.mark.parametrize(("reason", "function", "kernel", "x", "kind"), OF_FUNCTIONS)
def test_what_is_sent_without_need_is_told(reason, function, kernel, x, kind):
    arguments = array((256, 1024), *kernel), array((256, 256), *x)
    compiled = jax.jit(function).lower(*arguments).compile()
    plan = sr.plan(arguments[0], [("", kernel)], MESH)
    assert reasons(compiled, (plan, x))[kind] == REASONS[reason].text
