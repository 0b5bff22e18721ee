"""`Plan.check`: the coverage contract, which is that nothing is replicated or ignored silently.

Each check is one function from a plan to findings; all run, and all is reported at once. Costs per
kind of leaf, and one more walk if a rule wins nothing. Must not know how findings are shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from shardrules._arguments import check_choice
from shardrules._plan.check_leaves import (
    catch_alls,
    cut_ranks,
    following,
    replicated,
    too_large,
    unpinned,
)
from shardrules._plan.check_names import (
    dead_names,
    fewer_names,
    half_heads,
    nnx_values,
    taken,
    unknown_names,
    unnamed,
)
from shardrules._plan.check_rules import (
    corrections,
    dead_rules,
    misfits,
    shadowed_rules,
    siblings,
    uncut,
    unmatched,
    unplaceable,
    unused_axes,
)
from shardrules._plan.findings import CHECK_KINDS, LEVELS, Findings
from shardrules._plan.queries import Queries
from shardrules._plan.table import DEFAULT_LARGE
from shardrules._text import counted, mesh_shown

if TYPE_CHECKING:
    from shardrules._plan.findings import CheckKind, Declared, FindingKind, Level
    from shardrules._plan.table import Columns

_CHECKS: Final = (
    too_large, unmatched, misfits, unplaceable, catch_alls, replicated, uncut, corrections,
    unpinned, unknown_names, unnamed, fewer_names, taken, dead_names,
    dead_rules, shadowed_rules, siblings, following, cut_ranks, half_heads, nnx_values, unused_axes,
)  # fmt: skip


def check(
    columns: Columns,
    *,
    large: int = DEFAULT_LARGE,
    declared: Declared,
    head_dim: int | None = None,
    hbm: int | None = None,
    levels: Mapping[CheckKind, Level | Literal["off"]] | None = None,
) -> Findings:
    """See `Plan.check`."""
    chosen: dict[FindingKind, Level | Literal["off"]] = dict((levels or {}).items())
    for kind, level in chosen.items():
        check_choice("levels: a kind of finding", kind, CHECK_KINDS)
        check_choice(f"levels: the level of {kind!r}", level, (*LEVELS, "off"))
    queries = Queries(columns, large, declared, head_dim, hbm)
    found = (one for each in _CHECKS for one in each(queries))
    levelled = ((one, chosen.get(one.kind, one.level)) for one in found)
    kept = (one._replace(level=level) for one, level in levelled if level != "off")
    return Findings(kept, _scope(columns, [kind for kind in chosen if chosen[kind] == "off"]))


def _scope(columns: Columns, off: list[FindingKind]) -> str:
    """What is looked at, in words."""
    counts = f"{counted(len(columns.paths), 'leaf')}, {counted(len(columns.rules), 'rule')}"
    mesh = mesh_shown(columns.axis_sizes) or "one device"
    return f"{counts}, on {mesh}" + (f"; not looked for: {', '.join(off)}" if off else "")
