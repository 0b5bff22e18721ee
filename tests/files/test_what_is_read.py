"""What `load` and `read_model` read, and what to do about what they do not: URLs, other formats, parts of models."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.checkpoint.test_load import mesh_of


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
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B --local-dir"),
        ("models/m.safetensors", "No such file or directory"),
        ("/models/llama/8b", "No such file or directory"),
        ("x" * 5000, "File name too long"),
    ],
    ids=["repository", "file", "absolute", "long"],
)
def test_what_is_not_there(read, source, expected):
    with pytest.raises(sr.FileError, match=expected):
        read(source)


@READS
def test_a_url_without_fsspec(read, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(sr.FileError, match=r"pip install 'shardrules\[remote\]', and for gs:"):
        read("gs://bucket/model")


@READS
@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("m.npz", "an archive of numpy"),
        ("m.gguf", "llama.cpp"),
        ("pytorch_model.bin", "a pickle of PyTorch"),
        ("m.PT", "a pickle of PyTorch"),
        ("m.msgpack", "flax.serialization"),
        ("m.h5", "HDF5"),
    ],
)
def test_another_format_is_named(tmp_path, read, file, what):
    (tmp_path / file).write_bytes(b"\x00\x01")
    for source in (tmp_path / file, tmp_path):
        with pytest.raises(sr.FileError, match=f"this is .*{what}.*save_file"):
            read(source)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"], ["w0", "w1", "w2"]),
        (["m-00000-of-00002", "m-00001-of-00002"], ["w0", "w1"]),  # from zero on
        (["adapter_model"], ["w0"]),
    ],
)  # fmt: skip
def test_the_files_of_a_directory_are_one_model(save, files, names):
    directory = save(*files)
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert list(load(directory)) == names
    assert list(load(directory / f"{files[-1]}.safetensors")) == names[-1:]


@READS
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["m-00001-of-00003", "m-00003-of-00003"], r"in -of-00003, and 2 are here; missing: m-00002-of-00003\.safetensors; "),
        (["m-00001-of-00012"], r"m-00004-of-00012.*, \.\.\. and 8 more files; "),
        (["model", "adapter_model"], "adapter_model.safetensors is beside model.safetensors"),
        (["model", "consolidated"], "consolidated.safetensors is beside model.safetensors"),
    ],
)  # fmt: skip
def test_a_directory_that_is_no_whole_model(save, read, files, expected):
    with pytest.raises(sr.FileError, match=expected):
        read(save(*files))


def test_an_index_that_lacks_a_file(save):
    directory = save("m-00001-of-00002")
    index = {"weight_map": {"w0": "m-00001-of-00002.safetensors"}}
    (directory / "m.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(sr.FileError, match="missing: m-00002-of-00002.safetensors"):
        load(directory)
