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
from typing import Any, NoReturn

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


def end_when_written(dump: Path, platform: str) -> NoReturn:
    """End this process when XLA has written all files, before it generates code."""
    names, before = [*FILES, _LAST[platform]], [0]
    while True:
        time.sleep(_PAUSE)
        found = [file for name in names for file in dump.glob(f"*{name}")]
        sizes = [file.stat().st_size for file in found]
        if len(found) == len(names) and sizes == before and is_whole(found[0].read_bytes()):
            os._exit(0)
        before = sizes


def is_whole(proto: bytes) -> bool:
    """Say whether the last field of a serialized HloProto ends where the file does."""
    end = 0
    while (length := len(proto) - end) > 0:
        size = shift = 0
        for byte in proto[end + 1 : end + min(length, 11)]:
            end += 1
            size |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        end += 1 + size
    return end == len(proto) > 0


def described(request: dict[str, Any]) -> list[Any]:
    """Return the devices to compile for, in the order of the mesh."""
    import jax

    if (topology := request["topology"]) is None:
        return list(jax.devices("cpu")[: request["device_count"]])
    from jax.experimental import topologies

    name, options = topology
    options = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
    asked: dict[str, Any] = {"platform": "tpu", "topology_name": name, **options}
    found: list[Any] = topologies.get_topology_desc(**asked).devices
    device_of = {device.id: device for device in found}
    return [device_of[number] for number in request["device_ids"]]


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
    from shardrules._program.jax_names import compile_dumped

    dump = folder / "dump"
    platform = "cpu" if request["topology"] is None else "tpu"
    threading.Thread(target=end_when_written, args=(dump, platform), daemon=True).start()
    try:
        module = (folder / "module.bc").read_bytes()
        compile_dumped(module, described(request), request["options"], str(dump))
    except BaseException as error:
        name = type(error).__name__
        text = str(error) if name in ("JaxRuntimeError", "XlaRuntimeError") else f"{name}: {error}"
        (folder / "error.txt").write_text(text, "utf-8", "backslashreplace")
        os._exit(2)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
