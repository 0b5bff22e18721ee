"""Renames of parts of rows, repeats, padding and shared arrays, against numpy on whole arrays."""

from __future__ import annotations

import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._checkpoint import boxes
from tests.checkpoint.test_load import bits, counted, mesh_of  # noqa: F401
from tests.checkpoint.test_renames import numbers, save  # noqa: F401

SPECS = [P(), P("tp"), P(None, "fsdp"), P(("tp", "fsdp"))]
PARTS = ("q", "k", "v")


def heads(array, part):
    """Part 0, 1 or 2 of each of the heads, 4 rows each, in "(heads part dim) in -> in (heads dim)"."""
    return array.reshape(-1, 3, 4, 8)[:, part].reshape(-1, 8).T


# By name: shape, the rename, and by path what numpy makes of the whole.
CASES = {
    "parts of heads": (
        (96, 8),
        sr.Rename("^x$", "{part}", "(heads part dim) in -> in (heads dim)", words={"part": PARTS}, sizes={"dim": 4}),
        {name: lambda x, i=i: heads(x, i) for i, name in enumerate(PARTS)},
    ),
    "one of them alone": (
        (96, 8),
        sr.Rename("^x$", "{part}", "(heads part dim) in -> in (heads dim)",
                  words={"part": (None, "k", None)}, sizes={"dim": 4}),
        {"k": lambda x: heads(x, 1)},
    ),
    "parts of several sizes": (
        (8 * 12, 8),
        sr.Rename("^x$", "{part}", "(heads part dim) in -> heads dim in",
                  words={"part": ("nope", "rope")}, sizes={"dim": (8, 4)}),
        {"nope": lambda x: x.reshape(8, 12, 8)[:, :8], "rope": lambda x: x.reshape(8, 12, 8)[:, 8:]},
    ),
    "interleaved": (
        (8, 4, 32),
        sr.Rename("^x$", "{part}", "e in (out part) -> e out in", words={"part": ("gate", "up")}),
        {"gate": lambda x: x[..., ::2].transpose(0, 2, 1), "up": lambda x: x[..., 1::2].transpose(0, 2, 1)},
    ),
    "interleaved and split": (
        (4, 64),
        sr.Rename("^x$", "{part}", "in (heads dim part) -> heads in dim", words={"part": (0, 1)}, sizes={"heads": 8}),
        {str(i): lambda x, i=i: x.reshape(4, 8, 4, 2)[..., i].transpose(1, 0, 2) for i in range(2)},
    ),
    "interleaved and else the same": (
        (8, 64),
        sr.Rename("^x$", "{part}", "e (out part) -> e out", words={"part": (0, 1)}),
        {str(i): lambda x, i=i: x[:, i::2] for i in range(2)},
    ),
    "repeated inside": (
        (32, 8),
        sr.Rename("^x$", "y", "(kv dim) in -> (kv times dim) in", sizes={"times": 2, "dim": 8}),
        {"y": lambda x: np.repeat(x.reshape(4, 8, 8), 2, 0).reshape(64, 8)},
    ),
    "repeated outside": (
        (8, 4),
        sr.Rename("^x$", "y", "a b -> times b a", sizes={"times": 8}),
        {"y": lambda x: np.broadcast_to(x.T, (8, 4, 8))},
    ),
    "padded": (
        (10, 8),
        sr.Rename("^x$", "y", "vocab embed -> embed vocab", resize={"vocab": 16}),
        {"y": lambda x: np.pad(x, ((0, 6), (0, 0))).T},
    ),
    "cropped": (
        (32, 8),
        sr.Rename("^x$", "y", "vocab embed -> vocab embed", resize={"vocab": 16, "embed": 16}),
        {"y": lambda x: np.pad(x[:16], ((0, 0), (0, 8)))},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "spec"), [*itertools.product(CASES, SPECS)])
def test_loaded_and_resharded(save, counted, case, spec):  # noqa: F811
    shape, rename, parts = CASES[case]
    array = numbers(*shape, start=1)
    mesh = mesh_of((2, 4))
    loaded = sr.load(save({"x": array}), spec, mesh, renames=[rename])
    expected = {name: np.ascontiguousarray(part(array)) for name, part in parts.items()}
    assert {name: bits(value) for name, value in loaded.items()} == {
        name: bits(value) for name, value in expected.items()
    }
    moved = sr.reshard({"x": jax.numpy.asarray(array)}, spec, mesh, renames=[rename])
    assert {name: bits(value) for name, value in moved.items()} == {
        name: bits(value) for name, value in expected.items()
    }


