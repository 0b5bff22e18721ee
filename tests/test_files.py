"""What a command line reads: every kind of file, and a clear error for each that is damaged.

The oracles are the libraries that write the files: safetensors and orbax.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._files import content
from shardrules._files.arrays import read_arrays
from shardrules._files.dtypes import BITS, SAFETENSORS, bits_of, numpy_name
from shardrules._files.errors import FileError
from shardrules._files.leaves import ArraySpec
from shardrules._files.meshes import parse_mesh
from shardrules._files.modules import is_module_form, load_object
from shardrules._files.rules import DIALECTS, read_rules
from tests import corpus

HERE = Path(__file__).parent
ROWS = [["layers/0/kernel", [4, 8], "BF16"], ["layers/0/bias", [8], "float32"], ["step", [], "I32"]]
LEAVES = {
    "layers/0/kernel": ArraySpec((4, 8), "bfloat16"),
    "layers/0/bias": ArraySpec((8,), "float32"),
    "step": ArraySpec((), "int32"),
}


@pytest.fixture
def write(tmp_path):
    """write(name, content): a file of these bytes, this text, or else this as JSON; its path."""

    def call(name, data):
        if not isinstance(data, bytes):
            data = (data if isinstance(data, str) else json.dumps(data)).encode()
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return call


def message(call, source):
    """Of the FileError that the source must get; it starts with the source."""
    with pytest.raises(FileError) as info:
        call(str(source))
    assert str(info.value).startswith(str(source))
    return str(info.value)


def header_file(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


# Dtypes


def test_dtypes_are_those_of_numpy_and_ml_dtypes():
    for name in BITS:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
        assert dtype.name == name
        assert bits_of(dtype) == bits_of(name) == BITS[name]
        # Types of less than a byte are not packed in numpy.
        assert dtype.itemsize == max(1, BITS[name] // 8)
    assert {numpy_name(name) for name in SAFETENSORS} <= BITS.keys()


def test_bits_of_other_objects():
    assert bits_of(jax.random.key(0).dtype) == 64
    assert bits_of(np.dtype("S3")) == 24
    with pytest.raises(ValueError, match="unknown dtype 'F23'; known ones are F32"):
        bits_of("F23")
    for odd in (None, 3, np.float32):
        with pytest.raises(ValueError, match=re.escape(repr(odd))):
            bits_of(odd)


# JSON manifests


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    "params", [ROWS, {name: {"shape": shape, "dtype": dtype} for name, shape, dtype in ROWS}]
)
def test_a_manifest(write, pack, params):
    data = pack(json.dumps({"model": "small", "params": params}).encode())
    arrays = read_arrays(write("m.json.gz" if pack is gzip.compress else "m.json", data))
    assert arrays == ("small", LEAVES, "/")
    assert list(arrays.leaves) == list(LEAVES)


def test_names_separators_and_marks(write):
    assert read_arrays(write("flat.v1.json.gz", gzip.compress(b'{"params": []}'))).name == "flat.v1"
    assert read_arrays(write("m", {"params": [["a.b", [0, 3], "F4"]]})) == (
        "m",
        {"a.b": ArraySpec((0, 3), "float4_e2m1fn")},
        ".",
    )
    assert read_arrays(write("m.json", b'\xef\xbb\xbf{"params": []}')).leaves == {}


@pytest.mark.parametrize("model", corpus.manifest_names())
def test_real_manifests(model):
    path = corpus.manifest_path(model)
    content = json.loads(gzip.decompress(path.read_bytes()))
    arrays = read_arrays(str(path))
    assert arrays.name == content["model"]
    assert [[n, list(a.shape), a.dtype] for n, a in arrays.leaves.items()] == [
        [name, shape, SAFETENSORS[dtype]] for name, shape, dtype in content["params"]
    ]
    assert len({id(a) for a in arrays.leaves.values()}) == len(set(arrays.leaves.values()))


def test_leaves_are_leaves_for_jax(write):
    leaves = read_arrays(write("m.json", {"params": ROWS})).leaves
    specs = sr.match_partition_rules([("kernel", P("tp")), (".*", P())], leaves)
    assert specs == {"layers/0/kernel": P("tp"), "layers/0/bias": P(), "step": P()}
    assert len(jax.tree.leaves(leaves)) == 3


def rows(*changed):
    return {"params": [*ROWS, *changed]}


DEEP = b"[" * 200_000 + b"]" * 200_000

BAD_JSON = {
    "empty": (b"", "the file is empty; copy or download it anew"),
    "binary": (b"\x80\x02}q\x00", "byte 0: this is no UTF-8 text"),
    "bad utf-8": (b'{"params": "\xff"}', "byte 12: this is no UTF-8 text"),
    "cut": (b'{"params": [\n["a", [1]', r"line 2, column 10: this is no JSON \(Expecting ','"),
    "deep": (DEEP, "the JSON is nested too deeply"),
    "repeated key": (b'{"params": {"a": 1, "b": 1, "a": 2}}', "key 'a' is there twice"),
    "number": (b'{"params": ' + b"9" * 5000 + b"}", "integer string conversion"),
    "list": ([], r"line 1: this is \[\] \(a list\), which lists no arrays; give a \*.safetensors"),
    "no params": ({"a": 1}, "which lists no arrays"),
    "params": ({"params": 3}, r"key 'params': it is 3 \(a int\)"),
    "row": (rows({"name": "x"}), r"params\[3\]: it is {'name': 'x'} .*; write \[\"name\", \[4096"),
    "short row": (rows(["x", [1]]), r"params\[3\]"),
    "name": (rows([1, [1], "F32"]), "array 1 has no string as its name, not 1"),
    "surrogate": (rows(["a\ud800", [1], "F32"]), r"array 'a\\ud800' has half a surrogate pair"),
    "twice": (rows(["step", [1], "F32"]), "array 'step' is there twice; rename or remove one"),
    "shape": (rows(["x", 3, "F32"]), r"array 'x' needs a shape .* not 3 \(a int\)"),
    "no shape": ({"params": {"x": {"dtype": "F32"}}}, "array 'x' needs a shape .* not None"),
    "entry": ({"params": {"x": [1]}}, "array 'x' needs an object with shape and dtype"),
    "no dtype": ({"params": {"x": {"shape": []}}}, "array 'x' needs a dtype .* not None"),
    "true": (rows(["x", [4, 8], "F32"], ["y", [4, True], "F32"]), r"array 'y' .* not \[4, True\]"),
    "float": (rows(["x", [8], "F32"], ["y", [8.0], "F32"]), r"array 'y' .* not \[8.0\]"),
    "fraction": (rows(["y", [1.5], "F32"]), r"array 'y' needs a shape that is a list of integers"),
    "nan": (b'{"params": [["y", [NaN], "F32"]]}', r"array 'y' .* not \[nan\]"),
    "negative": (rows(["x", [4, -1], "F32"]), r"array 'x': the shape \[4, -1\] has a negative"),
    "overflow": (rows(["x", [2**62, 2], "F32"]), r"array 'x': .* more than 2\*\*63 - 1 elements"),
    "dtype": (
        rows(["x", [4], "F8_E4M4"]),
        "array 'x': unknown dtype 'F8_E4M4'; known ones are F8_",
    ),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_bad_manifest(write, case):
    data, expected = BAD_JSON[case]
    assert re.search(expected, message(read_arrays, write("model.json", data)))


def test_the_largest_array(write):
    path = write("m.json", {"params": [["x", [2**62, 1], "F32"], ["y", [0, 2**70], "F32"]]})
    assert read_arrays(path).leaves["x"].shape == (2**62, 1)


def test_bad_gzip(write, monkeypatch):
    packed = gzip.compress(json.dumps({"params": ROWS}).encode())
    assert "the gzip ends too early" in message(read_arrays, write("m.json.gz", packed[:-20]))
    damaged = packed[:-8] + bytes(8)
    assert "the gzip is damaged" in message(read_arrays, write("m.json.gz", damaged))
    garbled = packed[:12] + b"\xff" * 20 + packed[32:]
    assert "the gzip is damaged" in message(read_arrays, write("m.json.gz", garbled))
    assert "byte 0: this is no gzip" in message(read_arrays, write("m.json.gz", b"{}"))
    monkeypatch.setattr(content, "MOST_BYTES", 10_000_000)
    bomb = gzip.compress(bytes(20_000_000))
    assert len(bomb) < 100_000
    text = message(read_arrays, write("m.json.gz", bomb))
    assert "the content is longer than 10,000,000 bytes" in text


def test_no_file(tmp_path):
    assert "No such file or directory; check" in message(read_arrays, tmp_path / "none.json")
    assert "No such file" in message(read_arrays, tmp_path / "none.safetensors")
    assert "No such file" in message(read_rules, tmp_path / "none.toml")
    assert "Is a directory" in message(read_rules, str(tmp_path))
    (tmp_path / "readme.txt").write_text("nothing")
    assert "the directory has no arrays that can be read" in message(read_arrays, str(tmp_path))


# safetensors


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
    assert read == ("model-1", leaves_of(arrays), ".")
    assert len({id(a) for a in read.leaves.values()}) == 21
    save({}, tmp_path / "none.safetensors")
    assert read_arrays(str(tmp_path / "none.safetensors")).leaves == {}


def test_safetensors_of_packed_types(write):
    header = {"x": {"dtype": "F4", "shape": [4, 3], "data_offsets": [0, 6]}}
    path = write("f4.safetensors", header_file(header, bytes(6)))
    pytest.importorskip("safetensors").deserialize(Path(path).read_bytes())
    assert read_arrays(path).leaves == {"x": ArraySpec((4, 3), "float4_e2m1fn")}
    header = {"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}
    path = write("f4.safetensors", header_file(header, bytes(1)))
    assert "1 bytes, but float4_e2m1fn[3] takes 1.5" in message(read_arrays, path)


def test_an_index_and_a_directory(save, tmp_path):
    parts = {f"model-{i}.safetensors": arrays_of(f"layers.{i}") for i in range(2)}
    for name, arrays in parts.items():
        save(arrays, tmp_path / name)
    everything = leaves_of(parts["model-0.safetensors"]) | leaves_of(parts["model-1.safetensors"])
    together = read_arrays(str(tmp_path))
    assert together == (tmp_path.name, everything, ".")
    assert len({id(a) for a in together.leaves.values()}) == 19

    files = {name: file for file, arrays in parts.items() for name in arrays}
    order = sorted(files, reverse=True)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {n: files[n] for n in order}}))
    read = read_arrays(str(index))
    assert read == ("model", everything, ".")
    assert list(read.leaves) == order
    assert read_arrays(str(tmp_path)) == read._replace(name=tmp_path.name)

    index.write_text(json.dumps({"weight_map": {"z": "model-0.safetensors"}}))
    assert "array 'z': file 'model-0.safetensors' should have it" in message(read_arrays, index)
    index.write_text(json.dumps({"weight_map": {"z": "model-9.safetensors"}}))
    assert "file 'model-9.safetensors' is missing beside" in message(read_arrays, index)
    index.write_text(json.dumps({"weight_map": {"z": "../model-0.safetensors"}}))
    assert "needs the name of a file beside it" in message(read_arrays, index)
    index.write_text(json.dumps({"weight_map": {"z": 3}}))
    assert "array 'z' needs a file's name, not 3" in message(read_arrays, index)
    index.write_text(json.dumps({"weight_map": ["z"]}))
    assert "key 'weight_map': it is ['z']" in message(read_arrays, index)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    assert "has 2 indexes" in message(read_arrays, tmp_path)


def test_an_array_in_two_files(save, tmp_path):
    for name in ("one", "two"):
        save({"w": np.zeros(3)}, tmp_path / f"{name}.safetensors")
    assert "two.safetensors: array 'w': another .safetensors" in message(read_arrays, tmp_path)


def entry(begin, end, shape=(2,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


BAD_HEADERS = {
    "nothing": (b"", "the header's length is 0 bytes, but the file has 0"),
    "short": (b"\x08\0\0", "but the file has 3; it is cut short, or no safetensors file"),
    "2**63": (header_file({}, length=2**63), "length is 9,223,372,036,854,775,808 bytes, but"),
    "longer": (header_file({}, length=3), "length is 3 bytes, but the file has 10"),
    "no json": (header_file(b"nonsense"), r"line 1, column 1: this is no JSON"),
    "no utf-8": (header_file(b'{"\xff": 1}'), "byte 2: this is no UTF-8 text"),
    "deep": (header_file(DEEP), "the JSON is nested too deeply"),
    "list": (header_file([]), r"byte 8: the header is \[\] \(a list\), not an object of arrays"),
    "entry": (header_file({"x": 3}), "array 'x' needs an object with dtype, shape"),
    "field": (header_file({"x": {"dtype": "F32", "shape": []}}), "array 'x' has no data_offsets"),
    "dtype": (header_file({"x": entry(0, 8, dtype="F31")}, bytes(8)), "array 'x': unknown dtype"),
    "twice": (header_file(b'{"x": {}, "x": {}}'), "key 'x' is there twice in one object"),
    "negative": (header_file({"x": entry(0, 8, [-2])}, bytes(8)), r"shape \[-2\] has a negative"),
    "offsets": (header_file({"x": entry(0, "8")}), r"two integers, not \(0, '8'\)"),
    "no list": (header_file({"x": {**entry(0, 8), "data_offsets": 3}}), r"two integers, not 3"),
    "three": (header_file({"x": {**entry(0, 8), "data_offsets": [0, 4, 8]}}), "two integers, not"),
    "size": (
        header_file({"x": entry(0, 8), "y": entry(8, 12)}, bytes(12)),
        r"array 'y': data_offsets \[8, 12\] are 4 bytes, but float32\[2\] takes 8; write",
    ),
    "cut": (
        header_file({"x": entry(0, 8), "y": entry(8, 16)}, bytes(15)),
        r"array 'y': data_offsets \[8, 16\] lie outside the file's 15 bytes of data",
    ),
    "below": (header_file({"x": entry(-8, 0)}, b""), r"\[-8, 0\] lie outside"),
    "gap": (header_file({"x": entry(0, 8), "y": entry(12, 20)}, bytes(20)), "leave bytes out or"),
    "overlap": (header_file({"x": entry(0, 8), "y": entry(4, 12)}, bytes(12)), "or overlap"),
    "more": (header_file({"x": entry(0, 8)}, bytes(9)), "leave bytes out or overlap"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_bad_header(write, case):
    data, expected = BAD_HEADERS[case]
    assert re.search(expected, message(read_arrays, write("m.safetensors", data)))
    safetensors = pytest.importorskip("safetensors")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(data)


def test_a_header_that_is_too_long(tmp_path):
    path = tmp_path / "long.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    assert "at most 100,000,000 are allowed" in message(read_arrays, path)


# orbax


@pytest.fixture
def orbax():
    if not hasattr(jax.monitoring, "record_scalar"):
        pytest.skip("orbax cannot save with this JAX, which it was not made for")
    return pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")


def tree_for_orbax():
    return {
        "a": {"kernel": np.ones((2, 3), ml_dtypes.bfloat16), "none": None, "empty": {}},
        "list": [jax.numpy.zeros(4, "int4"), {"x": np.ones((2,), "float64")}],
        "tuple": (jax.numpy.ones(()), np.ones((1, 1), "uint8")),
        "number": 3,
    }


ORBAX_LEAVES = {
    "a/kernel": ArraySpec((2, 3), "bfloat16"),
    "list/0": ArraySpec((4,), "int4"),
    "list/1/x": ArraySpec((2,), "float64"),
    "number": ArraySpec((), "int64"),
    "tuple/0": ArraySpec((), "float32"),
    "tuple/1": ArraySpec((1, 1), "uint8"),
}


@pytest.mark.parametrize("how", [{}, {"use_zarr3": True}, {"use_ocdbt": False}])
def test_an_orbax_checkpoint(orbax, tmp_path, how):
    with orbax.PyTreeCheckpointer(**how) as checkpointer:
        checkpointer.save(tmp_path / "step", {**tree_for_orbax(), "text": "hello"})
    assert read_arrays(str(tmp_path / "step")) == ("step", ORBAX_LEAVES, "/")


def test_sharded_arrays_in_orbax_have_their_whole_shape(orbax, tmp_path, mesh):
    sharding = jax.sharding.NamedSharding(mesh, P("fsdp", "tp"))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "c", {"w": jax.device_put(np.ones((8, 4), "int8"), sharding)})
    assert read_arrays(str(tmp_path / "c")).leaves == {"w": ArraySpec((8, 4), "int8")}


def test_a_train_state_of_a_manager(orbax, tmp_path):
    train_state = pytest.importorskip("flax.training.train_state", reason="flax is not installed")
    optax = pytest.importorskip("optax")
    state = train_state.TrainState.create(
        apply_fn=None, params={"dense": {"kernel": np.ones((4, 8))}}, tx=optax.adam(1e-3)
    )
    with orbax.CheckpointManager(tmp_path / "run") as manager:
        for step in (9, 10):
            saved = state if step == 10 else {"old": np.ones(1)}
            manager.save(step, args=orbax.args.StandardSave(saved))
        manager.wait_until_finished()
    expected = {
        "opt_state/0/count": (),
        "opt_state/0/mu/dense/kernel": (4, 8),
        "opt_state/0/nu/dense/kernel": (4, 8),
        "params/dense/kernel": (4, 8),
        "step": (),
    }
    for path in ("run", "run/10", "run/10/default"):
        leaves = read_arrays(str(tmp_path / path)).leaves
        assert {name: leaf.shape for name, leaf in leaves.items()} == expected
    (tmp_path / "run" / "11.orbax-checkpoint-tmp").mkdir()
    assert len(read_arrays(str(tmp_path / "run")).leaves) == 5


def test_several_items_of_orbax(orbax, tmp_path):
    save = orbax.args.StandardSave
    items = {"state": save({"w": np.ones(3)}), "ema": save({"w": np.ones(3)})}
    with orbax.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=orbax.args.Composite(**items))
        manager.wait_until_finished()
    text = message(read_arrays, tmp_path)
    assert "the checkpoint has the items 3/ema, 3/state; give the directory of one" in text
    assert "the items ema, state" in message(read_arrays, tmp_path / "3")
    assert list(read_arrays(str(tmp_path / "3" / "ema")).leaves) == ["w"]


def test_a_damaged_or_unreadable_checkpoint(orbax, tmp_path, monkeypatch):
    (tmp_path / "_METADATA").write_text('{"tree_metadata": ')
    assert "orbax cannot read the checkpoint's metadata" in message(read_arrays, tmp_path)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    assert "; pip install 'shardrules[orbax]'" in message(read_arrays, tmp_path)


# Modules


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package.module:function", True),
        ("train:Config.rules", True),
        (r"C:\models\rules.json", False),
        ("C:/models/rules.json", False),
        ("C:rules.json", False),
        ("model.json", False),
        ("a:b:c", False),
        ("1a:b", False),
        ("", False),
    ],
)
def test_the_form_of_modules(text, expected):
    assert is_module_form(text) is expected


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(source): writes the module `user_code` into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda source: (tmp_path / "user_code.py").write_text(source)
    sys.modules.pop("user_code", None)


def test_a_file_is_no_module(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("train:rules", "[]")
    assert not is_module_form("train:rules")


def test_objects_of_modules(module):
    module("tree = {'w': 1}\nclass Config:\n    @staticmethod\n    def tree(): return [2]\n")
    assert load_object("user_code:tree") == {"w": 1}
    assert load_object("user_code:Config.tree") == [2]


@pytest.mark.parametrize(
    ("source", "name", "expected", "cause"),
    [
        ("", "tree", "module 'user_code' has no 'tree'; correct", AttributeError),
        ("import nonexistent_", "tree", "the import of 'user_code' has raised ModuleNotFound", ImportError),
        ("1 +", "tree", "the import of 'user_code' has raised SyntaxError", SyntaxError),
        ("raise SystemExit", "tree", "the import of 'user_code' has raised SystemExit", SystemExit),
        ("def tree(): return 1 / 0", "tree", r"the call of tree\(\) has raised ZeroDiv", ZeroDivisionError),
        ("def tree(x): pass", "tree", r"TypeError: .*; it must work without arguments", TypeError),
    ],
)  # fmt: skip
def test_modules_that_fail(module, source, name, expected, cause):
    module(source)
    with pytest.raises(FileError, match=f"^user_code:{name}: .*{expected}") as info:
        load_object(f"user_code:{name}")
    assert isinstance(info.value.__cause__, cause)


def test_no_module():
    assert "there is no module 'nonexistent_'" in message(load_object, "nonexistent_.sub:x")
    assert "there is no module 'shardrules.none_'" in message(load_object, "shardrules.none_:x")
    assert "write package.module:name" in message(load_object, "C:/x")


# Rules

TOML = """
dialect = "EasyLM"
replicated = ["norm", "bias$"]
optional_axes = ["sp"]
data_axes = ["dp"]

