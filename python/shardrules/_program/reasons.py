"""Why a program moves each array: a table of reasons, and the questions that it asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import Final, cast

from shardrules._base.dtypes import bits_of
from shardrules._program.causes import REASONS
from shardrules._program.context import Context
from shardrules._program.facts import (
    JOINS,
    MOVES,
    PRODUCTS,
    REDUCTIONS,
    SLICES,
    UPDATES,
    Use,
    summed_dims,
)
from shardrules._program.hlo import Exchange, Moved, is_called
from shardrules._program.values import reached

_PRODUCT_NAMES: Final = ("conv_general_dilated", "dot_general")
_SMALL: Final = 2**16
"""Bytes that a device sends in a step, below which a collective needs no reason."""
_NARROW: Final = 8
"""Bits of the numbers of quantized arrays, at most."""
_CARRIERS: Final = frozenset({"f16", "s8", "u8"})
"""Dtypes that backends without collectives of narrower numbers gather for them."""
_ADDED: Final = JOINS | MOVES | SLICES | UPDATES.keys() | {"add", "select", "subtract"}
"""Operations that can as well come before a sum over devices."""


def rows(context: Context, exchanges: Sequence[Exchange]) -> Sequence[Row]:
    """Return a row for each of a module's exchanges, in order."""
    rows = [Row(context, exchange) for exchange in exchanges]
    # Without the rows themselves, which would keep the graph in memory as a cycle.
    sums = (row for row in rows if row.what == "sum")
    context.sums = [(row.result, row.leaf, row.axes) for row in sums if row.leaf is not None]
    return rows


