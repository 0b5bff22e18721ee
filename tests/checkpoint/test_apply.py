"""`Rename(apply=)`: functions of the arrays, traced and run on devices, against numpy."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_load import bits, counted, mesh_of  # noqa: F401
from tests.checkpoint.test_renames import numbers, save  # noqa: F401

LAYER = r"layers\.(?P<layer>\d+)\."


def plus_one(x):
    return x + 1


def by_heads(x):
    return x * x.shape[-1] ** -0.5


def unpacked(codes, scales):
    """4 bits each, the low ones first, times a scale per row."""
    values = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
    return (values.astype("float32") - 8) * scales[..., None]


@pytest.fixture
def arrays():
    return {
        **{f"layers.{i}.norm": numbers(8, start=i) for i in range(3)},
        **{f"layers.{i}.q": numbers(16, 8, start=i) for i in range(3)},
        **{f"layers.{i}.up.codes": numbers(8, 16, dtype="uint8", start=i) for i in range(3)},
        **{f"layers.{i}.up.scales": numbers(8, start=i + 1) for i in range(3)},
        "head": numbers(8, 8),
    }


RENAMES = [
    sr.Rename(LAYER + "norm", "norm", "a -> layer a", apply=plus_one, dtype="bfloat16"),
    sr.Rename(LAYER + "q", "q", "(heads dim) in -> in layer heads dim", sizes={"dim": 4}, apply=by_heads),
    sr.Rename(LAYER + r"up\.codes", "up", "out in -> layer out in", apply=unpacked),
    sr.Rename(LAYER + r"up\.scales", "up", "out -> layer out", argument="scales"),
]  # fmt: skip


def expected(arrays):
    def stack(name):
        return np.stack([arrays[f"layers.{i}.{name}"] for i in range(3)])

    codes = stack("up.codes")
    values = np.stack([codes & 15, codes >> 4], -1).reshape(3, 8, 32).astype("float32") - 8
    return {
        "norm": (stack("norm") + 1).astype("bfloat16"),
        "q": stack("q").reshape(3, 4, 4, 8).transpose(3, 0, 1, 2) * np.float32(0.5),
        "up": values * stack("up.scales")[..., None],
        "head": arrays["head"],
    }


@pytest.mark.parametrize("most", [None, 8192])
@pytest.mark.parametrize("spec", [P(), P(None, None, "tp"), P("fsdp")])
def test_functions_of_arrays(save, counted, arrays, spec, most):  # noqa: F811
    mesh = mesh_of((2, 4))
    rules = [("^(norm|up|head)$", P()), ("", spec)]
    loaded = sr.load(save(arrays), rules, mesh, renames=RENAMES, max_bytes_in_flight=most)
    moved = sr.reshard(
        {name: jnp.asarray(array) for name, array in arrays.items()}, rules, mesh, renames=RENAMES
    )
    for name, array in expected(arrays).items():
        for made in (loaded[name], moved[name]):
            assert bits(made) == bits(np.ascontiguousarray(array))
            assert made.sharding.is_equivalent_to(
                jax.NamedSharding(mesh, spec if name == "q" else P()), made.ndim
            )
    if most is None:  # a small bound cuts units; q is read by rows, and as what is between others
        total = sum(array.nbytes for array in arrays.values())
        between = sum(array.nbytes for name, array in arrays.items() if name.endswith(".q"))
        assert total <= sum(counted) <= total + between


def test_the_dtype_is_that_of_the_result(save, arrays):  # noqa: F811
    path = save(arrays)
    loaded = sr.load(path, P(), mesh_of(), renames=RENAMES, dtype="float16")
    assert {name: str(array.dtype) for name, array in loaded.items()} == {
        "norm": "bfloat16", "q": "float16", "up": "float16", "head": "float16",
    }  # fmt: skip
    tree = {name: jax.ShapeDtypeStruct(array.shape, "float32") for name, array in loaded.items()}
    assert sr.load(path, P(), mesh_of(), renames=RENAMES, tree=tree)["norm"].dtype == "float32"
    tree["up"] = jax.ShapeDtypeStruct((3, 8, 16), "float32")
    with pytest.raises(
        sr.FileError,
        match=r"up: another shape: the tree wants \[3, 8, 16\], and the array has \[3, 8, 32\]",
    ):
        sr.load(path, P(), mesh_of(), renames=RENAMES, tree=tree)


def test_progress_counts_what_is_read(save, arrays):  # noqa: F811
    calls = []
    sr.load(
        save(arrays), P(), mesh_of(), renames=RENAMES, progress=lambda *call: calls.append(call)
    )
    assert calls[-1] == (sum(array.nbytes for array in arrays.values()),) * 2


def fails(x):
    raise RuntimeError("no such thing")


def bad(x, y):
    return x


X = sr.Rename("^x$", "z", apply=plus_one)
MISFITS = {
    "fails": ([sr.Rename("^x$", "z", apply=fails)], "z: apply of its Rename fails: RuntimeError: no such thing"),
    "an argument is missing": ([sr.Rename("^x$", "z", apply=bad)], "z: apply of its Rename fails: TypeError: bad() missing"),
    "no array": ([sr.Rename("^x$", "z", apply=lambda x: [x])], "z: apply of its Rename gives list, and no array"),
    "an argument of nothing": ([sr.Rename("^x$", "z", argument="y")], "z: its Renames have 0 functions in apply, and the arguments 'y'"),
    "no function": ([sr.Rename("^x$", "z"), sr.Rename("^y$", "z", argument="y")], "z: its Renames have 0 functions in apply"),
    "two functions": ([X, sr.Rename("^y$", "z", apply=by_heads)], "z: several arrays would become it: 'x', 'y'"),
    "to integers": ([sr.Rename("^x$", "z", apply=plus_one, dtype="int8")], "z: the result of apply is float32, and its Rename has dtype='int8'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit(save, case):  # noqa: F811
    renames, message = MISFITS[case]
    with pytest.raises(sr.FileError) as info:
        sr.load(save({"x": numbers(8), "y": numbers(8)}), P(), mesh_of(), renames=renames)
    assert message in str(info.value)


def test_a_record_that_contradicts_itself():
    with pytest.raises(TypeError, match=r"apply is 3 \(an int\); it must be a function of arrays"):
        sr.Rename("x", "y", apply=3)
    for argument in ("a b", "1"):
        with pytest.raises(
            ValueError, match=re.escape(f"argument is {argument!r}; it must be a name")
        ):
            sr.Rename("x", "y", argument=argument)
    with pytest.raises(ValueError, match="in a record without apply"):
        sr.Rename("x", "y", argument="a", apply=plus_one)
