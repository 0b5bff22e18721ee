"""`python -m benchmarks [SECTION ...]`: measures all cases, and prints tables with ratios and bars.

    python -m benchmarks --write    # writes them into docs/evidence.md, and three into README.md

It takes ten minutes, on a machine that does nothing else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Before JAX starts: the rows on arrays need devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import click

from benchmarks import (
    arrays,
    calls,
    checkpoints,
    floor,
    patching,
    planning,
    proof,
    scaling,
    steps,
)
from benchmarks.cases import cases
from benchmarks.harness import environment, measure
from benchmarks.tables import TREES, front_table, rows_table, trees_table, with_text
from shardrules._base.io import write_text

ROOT = Path(__file__).parent.parent
SECTIONS = {
    "The floor": floor.rows,
    "Plans and the command line": planning.rows,
    "Proofs": proof.rows,
    "Steps that the compiler is asked about": steps.rows,
    "Arrays on 8 host devices": arrays.rows,
    "Checkpoints beside the plain way": checkpoints.rows,
    "Code of others, patched": patching.rows,
    "Growth, compiling, importing, bounds": scaling.rows,
    "Functions entered, and sizes": calls.rows,
}


@click.command()
@click.argument("sections", nargs=-1, type=click.Choice([TREES, *SECTIONS]))
@click.option("--write", is_flag=True, help="Write docs/evidence.md and README.md.")
def main(sections: tuple[str, ...], *, write: bool) -> None:
    """Measure, print, and write if asked."""
    lines = [f"- {line}" for line in environment()]
    for title in sections or (TREES, *SECTIONS):
        is_rows = title in SECTIONS
        table = rows_table(SECTIONS[title]()) if is_rows else trees_table(map(measure, cases()))
        lines += ["", f"### {title}", "", *table]
        print("\n".join(lines[-len(table) - 3 :]), flush=True)
    if write and not sections:
        page = ROOT / "docs" / "evidence.md"
        write_between(page, "report", "\n".join(lines))
        write_between(ROOT / "README.md", "speed", front_table(page.read_text(encoding="utf-8")))


def write_between(page: Path, marker: str, text: str) -> None:
    """Put the text between the markers of a page."""
    write_text(page, with_text(page.read_text(encoding="utf-8"), marker, text))


if __name__ == "__main__":
    sys.exit(main())
