"""Renames: each arrangement against numpy on the whole array, whatever the mesh; and what is refused."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint.boxes import Sized, arrangement, box_shape
from tests.checkpoint.test_load import bits, counted, mesh_of  # noqa: F401
from tests.support.slow import some


@pytest.fixture
def save(tmp_path):
    """save({name: array}): a checkpoint; its path."""
    write = pytest.importorskip("safetensors.numpy").save_file

    def call(arrays):
        write(
            {name: np.ascontiguousarray(a) for name, a in arrays.items()},
            tmp_path / "m.safetensors",
        )
        return tmp_path / "m.safetensors"

    return call


def numbers(*shape, dtype="float32", start=0):
    return (np.arange(np.prod(shape)) + start).reshape(shape).astype(dtype)


# By the text, the shape of the array, the sizes of axes, and what numpy makes of the whole.
ARRANGED = {
    "out in -> in out": ((8, 12), {}, lambda x: x.T),
    "(h d) i -> h d i": ((12, 8), {"d": 3}, lambda x: x.reshape(4, 3, 8)),
    "(h d) i -> i h d": ((16, 8), {"d": 4}, lambda x: x.reshape(4, 4, 8).transpose(2, 0, 1)),
    "h d i -> i (h d)": ((4, 4, 8), {}, lambda x: x.reshape(16, 8).T),
    "(h d) i -> (d h) i": ((16, 8), {"d": 2}, lambda x: x.reshape(8, 2, 8).transpose(1, 0, 2).reshape(16, 8)),
    "(a b c) -> (c a) b": ((64,), {"a": 4, "b": 2}, lambda x: x.reshape(4, 2, 8).transpose(2, 0, 1).reshape(32, 2)),
    "o i h w -> h w i o": ((8, 4, 2, 2), {}, lambda x: x.transpose(2, 3, 1, 0)),
    "a b -> a b": ((8, 4), {}, lambda x: x),
    "a b -> a 1 b": ((8, 4), {}, lambda x: x[:, None]),
    "a 1 b -> b a": ((8, 1, 4), {}, lambda x: x[:, 0].T),
}  # fmt: skip
SPECS = [P(), P("fsdp"), P(None, "tp"), P("fsdp", "tp"), P(("tp", "fsdp")), P("tp", "fsdp")]


@pytest.mark.parametrize(("text", "spec"), some(itertools.product(ARRANGED, SPECS), 4))
def test_an_arrangement(save, counted, text, spec):  # noqa: F811
    shape, sizes, whole = ARRANGED[text]
    array = numbers(*shape)
    expected = whole(array)
    loaded = sr.load(
        save({"x": array}),
        P(*spec[: expected.ndim]),
        mesh_of((2, 4)),
        renames=[sr.Rename("x", "y", text, sizes=sizes)],
    )
    assert bits(loaded["y"]) == bits(np.ascontiguousarray(expected))
    assert sum(counted) == array.nbytes


@pytest.mark.parametrize("text", ARRANGED)
def test_pieces_are_each_element_once(rng, text):
    shape, sizes, whole = ARRANGED[text]
    array = numbers(*shape)
    expected = whole(array)
    found = arrangement(text)
    axes = {
        axis: size
        for groups, dims in ((found.source, shape), (found.target, expected.shape))
        for group, size in zip(groups, dims, strict=True)
        if len(group) == 1
        for axis in group
    }
    axes |= {"h": 8, "c": 8} | axes | sizes
    sized = Sized(found, axes)
    for _ in range(50):
        box = tuple(
            tuple(sorted((rng.randrange(n + 1), rng.randrange(n + 1)))) for n in expected.shape
        )
        made = np.full(expected.shape, -1.0)
        for piece in sized.pieces(box):
            values = array[tuple(slice(*one) for one in piece.source)]
            place = made[tuple(slice(*one) for one in piece.target)]
            assert (place == -1).all()
            place[...] = (
                values.reshape(piece.lengths)
                .transpose(piece.order)
                .reshape(box_shape(piece.target))
            )
        inside = tuple(slice(*one) for one in box)
        assert np.array_equal(made[inside], expected[inside])
        made[inside] = -1
        assert (made == -1).all()


def test_stacked_layers_and_experts(save, counted):  # noqa: F811
    arrays = {
        f"layers.{i}.experts.{e}.w": numbers(8, 4, start=100 * i + e)
        for i in range(3)
        for e in range(4)
    }
    rename = sr.Rename(
        r"layers\.(?P<layer>\d+)\.experts\.(?P<expert>\d+)\.w",
        "layers/w",
        "out in -> layer expert in out",
    )
    loaded = sr.load(save(arrays), P(None, "tp", None, "fsdp"), mesh_of((2, 4)), renames=[rename])
    expected = np.stack(
        [np.stack([arrays[f"layers.{i}.experts.{e}.w"].T for e in range(4)]) for i in range(3)]
    )
    assert bits(loaded["layers"]["w"]) == bits(expected)
    assert sum(counted) == expected.nbytes


def test_taken_apart_and_stacked_again(save):
    arrays = {"w": numbers(3, 8, 4)}
    apart = sr.Rename("^w$", "layers/{layer}/w", "layer out in -> in out")
    loaded = sr.load(save(arrays), P("tp"), mesh_of((2, 4)), renames=[apart])
    for i in range(3):
        assert bits(loaded["layers"][str(i)]["w"]) == bits(np.ascontiguousarray(arrays["w"][i].T))
    single = {f"layers/{i}/w": np.asarray(loaded["layers"][str(i)]["w"]) for i in range(3)}
    together = sr.Rename(r"layers/(?P<layer>\d+)/w", "w", "in out -> layer out in")
    again = sr.load(save(single), P(None, "tp"), mesh_of((2, 4)), renames=[together])
    assert bits(again["w"]) == bits(arrays["w"])


PARTS = ("q", "k", "v")


@pytest.mark.parametrize("spec", [P(), P("tp"), P("fsdp", "tp")])
def test_joined_and_split_parts_of_several_sizes(save, counted, spec):  # noqa: F811
    sizes = {"q": 16, "k": 4, "v": 4}
    arrays = {f"{part}_proj": numbers(size, 8, start=size) for part, size in sizes.items()}
    joined = sr.Rename(
        r"(?P<part>[qkv])_proj", "qkv", "out in -> in (part out)", words={"part": PARTS}
    )
    loaded = sr.load(save(arrays), spec, mesh_of((2, 4)), renames=[joined])["qkv"]
    expected = np.concatenate([arrays[f"{part}_proj"].T for part in PARTS], 1)
    assert bits(loaded) == bits(expected)
    assert sum(counted) == expected.nbytes
    path = save({"qkv": expected})
    split = sr.Rename(
        "qkv", "{part}_proj", "in (part out) -> out in",
        words={"part": PARTS}, sizes={"out": tuple(sizes.values())},
    )  # fmt: skip
    loaded = sr.load(path, spec, mesh_of((2, 4)), renames=[split])
    for name, array in arrays.items():
        assert bits(loaded[name]) == bits(array)
    # The tree tells the sizes as well.
    told = sr.Rename("qkv", "{part}_proj", "in (part out) -> out in", words={"part": PARTS})
    tree = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}
    loaded = sr.load(path, spec, mesh_of((2, 4)), tree=tree, renames=[told])
    for name, array in arrays.items():
        assert bits(loaded[name]) == bits(array)


def test_sizes_from_the_tree(save):
    array = numbers(12, 8)
    rename = sr.Rename("x", "y", "(heads dim) in -> in heads dim")
    tree = {"y": jax.ShapeDtypeStruct((8, 4, 3), "float32")}
    loaded = sr.load(
        save({"x": array}), P("tp", "fsdp"), mesh_of((2, 4)), tree=tree, renames=[rename]
    )
    assert bits(loaded["y"]) == bits(
        np.ascontiguousarray(array.reshape(4, 3, 8).transpose(2, 0, 1))
    )
    with pytest.raises(
        sr.FileError, match="x: its rename needs the sizes of all but one of heads, dim"
    ):
        sr.load(save({"x": array}), P(), mesh_of(), renames=[rename])


LAYERS = r"layers\.(?P<layer>\d+)\.w"
STACK = sr.Rename(LAYERS, "w", "out in -> layer out in")
W = numbers(4, 2)
MISFITS = {
    "a layer is missing": ({"layers.0.w": W, "layers.2.w": W}, [STACK], "w: it is stacked along 'layer', and 1 is missing"),
    "no number": ({"layers.x.w": W}, [sr.Rename(r"layers\.(?P<layer>\w+)\.w", "w", "a b -> layer a b")],
                  "layers.x.w: the rename's words for 'layer' do not have 'x'"),
    "another shape": ({"layers.0.w": W, "layers.1.w": numbers(4, 3)}, [STACK], "w: its parts have different shapes"),
    "another dtype": ({"layers.0.w": W, "layers.1.w": W.astype("float16")}, [STACK],
                      "w: its parts have the dtypes float16, float32; give one in dtype"),
    "another rank": ({"layers.0.w": W[0]}, [STACK], r"layers.0.w: its shape is [2], and the rename that finds it is for 'out"),
    "two for one": ({"a": W, "b": W}, [sr.Rename("a|b", "w")], "w: several arrays would become it: 'a', 'b'"),
    "does not divide": ({"x": W}, [sr.Rename("x", "y", "(h d) i -> h d i", sizes={"d": 3})],
                        "x: its dimension of 4 elements is not one of h=1 x d=3"),
    "parts do not fill": ({"x": W}, [sr.Rename("x", "{p}", "(p o) i -> o i", words={"p": ("a", "b")}, sizes={"o": (2, 1)})],
                          "x: its dimension has 4 elements, and its 2 parts along 'p' 3"),
    "words do not fit": ({"x": W}, [sr.Rename("x", "{p}", "p i -> i", words={"p": ("a", "b")})],
                         "x: its dimension 'p' has 4 elements, and words 2"),
    "no words": ({"x": W}, [sr.Rename("x", "{p}", "(p o) i -> o i")], "x: its rename needs words for 'p', or its size"),
    "an experts' grid with a hole": (
        {f"{i}.{e}": W for i in range(2) for e in range(2) if (i, e) != (1, 0)},
        [sr.Rename(r"(?P<l>\d)\.(?P<e>\d)", "w", "a b -> l e a b")], "w: it stacks 4 arrays, and the checkpoint has 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_rename_that_does_not_fit(save, case):
    arrays, renames, expected = MISFITS[case]
    with pytest.raises(sr.FileError) as info:
        sr.load(save(arrays), P(), mesh_of(), renames=renames)
    assert expected in str(info.value)


def test_words_for_numbers_that_do_not_begin_with_0(save):
    arrays = {f"layers.{i}.w": numbers(4, 2, start=i) for i in (3, 4, 5)}
    rename = sr.Rename(LAYERS, "w", "out in -> layer out in", words={"layer": range(3, 6)})
    loaded = sr.load(save(arrays), P(), mesh_of(), renames=[rename])["w"]
    assert bits(loaded) == bits(np.stack([*arrays.values()]))


def test_the_first_rename_counts_and_others_stay(save):
    arrays = {"a.w": W, "b.w": W, "c": W}
    loaded = sr.load(
        save(arrays), P(), mesh_of(), renames=[sr.Rename("^a", "x"), sr.Rename("w$", "v")]
    )
    assert list(loaded) == ["b.v", "c", "x.w"]


def test_a_rename_that_finds_nothing_names_what_is_near(save):
    path = save({"lm_head.weight": W, "model.norm.weight": W[0]})
    with pytest.raises(sr.FileError) as info:
        sr.load(path, P(), mesh_of(), renames=[sr.Rename(r"^lm_haed\.weight$", "head")])
    assert r"^lm_haed\.weight$: this Rename finds no array" in str(info.value)
    assert "near it: lm_head.weight, model.norm.weight" in str(info.value)
    # One whose arrays an earlier record has taken is no error.
    renames = [sr.Rename("lm_head", "head"), sr.Rename(r"lm_head\.weight", "other")]
    assert list(sr.load(path, P(), mesh_of(), renames=renames)) == [
        "head.weight",
        "model.norm.weight",
    ]
