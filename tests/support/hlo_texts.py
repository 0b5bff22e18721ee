"""Compiles small steps for TPU, CUDA and CPU without their hardware, and records the HLO.

    python -m tests.support.hlo_texts tpu                 where jax and libtpu are installed
    python -m tests.support.hlo_texts cuda SPEC           where jax[cuda12] is; SPEC is XLA's text
                                                          proto of an H100 (its target_config/specs)
    python -m tests.support.hlo_texts cpu                 with any JAX

A name behind these restricts it to texts whose names begin with it. Each text is written to
`tests/data/hlo`, and to `expected.json` what `hlo_counts` and the executable say of it.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "hlo"
FSDP, BOTH, RING, EXPERTS = {"fsdp": 8}, {"fsdp": 4, "tp": 2}, {"sp": 8}, {"ep": 8}
LARGE = {"width": 4096, "hidden": 14336, "heads": 32, "head": 128, "vocab": 32000, "length": 2048}
SMALL = {"width": 256, "hidden": 512, "heads": 4, "vocab": 1024, "length": 64}


class Record(NamedTuple):
    """A text: the step, its mesh, and the lengths of the step's own scans."""

    step: str
    mesh: Mapping[str, int]
    scans: tuple[int, ...] = ()
    arguments: Mapping[str, Any] = {}
    topology: str = ""


FREE = {"constrained": False}
TRAIN, UNCONSTRAINED = Record("train", BOTH, (3,)), Record("train", BOTH, (3,), FREE)
COMMON = {
    "mlp": Record("mlp", FSDP),
    "experts": Record("experts", EXPERTS),
    "ragged": Record("experts", EXPERTS, (), {"ragged": True}),
    "ring": Record("ring", RING, (8,)),
    "accumulate": Record("accumulate", FSDP, (4, 3)),
    "branches": Record("branches", BOTH, (7,)),
    "decode": Record("decode", BOTH, (4,)),
}
V5E, V5P = "v5e:2x4", "v5p:2x2x2"
RECORDS: dict[str, dict[str, Record]] = {
    "tpu": {
        "train-v5e": TRAIN._replace(topology=V5E),
        "train-v5p": TRAIN._replace(topology=V5P),
        "train-free-v5e": UNCONSTRAINED._replace(topology=V5E),
        "train-free-v5p": UNCONSTRAINED._replace(topology=V5P, arguments={**FREE, **LARGE}),
        **{f"{name}-v5e": record._replace(topology=V5E) for name, record in COMMON.items()},
        **{
            f"{name}-v5p": COMMON[name]._replace(topology=V5P)
            for name in ("mlp", "accumulate", "ragged")
        },
        "windowed-v5e": Record("windowed", FSDP, (2,), {}, V5E),
        "windowed-v5p": Record("windowed", FSDP, (2,), {}, V5P),
        "sequence-v5e": Record("sequence_parallel", {"fsdp": 2, "tp": 4}, (3,), {}, V5E),
        "sequence-v5p": Record("sequence_parallel", {"fsdp": 2, "tp": 4}, (3,), {}, V5P),
    },
    "cuda": {
        "train-h100": TRAIN,
        "train-free-h100": UNCONSTRAINED,
        **{f"{name}-h100": record for name, record in COMMON.items()},
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


def main(backend: str, *rest: str) -> None:
    os.environ.update(ENVIRONMENT[backend], JAX_PLATFORMS="cpu")
    spec = Path(rest[0]).read_text(encoding="utf-8") if backend == "cuda" else ""
    prefix = "".join(rest[backend == "cuda" :])
    path = FOLDER / "expected.json"
    expected = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, record in RECORDS[backend].items():
        label = f"{name}-{_minor_version()}" if backend == "cpu" else name
        if label.startswith(prefix):
            text, entry = recorded(backend, record, spec)
            (FOLDER / f"{label}.txt.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
            expected[label] = entry
            path.write_text(_json(dict(sorted(expected.items()))), encoding="utf-8")
            print(label, len(text), entry["totals"], flush=True)


def recorded(backend: str, record: Record, spec: str = "") -> tuple[str, dict[str, Any]]:
    """The text, with this folder's paths relative, and what is expected of a reader of it."""
    from tests.support import hlo_counts, hlo_steps

    mesh = _mesh(backend, record, spec)
    jitted, arguments = getattr(hlo_steps, record.step)(mesh, **record.arguments)
    if backend == "cpu":
        lowered = jitted.lower(*arguments)
    else:
        lowered = jitted.trace(*arguments).lower(lowering_platforms=(backend,))
    executable = lowered.compile()
    text = executable.as_text().replace(f"{ROOT}/", "")
    memory = executable.memory_analysis()
    rows = hlo_counts.collectives(text)
    return text, {
        "backend": backend,
        "jax": _version("jax"),
        **({"libtpu": _version("libtpu")} if backend == "tpu" else {}),
        "topology": record.topology or {"cuda": "h100 1x1x8", "cpu": "8 devices"}[backend],
        "mesh": dict(record.mesh),
        "step": record.step,
        "arguments": dict(record.arguments),
        "scans": list(record.scans),
        "memory": {
            name: getattr(memory, name)
            for name in dir(memory)
            if isinstance(getattr(memory, name), int) and not name.startswith(("_", "host_"))
        },
        "totals": hlo_counts.totals(rows),
        "windows": hlo_counts.windows(text),
        "collectives": rows,
    }


def _mesh(backend: str, record: Record, spec: str) -> Any:
    import jax
    import numpy as np

    if backend == "cpu":
        devices = jax.devices()
    else:
        from jax.experimental import topologies

        options = {"target_config": spec, "topology": "1x1x8"} if backend == "cuda" else {}
        devices = topologies.get_topology_desc(
            platform=backend, topology_name=record.topology, **options
        ).devices
    return jax.sharding.Mesh(np.array(devices).reshape(*record.mesh.values()), tuple(record.mesh))


def _minor_version() -> str:
    return ".".join(_version("jax").split(".")[:2])


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _json(entries: Mapping[str, Any]) -> str:
    """A line for each collective, so that a diff can be read."""
    blocks = []
    for name, entry in entries.items():
        rows = {key: entry[key] for key in ("windows", "collectives")}
        head = json.dumps({k: v for k, v in entry.items() if k not in rows}, indent=1)
        lists = ",\n ".join(
            f'"{key}": [' + ",".join(f"\n  {json.dumps(row)}" for row in value) + "]"
            for key, value in rows.items()
        )
        blocks.append(f"{json.dumps(name)}: {head[:-2]},\n {lists}\n}}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
