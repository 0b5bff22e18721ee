"""A model as a JSON manifest, which `read_model` and the command line read in its place.

Costs a line of text for each array. Must not know where the model comes from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from shardrules._dtypes import given_name

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan

__all__ = ["manifest_text"]


def manifest_text(plan: Plan, name: str) -> str:
    """Writes the arrays of a plan: paths, shapes, dtypes, and logical axis names if they have them.

    Raises:
        ValueError: The paths are not of keys with "/" between them, two are equal, or a dtype is
            one that files do not have.
    """
    leaves = plan._columns.leaves
    if leaves.paths_dialect.separator != "/":
        raise ValueError(
            f"a manifest has paths such as layers/0/w, not {plan.paths[:1]}: give rules of another "
            "dialect, such as eformer"
        )
    if len(set(plan.paths)) < len(plan.paths):
        raise ValueError("two leaves have one path, and a manifest has each path once")
    kinds = [plan.kinds[number] for number in plan.kind_of]
    arrays = [
        (path, kind) for path, kind in zip(plan.paths, kinds, strict=True) if kind.shape is not None
    ]
    rows = [
        json.dumps([path, list(kind.shape or ()), given_name(f"the dtype of {path}", kind.dtype)])
        for path, kind in arrays
    ]
    named = {path: kind.names for path, kind in arrays if kind.names is not None}
    head = f'{{"model": {json.dumps(name)}, "params": [\n'
    tail = f'\n], "logical_axes": {json.dumps(named)}}}\n' if named else "\n]}\n"
    return head + ",\n".join(rows) + tail
