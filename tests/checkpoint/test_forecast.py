"""A forecast's bytes are those that `load` reads, also where several devices share boxes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import shardrules as sr
from shardrules._checkpoint.forecast import forecast
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
