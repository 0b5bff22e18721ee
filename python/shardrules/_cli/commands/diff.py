"""`shardrules diff`: two plans beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from shardrules._cli import values
from shardrules._cli.arguments import Argument, Option
from shardrules._cli.inputs import is_lock, load_side
from shardrules._cli.loading import tell_fallbacks
from shardrules._cli.options import (
    MAX_MEMORY,
    Companions,
    DialectName,
    MaxMemory,
    MinSize,
    NoFallbacks,
    Stacked,
)
from shardrules._cli.show import working
from shardrules._io import memory_within
from shardrules._plan.plan import Plan
from shardrules._text import byte_count, mesh_shown

__all__ = ["command"]


def command(
    before: Annotated[str, Argument(help="A lockfile or a model.")],
    after: Annotated[str, Argument(help="A lockfile or a model.")],
    rules: Annotated[str | None, Option("--rules", "-r", help="Rules for models.")] = None,
    mesh: Annotated[
        str | None, Option("--mesh", "-m", help="Mesh for models. Default: that of a lock.")
    ] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> int:
    """Show the differences between two plans. Exits with 1 if there are any."""
    if is_lock(before) and is_lock(after):
        given = {
            "--rules": rules,
            "--mesh": mesh,
            "--dialect": dialect,
            "--min-size": min_size or None,
            "--no-fallbacks": no_fallbacks or None,
            "--stacked": stacked or None,
            "--companions": companions,
        }
        values.refuse("both sides are locks, which have their own rules and mesh", given)
    options = {
        "dialect": dialect,
        "min_size": min_size,
        "no_fallbacks": no_fallbacks,
        "companions": values.following(stacked, companions),
    }
    with working("reading"), memory_within(byte_count(max_memory)):
        if mesh is None and (lock := next(filter(is_lock, (before, after)), None)):
            mesh = mesh_shown(Plan.from_lock(Path(lock)).axis_sizes)
        sides = [load_side(text, rules, mesh, **options) for text in (before, after)]
    tell_fallbacks(dict.fromkeys(line for _, fallbacks in sides for line in fallbacks))
    found = sides[0][0].diff(sides[1][0])
    print(found)
    return 1 if found else 0
