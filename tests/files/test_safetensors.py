"""Headers of safetensors files: accepted and refused as by the safetensors library."""

from __future__ import annotations

import json
import re

import ml_dtypes
import numpy as np
import pytest

from shardrules._base.dtypes import BITS, SAFETENSORS
from shardrules._base.io import FileError
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import read_arrays
from tests.support.files import header_file, message

DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.fixture
def save():
    return pytest.importorskip("safetensors.numpy", reason="safetensors is not installed").save_file


def arrays_of(*prefixes):
    """For each prefix, an array of each dtype that safetensors can save."""
    dtypes = [*(set(SAFETENSORS.values()) - {n for n in BITS if BITS[n] < 8})]
    assert len(dtypes) == 19
    return {
        f"{prefix}.{name}": np.zeros((2, 3), getattr(ml_dtypes, name, None) or name)
        for prefix in prefixes
        for name in sorted(dtypes)
    }


def leaves_of(arrays):
    return {name: ArraySpec(a.shape, a.dtype.name) for name, a in arrays.items()}


def test_safetensors(save, tmp_path):
    arrays = arrays_of("a", "b") | {"empty": np.zeros((0, 5)), "scalar": np.ones((), "float32")}
    save(arrays, tmp_path / "model-1.safetensors", metadata={"format": "np"})
    read = read_arrays(str(tmp_path / "model-1.safetensors"))
    assert read[:4] == ("model-1", leaves_of(arrays), ".", None)
    assert len({id(a) for a in read.leaves.values()}) == 21
    save({}, tmp_path / "none.safetensors")
    assert read_arrays(str(tmp_path / "none.safetensors")).leaves == {}


def test_an_index_and_a_directory(save, tmp_path, caplog):
    parts = {f"model-{i}.safetensors": arrays_of(f"layers.{i}") for i in range(2)}
    for name, arrays in parts.items():
        save(arrays, tmp_path / name)
    everything = leaves_of(parts["model-0.safetensors"]) | leaves_of(parts["model-1.safetensors"])
    together = read_arrays(str(tmp_path))
    assert together[:4] == (tmp_path.name, everything, ".", None)
    assert len({id(a) for a in together.leaves.values()}) == 19

    files = {name: file for file, arrays in parts.items() for name in arrays}
    order = sorted(files, reverse=True)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {n: files[n] for n in order}}))
    read = read_arrays(str(index))
    assert read[:4] == ("model", everything, ".", None)
    assert list(read.leaves) == order
    assert read_arrays(str(tmp_path)) == read._replace(name=tmp_path.name)
    assert not caplog.records
    index.write_text(json.dumps({"weight_map": {order[0]: files[order[0]]}}))
    assert list(read_arrays(str(index)).leaves) == order[:1]
    assert f"{len(parts['model-1.safetensors']) - 1} arrays of model-1.safetensors, such as " in caplog.text

    for name, expected in (("model-0", "file 'model-0.safetensors' should have it"), ("model-9", "is missing beside")):
        index.write_text(json.dumps({"weight_map": {"z": f"{name}.safetensors"}}))
        assert expected in message(read_arrays, index)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    assert "has 2 indexes" in message(read_arrays, tmp_path)


def test_an_array_in_two_files(save, tmp_path):
    for name in ("one", "two"):
        save({"w": np.zeros(3)}, tmp_path / f"{name}.safetensors")
    assert "two.safetensors: array 'w': another .safetensors" in message(read_arrays, tmp_path)


