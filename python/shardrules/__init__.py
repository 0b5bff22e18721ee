"""shardrules decides how every array of a huge JAX model is sharded.

Start with `match_partition_rules` and `named_shardings`. `shard` and `with_sharding_constraint`
apply shardings to arrays, `plan` works without devices, and `Rules` compiles a rule list once.
"""

import atexit
import sys
from typing import TYPE_CHECKING

# A name is imported when it is first used: matching needs neither planning nor files nor proofs,
# and the help of the command line needs none of them. Type checkers and IDEs see the imports, and
# not __getattr__, which would make them accept any name.
if TYPE_CHECKING:
    from shardrules._correction import Correction, RuleSpec
    from shardrules._file_error import FileError
    from shardrules._files.public import RuleFile, read_hardware, read_model, read_rules
    from shardrules._hardware import Hardware
    from shardrules._logical.context import logical_axis_rules
    from shardrules._logical.dialects import FLAX_CORE, HALIAX, LINEN, MAXTEXT, LogicalDialect
    from shardrules._logical.rules import LogicalRules
    from shardrules._matching.coverage import Coverage
    from shardrules._matching.dialects import (
        BIG_VISION,
        EASYLM,
        EFORMER,
        KERAS,
        KEYSTR,
        NNX,
        SPECTRAX,
        TP_PLAN,
        WINDOW,
        Dialect,
    )
    from shardrules._matching.rules import Rules, match_partition_rules
    from shardrules._moving.api import *
    from shardrules._patching.patch import patch, unpatch
    from shardrules._planning.api import *
    from shardrules._shape_specs import fsdp
    from shardrules._sharding.by_names import (
        RulesFallback,
        explain_logical,
        logical_to_mesh,
        logical_to_mesh_sharding,
        with_logical_constraint,
    )
    from shardrules._sharding.compare import Decision, Difference, compare
    from shardrules._sharding.constraints import with_sharding_constraint
    from shardrules._sharding.fingerprint import fingerprint
    from shardrules._sharding.leaf_shardings import named_shardings
    from shardrules._sharding.local_data import shard_local
    from shardrules._sharding.mesh import resolve_mesh
    from shardrules._sharding.placement import gather, shard
    from shardrules._sharding.spec_for import spec_for
    from shardrules._suggesting.api import *
    from shardrules._verifying.api import audit, verify
else:
    _OFFERED = {
        "_correction": "Correction RuleSpec",
        "_file_error": "FileError",
        "_files.public": "RuleFile read_hardware read_model read_rules",
        "_hardware": "Hardware",
        "_logical.context": "logical_axis_rules",
        "_logical.dialects": "FLAX_CORE HALIAX LINEN MAXTEXT LogicalDialect",
        "_logical.rules": "LogicalRules",
        "_matching.coverage": "Coverage",
        "_matching.dialects": "BIG_VISION EASYLM EFORMER KERAS KEYSTR NNX SPECTRAX TP_PLAN WINDOW "
        "Dialect",
        "_matching.rules": "Rules match_partition_rules",
        "_moving.api": "DEEPSEEK_STACKED DEEPSEEK_UNSTACKED HF_TO_FLAX Rename load reshard",
        "_patching.patch": "patch unpatch",
        "_shape_specs": "fsdp",
        "_sharding.by_names": "RulesFallback explain_logical logical_to_mesh "
        "logical_to_mesh_sharding with_logical_constraint",
        "_sharding.compare": "Decision Difference compare",
        "_sharding.constraints": "with_sharding_constraint",
        "_sharding.fingerprint": "fingerprint",
        "_sharding.leaf_shardings": "named_shardings",
        "_sharding.local_data": "shard_local",
        "_sharding.mesh": "resolve_mesh",
        "_sharding.placement": "gather shard",
        "_sharding.spec_for": "spec_for",
        "_suggesting.api": "Comparison CutReason Reason Suggestion suggest",
        "_verifying.api": "audit verify",
    }
    _MODULES = {name: module for module, names in _OFFERED.items() for name in names.split()}

    _JAX_CAME_FIRST = "jax" in sys.modules

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if not _JAX_CAME_FIRST:
            _leave_before_jax()
        module = import_module(f"{__name__}.{_MODULES.get(name, '_planning.api')}")
        return globals().setdefault(name, getattr(module, name))

    def __dir__() -> list[str]:
        return sorted(globals().keys() | set(__all__))


def _leave() -> None:
    """Tells the other processes of a job, which may be waiting for this one, that it ends."""
    if "jax" in sys.modules:
        from shardrules._jax import is_coordinated

        if is_coordinated():
            from shardrules._sharding import coordination

            coordination.leave()


def _leave_before_jax() -> None:
    """Registers `_leave` last, so that it runs before JAX's handler, which waits for all."""
    atexit.unregister(_leave)
    atexit.register(_leave)


_leave_before_jax()

__all__ = [
    "BIG_VISION",
    "DEEPSEEK_STACKED",
    "DEEPSEEK_UNSTACKED",
    "EASYLM",
    "EFORMER",
    "FLAX_CORE",
    "HALIAX",
    "HF_TO_FLAX",
    "KERAS",
    "KEYSTR",
    "LINEN",
    "LORA",
    "MAXTEXT",
    "NNX",
    "QUANTIZED",
    "SPECTRAX",
    "TP_PLAN",
    "WINDOW",
    "Change",
    "Companion",
    "Comparison",
    "Correction",
    "Coverage",
    "CutReason",
    "Decision",
    "DeviceBytes",
    "Dialect",
    "Difference",
    "Explanation",
    "FileError",
    "Finding",
    "Findings",
    "FindingsError",
    "Hardware",
    "Kind",
    "LogicalDialect",
    "LogicalRules",
    "Loss",
    "Plan",
    "PlanDiff",
    "Reason",
    "Rename",
    "RuleFile",
    "RuleSpec",
    "Rules",
    "RulesFallback",
    "StepTime",
    "Suggestion",
    "Sweep",
    "SweepRow",
    "Traffic",
    "Transfer",
    "TransferRow",
    "Transmission",
    "Tried",
    "TriedName",
    "Zero1",
    "audit",
    "compare",
    "explain_logical",
    "fingerprint",
    "fsdp",
    "gather",
    "load",
    "logical_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_sharding",
    "match_partition_rules",
    "named_shardings",
    "patch",
    "plan",
    "read_hardware",
    "read_model",
    "read_rules",
    "reshard",
    "resolve_mesh",
    "shard",
    "shard_local",
    "spec_for",
    "stacked",
    "suggest",
    "unpatch",
    "unstacked",
    "verify",
    "with_logical_constraint",
    "with_sharding_constraint",
]
__version__ = "0.2.0"
