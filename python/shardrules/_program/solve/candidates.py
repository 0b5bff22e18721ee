"""The layouts of a step that the compiler is asked about: those that may be the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown, record, seconds_shown
from shardrules._plan.answers import Column, Table
from shardrules._program.solve.layout import STORED

if TYPE_CHECKING:
    from shardrules._program.program import Program
    from shardrules._program.solve.layout import Assignment
    from shardrules._program.solve.meshes import Best
    from shardrules._program.solve.price import Seconds
    from shardrules._program.solve.search import Search
    from shardrules._program.solve.spread import Spread

MOST: Final = 10
"""Layouts that are compiled."""
# Predicted seconds that are so many times those of the best are not mispredicted alone.
_FAR: Final = 1.5
# Digits to which costs are compared: of predictions, and as compiled.
_DIGITS: Final = 4
_COMPILED_DIGITS: Final = 3
_COLUMNS: Final = (
    Column("layout", is_elided=True),
    Column("mesh"),
    *(Column(name, is_right=True) for name in ("time", "predicted", "sent", "predicted")),
    *(Column(name, is_right=True) for name in ("memory", "predicted")),
    Column("", is_optional=True),
)


@record
class StepCost(NamedTuple):
    """What a step costs on a device."""

    seconds: float
    """Of products at the hardware's rate, and collectives over its links."""
    sent: dict[tuple[str, ...], int]
    """Bytes that it sends in a step, by mesh axes."""
    memory: int
    """Bytes that it needs."""

    @property
    def sent_in_all(self) -> int:
        """Bytes that it sends in a step over all axes."""
        return sum(self.sent.values())


@record
class Candidate(NamedTuple):
    """A layout of a step, as predicted and as compiled: a row of `Solution.candidates`."""

    what: str
    """Why it is one: such as "FSDP", or a choice in which it differs from the best."""
    mesh: dict[str, int]
    predicted: StepCost
    compiled: StepCost | None
    """None if the compiler was not asked, or does not say."""
    refusal: str
    """Why it is no answer: the memory that it needs, or what the compiler says; "" otherwise."""


@dataclass
class Contender:
    """A layout that may be the best, and what the compiler says of it."""

    what: str
    search: Search
    assignment: Assignment
    compiled: StepCost | None = None
    refusal: str = ""
    needed: int = 0
    """Bytes of memory, if they are too many."""
    program: Program | None = None

    @cached_property
    def seconds(self) -> Seconds:
        """By prediction."""
        return self.search.terms.total(self.assignment)

    @cached_property
    def memory(self) -> int:
        """Bytes that a device needs by prediction."""
        return self.search.resident.least(self.assignment)

    @cached_property
    def spread(self) -> Spread:
        """What is sent by prediction."""
        return self.search.space.spread(self.assignment)

    @cached_property
    def predicted(self) -> StepCost:
        """What a step costs by prediction."""
        machine = self.search.space.machine
        sent: Counter[tuple[str, ...]] = Counter()
        for row in self.spread.sent:
            sent[row.axes] += row.trips * round(machine.sent(row.kind, row.axes, row.payload))
        return StepCost(self.seconds.total, dict(sent), self.memory)

    @property
    def row(self) -> Candidate:
        """The layout as users see it."""
        mesh = self.search.space.machine.sizes
        return Candidate(self.what, mesh, self.predicted, self.compiled, self.refusal)

    def rank(self) -> tuple[Any, ...]:
        """Least time first; of about the same, least bytes and memory."""
        costs = self.compiled or self.predicted
        seconds = float(f"{costs.seconds:.{_COMPILED_DIGITS}g}")
        return bool(self.refusal), seconds, costs.sent_in_all, costs.memory

    def key(self) -> tuple[Any, ...]:
        """Return what layouts share that cost the same: most are the same program.

        XLA tells meshes apart whose axes have changed places.
        """
        costs = self.seconds.total, self.memory
        return *self.search.space.sizes.values(), *(f"{cost:.{_DIGITS}g}" for cost in costs)


def shortlist(best: Best) -> list[Contender]:
    """List the layouts of least predicted time that may fit, the best first.

    FSDP, the layout of the program and the best of each other mesh are tried before those that
    differ from the best in one choice. Of layouts that cost the same there is one, such as those
    along the one or the other of two axes.
    """
    first = Contender("the best by prediction", best.search, best.assignment)
    fsdp = [Contender("FSDP", search, search.space.fsdp()) for search in best.searches]
    own = _own_search(best)
    others = [*_fastest(_of_meshes(best)), *_fastest(_neighbours(best))]
    rows = [
        first,
        *_fastest(fsdp)[:1],
        Contender("as in the program", own, own.space.traced()),
        *(row for row in others if row.seconds.total <= first.seconds.total * _FAR),
    ]
    found: dict[Any, Contender] = {}
    for row in rows:
        if row is first or not row.search.is_over_memory(row.assignment):
            found.setdefault(row.key(), row)
    return list(found.values())[:MOST]


def _fastest(rows: Iterable[Contender]) -> list[Contender]:
    return sorted(rows, key=lambda row: row.seconds.total)


def _own_search(best: Best) -> Search:
    """Return the search on the mesh with which the step was traced, or else on the best one."""
    mesh = best.search.space.step.mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    same = (search for search in best.searches if search.space.machine.sizes == sizes)
    return next(same, best.search)


def _of_meshes(best: Best) -> Iterator[Contender]:
    """Yield the best that is known of each other mesh."""
    for search in best.searches:
        if search is not best.search and search.assignment is not None:
            what = f"the best on {mesh_shown(search.space.machine.sizes)}"
            yield Contender(what, search, search.assignment)


def _neighbours(best: Best) -> Iterator[Contender]:
    """Yield the layouts that differ from the best in one choice."""
    space = best.search.space
    for name, values in space.values.items():
        what = "storage" if name == STORED else space.shown(name)
        for value in values:
            if value != best.assignment[name]:
                text = f"{what}: {','.join(value) or 'whole'}"
                yield Contender(text, best.search, {**best.assignment, name: value})


def table_of_candidates(rows: Sequence[Candidate]) -> Table:
    """Return a table of what each costs as compiled, beside the prediction."""
    cells = []
    for row in rows:
        texts = [row.what, mesh_shown(row.mesh)]
        for show, name in ((seconds_shown, "seconds"), (bytes_shown, "sent_in_all"),
                           (bytes_shown, "memory")):  # fmt: skip
            texts.append("" if row.compiled is None else show(getattr(row.compiled, name)))
            texts.append(show(getattr(row.predicted, name)))
        cells.append([*texts, row.refusal])
    return Table(_COLUMNS, cells)
