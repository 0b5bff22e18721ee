"""`Traffic`: bytes that each device sends in a training step, by mesh axis and collective."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from shardrules._base.text import answer, bytes_shown, printable
from shardrules._estimate.collectives import (
    activation_rows,
    cut_parts,
    expert_rows,
    gradient_rows,
    guessed,
    kernel_uses,
    param_rows,
    uncounted,
)
from shardrules._estimate.schedule import Schedule, Transmission, merged
from shardrules._plan.table import Columns, axes_used
from shardrules._plan.tables import Column, Table, guesses_shown

_COLUMNS: Final = (
    Column("of"),
    Column("collective"),
    Column("over"),
    Column("count", is_right=True),
    Column("payload", is_right=True),
    Column("sent", is_right=True),
)
# Of optax and Keras: the state of an optimizer that multiplies whole gradients with themselves.
_MUON: Final = re.compile(r"(^|[/.\[\]'_])muon", re.I)


@answer
class Traffic(tuple[Transmission, ...]):
    """The rows of what is sent in a training step; `str` is a table of them.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
        >>> traffic = sr.plan(tree, [("w", "fsdp")], {"dp": 2, "fsdp": 4}).traffic(tokens=4096)
        >>> traffic.by_axes()
        {('fsdp',): 2359296, ('dp',): 262144}
    """

    assumptions: dict[str, Any]
    """The arguments of `Plan.traffic`, those by default included; and under "guessed" what names
    and shapes say of the leaves that tokens meet: {"in, out": folded paths, "logits": ...}."""
    uncounted: tuple[str, ...]
    """Folded paths of kernels that mesh axes cut, and of whose dimensions it is not known which is
    contracted: what is sent for their activations is missing. And those of Muon's moments, if they
    are in the tree and cut: what its products of whole matrices send is missing."""

    def __new__(
        cls,
        rows: Iterable[Transmission] = (),
        assumptions: Mapping[str, Any] | None = None,
        uncounted: Iterable[str] = (),
    ) -> Traffic:
        traffic = super().__new__(cls, rows)
        traffic.assumptions = dict(assumptions or {})
        traffic.uncounted = tuple(uncounted)
        return traffic

    @property
    def sent(self) -> int:
        """Bytes that each device sends in a step."""
        return sum(row.sent for row in self)

    def by_axes(self) -> dict[tuple[str, ...], int]:
        """Bytes that each device sends in a step, by the mesh axes over which they are sent."""
        total: Counter[tuple[str, ...]] = Counter()
        for row in self:
            total[row.axes] += row.sent
        return dict(total)

    def _parts(self) -> list[Table | str]:
        table = Table(_COLUMNS, (_traffic_cells(row) for row in self))
        assumptions = {**self.assumptions}
        guesses = guesses_shown(assumptions.pop("guessed", {}))
        texts = [f"{name}={_assumption_shown(value)}" for name, value in assumptions.items()]
        assumed = [
            line
            for text in (f"assumed: {', '.join(texts)}", *guesses)
            for line in textwrap.wrap(text, 88, break_long_words=False, break_on_hyphens=False)
        ]
        missing = [f"not counted, since {why_uncounted(path)}: {path}" for path in self.uncounted]
        sent = f"each device sends {bytes_shown(self.sent)} in a step"
        return [printable(sent), table, *map(printable, [*assumed, *missing])]


def _traffic_cells(row: Transmission) -> tuple[str, ...]:
    sizes = (f"{row.count:,}", bytes_shown(row.payload), bytes_shown(row.sent))
    return (row.of, row.collective, ",".join(row.axes), *sizes)


def why_uncounted(path: str) -> str:
    """Say why traffic of this folded path is missing."""
    return "Muon multiplies whole matrices" if _MUON.search(path) else "roles are unknown"


def of_muon(columns: Columns, rows: Iterable[int]) -> Iterator[str]:
    """Yield the folded paths of Muon's moments that mesh axes cut, among rows of a state."""
    state = {*rows}
    for part in columns.folded:
        kind = columns.kinds[part.group]
        is_cut = len(kind.shape or ()) > 1 and axes_used(kind.spec, columns.axis_sizes)
        if is_cut and int(part.rows[0]) in state and _MUON.search(part.pattern):
            yield part.pattern


def _assumption_shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def traffic(columns: Columns, schedule: Schedule) -> Traffic:
    """See `Plan.traffic`."""
    cuts = cut_parts(columns, schedule)
    uses = list(kernel_uses(cuts, schedule))
    tensor_axes = frozenset(axis for cut in cuts for axis in cut.along("in", "out"))
    rows = (
        *param_rows(cuts, schedule),
        *gradient_rows(cuts, schedule, tensor_axes),
        *activation_rows(uses, schedule),
        *expert_rows(uses, schedule),
    )
    missing = (*uncounted(uses), *of_muon(columns, columns._leaves.optimizer_rows))
    assumptions = {**schedule.assumptions, "guessed": guessed(cuts, schedule)}
    return Traffic(merged(rows, columns.axis_sizes), assumptions, missing)
