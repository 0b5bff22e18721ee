"""A format of models can be added: it is a class in a list."""

import json

import pytest

import shardrules as sr
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


@pytest.fixture
def toy(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "FORMATS", [ToyModel(), *models.FORMATS])
    path = tmp_path / "model.toy"
    path.write_text(json.dumps(MANIFEST))
    return path


def test_a_model_in_a_format_of_its_own(toy):
    read = sr.read_model(toy)
    assert read["layers"]["0"]["kernel"].shape == (4, 8)


def test_messages_say_what_can_be_given(toy, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        sr.FileError, match=r"give a \*.toy file, a \*.safetensors file, .* or JSON"
    ):
        sr.read_model(tmp_path / "empty")
