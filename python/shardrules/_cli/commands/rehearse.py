"""`shardrules rehearse`: a small step run whole and sharded, and its results compared."""

from __future__ import annotations

from typing import Any

import click

from shardrules._cli import options
from shardrules._cli.options import option
from shardrules._cli.project import command


@command("my_package.train:small_step_on --mesh fsdp=4,tp=2")
@options.of_step
@options.mesh(required=True, help="Devices per mesh axis, such as fsdp=4,tp=2: processors of this "
    "machine stand for them.")  # fmt: skip
@options.of_step_rules
@option("--rtol", type=click.FloatRange(min=0), help="The largest difference of a result that is "
    "accepted, by its largest value. Default: eight times what one rounding does.")  # fmt: skip
@options.fail_on
@options.formats("text", "json", "github")
def rehearse(
    *, function: str, mesh: options.Sizes, rules: tuple[str, ...], rtol: float | None,
    fail_on: str, format: str,
) -> int:  # fmt: skip
    """Run a small step whole and sharded on this machine, and compare the results.

    Exits with 1 for findings of at least the level --fail-on.
    """
    from shardrules._cli import planning, process
    from shardrules._program.rehearse import rehearse

    def step_on(mesh: Any) -> Any:
        return planning.step_on(function, mesh, rules)

    with process.working("running the step"):
        findings = rehearse(step_on, mesh, rtol=rtol)
    return process.show_findings(findings, format, fail_on)
