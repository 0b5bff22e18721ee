"""Layouts: what numpy makes of whole arrays is loaded, resharded and saved back, on each mesh."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import units
from shardrules._checkpoint.conversion import numpy_dtype
from tests.checkpoint.test_load import bits, mesh_of
from tests.support.files import header_file
from tests.support.slow import some


def numbers(*shape, dtype="float32", start=0):
    return (np.arange(np.prod(shape)) + start).reshape(shape).astype(dtype)


def flat(tree):
    return {
        jax.tree_util.keystr(keys, simple=True, separator="/"): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def one(shape, dims, whole, **more):
    """A case of one array: (arrays, renames, expected)."""
    array = numbers(*shape, start=1)
    return {"x": array}, [sr.Rename("x", "y", dims, **more)], {"y": whole(array)}


def parts(shape, path, dims, whole, **more):
    """A case of an array that is taken apart; `whole` has a function for each path."""
    array = numbers(*shape, start=1)
    expected = {name: make(array) for name, make in whole.items()}
    return {"x": array}, [sr.Rename("x", path, dims, **more)], expected


def stack(names, shape, rename, whole):
    """A case of arrays that become one."""
    arrays = {name: numbers(*shape, start=100 * i + 1) for i, name in enumerate(names)}
    return arrays, [rename], {"y": whole(list(arrays.values()))}


QKV = {
    f"l.{i}.{part}": numbers(n, 8, start=100 * i + n) for i in range(3) for part, n in (("q", 8), ("k", 4), ("v", 4))
}
# Arrays, renames, what numpy makes of them; and whether the renames go back.
CASES = {
    "as it is": (*one((8, 4), None, lambda x: x), True),
    "transposed": (*one((8, 12), "out in -> in out", lambda x: x.T), True),
    "split": (*one((12, 8), "(h d) i -> h d i", lambda x: x.reshape(4, 3, 8), sizes={"d": 3}), True),
    "split and turned": (*one((16, 8), "(h d) i -> i h d", lambda x: x.reshape(4, 4, 8).transpose(2, 0, 1), sizes={"d": 4}), True),
    "joined": (*one((4, 4, 8), "h d i -> i (h d)", lambda x: x.reshape(16, 8).T, sizes={"d": 4}), True),
    "split and joined": (*one((16, 8), "(h d) i -> (d h) i", lambda x: x.reshape(8, 2, 8).transpose(1, 0, 2).reshape(16, 8), sizes={"d": 2}), True),
    "three axes": (*one((64,), "(a b c) -> (c a) b", lambda x: x.reshape(4, 2, 8).transpose(2, 0, 1).reshape(32, 2), sizes={"a": 4, "b": 2}), True),
    "convolution": (*one((8, 4, 2, 2), "o i h w -> h w i o", lambda x: x.transpose(2, 3, 1, 0)), True),
    "a dimension of one": (*one((8, 4), "a b -> a 1 b", lambda x: x[:, None]), True),
    "without a dimension of one": (*one((8, 1, 4), "a 1 b -> b a", lambda x: x[:, 0].T), True),
    "repeated inside": (*one((32, 8), "(kv dim) in -> (kv times dim) in",
        lambda x: np.repeat(x.reshape(4, 8, 8), 2, 0).reshape(64, 8), sizes={"times": 2, "dim": 8}), False),
    "repeated outside": (*one((8, 4), "a b -> times b a", lambda x: np.broadcast_to(x.T, (8, 4, 8)), sizes={"times": 8}), False),
    "padded": (*one((10, 8), "vocab embed -> embed vocab", lambda x: np.pad(x, ((0, 6), (0, 0))).T, resize={"vocab": 16}), False),
    "cropped": (*one((32, 8), "vocab embed -> vocab embed",
        lambda x: np.pad(x[:16], ((0, 0), (0, 8))), resize={"vocab": 16, "embed": 16}), False),
    "experts apart": (*parts((3, 8, 4), "experts/{e}/w", "e out in -> in out",
        {f"experts/{i}/w": lambda x, i=i: x[i].T for i in range(3)}), True),
    "split into parts of several sizes": (*parts((8, 24), "{part:q|k|v}_proj", "in (part out) -> out in",
        {"q_proj": lambda x: x[:, :16].T, "k_proj": lambda x: x[:, 16:20].T, "v_proj": lambda x: x[:, 20:].T},
        sizes={"out": (16, 4, 4)}), True),
    "stacked": (*stack([f"h.{i}.w" for i in range(12)], (8, 4),
        sr.Rename("h.{i}.w", "y", "out in -> i in out"), lambda all: np.stack([x.T for x in all])), True),
    "stacked by words": (*stack(["l.3.w", "l.4.w", "l.5.w"], (8, 4),
        sr.Rename("l.{i:3|4|5}.w", "y", "out in -> out i in"), lambda all: np.stack(all, 1)), True),
    "layers and experts": (*stack([f"l.{i}.e.{e}.w" for i in range(3) for e in range(4)], (8, 4),
        sr.Rename("l.{layer}.e.{expert}.w", "y", "out in -> layer expert in out"),
        lambda all: np.stack([x.T for x in all]).reshape(3, 4, 4, 8)), True),
    "layers of parts of several sizes": (
        QKV, [sr.Rename("l.{i}.{part:q|k|v}", "y", "out in -> i in (part out)", {"out": (8, 4, 4)})],
        {"y": np.stack([np.concatenate([QKV[f"l.{i}.{part}"].T for part in "qkv"], 1) for i in range(3)])}, True),
    "joined by numbers": (*stack([f"p.{i}" for i in range(3)], (8, 16),
        sr.Rename("p.{i}", "y", "out in -> in (i out)", sizes={"out": 8}),
        lambda all: np.concatenate([x.T for x in all], 1)), True),
    "joined in words' order": (*stack(["q_proj", "k_proj", "v_proj"], (8, 16),
        sr.Rename("{part:q|k|v}_proj", "y", "out in -> in (part out)", sizes={"out": 8}),
        lambda all: np.concatenate([x.T for x in all], 1)), True),
}  # fmt: skip
SPECS = [P(), P("fsdp"), P(None, "tp"), P("fsdp", "tp"), P(("tp", "fsdp")), P("tp", "fsdp")]


def rules(spec):
    """Whatever of the spec divides."""
    return sr.Rules([("", spec)], correction=sr.Correction())


def check(found, expected):
    assert {name: bits(array) for name, array in flat(found).items()} == {
        name: bits(np.ascontiguousarray(array)) for name, array in expected.items()
    }


@pytest.mark.parametrize(("case", "spec"), some(itertools.product(CASES, SPECS), 2))
@pytest.mark.parametrize("small", [True, False])
def test_loaded_resharded_and_saved(save, tmp_path, monkeypatch, case, spec, small):
    arrays, renames, expected, goes_back = CASES[case]
    if not small:  # each box of a device is read by itself
        monkeypatch.setattr(units, "_SMALL", 0)
    mesh = mesh_of((2, 4))
    loaded = sr.load(save(arrays), rules(spec), mesh, renames=renames)
    check(loaded, expected)
    moved = sr.reshard(sr.shard(arrays, P(), mesh), rules(spec), mesh, renames=renames)
    check(moved, expected)
    assert {n: a.sharding for n, a in flat(moved).items()} == {n: a.sharding for n, a in flat(loaded).items()}
    if not goes_back:
        with pytest.raises(ValueError, match="cannot go back: "):
            sr.save(loaded, tmp_path / "again", renames=renames)
        assert not (tmp_path / "again").exists()
        return
    for tree, name in ((loaded, "again"), (expected, "from the host")):
        sr.save(tree, tmp_path / name, renames=renames)
        check(sr.load(tmp_path / name, P(), mesh), arrays)


LARGE = [
    ((1024, 1040), "a b -> a b", lambda x: x), ((1024, 1040), "a b -> b a", np.transpose),
    ((1024, 1040), "(h a) b -> b h a", lambda x: x.reshape(4, 256, 1040).transpose(2, 0, 1)),
    ((8, 120, 1032), "h a b -> b a h", np.transpose), ((1200, 8, 120), "h a b -> a b h", lambda x: x.transpose(1, 2, 0)),
    ((2, 16, 65536), "h a b -> a h b", lambda x: x.swapaxes(0, 1)), ((12, 64, 4096), "a b c -> a b c", lambda x: x),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32"])
@pytest.mark.parametrize("spec", [P("fsdp", "tp"), P(None, "fsdp"), P(("fsdp", "tp")), P()])
@pytest.mark.parametrize(("shape", "dims", "whole"), LARGE)
def test_large_arrays_in_any_order(save, dtype, spec, shape, dims, whole):
    """Beyond the size of what is read with others."""
    array = (np.arange(np.prod(shape)) % 251).astype("uint8").astype(numpy_dtype(dtype)).reshape(shape)
    renames = [sr.Rename("w", "w", dims, sizes={"h": 4} if "(" in dims else {})]
    spec = P(None, *spec) if "c" in dims else spec
    check(sr.load(save({"w": array}), spec, mesh_of(), renames=renames), {"w": whole(array)})


def test_random_layouts(save, tmp_path, rng):
    """Axes of any order, split and joined anyhow; each round another one."""
    for number in range(40):
        count = rng.randrange(1, 5)
        axes = {f"a{i}": rng.choice([1, 2, 3, 4]) for i in range(count)}

        def grouped(names):
            groups = []
            for name in names:
                if groups and rng.random() < 0.4:
                    groups[-1].append(name)
                else:
                    groups.append([name])
            return groups

        source, names = grouped(axes), list(axes)
        rng.shuffle(names)
        target = grouped(names)
        text = " -> ".join(
            " ".join(f"({' '.join(g)})" if len(g) > 1 else g[0] for g in side) for side in (source, target)
        )
        array = numbers(*(int(np.prod([axes[a] for a in g])) for g in source), start=number)
        expected = array.reshape(list(axes.values())).transpose([list(axes).index(a) for a in names])
        expected = expected.reshape([int(np.prod([axes[a] for a in g])) for g in target])
        spec = P(*(rng.choice([None, "tp", "fsdp"]) for _ in target[:1]))
        renames = [sr.Rename("x", "y", text, sizes=axes)]
        loaded = sr.load(save({"x": array}), rules(spec), mesh_of((2, 4)), renames=renames)
        assert bits(loaded["y"]) == bits(np.ascontiguousarray(expected)), text
        sr.save(loaded, tmp_path / str(number), renames=renames)
        again = sr.load(tmp_path / str(number), P(), mesh_of())
        assert bits(again["x"]) == bits(array), text


def test_joined_parts_of_several_sizes_need_them_to_go_back(save, tmp_path):
    arrays = {"q": numbers(16, 8), "k": numbers(4, 8), "v": numbers(4, 8, start=7)}
    join, told = (
        sr.Rename("{part:q|k|v}", "qkv", "out in -> in (part out)", sizes) for sizes in ({}, {"out": (16, 4, 4)})
    )
    for rename in (join, told):
        loaded = sr.load(save(arrays), P(), mesh_of(), renames=[rename])
        check(loaded, {"qkv": np.concatenate([x.T for x in arrays.values()], 1)})
    with pytest.raises(ValueError, match="may be of several sizes; give sizes of out"):
        sr.save(loaded, tmp_path / "n", renames=[join])
    sr.save(loaded, tmp_path / "n", renames=[told])
    check(sr.load(tmp_path / "n", P(), mesh_of()), arrays)


W = numbers(4, 2)
STACK = sr.Rename("layers.{layer}.w", "w", "out in -> layer out in")
MISFITS = {
    "a layer is missing": ({"layers.0.w": W, "layers.2.w": W}, [STACK], "w: it is stacked along 'layer', and 1 is missing"),
    **{f"a layer of {len(n)} digits": ({"layers.0.w": W, f"layers.{n}.w": W}, [STACK], told)  # which must not fill the memory
       for n, told in (("10000000", "and 1 is missing"), ("999999999999", "is no number along"), ("9" * 200, "is no number along"))},
    "no number": ({"layers.x.w": W}, [STACK], "layers.x.w: 'x' is no number along 'layer'; give the words"),
    "another shape": ({"layers.0.w": W, "layers.1.w": numbers(4, 3)}, [STACK], "w: its parts have different shapes"),
    "another dtype": ({"layers.0.w": W, "layers.1.w": W.astype("float16")}, [STACK],
                      "w: its parts have the dtypes float16, float32; give one in dtype"),
    "another rank": ({"layers.0.w": W[0]}, [STACK], "layers.0.w: its shape is [2], and the rename that finds it has dims='out"),
    "two for one": ({"a": W, "b": W}, [sr.Rename("a", "w"), sr.Rename("b", "w")], "w: several arrays would become it: 'a', 'b'"),
    "does not divide": ({"x": W}, [sr.Rename("x", "y", "(h d) i -> h d i", sizes={"d": 3})],
                        "x: its dimension of 4 elements is not one of h x d=3"),
    "parts do not fill": ({"x": W}, [sr.Rename("x", "{p:a|b}", "(p o) i -> o i", sizes={"o": (2, 1)})],
                          "x: its dimension of 4 elements is not one of p=2 x o=(2, 1)"),
    "words do not fit": ({"x": W}, [sr.Rename("x", "{p:a|b}", "p i -> i")], "x: its dimension of 4 elements is not one of p=2"),
    "two sizes unknown": ({"x": W}, [sr.Rename("x", "y", "(a b) i -> a b i")], "x: its rename needs the sizes of all but one of a, b"),
    "no words": ({"x": W}, [sr.Rename("x", "{p}", "(p o) i -> o i")], "x: its rename needs words for {p}, its size, or all others'"),
    "a grid with a hole": (
        {f"{i}.{e}": W for i in range(2) for e in range(2) if (i, e) != (1, 0)},
        [sr.Rename("{l}.{e}", "w", "a b -> l e a b")], "w: it stacks 4 arrays, and the checkpoint has 3"),
    "more parts than sizes": ({"x": W}, [sr.Rename("x", "{p:a|b|c}", "(p o) i -> o i", sizes={"o": (2, 2)})],
                              "x: it has a part 2, and its rename has sizes of 2"),
    "stacks of other axes": ({"a.0": W, "b": W}, [sr.Rename("a.{i}", "w", "a b -> i a b"), sr.Rename("b", "w")],
                             "w: renames with different dims make it"),
    "a dimension of more than 1": ({"x": W}, [sr.Rename("x", "y", "1 i -> i")], "x: its dimension of 4 elements is not one of 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_rename_that_does_not_fit(save, case):
    arrays, renames, expected = MISFITS[case]
    with pytest.raises(sr.FileError) as info:
        sr.load(save(arrays), P(), mesh_of(), renames=renames)
    assert expected in str(info.value)


@pytest.mark.parametrize("size", [10**7, 2**40])
def test_a_shape_without_elements_does_not_hang(write, size):
    header = {"w": {"dtype": "BF16", "shape": [size, 0, 4], "data_offsets": [0, 0]}}
    path = write("m.safetensors", header_file(header))
    apart = sr.Rename("w", "{expert}/w", "expert a b -> a b")
    with pytest.raises(sr.FileError, match=re.escape(f"taken apart into {size:,} arrays; at most")):
        sr.load(path, P(), mesh_of(), renames=[apart])
