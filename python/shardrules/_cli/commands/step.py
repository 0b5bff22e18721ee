"""`shardrules step`: what a step does before it is compiled."""

from __future__ import annotations

from shardrules._cli import options
from shardrules._cli.project import command


@command("my_package.train:step_on --mesh fsdp=64,tp=8")
def step(*, function: options.Function, mesh: options.Mesh, rules: options.StepRules) -> None:
    """Show what a step does before it is compiled: dimensions, their roles, and FLOPs by line."""
    from shardrules._cli.sources import trace_on

    print(trace_on(function, mesh, rules))
