"""Files with the figures of a device."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

import shardrules as sr
from shardrules._base.hardware import public_hardware

NODE = """
name = "node"
memory_bytes = 96e9
memory_bytes_per_second = 4e12
link = "NVLink"
link_bytes_per_second = 450e9
link_devices = 8
dcn_bytes_per_second = 25e9

[flops_per_second]
BF16 = 989e12
"""


def test_a_file_is_a_record(write):
    read = sr.read_hardware(write("node.toml", NODE))
    assert read == sr.Hardware(
        "node", {"bfloat16": 989e12}, 96 * 10**9, 4e12, "NVLink", 450e9, 8, 25e9
    )
    assert type(read.memory_bytes) is int
    assert (read.torus_dimensions, read.sources) == (1, ())


@pytest.mark.parametrize("name", list(public_hardware()))
def test_every_public_device_can_be_written_as_a_file(write, name):
    shipped = tomllib.loads((resources.files("shardrules._base") / "hardware.toml").read_text())
    table = {"name": name, **shipped[name]}
    table.pop("compiler", None)  # what a compiler for described devices reads, and no file has
    flops = table.pop("flops_per_second")
    lines = [f"{key} = {value!r}" for key, value in table.items()]
    lines += ["[flops_per_second]", *(f"{key} = {value}" for key, value in flops.items())]
    assert sr.read_hardware(write("node.toml", "\n".join(lines))) == sr.Hardware.named(name)
