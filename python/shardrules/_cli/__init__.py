"""The command line, `shardrules`, whose commands are in `app.py`.

Reads a model and rules, makes a plan, and shows it. rich, of the extra `[cli]`, colours that on a
terminal. Must not decide anything about a sharding.
"""

from __future__ import annotations

import gc
import os
from typing import Final

from shardrules._cli.app import run
from shardrules._cli.process import exit_with

__all__ = ["main"]

_ALLOCATIONS: Final = 1_000_000


def main() -> None:
    """The entry point of `shardrules`. The exit codes are in `_cli/process.py`."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Else the collector would visit all leaves again and again; commands make few cycles.
    gc.set_threshold(_ALLOCATIONS)
    exit_with(run)
