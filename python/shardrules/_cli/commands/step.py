"""`shardrules step`: what a step does before it is compiled."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli import options
from shardrules._cli.options import Option
from shardrules._cli.project import command


@command("my_package.train:step_on --mesh fsdp=64,tp=8")
def step(
    *, function: options.Function, mesh: options.Mesh, rules: options.StepRules,
    array: Annotated[str | None, Option("--array", metavar="PATH",
        help="Say of this argument alone what the step does with its dimensions.")],
) -> None:  # fmt: skip
    """Show what a step does before it is compiled: dimensions, their roles, and FLOPs by line."""
    from shardrules._cli.sources import trace_on

    dimensions = trace_on(function, mesh, rules)
    print(dimensions.explain(array) if array else dimensions)
