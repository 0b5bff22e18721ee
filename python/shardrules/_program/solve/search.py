"""Searches the assignment of least time that fits: layouts of experts, improved, and then CP-SAT.

The time of a step is a sum of terms, each of few variables: operations start from arrays in their
layout and leave them so, and so what one costs depends on the classes of its own arrays alone.
Operations are taken together where one adds what others have not added up, and those that read an
array share what is sent of it.

Layouts as experts write them are improved choice by choice. Then the terms go as tables to CP-SAT
of OR-tools, which finds what is better, and proves that nothing else is. Where OR-tools is not
installed the improved layouts are the answer, with the gap to a bound of the tables.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import product
from math import floor, inf, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.text import bytes_shown, mesh_shown, printable_lines, seconds_shown
from shardrules._place.mesh import as_mesh
from shardrules._program.solve.space import STORED, Space
from shardrules._program.solve.spread import Machine, Seconds, Spread, adder, is_apart

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.solve.space import Assignment, Axes
    from shardrules._program.solve.spread import Bounds, Need
    from shardrules._program.step.equations import Body, Equations, TracedOperation
    from shardrules._program.step.step import Step
    from shardrules._program.topologies.topology import Topology

_Scope = tuple[int, ...]
_Row = tuple[int, ...]
"""The numbers of the values of a table's variables."""
# Seconds that differ by less than this part are equal.
_ROUNDING: Final = 1e-9
# So many of the first assignments are improved.
_DESCENTS: Final = 3
# Memory by which a simpler assignment may need more.
_LITTLE: Final = 1e-3
# A larger table takes minutes to make; its terms are left out, which lowers the bound.
_MOST_ROWS: Final = 50_000
_MOST_SECONDS: Final = 120.0
"""Of CP-SAT on one mesh, after which a gap is left."""
# CP-SAT counts in integers: so many parts of the best time.
_PARTS: Final = 10**9
# What is lost of a bound of rounded rows.
_ROUNDED: Final = 1e-6
_SHOWN: Final = 3
Show = Callable[[str], object]
"""What is given a line of progress after each mesh and layout."""


def best_of(searches: Sequence[Search], show: Show = lambda text: None) -> tuple[Search, float]:
    """Search each mesh; return the search on the best one, and seconds that none takes less than.

    An interrupt ends all, with what is known by then.
    """

    def best() -> Search:  # of those alike the first, with most devices along the first axes
        least = min(search.seconds for search in searches)
        return next(search for search in searches if search.seconds <= least * (1 + _ROUNDED))

    with suppress(KeyboardInterrupt):
        # All are tried in short before one is searched to its end, which may take all of the time.
        for search in searches:
            search.begin()
        for number, search in enumerate(sorted(searches, key=lambda row: row.seconds), 1):
            search.prove(best().seconds)
            seconds, bound = best().seconds, min(each.bound for each in searches)
            if seconds < inf:
                gap = max(0.0, 1 - bound / seconds) if seconds else 0.0
                show(
                    f"mesh {number} of {len(searches)}, {mesh_shown(search.machine.sizes)}: "
                    f"best {seconds_shown(seconds)}, bound {seconds_shown(bound)}, gap {gap:.1%}"
                )
    winner = best()
    bound = min(search.bound for search in searches)
    if winner.assignment is None:
        raise _nothing(searches)
    winner.simplify()
    seconds = winner.terms.total(winner.assignment).total
    return winner, seconds if bound >= seconds * (1 - 2 * _ROUNDED) else bound


def _nothing(searches: Sequence[Search]) -> ValueError:
    """Return the error that nothing that fits was found: by how much, and for which arrays."""
    sizes = [search.resident.bytes(search.least_memory) for search in searches]
    needed = min(sizes)
    search = searches[sizes.index(needed)]
    space, largest = search.space, search.resident.largest(search.least_memory)[:_SHOWN]
    lines = [
        f"{space.step.name}: nothing fits of what was tried: with the least memory that was found "
        f"it needs {bytes_shown(needed)} on each device of "
        f"{mesh_shown(search.machine.sizes)}, {bytes_shown(needed - search.hbm)} more than the "
        f"{bytes_shown(search.hbm)} that there are",
        *(f"  {bytes_shown(size)} {_array(space.step, n)}" for size, n in largest),
    ]
    return ValueError(printable_lines(lines))


