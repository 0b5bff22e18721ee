"""The page of a report: data, styles and scripts put into one HTML file that fetches nothing.

Costs the size of the data. Must not know what the data means.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any, Final

from shardrules._planning.showing.report.data import report_data
from shardrules._printable import printable_lines

if TYPE_CHECKING:
    from shardrules._planning.asking.budget import DeviceBytes, Room
    from shardrules._planning.asking.findings import Findings
    from shardrules._planning.asking.sweep import Sweep
    from shardrules._planning.columns import Columns
    from shardrules._planning.showing.report.data import Proposed

__all__ = ["report_html"]

_FILES: Final = resources.files(__name__.rpartition(".")[0])
_SCRIPTS: Final = ("base.js", "tree.js", "sections.js", "leaves.js", "charts.js")
# Scripts and styles count by their hashes alone.
_POLICY: Final = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; "
    "base-uri 'none'; form-action 'none'"
)
# None of them may be markup or end the element; in JSON they occur in strings only.
_IN_SCRIPTS: Final = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}


def report_html(
    columns: Columns,
    findings: Findings,
    sweep: Sweep | None,
    title: str,
    *,
    room: Room,
    held: DeviceBytes,
    proposed: Proposed | None = None,
) -> str:
    """A plan as one HTML page that works offline: no part of it may fetch anything.

    Args:
        columns: What to show.
        findings: As from `Plan.check`.
        sweep: Rows of a mesh sweep, for a chart; without them there is none.
        title: Such as the model's name.
        room: The memory that there is, for the verdict and a line in that chart.
        held: The bytes on each device.
        proposed: Other rules, shown at the end; without them there is nothing.

    Raises:
        ValueError: The sweep has other bytes for the plan's mesh.
    """
    scripts, styles = [*map(_text, _SCRIPTS)], _text("page.css")
    return Template(_text("page.html")).substitute(
        policy=_POLICY.format(scripts=" ".join(map(_hash, scripts)), styles=_hash(styles)),
        title=html.escape(_printable(title)).encode("ascii", "xmlcharrefreplace").decode(),
        styles=styles,
        data=_json(
            report_data(columns, findings, sweep, title, room=room, held=held, proposed=proposed)
        ),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def _text(name: str) -> str:
    return (_FILES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(data: Any) -> str:
    """JSON in ASCII, U+2028 and lone surrogates escaped, that cannot leave its element."""
    # What json does not know are NumPy's integers.
    text = json.dumps(_printable(data), separators=(",", ":"), default=int)
    return text.translate(_IN_SCRIPTS)


def _printable(value: Any) -> Any:
    """The same with all texts as a terminal gets them: a mark of direction would turn a name."""
    if isinstance(value, str):
        return printable_lines(value.split("\n"))
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    return [*map(_printable, value)] if isinstance(value, list | tuple) else value
