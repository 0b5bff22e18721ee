"""`shardrules diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardrules._cli import options
from shardrules._cli.options import FILE, SHARE, argument, option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan


@command("plan.lock model.json -r rules.toml", has_jobs=True)
@argument("before", metavar="BEFORE", type=FILE, about="A lockfile or a model.")
@argument("model", metavar="AFTER", type=FILE, about="A lockfile or a model.")
@options.how_to_plan(needs_rules=False)
@options.mesh(help="Mesh for models. Default: that of a lock.")
@option("--fail-on", type=click.Choice(["any", "grown", "never"]), default="any", in_job=False,
    help="What makes the exit code 1: any difference, or more bytes on a device or in its host's "
    "memory.")  # fmt: skip
@option("--tolerance", type=SHARE, default="0%", in_job=False,
    help="How much may be added with --fail-on grown, such as 2%.")  # fmt: skip
def diff(
    *, before: str, model: str, how: options.HowToPlan, mesh: options.Sizes | None, fail_on: str,
    tolerance: float,
) -> int:  # fmt: skip
    """Show the differences between two plans.

    Without BEFORE, of all jobs of the project file that have one: between it and their models.
    Exits with 1 if there are any, or with --fail-on grown, if the plan needs more memory.
    """
    if tolerance and fail_on != "grown":
        raise ValueError("--tolerance is of --fail-on grown: give it, too")
    first, second = _sides([before, model], how, mesh)
    differences = first.diff(second)
    print(differences)
    if fail_on == "grown":
        sizes = (differences.bytes, differences.host_bytes)
        return 1 if any(new > old * (1 + tolerance) for old, new in sizes) else 0
    return 1 if differences and fail_on == "any" else 0


def _sides(names: list[str], how: options.HowToPlan, mesh: options.Sizes | None) -> list[Plan]:
    """Plan both sides: locks, or models with rules and a mesh."""
    from shardrules._base.io import FileError, memory_within
    from shardrules._cli.planning import is_lock, plan_model
    from shardrules._plan.plan import Plan

    if names[0].endswith(".lock") and not Path(names[0]).exists():
        raise FileError(f"{names[0]}: no such file; shardrules plan --lock {names[0]} writes it")
    with memory_within(how.max_memory):
        plans = {name: Plan.from_lock(Path(name)) for name in names if is_lock(name)}
    if plans.keys() >= {*names} and (how.rules or how.dialect or mesh):
        raise ValueError("a lock has its own rules and mesh: leave out --rules and --mesh")
    mesh = mesh or next((lock.axis_sizes for lock in plans.values()), None)
    for name in names:
        if name not in plans:
            if not how.rules or mesh is None:
                why = "not a lock" if Path(name).exists() else "no such lock"
                raise FileError(f"{name}: {why}; for a model, give --rules and --mesh as well")
            plans[name] = plan_model(name, how, mesh).plan
    return [plans[name] for name in names]
