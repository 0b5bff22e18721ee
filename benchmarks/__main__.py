"""`python -m benchmarks`: measures all cases, and prints ratios and bars."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial

# Before JAX starts: the rows on arrays need devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import arrays, checkpoints, floor, loading, patching, planning, proof, scaling
from benchmarks.cases import cases
from benchmarks.harness import PEERS, Result, environment, measure_all
from benchmarks.scaling import Row


def main() -> int:
    """Print a table with the garbage collector off, and one with it on."""
    console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)
    console.print("\n".join(environment()))
    console.print(
        "Medians of interleaved runs in one process; results are checked to be equal first.\n"
        "Ours is cold: each call compiles its rules. The time to free a result is not counted."
    )
    results = measure_all(cases(), partial(console.print, style="dim"))
    for collector, measured in results.items():
        console.print(_table(f"Garbage collector {'on' if collector else 'off'}", measured))
    console.print(_rows_table("The floor", floor.rows()))
    console.print(_rows_table("Arrays on 8 host devices", arrays.rows()))
    console.print(_rows_table("Plans", planning.rows()))
    console.print(_rows_table("Proofs", proof.rows()))
    console.print(_rows_table("Checkpoints on 8 host devices", loading.rows()))
    console.print(_rows_table("Checkpoints beside the plain way", checkpoints.rows()))
    console.print(_rows_table("Code of others, patched", patching.rows()))
    console.print(_rows_table("Growth, compiling, bounds", scaling.rows()))
    return 0


def _rows_table(title: str, measured: Iterable[Row]) -> Table:
    table = Table("what", "measured", "bar", "", title=f"{title}; garbage collector off",
                  title_justify="left")  # fmt: skip
    for row in measured:
        bar = "" if row.bar is None else f"<= {row.bar:g} {row.unit}: {row.verdict}"
        table.add_row(escape(row.name), f"{row.measured:.2f} {row.unit}", bar, row.note)
    return table


def _table(title: str, results: list[Result]) -> Table:
    table = Table("case", title=title, title_justify="left")
    for heading in ("ours", "identity", "ours / identity", *(f"{p} / ours" for p in PEERS)):
        table.add_column(heading, justify="right")
    table.add_column("bars")
    for r in results:
        ratios = (f"{r.ratio(p):.1f}x" if p in r.seconds else "" for p in PEERS)
        table.add_row(
            r.case.name,
            f"{r.seconds['ours'] * 1e3:.2f} ms",
            f"{r.seconds['identity'] * 1e3:.2f} ms",
            f"{r.ratio('identity'):.2f}x",
            *ratios,
            r.verdict(),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
