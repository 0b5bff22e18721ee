"""Results whose copies differ: sums that are missing in shard_map, and programs that have them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import array, devices

MESH = devices(data=4, tp=2)
KERNEL, ROWS, WHOLE = P(None, "tp"), P("data"), P()


def loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def index(axis: str) -> Any:
    return lax.axis_index(axis).astype("float32")


def noise(w: Any, x: Any, axis: str) -> Any:
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index(axis))
    return w + jax.random.normal(key, w.shape)


def ring(w: Any, x: Any) -> Any:
    """Each device adds the parts of all others, one after another."""
    total, part = x @ w, x @ w
    for _ in range(3):
        part = lax.ppermute(part, "data", [(i, (i + 1) % 4) for i in range(4)])
        total += part
    return total.sum(0) if total.ndim > 1 else total


def own_place(w: Any, x: Any) -> Any:
    """Each device writes its part to its place, which the others have as zeros, and all are summed."""
    rows = x.shape[0]
    whole = jnp.zeros((4 * rows, w.shape[1]))
    whole = lax.dynamic_update_slice(whole, x @ w, (lax.axis_index("data") * rows, 0))
    return lax.psum(whole, "data")


def looped(w: Any, x: Any, *, is_summed: bool) -> Any:
    def body(carry: Any, row: Any) -> Any:
        carry = carry + row @ w
        return (lax.psum(carry, "data") if is_summed else carry), None

    return lax.scan(body, jnp.zeros(w.shape[1]), x)[0]


def chosen(w: Any, x: Any) -> Any:
    """A branch by the number of the device, summed afterwards."""
    part = lax.cond(lax.axis_index("data") == 0, lambda: x @ w, lambda: jnp.zeros((8, w.shape[1])))
    return lax.psum(part, "data")


def halves(w: Any, x: Any, groups: Any = ((0, 1), (2, 3))) -> Any:
    return lax.psum(jax.grad(loss)(w, x), "data", axis_index_groups=groups)


def scattered(w: Any, x: Any) -> Any:
    return lax.psum_scatter(jax.grad(loss)(w, x), "data", scatter_dimension=0, tiled=True)


def sent_on(w: Any, x: Any) -> Any:
    return lax.ppermute(loss(w, x), "data", [(i, (i + 1) % 4) for i in range(4)])


def crossed(w: Any, x: Any) -> Any:
    """Parts change places in every other row of devices before they are summed."""
    pairs = [(i, i ^ (i // 2 % 2)) for i in range(8)]
    return lax.psum(lax.ppermute(w.sum(), ("data", "tp"), pairs), "tp")


DIFFER = {
    # name: (what each device computes, spec of the result, axes that are told)
    "gradient": (jax.grad(loss), KERNEL, "data"),
    "loss": (loss, WHOLE, "data and tp"),
    "summed over one axis of two": (lambda w, x: lax.psum(loss(w, x), "data"), WHOLE, "tp"),
    "a maximum": (lambda w, x: (x @ w).max(0), P("tp"), "data"),
    "in a loop": (partial(looped, is_summed=False), P("tp"), "data"),
    "scattered, and not gathered": (scattered, KERNEL, "data"),
    "a sum of each half": (halves, KERNEL, "data"),
    "sent on once": (sent_on, WHOLE, "data and tp"),
}
ALIKE = {
    "gradient": (lambda w, x: lax.pmean(jax.grad(loss)(w, x), "data"), KERNEL),
    "cut as it is": (lambda w, x: x @ w, P("data", "tp")),
    "loss": (lambda w, x: lax.pmean(loss(w, x), ("data", "tp")), WHOLE),
    "gathered": (lambda w, x: lax.all_gather(x @ w, "data", tiled=True), KERNEL),
    "scattered and gathered": (lambda w, x: lax.all_gather(scattered(w, x), "data", tiled=True), KERNEL),
    "sums of halves, and of these": (
        lambda w, x: lax.psum(halves(w, x), "data", axis_index_groups=[[0, 2], [1, 3]]), KERNEL,
    ),
    "a place along an axis that cuts it": (lambda w, x: w + index("tp"), KERNEL),
    "noise along an axis that cuts it": (partial(noise, axis="tp"), KERNEL),
    "each writes its place": (own_place, KERNEL),
    "in a loop": (partial(looped, is_summed=True), P("tp")),
    "a branch": (chosen, KERNEL),
    "the largest over all": (lambda w, x: lax.pmax((x @ w).max(0), "data"), P("tp")),
    "a sum in another order": (crossed, WHOLE),
}  # fmt: skip


def found(local: Any, out_spec: Any, then: Any = lambda w, out: out) -> list[Any]:
    specs = (KERNEL, ROWS)
    mapped = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=out_spec, check_vma=False)
    args = array(MESH, (64, 32), *KERNEL), array(MESH, (32, 64), *ROWS)
    compiled = jax.jit(lambda w, x: then(w, mapped(w, x))).lower(*args).compile()
    return [one for one in sr.verify(compiled, specs) if one.kind == "differs"]


@pytest.mark.parametrize("name", DIFFER)
def test_copies_that_will_differ(name):
    local, spec, axes = DIFFER[name]
    (finding,) = found(local, spec)
    assert (finding.level, finding.kind) == ("error", "differs")
    assert f"copies along {axes} will differ" in finding.message
    assert "computed from its own part of inputs/" in finding.message


@pytest.mark.parametrize("name", ALIKE)
def test_copies_that_are_alike(name):
    assert found(*ALIKE[name]) == []


def test_an_update_by_a_gradient_that_is_not_summed():
    """The finding names the argument, the line of the product, and the sum."""
    (finding,) = found(jax.grad(loss), KERNEL, then=lambda w, g: w - 1e-3 * g)
    assert "each is computed from its own part of inputs/1, and nothing" in finding.message
    assert "test_differing.py:" in finding.fix
    assert "sum it over data at" in finding.fix


def test_random_keys_that_are_folded_with_the_device_s_number():
    """On purpose, perhaps: each copy has its own noise."""
    (finding,) = found(partial(noise, axis="data"), KERNEL)
    assert finding.level == "info"
    assert "by the number of the device" in finding.message
