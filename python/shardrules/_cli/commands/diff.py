"""`shardrules diff`: what differs between two plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import click

from shardrules._cli import options
from shardrules._cli.options import FILE, Argument, Option, Type
from shardrules._cli.project import command


def _share(value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", value):
        raise ValueError(f"{value!r}: write a part, such as 2%")
    return float(value[:-1]) / 100


@command("plan.lock model.json -r rules.toml", has_jobs=True)
def diff(
    *,
    before: Annotated[str, Argument("before", metavar="BEFORE", type=FILE,
        about="A lock, which plan --lock writes.")],
    model: Annotated[str, Argument("model", metavar="AFTER", type=FILE,
        about="A lock, FILE.lock, or a model with --rules.")],
    rules: Annotated[tuple[str, ...], options.rules_of_model()],
    dialect: options.Dialect,
    mesh: Annotated[options.Sizes | None,
        options.mesh(help="Mesh of the model. Default: that of the lock.")],
    fail_on: Annotated[str, Option("--fail-on", type=click.Choice(["any", "grown", "never"]),
        default="any", in_job=False,
        help="What makes the exit code 1: any difference, or more bytes on a device or in its "
        "host's memory.")],
    tolerance: Annotated[float, Option("--tolerance", type=Type("share", _share), default="0%",
        in_job=False, help="How much may be added with --fail-on grown, such as 2%.")],
) -> int:  # fmt: skip
    """Show the differences between two plans.

    Without BEFORE, of all jobs of the project file that have one: between it and their models.
    Exits with 1 if there are any, or with --fail-on grown, if the plan needs more memory.
    """
    from shardrules._base.io import FileError
    from shardrules._cli.sources import plan_model
    from shardrules._plan.plan import Plan

    if tolerance and fail_on != "grown":
        raise ValueError("--tolerance is of --fail-on grown: give it, too")
    if not Path(before).exists():
        raise FileError(f"{before}: no such file; shardrules plan --lock {before} writes it")
    first = Plan.from_lock(Path(before))
    second = Plan.from_lock(Path(model)) if model.endswith(".lock") else None
    if second is None:
        if not rules:
            raise FileError(f"{model}: give its --rules; the name of a lock ends with .lock")
        second, *_ = plan_model(model, rules, dialect, mesh or first.axis_sizes)
    elif rules or dialect or mesh:
        raise ValueError("a lock has its own rules and mesh: leave out --rules and --mesh")
    differences = first.diff(second)
    print(differences)
    if fail_on == "grown":
        sizes = (differences.bytes, differences.host_bytes)
        return 1 if any(new > old * (1 + tolerance) for old, new in sizes) else 0
    return 1 if differences and fail_on == "any" else 0
