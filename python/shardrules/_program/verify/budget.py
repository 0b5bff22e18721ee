"""Compares the bytes that a program sends, and its peak, with a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import check_real, check_type
from shardrules._base.text import brief, byte_count, bytes_shown, nearest
from shardrules._place.mesh import AnyMesh
from shardrules._plan.findings import Finding
from shardrules._program.lock import KINDS, budget_finding, largest
from shardrules._program.program import Program

_WORDS: Final = ("total", "peak")
_FIX: Final = "send or keep less there; or, if it is meant, raise the budget"
_ELSEWHERE: Final = "verify the same function on another backend, or leave out this budget"


class Limit(NamedTuple):
    """Entry of a budget."""

    key: str
    axes: frozenset[str]
    """Mesh axes that a collective is over, alone or with others."""
    kinds: tuple[str, ...]
    bytes: int


def limits_of(budget: Any, mesh: AnyMesh | None) -> list[Limit]:
    """Parse a budget.

    Args:
        budget: Bytes by "total", "peak", mesh axes ("data,fsdp"), a kind of collective, or both
            ("fsdp all-gather").
        mesh: Mesh of the program.

    Raises:
        TypeError: It is no mapping of texts to bytes.
        ValueError: A key names no axis and no kind, or a text is no number of bytes.
    """
    check_type("budget", budget, Mapping, "a dict such as {'fsdp': '25 GB', 'peak': '90 GB'}")
    axes = () if mesh is None else mesh.axis_names
    return [_limit(key, value, axes) for key, value in budget.items()]


def _limit(key: Any, value: Any, axes: Sequence[str]) -> Limit:
    check_type("a key of budget", key, str, "a mesh axis, a kind of collective, total or peak")
    name = f"budget[{brief(key)}]"
    key, size = key.strip(), _checked_bytes(name, value)
    if key in _WORDS:
        return Limit(key, frozenset(), KINDS, size)
    words = re.split(r"[,\s]+", key)
    for word in words:
        if word not in (*axes, *KINDS):
            near = nearest(word, [*axes, *KINDS, *_WORDS])
            raise ValueError(
                f"{name}: {brief(word)} is no mesh axis and no kind of collective"
                + (f" (did you mean {near}?)" if near else "")
                + f"; the program has {'the axes ' + ', '.join(axes) if axes else 'no mesh'}; "
                f"kinds are {', '.join(KINDS)}; or write total or peak"
            )
    kinds = tuple(word for word in words if word in KINDS)
    return Limit(key, frozenset(words) - {*KINDS}, kinds or KINDS, size)


def _checked_bytes(name: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            size = byte_count(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if size and value.strip()[-1].isdigit():
            raise ValueError(f"{name} is {value!r}, without a unit: write {value.strip()} GB, or B")
        return size
    check_real(name, value)
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value}; it must be bytes, such as '25 GB'")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be bytes, such as '25 GB'")
    return int(value)


def over_budget(program: Program, limits: Sequence[Limit]) -> Iterator[Finding]:
    """Yield findings about what is over the budget, and about what is not known."""
    for limit in limits:
        yield from _of_peak(program, limit) if limit.key == "peak" else _of_sent(program, limit)


def _of_peak(program: Program, limit: Limit) -> Iterator[Finding]:
    peak = program._costs.peak
    if peak is None:
        message = "peak: this backend does not tell the memory of executables: it is not known"
        yield budget_finding("warning", message, 0, _ELSEWHERE)
    elif peak > limit.bytes:
        yield _over(limit, f"needs {bytes_shown(peak)}", peak, "")


def _of_sent(program: Program, limit: Limit) -> Iterator[Finding]:
    if not program.has_text:
        message = f"{limit.key}: this backend does not show the text of executables: what they send"
        yield budget_finding("warning", f"{message} is not known", 0, _ELSEWHERE)
        return
    rows = [
        row for row in program.collectives if limit.axes <= {*row.axes} and row.kind in limit.kinds
    ]
    size, endless = sum(row.sent_at_least for row in rows), [r for r in rows if r.times is None]
    least = "at least " if endless else ""
    if size > limit.bytes:
        what = f"sends {least}{bytes_shown(size)} in a step"
        yield _over(limit, what, size, f": {largest(rows)}")
    elif endless:
        message = (
            f"{limit.key}: each device sends {bytes_shown(size)} with one iteration of each loop "
            f"whose trip count is not known: whether that is within {bytes_shown(limit.bytes)} in "
            f"a step is not known: {largest(endless)}"
        )
        fix = "let the loop have a constant number of iterations, or leave out this budget"
        yield budget_finding("warning", message, size, fix)


def _over(limit: Limit, what: str, size: int, rows: str) -> Finding:
    excess = size - limit.bytes
    message = (
        f"{limit.key}: each device {what}, {bytes_shown(excess)} over the budget of "
        f"{bytes_shown(limit.bytes)}{rows}"
    )
    return budget_finding("error", message, excess, _FIX)
