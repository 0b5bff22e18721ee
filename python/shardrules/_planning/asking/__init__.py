"""Questions about columns: checks, explanations, budgets, diffs, sweeps, trees of shardings.

A module is imported when its question is first asked: a plan that is only shown needs few of them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers see the imports, and not __getattr__
    from shardrules._planning.asking import (
        budget,
        check,
        diff,
        explain,
        findings,
        rows,
        step_time,
        sweep,
        traffic,
        transfer,
        trees,
    )
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f"{__name__}.{name}")


__all__ = [
    "budget",
    "check",
    "diff",
    "explain",
    "findings",
    "rows",
    "step_time",
    "sweep",
    "traffic",
    "transfer",
    "trees",
]
