"""Plans, findings and sweeps as output: the same text everywhere, with colours on a terminal.

Imports rich only for a terminal, and does without if it is not installed. Must
not know where a plan comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TextIO

from shardrules._plan.show import heading, lines
from shardrules._plan.table import DEFAULT_LARGE, dtype_shown, is_replicated, problem_shown
from shardrules._specs import spec_shown
from shardrules._text import and_more, printable, printable_json

if TYPE_CHECKING:
    from shardrules._estimate.step_time import StepTime
    from shardrules._estimate.sweep import Sweep
    from shardrules._plan.findings import Findings
    from shardrules._plan.memory import DeviceBytes, Room
    from shardrules._plan.plan import Plan
    from shardrules._plan.table import Kind

__all__ = ["plan_json", "show_findings", "show_plan", "show_sweep", "sweep_json", "working"]

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows a spinner with this text on a terminal while the body runs."""
    if not _is_styled(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(_plain(what)):
        yield


def show_plan(plan: Plan) -> None:
    """Prints the heading and all folded paths."""
    columns = plan._columns
    print(heading(columns))
    head, *rows = lines(columns)
    kinds = [columns.kinds[folded.group] for folded in columns.folded]
    _print_table(head, rows, [_is_alarming(kind, columns.axis_sizes) for kind in kinds])


def _is_alarming(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    is_large = kind.bytes >= DEFAULT_LARGE and is_replicated(kind, axis_sizes)
    return kind.status != "placed" or is_large


def _print_table(head: str, rows: list[str], alarming: list[bool]) -> None:
    """Prints the same lines everywhere; on a terminal the head is bold and some rows are red."""
    if not _is_styled(sys.stdout):
        print("\n".join([head, *rows]))
        return
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(_plain(head), style="bold")
    for row, is_red in zip(rows, alarming, strict=True):
        console.print(_plain(row), style="red" if is_red else None)


def show_findings(findings: Findings) -> None:
    """Prints all findings and their number."""
    if not _is_styled(sys.stdout):
        print(findings)
        return
    from rich.console import Console
    from rich.text import Text

    from shardrules._plan.findings import conclusion, finding_lines

    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        label, message, *lines = finding_lines(finding)
        console.print(Text.assemble((label, _STYLES[finding.level]), ": ", message))
        console.print(Text("\n".join(lines)), style="dim" if finding.level == "info" else None)
    console.print(_plain(conclusion(findings)), style="bold")


def show_sweep(found: Sweep, most: int) -> None:
    """Prints the first `most` rows, how many more there are, and the assumptions."""
    from shardrules._estimate.sweep import table

    head, *rows = table(found[:most])
    _print_table(head, rows, [row.fits is False for row in found[:most]])
    for line in (*and_more(len(found), most, "mesh"), *found.notes):
        print(printable(line))


def sweep_json(found: Sweep) -> str:
    """The sweep as a JSON object: a row for each mesh, the best first, and the assumptions."""
    rows = [{**row._asdict(), "time": row.time and _time_content(row.time)} for row in found]
    return printable_json({"rows": rows, "assumptions": found.assumptions})


def _time_content(time: StepTime) -> dict[str, Any]:
    content = time._asdict()
    del content["assumptions"]
    sent = [{"axes": axes, "seconds": seconds} for axes, seconds in time.sent.items()]
    return {**content, "sent": sent, "dominant": time.dominant}


def plan_json(plan: Plan, held: DeviceBytes, room: Room, time: StepTime | None) -> str:
    """The plan as a JSON object, with a row for each folded path.

    Args:
        plan: The plan.
        held: Its bytes on each device.
        room: The memory that there is, for the key "fits". Without any there is no such key.
        time: The time of a step, for the key "time"; None for no such key.
    """
    leaves = [
        {
            "path": one.pattern,
            "leaves": len(one.rows),
            "shape": kind.shape,
            "dtype": dtype_shown(kind),
            "rule": kind.rule,
            **({} if kind.names is None else {"names": kind.names, "rules": kind.dim_rules}),
            "spec": spec_shown(kind.spec),
            "memory_kind": kind.memory_kind,
            "problem": problem_shown(kind),
            "bytes": kind.bytes * len(one.rows),
            "device_bytes": kind.device_bytes * len(one.rows),
            "lost": [loss.message for loss in kind.losses],
        }
        for one in plan.folded
        for kind in (plan.kinds[one.group],)
    ]
    parts = {name: int(part.max()) for name, part in zip(held._fields, held, strict=True)}
    content: dict[str, Any] = {
        "mesh": plan.axis_sizes,
        "leaves": len(plan),
        "bytes": plan.total_bytes,
        "device_bytes": {"total": held.max, **parts},
        "fingerprint": plan.fingerprint(),
        "folded": leaves,
    }
    if (fits := room.fits(held)) is not None:
        content["fits"] = fits
    if time is not None:
        content["time"] = {**_time_content(time), "assumptions": time.assumptions}
    return printable_json(content)


def _is_styled(stream: TextIO) -> bool:
    """Whether rich writes to the stream."""
    return stream.isatty() and find_spec("rich") is not None


def _plain(line: str) -> Any:
    """The line as rich text, without markup or emoji codes."""
    from rich.text import Text

    return Text(printable(line).replace("::", r"\u003a:"))