[correction]
indivisible = "prefix"

[[rules]]
pattern = "WQ/kernel"
spec = ["fsdp", [], ["tp", "sp"]]
flags = "i"
units = [1, 1, 128]
correction = { absent = "drop" }

[[rules]]
pattern = "bias"
spec = "tp"

[[rules]]
pattern = ".*"
spec = []
"""


def test_rules_of_toml(write):
    file = read_rules(write("llama.toml", TOML))
    correction = sr.Correction(absent="error", indivisible="prefix", rank="error", pad=False)
    own = sr.Correction(absent="drop", indivisible="prefix", rank="error", pad=False)
    wq = sr.RuleSpec(("fsdp", None, ("tp", "sp")), own, (1, 1, 128))
    assert file.name == "llama"
    assert file.declared == (("norm", "bias$"), ("sp",), ("dp",))
    assert file.rules.dialect.name == "EasyLM"
    assert file.rules.dialect.correction == correction
    assert list(file.rules) == [(re.compile("WQ/kernel", re.I), wq), ("bias", ("tp",)), (".*", ())]
    tree = {"wq": {"kernel": np.ones((2, 2, 2))}, "bias": np.ones(2), "x": np.ones(2)}
    assert file.rules.match(tree) == {
        "wq": {"kernel": P("fsdp", None, ("tp", "sp"))}, "bias": P("tp"), "x": P(),
    }  # fmt: skip
    assert read_rules(write("x.toml", TOML), sr.SPECTRAX).rules.dialect.name == "Spectrax"


@pytest.mark.parametrize("name", corpus.regex_rule_sets())
def test_rules_of_json(write, name):
    content = corpus.rule_file(name)
    for form in (content, content["rules"]):
        rules = read_rules(write("rules.json", form)).rules
        assert [(pattern, P(*spec)) for pattern, spec in rules] == corpus.rules(name)


def test_rules_of_windows_and_plans(write):
    path = write("w.json", [[["mlp", "c_fc", "kernel"], [None, "mp"]]])
    assert read_rules(path, sr.WINDOW).rules.first_match("h/mlp/c_fc/kernel") == 0
    path = write(
        "p.json.gz", gzip.compress(b'{"dialect": "transformers", "rules": [["l.*.q", []]]}')
    )
    assert read_rules(path).rules.first_match("l.3.q") == 0
    assert read_rules(path).name == "p"
    assert set(DIALECTS.values()) == {
        sr.EFORMER, sr.EASYLM, sr.KEYSTR, sr.SPECTRAX, sr.KERAS, sr.WINDOW, sr.TP_PLAN,
    }  # fmt: skip


def test_rules_of_a_module(module):
    module(
        "import shardrules as sr\nPAIRS = [('w', 'tp')]\ndef rules(): return sr.Rules(PAIRS, sr.KERAS)\n"
    )
    assert read_rules("user_code:PAIRS").rules == sr.Rules([("w", "tp")])
    assert read_rules("user_code:rules").rules == sr.Rules([("w", "tp")], sr.KERAS)
    assert read_rules("user_code:rules", sr.EASYLM).rules == sr.Rules([("w", "tp")], sr.EASYLM)
    assert read_rules("user_code:rules").name == "rules"
    assert "rules must be a sequence of" in message(read_rules, "shardrules:__version__")


BAD_RULES = {
    "no toml": ("rules.toml", "x = 1\ny = ?", r"this is no TOML: .*line 2, column 5"),
    "deep toml": ("rules.toml", "x = " + "[" * 9000, "this is no TOML|nested too deeply"),
    "empty": ("rules.toml", "", "the file is empty"),
    "no rules": ("rules.toml", "x = 1", "key 'rules': there is no list of rules; write"),
    "value": ("rules.json", 3, "there is no list of rules"),
    "key": ("rules.json", {"rules": [], "rulez": 1}, "key 'rulez' is unknown; the keys are rules, "),
    "dialect": ("rules.json", {"rules": [], "dialect": "linen"}, "dialect 'linen' is unknown; it is"),
    "correction": ("rules.json", {"rules": [], "correction": 3}, "correction: it is 3"),
    "field": ("rules.json", {"rules": [], "correction": {"x": 1}}, "correction: key 'x' is unknown"),
    "choice": ("rules.json", {"rules": [], "correction": {"pad": "no"}}, "correction: pad is 'no'; it"),
    "rule": ("rules.json", [["a", []], 3], r'rule 1: it is 3 \(a int\); write \["pattern"'),
    "triple": ("rules.json", [["a", [], 1]], "rule 0: it is"),
    "rule key": ("rules.json", [{"pattern": "a", "specs": 1}], "rule 0: key 'specs' is unknown"),
    "no spec": ("rules.toml", "[[rules]]\npattern = 'a'", r"rule 0: it has no spec; .*spec = \[\] rep"),
    "spec": ("rules.json", [["a", 3]], "rule 0: spec is 3"),
    "entry": ("rules.json", [["a", [None, 3]]], r"rule 0: entry 1 of spec is 3 .*; write an axis"),
    "axes": ("rules.json", [["a", [["tp", None]]]], "rule 0: entry 0 of spec is"),
    "no axis": ("rules.json", [["a", [""]]], "rule 0: entry 0 of spec is ''"),
    "pattern": ("rules.json", [["a", []], ["(", []]], r"rule 1: missing \)"),
    "number": ("rules.json", [[3, []]], "rule 0: the pattern must be a string"),
    "window": ("rules.json", [[["a"], []]], "rule 0: the pattern must be a string"),
    "flags": ("rules.json", [{"pattern": "a", "spec": [], "flags": "q"}], "rule 0: flags is 'q'"),
    "flagged": ("rules.json", [{"pattern": "(", "spec": [], "flags": "i"}], r"rule 0: the pattern '\('"),
    "window flags": ("rules.json", [{"pattern": ["a"], "spec": [], "flags": "i"}], "rule 0: flags need"),
    "units": ("rules.json", [{"pattern": "a", "spec": [], "units": [0]}], r"rule 0: units\[0\] is 0"),
    "units that are texts": ("rules.json", [{"pattern": "a", "spec": [], "units": ["x"]}], r"rule 0: units\[0\] is 'x'"),
    "no units": ("rules.json", [{"pattern": "a", "spec": [], "units": 3}], "rule 0: units is 3"),
    "own": ("rules.json", [{"pattern": "a", "spec": [], "correction": {"pad": 3}}], "rule 0: correction: pad"),
    "replicated": ("rules.json", {"rules": [], "replicated": "x"}, "replicated is 'x'"),
    "optional axes": ("rules.json", {"rules": [], "optional_axes": "sp"}, "optional_axes is 'sp'"),
    "data axes": ("rules.json", {"rules": [], "data_axes": [3]}, r"data_axes is \[3\]"),
    "regex": ("rules.json", {"rules": [], "replicated": ["a", "["]}, r"replicated\[1\]: the pattern"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_RULES)
def test_bad_rules(write, case):
    name, data, expected = BAD_RULES[case]
    assert re.search(expected, message(read_rules, write(name, data)))


# Meshes


def test_a_mesh():
    assert list(parse_mesh("dp=8,fsdp=16, tp = 4").items()) == [("dp", 8), ("fsdp", 16), ("tp", 4)]
    assert parse_mesh("x=2147483647") == {"x": 2**31 - 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" ", "the mesh is empty; write its axes as dp=8,tp=4"),
        ("dp=8,", "mesh 'dp=8,': '' is no axis; write its name and size as tp=4"),
        ("dp", "'dp' is no axis"),
        ("=8", "'=8' is no axis"),
        ("dp=2,dp=2", "axis 'dp' is there twice; rename or remove one"),
        ("dp=2.5", "the size of 'dp' is no integer; write dp=4"),
        ("dp=x", "the size of 'dp' is no integer"),
        ("dp=" + "9" * 5000, "the size of 'dp' is no integer"),
        ("dp=0", "the size of 'dp' is below 1"),
        ("dp=-4", "the size of 'dp' is below 1"),
        ("a=65536,b=32768", "the product of the sizes overflows"),
    ],
)
def test_a_bad_mesh(text, expected):
    with pytest.raises(ValueError, match=re.escape(expected)):
        parse_mesh(text)


# Cost


def test_reading_imports_no_jax():
    code = (
        "import sys; from shardrules._files import arrays, rules, meshes\n"
        f"arrays.read_arrays({str(corpus.manifest_path('gpt2'))!r})\n"
        "assert 'jax' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE)
