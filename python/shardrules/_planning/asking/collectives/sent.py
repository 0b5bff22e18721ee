"""One kind of collective of a training step, and the bytes that a ring sends for it.

Must not know why anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Literal, NamedTuple

from shardrules._display import record

__all__ = ["CollectiveKind", "Of", "Row", "Transmission", "merged"]

CollectiveKind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
Of = Literal["params", "gradients", "activations", "experts"]
Row = tuple[CollectiveKind, Iterable[str], Of, int, int]
"""(collective, axes, of, count, payload), as in `Transmission`."""


@record
class Transmission(NamedTuple):
    """Collectives of a training step that are alike; a row of `Traffic`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
        >>> first, *_ = sr.plan(tree, [("w", "fsdp")], {"fsdp": 8}).traffic(tokens=4096, gathers=1)
        >>> first.collective, first.axes, first.of, first.payload, first.sent
        ('all-gather', ('fsdp',), 'params', 1048576, 917504)
    """

    collective: CollectiveKind
    axes: tuple[str, ...]
    """The mesh axes over which it runs, in the mesh's order."""
    of: Of
    count: int  # type: ignore[assignment]
    """How many of them there are in a step, before the compiler combines any."""
    payload: int
    """Bytes of all of them on a device: the whole result of an all-gather, the operand of all
    others."""
    sent: int
    """Bytes that each device sends in a step by the ring algorithm: of n devices, (n - 1) / n of
    the payload, and twice that for an all-reduce."""


def merged(rows: Iterable[Row], axis_sizes: Mapping[str, int]) -> tuple[Transmission, ...]:
    """(collective, axes, of, count, payload) rows, those that are alike as one.

    Rows over a single device, or without bytes, are left out. Those of parameters come first, those
    that send most first of their own.
    """
    total: dict[tuple[CollectiveKind, tuple[str, ...], Of], tuple[int, int]] = {}
    for collective, axes, of, count, payload in rows:
        named = frozenset(axes)
        group = tuple(axis for axis, size in axis_sizes.items() if axis in named and size > 1)
        if group and payload:
            before = total.get((collective, group, of), (0, 0))
            total[collective, group, of] = (before[0] + count, before[1] + payload)
    made = [
        Transmission(
            *key, count, payload, _ring(key[0], payload, prod(axis_sizes[a] for a in key[1]))
        )
        for key, (count, payload) in total.items()
    ]
    order = ("params", "gradients", "activations", "experts")
    return tuple(sorted(made, key=lambda row: (order.index(row.of), -row.sent, row.axes)))


def _ring(collective: CollectiveKind, payload: int, devices: int) -> int:
    rounds = 2 if collective == "all-reduce" else 1
    return -(-payload * rounds * (devices - 1) // devices)