@pytest.mark.parametrize("least", [1, 1 << 30])
def test_long_runs_are_read_alone_and_short_ones_picked(save, monkeypatch, least):  # noqa: F811
    monkeypatch.setattr(boxes, "_LEAST_RUN", least)
    boxes.sized.cache_clear()
    shape, rename, parts = CASES["one of them alone"]
    array = numbers(*shape)
    loaded = sr.load(save({"x": array}), P("tp", "fsdp"), mesh_of((2, 4)), renames=[rename])
    assert bits(loaded["k"]) == bits(np.ascontiguousarray(parts["k"](array)))
    dims = boxes.arrangement("(heads dim) in -> in (heads dim)")
    sizes = (("heads", 8), ("dim", 4), ("in", 8))
    pieces = boxes.sized(dims, sizes, boxes.Gap(0, 1, 4, 12)).pieces(((0, 8), (0, 32)))
    boxes.sized.cache_clear()
    read = sum(np.prod(boxes.box_shape(piece.source)) for piece in pieces)
    assert (len(pieces), read) == ((8, array.size // 3) if least == 1 else (1, array.size))


def test_the_number_of_heads_from_parts_in_the_tree(save):  # noqa: F811
    array = numbers(8 * 12, 8)
    rename = sr.Rename(
        "^x$", "{part}", "(heads part dim) in -> in heads dim", words={"part": ("a", "b")}
    )
    tree = {
        "a": jax.ShapeDtypeStruct((8, 8, 8), "float32"),
        "b": jax.ShapeDtypeStruct((8, 8, 4), "float32"),
    }
    loaded = sr.load(save({"x": array}), P(), mesh_of(), tree=tree, renames=[rename])
    rows = array.reshape(8, 12, 8).transpose(2, 0, 1)
    assert bits(loaded["a"]) == bits(np.ascontiguousarray(rows[..., :8]))
    assert bits(loaded["b"]) == bits(np.ascontiguousarray(rows[..., 8:]))


def test_padded_to_the_size_in_the_tree(save):  # noqa: F811
    rename = sr.Rename("^x$", "y", "vocab embed -> vocab embed", resize={"vocab": None})
    path = save({"x": numbers(10, 8)})
    tree = {"y": jax.ShapeDtypeStruct((16, 8), "float32")}
    loaded = sr.load(path, P("tp"), mesh_of(), tree=tree, renames=[rename])
    assert bits(loaded["y"]) == bits(np.pad(numbers(10, 8), ((0, 6), (0, 0))))
    with pytest.raises(
        sr.FileError, match=r"y: its Rename has resize=\{'vocab': None\}, and no tree"
    ):
        sr.load(path, P(), mesh_of(), renames=[rename])


def test_many_small_padded_arrays(save):  # noqa: F811
    arrays = {f"x{i}": numbers(3, 5, start=i) for i in range(40)}
    rename = sr.Rename("^x", "y", "a b -> a b", resize={"a": 8})
    loaded = sr.load(save(arrays), P("tp"), mesh_of(), renames=[rename])
    for i in range(40):
        assert bits(loaded[f"y{i}"]) == bits(np.pad(arrays[f"x{i}"], ((0, 5), (0, 0))))


def test_an_array_for_several_leaves(save):  # noqa: F811
    renames = [
        sr.Rename("^embed$", "head/kernel", "vocab embed -> embed vocab", shared=True),
        sr.Rename("^embed$", "embed/embedding"),
    ]
    array = numbers(16, 8)
    mesh = mesh_of((2, 4))
    for made in (
        sr.load(save({"embed": array, "norm": array[0]}), P("tp"), mesh, renames=renames),
        sr.reshard({"embed": array, "norm": array[0]}, P("tp"), mesh, renames=renames),
    ):
        assert bits(made["head"]["kernel"]) == bits(np.ascontiguousarray(array.T))
        assert bits(made["embed"]["embedding"]) == bits(array)
        assert bits(made["norm"]) == bits(array[0])
    # A record after it that leaves out does so for the name itself.
    alone = sr.load(
        save({"embed": array}), P(), mesh, renames=[renames[0], sr.Rename("embed", None)]
    )
    assert list(alone) == ["head"]


WRONG = {
    "nothing says how often": (lambda: sr.Rename("x", "y", "a -> times a"),
        "stacks along 'times', for which the pattern needs a group: (?P<times>[0-9]+); to repeat along it, give its size"),
    "a stack inside": (lambda: sr.Rename(r"x(?P<layer>\d)", "y", "a -> (a layer)"),
        "stacks along 'layer', so it must be the first of its dimension"),
    "apart along two": (lambda: sr.Rename("x", "{b}{d}", "(a b) (c d) -> a c", words={"b": (1, 2), "d": (1, 2)}),
        "takes an array apart inside of a dimension along b and d"),
    "resize of a part": (lambda: sr.Rename("x", "y", "a b -> (a b)", resize={"a": 8}),
        "resize has 'a', which is no dimension of the result"),
    "resize of nothing": (lambda: sr.Rename("x", "y", "a b -> a b", resize={"c": 8}), "resize has 'c', which is no axis"),
    "resize without dims": (lambda: sr.Rename("x", "y", resize={"c": 8}), "sizes, words and resize are for the axes of dims"),
    "no word for a stack": (lambda: sr.Rename(r"x(?P<p>\w)", "y", "a -> p a", words={"p": ("q", None)}),
        "words['p'] has None, and 'a -> p a' stacks along it"),
    "shared and left out": (lambda: sr.Rename("x", None, shared=True), "shared is for records that make an array"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_record_that_contradicts_itself(case):
    make, message = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


MISFITS = {
    "rows do not fill": (
        sr.Rename("x", "{p}", "(heads p dim) i -> heads dim i", words={"p": ("a", "b")}, sizes={"dim": (5, 2)}),
        "x: its dimension has 12 elements, and its 2 parts along 'p' in each of 1 row 7"),
    "a dimension of more than 1": (sr.Rename("x", "y", "1 i -> i"), "x: its dimension of 12 elements is not one of 1"),
    "two heads": (sr.Rename("x", "y", shared=True), "y: several arrays would become it: 'x', 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_rename_that_does_not_fit(save, case):  # noqa: F811
    rename, message = MISFITS[case]
    path = save({"x": numbers(12, 4), "s": numbers(3)})
    renames = [rename, *([sr.Rename("x", "y")] if rename.shared else [])]
    with pytest.raises(sr.FileError) as info:
        sr.load(path, P(), mesh_of(), renames=renames)
    assert message in str(info.value)
