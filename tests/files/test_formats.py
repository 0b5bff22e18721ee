"""A format of models and one of checkpoints can be added: each is a class in a list."""

import json

import jax
import numpy as np
import pytest

import shardrules as sr
from shardrules._checkpoint import formats
from shardrules._plan.files import models

MANIFEST = [["layers/0/kernel", [4, 8], "F32"], ["layers/0/bias", [8], "F32"]]


class ToyModel:
    description = "a *.toy file"

    def claims(self, path):
        return path.suffix == ".toy"

    def read(self, path, make):
        names, shapes, dtypes = zip(*json.loads(path.read_text()), strict=True)
        return models.Arrays(
            path.stem, make.of_columns(path, names, shapes, dtypes), "/", path=path
        )


class ToyCheckpoint:
    """Every array is full of the length of its name."""

    rearranges = False
    has_items = False

    def claims(self, arrays):
        return arrays.path.suffix == ".toy"

    def samples(self, arrays):
        return []

    def read(self, arrays, batches, most_bytes, progress):
        for jobs in batches:
            made = [np.full(job.target.shape, len(job.path), job.dtype) for job in jobs]
            yield jax.device_put(made, [job.sharding for job in jobs])


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "FORMATS", [ToyModel(), *models.FORMATS])
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS, ToyCheckpoint()])
    path = tmp_path / "model.toy"
    path.write_text(json.dumps(MANIFEST))
    return path


def test_a_model_in_a_format_of_its_own(toy):
    read = sr.read_model(toy)
    assert read["layers"]["0"]["kernel"].shape == (4, 8)


def test_a_checkpoint_in_a_format_of_its_own(toy):
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"))
    made = sr.load(toy, [("kernel", ("fsdp", "tp")), (".*", ())], mesh)
    kernel = made["layers"]["0"]["kernel"]
    assert tuple(kernel.sharding.spec) == ("fsdp", "tp")
    assert np.asarray(kernel).tolist() == [[len("layers/0/kernel")] * 8] * 4


def test_messages_say_what_can_be_given(toy, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        sr.FileError, match=r"give a \*.toy file, a \*.safetensors file, .* or JSON"
    ):
        sr.read_model(tmp_path / "empty")


def test_arrays_of_a_format_that_does_not_rearrange_them_are_rearranged_on_devices(toy):
    mesh = jax.make_mesh((2, 4), ("fsdp", "tp"))
    renames = [sr.Rename("kernel", "kernel", "in out -> out in")]
    made = sr.load(toy, [("kernel", ("fsdp", "tp")), (".*", ())], mesh, renames=renames)
    assert made["layers"]["0"]["kernel"].shape == (8, 4)
