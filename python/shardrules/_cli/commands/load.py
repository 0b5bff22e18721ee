"""`shardrules load --dry-run`: what loading a checkpoint reads."""

from __future__ import annotations

from typing import Annotated

from shardrules._checkpoint.filling import forecast
from shardrules._cli.arguments import Option
from shardrules._cli.loading import load
from shardrules._cli.options import (
    MAX_MEMORY,
    Companions,
    DialectName,
    MaxMemory,
    Mesh,
    MinSize,
    NoFallbacks,
    RulesFile,
    Source,
    Stacked,
)
from shardrules._text import byte_count

__all__ = ["command"]


def command(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Required, as this command loads nothing: shardrules.load does, in Python.",
        ),
    ] = False,
    processes: Annotated[
        int, Option(min=1, help="Processes that share the mesh's devices in their order.")
    ] = 1,
    bandwidth: Annotated[
        str, Option(help="Bytes that a process reads in a second, such as 2GB.")
    ] = "2GB",
    in_flight: Annotated[
        str | None, Option(help="Maximum bytes in flight, such as 512MiB. Default: 2GiB.")
    ] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> None:
    """Tell what shardrules.load would read: bytes per process and device, in flight, time."""
    if not dry_run:
        raise ValueError("give --dry-run; arrays are loaded in Python, by shardrules.load")
    speed = byte_count(bandwidth)
    if not speed:
        raise ValueError(f"--bandwidth is {bandwidth!r}; give bytes per second, such as 2GB")
    most = None if in_flight is None else byte_count(in_flight)
    plan = load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        stacked=stacked, companions=companions,
    ).plan  # fmt: skip
    print(forecast(plan._columns, processes=processes, in_flight=most, bandwidth=speed))
