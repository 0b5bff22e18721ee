"""What `load`, `read_model` and `read_rules` read, and what to do about what they do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.dtypes import BITS
from shardrules._cli.sources import plan_model
from tests.checkpoint.test_load import mesh_of
from tests.support import corpus
from tests.support.files import message

RULES = '[[rules]]\npattern = "wq.kernel"\nspec = ["fsdp", "tp"]\n[[rules]]\npattern = ".*"\nspec = []\n'
DECLARED = 'replicated = ["norm"]\noptional_axes = ["sp"]\ndata_axes = ["dp"]\n'
MESH = {"fsdp": 8, "tp": 4}


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(DECLARED + RULES)
    return path


def written(path: Path, *rows) -> Path:
    path.write_text(json.dumps({"params": rows}))
    return path


@pytest.mark.parametrize("name", ["llama-3.1-405b", "easylm-llama-3.1-405b", "flax-gpt-j-6b"])
def test_a_plan_of_files_is_that_of_the_command_line(name, rules):
    path = corpus.manifest_path(name)
    theirs, rule_file, _ = plan_model(str(path), (str(rules),), None, MESH)
    read = sr.read_rules(rules)
    ours = sr.plan(sr.read_model(path), read.rules, MESH)
    assert ours.fingerprint() == theirs.fingerprint()
    assert sorted(ours.paths) == sorted(theirs.paths)
    assert str(ours.check(**read.declared)) == str(theirs.check(**rule_file.declared))


def test_names_with_slashes_are_levels_and_those_with_dots_stay_whole(tmp_path):
    slashed = written(tmp_path / "a.json", ["layers/0/w", [8, 4], "BF16"], ["b", [], "I32"])
    leaf, number = jax.ShapeDtypeStruct((8, 4), "bfloat16"), jax.ShapeDtypeStruct((), "int32")
    assert sr.read_model(slashed) == {"layers": {"0": {"w": leaf}}, "b": number}
    assert sr.read_model(slashed, nested=False) == {"layers/0/w": leaf, "b": number}
    dotted = written(tmp_path / "b.json", ["layers.0.w", [8, 4], "BF16"], ["b", [], "I32"])
    assert sr.read_model(str(dotted)) == {"layers.0.w": leaf, "b": number}
    assert sr.read_model(dotted, nested=True) == sr.read_model(slashed)
    model = sr.read_model(dotted, nested=True)
    assert sr.Rules([("layers/0/w", "tp"), ("b", None)], sr.dialects.EASYLM).match(model) == {
        "layers": {"0": {"w": P("tp")}}, "b": P()
    }  # fmt: skip


def test_every_dtype_of_files_is_one_of_jax(tmp_path):
    path = written(tmp_path / "a.json", *([name, [2], name] for name in BITS))
    assert {name: leaf.dtype.name for name, leaf in sr.read_model(path).items()} == {name: name for name in BITS}


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "user_code.py").write_text("raise SystemExit('executed')")
    for read in (sr.read_model, sr.read_rules):
        assert "only the command line imports package.module:name" in message(read, "user_code:f")
    (tmp_path / "user_code:f").write_text('{"params": []}')
    assert sr.read_model("user_code:f") == {}


# Stores, directories and other formats


def load(path):
    return sr.load(path, P(), mesh_of())


@pytest.fixture
def save(tmp_path):
    """save(*files): a directory with them, each with an array."""
    write = pytest.importorskip("safetensors.numpy").save_file

    def call(*files):
        for i, file in enumerate(files):
            write({f"w{i}": np.ones(8, "float32")}, tmp_path / f"{file}.safetensors")
        return tmp_path

    return call


READS = pytest.mark.parametrize("read", [load, sr.read_model])


@READS
def test_what_is_not_there_and_what_hugging_face_has(read, tmp_path):
    for source in ("models/m.safetensors", "models/m.json.gz", "/models/llama/8b"):
        assert "No such file or directory" in message(read, source)
    source = "meta-llama/Llama-3.1-8B"
    assert f"hf download {source} --local-dir DIRECTORY" in message(read, source)
    (tmp_path / "snapshots").mkdir()
    assert "snapshots/REVISION" in message(read, tmp_path)


@READS
def test_what_is_elsewhere(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert "pip install fsspec, and for gs:" in message(read, "gs://bucket/model")
    for url, fix in (("https://a.org/m.json", "curl -LO https://a.org/m.json"), ("file:///m.json", "give the path")):
        assert f"it is not read from there; {'download it: ' * (fix[0] == 'c')}{fix}" in message(read, url)


@READS
@pytest.mark.parametrize("file", ["m.npz", "m.gguf", "pytorch_model.bin"])
def test_another_format_is_refused(tmp_path, read, file):
    (tmp_path / file).write_bytes(b"PK\x03\x04\xff")
    assert f"files of {(tmp_path / file).suffix} are not read here" in message(read, tmp_path / file)
    assert "the directory has no arrays that can be read; give a *.safetensors" in message(read, tmp_path)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"], ["w0", "w1", "w2"]),
        (["m-00000-of-00002", "m-00001-of-00002"], ["w0", "w1"]),  # from zero on
        (["adapter_model"], ["w0"]),
    ],
)
def test_the_files_of_a_directory_are_one_model(save, files, names):
    directory = save(*files)
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert list(load(directory)) == names
    assert list(load(directory / f"{files[-1]}.safetensors")) == names[-1:]


@READS
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["m-00001-of-00003", "m-00003-of-00003"], "in -of-00003, and 2 are here; missing: m-00002-of-00003.safetensors; "),
        (["m-00001-of-00012"], "m-00004-of-00012.safetensors, ... and 8 more files; "),
        (["model", "adapter_model"], "adapter_model.safetensors is beside model.safetensors"),
        (["model", "consolidated"], "consolidated.safetensors is beside model.safetensors"),
    ],
)  # fmt: skip
def test_a_directory_that_is_no_whole_model(save, read, files, expected):
    assert expected in message(read, save(*files))


def test_an_index_that_lacks_a_file(save):
    directory = save("m-00001-of-00002")
    index = {"weight_map": {"w0": "m-00001-of-00002.safetensors"}}
    (directory / "m.safetensors.index.json").write_text(json.dumps(index))
    assert "missing: m-00002-of-00002.safetensors" in message(load, directory)
