"""Types of results, for annotations and `isinstance`; nobody needs to construct them."""

from importlib import import_module

# A module is imported with its first type: most of them import JAX. Type checkers read `types.pyi`.
_PUBLIC = {
    "_estimate.buffers": "Buffer Memory Totals",
    "_estimate.schedule": "Transmission",
    "_estimate.step_time": "StepTime",
    "_estimate.sweep": "Sweep SweepRow",
    "_estimate.traffic": "Traffic",
    "_estimate.transfer": "Transfer TransferRow",
    "_files.rules": "RuleFile",
    "_place.logical": "RulesFallback",
    "_plan.diff": "Change PlanDiff",
    "_plan.explain": "Explanation Tried TriedName",
    "_plan.findings": "Finding Findings",
    "_plan.memory": "DeviceBytes",
    "_plan.table": "Kind Loss",
    "_program.collectives": "Collective",
    "_program.compiling": "CompileLog Reshard",
    "_program.program": "Program",
    "_program.step_seconds": "ProgramTime",
    "_program.timeline": "Span Timeline",
    "_rules.matcher": "Coverage",
    "_solve.activations": "Activation",
    "_solve.choices": "Alternative ClassChoice",
    "_solve.outcome": "Gain",
    "_solve.proof": "ProofRound SentBytes SolutionProof",
    "_solve.recompute": "RematChoice",
    "_solve.solution": "Solution",
    "_step.step": "DimensionClass Step Work",
    "_suggest.suggestion": "Comparison CutReason Reason Suggestion",
    "_base.text": "Place",
    "_verify.prove": "Proof",
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"shardrules.{_MODULES[name]}")
    return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