def _array(step: Step, number: int) -> str:
    """Return dtype, shape and path of an array; without a path the operation that makes it."""
    value = step._equations.values[number]
    paths = dict(zip(step._equations.body.inputs, step._paths, strict=True))
    makers = (op.path for op, _ in step._equations.everything() if number in op.outputs)
    shape = f"{getattr(value.dtype, 'name', value.dtype)}[{','.join(map(str, value.shape))}]"
    return f"of {shape} {paths.get(number) or next(makers, 'constant')}"


class Search:
    """The search on one mesh."""

    def __init__(
        self, step: Step, mesh: Any, hardware: Hardware, hbm: int, topology: Topology | None = None
    ) -> None:
        self.mesh, self.hbm = mesh, hbm
        self.machine = Machine(hardware, as_mesh(mesh).shape, topology)
        self.space = space = Space(step, self.machine.sizes)
        self.terms, self.resident = Terms(space, self.machine), Resident(space)
        self.seconds = inf
        """Of the best assignment."""
        self.assignment: Assignment | None = None
        self.least_memory = space.fsdp()
        """Of those that were improved, that which needs least."""
        self.bound = self.terms.least
        """Seconds: no assignment that fits takes less."""
        self._terms_of: dict[int, list[int]] = {name: [] for name in space.values}
        for place, term in enumerate(self.terms.terms):
            for name in term.scope:
                self._terms_of[name].append(place)

    def missing_bytes(self, assignment: Assignment) -> int:
        """Return by how much a layout does not fit; 0 if it does."""
        return max(0, self.resident.bytes(assignment) - self.hbm)

    def _offer(self, assignment: Assignment) -> None:
        """Keep an assignment if it is better than the best, and fits."""
        seconds = self.terms.total(assignment).total
        if seconds < self.seconds * (1 - _ROUNDING) and not self.missing_bytes(assignment):
            self.seconds, self.assignment = seconds, dict(assignment)

    # Layouts of experts, improved.

    def begin(self) -> None:
        """Improve the best of the layouts that experts write, first those that fit best."""
        self.seconds, self.assignment = inf, None
        starts = self.space.starts()
        for start in starts:
            self._offer(start)
        starts.sort(key=lambda row: (self.missing_bytes(row), self.terms.total(row).total))
        rows = [self._improve(start) for start in starts[:_DESCENTS]]
        self.least_memory = min(rows, key=self.resident.bytes)

    def _improve(self, start: Assignment) -> Assignment:
        """Change an assignment variable by variable until none gets better; what fits is first."""
        now, seconds, missing = start, self.terms.total(start), self.missing_bytes(start)
        before = None
        while before != now:
            before = now
            for name, values in self.space.values.items():
                places = self._terms_of[name]
                for value in values:
                    changed = {**now, name: value}
                    still_missing = self.missing_bytes(changed)
                    if still_missing > missing:
                        continue
                    after = seconds.less(self.terms.total(now, places))
                    after = after.plus(self.terms.total(changed, places))
                    if (still_missing, after.total) < (missing, seconds.total * (1 - _ROUNDING)):
                        now, seconds, missing = changed, after, still_missing
        self._offer(now)
        return now

    # All others, as tables.

    def prove(self, most: float) -> None:
        """Find the best of all assignments, or show that none takes less than so many seconds."""
        if self.bound >= most * (1 - _ROUNDING):
            return
        tables = self._tables()
        if not missing_solver():
            self._solve(tables, most)
        else:
            least = (map(min, zip(*rows.values(), strict=True)) for rows in tables.values())
            sums = map(sum, zip(*least, strict=True))
            self.bound = max(self.bound, min(most, max(sums, default=0.0)))

    def _assignments(self, scope: _Scope) -> Iterator[tuple[_Row, Assignment]]:
        """Yield the numbers of values, and the values, of all combinations."""
        values = [self.space.values[name] for name in scope]
        for row in product(*(range(len(each)) for each in values)):
            yield (
                row,
                {name: values[i][n] for i, (name, n) in enumerate(zip(scope, row, strict=True))},
            )

    def _scopes(self) -> dict[_Scope, list[int]]:
        """Return the terms by their variables; those of a part of others' are with these."""
        scopes: dict[_Scope, list[int]] = {}
        terms = enumerate(self.terms.terms)
        for place, term in sorted(terms, key=lambda row: -len(row[1].scope)):
            wider = next((scope for scope in scopes if set(term.scope) <= set(scope)), term.scope)
            scopes.setdefault(wider, []).append(place)
        return scopes

    def _tables(self) -> dict[_Scope, dict[_Row, Bounds]]:
        """Return by variables what terms cost together for each combination of values."""
        return {
            scope: {
                row: self.terms.total(values, places).bounds
                for row, values in self._assignments(scope)
            }
            for scope, places in self._scopes().items()
            if prod(len(self.space.values[name]) for name in scope) <= _MOST_ROWS
        }

    def _solve(self, tables: dict[_Scope, dict[_Row, Bounds]], most: float) -> None:
        """Have CP-SAT choose a row of each table."""
        from ortools.sat.python import cp_model

        model = cp_model.CpModel()
        variables = {
            name: model.new_int_var(0, len(values) - 1, str(name))
            for name, values in self.space.values.items()
        }

        def costs(scope: _Scope, cells: Iterable[tuple[_Row, Iterable[int]]]) -> list[Any]:
            """Return variables that are what the row costs which the values choose."""
            rows = [(*row, *numbers) for row, numbers in cells]
            columns = [*zip(*rows, strict=True)][len(scope) :]
            cells_of_row = [model.new_int_var(min(column), max(column), "") for column in columns]
            model.add_allowed_assignments(
                [*(variables[name] for name in scope), *cells_of_row], rows
            )
            return cells_of_row

        limit = most  # or if nothing is known that fits, what all of the worst take
        if most == inf:
            limit = sum(max(map(max, rows.values())) for rows in tables.values())
        unit = limit / _PARTS or 1.0
        total, times = model.new_int_var(0, _PARTS, "total"), []
        for scope, rows in tables.items():
            cells = ((row, [floor(b / unit) for b in bounds]) for row, bounds in rows.items())
            times.append(costs(scope, cells))
        for column in zip(*times, strict=True):  # the longer of the two is the time
            model.add(total >= sum(column))
        for groups in self.resident.times:
            alive = []
            for group in groups:
                scope = self.resident.groups[group][0]
                sizes = ((row, [self.resident.of(group, v)]) for row, v in self._assignments(scope))
                alive += costs(scope, sizes)
            model.add(sum(alive) <= self.hbm)
        model.minimize(total)
        for name, value in (self.assignment or {}).items():
            model.add_hint(variables[name], self.space.values[name].index(value))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = _MOST_SECONDS
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            self.bound = most
            return
        bound = float(solver.best_objective_bound) * unit * (1 - _ROUNDED)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            numbers = {name: solver.value(variable) for name, variable in variables.items()}
            self._improve({name: self.space.values[name][i] for name, i in numbers.items()})
            if status == cp_model.OPTIMAL and len(tables) == len(self._scopes()):
                bound = self.seconds
        self.bound = max(self.bound, min(bound, most))

    def simplify(self) -> None:
        """Leave out axes without which the best assignment is as good."""
        assert self.assignment is not None
        for name, values in self.space.values.items():
            for value in values:
                if name == STORED or len(value) >= len(self.assignment[name]):
                    break
                simpler = {**self.assignment, name: value}
                needed = self.resident.bytes(simpler)
                if (
                    self.terms.total(simpler).total <= self.seconds * (1 + _ROUNDING)
                    and needed <= self.resident.bytes(self.assignment) * (1 + _LITTLE)
                    and needed <= self.hbm
                ):
                    self.assignment = simpler


