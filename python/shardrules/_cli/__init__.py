"""The command line: `shardrules plan | check | explain | sweep | diff | demo`.

Reads what it is given, makes a plan, and shows it. typer and rich come with the extra `[cli]`, and
are imported when a command runs. Must not decide anything about a sharding.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """The entry point of `shardrules`: exits with 0, 1 (findings, differences) or 2 (bad input)."""
    # numpy's BLAS would start a thread for each core, and a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from shardrules._cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"the command line needs {error.name}: pip install 'shardrules[cli]'", file=sys.stderr
        )
        raise SystemExit(2) from None
    app()
