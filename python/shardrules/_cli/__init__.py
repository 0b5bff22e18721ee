"""The command line: `shardrules plan | check | explain | sweep | diff | demo`.

Reads a model and rules, makes a plan, and shows it. rich, of the extra `[cli]`, colours that on a
terminal. Must not decide anything about a sharding.
"""

from __future__ import annotations

import os

from shardrules._cli.app import run
from shardrules._cli.process import exit_with

__all__ = ["main"]


def main() -> None:
    """The entry point of `shardrules`. The exit codes are in `_cli/process.py`."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    exit_with(run)
