"""`Topology`: names and shapes, also of GPUs; meshes along the torus. What needs libtpu is skipped without it."""

import importlib.util
import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.solve.spread import Machine
from tests.support.compiled import array
from tests.support.contexts import needs_libtpu

SHAPES = {
    "v5p:8x8x8": ((8, 8, 8), 512, "v5p"), "v5e:4x12": ((4, 12), 48, "v5e"), "v5e:1x1": ((1, 1), 1, "v5e"),
    "V6E:16x16": ((16, 16), 256, "v6e"), "tpu7x:4x4x4": ((4, 4, 4), 128, "7x"), "v4:2x2x1": ((2, 2, 1), 4, "v4"),
    # GPUs of a host, and hosts
    "h100:8": ((8, 1), 8, "H100"), "H100:8x16": ((8, 16), 128, "H100"), "h200:4x2": ((4, 2), 8, "H200"),
    "b200:8x2": ((8, 2), 16, "B200"), "gb200:72x4": ((72, 4), 288, "GB200"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_names_have_shapes_and_devices(name):
    topology = sr.Topology(name)
    assert (topology.shape, topology.device_count, topology.hardware.name) == SHAPES[name]


def test_slices_are_of_tpus():
    assert sr.Topology("v5p:8x8x8", slices=3).device_count == 3 * 512
    with pytest.raises(ValueError, match="^the name 'h100:8x2' with slices=3 is no topology's: "):
        sr.Topology("h100:8x2", slices=3)


WRONG = {
    "mi300:8x8": "there is no topology of 'mi300'; there are those of v4, v5e",
    **dict.fromkeys(("v5p", "v5p-8", "v5p:4x4", "v5p:8x8x", "v5p:3x4x4", "v5p:64x64x64", "v5p:0x8x8"),
                    "each of 3 dimensions, such as 'v5p:4x4x4'; even numbers along the first two, as a host has 2x2 "),
    "h10:8": "did you mean 'h100'?",
    "mi300:8": "those of v4, v5e, v5p, v6e, tpu7x, h100, h200, b200, gb200",
    **dict.fromkeys(("h100", "h100-8", "h100:8x0", "h100:8x2x2", "h100:64"),
                    "is no topology's: give the GPUs of a host, of which NVLink connects 8 at most, and how many hosts "
                    "there are, such as 'h100:8x16'"),
    "v5e:32x32": "and 256 devices at most, or slices= of them",
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_topology_is_told(name):
    with pytest.raises(ValueError, match=f"^the name '{name}'.*{re.escape(WRONG[name])}"):
        sr.Topology(name)


def test_without_the_compiler_the_extra_is_named(monkeypatch):
    topology = sr.Topology("v5p:2x2x4")  # a value as it is
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    with pytest.raises(ImportError, match=r"pip install 'jax\[tpu\]'.* same mesh as a dict: on=\{'fsdp': 16\}"):
        topology.mesh(fsdp=16)


LINKS = [
    ("v5p:8x8x8", 1, {"fsdp": 64, "tp": 8}, {"fsdp": "ring", "tp": "ring"}),
    ("v5p:8x8x8", 1, {"fsdp": 128, "tp": 4}, {"fsdp": "split", "tp": "split"}),
    ("v5p:2x2x4", 1, {"fsdp": 4, "tp": 4}, {"fsdp": "line", "tp": "ring"}),
    ("v5e:16x16", 1, {"fsdp": 16, "tp": 16}, {"fsdp": "ring", "tp": "ring"}),
    ("v5e:4x4", 1, {"fsdp": 4, "tp": 4}, {"fsdp": "line", "tp": "line"}),
    ("v6e:8x16", 1, {"fsdp": 16, "tp": 8}, {"fsdp": "ring", "tp": "line"}),
    ("v5e:4x8", 2, {"data": 2, "fsdp": 8, "tp": 4}, {"data": "DCN", "fsdp": "line", "tp": "line"}),
    ("v5e:2x2", 2, {"fsdp": 8, "tp": 1}, {"fsdp": "DCN and ring", "tp": "one device"}),
    ("tpu7x:4x4x4", 1, {"fsdp": 16, "tp": 8}, {"fsdp": "ring", "tp": "ring"}),
    ("v4:4x4x4", 1, {"fsdp": 16, "tp": 4}, {"fsdp": "ring", "tp": "ring"}),
]


@needs_libtpu
@pytest.mark.parametrize(("name", "slices", "sizes", "links"), LINKS)
def test_axes_lie_along_rings_where_that_is_possible(name, slices, sizes, links):
    topology = sr.Topology(name, slices)
    mesh = topology.mesh(sizes)
    assert dict(mesh.shape) == sizes
    assert len(set(mesh.devices.flat)) == topology.device_count
    assert topology.links(mesh) == links
    assert topology.mesh(**sizes) == mesh == sr.Topology(name, slices).mesh(sizes)


@needs_libtpu
def test_meshes_are_those_that_need_no_split():
    topology = sr.Topology("v5p:8x8x8")
    meshes = topology.meshes(("fsdp", "tp"))
    assert [tuple(sizes.values()) for sizes in meshes] == [(1, 512), (8, 64), (64, 8), (512, 1)]
    assert not any("split" in topology.links(topology.mesh(m)).values() for m in meshes)


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "sizes", "shares"),
    [
        ("v5p:8x8x8", {"fsdp": 64, "tp": 8}, {"fsdp": 2 / 3, "tp": 1 / 3}),
        ("v5p:8x8x8", {"fsdp": 128, "tp": 4}, {"tp": 1 / 6}),
        ("v5e:4x4", {"fsdp": 4, "tp": 4}, {"fsdp": 1 / 4}),
        ("v5e:16x16", {"fsdp": 256}, {"fsdp": 1}),
    ],
)
def test_an_axis_has_the_links_of_its_dimensions(name, sizes, shares):
    topology = sr.Topology(name)
    mesh = topology.mesh(sizes)
    for axis, share in shares.items():
        rate = topology._links(mesh, (axis,)).rate
        assert rate == pytest.approx(share * topology.hardware.link_bytes_per_second)
    two = sr.Topology(name, 2)
    rate = two._links(two.mesh(dcn=2, **sizes), ("dcn",)).rate
    assert rate == topology.hardware.dcn_bytes_per_second


@needs_libtpu
def test_an_axis_over_slices_sends_its_own_part_between_them():
    one, two = sr.Topology("v5e:4x4"), sr.Topology("v5e:4x4", 2)
    within = one._links(one.mesh(fsdp=16), ("fsdp",)).rate
    rate = two._links(two.mesh(fsdp=32), ("fsdp",)).rate
    # Of 31 parts of an array that is gathered, one comes from the other slice.
    seconds = 1 / two.hardware.dcn_bytes_per_second + 30 / within
    assert rate == pytest.approx(31 / seconds)


@needs_libtpu
def test_a_mesh_of_another_size_is_told():
    with pytest.raises(ValueError, match="fsdp=4,tp=4 are 16 devices, and v5e:2x4 has 8"):
        sr.Topology("v5e:2x4").mesh(fsdp=4, tp=4)
    with pytest.raises(ValueError, match="no axis is divisible by the 4 slices"):
        sr.Topology("v5e:2x2", slices=4).mesh(dp=2, fsdp=2, sp=2, tp=2)
    with pytest.raises(ValueError, match="other devices than v5e:2x4"):
        sr.Topology("v5e:2x4").links(jax.make_mesh((1,), ("x",)))
    with pytest.raises(TypeError, match="mesh is .* it must be a jax.sharding.Mesh"):
        sr.Topology("v5e:2x4").links({"fsdp": 8})


@needs_libtpu
@pytest.mark.parametrize(
    ("name", "sizes", "summed"),
    [
        ("v5p:4x4x4", {"fsdp": 64}, {"all-gather", "reduce-scatter"}),
        ("v5p:4x4x4", {"fsdp": 16, "tp": 4}, set()),
        ("v6e:8x8", {"fsdp": 64}, {"reduce-scatter"}),
        ("v5e:4x8", {"fsdp": 32}, set()),
    ],
)
def test_the_compiler_sums_over_all_chips_of_a_large_slice(name, sizes, summed):
    topology = sr.Topology(name)
    mesh = topology.mesh(sizes)

    def both(w, g):
        return jax.lax.all_gather(w, "fsdp", tiled=True), jax.lax.psum_scatter(g, "fsdp", tiled=True)

    step = jax.shard_map(both, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=(P(), P("fsdp")), check_vma=False)
    args = [array(mesh, (4096, 8192), *spec, dtype="bfloat16") for spec in (P("fsdp"), P())]
    kinds = sorted(row.kind for row in sr.prove(jax.jit(step), *args, on=mesh).collectives)
    expected = {"all-gather", "reduce-scatter"} - summed
    assert kinds == sorted([*expected, *["all-reduce"] * len(summed)])
    machine = Machine(topology.hardware, sizes, topology)
    for kind in ("all-gather", "reduce-scatter"):
        alone = Machine(topology.hardware, sizes).sent(kind, ("fsdp",), 2**20)
        assert machine.sent(kind, ("fsdp",), 2**20) == alone * (2 if kind in summed else 1)


@needs_libtpu
def test_a_sweep_is_over_the_meshes_of_a_slice_with_its_memory():
    tree = {"w": jax.ShapeDtypeStruct((2**17, 2**16), "bfloat16")}
    cut = sr.plan(tree, [("w", ("fsdp", "tp"))], {"fsdp": 2, "tp": 4})
    rows = cut.sweep(devices="v5e:2x4")
    there = sr.Topology("v5e:2x4").meshes(("fsdp", "tp"))
    assert sorted(map(str, there)) == sorted(str(row.mesh) for row in rows)
    assert all(row.fits for row in rows)
    whole = cut.with_rules([("w", ())])
    assert not any(row.fits for row in whole.sweep(devices="v5e:2x4"))