def missing_solver() -> str:
    """Say how to get OR-tools; "" if they are there."""
    if find_spec("ortools") is None:
        return "pip install ortools"
    if "tensorflow" in sys.modules and "ortools.sat.python.cp_model" not in sys.modules:
        return "import ortools.sat.python.cp_model before tensorflow"  # behind it, it crashes
    return ""


_Group = list[tuple["TracedOperation", int]]


class Term(NamedTuple):
    """A part of the time of a step, and the variables on which it depends."""

    scope: tuple[int, ...]
    operations: tuple[tuple[TracedOperation, int], ...]
    """With how often each runs; () if it is of what is sent of an array that several read."""
    arrays: tuple[int, ...]
    """On whose cuts it depends: those that operations read and make; or the one that is sent."""
    readers: tuple[int, ...] = ()
    """Places of the terms that read the array."""


class Terms:
    """The terms of a step in a space, each evaluated when it is first asked for."""

    def __init__(self, space: Space, machine: Machine) -> None:
        self.space, self.machine = space, machine
        self._evaluated: dict[tuple[Any, ...], tuple[Seconds, dict[int, list[Need]]]] = {}
        groups = [
            group
            for group in _groups(space.equations)
            if len(group) > 1 or not self._is_free(group[0][0])
        ]
        self.terms: list[Term] = []
        readers: dict[int, list[int]] = {}
        for place, group in enumerate(groups):
            numbers = dict.fromkeys(n for operation, _ in group for n in _numbers(operation))
            arrays = tuple(space.unlike(n for n in numbers if n not in space.fixed))
            self.terms.append(Term(space.scope_of(numbers), tuple(group), arrays))
            results = {number for operation, _ in group for number in operation.outputs}
            read = {n for operation, _ in group for n in operation.inputs if n is not None}
            for number in read - results:
                readers.setdefault(number, []).append(place)
        self._shared = {number for number, places in readers.items() if len(places) > 1}
        for number in sorted(self._shared):
            names = {name for place in readers[number] for name in self.terms[place].scope}
            scope = tuple(name for name in space.values if name in names)
            self.terms.append(Term(scope, (), (number,), tuple(readers[number])))

    def _is_free(self, operation: TracedOperation) -> bool:
        """Say whether an operation costs nothing in any layout, as its arrays are cut alike."""
        space, rule = self.space, operation.rule
        if operation.name == "scan":  # whose dimension of loops is whole
            (body,) = operation.bodies
            return all(
                (space.classes[outer][is_slice:], space.is_weight(outer))
                == (space.classes[inner], space.is_weight(inner))
                for outer, inner, is_slice in operation.arguments(body) + operation.results(body)
                if outer is not None and inner is not None and outer != inner
            )
        if rule is None or rule.summed or is_apart(operation):
            return False
        kinds = {space.first[n] for n in _numbers(operation) if any(space.classes[n])}
        is_turned = operation.name == "transpose"  # of a square array: the axes stay in their place
        is_alike = len(kinds) < 2 and not rule.whole and not rule.minor and not is_turned
        return rule.is_identity or is_alike

    def seconds(self, place: int, assignment: Mapping[int, Axes]) -> Seconds:
        """Return the seconds of a term if its variables have these values."""
        term = self.terms[place]
        if term.operations:
            return self._evaluate(place, assignment)[0]
        # What is sent of an array that several read.
        (number,) = term.arrays
        rows = (self._evaluate(reader, assignment)[1] for reader in term.readers)
        needs = [need for row in rows for need in row.get(number, ())]
        if not needs:
            return Seconds()
        spread = Spread(self.space, assignment)
        spread.send(number, needs)
        return self.machine.sending(self.space, spread.sent)

    def _evaluate(
        self, place: int, assignment: Mapping[int, Axes]
    ) -> tuple[Seconds, dict[int, list[Need]]]:
        """Return the seconds of operations, and how they read arrays that others read as well."""
        term = self.terms[place]
        key = (place, *[self.space.cuts(number, assignment) for number in term.arrays])
        if key not in self._evaluated:
            spread = Spread(self.space, assignment)
            for operation, trips in term.operations:
                spread.run(operation, trips)
            needs = spread.needs
            shared = {number: needs[number] for number in self._shared & needs.keys()}
            for number in needs.keys() - shared:
                spread.send(number, needs[number])
            seconds = self.machine.computing(spread, term.operations)
            seconds = seconds.plus(self.machine.sending(self.space, spread.sent))
            self._evaluated[key] = seconds, shared
        return self._evaluated[key]

    @property
    def least(self) -> float:
        """Seconds of the step if all devices shared all work, and sent nothing."""
        uncut: dict[int, Axes] = dict.fromkeys(self.space.values, ())
        rows = (self.seconds(place, uncut) for place, t in enumerate(self.terms) if t.operations)
        return sum(row.compute + row.memory for row in rows) / prod(self.space.sizes.values())

    def total(self, assignment: Mapping[int, Axes], places: Iterable[int] | None = None) -> Seconds:
        """Return the seconds of some terms if their variables have these values; or of the step."""
        total = Seconds()
        for place in range(len(self.terms)) if places is None else places:
            total = total.plus(self.seconds(place, assignment))
        return total


