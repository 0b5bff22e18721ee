"""The command line: `shardrules plan | check | explain | sweep | diff | demo`.

Reads a model and rules, makes a plan, and shows it. typer and rich come with the extra `[cli]`, and
are imported when a command runs. Must not decide anything about a sharding.
"""

from __future__ import annotations

import os

from shardrules._cli.process import FAILED, exit_with, note

__all__ = ["main"]


def main() -> None:
    """The entry point of `shardrules`. The exit codes are in `_cli/process.py`."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    exit_with(_run)


def _run() -> int:
    try:
        from shardrules._cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        note(f"the command line needs {error.name}: pip install 'shardrules[cli]'")
        return FAILED
    return run()
