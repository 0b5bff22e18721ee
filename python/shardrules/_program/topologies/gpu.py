"""GPUs of hosts as XLA's compiler for CUDA sees them, without the hardware."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.hardware import Hardware, compiler_facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GPUS: Final = {"h100": "H100", "h200": "H200", "b200": "B200", "gb200": "GB200"}
"""Names in `hardware.toml` by those in topologies."""
PLUGINS: Final = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
# Of compute capabilities 9 and 10, by the names of XLA's GpuTargetConfigProto.
_LIMITS: Final = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "fpus_per_core": 128,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "registers_per_block_limit": 2**16,
    "registers_per_core_limit": 2**16,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}
# Its products and fusions are those of this cuDNN or a newer one.
_CUDNN: Final = {"major": 9, "minor": 10}


@dataclass(frozen=True)
class Hosts:
    """Hosts of GPUs, which NVLink connects within a host, and the network between hosts."""

    hardware: str
    shape: tuple[int, int]
    """GPUs of a host, and hosts."""

    @classmethod
    def parse(cls, name: str, slices: int) -> Hosts:
        """Return the hosts that a topology's name says."""
        match = re.fullmatch(r"(\w+):(\d{1,5})(?:x(\d{1,5}))?", name)
        if match is None or 0 in (shape := (int(match[2]), int(match[3] or 1))):
            raise ValueError(
                f"the name {name!r} is no topology's: GPUs of a host, and hosts, are 'h100:8x16'"
            )
        kind = match[1].lower()
        limit = Hardware.named(GPUS[kind]).link_devices
        if shape[0] > limit:
            raise ValueError(
                f"the name {name!r}: {shape[0]:,} GPUs of a host, of which NVLink connects "
                f"{limit} at most; give the hosts behind them, such as '{kind}:{limit}x2'"
            )
        if slices > 1:
            raise ValueError(
                f"the name {name!r} with slices={slices}: GPUs have hosts, not slices; give "
                f"'{kind}:{shape[0]}x{shape[1] * slices}'"
            )
        return cls(GPUS[kind], shape)

    @property
    def device_count(self) -> int:
        """GPUs of all hosts."""
        return self.shape[0] * self.shape[1]

    @property
    def memory_limit(self) -> int:
        """Bytes that a program may need on a device: XLA compiles what needs more, too."""
        return Hardware.named(self.hardware).memory_bytes

    def described(self) -> tuple[Any, ...]:
        """Return the GPUs, in the order of their ids, as JAX's compiler has them."""
        from jax.experimental import topologies

        if not has_plugin():
            raise ImportError(
                "the compiler for CUDA is JAX's plugin, which is not installed: pip install "
                "'jax[cuda12-local]', which needs neither a GPU nor NVIDIA's libraries"
            )
        config = target_config(self.hardware)
        sizes = f"{self.shape[1]}x1x{self.shape[0]}"
        try:
            topology = topologies.get_topology_desc(
                platform="cuda", topology_name="", target_config=config, topology=sizes
            )
        except NotImplementedError as error:
            raise ImportError(
                "JAX has not loaded its plugin for CUDA: without a GPU set JAX_PLATFORMS=cpu in "
                "the environment, before JAX starts; and the plugin must be of jaxlib's version, "
                f"{version('jaxlib')}: pip install 'jax[cuda12-local]'. JAX says: {error}"
            ) from error
        return tuple(topology.devices)

    def arrange(
        self, devices: Sequence[Any], sizes: Mapping[str, int], *, is_split: bool
    ) -> npt.NDArray[np.object_]:
        """Lay devices in the order of their ids, as jax.make_mesh does with GPUs."""
        import numpy as np

        del is_split  # a switch connects all alike
        return np.array(devices, dtype=object).reshape(tuple(sizes.values()))

    def place(self, device: Any) -> tuple[int, ...]:
        """Return the host of a device, and its number in it."""
        host, number = divmod(device.id, self.shape[0])
        return host, number

    def word(self, counts: Sequence[int]) -> str:
        """Say how devices of a host are connected."""
        return Hardware.named(self.hardware).link if counts[0] > 1 else ""

    def share(self, counts: Sequence[int]) -> float:
        """Return the share of a device's links that an axis within a host has: all."""
        return 1.0

    def summed(self, counts: Sequence[int]) -> tuple[str, ...]:
        """Return the collectives that the compiler writes as all-reduces: none."""
        return ()


def target_config(hardware: str) -> str:
    """Return a GPU's facts as XLA reads them: the text form of its GpuTargetConfigProto."""
    facts = compiler_facts(hardware)
    name = json.dumps(facts["name"])
    device = _LIMITS | {
        "name": name,
        "core_count": facts["cores"],
        "clock_rate_ghz": facts["clock"] / 1e9,
        "l2_cache_size": facts["cache_bytes"],
        "device_memory_size": facts["memory_bytes"],
        "memory_bandwidth": int(facts["memory_bytes_per_second"]),
        "cuda_compute_capability": {
            "major": facts["compute_capability"],
            "feature_extension": "ACCELERATED_FEATURES",
        },
        "device_interconnect_info": {"active_links": facts["nvlinks"]},
    }
    config = {
        "gpu_device_info": device,
        "platform_name": '"CUDA"',
        "dnn_version_info": _CUDNN,
        "device_description_str": name,
    }
    return "\n".join(_proto_lines(config)) + "\n"


def _proto_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield f"{name} {{"
            yield from (f"  {line}" for line in _proto_lines(value))
            yield "}"
        else:
            yield f"{name}: {value}"


def has_plugin() -> bool:
    """Say whether JAX's plugin for CUDA is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)
