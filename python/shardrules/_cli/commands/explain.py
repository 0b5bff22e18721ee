"""`shardrules explain`: why an array has its spec."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli.arguments import Argument
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

__all__ = ["command"]


def command(
    source: Source,
    path: Annotated[
        str,
        Argument(
            help="The path of the array; or what several arrays that are alike have in common: a "
            "folded path, a glob such as 'layers/*/wq', or the end of their paths."
        ),
    ],
    rules: RulesFile | None = None,
    mesh: Mesh | None = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> None:
    """Explain the spec of one array: the rules that match it, and each correction."""
    planned = load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        stacked=stacked, companions=companions,
    )  # fmt: skip
    print(planned.plan.explain(path))