class Row:
    """Array that a collective moves, and what the table asks of it."""

    def __init__(self, context: Context, exchange: Exchange) -> None:
        self.context = context
        self.exchange = exchange
        self._values = context.values
        self._facts = context.facts
        self.kind = exchange.kind
        self.axes = frozenset(exchange.axes)
        self.is_sum = self.kind in REDUCTIONS
        times = 1 if exchange.times is None else exchange.times
        self.sent = exchange.sent_once * times
        self.is_small = self.sent < _SMALL
        self.op_name = exchange.instruction.op_name or ""
        self.is_called = is_called(self.op_name)
        self.operand = self._values.operand(exchange)
        self.what, self.leaf = self._leaf()
        """What is moved: a key of the table; of an activation the kind of the collective."""

    @cached_property
    def reason(self) -> str:
        """Key of the first reason that applies."""
        if self.leaf is None and self.is_small:
            return "small"
        rows = _TABLE.get(self.what, _TABLE["all-to-all"])
        reason = next(key for key, applies in rows if applies(self))
        if self.leaf is not None:
            return reason
        if REASONS[reason].is_expected:
            return "cache" if self.is_of_cache else reason
        return "rows" if self.is_of_table else reason

    @property
    def array_kind(self) -> Moved:
        """Kind of array that is moved."""
        if self.leaf is None:
            return "unexplained" if self.reason == "unknown" else "activation"
        return "gradient" if self.what == "sum" else cast("Moved", self.what)

    @property
    def moves(self) -> str:
        """Path of the leaf that is moved, or JAX's name of the operation."""
        if self.leaf is None:
            return self.op_name or self.exchange.instruction.name
        words = {"argument": "", "state": "new "}.get(self.what, "gradient of ")
        return words + self.context.executable.inputs.paths[self.leaf]

    def _leaf(self) -> tuple[str, int | None]:
        """Find the argument that is moved, or else the one whose new state is made of it."""
        leaf = self.context.leaf_of_copy[self.operand]
        if leaf is not None and leaf >= 0:
            return "argument", leaf
        state = self._next_state() if leaf is None else None
        if state is None:
            return "all-reduce" if self.is_sum else self.kind, None
        if self.is_sum:
            return "sum", state
        is_state = self.kind == "all-to-all" or self._is_made_of(state)
        return "state" if is_state else "gradient", state

    def _next_state(self) -> int | None:
        """Return the leaf whose next state is made of what is moved, or is moved itself."""
        state_of = self.context.next_state_of
        state = state_of.get(self.result)
        if state is not None or self.kind not in ("all-gather", "all-to-all"):
            return state
        state = state_of.get(self._source)  # which is not returned so, as if evaluated
        is_moved = state is not None and (self.kind == "all-to-all" or self._is_made_of(state))
        return state if is_moved else None

    @cached_property
    def result(self) -> int:
        """The moved array; of the pieces of an all-to-all what they are joined to."""
        exchange, values = self.exchange, self._values
        nodes = values.results(exchange)
        if self.kind == "all-to-all" and len(nodes) > 1:
            size = len(nodes) * self._elements(nodes[0])
            behind = reached(
                nodes[:1], lambda node: values.used_by[node] if self._elements(node) < size else ()
            )
            return next((node for node in behind if self._elements(node) == size), nodes[0])
        node = nodes[exchange.number]
        if self.kind == "reduce-scatter" and values.opcodes[node] == "all-reduce":
            return next(self._made_by(SLICES, node), node)
        return node

    @property
    def _source(self) -> int:
        """The array that is moved, as it is before; of a piece what it is sliced from."""
        node = self._facts.source_of(self.operand)
        if self.kind == "all-to-all" and self._values.opcodes[node] == "slice":
            return self._facts.source_of(self._values.made_of[node][0])
        return node

    def _is_made_of(self, leaf: int) -> bool:
        """Say whether what is moved is made of the state's old value, element by element."""
        return self.operand in self.context.next_of(leaf)

    @property
    def is_ring(self) -> bool:
        """True if a product gets one part after another, each sent on around a ring.

        TPUs compute so what is gathered for a product, or scattered behind it.
        """
        pairs = self.exchange.groups
        return (
            self.kind == "collective-permute"
            and self.op_name.rpartition("/")[2] in _PRODUCT_NAMES
            and {source for source, _ in pairs} == {target for _, target in pairs}
        )

    @property
    def is_batch(self) -> bool:
        return not self.axes.isdisjoint(self.context.batch_axes)

    @property
    def is_sent_back(self) -> bool:
        """True if each device sends what it has just got to where that came from."""
        source = self._values.lines[self._facts.source_of(self.operand)]
        if source.opcode.removesuffix("-start") != self.kind:
            return False
        pairs = self._values.hlo.groups(source.attributes)
        return {*self.exchange.groups} == {(target, sender) for sender, target in pairs}

    @property
    def is_training(self) -> bool:
        return self._values.hlo.has_gradients

    def differs(self, node: int) -> bool:
        """Say whether a value differs along the axes."""
        return not self.axes.isdisjoint(self.context.executable.variation.of([node]))

    @cached_property
    def uses(self) -> Sequence[Use]:
        """Where the walk from the moved array ends, or from what is made of it by element."""
        # Only what is equal on all devices behind a gather can come to differ again.
        is_gather = self.kind == "all-gather"
        dim = self.exchange.instruction.dimension if is_gather else None
        is_end = self.differs if is_gather else lambda _: False
        return list(self._facts.uses(self.result, dim, is_end))

    @property
    def is_sliced(self) -> bool:
        """True if each device uses one of the parts of what it gets, or of an argument sums."""
        count = self.context.count(self.axes)
        return bool(self.uses) and all(
            (
                # A sum over two devices sends as much as a gather of their parts.
                use.opcode == "reduce"
                and self.leaf is not None
                and 2 * self._elements(use.user) < self._elements(use.value)
            )
            or (
                use.opcode in SLICES
                and self._elements(use.user) * count <= self._elements(use.value)
                and self.differs(use.user)
            )
            for use in self.uses
        )

    @property
    def is_for_rows(self) -> bool:
        """True if a few rows are all that is used of a gathered table.

        The devices could look them up in their parts of it, and sum what they get. An axis of the
        batch, over which parameters are gathered, is none that the table would be whole without.
        """
        rows = sum(self._elements(use.user) for use in self.uses)
        is_read = bool(self.uses) and all(use.opcode == "gather" for use in self.uses)
        return is_read and not self.is_batch and 2 * rows <= self.exchange.shape.elements

    @property
    def is_carried(self) -> bool:
        """True if a loop carries a sum, to which some devices add in the next trip."""
        mask = self._facts.maker_of(self.operand, {"select"})
        if mask is None or not self.differs(self._values.made_of[mask][0]):
            return False
        additions = partial(self._made_by, _ADDED)
        return self.operand in reached([self.result], additions)

    @property
    def is_early(self) -> bool:
        """True if nothing is made of a sum but smaller products, which could be summed instead."""
        values, opcodes = self._values, self._values.opcodes
        copies = set(reached([self.result], partial(self._made_by, MOVES)))
        users = (user for node in copies for user in values.used_by[node])
        products = [user for user in users if opcodes[user] not in MOVES]
        size = sum(map(self._elements, products))
        return (
            0 < 2 * size <= self._elements(self.result)
            and copies.isdisjoint(values.returned)
            and all(opcodes[user] in ("convolution", "dot") for user in products)
            and not any(map(self.differs, copies.union(*map(values.made_of.__getitem__, products))))
        )

    def _made_by(self, opcodes: Set[str], node: int) -> Iterator[int]:
        """Yield what one of these operations makes of a value."""
        users = self._values.used_by[node]
        return (user for user in users if self._values.opcodes[user] in opcodes)

    def _elements(self, node: int) -> int:
        return self._values.shapes[node].elements

    @property
    def _sharding(self) -> frozenset[str]:
        return frozenset() if self.leaf is None else self.context.executable.axes_of(self.leaf)

    @cached_property
    def gathered_axes(self) -> frozenset[str]:
        """Axes that shard the leaf, and do not shard the copy."""
        if self.leaf is None or self.kind != "all-gather" or not self._sharding:
            return frozenset()
        size, of_leaf = self.layers * self._elements(self.result), self.context.size([self.leaf])
        if size * self.context.count(self._sharding) <= of_leaf:
            return frozenset()
        return self._sharding if size >= of_leaf else self._sharding & self.axes

    @property
    def is_same_work(self) -> bool:
        """True if what the copy is multiplied by is equal along some of its axes."""
        factors = [factor for use in self.products for factor in self._factors(use)]
        axes = self.context.executable.variation.of(factors)
        return bool(factors) and not axes.issuperset(self.gathered_axes)

    @property
    def is_wide(self) -> bool:
        """True if the copy's dtype is wider than the argument's, whose numbers have a byte."""
        if self.leaf is None or (origin := self._facts.origins[self.operand]) is None:
            return False
        bits = bits_of(self.context.executable.inputs.dtypes[self.leaf])
        shape = self.exchange.shape
        is_carrier = not origin.is_scaled and shape.dtype in _CARRIERS
        return bits <= _NARROW and shape.bits > bits and not is_carrier

    @property
    def is_of_experts(self) -> bool:
        """True if devices get all experts over an axis that is for experts."""
        axes = self.gathered_axes & self.context.axes_for_experts
        return self.leaf is not None and not axes.isdisjoint(self.context.expert_axes_of(self.leaf))

    @property
    def layers(self) -> int:
        """Number of slices of an argument like what is moved, as a loop takes of its layers."""
        origin = self._facts.origins[self.operand]
        return 1 if origin is None else origin.layers

    @property
    def is_anew(self) -> bool:
        """True if a loop within what is differentiated gathers the same array in each trip.

        A loop over micro-batches, around the gradients, may do so to save memory.
        """
        before, loop, _ = self.op_name.partition("/while/")
        return bool(loop) and "jvp(" in before and self.exchange.times != 1

    @property
    def is_of_shards(self) -> bool:
        """True if an axis that shards the leaf is gathered."""
        return self.kind == "all-gather" and not self._sharding.isdisjoint(self.axes)

    @property
    def is_written(self) -> bool:
        """True if a part of an old state is written anew, as of a cache."""
        return self.operand in self._facts.behind_updates

    @cached_property
    def _summed_in_loop(self) -> tuple[int, int]:
        """Elements that a loop sums for the whole leaf, and those of what they are written into.

        The first is 0 outside of loops.
        """
        times = self.exchange.times or 1
        users = (use.user for use in self.uses if self._values.opcodes[use.user] in UPDATES)
        count = self.context.count(self._sharding - self.axes)
        summed = self.exchange.shape.elements * times * count if times > 1 else 0
        return summed, count * max(map(self._elements, users), default=0)

    @property
    def is_repeated(self) -> bool:
        """True if more is summed in a step than the gradient has.

        Over axes that shard the leaf there is no choice: no device has room for all of the sum. A
        loop over leaves that the step stacks sums as much as the gradients of all of them have.
        """
        summed, stack = self._summed_in_loop
        size = 0 if self.leaf is None else self.context.size([self.leaf])
        return not self._sharding.issuperset(self.axes) and summed >= 2 * max(size, stack)

    @property
    def is_stacked(self) -> bool:
        """True if a loop keeps whole gradients of its layers, of which devices have parts."""
        summed, stack = self._summed_in_loop
        if self.leaf is None or not summed or self._sharding.isdisjoint(self.axes):
            return False
        # Otherwise it is of an activation, on its way to the gradient.
        is_gradient = self.context.size([self.leaf]) % summed == 0
        return is_gradient and stack >= summed

    @cached_property
    def _summed_factors(self) -> Sequence[int]:
        """Factors of the product whose results are summed."""
        product = self._facts.maker_of(self.operand, PRODUCTS)
        return () if product is None else self._values.made_of[product]

    def _is_planned(self, node: int) -> bool:
        return self.context.leaf_of_copy[node] is not None

    @property
    def has_planned_factor(self) -> bool:
        return any(map(self._is_planned, self._summed_factors))

    @property
    def is_widened(self) -> bool:
        """True if a product on the way forward is four times as large as its kernel's factor.

        At twice, as in a narrow MLP, gathering what was whole before sends as much.
        """
        factors = (node for node in self._summed_factors if not self._is_planned(node))
        size = self.context.count(self.axes) * max(map(self._elements, factors), default=0)
        return 0 < 4 * size <= self.exchange.shape.elements and "transpose(" not in self.op_name

    @property
    def is_of_whole(self) -> bool:
        """True if sums are computed in parts of an array that each device has whole.

        A kernel is sharded then along the dimension that is summed, though along the other one
        there would be nothing to sum.
        """
        for factor in self._summed_factors:
            part = self._facts.maker_of(factor, SLICES)
            if part is not None and not self._is_planned(factor):
                array = self._values.made_of[part][0]
                size = self.context.count(self.axes) * self._elements(part)
                if self._elements(array) == size and not self.differs(array):
                    return True
        return False

    @cached_property
    def products(self) -> Sequence[Use]:
        """Products with what is moved."""
        return [use for use in self.uses if use.opcode in PRODUCTS]

    def _factors(self, use: Use) -> list[int]:
        return [node for node in self._values.made_of[use.user] if node != use.value]

    @cached_property
    def differing_factors(self) -> Sequence[int]:
        """Factors of what is moved that differ along the axes."""
        factors = (factor for use in self.products for factor in self._factors(use))
        return [factor for factor in factors if self.differs(factor)]

    @property
    def is_for_gradient(self) -> bool:
        """True if a gradient is computed in parts of what is moved, for fewer bytes.

        Otherwise each device would compute a sum over its part of the batch, in float32, for all
        devices to reduce.
        """
        leaves = {self.context.next_state_of.get(use.user) for use in self.products}
        sizes = [4 * self.context.size([leaf]) for leaf in leaves if leaf is not None]
        return len(sizes) == len(leaves) == 1 and self.sent <= sizes[0]

    @property
    def is_cheap(self) -> bool:
        """True if no more is sent than to gather the planned factors in its place."""
        factors = self.differing_factors or self._summed_factors
        weights = {node for node in factors if self._is_planned(node)}
        others = self.context.count(self.axes) - 1
        sizes = (self._values.shapes[node].bytes for node in weights)
        return self.exchange.sent_once <= others * sum(sizes)

    @property
    def is_for_planned(self) -> bool:
        """True if it is multiplied by planned arrays, or for nothing but gradients."""
        state_of = self.context.next_state_of
        return any(map(self._is_planned, self.differing_factors)) or all(
            use.user in state_of for use in self.products
        )

    @property
    def is_along_sum(self) -> bool:
        """True if a kernel's factor is gathered along the dimension that is summed.

        What comes of a sum may be sharded anyhow; what a product has computed in parts fits a
        kernel that is sharded along the dimension that is summed, if the result, which is summed
        over devices then, is no larger than what is gathered.
        """
        if self.operand in self._facts.behind_sums:
            return False
        count = self.context.count(self.axes)
        return any(
            any(map(self._is_planned, self._factors(use)))
            and use.dim in summed_dims(self._values.lines[use.user], place)
            and count * self._elements(use.user) <= self._elements(use.value)
            for use in self.products
            for place in [self._values.made_of[use.user].index(use.value)]
        )

    @property
    def is_of_cache(self) -> bool:
        """True if rows are moved of a state that is written anew, as pages of a cache are."""
        if self.is_training:
            return False
        lookup = self._facts.maker_of(self.operand, {"gather"})
        return lookup is not None and self._values.made_of[lookup][0] in self._facts.behind_updates

    @property
    def is_of_table(self) -> bool:
        """True if rows of an argument that these axes shard are moved, or their gradients."""
        lookup = self._facts.maker_of(self.operand, {"gather"})
        if lookup is not None:
            leaves = [self.context.leaf_of_copy[node] for node in self._values.made_of[lookup]]
        else:
            rows = [use.user for use in self.uses if use.opcode == "scatter"]
            leaves = [self.context.next_state_of.get(node) for node in rows]
            if len(leaves) < len(self.uses):
                return False
        arguments = (leaf for leaf in leaves if leaf is not None and leaf >= 0)
        return any(self.axes & self.context.executable.axes_of(leaf) for leaf in arguments)


