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


@pytest.mark.parametrize("read", [load, sr.read_model])
class TestElsewhere:
    def test_a_url_without_fsspec(self, read, monkeypatch):
        monkeypatch.setitem(sys.modules, "fsspec.core", None)
        with pytest.raises(sr.FileError, match=r"pip install 'shardrules\[remote\]', and for gs:"):
            read("gs://bucket/model")

    def test_a_repository(self, read):
        with pytest.raises(sr.FileError, match="hf download meta-llama/Llama-3.1-8B --local-dir"):
            read("meta-llama/Llama-3.1-8B")

    def test_a_file_that_is_not_there(self, read):
        with pytest.raises(sr.FileError, match="No such file or directory"):
            read("models/m.safetensors")
        with pytest.raises(sr.FileError, match="No such file or directory"):
            read("/models/llama/8b")


@pytest.mark.parametrize("read", [load, sr.read_model])
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


def test_a_name_that_no_file_can_have():
    with pytest.raises(sr.FileError, match="File name too long"):
        load("x" * 5000)


def test_another_format_beside_safetensors_is_not_read(save):
    directory = save("model")
    (directory / "pytorch_model.bin").write_bytes(b"")
    assert list(load(directory)) == ["w0"]


class TestNumberedFiles:
    def test_all_of_them(self, save):
        directory = save(*(f"model-{i:05}-of-00003" for i in (1, 2, 3)))
        assert list(load(directory)) == ["w0", "w1", "w2"]
        assert list(load(directory / "model-00002-of-00003.safetensors")) == ["w1"]

    def test_from_zero_on(self, save):
        assert list(load(save("m-00000-of-00002", "m-00001-of-00002"))) == ["w0", "w1"]

    def test_one_is_missing(self, save):
        directory = save("model-00001-of-00003", "model-00003-of-00003")
        for read in (load, sr.read_model):
            with pytest.raises(
                sr.FileError,
                match=r"in -of-00003, and 2 are here; missing: model-00002-of-00003\.safetensors; ",
            ):
                read(directory)

    def test_many_are_missing(self, save):
        with pytest.raises(
            sr.FileError, match=r"model-00004-of-00012.*, \.\.\. and 8 more files; "
        ):
            load(save("model-00001-of-00012"))

    def test_an_index_lacks_one(self, save):
        directory = save("model-00001-of-00002")
        index = {"weight_map": {"w0": "model-00001-of-00002.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(sr.FileError, match="missing: model-00002-of-00002.safetensors"):
            load(directory)


@pytest.mark.parametrize("other", ["adapter_model", "consolidated"])
def test_two_models_in_a_directory(save, other):
    directory = save("model", other)
    with pytest.raises(sr.FileError, match=f"{other}.safetensors is beside model.safetensors"):
        load(directory)
    assert list(load(directory / f"{other}.safetensors")) == ["w1"]


def test_an_adapter_alone(save):
    assert list(load(save("adapter_model"))) == ["w0"]


class TestARenameThatFindsNothing:
    def test_is_an_error(self, save):
        path, placed = save("m"), {"w0": np.ones(8, "float32")}
        renames = [sr.Rename("aa.weight", "v"), sr.Rename("w0", "w")]
        for call in (
            lambda: sr.load(path, P(), mesh_of(), renames=renames),
            lambda: sr.reshard(placed, P(), mesh_of(), renames=renames),
        ):
            with pytest.raises(ValueError, match="aa.weight: this Rename finds no array; "):
                call()

    def test_but_not_an_optional_one_or_one_that_comes_too_late(self, save):
        renames = [
            sr.Rename("aa", "v", optional=True),
            sr.Rename("w0", "w"),
            sr.Rename("w{i}", "x", "a -> i a"),
        ]
        assert list(sr.load(save("m"), P(), mesh_of(), renames=renames)) == ["w"]