def _numbers(operation: TracedOperation) -> Iterator[int]:
    """Yield the arrays that an operation reads and makes, and those that a loop begins with."""
    yield from (n for n in (*operation.inputs, *operation.outputs) if n is not None)
    for body in operation.bodies:
        yield from body.inputs
        yield from (n for n in body.outputs if n is not None)


def _groups(equations: Equations) -> Iterable[_Group]:
    """Return operations by what must be priced together: those whose sums an addition merges."""
    groups: dict[int, _Group] = {}
    adding: set[int] = set()
    for row in equations.everything():
        operation, _ = row
        group = groups.setdefault(id(operation), [])
        group.append(row)
        is_sum = operation.rule is not None and bool(operation.rule.summed)
        for number in operation.outputs if is_sum or id(operation) in adding else ():
            reader = adder(equations, number)
            if reader is not None:
                adding.add(id(reader))
                merged = groups.setdefault(id(reader), group)
                if merged is not group:  # of another term of the sum
                    merged += group
                    groups |= {key: merged for key, value in groups.items() if value is group}
                    group = merged
    return {id(group): group for group in groups.values()}.values()


class Resident:
    """Arrays that are alive together, at several times, as terms of few variables each.

    Arguments are alive throughout, and results at the end, but for those in donated memory. When
    most is alive is decided once, by whole sizes. What is gathered, and what XLA adds, is left out:
    the compiler says what a layout needs.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.groups: list[tuple[tuple[int, ...], list[int]]] = []
        """Variables, and the arrays of one time that depend on them."""
        self.times: list[list[int]] = []
        """Numbers of the groups that are alive together."""
        for time in _alive_together(space.step):
            groups: dict[tuple[int, ...], list[int]] = {}
            for number in time:
                groups.setdefault(space.scope_of([number]), []).append(number)
            self.times.append(list(range(len(self.groups), len(self.groups) + len(groups))))
            self.groups += groups.items()
        self._bytes: dict[tuple[Any, ...], int] = {}

    def bytes(self, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes that a device needs."""
        return max(sum(self.of(group, assignment) for group in time) for time in self.times)

    def of(self, group: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes of a group."""
        scope, numbers = self.groups[group]
        key = (group, *[assignment[name] for name in scope])
        if key not in self._bytes:
            self._bytes[key] = sum(self._array(number, assignment) for number in numbers)
        return self._bytes[key]

    def largest(self, assignment: Mapping[int, Axes]) -> list[tuple[int, int]]:
        """List (bytes, array) of what is alive when most is, the largest first."""
        most = max(self.times, key=lambda time: sum(self.of(group, assignment) for group in time))
        numbers = (number for group in most for number in self.groups[group][1])
        return sorted(((self._array(n, assignment), n) for n in numbers), reverse=True)

    def _array(self, number: int, assignment: Mapping[int, Axes]) -> int:
        """Return the bytes of an array on a device."""
        return self._space.bytes(number, self._space.cuts(number, assignment))


def _alive_together(step: Step) -> Iterator[list[int]]:
    """Yield the arrays that are alive together: at the end, and when they are most."""
    equations = step._equations
    body, values = equations.body, equations.values
    arguments = [*body.inputs, *(n for n in equations.constants if n in equations.users)]
    free = Counter(values[n][:2] for n in step._donated)
    results = []
    for number in dict.fromkeys(n for n in body.outputs if n is not None and n not in arguments):
        free[values[number][:2]] -= 1
        if free[values[number][:2]] < 0:
            results.append(number)
    yield [*arguments, *results]
    for alive in _alive(equations, body):
        yield [*arguments, *alive]


def _alive(equations: Equations, body: Body, around: Iterable[int] = ()) -> Iterator[set[int]]:
    """Yield what is alive when it is most, in a body and in each of its loops and branches.

    Arrays that XLA computes where they are read keep alive what they are computed from, unless that
    is twice as large.
    """
    bits = {n: equations.values[n].bits for op in body.operations for n in op.outputs}
    roots_of: dict[int | None, set[int]] = {}
    begin_of: dict[int, int] = {}
    end_of: dict[int, int] = {}
    for time, operation in enumerate(body.operations):
        read = {root for number in operation.inputs for root in roots_of.get(number, ())}
        is_own = bool(operation.bodies) or is_apart(operation)
        for number in operation.outputs:
            is_less = len(read) > 1 and 2 * bits[number] <= sum(bits[root] for root in read)
            if is_own or is_less:
                begin_of[number], roots_of[number] = time, {number}
            else:
                roots_of[number] = read
            if is_own or is_less or number in body.outputs:
                end_of |= dict.fromkeys({*read, *roots_of[number]}, time)
    total = [0] * (len(body.operations) + 1)
    for root, begin in begin_of.items():
        for time in range(begin, end_of[root] + 1):
            total[time] += bits[root]
    most = max(range(len(total)), key=total.__getitem__)
    for time in {most, *(i for i, op in enumerate(body.operations) if op.bodies)}:
        alive = {*around, *(root for root in begin_of if begin_of[root] <= time <= end_of[root])}
        yield alive
        for inner in body.operations[time].bodies if time < len(body.operations) else ():
            yield from _alive(equations, inner, alive)
