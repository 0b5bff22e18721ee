"""Types of results, for annotations and `isinstance`; nobody needs to construct them."""

from shardrules._estimate.schedule import Transmission as Transmission
from shardrules._estimate.step_time import StepTime as StepTime
from shardrules._estimate.sweep import Sweep as Sweep
from shardrules._estimate.sweep import SweepRow as SweepRow
from shardrules._estimate.traffic import Traffic as Traffic
from shardrules._estimate.transfer import Transfer as Transfer
from shardrules._estimate.transfer import TransferRow as TransferRow
from shardrules._files.rules import RuleFile as RuleFile
from shardrules._place.compare import Decision as Decision
from shardrules._place.compare import Difference as Difference
from shardrules._place.logical import RulesFallback as RulesFallback
from shardrules._plan.diff import Change as Change
from shardrules._plan.diff import PlanDiff as PlanDiff
from shardrules._plan.explain import Explanation as Explanation
from shardrules._plan.explain import Tried as Tried
from shardrules._plan.explain import TriedName as TriedName
from shardrules._plan.findings import Finding as Finding
from shardrules._plan.findings import Findings as Findings
from shardrules._plan.memory import DeviceBytes as DeviceBytes
from shardrules._plan.table import Kind as Kind
from shardrules._plan.table import Loss as Loss
from shardrules._rules.matcher import Coverage as Coverage
from shardrules._suggest.suggestion import Comparison as Comparison
from shardrules._suggest.suggestion import CutReason as CutReason
from shardrules._suggest.suggestion import Reason as Reason
from shardrules._suggest.suggestion import Suggestion as Suggestion