_TABLE: Final[Mapping[str, Sequence[tuple[str, Callable[[Row], bool]]]]] = {
    "argument": (
        ("gather", lambda row: row.is_ring),
        ("copy", lambda row: row.is_sum or (row.kind != "all-gather" and row.is_small)),
        ("moved", lambda row: row.kind != "all-gather"),
        ("sliced", lambda row: not row.is_small and row.is_sliced),
        ("table", lambda row: not row.is_small and row.is_for_rows),
        ("loop", lambda row: row.result in row.context.looped_stacks),
        ("same work", lambda row: row.is_same_work),
        ("wide", lambda row: row.is_wide),
        ("all experts", lambda row: row.is_of_experts),
        ("layer", lambda row: row.layers > 1),
        ("anew", lambda row: row.is_anew),
        ("gather", lambda _: True),
    ),
    "sum": (
        ("whole gradient", lambda row: row.is_stacked),
        ("microbatch", lambda row: row.is_repeated),
        ("gradient", lambda row: row.is_batch),
        ("partial", lambda _: True),
    ),
    "gradient": (
        ("cache", lambda row: not row.is_training and row.is_of_shards),
        ("state", lambda row: not row.is_training),
        ("small", lambda row: row.is_small),
        ("whole gradient", lambda row: row.is_of_shards),
        ("gradient", lambda _: True),
    ),
    "state": (
        ("state", lambda row: row.kind == "all-to-all" and row.is_training),
        ("cache", lambda row: row.kind == "all-to-all"),
        ("cache", lambda row: row.is_of_shards and not row.is_training and row.is_written),
        ("gather", lambda row: row.result not in row.context.next_state_of),
        ("update", lambda row: row.kind != "all-gather"),
        ("cache", lambda row: row.is_of_shards or row.is_written or row.exchange.times != 1),
        ("update", lambda _: True),
    ),
    "all-reduce": (
        ("again", lambda row: not row.differs(row.operand)),
        ("sliced", lambda row: row.is_called and row.is_sliced),
        ("trips", lambda row: row.is_called and row.is_carried),
        ("called", lambda row: row.is_called),
        # Sums along other axes, of gradients of activations, are in no order that a user chose.
        ("early", lambda row: row.is_batch and row.is_early),
        # Sums along an axis of the batch without a kernel are of statistics, of gradients on their
        # way to a table, and of keys whose queries are on other devices.
        ("batch", lambda row: row.is_batch and row.has_planned_factor and not row.is_cheap),
        ("partial", lambda row: row.is_batch),
        ("turned", lambda row: row.has_planned_factor and (row.is_widened or row.is_of_whole)),
        ("partial", lambda _: True),
    ),
    "collective-permute": (
        ("back", lambda row: row.is_sent_back),
        ("called", lambda row: row.is_called),
        ("parts", lambda row: not row.op_name),
        ("batch", lambda row: row.is_batch),
        ("parts", lambda row: row.is_ring),
        ("unknown", lambda _: True),
    ),
    "all-to-all": (
        ("optimizer", lambda row: row.operand in row.context.behind_gradients),
        ("called", lambda row: row.is_called),
        ("experts", lambda row: row.axes <= row.context.expert_axes),
        ("parts", lambda row: row.is_batch and row.is_for_gradient),
        ("batch", lambda row: row.is_batch),
        ("parts", lambda row: bool(row.products)),
        ("reshard", lambda _: True),
    ),
    "all-gather": (
        ("parts", lambda row: row.is_ring and not row.is_batch),
        ("batch", lambda row: row.is_batch and not row.differing_factors),
        ("sliced", lambda row: not row.differing_factors and row.is_sliced),
        ("called", lambda row: row.is_called and not row.is_batch),
        ("alike", lambda row: not row.differing_factors),
        ("summed", lambda row: not row.is_batch and row.is_along_sum),
        ("parts", lambda row: not row.is_batch or row.is_for_gradient),
        ("batch", lambda row: row.is_for_planned and not row.is_cheap),
        ("parts", lambda _: True),
    ),
}
"""Reasons by what is moved, of an activation by the kind of the collective; the first applies."""
