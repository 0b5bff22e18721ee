"""shard_local in one process; tests/checkpoint/test_moving_processes.py has several."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

BATCH = {"x": np.arange(64).reshape(16, 4), "y": np.arange(16.0, dtype="float32")}


def test_in_one_process_it_is_the_whole_batch(mesh):
    for spec in (P("fsdp"), {"x": P(("fsdp", "tp")), "y": NamedSharding(mesh, P())}):
        placed = sr.shard_local(BATCH, spec, mesh)
        for name, array in BATCH.items():
            np.testing.assert_array_equal(placed[name], array)
        assert placed["x"].sharding.spec == (spec if isinstance(spec, P) else spec["x"])


@pytest.mark.parametrize(
    ("batch", "spec", "expected"),
    [
        ({"x": np.ones(6)}, P("fsdp"), r"batch: \['x'\] has the shape \[6\], .* hold 4 parts of dimension 0"),
        ({"x": np.ones(8)}, P(None, "fsdp"), r"spec: for \['x'\] it has 2 dimensions, and the array 1"),
        ({"x": np.ones(8)}, P("pp"), r"spec: for \['x'\] it has the axis 'pp', and the mesh is "),
        ({"x": 3}, P(), r"batch: \['x'\] is 3 "),
        ({"x": np.ones(8)}, {"x": "fsdp"}, r"spec: for \['x'\] it is 'fsdp'"),
        ({"x": np.float32(1)}, P("fsdp"), r"spec: for \['x'\] it has 1 dimension, and the array 0"),
        ({"x": np.ones(8)}, {"y": P()}, r"the tree of specs does not fit"),
        ({"x": np.ones(8)}, P(P.UNCONSTRAINED), r"the leaf \['x'\] cannot be placed as P.UNCONS"),
    ],
)  # fmt: skip
def test_what_does_not_fit(mesh, batch, spec, expected):
    with pytest.raises((TypeError, ValueError), match=expected):
        sr.shard_local(batch, spec, mesh)


def test_a_mesh_without_devices():
    with pytest.raises(TypeError, match="arrays can be placed on a jax.sharding.Mesh of devices"):
        sr.shard_local(BATCH, P("fsdp"), {"fsdp": 4})
