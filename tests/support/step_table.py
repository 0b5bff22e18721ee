"""What a step sends by its jaxpr and by its HLO: the table of docs/step.md.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.support.step_table` writes the
table anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from math import prod

from shardrules._text import bytes_shown, mesh_shown
from tests.support import page_table
from tests.support.folders import ROOT
from tests.support.step_traffic import CASES
from tests.support.steps import compiled, sent, spread

PAGE = ROOT / "docs" / "step.md"
# Rows that differ by more than 5 %, and why.
WHY = {
    "dense, table as held fsdp=8": "XLA does not gather the table: it exchanges parts of the "
    "tokens' rows.",
    "dense, square output transposed tp=4": "XLA gathers the output's kernels, which are smaller "
    "than the tokens that it would move.",
}


@cache
def compared(index: int) -> tuple[int, int]:
    """Bytes that each device sends in `CASES[index]`, by its jaxpr and by its HLO."""
    case = CASES[index]
    _, hlo = compiled(case.model, case.sizes)
    real: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for (_, collective, axes), payload in sent(hlo, case.model, case.sizes).items():
        real[collective, axes] += payload
    return tuple(_ring(rows, case.sizes) for rows in (spread(case.model, case.sizes), real))


def _ring(rows: Mapping[tuple[str, tuple[str, ...]], int], sizes: Mapping[str, int]) -> int:
    """The bytes that a device sends; a reduce-scatter is an all-reduce for CPU, and a slice."""
    total = 0.0
    for (collective, axes), payload in rows.items():
        devices = prod(sizes[axis] for axis in axes)
        twice = 2 if collective in {"all-reduce", "reduce-scatter"} else 1
        total += payload * twice * (devices - 1) / devices
    return round(total)


def table() -> str:
    """The rows of all cases."""
    lines = ["| step | mesh | by its jaxpr | by XLA | ratio | why |", "|" + "---|" * 6]
    for index, case in enumerate(CASES):
        ours, real = compared(index)
        cells = [
            case.name,
            mesh_shown(case.axes),
            bytes_shown(ours),
            bytes_shown(real),
            f"{ours / real:.3f}",
            WHY.get(case.id, ""),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page_table.write(PAGE, table())
