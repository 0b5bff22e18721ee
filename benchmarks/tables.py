"""Measurements as Markdown: the tables of docs/evidence.md, and the README's."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from benchmarks.harness import PEERS, Result, Row, quartiles_of
from shardrules._base.text import seconds_shown

TREES = "Whole trees"
FRONT = ("case", "ours / identity", "eformer / ours", "re loop / ours", "bars")


def with_text(page: str, marker: str, text: str) -> str:
    """Return the page with the text between its markers."""
    start, end = f"<!-- {marker} -->\n\n", f"\n\n<!-- end of {marker} -->"
    before, _, rest = page.partition(start)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no place for {marker}")
    return f"{before}{start}{text}{end}{after}"


def front_table(page: str) -> str:
    """Return the rows that have a time of eformer: what the README shows of the page."""
    table = page.partition(f"### {TREES}\n")[2].partition("\n#")[0]
    head, _, *rows = (line[2:-2].split(" | ") for line in table.split("\n") if line[:1] == "|")
    every = [dict(zip(head, row, strict=True)) for row in rows]
    shown = [[row[name] for name in FRONT] for row in every if row["eformer / ours"].strip()]
    return "\n".join([*_head(*FRONT), *(_line(*row) for row in shown)])


def trees_table(results: Iterable[Result]) -> list[str]:
    """Return a row for each case: medians, with the middle half of the rounds."""
    lines = _head("case", "ours", "ours / identity", *(f"{peer} / ours" for peer in PEERS), "bars")
    for result in results:
        ours = seconds_shown(median(result.rounds["ours"]))
        of_peers = [_ratio(result, peer) for peer in PEERS]
        lines.append(
            _line(result.case.name, ours, _ratio(result, "identity"), *of_peers, result.verdict())
        )
    return lines


def _ratio(result: Result, reference: str) -> str:
    if reference not in result.rounds:
        return ""
    quartiles = quartiles_of(result.ratios(reference))
    return f"{result.ratio(reference):.2f}x{_between(quartiles)}"


def rows_table(rows: Iterable[Row]) -> list[str]:
    """Return a row for each measurement."""
    lines = _head("what", "measured", "bar", "")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:g} {row.unit}: {row.verdict}"
        measured = f"{row.measured:.3g} {row.unit}{_between(row.quartiles)}"
        lines.append(_line(row.name, measured, bar, row.note))
    return lines


def _between(quartiles: tuple[float, float] | None) -> str:
    return "" if quartiles is None else f" ({quartiles[0]:.3g} to {quartiles[1]:.3g})"


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|" + "---|" * len(cells)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
