"""Digests of plans: what each leaf gets on which mesh, and what decides it."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from shardrules._base.rule_specs import in_memory
from shardrules._base.specs import as_written, spec_shown
from shardrules._plan.kinds import Kind, Spec, dtype_shown

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_ROWS_HASHED_AT_ONCE: Final = 1000


def plan_fingerprint(plan: Plan) -> str:
    return leaves_digest(plan.axis_sizes, plan.paths, plan.kind_of, plan.kinds)


def leaves_digest(
    axis_sizes: dict[str, int], paths: list[str], kind_of: Any, kinds: list[Kind]
) -> str:
    """Digest what each leaf gets on which mesh, whatever the order of the leaves."""
    texts = [f"\t{kind_written(kind)}\n" for kind in kinds]
    rows = map(texts.__getitem__, kind_of.tolist())
    return _sha256(ascii(axis_sizes), map(operator.add, map(ascii, paths), rows))


def kind_written(kind: Kind) -> str:
    """Return the shape, dtype and place of leaves: equal for specs that are alike as written."""
    counted = "" if kind.status == "placed" else _written(kind._counted)
    placed = in_memory(_written(kind.spec), kind.memory_kind)
    return f"{kind.shape}\t{dtype_shown(kind)}\t{placed}{counted}"


def _written(spec: Spec | None) -> str:
    return "" if spec is None else spec_shown(as_written(spec))


def rules_digest(rules: dict[str, Any], patterns: list[str], decided_by: list[str]) -> str:
    """Digest what decides the leaves, whatever their order: the table of rules, and who decides."""
    head = json.dumps(rules, sort_keys=True)
    rows = (f"{path!a}\t{decider}\n" for path, decider in zip(patterns, decided_by, strict=True))
    return _sha256(head, rows)


def _sha256(head: str, rows: Iterable[str]) -> str:
    # With its tabs and newlines escaped no path can pass for a row of something else.
    digest = hashlib.sha256(head.encode())
    ordered = sorted(rows)
    for begin in range(0, len(ordered), _ROWS_HASHED_AT_ONCE):
        text = "".join(ordered[begin : begin + _ROWS_HASHED_AT_ONCE])
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
