"""`shardrules plan`: the table of a plan, its bytes, and its files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from shardrules._cli import values
from shardrules._cli.arguments import Option
from shardrules._cli.inputs import Planned
from shardrules._cli.loading import load
from shardrules._cli.options import (
    MAX_MEMORY,
    AxesOverDcn,
    Companions,
    DialectName,
    ExpertsPerToken,
    Gradients,
    HardwareName,
    Hbm,
    HostMemory,
    MaxMemory,
    Mesh,
    MinSize,
    NoFallbacks,
    Optimizer,
    OptimizerDtype,
    OptimizerMemory,
    RulesFile,
    Source,
    Stacked,
    Tokens,
)
from shardrules._cli.process import note
from shardrules._cli.show import plan_json, show_plan
from shardrules._files.models import manifest_text
from shardrules._io import write_text
from shardrules._plan.memory import Room
from shardrules._text import printable

__all__ = ["command"]


def command(
    source: Source,
    rules: RulesFile | None = None,
    mesh: Mesh | None = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
    gradients: Gradients = None,
    optimizer: Optimizer = None,
    optimizer_dtype: OptimizerDtype = None,
    optimizer_memory: OptimizerMemory = None,
    hbm: Hbm = None,
    host_memory: HostMemory = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    axes_over_dcn: AxesOverDcn = None,
    experts_per_token: ExpertsPerToken = None,
    format_: Annotated[str, Option("--format", help="Output format: text or json.")] = "text",
    lock: Annotated[Path | None, Option(help="Write a lockfile to this path.")] = None,
    html: Annotated[
        Path | None, Option(help="Write an HTML report to this path; it works offline.")
    ] = None,
    manifest: Annotated[
        Path | None,
        Option(help="Write the model's shapes to this path, as a model for later commands."),
    ] = None,
    must_fit: Annotated[
        bool, Option("--must-fit", help="Exit with 1 if the bytes do not fit into --hbm.")
    ] = False,
) -> int:
    """Show the spec of every array, its bytes on each device, and the time of a step."""
    values.one_of("--format", format_, ("text", "json"))
    step = values.step(tokens, hardware, axes_over_dcn, experts_per_token)
    room = values.room(hbm, host_memory, step["hardware"])
    counted = values.counted(gradients, optimizer, optimizer_dtype, optimizer_memory)
    if must_fit and room == Room(None, None):
        raise ValueError("--must-fit: give the memory that it must fit into, as --hbm 96GB")
    _check_targets(
        {"--lock": lock, "--html": html, "--manifest": manifest}, filter(None, (source, rules))
    )
    planned = load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        stacked=stacked, companions=companions,
    )  # fmt: skip
    plan = planned.plan
    held = plan.bytes_per_device(**counted)
    time = None if tokens is None else plan.step_time(**step, **counted)
    # Made before anything is written: a failure leaves no file behind.
    report = None if html is None else _report(planned, room, counted, step)
    arrays = None if manifest is None else manifest_text(plan, planned.model)
    if lock is not None:
        plan.lock(lock)
    if manifest is not None and arrays is not None:
        write_text(manifest, arrays)
    if html is not None and report is not None:
        write_text(html, report)
        note(printable(f"{html}: a report in one file, which works offline"))
    fits = room.fits(held)
    code = 1 if must_fit and not fits else 0
    if format_ == "json":
        print(plan_json(plan, held, room, time))
        return code
    show_plan(plan)
    print(held)
    if fits is not None:
        print(f"{'fits' if fits else 'DOES NOT FIT'} into {room}")
    if time is not None:
        print(time)
    return code


def _check_targets(written: Mapping[str, Path | None], read: Iterable[str]) -> None:
    """Checks that no output replaces an input or another output."""
    taken = {os.path.realpath(name): name for name in read}
    for option, path in written.items():
        if path is None:
            continue
        name = taken.setdefault(os.path.realpath(path), option)
        if name != option:
            raise ValueError(f"{option} {path} would replace {name}; give it another name")


def _report(planned: Planned, *given: Any) -> str:
    # Rules are suggested for it, which takes as many modules as everything else.
    from shardrules._cli.report import report_page

    return report_page(planned, *given)
