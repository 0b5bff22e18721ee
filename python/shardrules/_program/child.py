"""Runs what its parent asks for, and ends with it: the process of `compiler.Child`.

It runs by its file, `python -P child.py FOLDER PARENT`: FOLDER/request names the module whose
`main` does it. An error is then in FOLDER/error.txt; the folder goes when the parent does. Its own
`main` compiles a module until XLA has written what it makes of it to FOLDER/dump.
"""

from __future__ import annotations

import gc
import marshal
import os
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

FAILED = 3
"""Its exit code after an error; 1 and 2 are those of Python."""
FILES = (
    "after_optimizations.hlo.pb", "-memory-usage-report.txt",
    "after_optimizations-buffer-assignment.txt",
)  # fmt: skip
"""Ends of the names of XLA's files that are read."""
_LAST = {"cpu": ".debug_options", "tpu": "-memory-usage-report.pb"}
"""End of the name of the file that XLA writes behind them, by platform."""
_PAUSE = 0.01


def serve(folder: Path, parent: int) -> NoReturn:
    """Run what the parent asks for."""
    threading.Thread(target=end_with_parent, args=(folder, parent), daemon=True).start()
    while not (folder / "request").exists():
        time.sleep(_PAUSE)
    path, module, request = marshal.loads((folder / "request").read_bytes())
    # Where the parent has its packages, behind the standard library.
    packages = ("site-packages", "dist-packages")
    first = [i for i, name in enumerate(sys.path) if name.endswith(packages)]
    sys.path[min(first, default=len(sys.path)) : 0] = path
    run = import_module(module).main
    try:
        run(folder, **request)
    except BaseException as error:
        name = type(error).__name__
        text = str(error) if name in ("JaxRuntimeError", "XlaRuntimeError") else f"{name}: {error}"
        (folder / "error.txt").write_text(text, "utf-8", "backslashreplace")
        os._exit(FAILED)
    os._exit(0)


def end_with_parent(folder: Path, parent: int) -> NoReturn:
    """End this process, and remove its folder, when the parent is gone, or closes its pipe."""
    closed = threading.Event()

    def read() -> None:
        os.read(0, 1)
        closed.set()

    # On Windows the parent's number stays; and a fork of the parent may hold the pipe open.
    threading.Thread(target=read, daemon=True).start()
    while not closed.wait(0.5) and os.getppid() == parent:
        pass
    # In a new program, since XLA's threads would go on writing into the folder.
    remove = "import shutil, sys; shutil.rmtree(sys.argv[1], ignore_errors=True)"
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", remove, str(folder)])


def main(
    folder: Path, program: tuple[Any, ...], topology: tuple[str, Any] | None, library: str | None
) -> None:
    """Compile a `CompilerInput` for described TPUs by libtpu, its library; or for host devices."""
    # `serve` has set the path by now.
    from shardrules._program import jax_names

    gc.disable()  # it ends too soon for that
    dump, platform = folder / "dump", "cpu" if topology is None else "tpu"
    threading.Thread(
        target=end_when_written, args=(dump, platform, jax_names.module_in), daemon=True
    ).start()
    try:
        step = jax_names.CompilerInput(*program)
        devices = jax_names.devices_without_jax(topology, library, len(step.device_ids))
        jax_names.compile_input(
            step, devices,
            xla_dump_to=str(dump), xla_dump_hlo_as_proto=True, xla_dump_hlo_as_text=True,
        )  # fmt: skip
    except BaseException:
        # For a custom call XLA for CPU has no code.
        if platform != "cpu" or not written(dump, platform):
            raise


def end_when_written(
    dump: Path, platform: str, module_in: Callable[[bytes], bytes | None]
) -> NoReturn:
    """End this process when XLA has written all files, before it generates code.

    On a busy machine libtpu has been seen to write its last file before all of the module.
    """
    before: list[int] = []
    while True:
        time.sleep(_PAUSE)
        files = written(dump, platform)
        sizes = [file.stat().st_size for file in sorted(dump.glob("*after_optimizations*"))]
        if files and sizes == before and module_in(files[0].read_bytes()):
            os._exit(0)
        before = sizes


def written(dump: Path, platform: str) -> list[Path]:
    """Return the files that XLA writes before it generates code; [] if one is missing."""
    names = [*FILES, _LAST[platform]]
    files = [file for name in names for file in dump.glob(f"*{name}")]
    return files if len(files) == len(names) else []


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
