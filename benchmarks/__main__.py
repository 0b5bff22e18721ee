"""`python -m benchmarks`: measures the cases, and prints ratios beside the bars."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from benchmarks.cases import cases
from benchmarks.harness import Result, environment, measure


def main() -> int:
    """Prints a table with the garbage collector off, and one with it on."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print("\n".join(environment()))
    console.print(
        "Medians of interleaved runs in one process; results are checked to be equal first.\n"
        "Ours is cold: rules are compiled anew each time. Freeing the result counts for nobody."
    )
    results: dict[bool, list[Result]] = {False: [], True: []}
    for case in cases():
        for collector, measured in results.items():
            measured.append(measure(case, collector=collector))
            console.print(f"  measured: {case.name}", style="dim")
    for collector, measured in results.items():
        console.print(_table(f"Garbage collector {'on' if collector else 'off'}", measured))
    return 0


def _table(title: str, results: list[Result]) -> Table:
    table = Table("case", title=title, title_justify="left")
    for heading in ("ours", "identity", "ours / identity", "eformer / ours", "re loop / ours"):
        table.add_column(heading, justify="right")
    table.add_column("bars")
    for r in results:
        table.add_row(
            r.case.name,
            f"{r.seconds['ours'] * 1e3:.2f} ms",
            f"{r.seconds['identity'] * 1e3:.2f} ms",
            f"{r.ratio('identity'):.2f}x",
            f"{r.ratio('eformer'):.1f}x",
            f"{r.ratio('re loop'):.1f}x",
            r.verdict(),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
