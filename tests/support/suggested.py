"""Suggested rules beside those that experts wrote: bytes, rules, traffic, and the least bytes.

`python -m tests.support.suggested` writes the table of tests/data/suggested.md anew; it takes a minute.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import shardrules as sr
from shardrules._base.text import bytes_shown
from tests.support import corpus
from tests.support.folders import ROOT

MESHES: dict[str, dict[str, int]] = {
    "fsdp=8": {"fsdp": 8},
    "tp=8": {"tp": 8},
    "fsdp=64,tp=8": {"fsdp": 64, "tp": 8},
    "fsdp=64,ep=8": {"fsdp": 64, "ep": 8},
    "dp=2,fsdp=8,sp=1,tp=8": {"dp": 2, "fsdp": 8, "sp": 1, "tp": 8},
}
DATA_AXES = ("dp", "sp")
# How rule sets call these axes.
_CALLED = {
    "fsdp": ("fsdp", "data"),
    "tp": ("tp", "mp", "tensor", "model"),
    "ep": ("ep", "expert"),
    "dp": ("dp", "data"),
    "sp": ("sp", "sequence"),
}
SPARED = re.compile(r"(q_a|kv_a)_proj|w(q|kv)_a[./]|(mlp|MoeBlock_0|block_sparse_moe)[./]gate[./]")
# A set fits a model if its own rules decide that share of the leaves.
_FITS = 0.9


NONE = "none fits"
_PAGE = ROOT / "tests" / "data" / "suggested.md"
_HEAD = "| model | mesh | rules | bytes | to the least | best hand-written set | its rules | bytes to its |"


class Row(NamedTuple):
    """A model on a mesh."""

    model: str
    mesh: str
    rules: int
    bytes: int
    """On the fullest device."""
    least: int
    """The fewest bytes that any assignment of axes to dimensions that they divide would hold."""
    hand: str | None
    """The name of the hand-written set that fits best; None if none fits."""
    hand_rules: int
    hand_bytes: int

    def __str__(self) -> str:
        cells = [
            self.model, f"`{self.mesh}`", str(self.rules), bytes_shown(self.bytes),
            f"{self.bytes / self.least:.3f}", self.hand or NONE,
        ]  # fmt: skip
        if self.hand:
            cells += [str(self.hand_rules), f"{self.bytes / self.hand_bytes:.3f}"]
        return f"| {' | '.join(cells + [''] * (8 - len(cells)))} |"


def has_experts(model: str) -> bool:
    return "deepseek" in model or "mixtral" in model


def meshes_for(model: str) -> list[str]:
    return [mesh for mesh in MESHES if "ep" not in mesh or has_experts(model)]


@cache
def leaves(model: str) -> dict[str, Any]:
    return corpus.manifest(model).flat(corpus.with_dtype)


@cache
def hand_written(name: str) -> Any:
    if corpus.rule_file(name)["kind"] == "logical":
        return sr.LogicalRules(corpus.logical_rules(name), sr.dialects.MAXTEXT)
    return sr.Rules(
        corpus.rules(name), sr.dialects.KEYSTR if name.startswith("JAXSeq") else sr.dialects.EFORMER
    )


def candidates(model: str) -> list[str]:
    """The rule sets that could be for the model: logical ones need names."""
    logical = corpus.rule_sets("logical") if model.startswith("maxtext") else []
    return [*corpus.rule_sets("regex"), *(one for one in logical if one.startswith("maxtext"))]


@cache
def hand_plan(model: str, name: str) -> sr.Plan:
    rules = hand_written(name)
    named = {"names": corpus.logical_axes(model)} if isinstance(rules, sr.LogicalRules) else {}
    is_nested = getattr(rules, "dialect", None) is sr.dialects.KEYSTR
    tree = corpus.manifest(model).nested(corpus.with_dtype) if is_nested else leaves(model)
    return sr.plan(tree, rules, {"fsdp": 1}, **named)


def fallen(plan: sr.Plan) -> int:
    """How many leaves no rule decides but a catch-all."""
    if isinstance(plan.rules, sr.LogicalRules):
        return int(
            sum(plan.counts[i] for i, one in enumerate(plan.kinds) if one.status != "placed")
        )
    last = len(plan.rules) - 1
    catch_all = last if plan.rules[last][0] in (".*", ".+") else None
    return plan.coverage.unmatched + (plan.coverage.won[catch_all] if catch_all is not None else 0)


def called(name: str, mesh: dict[str, int]) -> dict[str, int]:
    """The mesh with the names that a rule set has for its axes; others of them have one device."""
    named = {
        axis
        for _, spec in hand_written(name)
        for entry in (spec if isinstance(spec, tuple) or hasattr(spec, "index") else (spec,))
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if isinstance(axis, str)
    }
    sizes: dict[str, int] = {}
    for axis, size in mesh.items():
        other = next((one for one in _CALLED[axis] if one in named and one not in sizes), axis)
        sizes[other] = size
    # An axis that the mesh lacks would take those beside it along.
    return {**dict.fromkeys(sorted(named), 1), **sizes}


@cache
def fitting(model: str) -> list[tuple[int, str]]:
    """(fallen leaves, name) of the rule sets that fit the model."""
    found = []
    for name in candidates(model):
        count = fallen(hand_plan(model, name))
        if count <= (1 - _FITS) * len(leaves(model)):
            found.append((count, name))
    return sorted(found)


def best_hand(model: str, mesh: str) -> tuple[str, int, int] | None:
    """(name, rules, bytes) of the hand-written set that fits best on a mesh."""
    found = [
        (count, on(model, name, mesh), name)
        for count, name in fitting(model)
        if count == fitting(model)[0][0]
    ]
    if not found:
        return None
    _, held, name = min(found)
    return name, len(hand_written(name)), held


def on(model: str, name: str, mesh: str) -> int:
    """Bytes on the fullest device under a hand-written set."""
    plan = hand_plan(model, name).on_mesh(called(name, MESHES[mesh]))
    return plan.bytes_per_device().max


def least(model: str, mesh: str, *, spares: bool = False) -> int:
    """The fewest bytes that any assignment of axes to dimensions that they divide would hold.

    With `spares`, of those that do not cut routers, and projections to a latent space, by tp.
    """
    axes = {axis: size for axis, size in MESHES[mesh].items() if axis not in DATA_AXES}
    others = {axis: size for axis, size in axes.items() if axis != "tp"}
    plan = sr.plan(leaves(model), [], axes)
    spared = Counter(
        int(kind)
        for path, kind in zip(plan.paths, plan.kind_of, strict=True)
        if spares and SPARED.search(path)
    )
    counted = enumerate(zip(plan.kinds, plan.counts.tolist(), strict=True))
    return sum(
        kind.bytes // most_parts(kind.shape, axes) * (count - spared[number])
        + kind.bytes // most_parts(kind.shape, others) * spared[number]
        for number, (kind, count) in counted
    )


@cache
def _most_parts(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    if not sizes:
        return 1
    size, *rest = sizes
    cut = [_most_parts(shape, tuple(rest))]
    for dim, elements in enumerate(shape):
        if elements % size == 0:
            part = (*shape[:dim], elements // size, *shape[dim + 1 :])
            cut.append(size * _most_parts(part, tuple(rest)))
    return max(cut)


def most_parts(shape: tuple[int, ...] | None, axes: dict[str, int]) -> int:
    """Into how many equal parts the axes can cut an array, each of them once."""
    return _most_parts(shape or (), tuple(axes.values()))


def suggested(model: str, mesh: str) -> sr.types.Suggestion:
    return sr.suggest(leaves(model), MESHES[mesh])


def row(model: str, mesh: str, hand: str | None = None) -> Row:
    """The row of the table; with the name of a hand-written set, beside that one."""
    found = suggested(model, mesh)
    held = found.plan.bytes_per_device().max
    made = Row(model, mesh, len(found.rules), held, least(model, mesh), None, 0, 0)
    if hand == NONE:
        return made
    beside = (
        best_hand(model, mesh)
        if hand is None
        else (hand, len(hand_written(hand)), on(model, hand, mesh))
    )
    if beside is None:
        return made
    name, rules, its = beside
    return made._replace(hand=name, hand_rules=rules, hand_bytes=its)


def cases() -> list[tuple[str, str]]:
    return [(model, mesh) for model in corpus.manifest_names() for mesh in meshes_for(model)]


def printed() -> list[str]:
    """The rows that the page shows."""
    return _PAGE.read_text(encoding="utf-8").partition(_HEAD)[2].splitlines()[2:]


def main() -> None:
    before = _PAGE.read_text(encoding="utf-8").partition(_HEAD)[0]
    lines = [_HEAD, "|---|---|--:|--:|--:|---|--:|--:|--:|", *(str(row(*case)) for case in cases())]
    _PAGE.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
