"""Runs what a folder asks for, and ends with its parent: the process of `compiler.Child`.

It runs by its file, `python -P child.py FOLDER PARENT`: the folder's request.json names the module
that does it. An error is then in error.txt. The folder goes when the parent does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import NoReturn

FAILED = 3
"""Its exit code after an error; 1 and 2 are those of Python."""
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


def main(folder: Path, parent: int) -> NoReturn:
    """Run what the folder asks for."""
    threading.Thread(target=end_with_parent, args=(folder, parent), daemon=True).start()
    while not (folder / "request.json").exists():
        time.sleep(_PAUSE)
    request = json.loads((folder / "request.json").read_text("utf-8"))
    # Where the parent has its packages, behind the standard library.
    packages = ("site-packages", "dist-packages")
    first = [i for i, name in enumerate(sys.path) if name.endswith(packages)]
    sys.path[min(first, default=len(sys.path)) : 0] = request.pop("path")
    run = import_module(request.pop("module")).main
    try:
        run(folder, request)
    except BaseException as error:
        name = type(error).__name__
        text = str(error) if name in ("JaxRuntimeError", "XlaRuntimeError") else f"{name}: {error}"
        (folder / "error.txt").write_text(text, "utf-8", "backslashreplace")
        os._exit(FAILED)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
