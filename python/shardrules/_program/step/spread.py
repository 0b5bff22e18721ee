"""Spreads specs over the arrays of a step, and counts what is sent between devices for it.

Each operation computes with the axes that cost least to send, as GSPMD chooses: an operand that is
cut by an axis which another needs elsewhere is gathered, and terms of a sum are added over the axes
that cut what is summed. Constraints, arguments and results are facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.dtypes import bits_of
from shardrules._base.specs import entries_of, entry_axes
from shardrules._program.step.cuts import (
    SplitError,
    array_cuts,
    closed_factors,
    factor_cuts,
    fitting_cuts,
)
from shardrules._program.step.equations import RESULT

if TYPE_CHECKING:
    from shardrules._estimate.schedule import CollectiveKind
    from shardrules._program.step.cuts import Cuts
    from shardrules._program.step.equations import Body, Equations, TracedOperation
    from shardrules._program.step.factors import Factors, Rule, Shape

_Move = tuple["CollectiveKind", tuple[str, ...], int]
"""(collective, axes, payload), as in `SpreadCollective`."""
_MOST_CHOICES: Final = 256
ADDS: Final = frozenset({"add", "add_any"})
"""Operations that can add what devices have of sums."""
PRODUCTS: Final = frozenset(
    ["dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"]
)
_SAME_TERMS: Final = frozenset({"transpose", "convert_element_type"})
CONSTRAINTS: Final = frozenset({"sharding_constraint", "reshard"})
# Collectives that code by device has, by the name of the primitive.
_EXPLICIT: Final[dict[str, CollectiveKind]] = {
    **dict.fromkeys(["psum", "psum2", "psum_invariant", "pmax", "pmin"], "all-reduce"),
    **dict.fromkeys(["all_gather", "all_gather_invariant"], "all-gather"),
    **dict.fromkeys(["reduce_scatter", "psum_scatter"], "reduce-scatter"),
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


class SpreadCollective(NamedTuple):
    """A collective of one operation."""

    kind: CollectiveKind
    axes: tuple[str, ...]
    payload: int
    """Bytes on a device: the result of an all-gather, the operand of all others."""
    trips: int
    operation: TracedOperation
    value: int | None
    """The array that is gathered, or of whose terms the sum is; None in code by device."""


class Spread:
    """Specs of all arrays of a step on a mesh, and what is sent.

    An axis that a reshape can keep only in part, such as 8 devices of 4 heads, is taken for
    several: "tp:0" of 4 devices and "tp:1" of 2. `arguments` and `results` are the cuts of each;
    None of an argument that is whole on each device, and of a result of which nothing says.
    """

    _may_split = True
    _merges_sums = True
    """Whether terms of several products are added before devices add up theirs, and no gather is
    moved out of a loop, as XLA has it for TPUs."""
    _most_between: float = 200
    """Operations, in number, behind which XLA for TPUs gathers again and does not keep a copy."""
    _has_free_routes = True
    """Whether nothing may say how masks are cut, so that XLA has them whole."""

    def __init__(
        self,
        equations: Equations,
        sizes: Mapping[str, int],
        arguments: Sequence[Cuts | None],
        results: Sequence[Cuts | None],
    ) -> None:
        self._equations = equations
        self.mesh = {axis: size for axis, size in sizes.items() if size > 1}
        self.sizes = dict(self.mesh)
        """Devices by axis, and of one that is split by each of its parts."""
        self._whole = {axis: axis for axis in self.mesh}
        while True:
            try:
                self._spread(arguments, results)
            except SplitError as split:
                self._divide(split)
            else:
                break

    def _divide(self, split: SplitError) -> None:
        """Replace a mesh axis by its parts, of which one is split."""
        whole = self._whole[split.axis]
        parts: list[int] = []
        for axis in self._parts([whole]):
            size = self.sizes[axis]
            is_split = axis == split.axis
            parts += [split.first, size // split.first] if is_split else [size]
        divided = {f"{whole}:{i}": size for i, size in enumerate(parts)}
        sizes: dict[str, int] = {}
        for axis, size in self.sizes.items():
            sizes |= divided if self._whole[axis] == whole else {axis: size}
        self._whole = {a: whole if a in divided else self._whole[a] for a in sizes}
        self.sizes = sizes

    def named(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axes by their names in the mesh."""
        return tuple(dict.fromkeys(self._whole[axis] for axis in axes))

    def _parts(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return axes without those of one device, and of those that are split their parts."""
        return tuple(
            part
            for axis in axes
            for part in ((axis,) if axis in self.sizes else self.sizes)
            if axis in (part, self._whole[part])
        )

    def _spread(self, arguments: Sequence[Cuts | None], results: Sequence[Cuts | None]) -> None:
        equations = self._equations
        self.cuts: dict[int, Cuts] = {}
        self.sent: list[SpreadCollective] = []
        self._wishes: dict[int, Cuts] = {}
        self._copies: dict[tuple[int, Cuts], int] = {}
        self._place = 0
        self._carried: dict[int | None, int] = {}
        self._trips: dict[int, int] = {}
        self._terms: dict[int, tuple[tuple[str, ...], ...]] = {}
        self._axes: dict[int, tuple[str, ...]] = {}
        self._summed_parts: dict[int, int] = {}
        self.routes: list[tuple[TracedOperation, int]] = []
        """Products whose tokens are gathered, and the masks of what `top_k` has chosen."""
        self._routed: set[int] = set()
        self._route_of: dict[str, Any] = {}
        body = equations.body
        for number, cuts in zip(body.inputs, arguments, strict=True):
            self.cuts[number] = self._known(number, cuts or ())
        self._copied = self._copies_of_arguments(body)
        self._wish(body, results)
        self._run(body, 1)
        for result, cuts in zip(body.outputs, results, strict=True):
            if result is not None and cuts is not None and body.operations:
                self._move(result, self._known(result, cuts), 1, body.operations[-1])

    def axes_of(self, operation: TracedOperation) -> tuple[str, ...]:
        """Return the mesh axes along which devices share the work of an operation."""
        return self._axes.get(id(operation), ())

    def share(self, operation: TracedOperation) -> int:
        """Return how many devices share the work of an operation."""
        return self.count(self.axes_of(operation))

    def summed_parts(self, operation: TracedOperation) -> int:
        """Count the parts in which devices get an operand that a product sums over; 1 if whole."""
        return self._summed_parts.get(id(operation), 1)

    def bytes(self, number: int, cuts: Cuts | None = None) -> int:
        """Return the bytes of an array on a device."""
        dtype = self._equations.values[number].dtype
        if dtype is None:  # a token
            return 0
        return -(-prod(self.shape(number, cuts)) * bits_of(dtype) // 8)

    def shape(self, number: int, cuts: Cuts | None = None) -> Shape:
        """Return the shape of an array on a device."""
        sizes = list(self._equations.values[number].shape)
        for dim, axes in enumerate(self.cuts.get(number, ()) if cuts is None else cuts):
            sizes[dim] = -(-sizes[dim] // self.count(axes))
        return tuple(sizes)

    def count(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def _known(self, number: int, cuts: Sequence[Sequence[str]]) -> Cuts:
        """Return cuts without axes of one device, or that are not in the mesh."""
        rank = len(self._equations.values[number].shape)
        rows = [self._parts(axes) for axes in cuts]
        return tuple(rows[:rank] + [()] * (rank - len(rows)))

    def _of(self, number: int) -> Cuts:
        cuts = self.cuts.get(number)
        return ((),) * len(self._equations.values[number].shape) if cuts is None else cuts

    # What operations wish for: from constraints and results backwards.

    def _copies_of_arguments(self, body: Body) -> dict[int, Cuts]:
        """Return the cuts of arguments, and of what is computed of one alone and has its shape.

        Such as moments that decay, and weights in another dtype: what is added to them is to be cut
        as they are.
        """
        copied = dict(self.cuts)
        for operation in body.operations:
            arrays = [(number, dims) for number, dims in operation.operands() if dims]
            if len(arrays) == 1 and operation.rule and operation.rule.results == (arrays[0][1],):
                cuts = copied.get(arrays[0][0])
                if cuts is not None:
                    copied[operation.outputs[0]] = cuts
        return copied

    def _wish(self, body: Body, outputs: Sequence[Cuts | None]) -> None:
        for number, cuts in zip(body.outputs, outputs, strict=True):
            if number is not None and cuts is not None:
                self._wishes.setdefault(number, self._known(number, cuts))
        for operation in reversed(body.operations):
            if operation.name in CONSTRAINTS:
                self._wishes[operation.outputs[0]] = self._constraint(operation)
            if operation.bodies:
                self._wish_inside(operation)
            elif operation.rule is not None and not operation.rule.summed:
                self._wish_of_operands(operation, operation.rule)

    def _wish_of_operands(self, operation: TracedOperation, rule: Rule) -> None:
        axes: dict[int, tuple[str, ...]] = {}
        for result, dims in zip(operation.outputs, rule.results, strict=True):
            if result in self._wishes:
                axes = self._by_factor(rule, dims, self._wishes[result]) | axes
        if not axes:
            for number, dims in operation.operands():
                cuts = self.cuts.get(number, self._copied.get(number, ()))
                axes = self._by_factor(rule, dims, cuts) | axes
        if axes:
            for number, dims in operation.operands():
                if number not in self.cuts:
                    self._wishes.setdefault(number, array_cuts(dims, axes))

    def _wish_inside(self, operation: TracedOperation) -> None:
        if operation.name == "shard_map":
            return
        for body in operation.bodies:
            arguments = operation.arguments(body)
            carried = range(operation.first, operation.first + operation.carries)
            for place, (outer, inner) in enumerate(arguments):
                if outer in self.cuts and inner not in self.cuts and place not in carried:
                    self.cuts[inner] = self.cuts[outer][place >= carried.stop :]
            outputs: list[Cuts | None] = []
            for place, number in enumerate(operation.outputs):
                wish = self._wishes.get(number)
                if place >= operation.carries:
                    outputs.append(None if wish is None else wish[1:])
                elif wish is None and operation.name != "cond":
                    outputs.append(self.cuts.get(arguments[operation.first + place][0] or -1))
                else:
                    outputs.append(wish)
            self._wish(body, outputs)

    def _constraint(self, operation: TracedOperation) -> Cuts:
        sharding = operation.eqn.params.get("sharding") or operation.eqn.params.get("dst_sharding")
        spec = getattr(sharding, "spec", None)
        number = operation.inputs[0]
        if spec is None or number is None:
            return () if number is None else self._of(number)
        free = operation.eqn.params.get("unconstrained_dims") or ()
        before = self._of(number)
        rows = [entry_axes(entry) for entry in entries_of(spec)]
        rows += [()] * (len(before) - len(rows))
        rows = [before[dim] if dim in free else row for dim, row in enumerate(rows)]
        return self._known(number, rows)

    # What operations compute with, and send: forwards.

    def _run(self, body: Body, trips: int) -> None:
        for number in body.inputs:
            self._trips.setdefault(number, trips)
        for operation in body.operations:
            self._trips.update(dict.fromkeys(operation.outputs, trips))
            self._run_operation(operation, trips)

    def _run_operation(self, operation: TracedOperation, trips: int) -> None:
        self._place += 1
        if operation.name in _EXPLICIT:
            self._explicit(operation, trips)
        if operation.name in CONSTRAINTS and operation.inputs[0] is not None:
            cuts = self._constraint(operation)
            self._move(operation.inputs[0], cuts, trips, operation)
            self.cuts[operation.outputs[0]] = cuts
        elif operation.bodies:
            self._run_inside(operation, trips)
        elif operation.rule is not None:
            self._compute(operation, operation.rule, trips)

    def _explicit(self, operation: TracedOperation, trips: int) -> None:
        params = operation.eqn.params
        axes = self._parts(entry_axes(params.get("axes", params.get("axis_name"))))
        kind = _EXPLICIT[operation.name]
        arrays = operation.outputs if kind == "all-gather" else operation.inputs
        payload = sum(self.bytes(number) for number in arrays if number is not None)
        if axes and payload:
            self.sent.append(SpreadCollective(kind, axes, payload, trips, operation, None))

    def _run_inside(self, operation: TracedOperation, trips: int) -> None:
        if operation.name == "shard_map":
            self._run_manual(operation, trips)
            return
        for body in operation.bodies:
            self._enter(operation, body, trips)
            self._run(body, trips * operation.trips)
            for place, (number, result) in enumerate(
                zip(operation.outputs, body.outputs, strict=True)
            ):
                cuts = () if result is None else self._of(result)
                is_stack = place >= operation.carries
                self.cuts[number] = self._known(number, ((), *cuts) if is_stack else cuts)

    def _enter(self, operation: TracedOperation, body: Body, trips: int) -> None:
        """Give the inputs of a body their cuts: what is carried has those of its results."""
        stop = operation.first + operation.carries
        for place, (outer, inner) in enumerate(operation.arguments(body)):
            if outer is None or inner == outer:
                continue
            cuts = self._of(outer)
            if place >= stop:
                if cuts[0]:
                    self._move(outer, ((), *cuts[1:]), trips, operation)
                cuts = cuts[1:]
            elif place >= operation.first and operation.name != "cond":
                self._carried[inner] = trips
                result = body.outputs[place - operation.first]
                wish = None if result is None else self._wishes.get(result)
                if wish is not None and wish != cuts:
                    self._move(outer, wish, trips, operation)
                    cuts = wish
            self.cuts[inner] = cuts

    def _run_manual(self, operation: TracedOperation, trips: int) -> None:
        """Bring arguments to the specs of code by device, and run it."""
        manual = self._equations.manual
        (body,) = operation.bodies

        def cuts_of(number: int, axes: Mapping[int, tuple[str, ...]]) -> Cuts:
            rank = len(self._equations.values[number].shape)
            return self._known(number, [axes.get(dim, ()) for dim in range(rank)])

        for outer, inner in operation.arguments(body):
            if outer is not None:
                self._move(outer, cuts_of(outer, manual[inner]), trips, operation)
        first = len(self.sent)
        self._run(body, trips)
        for number, result in zip(operation.outputs, body.outputs, strict=True):
            self.cuts[number] = cuts_of(number, manual[number])
            if self._merges_sums and number in self._wishes:
                self._scatter_sum(first, result, number)

    def _scatter_sum(self, first: int, result: int | None, number: int) -> None:
        """Scatter the sum that code by device gives back, where it is cut by those axes at once."""
        wish, taken = self._wishes[number], {axis for row in self.cuts[number] for axis in row}
        added = {axis for row in wish for axis in row} - taken
        for place, row in enumerate(self.sent[first:], first):
            is_it = row.operation.outputs == [result] and row.kind == "all-reduce"
            if is_it and row.value is None and set(row.axes) == added:
                self.sent[place] = row._replace(kind="reduce-scatter")
                self.cuts[number] = wish

    def _compute(self, operation: TracedOperation, rule: Rule, trips: int) -> None:
        """Choose the axes of an operation's factors, move its operands, and add up its terms."""
        if rule.is_identity:
            for before, after in zip(operation.inputs, operation.outputs, strict=False):
                self.cuts[after] = self._known(after, () if before is None else self._of(before))
            return
        routed = self._whole_routes(operation)
        options = self._options(operation, rule, routed)
        choice = self._cheapest(operation, rule, options)
        self._axes[id(operation)] = tuple(axis for axes in choice.values() for axis in axes)
        if operation.name in ADDS and self._add_terms(operation, choice, rule, trips):
            return
        parts: list[int] = []
        for number, dims in operation.operands():
            if number != routed:
                cuts, needs = self._of(number), array_cuts(dims, choice)
                parts += [] if cuts == needs else [self._parts_of_sum(rule, dims, cuts, needs)]
                self._move(number, needs, trips, operation)
        # Of two operands that come, one at most comes in parts.
        self._summed_parts[id(operation)] = parts[0] if len(parts) == 1 else 1
        for number, dims in zip(operation.outputs, rule.results, strict=True):
            self.cuts[number] = array_cuts(dims, choice)
            rows = [choice[factor] for factor in sorted(rule.summed) if factor in choice]
            self._add_up(operation, number, tuple(rows), trips)

    def _parts_of_sum(self, rule: Rule, dims: Sequence[Factors], cuts: Cuts, needs: Cuts) -> int:
        """Count the parts of what is summed over in which an operand comes to its needs."""
        rows = zip(dims, cuts, needs, strict=True)
        gathered = [
            set(b) - set(a) for factors, b, a in rows if not rule.summed.isdisjoint(factors)
        ]
        return self.count(set().union(*gathered))

    def _whole_routes(self, operation: TracedOperation) -> int | None:
        """Return the operand of a product that XLA has whole on each device; None without one.

        It is made of what `top_k` has chosen alone, without a constraint, such as the masks that
        give tokens to experts. XLA cuts it as the result of the product is to be cut, by experts,
        and gathers the tokens.
        """
        numbers = [n for n in operation.inputs if n is not None and any(self._of(n))]
        routed = [number for number in numbers if number in self._routed]
        if operation.name == "top_k" or (routed and routed == numbers):
            self._routed.update(operation.outputs)
            return None
        is_whole = self._has_free_routes and operation.name in PRODUCTS and len(routed) == 1
        return routed[0] if is_whole else None

    def _options(
        self, operation: TracedOperation, rule: Rule, routed: int | None
    ) -> dict[str, list[int]]:
        """Return by axis the factors of an operation that it may cut."""
        options: dict[str, list[int]] = {}
        of_routed: dict[int, Any] = {}
        for number, dims in operation.operands():
            if number == routed:
                rows = zip(self._equations.values[number].dims, dims, strict=True)
                of_routed.update((factor, dim) for dim, row in rows for factor in row)
            else:
                by_factor = self._by_factor(rule, dims, self._of(number))
                closed = closed_factors(rule, by_factor, self.sizes)
                for factor, names in by_factor.items():
                    for name in names:
                        places = options.setdefault(name, [])
                        if factor not in places and factor not in closed:
                            places.append(factor)
        for result, dims in zip(operation.outputs, rule.results, strict=True):
            wished = self._wishes.get(result) or self._sibling(result)
            wish = self._by_factor(rule, dims, wished)
            closed = closed_factors(rule, wish, self.sizes)
            for factor, names in wish.items():
                if factor not in closed:  # a device has the whole, and needs its part
                    for name in names:
                        options.setdefault(name, [factor])
                        dim = of_routed.get(factor)
                        if dim is not None and self._route_of.setdefault(name, dim) == dim:
                            if routed is not None and options[name] != [factor]:
                                self.routes.append((operation, routed))
                            options[name] = [factor]
        return options

    def _sibling(self, number: int) -> Cuts:
        """Return the cuts of what the only user of an array adds to it; () if there is none."""
        users = self._equations.users.get(number, [])
        if len(users) != 1 or users[0].name not in ADDS:
            return ()
        values = self._equations.values
        cuts = (
            self.cuts[other]
            for other in users[0].inputs
            if other in self.cuts
            and other != number
            and values[other].shape == values[number].shape  # a scalar is added to an array, too
        )
        return next(cuts, ())

    def _by_factor(
        self, rule: Rule, dims: Sequence[Factors], cuts: Cuts
    ) -> dict[int, tuple[str, ...]]:
        return factor_cuts(rule, dims, cuts, self.sizes, may_split=self._may_split)

    def _cheapest(
        self, operation: TracedOperation, rule: Rule, options: Mapping[str, list[int]]
    ) -> dict[int, tuple[str, ...]]:
        """Return the axes by factor for which least is sent."""
        axes = list(options)
        choices: list[list[int | None]] = [[*options[axis]] or [None] for axis in axes]
        if prod(map(len, choices)) > _MOST_CHOICES:
            choices = [places[:1] for places in choices]
        rows = [fitting_cuts(axes, places, rule, self.sizes) for places in product(*choices)]
        if len(rows) == 1:
            return rows[0]
        return min(rows, key=lambda row: self._cost(operation, rule, row))

    def _cost(
        self, operation: TracedOperation, rule: Rule, choice: dict[int, tuple[str, ...]]
    ) -> float:
        """Return the bytes that a device sends if an operation computes with these axes."""
        total = sum(
            self._sent(number, self._of(number), array_cuts(dims, choice))
            for number, dims in operation.operands()
        )
        summed = [axis for factor in rule.summed for axis in choice.get(factor, ())]
        for number, dims in zip(operation.outputs, rule.results, strict=True):
            cuts = array_cuts(dims, choice)
            if summed:
                total += self._ring("all-reduce", summed, self.bytes(number, cuts))
            if (wish := self._wishes.get(number)) is not None:
                total += self._sent(number, cuts, wish)
        return total

    def _sent(self, number: int, before: Cuts, after: Cuts) -> float:
        """Return the bytes that a device sends to bring an array from some cuts to others."""
        return sum(self._ring(*move) for move in self._moves(number, before, after))

    def _ring(self, kind: str, axes: Iterable[str], payload: int) -> float:
        count = self.count(axes)
        return (2 if kind == "all-reduce" else 1) * payload * (count - 1) / count

    def _add_terms(
        self,
        operation: TracedOperation,
        choice: Mapping[int, tuple[str, ...]],
        rule: Rule,
        trips: int,
    ) -> bool:
        """Add terms that devices have not added up yet; False if there are others among them."""
        numbers = [number for number in operation.inputs if number is not None]
        axes = {self._terms.get(number) for number in numbers}
        if len(numbers) == len(operation.inputs) and len(axes) == 1 and None not in axes:
            (result,) = operation.outputs
            self.cuts[result] = array_cuts(rule.results[0], choice)
            self._add_up(operation, result, self._terms[numbers[0]], trips)
            return True
        for number in numbers:
            if number in self._terms:
                self._send_sum(operation, number, self._terms.pop(number), trips)
        return False

    def _add_up(
        self, operation: TracedOperation, number: int, rows: tuple[tuple[str, ...], ...], trips: int
    ) -> None:
        """Add the terms of a result over the axes of each row, or let an addition do so."""
        if not rows:
            return
        users = self._equations.users.get(number, [])
        if self._merges_sums and len(users) == 1 and users[0].name in ADDS:
            self._terms[number] = rows
        else:
            self._send_sum(operation, number, rows, trips)

    def _send_sum(
        self, operation: TracedOperation, number: int, rows: tuple[tuple[str, ...], ...], trips: int
    ) -> None:
        """Count the collectives that add the terms of a result over axes, a row after the other."""
        send = partial(SpreadCollective, operation=operation, value=number)
        wish = self._wishes.get(number) or ()
        for axes in rows:
            before, payload = self.cuts[number], self.bytes(number)
            taken = {axis for row in before for axis in row}
            scattered = tuple(a for row in wish for a in row if a in axes and a not in taken)
            rest = tuple(axis for axis in axes if axis not in scattered)
            if scattered:
                self.sent.append(send("reduce-scatter", scattered, payload, trips))
                self.cuts[number] = tuple(
                    (*row, *(axis for axis in target if axis in scattered))
                    for row, target in zip(before, wish, strict=True)
                )
                payload = self.bytes(number)
            if rest:
                times = min(trips, self._accumulated(number, trips))
                self.sent.append(send("all-reduce", rest, payload, times))

    def _accumulated(self, number: int, trips: int) -> int:
        """Return how often devices add up a sum: behind a loop that only accumulates it."""
        users = self._equations.users.get(number, [])
        while len(users) == 1 and users[0].name in _SAME_TERMS:
            users = self._equations.users.get(users[0].outputs[0], [])
        if len(users) != 1 or users[0].name not in ADDS or not self._merges_sums:
            return trips
        is_carried = self._equations.users.get(users[0].outputs[0], []) == [RESULT]
        others = (i for i in users[0].inputs if i in self._carried)
        return next((self._carried[i] for i in others if is_carried), trips)

    def _move(self, number: int, cuts: Cuts, trips: int, operation: TracedOperation) -> None:
        """Bring an array to other cuts; a copy that is there already is used again."""
        before, place = self._of(number), self._copies.get((number, cuts))
        is_near = place is not None and self._place - place <= self._most_between
        if before == cuts or is_near:
            return
        moves = list(self._moves(number, before, cuts))
        self._copies[number, cuts] = self._place
        if not self._merges_sums:  # CPUs move before a loop what it does not change
            trips = min(trips, self._trips.get(number, 1))
        for kind, axes, payload in moves:
            self.sent.append(SpreadCollective(kind, axes, payload, trips, operation, number))

    def _moves(self, number: int, before: Cuts, after: Cuts) -> Iterator[_Move]:
        """Yield (collective, axes, payload) that bring an array from some cuts to others."""
        if before == after:
            return
        place = {axis: dim for dim, row in enumerate(after) for axis in row}
        gathered = [a for dim, row in enumerate(before) for a in row if a not in place]
        turned = [a for dim, row in enumerate(before) for a in row if place.get(a, dim) != dim]
        if turned:
            yield "all-to-all", tuple(turned), self.bytes(number, before)
        if gathered:
            rows = tuple(
                tuple(a for a in row if a not in gathered and place.get(a) == dim)
                for dim, row in enumerate(before)
            )
            yield "all-gather", tuple(gathered), self.bytes(number, rows)
