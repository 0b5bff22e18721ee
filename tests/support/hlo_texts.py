"""Compiles small steps for TPU, CUDA and CPU without their hardware, and records the HLO.

    python -m tests.support.hlo_texts tpu                 where jax and libtpu are installed
    python -m tests.support.hlo_texts cuda                where jax[cuda12-local] is; for an old
                                                          JAX, which knows fewer fields of it, then
                                                          XLA's text proto of an H100 as a file (its
                                                          target_config/specs)
    python -m tests.support.hlo_texts cpu                 with any JAX

Names behind these restrict it to texts whose names begin with one of them. Each text is written to
`tests/data/hlo`. Names of texts for the CPU, and by an older JAX, end with its version.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "hlo"
NEWEST = "0.12"
FSDP, BOTH, RING, EXPERTS = {"fsdp": 8}, {"fsdp": 4, "tp": 2}, {"sp": 8}, {"ep": 8}
LARGE = {"width": 4096, "hidden": 14336, "heads": 32, "head": 128, "vocab": 32000, "length": 2048}
SMALL = {"width": 256, "hidden": 512, "heads": 4, "vocab": 1024, "length": 64}


class Record(NamedTuple):
    """A text: the step and its mesh."""

    step: str
    mesh: Mapping[str, int]
    arguments: Mapping[str, Any] = {}
    topology: str = ""


FREE = {"constrained": False}
TRAIN, UNCONSTRAINED = Record("train", BOTH), Record("train", BOTH, FREE)
COMMON = {
    "mlp": Record("mlp", FSDP),
    "experts": Record("experts", EXPERTS),
    "ragged": Record("experts", EXPERTS, {"ragged": True}),
    "ring": Record("ring", RING),
    "accumulate": Record("accumulate", FSDP),
    "branches": Record("branches", BOTH),
    "decode": Record("decode", BOTH),
}
V5E, V5P = "v5e:2x4", "v5p:2x2x2"
RECORDS: dict[str, dict[str, Record]] = {
    "tpu": {
        "train-v5e": TRAIN._replace(topology=V5E),
        "train-v5p": TRAIN._replace(topology=V5P),
        "train-free-v5e": UNCONSTRAINED._replace(topology=V5E),
        "train-free-v5p": UNCONSTRAINED._replace(topology=V5P, arguments={**FREE, **LARGE}),
        **{f"{name}-v5e": record._replace(topology=V5E) for name, record in COMMON.items()},
        **{f"{name}-v5p": COMMON[name]._replace(topology=V5P) for name in ("mlp", "accumulate")},
        "windowed-v5e": Record("windowed", FSDP, {}, V5E),
        "sequence-v5e": Record("sequence_parallel", {"fsdp": 2, "tp": 4}, {}, V5E),
        "sequence-v5p": Record("sequence_parallel", {"fsdp": 2, "tp": 4}, {}, V5P),
    },
    "cuda": {
        "train-h100": TRAIN,
        **{f"{name}-h100": record for name, record in COMMON.items()},
        "mlp-b200": Record("mlp", {"fsdp": 16}, topology="b200:8x2"),
        "accumulate-gb200": Record("accumulate", {"fsdp": 16}, topology="gb200:16"),
    },
    "cpu": {"train-cpu": TRAIN._replace(arguments=SMALL)},
}
ENVIRONMENT = {
    "tpu": {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "cuda": {},
    "cpu": {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"},
}


# Old executables for CUDA that no device has loaded have no text, nor can they be tuned.
OLD_CUDA = (
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_dump_hlo_as_text"
    " --xla_dump_to="
)


def main(backend: str, *rest: str) -> None:
    os.environ.update(ENVIRONMENT[backend], JAX_PLATFORMS="cpu")
    version = ".".join(_version("jax").split(".")[:2])
    with tempfile.TemporaryDirectory() as dump:
        if backend == "cuda" and version != NEWEST:
            os.environ["XLA_FLAGS"] = OLD_CUDA + dump
        record(backend, version, Path(dump), *rest)


def record(backend: str, version: str, dump: Path, *rest: str) -> None:
    """Write the texts, each as soon as it is compiled."""
    has_spec = bool(rest) and Path(rest[0]).is_file()
    spec = Path(rest[0]).read_text(encoding="utf-8") if has_spec else ""
    prefixes = rest[has_spec:] or ("",)
    for name, step in RECORDS[backend].items():
        label = name if backend != "cpu" and version == NEWEST else f"{name}-{version}"
        if label.startswith(prefixes):
            text = recorded(backend, step, dump, spec)
            (FOLDER / f"{label}.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            print(label, len(text), flush=True)


def recorded(backend: str, record: Record, dump: Path, spec: str = "") -> str:
    """The text, with this folder's paths relative."""
    from tests.support import hlo_steps

    mesh = _mesh(backend, record, spec)
    jitted, arguments = getattr(hlo_steps, record.step)(mesh, **record.arguments)
    if backend == "cpu":
        lowered = jitted.lower(*arguments)
    else:
        lowered = jitted.trace(*arguments).lower(lowering_platforms=(backend,))
    return (lowered.compile().as_text() or _dumped(dump)).replace(f"{ROOT}/", "")


def _mesh(backend: str, record: Record, spec: str) -> Any:
    import jax
    import numpy as np

    import shardrules

    if backend == "cpu":
        devices = jax.devices()
    elif backend == "cuda" and not spec:
        devices = shardrules.Topology(record.topology or "h100:8").devices
    else:
        from jax.experimental import topologies

        options = {"target_config": spec, "topology": "1x1x8"} if spec else {}
        devices = topologies.get_topology_desc(
            platform=backend, topology_name=record.topology, **options
        ).devices
    return jax.sharding.Mesh(np.array(devices).reshape(*record.mesh.values()), tuple(record.mesh))


def _dumped(folder: Path) -> str:
    """The newest module that XLA dumped, printed as an executable prints it."""
    from jaxlib import xla_client

    files = folder.glob("*gpu_after_optimizations.txt")
    dump = max(files, key=lambda file: file.stat().st_mtime_ns).read_text(encoding="utf-8")
    return xla_client._xla.hlo_module_from_text(dump).to_string()


def _version(package: str) -> str:
    return importlib.metadata.version(package)


if __name__ == "__main__":
    main(*sys.argv[1:])
