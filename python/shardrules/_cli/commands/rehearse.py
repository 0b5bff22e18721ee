"""`shardrules rehearse`: a small step run whole and sharded, and its results compared."""

from __future__ import annotations

from typing import Annotated, Any

import click

from shardrules._cli import options
from shardrules._cli.options import Option
from shardrules._cli.project import command


@command("my_package.train:small_step_on --mesh fsdp=4,tp=2")
def rehearse(
    *, function: options.Function,
    mesh: Annotated[options.Sizes, options.mesh(required=True, help="Devices per mesh axis, such "
        "as fsdp=4,tp=2: processors of this machine stand for them.")],
    rules: options.StepRules,
    rtol: Annotated[float | None, Option("--rtol", type=click.FloatRange(min=0),
        help="The largest difference of a result that is accepted, by its largest value. Default: "
        "eight times what one rounding does.")],
    fail_on: options.FailOn,
    format: Annotated[str, options.formats("text", "json", "github")],
) -> int:  # fmt: skip
    """Run a small step whole and sharded on this machine, and compare the results.

    Exits with 1 for findings of at least the level --fail-on.
    """
    from shardrules._cli import process, sources
    from shardrules._program.rehearse import rehearse

    def step_on(mesh: Any) -> Any:
        return sources.step_on(function, mesh, rules)

    with process.working("running the step"):
        findings = rehearse(step_on, mesh, rtol=rtol)
    return process.show_findings(findings, format, fail_on)
