"""Steps of a decoder on meshes, of which the table of docs/step.md has what they send."""

from __future__ import annotations

from typing import NamedTuple

from shardrules._base.text import mesh_shown
from tests.support.steps import Model, sizes_of


class Case(NamedTuple):
    """A step on a mesh."""

    name: str
    model: Model
    axes: dict[str, int]

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
    Case("dense", DENSE, {"fsdp": 8}),
    Case("dense", DENSE, {"tp": 4}),
    Case("dense", DENSE, {"fsdp": 4, "tp": 2}),
    Case("dense", DENSE, {"data": 2, "fsdp": 4}),
    Case("dense", DENSE, {"data": 2, "fsdp": 2, "tp": 2}),
    Case("dense, scanned", SCANNED, {"fsdp": 8}),
    Case("dense, scanned", SCANNED, {"fsdp": 4, "tp": 2}),
    Case("dense, scanned", SCANNED, {"data": 2, "fsdp": 4}),
    Case("dense, recomputed", RECOMPUTED, {"fsdp": 8}),
    Case("dense, recomputed", RECOMPUTED, {"fsdp": 4, "tp": 2}),
    Case("dense, table gathered", Model(lookup="gathered"), {"fsdp": 8}),
    Case("dense, table gathered", Model(lookup="gathered"), {"data": 2, "fsdp": 4}),
    Case("dense, table as held", Model(lookup="as held"), {"fsdp": 8}),
    Case("dense, table as held", Model(lookup="as held"), {"fsdp": 4, "tp": 2}),
    Case("dense, 2 heads of keys", Model(is_grouped=True), {"tp": 4}),
    Case("dense, square output", Model(back="square"), {"tp": 4}),
    Case("dense, square output transposed", Model(back="transposed"), {"tp": 4}),
    Case("dense, square output transposed, scanned", TURNED, {"fsdp": 4, "tp": 2}),
    Case("dense, sequence cut by tp", STREAM, {"tp": 4}),
    Case("dense, sequence cut by tp", STREAM, {"fsdp": 4, "tp": 2}),
    Case("dense, 2 micro-batches", Model(accumulate=2), {"data": 2, "fsdp": 4}),
    Case("MoE", MOE, {"ep": 8}),
    Case("MoE", MOE, {"data": 2, "ep": 4}),
    Case("MoE", MOE, {"ep": 4, "tp": 2}),
    Case("MoE", MOE, {"fsdp": 2, "ep": 4}),
    Case("MoE, scanned", Model(is_moe=True, is_scanned=True), {"fsdp": 2, "ep": 4}),
]
