"""The mesh that is used: the argument, jax.set_mesh, use_abstract_mesh, `with mesh:`, inside jit and shard_map."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.arguments import parse_mesh
from tests.support.contexts import legacy


@pytest.fixture
def other():
    return Mesh(np.array(jax.devices()[:8]).reshape(8), ("x",))


pytestmark = pytest.mark.filterwarnings("error")


def test_the_argument_comes_first(mesh, other):
    with legacy(mesh):
        assert sr.resolve_mesh(other) is other


@pytest.mark.parametrize("context", [legacy, jax.set_mesh])
def test_the_context_s_mesh(mesh, other, context):
    with context(mesh):
        assert sr.resolve_mesh() is mesh
        with context(other):
            assert sr.resolve_mesh() is other
        seen = []
        jax.jit(lambda x: seen.append(sr.resolve_mesh()) or x)(1.0)
        assert seen == [mesh]


def test_abstract_mesh():
    abstract = AbstractMesh((4, 2), ("fsdp", "tp"))
    with jax.sharding.use_abstract_mesh(abstract):
        assert sr.resolve_mesh() == abstract


def test_inside_shard_map_manual_axes_are_seen(mesh):
    seen = []

    def body(x):
        seen.append(sr.resolve_mesh())
        return x

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(body, in_specs=P("fsdp"), out_specs=P("fsdp"), axis_names={"fsdp"})
        jax.jit(mapped)(np.zeros(8, "float32"))
    assert isinstance(seen[0], AbstractMesh)
    assert [type_.name for type_ in seen[0].axis_types] == ["Auto", "Manual", "Auto"]


def test_contexts_that_agree(mesh):
    with legacy(mesh), jax.set_mesh(mesh):
        assert sr.resolve_mesh() is mesh


def test_contexts_that_disagree(mesh, other):
    with legacy(other), jax.set_mesh(mesh), pytest.raises(ValueError, match="two meshes") as caught:
        sr.resolve_mesh()
    assert "jax.set_mesh's dp=1,fsdp=4,tp=2 and `with mesh:`'s x=8" in str(caught.value)
    devices = mesh.devices[:, ::-1]
    reordered = Mesh(devices, mesh.axis_names)
    with legacy(reordered), jax.set_mesh(mesh), pytest.raises(ValueError, match="other devices"):
        sr.resolve_mesh()
    with legacy(other), jax.set_mesh(mesh):
        assert sr.resolve_mesh(mesh) is mesh


TAKING_SIZES = {
    "resolve_mesh": sr.resolve_mesh,
    "text": lambda sizes: parse_mesh(",".join(f"{axis}={size}" for axis, size in sizes.items())),
    "plan": lambda sizes: sr.plan({"w": np.ones(8)}, [("w", None)], sizes),
    "named_shardings": lambda sizes: sr.named_shardings({"w": np.ones(8)}, [("w", None)], sizes),
}


@pytest.mark.parametrize("door", TAKING_SIZES)
def test_one_bound_on_meshes(door):
    """Text allowed 2**31 - 1 devices, and plans 2**24."""
    use = TAKING_SIZES[door]
    use({"dp": 2**20, "tp": 2**4})
    with pytest.raises(ValueError, match="33554432 devices; it can have at most 16,777,216"):
        use({"dp": 2**20, "tp": 2**5})
    with pytest.raises(ValueError, match="a mesh of 33 axes; it can have at most 32"):
        use({f"a{i}": 1 for i in range(33)})
