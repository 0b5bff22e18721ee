"""What type checkers and IDEs know of `shardrules`; a test compares it with `__init__.py`."""

from shardrules import compat as compat
from shardrules import dialects as dialects
from shardrules import renames as renames
from shardrules import types as types
from shardrules._base.correction import Correction as Correction
from shardrules._base.hardware import Hardware as Hardware
from shardrules._base.io import FileError as FileError
from shardrules._base.rule_specs import RuleSpec as RuleSpec
from shardrules._base.rule_specs import fsdp as fsdp
from shardrules._checkpoint.load import load as load
from shardrules._checkpoint.renames import Rename as Rename
from shardrules._checkpoint.reshard import reshard as reshard
from shardrules._checkpoint.saving import save as save
from shardrules._files.manifest import write_manifest as write_manifest
from shardrules._files.public import read_hardware as read_hardware
from shardrules._files.public import read_model as read_model
from shardrules._files.public import read_rules as read_rules
from shardrules._place.constraint import with_sharding_constraint as with_sharding_constraint
from shardrules._place.logical import logical_to_mesh as logical_to_mesh
from shardrules._place.logical import with_logical_constraint as with_logical_constraint
from shardrules._place.mesh import resolve_mesh as resolve_mesh
from shardrules._place.named_shardings import named_shardings as named_shardings
from shardrules._place.named_shardings import spec_for as spec_for
from shardrules._place.shard import gather as gather
from shardrules._place.shard import shard as shard
from shardrules._place.shard import shard_local as shard_local
from shardrules._plan.companions import LORA as LORA
from shardrules._plan.companions import QUANTIZED as QUANTIZED
from shardrules._plan.companions import Companion as Companion
from shardrules._plan.companions import stacked as stacked
from shardrules._plan.companions import unstacked as unstacked
from shardrules._plan.findings import FindingsError as FindingsError
from shardrules._plan.plan import Plan as Plan
from shardrules._plan.plan import plan as plan
from shardrules._plan.state import Zero1 as Zero1
from shardrules._program.compile import OutOfMemory as OutOfMemory
from shardrules._program.compile import compile as compile
from shardrules._program.compiling import compiling as compiling
from shardrules._program.program import inspect as inspect
from shardrules._program.topologies.topology import Topology as Topology
from shardrules._rules.logical_rules import LogicalRules as LogicalRules
from shardrules._rules.logical_rules import logical_axis_rules as logical_axis_rules
from shardrules._rules.rules import Rules as Rules
from shardrules._rules.rules import match_partition_rules as match_partition_rules
from shardrules._solve.solution import solve as solve
from shardrules._step.tracing import trace as trace
from shardrules._suggest.suggest import suggest as suggest
from shardrules._verify.audit import audit as audit
from shardrules._verify.prove import prove as prove
from shardrules._verify.verify import verify as verify
from shardrules.compat._patch import patch as patch
from shardrules.compat._patch import unpatch as unpatch

# Deprecated here: names of 0.2 that have moved.
from shardrules.dialects import BIG_VISION as BIG_VISION
from shardrules.dialects import EASYLM as EASYLM
from shardrules.dialects import EFORMER as EFORMER
from shardrules.dialects import FLAX_CORE as FLAX_CORE
from shardrules.dialects import HALIAX as HALIAX
from shardrules.dialects import KERAS as KERAS
from shardrules.dialects import KEYSTR as KEYSTR
from shardrules.dialects import LINEN as LINEN
from shardrules.dialects import MAXTEXT as MAXTEXT
from shardrules.dialects import NNX as NNX
from shardrules.dialects import SPECTRAX as SPECTRAX
from shardrules.dialects import Dialect as Dialect
from shardrules.dialects import LogicalDialect as LogicalDialect
from shardrules.renames import DEEPSEEK_STACKED as DEEPSEEK_STACKED
from shardrules.renames import DEEPSEEK_UNSTACKED as DEEPSEEK_UNSTACKED
from shardrules.renames import HF_TO_FLAX as HF_TO_FLAX
from shardrules.types import Change as Change
from shardrules.types import Comparison as Comparison
from shardrules.types import Coverage as Coverage
from shardrules.types import CutReason as CutReason
from shardrules.types import DeviceBytes as DeviceBytes
from shardrules.types import Explanation as Explanation
from shardrules.types import Finding as Finding
from shardrules.types import Findings as Findings
from shardrules.types import Kind as Kind
from shardrules.types import Loss as Loss
from shardrules.types import PlanDiff as PlanDiff
from shardrules.types import Reason as Reason
from shardrules.types import RuleFile as RuleFile
from shardrules.types import RulesFallback as RulesFallback
from shardrules.types import StepTime as StepTime
from shardrules.types import Suggestion as Suggestion
from shardrules.types import Sweep as Sweep
from shardrules.types import SweepRow as SweepRow
from shardrules.types import Traffic as Traffic
from shardrules.types import Transfer as Transfer
from shardrules.types import TransferRow as TransferRow
from shardrules.types import Transmission as Transmission
from shardrules.types import Tried as Tried
from shardrules.types import TriedName as TriedName

__all__ = [
    "LORA",
    "QUANTIZED",
    "Companion",
    "Correction",
    "FileError",
    "FindingsError",
    "Hardware",
    "LogicalRules",
    "OutOfMemory",
    "Plan",
    "Rename",
    "RuleSpec",
    "Rules",
    "Topology",
    "Zero1",
    "audit",
    "compile",
    "compiling",
    "fsdp",
    "gather",
    "inspect",
    "load",
    "logical_axis_rules",
    "logical_to_mesh",
    "match_partition_rules",
    "named_shardings",
    "patch",
    "plan",
    "prove",
    "read_hardware",
    "read_model",
    "read_rules",
    "reshard",
    "resolve_mesh",
    "save",
    "shard",
    "shard_local",
    "solve",
    "spec_for",
    "stacked",
    "suggest",
    "trace",
    "unpatch",
    "unstacked",
    "verify",
    "with_logical_constraint",
    "with_sharding_constraint",
    "write_manifest",
]
__version__: str

def _leave_before_jax() -> None: ...
