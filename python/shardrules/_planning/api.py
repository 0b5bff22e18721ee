"""What the package exports of planning: `shardrules.__getattr__` imports it on first use.

Must not define anything.
"""

from shardrules._planning.budget import DeviceBytes
from shardrules._planning.companions import LORA, QUANTIZED, stacked, unstacked
from shardrules._planning.derive import Companion
from shardrules._planning.diff import Change, PlanDiff
from shardrules._planning.explain import Explanation, Tried
from shardrules._planning.findings import Finding, Findings
from shardrules._planning.kinds import Kind
from shardrules._planning.plan import Plan, plan
from shardrules._planning.sweep import Sweep, SweepRow

__all__ = [
    "LORA",
    "QUANTIZED",
    "Change",
    "Companion",
    "DeviceBytes",
    "Explanation",
    "Finding",
    "Findings",
    "Kind",
    "Plan",
    "PlanDiff",
    "Sweep",
    "SweepRow",
    "Tried",
    "plan",
    "stacked",
    "unstacked",
]
