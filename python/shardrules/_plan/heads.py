"""Projections to and from the heads of attention, by names, and the size of a head."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._plan.fold import Folded

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

_ATTENTION: Final = re.compile(r"att(n|ention)", re.I)
# Projections to heads, and from heads, as the field's libraries name them inside of attention.
_TO_HEADS: Final = re.compile(
    r"(to_)?([qkv]|query|key|value)(_proj)?|w[qkv]|(w_?)?qkv(_proj)?|Wqkv|query_key_value|c_attn"
)
_FROM_HEADS: Final = re.compile(r"o|out|o_proj|out_proj|wo|to_out|attention_output|c_proj|dense")
# Norms of single heads; those of all heads together are as wide as the projection.
_HEAD_NORM: Final = re.compile(r"([qk]|query|key)_(layer_?)?norm")
_SET_OF_NUMBERS: Final = re.compile(r"\{[0-9][0-9.,]*\}")


class Projection(NamedTuple):
    """A projection to or from attention heads."""

    folded: Folded
    dim: int
    """The dimension of all heads together; the size of one where heads have their own."""
    head: int | None
    """Size of a head; None if nothing tells it."""


def projections(plan: Plan, head_dim: int | None = None) -> list[Projection]:
    """Find the projections of attention.

    The size of a head is `head_dim`, or that of the norm of single heads beside them.
    """
    found: list[tuple[Folded, str, int]] = []
    widths: dict[str, int] = defaultdict(int)
    norms: dict[str, set[int]] = defaultdict(set)
    for folded in plan.folded:
        shape = plan.kinds[folded.group].shape
        if not shape or not _ATTENTION.search(plan.paths[folded.rows.item(0)]):
            continue
        module, name, parameter = _module_components(folded)
        if _HEAD_NORM.fullmatch(name):
            norms[module].add(shape[-1])
        to_heads = _TO_HEADS.fullmatch(name) is not None
        is_from = _FROM_HEADS.fullmatch(name) is not None and len(shape) > 1
        if _ATTENTION.search(module) and (to_heads or is_from):
            # Torch's weights are [out, in], all others [in, out]; a bias is [out].
            first = len(shape) > 1 and to_heads == (parameter == "weight")
            dim = len(shape) - (2 if first else 1)
            widths[module] = max(widths[module], shape[dim])
            found.append((folded, module, dim))
    # Norms of all heads together have other sizes, for queries and for keys.
    heads = {
        module: head_dim or size
        for module, (size, *others) in norms.items()
        if not others and 1 < size < widths[module]
    }
    return [
        _with_head(folded, plan.kinds[folded.group].shape or (), dim, heads.get(module, head_dim))
        for folded, module, dim in found
    ]


def _with_head(folded: Folded, shape: tuple[int, ...], dim: int, head: int | None) -> Projection:
    # Heads may have a dimension of their own, beside that of a head.
    if len(shape) > 2 and head in shape[-2:]:
        dim = len(shape) - (1 if shape[-1] == head else 2)
    return Projection(folded, dim, head)


def _module_components(folded: Folded) -> tuple[str, str, str]:
    """(path of the module around it, numbers left out; the module's name; the parameter's)."""
    parts = re.findall(r"[^/.\[\]']+", _SET_OF_NUMBERS.sub("#", folded.pattern))
    if parts and parts[-1] == "value":  # nnx
        parts.pop()
    if parts and not (_TO_HEADS.fullmatch(parts[-1]) or _FROM_HEADS.fullmatch(parts[-1])):
        parameter = parts.pop()
    else:
        parameter = ""
    name = parts.pop() if parts else ""
    return "/".join(parts), name, parameter
