"""`python -m benchmarks.front_page`: README's table of speed, from docs/benchmarks.md.

The report writes it too, so both pages show one run, and the bars that it missed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from shardrules._base.atomic_write import write_text

ROOT = Path(__file__).parent.parent
_SECTION = "## Whole trees, garbage collector off\n"
_MARKED = re.compile(r"(?<=<!-- speed -->\n\n).*?(?=\n\n<!-- end of speed -->)", re.DOTALL)
_RATIOS = ("ours / identity", "eformer / ours", "re loop / ours")


def speed_table(report: str) -> str:
    """Return the rows of the report that have a time of eformer, and the others as one."""
    table = report.partition(_SECTION)[2].partition("\n## ")[0]
    head, _, *rows = (line[2:-2].split(" | ") for line in table.split("\n") if line)
    cases = [dict(zip(head, row, strict=True)) for row in rows]
    others = [case for case in cases if not case["eformer / ours"] and not case["flax / ours"]]
    lines = [case for case in cases if case["eformer / ours"]]
    names = {case["case"].removeprefix("match, "): case for case in others}
    missed = ", ".join(name for name, case in names.items() if "MISSED" in case["bars"])
    ranges = {ratio: _range([case[ratio] for case in others]) for ratio in _RATIOS}
    bars = f"identity: {'MISSED by ' * bool(missed)}{missed or 'met'}"
    lines.append({"case": ", ".join(names), **ranges, "bars": bars})
    columns = ("case", *_RATIOS, "bars")
    texts = [columns, ["---"] * len(columns), *([line[name] for name in columns] for line in lines)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in texts)


def _range(ratios: list[str]) -> str:
    numbers = sorted((float(ratio[:-1]), ratio) for ratio in ratios if ratio)
    return f"{numbers[0][1]} to {numbers[-1][1]}" if numbers else ""


def with_table(readme: str, report: str) -> str:
    """Return the README with the table of this report."""
    assert _MARKED.search(readme), "README.md has no place for the table of speed"
    return _MARKED.sub(lambda _: speed_table(report), readme)


def main() -> int:
    """Write the table into README.md."""
    page = ROOT / "README.md"
    report = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    write_text(page, with_table(page.read_text(encoding="utf-8"), report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
