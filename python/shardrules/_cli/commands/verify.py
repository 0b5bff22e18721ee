"""`shardrules verify`: a compiled function beside its plan."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli.arguments import Argument, Option
from shardrules._cli.findings import check_findings_options, report_findings
from shardrules._cli.options import FailOn, FindingsFormat, Hbm
from shardrules._cli.values import memory
from shardrules._files.modules import load_object
from shardrules._io import FileError
from shardrules._text import byte_count, shown
from shardrules._verify.verify import verify

__all__ = ["command"]


def command(
    source: Annotated[
        str,
        Argument(
            help="package.module:function, which returns (compiled, inputs, outputs) or (compiled, "
            "inputs), as shardrules.verify takes them."
        ),
    ],
    format_: FindingsFormat = "text",
    fail_on: FailOn = "error",
    large: Annotated[
        str, Option(help="Minimum bytes on a device of a gathered array to be reported.")
    ] = "16MiB",
    hbm: Hbm = None,
) -> int:
    """Compare a compiled function with its plan. Exits as check does."""
    check_findings_options(format_, fail_on)
    sizes = byte_count(large), memory("--hbm", "a device", hbm)
    arguments = load_object(source)
    if not isinstance(arguments, tuple) or len(arguments) not in (2, 3):
        raise FileError(
            f"{source}: this gives {shown(arguments)}; it must be (compiled, inputs, outputs) or "
            "(compiled, inputs)"
        )
    findings = verify(*arguments, large=sizes[0], hbm=sizes[1])
    return report_findings(findings, format_, fail_on)
