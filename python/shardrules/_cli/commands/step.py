"""`shardrules step`: what a step does before it is compiled."""

from __future__ import annotations

from shardrules._cli import options
from shardrules._cli.options import option
from shardrules._cli.project import command


@command("my_package.train:step_on --mesh fsdp=64,tp=8")
@options.of_step
@options.of_mesh
@options.of_step_rules
@option("--array", metavar="PATH",
    help="Say of this argument alone what the step does with its dimensions.")  # fmt: skip
def step(*, function: str, mesh: options.Sizes, rules: tuple[str, ...], array: str | None) -> None:
    """Show what a step does before it is compiled: dimensions, their roles, and FLOPs by line."""
    from shardrules._cli.planning import trace_on

    traced = trace_on(function, mesh, rules)
    print(traced.explain(array) if array else traced)
