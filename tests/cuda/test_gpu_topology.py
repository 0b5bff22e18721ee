"""`Topology` of GPUs: hosts, meshes. What needs the compiler for CUDA is skipped without it."""

from unittest import mock

import numpy as np
import pytest

import shardrules as sr
from shardrules._base.hardware import compiler_facts
from shardrules._program.topologies import topology as gpu_topology
from shardrules._program.topologies.topology import memory_limit
from tests.support.contexts import needs_cuda


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    from jax.experimental import topologies

    def unknown(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", unknown)
    with pytest.raises(ImportError, match=r"jax\[cuda12-local\].* set JAX_PLATFORMS=cpu .* not implemented for cuda"):
        sr.Topology("h100:3").mesh(fsdp=3)


def test_facts_are_rendered_as_the_compiler_reads_them():
    lines = gpu_topology.target_config("GB200").splitlines()
    assert [line for line in lines if "GB200" in line] == [
        '  name: "NVIDIA GB200"', 'device_description_str: "NVIDIA GB200"',
    ]  # fmt: skip
    for line in ("  core_count: 152", "  memory_bandwidth: 7928064000000", "    active_links: 18"):
        assert line in lines
    assert sum(line.count("{") - line.count("}") for line in lines) == 0


@pytest.mark.parametrize("name", gpu_topology.GPUS.values())
def test_facts_of_the_driver_are_near_the_public_figures(name):
    """Of the memory all, of which the vendor's figure is what programs can use."""
    facts, device = compiler_facts(name), sr.Hardware.named(name)
    assert 0.9 < device.memory_bytes / facts["memory_bytes"] < 1
    assert facts["memory_bytes_per_second"] == pytest.approx(device.memory_bytes_per_second, 0.05)
    per_link = device.link_bytes_per_second / facts["nvlinks"]
    assert per_link == {9: 25e9, 10: 50e9}[facts["compute_capability"]]


LINKS = [
    ("h100:8", {"fsdp": 4, "tp": 2}, {"fsdp": "NVLink", "tp": "NVLink"}),
    ("h100:8x8", {"fsdp": 8, "tp": 8}, {"fsdp": "DCN", "tp": "NVLink"}),
    ("h100:8x8", {"fsdp": 64, "tp": 1}, {"fsdp": "DCN and NVLink", "tp": "one device"}),
    ("b200:8x2", {"fsdp": 8, "tp": 2}, {"fsdp": "DCN and NVLink", "tp": "NVLink"}),
    # The second of three lines of tp is on both hosts.
    ("h200:6x2", {"fsdp": 3, "tp": 4}, {"fsdp": "DCN and NVLink", "tp": "DCN and NVLink"}),
    ("gb200:72x2", {"fsdp": 2, "tp": 72}, {"fsdp": "DCN", "tp": "NVLink"}),
]


@needs_cuda
@pytest.mark.parametrize(("name", "sizes", "links"), LINKS)
def test_the_last_axes_are_within_a_host(name, sizes, links):
    topology = sr.Topology(name)
    mesh = topology.mesh(sizes)
    assert dict(mesh.shape) == sizes
    assert len(set(mesh.devices.flat)) == topology.device_count
    assert topology.links(mesh) == links
    assert topology.mesh(**sizes) == mesh == sr.Topology(name).mesh(sizes)
    hardware = topology.hardware
    for axis, link in links.items():
        # Of what a device exchanges, the part of those in other hosts.
        outer = (topology.shape[1] - 1) / (sizes[axis] - 1) if "DCN" in link else 0.0
        seconds = outer / hardware.dcn_bytes_per_second
        seconds += (1 - outer) / hardware.link_bytes_per_second
        assert topology._links(mesh, (axis,)).rate == pytest.approx(1 / seconds)


@needs_cuda
def test_each_host_is_a_process_of_its_own():
    devices = sr.Topology("h100:8x3").devices
    assert [device.process_index for device in devices] == [i // 8 for i in range(24)]
    assert {device.device_kind for device in devices} == {"NVIDIA H100 80GB HBM3"}


@needs_cuda
def test_all_meshes_of_gpus_need_no_split():
    topology = sr.Topology("h100:4x2")
    meshes = topology.meshes(("fsdp", "tp"))
    assert [tuple(sizes.values()) for sizes in meshes] == [(1, 8), (2, 4), (4, 2), (8, 1)]
    with pytest.raises(ValueError, match="fsdp=3 are 3 devices, and h100:4x2 has 8"):
        topology.mesh(fsdp=3)


@pytest.mark.parametrize(
    ("platform", "stats", "limit"),
    [("gpu", {"bytes_limit": 60}, 60), ("gpu", None, None), ("tpu", {"bytes_limit": 60}, None)],
)
def test_the_memory_of_a_gpu_that_is_there_is_what_jax_may_allocate(platform, stats, limit):
    """Its compiler takes what needs more, and that of a TPU refuses it."""
    device = mock.Mock(platform=platform)
    device.memory_stats.return_value = stats
    assert memory_limit(mock.Mock(devices=np.array([device]))) == limit
