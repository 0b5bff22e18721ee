"""The public names of planning: `shardrules.__getattr__` imports this on first use.

Must not define anything.
"""

from shardrules._planning.asking.budget import DeviceBytes as DeviceBytes
from shardrules._planning.asking.diff import Change as Change
from shardrules._planning.asking.diff import PlanDiff as PlanDiff
from shardrules._planning.asking.explain import Explanation as Explanation
from shardrules._planning.asking.explain import Tried as Tried
from shardrules._planning.asking.explain import TriedName as TriedName
from shardrules._planning.asking.findings import Finding as Finding
from shardrules._planning.asking.findings import Findings as Findings
from shardrules._planning.asking.findings import FindingsError as FindingsError
from shardrules._planning.asking.step_time import StepTime as StepTime
from shardrules._planning.asking.sweep import Sweep as Sweep
from shardrules._planning.asking.sweep import SweepRow as SweepRow
from shardrules._planning.asking.traffic import Traffic as Traffic
from shardrules._planning.asking.traffic import Transmission as Transmission
from shardrules._planning.asking.transfer import Transfer as Transfer
from shardrules._planning.asking.transfer import TransferRow as TransferRow
from shardrules._planning.companion import Companion as Companion
from shardrules._planning.companions import LORA as LORA
from shardrules._planning.companions import QUANTIZED as QUANTIZED
from shardrules._planning.companions import stacked as stacked
from shardrules._planning.companions import unstacked as unstacked
from shardrules._planning.kinds import Kind as Kind
from shardrules._planning.kinds import Loss as Loss
from shardrules._planning.plan import Plan as Plan
from shardrules._planning.plan import plan as plan
from shardrules._planning.zero1 import Zero1 as Zero1
