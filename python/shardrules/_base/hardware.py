"""`Hardware`: what a device can compute, hold and send, with the public figures of some devices."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from shardrules._base.arguments import check_real, check_type, integer, strings
from shardrules._base.dtypes import numpy_name
from shardrules._base.text import brief, nearest, shown

_COMPILER: Final = "compiler"
"""The table of a device in `hardware.toml` that is for XLA alone."""


@dataclass(frozen=True)
class Hardware:
    """What one device can compute, hold and send; a device is what JAX calls one.

    Args:
        name: Its name in tables.
        flops_per_second: By dtype of the operands, the dense matrix operations per second.
        memory_bytes: Bytes of its memory.
        memory_bytes_per_second: Bytes that it reads or writes per second.
        link: The name of the network inside a slice or node, such as "ICI" or "NVLink".
        link_bytes_per_second: Bytes that a device sends per second over all its links of that
            network together; it receives as many.
        link_devices: The most devices of a slice or node, which that network connects.
        dcn_bytes_per_second: Bytes that a device sends per second to other slices or nodes.
        torus_dimensions: Dimensions of the torus that the links make; 1 for a switch, which gives
            each pair of devices all of the bandwidth. Default: 1.
        efficiency: The part of its peak that the products of a whole step reach, by which the time
            of a traced step is more than at best. Default: 1.
        sources: Where the figures are from.

    Raises:
        ValueError: A figure is not above 0, or a dtype is unknown.
        TypeError: A figure is not a number, or a name not a string.

    Example:
        >>> import dataclasses, shardrules as sr
        >>> sr.Hardware.named("v5p").flops_per_second["bfloat16"]
        459000000000000.0
        >>> rack = dataclasses.replace(sr.Hardware.named("B200"), name="NVL72", link_devices=72)
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_second: float
    link: str
    link_bytes_per_second: float
    link_devices: int
    dcn_bytes_per_second: float
    torus_dimensions: int = 1
    efficiency: float = 1.0
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("name", "link"):
            check_type(name, getattr(self, name), str, "a string")
        what = "a dict by dtype, such as {'bfloat16': 459e12}"
        check_type("flops_per_second", self.flops_per_second, Mapping, what)
        flops = {}
        for dtype, rate in self.flops_per_second.items():
            check_type("a key of flops_per_second", dtype, str, "a dtype's name")
            _check_rate(f"flops_per_second[{dtype!r}]", rate)
            try:
                flops[numpy_name(dtype)] = rate
            except ValueError as error:
                raise ValueError(f"flops_per_second: {error}") from None
        if not flops:
            raise ValueError("flops_per_second is {}; it needs a dtype, as {'bfloat16': 459e12}")
        for name in ("memory_bytes_per_second", "link_bytes_per_second", "dcn_bytes_per_second"):
            _check_rate(name, getattr(self, name))
        for name in ("memory_bytes", "link_devices", "torus_dimensions"):
            object.__setattr__(self, name, integer(name, getattr(self, name), 1))
        check_fraction("efficiency", self.efficiency)
        object.__setattr__(self, "flops_per_second", flops)
        object.__setattr__(self, "sources", strings("sources", self.sources))

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, *sorted(self.flops_per_second.items())))

    @classmethod
    def named(cls, name: str) -> Hardware:
        """Return public figures of a device: v4, v5e, v5p, v6e, 7x, A100, H100, H200, B200, GB200.

        The hardware page has them with their sources. On 7x a chip is two devices.

        Raises:
            ValueError: There are no figures for it; the message has the nearest name, and all.
        """
        check_type("name", name, str, "the name of a device")
        return _public_hardware("name", name)


@functools.cache
def public_hardware() -> dict[str, Hardware]:
    """Return the devices with public figures, by name."""
    return {
        name: Hardware(name, **{key: table[key] for key in table.keys() - {_COMPILER}})
        for name, table in _tables().items()
    }


def device_of(name: str) -> Hardware | None:
    """Return the device of this name, in any case, if it has public figures."""
    devices = {known.lower(): device for known, device in public_hardware().items()}
    return devices.get(name.lower())


def compiler_facts(name: str) -> Mapping[str, Any]:
    """Return what XLA's compiler is told of a GPU, by keys that `hardware.toml` explains."""
    facts: Mapping[str, Any] = _tables()[name][_COMPILER]
    return facts


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    import tomllib
    from importlib import resources

    text = (resources.files("shardrules._base") / "hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def as_hardware(name: str, hardware: Any) -> Hardware:
    """Return the hardware that a user gives as the parameter `name`: a record, or a name."""
    check_type(name, hardware, Hardware | str, "a Hardware or a name such as 'v5p'")
    return _public_hardware(name, hardware) if isinstance(hardware, str) else hardware


def _public_hardware(parameter: str, name: str) -> Hardware:
    match = device_of(name)
    if match is None:
        by_name = public_hardware()
        near = nearest(name, by_name)
        meant = f"did you mean {near!r}? " if near else ""
        raise ValueError(
            f"{parameter}: there are no figures for {brief(name)}; {meant}there are some for "
            f"{', '.join(by_name)}; give those of others as a shardrules.Hardware"
        )
    return match


def check_fraction(name: str, value: Any) -> None:
    """Check a part of a whole."""
    check_real(name, value)
    if not 0 < value <= 1:
        raise ValueError(f"{name} is {shown(value)}; it must be above 0 and at most 1")


def _check_rate(name: str, value: Any) -> None:
    check_real(name, value)
    if isinstance(value, bool) or not 0 < value < inf:
        raise ValueError(f"{name} is {shown(value)}; it must be a number above 0")