def entry(begin, end, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def with_entry(**fields):
    """A header whose one array has these fields instead of sound ones."""
    return header_file({"x": {**entry(0, 8), **fields}}, bytes(8))


def metadata(value):
    return header_file({"__metadata__": value, "x": entry(0, 8)}, bytes(8))


BAD_HEADERS = {
    "nothing": (b"", "the header's length is 0 bytes, but the file has 0"),
    "short": (b"\x08\0\0", "but the file has 3; it is cut short, or not a safetensors file"),
    "longer": (header_file({}, length=3), "length is 3 bytes, but the file has 10"),
    "no json": (header_file(b"nonsense"), r"line 1, column 1: this is not JSON"),
    "no utf-8": (header_file(b'{"\xff": 1}'), "byte 2: this is not UTF-8 text"),
    "deep": (header_file(DEEP), "the JSON is nested too deeply"),
    "field": (header_file({"x": {"dtype": "F32", "shape": []}}), "array 'x': Object missing required field `data_offsets`"),
    "twice": (header_file(b'{"x": {}, "x": {}}'), "key 'x' is there twice in one object"),
    "negative": (header_file({"x": entry(0, 8, [-2])}, bytes(8)), r"shape \[-2\] has a negative"),
    "three": (header_file({"x": {**entry(0, 8), "data_offsets": [0, 4, 8]}}), "Expected `array` of length 2, got 3"),
    "size": (header_file({"x": entry(0, 8), "y": entry(8, 12)}, bytes(12)), r"'y': .* are 4 bytes, but float32\[2\] takes 8; write"),
    "half a byte": (header_file({"x": entry(0, 1, [3], "F4")}, bytes(1)), r"1 bytes, but float4_e2m1fn\[3\] takes 1.5"),
    "cut": (header_file({"x": entry(0, 8), "y": entry(8, 16)}, bytes(15)), r"'y': .*\[8, 16\] lie outside the file's 15 bytes of data"),
    "name of half a pair": (header_file(rb'{"\ud800": 3}'), "array .* Expected `object`"),
    "gap": (header_file({"x": entry(0, 8), "y": entry(12, 20)}, bytes(20)), "leave bytes out or"),
    "empty one inside": (header_file({"x": entry(0, 8), "y": entry(4, 4, [0])}, bytes(8)), "leave bytes out or overlap"),
    "dtype of numpy": (with_entry(dtype="float32"), "'float32' is not written as safetensors does"),
    "dtype in small letters": (with_entry(dtype="f32"), "array 'x': unknown dtype 'f32'"),
    "overflow beside 0": (header_file({"x": entry(0, 0, [2**32, 2**32, 0])}), "more than 2"),
    "dimension of 65 bits": (header_file({"x": entry(0, 0, [0, 2**64])}), "more than 2"),
    "metadata of numbers": (metadata({"a": 1}), "__metadata__ is {'a': 1} .*, not an object of str"),
    "metadata as a list": (metadata([]), r"__metadata__ is \[\] \(a list\)"),
    "nul padding": (header_file(b"{}\0\0"), "this is not JSON"),
}  # fmt: skip

# The library takes these; our module says why we do not.
STRICTER = {
    "array twice": (
        header_file(b'{"x": %b, "x": %b}' % ((json.dumps(entry(0, 8)).encode(),) * 2), bytes(8)),
        "key 'x' is there twice",
    ),
    "metadata twice": (
        header_file(b'{"__metadata__": {"a": "1", "a": "2"}}'), "key 'a' is there twice",
    ),
    "unknown field": (with_entry(more=1), "array 'x': Object contains unknown field `more`"),
    "array as a list": (header_file({"x": ["F32", [2], [0, 8]]}, bytes(8)), "array 'x': Expected `object`, got `array`"),
    "dtype as an object": (with_entry(dtype={"F32": None}), "Expected `str`, got `object`"),
    "dimension of 64 bits": (header_file({"x": entry(0, 0, [0, 2**63])}), "more than 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*BAD_HEADERS, *STRICTER])
def test_a_header_that_is_refused(write, case):
    safetensors = pytest.importorskip("safetensors")
    data, expected = (BAD_HEADERS | STRICTER)[case]
    assert re.search(expected, message(read_arrays, write("m.safetensors", data)))
    if case in STRICTER:
        safetensors.deserialize(data)
        return
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(data)


SOUND_HEADERS = {
    "packed": header_file({"x": entry(0, 6, [4, 3], "F4")}, bytes(6)),
    "white space": header_file(b"\n " + json.dumps({"x": entry(0, 8)}).encode() + b" \t\r\n", bytes(8)),
    "no metadata": metadata(None),
    "empty metadata": metadata({}),
    "dashes": header_file({"-0,[-1": entry(0, 8)}, bytes(8)),
    "empty ones": header_file(
        {"a": entry(8, 8, [0]), "b": entry(0, 8), "c": entry(0, 0, [3, 0])}, bytes(8)
    ),
    "escapes": header_file(rb'{"\ud83d\ude00\u0000": %b}' % json.dumps(entry(0, 8)).encode(), bytes(8)),
}  # fmt: skip


def library_takes(data):
    """{name: leaf} as the library has it, or None if it refuses the file."""
    safetensors = pytest.importorskip("safetensors")
    try:
        found = safetensors.deserialize(data)
    except safetensors.SafetensorError:
        return None
    return {n: ArraySpec(tuple(t["shape"]), SAFETENSORS[t["dtype"]]) for n, t in found}


@pytest.mark.parametrize("case", SOUND_HEADERS)
def test_a_header_that_looks_odd(write, case):
    expected = library_takes(SOUND_HEADERS[case])
    assert expected is not None
    assert read_arrays(write("m.safetensors", SOUND_HEADERS[case])).leaves == expected


REFUSALS = re.compile(
    "is there twice|unknown field|Expected `(object|str)`, got `(array|object)`|more than 2|is negative"
)


def test_mutated_headers_are_taken_as_the_library_takes_them(write, rng):
    """We take what it takes, to the same arrays, or it is one of the refusals that are listed."""
    seeds = [data for data, _ in [*BAD_HEADERS.values(), *STRICTER.values()] if len(data) < 2000]
    seeds += SOUND_HEADERS.values()
    taken = 0
    for _ in range(3000):
        data = mutated_header(rng, rng.choice(seeds), seeds)
        expected = library_takes(data)
        try:
            found = read_arrays(write("m.safetensors", data)).leaves
        except FileError as error:
            assert expected is None or REFUSALS.search(str(error)), data
            continue
        # We take a byte order mark, and -0, which the library refuses.
        assert found == expected or (expected is None and re.search(rb"-0|\A.{8}\xef", data, re.S)), data
        taken += 1
    assert taken > 20


TOKENS = (b"null", b"-1", b"-0", b"0", b"8", b"[]", b"{}", b"true", b"2.0", b'"F32"', b'"__metadata__"',
          b",", b":", b"[0,8]", b" ", b"1e999", b"\\ud800", b"NaN", b"18446744073709551616")  # fmt: skip


def mutated_header(rng, data, seeds):
    """One to three changes in the header; its length is right, and the data stay."""
    length = int.from_bytes(data[:8], "little")
    header, rest = bytearray(data[8 : 8 + length]), data[8 + length :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        begin = rng.randrange(len(header) + 1)
        end = min(len(header), begin + rng.choice((0, 1, 1, 2, 8)))
        other = rng.choice(seeds)[8:]
        at = rng.randrange(len(other) + 1)
        header[begin:end] = rng.choice(
            (b"", header[begin:end] * 2, bytes([rng.randrange(256)]), other[at : at + 16], rng.choice(TOKENS))
        )  # fmt: skip
    return header_file(bytes(header), rest)


def test_a_header_that_is_too_long(tmp_path):
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    assert "at most 100,000,000 are allowed" in message(read_arrays, path)
