"""What steps send by `Plan.traffic` and by their HLO: the table of docs/traffic.md.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.support.step_traffic` writes the
table anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown
from tests.support import page_table
from tests.support.folders import ROOT
from tests.support.steps import (
    BATCH_AXES,
    DTYPE,
    PER_TOKEN,
    TOKENS,
    Key,
    Model,
    compiled,
    sent,
    sizes_of,
)

PAGE = ROOT / "docs" / "traffic.md"
COUNTED = ("params", "gradients", "activations", "experts")
WHOLE_TABLE = (
    "The gathered table's gradient is constrained to be whole: it is reduced over all batch axes "
    "at once."
)
ROWS = "XLA does not gather the table: it exchanges the tokens' numbers, and parts of their rows."
AGAIN = "The recomputed layers reduce the outputs of attention again."
TWICE = "XLA does not see that two gathers of the logits' kernel are the same."

HOISTED = "XLA gathers the parameters once for all micro-batches, before their loop."

GROUPED = (
    "The gradients of keys and values are reduced among devices with equal heads, then gathered."
)


class Case(NamedTuple):
    """A step on a mesh, with what the CPU backend makes of it."""

    name: str
    model: Model
    axes: dict[str, int]
    gathers: int
    why: str = ""
    """Why XLA sends something else than predicted; empty if it does not."""

    @property
    def sizes(self) -> dict[str, int]:
        return sizes_of(**self.axes)

    @property
    def id(self) -> str:
        return f"{self.name} {mesh_shown(self.axes)}"


DENSE, SCANNED, MOE = Model(), Model(is_scanned=True), Model(is_moe=True)
RECOMPUTED, STREAM = Model(is_recomputed=True), Model(is_sequence_parallel=True)
TURNED = Model(back="transposed", is_scanned=True)
CASES = [
    Case("dense", DENSE, {"fsdp": 8}, 1),
    Case("dense", DENSE, {"tp": 4}, 1),
    Case("dense", DENSE, {"fsdp": 4, "tp": 2}, 1),
    Case("dense", DENSE, {"data": 2, "fsdp": 4}, 1),
    Case("dense", DENSE, {"data": 2, "fsdp": 2, "tp": 2}, 1, TWICE),
    Case("dense, scanned", SCANNED, {"fsdp": 8}, 2),
    Case("dense, scanned", SCANNED, {"fsdp": 4, "tp": 2}, 2),
    Case("dense, scanned", SCANNED, {"data": 2, "fsdp": 4}, 2),
    Case("dense, recomputed", RECOMPUTED, {"fsdp": 8}, 2),
    Case("dense, recomputed", RECOMPUTED, {"fsdp": 4, "tp": 2}, 2, AGAIN),
    Case("dense, table gathered", Model(lookup="gathered"), {"fsdp": 8}, 1),
    Case("dense, table gathered", Model(lookup="gathered"), {"data": 2, "fsdp": 4}, 1, WHOLE_TABLE),
    Case("dense, table as held", Model(lookup="as held"), {"fsdp": 8}, 1, ROWS),
    Case("dense, table as held", Model(lookup="as held"), {"fsdp": 4, "tp": 2}, 1, ROWS),
    Case("dense, 2 heads of keys", Model(is_grouped=True), {"tp": 4}, 1, GROUPED),
    Case("dense, square output", Model(back="square"), {"tp": 4}, 1),
    Case("dense, square output transposed", Model(back="transposed"), {"tp": 4}, 1),
    Case("dense, square output transposed, scanned", TURNED, {"fsdp": 4, "tp": 2}, 2),
    Case("dense, sequence cut by tp", STREAM, {"tp": 4}, 1),
    Case("dense, sequence cut by tp", STREAM, {"fsdp": 4, "tp": 2}, 1),
    Case("dense, 2 micro-batches", Model(accumulate=2), {"data": 2, "fsdp": 4}, 1, HOISTED),
    Case("MoE", MOE, {"ep": 8}, 1),
    Case("MoE", MOE, {"data": 2, "ep": 4}, 1),
    Case("MoE", MOE, {"ep": 4, "tp": 2}, 1),
    Case("MoE", MOE, {"fsdp": 2, "ep": 4}, 1),
    Case("MoE, scanned", Model(is_moe=True, is_scanned=True), {"fsdp": 2, "ep": 4}, 2),
]


@cache
def compared(index: int) -> tuple[Counter[Key], Counter[Key]]:
    """What is predicted for `CASES[index]`, and what its HLO has."""
    case = CASES[index]
    plan, hlo = compiled(case.model, case.sizes)
    rows = plan.traffic(
        tokens=TOKENS,
        batch_axes=BATCH_AXES,
        gathers=case.gathers,
        accumulate=case.model.accumulate,
        reduce="all-reduce",
        activations=DTYPE,
        sequence_parallel=case.model.is_sequence_parallel,
        input_gradients="each",
        experts_per_token=PER_TOKEN if case.model.is_moe else None,
    )
    assert not rows.uncounted
    predicted = Counter({(row.of, row.collective, row.axes): row.payload for row in rows})
    return predicted, sent(hlo, case.model, case.sizes)


def table() -> str:
    """The rows of all cases."""
    heads = ("step", "mesh", "gathers", *COUNTED, "not counted", "why")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for index, case in enumerate(CASES):
        predicted, real = compared(index)
        others = [of for of, _, _ in real if of not in COUNTED]
        cells = [
            case.name,
            mesh_shown(case.axes),
            str(case.gathers),
            *(_cell(predicted, real, of) for of in COUNTED),
            ", ".join(f"{of} {bytes_shown(_of(real, of))}" for of in dict.fromkeys(others)),
            case.why,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(predicted: Mapping[Key, int], real: Mapping[Key, int], of: str) -> str:
    there, here = (
        {key: n for key, n in rows.items() if key[0] == of} for rows in (predicted, real)
    )
    if there == here:
        return bytes_shown(sum(there.values())) if there else ""
    return f"{bytes_shown(sum(there.values()))}, XLA {bytes_shown(sum(here.values()))}"


def _of(rows: Mapping[Key, int], of: str) -> int:
    return sum(payload for key, payload in rows.items() if key[0] == of)


if __name__ == "__main__":
    page_table.write(PAGE, table())
