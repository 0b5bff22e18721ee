"""shardrules decides how every array of a huge JAX model is sharded.

Start with `match_partition_rules` and `named_shardings`. `shard` and `with_sharding_constraint`
apply shardings to arrays, `plan` works without devices, and `Rules` compiles a rule list once.
"""

import atexit
import sys

# A name is imported when it is first used: matching needs neither planning nor files nor proofs.
# Type checkers and IDEs read `__init__.pyi`.
_PUBLIC = {
    "_checkpoint.load": "load",
    "_checkpoint.renames": "Rename",
    "_checkpoint.reshard": "reshard",
    "_checkpoint.saving": "save",
    "_base.correction": "Correction",
    "_files.manifest": "write_manifest",
    "_files.public": "read_hardware read_model read_rules",
    "_base.hardware": "Hardware",
    "_base.io": "FileError",
    "_place.mesh": "resolve_mesh",
    "_program.topologies.topology": "Topology",
    "compat._patch": "patch unpatch",
    "_place.constraint": "with_sharding_constraint",
    "_place.logical": "logical_to_mesh with_logical_constraint",
    "_place.named_shardings": "named_shardings spec_for",
    "_place.shard": "gather shard shard_local",
    "_plan.companions": "Companion LORA QUANTIZED stacked unstacked",
    "_plan.findings": "FindingsError",
    "_plan.plan": "Plan plan",
    "_plan.state": "Zero1",
    "_program.compile": "OutOfMemory compile",
    "_step.tracing": "trace",
    "_program.compiling": "compiling",
    "_program.program": "inspect",
    "_rules.logical_rules": "LogicalRules logical_axis_rules",
    "_rules.rules": "Rules match_partition_rules",
    "_solve.solution": "solve",
    "_base.rule_specs": "RuleSpec fsdp",
    "_suggest.suggest": "suggest",
    "_verify.audit": "audit",
    "_verify.prove": "prove",
    "_verify.verify": "verify",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
# Names of 0.2 that have moved to a public module.
_MOVED = {
    "dialects": (
        "BIG_VISION Dialect EASYLM EFORMER FLAX_CORE HALIAX KERAS KEYSTR LINEN LogicalDialect "
        "MAXTEXT NNX SPECTRAX"
    ),
    "renames": "DEEPSEEK_STACKED DEEPSEEK_UNSTACKED HF_TO_FLAX",
    "types": (
        "Change Comparison Coverage CutReason DeviceBytes Explanation "
        "Finding Findings Kind Loss PlanDiff Reason RuleFile RulesFallback StepTime Suggestion "
        "Sweep SweepRow Traffic Transfer TransferRow Transmission Tried TriedName"
    ),
}
_SUBMODULES = ("compat", "dialects", "renames", "types")
_JAX_CAME_FIRST = "jax" in sys.modules
__all__ = sorted(_MODULES)  # noqa: PLE0605
__version__ = "0.3.0"


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    module = _MODULES.get(name) or _moved(name)
    value = getattr(import_module(f"{__name__}.{module}"), name)
    if not _JAX_CAME_FIRST:
        _leave_before_jax()
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__) | set(_SUBMODULES))


def _moved(name: str) -> str:
    """Return the public module that a name of 0.2 has moved to, with a warning."""
    for module, names in _MOVED.items():
        if name in names.split():
            import warnings

            new = f"{__name__}.{module}.{name}"
            message = f"{__name__}.{name} is deprecated and goes in 0.5; use {new}"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            return module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _leave() -> None:
    """Tell the other processes of a job, which may be waiting for this one, that it ends."""
    if "jax" in sys.modules:
        from shardrules._base.jax_names import is_coordinated

        if is_coordinated():
            from shardrules._place import processes

            processes.leave()


def _leave_before_jax() -> None:
    """Register `_leave` last, so that it runs before JAX's handler, which waits for all."""
    atexit.unregister(_leave)
    atexit.register(_leave)


_leave_before_jax()
