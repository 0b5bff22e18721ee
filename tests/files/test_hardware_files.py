"""Files with the figures of a device: what they say, and every way in which they can be wrong."""

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


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "node.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_file_is_a_record(write):
    read = sr.read_hardware(write(NODE))
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
    assert sr.read_hardware(write("\n".join(lines))) == sr.Hardware.named(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory = 3\n" + NODE, "key 'memory' is unknown; the keys are name, flops_per_second"),
        ("memory_byts = 3\n" + NODE, "key 'memory_byts' is unknown; did you mean 'memory_bytes'"),
        (NODE + 'dcn = "x"\n', r"flops_per_second\['dcn'\] is 'x'"),
        (NODE.replace("link_devices = 8", ""), "it has no link_devices; write them as"),
        (NODE.replace("96e9", "96.5"), "memory_bytes is 96.5"),
        (NODE.replace("96e9", "-1"), "memory_bytes is -1"),
        (NODE.replace("96e9", "true"), "memory_bytes is True"),
        (NODE.replace("96e9", "inf"), "memory_bytes is inf"),
        (NODE.replace("= 4e12", "= nan"), "memory_bytes_per_second is nan"),
        (NODE.replace("= 4e12", "= 0"), "memory_bytes_per_second is 0"),
        (NODE.replace("= 4e12", "= true"), "memory_bytes_per_second is True"),
        (NODE.replace("= 4e12", '= "4TB"'), "memory_bytes_per_second is '4TB'"),
        (NODE.replace("25e9", "inf"), "dcn_bytes_per_second is inf"),
        (NODE.replace('"NVLink"', "3"), "link is 3"),
        (NODE.replace("BF16", "bf17"), "flops_per_second: unknown dtype 'bf17'; known ones are"),
        (NODE.replace("BF16 = 989e12", ""), "flops_per_second is {}"),
        (NODE.replace("989e12", '"fast"'), r"flops_per_second\['BF16'\] is 'fast'"),
        ("[[[", "this is not TOML"),
        (b"\xff\xfe", "UTF-8|not TOML"),
        ("#" * 70_000, "at most 65.5 kB"),
        ("# nothing", "it has no name, flops_per_second, memory_bytes"),
    ],
)
def test_a_wrong_file_is_refused_by_name(write, text, message):
    path = write(text)
    with pytest.raises(sr.FileError, match=message) as told:
        sr.read_hardware(path)
    assert str(told.value).startswith(str(path))


def test_no_file(tmp_path):
    with pytest.raises(sr.FileError, match=r"none\.toml"):
        sr.read_hardware(tmp_path / "none.toml")
