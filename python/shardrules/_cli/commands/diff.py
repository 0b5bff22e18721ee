"""`shardrules diff`: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from shardrules._cli import options
from shardrules._cli.command import argument, command, option
from shardrules._cli.types import FILE, SHARE

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_MOST_LINES: Final = 20


@command("plan.lock model.json -r rules.toml", has_jobs=True)
@argument("before", metavar="BEFORE", type=FILE, about="A lockfile or a model.")
@argument("model", metavar="AFTER", type=FILE, about="A lockfile or a model.")
@options.how_to_plan
@options.mesh(help="Mesh for models. Default: that of a lock.")
@option("--fail-on", type=click.Choice(["any", "grown", "never"]), default="any", in_job=False,
    help="What makes the exit code 1: any difference, or more bytes on a device or in its host's "
    "memory.")  # fmt: skip
@option("--tolerance", type=SHARE, default="0%", in_job=False,
    help="How much may be added with --fail-on grown, such as 2%.")  # fmt: skip
@options.formats("text", "github")
def diff(
    *, before: str, model: str, how: options.HowToPlan, mesh: options.Sizes | None, fail_on: str,
    tolerance: float, format: str,
) -> int:  # fmt: skip
    """Show the differences between two plans.

    Without BEFORE, of all jobs of the project file that have one: between it and their models.
    Exits with 1 if there are any, or with --fail-on grown, if the plan needs more memory.
    """
    if tolerance and fail_on != "grown":
        raise ValueError("--tolerance is of --fail-on grown: give it, too")
    first, second = _sides(before, model, how, mesh)
    differences = first.diff(second)
    if differences and format == "github":
        print(_annotation((model, *how.rules)[-1], str(differences).splitlines()))
    else:
        print(differences)
    if fail_on == "grown":
        sizes = (differences.bytes, differences.host_bytes)
        return 1 if any(new > old * (1 + tolerance) for old, new in sizes) else 0
    return 1 if differences and fail_on == "any" else 0


def _sides(
    before: str, after: str, how: options.HowToPlan, mesh: options.Sizes | None
) -> list[Plan]:
    """Plan both sides: locks, or models with rules and a mesh."""
    from shardrules._base.io import FileError
    from shardrules._cli.planning import is_lock, plan_lock, plan_model

    sides = (before, after)
    models = [side for side in sides if not is_lock(side)]
    if not models:  # which refuse what says how to plan
        return [plan_model(side, how, mesh).plan for side in sides]
    locks = {side: plan_lock(side, how.max_memory).plan for side in sides if side not in models}
    mesh = mesh or next((lock.axis_sizes for lock in locks.values()), None)
    if not how.rules or mesh is None:
        why = "not a lock" if Path(models[0]).exists() else "no such lock"
        raise FileError(f"{models[0]}: {why}; for a model, give --rules and --mesh as well")
    plans = locks | {side: plan_model(side, how, mesh).plan for side in models}
    return [plans[side] for side in sides]


def _annotation(file: str, lines: list[str]) -> str:
    """Return a warning for GitHub about the rules, or else the file that comes after."""
    from shardrules._base.text import and_more
    from shardrules._cli.show import from_root, page_title
    from shardrules._plan.findings import github_command

    shown = [*lines[:_MOST_LINES], *and_more(len(lines), _MOST_LINES, "line")]
    place = from_root(file if Path(file).is_file() else None)
    return github_command("warning", f"{page_title()} diff", shown, place)
