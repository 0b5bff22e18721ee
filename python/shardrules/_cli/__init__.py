"""`shardrules` as a click group, whose commands are files that are imported when they are run."""

from __future__ import annotations

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from shardrules import __version__
from shardrules._cli.options import CONTEXT
from shardrules._cli.process import FAILED, exit_with
from shardrules._cli.project import command_named, names

_GC_THRESHOLD: Final = 1_000_000
_DEVICE_FILES: Final = ("accel*", "vfio/*", "nvidia*", "kfd")
"""What there is in /dev of TPUs and GPUs."""
_COMPLETE: Final = "_SHARDRULES_COMPLETE"
_EPILOG: Final = f"""\b
Exit codes:
  0        Success, without findings or differences.
  1        Findings, differences, rules to add, or no room: each command says which.
  2        An error, such as bad input; its message is on stderr.
  128 + N  An end by signal N.

\b
Completion in bash; zsh and fish alike:
  eval "$({_COMPLETE}=bash_source shardrules)"
"""


class Group(click.Group):
    """Group of all commands, of which only those that are asked for are imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands."""
        return names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command of this name."""
        return command_named(cmd_name) if cmd_name in names() else None


APP: Final = Group(
    "shardrules",
    help="Plan, check and budget the sharding of a JAX model's arrays, without a device.",
    context_settings=CONTEXT,
    epilog=_EPILOG,
)
click.version_option(__version__, message="%(prog)s %(version)s")(APP)


def main() -> None:
    """Run the command that the process's arguments name."""
    # Else numpy's BLAS would start a thread for each core; a plan multiplies no matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Else JAX would look for a TPU because its compiler is there, and libtpu write many lines.
    if find_spec("libtpu") and not any(any(Path("/dev").glob(name)) for name in _DEVICE_FILES):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Else the collector would visit all leaves again and again; commands make few cycles.
    gc.set_threshold(_GC_THRESHOLD)
    exit_with(run)


def run() -> int:
    """Run the command that the process's arguments name, and return the exit code.

    What the command raises is for `exit_with`.
    """
    words = sys.argv[1:]
    code = APP.main(words or ["--help"], "shardrules", _COMPLETE, standalone_mode=False)
    return int(code) if words else FAILED
