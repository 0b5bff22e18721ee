"""The public names of `shardrules`, which `__init__.py` imports when they are first used."""

from shardrules import compat as compat
from shardrules import dialects as dialects
from shardrules import types as types
from shardrules._base.hardware import Hardware as Hardware
from shardrules._base.io import FileError as FileError
from shardrules._base.rule_specs import Correction as Correction
from shardrules._base.rule_specs import RuleSpec as RuleSpec
from shardrules._base.rule_specs import fsdp as fsdp
from shardrules._checkpoint.load import load as load
from shardrules._checkpoint.names import Rename as Rename
from shardrules._checkpoint.reshard import reshard as reshard
from shardrules._checkpoint.saving import save as save
from shardrules._place.constraint import with_sharding_constraint as with_sharding_constraint
from shardrules._place.logical import logical_to_mesh as logical_to_mesh
from shardrules._place.logical import with_logical_constraint as with_logical_constraint
from shardrules._place.mesh import resolve_mesh as resolve_mesh
from shardrules._place.named_shardings import named_shardings as named_shardings
from shardrules._place.named_shardings import spec_for as spec_for
from shardrules._place.shard import gather as gather
from shardrules._place.shard import shard as shard
from shardrules._place.shard import shard_local as shard_local
from shardrules._plan.companion_tables import LORA as LORA
from shardrules._plan.companion_tables import QUANTIZED as QUANTIZED
from shardrules._plan.companions import Companion as Companion
from shardrules._plan.companions import stacked as stacked
from shardrules._plan.files.models import read_model as read_model
from shardrules._plan.files.models import write_manifest as write_manifest
from shardrules._plan.files.rules import read_rules as read_rules
from shardrules._plan.findings import FindingsError as FindingsError
from shardrules._plan.plan import Plan as Plan
from shardrules._plan.planning import plan as plan
from shardrules._plan.suggest.suggest import suggest as suggest
from shardrules._program.memory import OutOfMemory as OutOfMemory
from shardrules._program.program import inspect as inspect
from shardrules._program.rehearse import rehearse as rehearse
from shardrules._program.solve.solution import solve as solve
from shardrules._program.step.step import trace as trace
from shardrules._program.topologies.topology import Topology as Topology
from shardrules._program.verify.audit import audit as audit
from shardrules._program.verify.prove import prove as prove
from shardrules._program.verify.sweep import sweep as sweep
from shardrules._program.verify.verify import verify as verify
from shardrules._rules.logical_rules import LogicalRules as LogicalRules
from shardrules._rules.logical_rules import logical_axis_rules as logical_axis_rules
from shardrules._rules.rules import Rules as Rules
from shardrules._rules.rules import match_partition_rules as match_partition_rules
from shardrules.compat._patch import patch as patch
from shardrules.compat._patch import unpatch as unpatch

__all__: list[str]
__version__: str

def _leave() -> None: ...
