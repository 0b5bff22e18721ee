"""Checks that go by the names of leaves: attention heads that are cut apart.

Costs a few regexes per folded path. Must not know how findings are shown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._format import counted
from shardrules._planning.asking.checks.queries import Queries, finding
from shardrules._planning.asking.findings import Finding
from shardrules._planning.axis_uses import is_gathered
from shardrules._planning.fold import Folded
from shardrules._planning.kinds import Kind
from shardrules._specs import entries_of, entry_axes

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns

__all__ = ["half_heads", "head_sizes"]

_ATTENTION: Final = re.compile(r"att(n|ention)", re.I)
# Projections to heads, and from heads, as the field's libraries name them inside of attention.
_TO_HEADS: Final = re.compile(
    r"(to_)?([qkv]|query|key|value)(_proj)?|w[qkv]|(w_?)?qkv(_proj)?|Wqkv|query_key_value|c_attn"
)
_FROM_HEADS: Final = re.compile(r"o|out|o_proj|out_proj|wo|to_out|attention_output|c_proj|dense")
# Norms of single heads; those of all heads together are as wide as the projection.
_HEAD_NORM: Final = re.compile(r"([qk]|query|key)_(layer_?)?norm")
_SET_OF_NUMBERS: Final = re.compile(r"\{[0-9][0-9.,]*\}")


class _Projection(NamedTuple):
    """A projection to or from attention heads."""

    folded: Folded
    attention: str
    """Path of its attention module, numbers left out."""
    dim: int
    """The dimension of all heads together, counted from the end."""


class _CutHeads(NamedTuple):
    """A dimension of heads that is cut inside a head."""

    dim: int
    size: int
    head_dim: int
    part: float
    """Elements on a device; a fraction where the dimension is cut unevenly."""

    def __str__(self) -> str:
        heads = counted(self.size // self.head_dim, "head")
        return (
            f"dim {self.dim} of size {self.size}, {heads} of {self.head_dim}, is cut into parts of "
            f"{self.part:g}, {self.part / self.head_dim:.3g} heads"
        )


def half_heads(queries: Queries) -> Iterator[Finding]:
    """Projections of attention that are cut inside a head.

    The size of a head is `head_dim`, or that of the norm of single heads beside them.
    """
    kinds = queries.columns.kinds
    projections = list(_projections(queries.columns))
    sizes = _sizes(queries.columns, projections, queries.head_dim)
    if queries.head_dim is not None and not sizes:
        yield finding(
            "warning",
            "half-head",
            f"head_dim={queries.head_dim} is given, but no path names projections of attention",
            "leave head_dim out; RuleSpec(units=...) keeps heads whole whatever paths are",
        )
    alike: dict[tuple[int | None, _CutHeads], list[Folded]] = defaultdict(list)
    for one in projections:
        kind = kinds[one.folded.group]
        if one.attention in sizes and (
            cut := _cut_heads(kind, one.dim, sizes[one.attention], queries)
        ):
            alike[kind.rule, cut].append(one.folded)
    for (rule, cut), folded in alike.items():
        who = "" if rule is None else f"{queries.rule(rule)}: "
        yield finding(
            "warning",
            "half-head",
            f"{who}{cut}; devices exchange parts of heads in each step",
            "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...)",
            folded=folded,
            rule=rule,
        )


def head_sizes(columns: Columns, head_dim: int | None = None) -> dict[int, int]:
    """Per row of a projection to or from attention heads the size of a head, if that is known.

    It is `head_dim`, or that of the norm of single heads beside them.
    """
    projections = list(_projections(columns))
    sizes = _sizes(columns, projections, head_dim)
    return {
        row: sizes[one.attention]
        for one in projections
        if one.attention in sizes
        for row in one.folded.rows.tolist()
    }


def _sizes(
    columns: Columns, projections: list[_Projection], head_dim: int | None
) -> dict[str, int]:
    """Per attention module the size of a head."""
    if head_dim is None:
        return _sizes_by_name(columns, projections)
    return dict.fromkeys((one.attention for one in projections), head_dim)


def _projections(columns: Columns) -> Iterator[_Projection]:
    for folded in columns.folded:
        kind = columns.kinds[folded.group]
        if not _ATTENTION.search(columns.paths[folded.rows.item(0)]):
            continue
        module, name, parameter = _components(folded)
        if not _ATTENTION.search(module) or not kind.shape:
            continue
        to_heads = _TO_HEADS.fullmatch(name) is not None
        if not to_heads and not (_FROM_HEADS.fullmatch(name) and len(kind.shape) > 1):
            continue
        # Torch's weights are [out, in], all others [in, out]; a bias is [out].
        first = len(kind.shape) > 1 and to_heads == (parameter == "weight")
        yield _Projection(folded, module, -2 if first else -1)


def _components(folded: Folded) -> tuple[str, str, str]:
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


def _sizes_by_name(columns: Columns, projections: list[_Projection]) -> dict[str, int]:
    """Per attention module the size of a head, where a norm of single heads has that size."""
    widths: dict[str, int] = defaultdict(int)
    for one in projections:
        whole = columns.kinds[one.folded.group].shape or (0,)
        widths[one.attention] = max(widths[one.attention], whole[one.dim])
    sizes: dict[str, set[int]] = defaultdict(set)
    for folded in columns.folded if projections else ():
        if not _HEAD_NORM.search(columns.paths[folded.rows.item(0)]):
            continue
        shape = columns.kinds[folded.group].shape
        module, name, _ = _components(folded)
        if shape and _HEAD_NORM.fullmatch(name):
            sizes[module].add(shape[-1])
    # Norms of all heads together have other sizes, for queries and for keys.
    return {
        module: size
        for module, (size, *others) in sizes.items()
        if not others and 1 < size < widths[module]
    }


def _cut_heads(kind: Kind, dim: int, head_dim: int, queries: Queries) -> _CutHeads | None:
    """The cut of these leaves inside a head; None if there is none."""
    shape, spec = kind.shape or (), kind.spec
    if spec is None:
        return None
    # Heads may have a dimension of their own, beside that of a head.
    if len(shape) > 2 and head_dim in shape[-2:]:
        dim = -1 if shape[-1] == head_dim else -2
    place = len(shape) + dim
    size = shape[place]
    entries = entries_of(spec)
    axes = [
        axis
        for axis in (entry_axes(entries[place]) if place < len(entries) else ())
        if not is_gathered(axis)
    ]
    part = size / prod(queries.columns.axis_sizes.get(axis, 1) for axis in axes)
    if part == size or size % head_dim or part % head_dim == 0:
        return None
    return _CutHeads(place, size, head_dim, part)
