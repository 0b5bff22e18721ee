"""A NamedSharding's memory kind survives the correction of its spec."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr


@pytest.mark.parametrize("function", [sr.shard, sr.with_sharding_constraint])
def test_memory_kind_is_kept(function):
    device = jax.devices()[0]
    mesh = Mesh([device], ("tp",))
    for memory in device.addressable_memories():
        sharding = NamedSharding(mesh, P(None, "tp"), memory_kind=memory.kind)
        placed = function({"w": np.ones((2, 2), "float32")}, sharding)["w"]
        assert placed.sharding == NamedSharding(mesh, P(None, "tp"), memory_kind=memory.kind)
