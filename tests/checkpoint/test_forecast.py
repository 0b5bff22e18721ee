"""A forecast's bytes are those that `load` reads, also where several devices share boxes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import shardrules as sr
from shardrules._checkpoint.forecast import forecast, renamed
from tests.checkpoint.test_load import LLAMA, RULES


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "sizes", [{"fsdp": 4, "tp": 2}, {"tp": 2, "fsdp": 4}, {"dp": 2, "fsdp": 2, "tp": 2}]
)
def test_bytes_of_each_process(sizes, processes):
    tree = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in LLAMA.items()}
    plan = sr.plan(tree, RULES, sizes)
    found = forecast(plan, processes=processes, in_flight=None, bandwidth=1000)
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    shardings = plan.on_mesh(mesh).shardings()
    expected = []
    for devices in np.array(jax.devices()).reshape(processes, -1):
        boxes = {
            (name, str(index)): index
            for name, sharding in shardings.items()
            for device, index in sharding.devices_indices_map(tree[name].shape).items()
            if device in set(devices)
        }
        expected.append(
            sum(
                2 * np.empty(tree[name].shape, np.int8)[index].size
                for (name, _), index in boxes.items()
            )
        )
    assert isinstance(next(iter(shardings.values())), NamedSharding)
    assert found.read == tuple(expected)
    assert found.bytes == sum(2 * np.prod(shape) for shape in LLAMA.values())
    assert found.seconds == max(expected) / 1000
    assert found.largest == max(kind.device_bytes for kind in plan.kinds)


def test_it_needs_all_arrays_placed():
    tree = {"w": jax.ShapeDtypeStruct((8,), "float32")}
    with pytest.raises(ValueError, match="not all arrays are placed"):
        forecast(sr.plan(tree, [], {"tp": 2}), processes=1, in_flight=None, bandwidth=1)


@pytest.mark.parametrize(
    ("shape", "spec", "reads"),
    [
        ((100, 65536), (None, "tp"), 100),  # 32 kB of each row, far apart
        ((100, 65536), ("tp", None), 1),
        ((100, 1024), (None, "tp"), 1),  # what is between is read along
        ((64, 1 << 20), ("tp", None), 2),  # 32 MiB, 16 MiB at once
        ((100, 65536), (), 1),
    ],
)
def test_the_number_of_reads(shape, spec, reads):
    plan = sr.plan({"w": jax.ShapeDtypeStruct(shape, "float32")}, [("w", spec)], {"tp": 8})
    found = forecast(plan, processes=8, in_flight=None, bandwidth=1000)
    assert found.reads == reads
    assert f"about {reads} read" in str(found)


def test_renames_and_dtypes(tmp_path):
    """Bytes are those of the file, parts on devices those of the tree."""
    save = pytest.importorskip("safetensors.numpy").save_file
    save(
        {f"layers.{i}.w": np.ones((64, 32), "float32") for i in range(4)},
        tmp_path / "m.safetensors",
    )
    renames = [sr.Rename(r"layers\.(?P<layer>\d+)\.w", "w", "out in -> layer in out")]
    tree, targets = renamed(str(tmp_path), renames, "bfloat16")
    assert tree["w"].shape == (4, 32, 64)
    plan = sr.plan(tree, [("w", (None, "tp"))], {"tp": 2})
    found = forecast(plan, processes=2, in_flight=None, bandwidth=1000, targets=targets)
    assert found.bytes == 4 * 64 * 32 * 4
    assert found.read == (found.bytes // 2,) * 2
    assert found.device_bytes == found.bytes // 4
    assert found.reads == 4  # arrays, whose gaps of 64 bytes are read along


@pytest.mark.parametrize("dims", ["out in -> in out", "out in -> out in"])
def test_the_reads_of_arrays_that_are_transposed(tmp_path, dims):
    """By as many rows as are copied at once."""
    save = pytest.importorskip("safetensors.numpy").save_file
    save({"w": np.ones((2048, 1024), "float32")}, tmp_path / "m.safetensors")
    tree, targets = renamed(str(tmp_path), [sr.Rename("w", "w", dims)], None)
    plan = sr.plan(tree, [("w", ())], {"tp": 2})
    found = forecast(plan, processes=2, in_flight=None, bandwidth=1000, targets=targets)
    assert found.reads == (16 if dims == "out in -> in out" else 1)  # of 8 MiB
