"""`main`, the entry point of the command `shardrules`; click's commands are in `app.py`."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from shardrules._cli.app import run
from shardrules._cli.process import exit_with

_ALLOCATIONS: Final = 1_000_000
_DEVICES: Final = ("accel*", "vfio/*", "nvidia*", "kfd")
"""What there is in /dev of TPUs and GPUs."""


def main() -> None:
    """Run the command that the process's arguments name."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Else JAX would look for a TPU because its compiler is there, and libtpu write many lines.
    if find_spec("libtpu") and not any(any(Path("/dev").glob(name)) for name in _DEVICES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Else the collector would visit all leaves again and again; commands make few cycles.
    gc.set_threshold(_ALLOCATIONS)
    exit_with(run)
