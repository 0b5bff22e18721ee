"""`Plan.check`: the coverage contract, which is that nothing is replicated or ignored silently.

Each check is one function from a plan to findings; all run, and all is reported at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Literal

from shardrules._base.arguments import check_choice
from shardrules._base.text import counted, mesh_shown
from shardrules._plan import check_leaves, check_names, check_rules
from shardrules._plan.check_context import CHECKS, KINDS, CheckContext
from shardrules._plan.findings import LEVELS, CheckKind, Declared, FindingKind, Findings, Level
from shardrules._plan.kinds import DEFAULT_LARGE

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_MODULES: Final = (check_leaves, check_rules, check_names)
"""Each registers its checks with `check_of`."""


def run_checks(
    plan: Plan,
    *,
    large: int = DEFAULT_LARGE,
    declared: Declared,
    head_dim: int | None = None,
    hbm: int | None = None,
    levels: Mapping[CheckKind, Level | Literal["off"]] | None = None,
) -> Findings:
    """See `Plan.check`."""
    new_levels: dict[FindingKind, Level | Literal["off"]] = dict((levels or {}).items())
    for kind, level in new_levels.items():
        check_choice("levels: a kind of finding", kind, tuple(KINDS))
        check_choice(f"levels: the level of {kind!r}", level, (*LEVELS, "off"))
    context = CheckContext(plan, large, declared, head_dim, hbm)
    others = "paths" if context.path_rules is None else "names"
    findings = [
        finding._replace(level=level)
        for check, rules_of in CHECKS.items()
        if rules_of != others
        for finding in check(context)
        if (level := new_levels.get(finding.kind, finding.level)) != "off"
    ]
    counts = f"{counted(len(plan.paths), 'leaf')}, {counted(len(plan.rules), 'rule')}"
    off = ", ".join(kind for kind, level in new_levels.items() if level == "off")
    scope = f"{counts}, on {mesh_shown(plan.axis_sizes) or 'one device'}"
    return Findings(findings, f"{scope}; not looked for: {off}" if off else scope)
