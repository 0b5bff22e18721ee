"""`solve` on what programs do: dispatch by counted indices, types of Explicit axes, dropout, caches."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.space import STORED, Space
from shardrules._program.solve.spread import Spread
from shardrules.dialects import Dialect

AUTO = (AxisType.Auto, AxisType.Auto)


def shape(*sizes, dtype="float32", **options):
    return jax.ShapeDtypeStruct(sizes, dtype, **options)


def sent(step, **sizes):
    """Return what is sent if all arrays are cut along the first dimension of the last argument."""
    space = Space(step, sizes)
    (name, *_) = space.classes[step._equations.body.inputs[-1]][0]
    return Spread(space, {name: tuple(sizes)}).of_step().sent


# Tokens to rows


def rows():
    return jnp.arange(64)[:, None]


@pytest.mark.parametrize(
    ("function", "is_local"),
    [
        (lambda z, i: z[rows(), i], True),
        (lambda z, i: z.at[rows(), i].add(1.0), True),
        (lambda z, i: jax.grad(lambda z: jnp.sum(z[rows(), i] ** 2))(z), True),
        (lambda z, i: z[jnp.broadcast_to(rows(), i.shape), i], True),
        *((lambda z, i, m=m: z[m(rows()), i], False) for m in (lambda i: i[::-1], lambda i: i // 2, lambda i: i + 1, lambda i: 3 * i)),
    ],
)  # fmt: skip
def test_rows_that_an_iota_indexes_stay_where_they_are_and_others_do_not(function, is_local):
    step = sr.trace(function, shape(64, 128, 32), shape(64, 16, dtype="int32"))
    assert ((("inputs/0", 0), ("inputs/1", 0)) in [row.arrays for row in step.dimensions]) == is_local
    if is_local:
        assert sent(step, fsdp=8) == []


# Types and random bits


def test_a_reshard_onto_auto_axes_is_no_constraint():
    mesh = jax.make_mesh((8,), ("x",))  # Explicit
    step = lambda x: jax.sharding.auto_axes(jnp.tanh, out_sharding=P("x"))(x) + x  # noqa: E731
    traced = sr.trace(jax.jit(step), shape(1024, 1024, sharding=NamedSharding(mesh, P("x"))), on=mesh)
    solution = sr.solve(traced, {"x": 8}, hardware="v5p")
    assert solution._layout.spread.sent == []
    assert all("reshard" not in row.operation for row in solution.activations if row.replaces)


def test_random_bits_are_cut_as_what_reads_them():
    def step(p, x, key):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return jnp.mean(jnp.where(kept, x @ p["w"], 0) ** 2)

    key = jax.eval_shape(lambda: jax.random.key(0))
    traced = sr.trace(step, {"w": shape(512, 512)}, shape(64, 1024, 512), key)
    solution = sr.solve(traced, {"data": 8}, hardware="v5p")
    made = [number for operation, _ in traced._equations.everything() for number in operation.outputs]
    bits = [number for number in made if traced._equations.values[number].shape == (64, 1024, 512)]
    (cuts,) = {solution._layout.spread.target(number) for number in bits}
    assert any(cuts)


def test_what_code_by_device_makes_lies_as_its_specs_say():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    step = sr.trace(lambda x: jnp.cos(mapped(x)), shape(64, 64))
    assert [row.kind for row in Spread(Space(step, {"x": 8}), {}).of_step().sent] == ["all-gather"]  # all else is whole


@pytest.mark.parametrize("kernel", [(512, 1024), (512, 16, 64)])
def test_what_is_in_heads_is_not_cut(kernel):
    def step(w, x):
        q, k = (jnp.tensordot(x, w[name], 1).reshape(8, 1024, 16, 64) for name in "qk")
        q, k = (jnp.concatenate([-a[..., 32:], a[..., :32]], -1) for a in (q, k))
        return jnp.einsum("bthd,bshd->bhts", q, k)

    traced = sr.trace(step, dict.fromkeys("qk", shape(*kernel)), shape(8, 1024, 512))
    space = Space(traced, {"fsdp": 4, "tp": 2})
    assert not {32, 64} & {traced._equations.dims.sizes[name] for name in space.values.keys() - {STORED}}
    if len(kernel) == 3:
        assert "head size" in [row.role for row in traced.dimensions if ("inputs/0/q", 2) in row.arrays]


# State


def attend(w, cache, x, place):
    rows, _ = x.shape
    q = (x @ w["q"]).reshape(rows, 4, 2, 64)
    k, v = ((x @ w[name]).reshape(rows, 1, 4, 64) for name in "kv")
    cache = {name: lax.dynamic_update_slice(cache[name], new, (0, place, 0, 0)) for name, new in (("k", k), ("v", v))}
    chances = jax.nn.softmax(jnp.einsum("bhgd,bshd->bhgs", q, cache["k"]))
    mixed = jnp.einsum("bhgs,bshd->bhgd", chances, cache["v"]).reshape(rows, -1)
    return x + mixed @ w["o"], cache


HEADS = dict.fromkeys("qo", shape(512, 512)) | dict.fromkeys("kv", shape(512, 256))
CACHE = {name: shape(16, 1024, 4, 64) for name in "kv"}


def attend_masked(w, cache, x, place):
    """Keep the caches of some rows, in int8."""
    x, new = attend(w, {name: 0.1 * rows.astype("float32") for name, rows in cache.items()}, x, place)
    new = {name: jnp.round(rows / 0.1).astype("int8") for name, rows in new.items()}
    return x, {name: jnp.where(x[:, 0, None, None, None] > 0, new[name], cache[name]) for name in cache}


@pytest.mark.parametrize("decode", [attend, attend_masked])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_cache_that_is_planned_is_state_and_no_weight(is_first, decode):
    mesh = {"data": 2, "tp": 2}
    weights, cache = (sr.plan(tree, [("", ())], mesh) for tree in (HEADS, CACHE))
    plans = (cache, weights) if is_first else (weights, cache)
    function = (lambda c, w, *rest: decode(w, c, *rest)) if is_first else decode
    step = sr.trace(function, *plans, shape(16, 512), shape(dtype="int32"))
    assert step.plan is weights
    roles = {array: row.role for row in step.dimensions for array in row.arrays}
    named = [roles[f"inputs/{plans.index(cache)}/k", dim] for dim in range(4)]
    assert named == ["batch", "sequence", "KV heads", "head size"]


# Rules and lines


def gelu_step(params, x):
    grads = jax.grad(lambda p: jnp.mean(jax.nn.gelu(x @ p["up"]["kernel"]) @ p["down"]["kernel"]))(params)
    return jax.tree.map(jnp.subtract, params, grads)


KERNELS = {"up": {"kernel": shape(512, 2048)}, "down": {"kernel": shape(2048, 512)}}
DIALECTS = [value for value in vars(sr.dialects).values() if isinstance(value, Dialect)]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_rules_are_in_the_dialect_of_the_step(dialect):
    mesh = AbstractMesh((4, 2), ("fsdp", "tp"), axis_types=AUTO)
    plan = sr.plan(KERNELS, sr.Rules([("", P())], dialect), mesh)
    solution = sr.solve(sr.trace(jax.jit(gelu_step), plan, shape(64, 512)), hardware="v5p")
    again = sr.plan(KERNELS, solution.rules, mesh)
    assert solution.rules.dialect.name == dialect.name
    assert entries(again.specs()) == entries(solution.plan.specs())


def entries(specs):
    """Return the entries of each leaf, which has two dimensions."""
    return [(*spec, None, None)[:2] for spec in jax.tree.leaves(specs)]


def test_rules_of_an_nnx_model_are_in_its_words():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = (nnx.Linear(*s, use_bias=False, rngs=rngs) for s in ((512, 2048), (2048, 512)))

    graph, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    plan = sr.plan(state, sr.Rules([("", P())], sr.dialects.NNX), {"fsdp": 4, "tp": 2})

    def loss(state, x):
        model = nnx.merge(graph, state)
        return jnp.mean(model.down(jax.nn.gelu(model.up(x))))

    solution = sr.solve(sr.trace(jax.jit(jax.grad(loss)), plan, shape(64, 512)), hardware="v5p")
    again = sr.plan(state, solution.rules, plan.mesh)
    assert [*map(str, again.paths)] == ["down/kernel", "up/kernel"]
    assert entries(again.specs()) == entries(solution.plan.specs())


def test_lines_name_the_weight_that_they_are_of():
    mesh = {"fsdp": 4, "tp": 2}
    plan = sr.plan(KERNELS, [("", P(("fsdp", "tp")))], mesh)
    step = sr.trace(jax.jit(gelu_step), plan, shape(2**18, 512))
    rows = sr.solve(step, hardware="v5p").activations
    assert {(row.is_read, row.weight) for row in rows} == {(True, "up/kernel"), (False, "up/kernel")}  # rows are summed
    for row in (row for row in rows if row.is_read):
        assert "kernel = jax.lax.with_sharding_constraint(kernel, P(" in str(row)
        assert f"{row.weight} into dot_general" in str(row)
