"""Compiles a module until XLA has written what it makes, and ends: the child of `compiler`.

It runs by its file, `python -P compiler_child.py FOLDER PARENT`: what the folder asks for is in its
request.json and module.bc; XLA's files are then in its `dump`, an error in error.txt. It ends, and
takes the folder with it, when its parent does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

FILES = (
    "after_optimizations.hlo.pb", "-memory-usage-report.txt",
    "after_optimizations-buffer-assignment.txt",
)  # fmt: skip
"""Ends of the names of the files that are read."""
_LAST = {"cpu": ".debug_options", "tpu": "-memory-usage-report.pb"}
"""End of the name of the file that XLA writes behind them, by platform."""
_PAUSE = 0.01


def end_with_parent(folder: Path, parent: int) -> NoReturn:
    """End this process, and remove its folder, when the parent is gone, or closes its pipe."""
    closed = threading.Event()

    def read() -> None:
        os.read(0, 1)
        closed.set()

    threading.Thread(target=read, daemon=True).start()
    while not closed.wait(0.5) and os.getppid() == parent:
        pass
    # In a new program, since XLA's threads would go on writing into the folder.
    remove = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", remove, str(folder)])


def written(dump: Path, platform: str) -> list[Path]:
    """Return the files that XLA writes before it generates code; [] if one is missing."""
    names = [*FILES, _LAST[platform]]
    found = [file for name in names for file in dump.glob(f"*{name}")]
    return found if len(found) == len(names) else []


def end_when_written(dump: Path, platform: str) -> NoReturn:
    """End this process when XLA has written all files, before it generates code.

    On a busy machine libtpu has been seen to write its last file before all of the module.
    """
    from shardrules._program.jax_names import module_in

    before: list[int] = []
    while True:
        time.sleep(_PAUSE)
        found = written(dump, platform)
        sizes = [file.stat().st_size for file in sorted(dump.glob("*after_optimizations*"))]
        if found and sizes == before and module_in(found[0].read_bytes()):
            os._exit(0)
        before = sizes


def main(folder: Path, parent: int) -> None:
    """Compile what the folder asks for."""
    gc.disable()  # it ends too soon for that
    threading.Thread(target=end_with_parent, args=(folder, parent), daemon=True).start()
    while not (folder / "request.json").exists():
        time.sleep(_PAUSE)
    request = json.loads((folder / "request.json").read_text("utf-8"))
    # Where the parent has its packages, behind the standard library.
    packages = ("site-packages", "dist-packages")
    first = [i for i, name in enumerate(sys.path) if name.endswith(packages)]
    sys.path[min(first, default=len(sys.path)) : 0] = request["path"]
    from shardrules._program.jax_names import CompilerInput, compile_dumped, devices_without_jax

    dump, topology = folder / "dump", request["topology"]
    platform = "cpu" if topology is None else "tpu"
    threading.Thread(target=end_when_written, args=(dump, platform), daemon=True).start()
    try:
        module, options = ((folder / name).read_bytes() for name in ("module.bc", "options.pb"))
        asked = CompilerInput(module, options, request["overrides"], request["device_ids"])
        devices = devices_without_jax(topology, request["library"], len(asked.device_ids))
        compile_dumped(asked, devices, str(dump))
    except BaseException as error:
        if platform == "cpu" and written(dump, platform):  # it has no code for a custom call
            os._exit(0)
        name = type(error).__name__
        text = str(error) if name in ("JaxRuntimeError", "XlaRuntimeError") else f"{name}: {error}"
        (folder / "error.txt").write_text(text, "utf-8", "backslashreplace")
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
