"""`main`, the entry point of the command `shardrules`; click's commands are in `app.py`."""

from __future__ import annotations

import gc
import os
from typing import Final

from shardrules._cli.app import run
from shardrules._cli.process import exit_with

_ALLOCATIONS: Final = 1_000_000


def main() -> None:
    """Run the command that the process's arguments name."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Else the collector would visit all leaves again and again; commands make few cycles.
    gc.set_threshold(_ALLOCATIONS)
    exit_with(run)
