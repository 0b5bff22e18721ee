"""Checkpoints that several files of tests load."""

import json

import numpy as np
import pytest
import safetensors.numpy

from tests.checkpoint.test_load import LLAMA, random_bits


@pytest.fixture
def save(tmp_path):
    """save({name: array}): a checkpoint; its path."""

    def call(arrays, metadata=None):
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.numpy.save_file(arrays, tmp_path / "m.safetensors", metadata)
        return tmp_path / "m.safetensors"

    return call


@pytest.fixture
def checkpoint(rng, tmp_path):
    """Llama with two layers, in two files and an index; its folder."""
    files = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, shape) in enumerate(LLAMA.items()):
        files["ab"[i % 2] + ".safetensors"][name] = random_bits(rng, shape, "bfloat16")
    for file, arrays in files.items():
        safetensors.numpy.save_file(arrays, tmp_path / file)
    weight_map = {name: file for file, arrays in files.items() for name in arrays}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path
