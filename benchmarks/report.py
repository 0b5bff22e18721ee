"""`python -m benchmarks.report`: all measurements as Markdown and SVG, into docs/.

Overwrites docs/benchmarks.md, except for its last section, docs/benchmarks/*.svg, and README's
table of speed; takes about ten minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import matplotlib as mpl  # pyright: ignore[reportMissingImports] # of the group bench alone
from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

from benchmarks import arrays, checkpoints, floor, front_page, patching, planning, proof, scaling
from benchmarks.cases import cases
from benchmarks.curves import Curve, curves
from benchmarks.harness import PEERS, Result, environment, measure_all
from benchmarks.scaling import Row
from shardrules._base.atomic_write import write_text

DOCS = Path(__file__).parent.parent / "docs"
SUGGESTED = "\n## Suggested rules\n"
"""The heading of the section that tests/support/suggested.py writes."""
METHOD = """
Times are medians of alternating runs in one process, after a check that the results are equal.
Ratios of whole trees are medians of the ratios of all rounds: 0.25x identity is a quarter of its
time, and eformer / ours of 60x says that eformer takes 60 times as long. *Ours* is cold: each call
compiles its rules, as a program does once at start-up. *Identity* is
`jax.tree_util.tree_map(lambda x: x, tree)` on the same tree, and *re loop* a plain loop over the
rules with `re`. A *bar* is a goal. The time to free a result is not counted. The machine is
shared and noisy, so compare ratios. [Performance](performance.md) explains the bars and the missed
goals. `make bench-report` rewrites this page, except for the last section.
"""


def main() -> int:
    """Measure everything and writes the page."""
    parts = ["# Benchmarks", "", *(f"- {line}" for line in environment()), METHOD]
    results = measure_all(cases(), partial(print, flush=True))
    for with_collector, measured in results.items():
        parts += [f"## Whole trees, garbage collector {'on' if with_collector else 'off'}", ""]
        parts += [*_results_table(measured), ""]
    sections = {
        "The floor": floor.rows,
        "Plans and the command line": planning.rows,
        "Proofs": proof.rows,
        "Arrays on 8 host devices": arrays.rows,
        "Checkpoints beside the plain way": checkpoints.rows,
        "Code of others, patched": patching.rows,
        "Growth, compiling, importing, bounds": scaling.rows,
    }
    for title, rows in sections.items():
        parts += [f"## {title}", "", *_rows_table(rows()), ""]
        print(f"measured: {title}", flush=True)
    parts += ["## How it grows", ""]
    (DOCS / "benchmarks").mkdir(exist_ok=True)
    for curve in curves():
        name = f"{curve.x}.svg"
        _plot(curve, DOCS / "benchmarks" / name)
        parts += [f"### {curve.title}", "", f"![{curve.title}](benchmarks/{name})", ""]
        parts += [*_curve_table(curve), ""]
        print(f"measured: {curve.title}", flush=True)
    page = DOCS / "benchmarks.md"
    suggested = page.read_text(encoding="utf-8").partition(SUGGESTED)[2]
    write_text(page, "\n".join(parts).rstrip() + "\n" + SUGGESTED + suggested)
    front_page.main()
    return 0


def _results_table(results: Iterable[Result]) -> list[str]:
    lines = _head("case", "ours", "ours / identity", *(f"{peer} / ours" for peer in PEERS), "bars")
    for result in results:
        peers = [f"{result.ratio(p):.1f}x" if p in result.seconds else "" for p in PEERS]
        lines.append(
            _line(
                result.case.name,
                _shown(result.seconds["ours"]),
                f"{result.ratio('identity'):.2f}x",
                *peers,
                result.verdict(),
            )
        )
    return lines


def _rows_table(rows: Iterable[Row]) -> list[str]:
    lines = _head("what", "measured", "bar", "")
    for row in rows:
        bar = "" if row.bar is None else f"{row.bar:g} {row.unit}: {row.verdict}"
        lines.append(_line(row.name, f"{row.measured:.3g} {row.unit}", bar, row.note))
    return lines


def _curve_table(curve: Curve) -> list[str]:
    sizes = sorted({size for points in curve.series.values() for size, _ in points})
    lines = _head(curve.x, *(f"{size:,}" for size in sizes))
    for name, points in curve.series.items():
        seconds = dict(points)
        shown = (_shown(seconds[size]) if size in seconds else "too long" for size in sizes)
        lines.append(_line(name, *shown))
    return lines


def _head(*cells: str) -> list[str]:
    return [_line(*cells), "|" + "---|" * len(cells)]


def _line(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _shown(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _plot(curve: Curve, path: Path) -> None:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curve.series.items():
        sizes, seconds = zip(*points, strict=True)
        style = {"marker": "o", "linestyle": "--" if "identity" in name else "-"}
        axes.loglog(
            sizes, seconds, label=name, linewidth=2.5 if name == "shardrules" else 1.2, **style
        )
    axes.set(title=curve.title, xlabel=curve.x, ylabel="seconds")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    # The same file for the same figures.
    with mpl.rc_context({"svg.hashsalt": "shardrules", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
