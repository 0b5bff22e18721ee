"""Compiles a module until XLA has written what it makes, and ends: in the child of `compiler`.

The module is in the folder's module.bc; XLA's files are then in its `dump`.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from shardrules._program.jax_names import (
    CompilerInput,
    compile_dumped,
    devices_without_jax,
    module_in,
)

FILES = (
    "after_optimizations.hlo.pb", "-memory-usage-report.txt",
    "after_optimizations-buffer-assignment.txt",
)  # fmt: skip
"""Ends of the names of the files that are read."""
_LAST = {"cpu": ".debug_options", "tpu": "-memory-usage-report.pb"}
"""End of the name of the file that XLA writes behind them, by platform."""
_PAUSE = 0.01


def written(dump: Path, platform: str) -> list[Path]:
    """Return the files that XLA writes before it generates code; [] if one is missing."""
    names = [*FILES, _LAST[platform]]
    found = [file for name in names for file in dump.glob(f"*{name}")]
    return found if len(found) == len(names) else []


def end_when_written(dump: Path, platform: str) -> NoReturn:
    """End this process when XLA has written all files, before it generates code.

    On a busy machine libtpu has been seen to write its last file before all of the module.
    """
    before: list[int] = []
    while True:
        time.sleep(_PAUSE)
        found = written(dump, platform)
        sizes = [file.stat().st_size for file in sorted(dump.glob("*after_optimizations*"))]
        if found and sizes == before and module_in(found[0].read_bytes()):
            os._exit(0)
        before = sizes


def main(folder: Path, request: dict[str, Any]) -> None:
    """Compile what the folder asks for."""
    gc.disable()  # it ends too soon for that
    dump, topology = folder / "dump", request["topology"]
    platform = "cpu" if topology is None else "tpu"
    threading.Thread(target=end_when_written, args=(dump, platform), daemon=True).start()
    try:
        module, options = ((folder / name).read_bytes() for name in ("module.bc", "options.pb"))
        asked = CompilerInput(module, options, request["overrides"], request["device_ids"])
        devices = devices_without_jax(topology, request["library"], len(asked.device_ids))
        compile_dumped(asked, devices, str(dump))
    except BaseException:
        # For a custom call XLA for CPU has no code.
        if platform != "cpu" or not written(dump, platform):
            raise
