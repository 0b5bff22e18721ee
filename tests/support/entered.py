"""What of the package a call enters; run as a program, what a command enters, its imports counted.

python -P tests/support/entered.py check model.json ...   # prints it as JSON, last on stderr
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>"}  # functions before Python 3.12


@contextmanager
def entered() -> Iterator[list[tuple[str, str]]]:
    """The file and the name of each function, class body and module of ours, in their order."""
    spec = find_spec("shardrules")
    assert spec is not None
    assert spec.origin is not None
    package, rows = str(Path(spec.origin).parent), list[tuple[str, str]]()

    def hook(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(package) and code.co_name not in _COMPREHENSIONS
        if event == "call" and is_ours:
            rows.append((code.co_filename, code.co_name))

    sys.setprofile(hook)
    try:
        yield rows
    finally:
        sys.setprofile(None)


def entered_by_command(folder: Path, *words: str) -> list[tuple[str, str]]:
    """The same of a command, in a process of its own."""
    command = [sys.executable, "-P", __file__, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return [(file, name) for file, name in json.loads(done.stderr.splitlines()[-1])]


if __name__ == "__main__":
    with entered() as counted:
        from shardrules._cli import main

        try:
            main()
        finally:
            sys.setprofile(None)
            print(json.dumps(counted), file=sys.stderr)
