"""Why a program moves each array: one table of reasons, of which the first that applies counts.

A row asks what a collective moves, by the facts of its operand, and what its result is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Final, Literal, NamedTuple

from shardrules._base.specs import constraint_line, entry_axes
from shardrules._plan.axis_uses import expert_axes_among, is_gathered
from shardrules._plan.roles import experts_dim
from shardrules._program.collectives import Exchange, Moved
from shardrules._program.executable import Executable
from shardrules._program.facts import (
    PRODUCTS,
    REDUCTIONS,
    SLICES,
    UPDATES,
    DimParts,
    all_updated_from,
    batch_dims,
    maker_of,
    next_states,
    source_of,
    summed_dims,
    whole_dims,
)
from shardrules._program.states import State
from shardrules._program.uses import ValueUse, uses
from shardrules._program.values import Values

# Names of collectives in user programs, as JAX has them in op_name.
_CALLED: Final = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
})  # fmt: skip
_PRODUCT_NAMES: Final = ("conv_general_dilated", "dot_general")
_BATCH_SHARE: Final = 0.1
"""Share of the elements of all states whose gradients an axis of the batch sums."""
CONSTRAINT: Final = constraint_line("P(...)")
"""The line that constrains an array, by a spec to choose."""


class Cause(NamedTuple):
    """Reason for which a program moves an array."""

    text: str
    fix: str = ""
    """What to do about it, with places for {mend}, {line} and {axes}; "" if it is expected."""
    mend: str = ""

    @property
    def is_expected(self) -> bool:
        return not self.fix


REASONS: Final[dict[str, Cause]] = {
    "gather": Cause("a planned array, gathered where it is used"),
    "copy": Cause("an argument, moved"),
    "gradient": Cause("a gradient, summed over the batch"),
    "state": Cause("a state, or its gradient, sharded along another dimension"),
    "update": Cause("a new state, gathered as it is returned"),
    "partial": Cause("sums that devices compute in parts"),
    "parts": Cause("gathered for products that devices compute in parts"),
    "between": Cause("sharded otherwise between products"),
    "aligned": Cause("parts, moved by XLA to the devices that keep them"),
    "experts": Cause("tokens, exchanged between experts"),
    "rows": Cause("rows of a planned table, looked up by number"),
    "called": Cause("called by the program, in shard_map"),
    "optimizer": Cause("an array of the optimizer, sharded otherwise where it is used"),
    "small": Cause("statistics of a few bytes"),
    "table": Cause(
        "a planned table, gathered for a few of its rows",
        "look the rows up in the table as it is sharded: leave it without a constraint{line}; or "
        "plan it to be whole over {axes}",
    ),
    "moved": Cause(
        "an argument, sharded otherwise where it is used",
        "plan it to be sharded as it is used{line}",
    ),
    "back": Cause("sent back to where it came from", "leave out both transfers{line}"),
    "microbatch": Cause(
        "a gradient, summed in every micro-batch",
        "sum the gradients of the micro-batches on each device, and over devices once behind the "
        "loop: let the accumulator be sharded as the sums are before they are reduced",
    ),
    "whole gradient": Cause(
        "a gradient, made whole though its parameter is sharded",
        "constrain the gradients to be sharded as their parameters: {mend}",
        "jax.lax.with_sharding_constraint(gradients, plan.shardings())",
    ),
    "cache": Cause(
        "a state, gathered though it is sharded, or only a part of it is new",
        "constrain the state inside the function to be sharded as it comes in, and what is "
        "computed with it to be sharded by the same axes",
        "state = jax.lax.with_sharding_constraint(state, plan.shardings())",
    ),
    "batch": Cause(
        "an activation, moved along an axis that shards the batch",
        "constrain the activations where they are made, so that XLA gathers the parameters in "
        "their place: {mend}{line}",
        "jax.lax.with_sharding_constraint(x, {spec})",
    ),
    "alike": Cause(
        "an activation, gathered, and then used alike on all devices",
        "let what comes behind be computed in parts: constrain the array, and what is made of it, "
        "to be sharded by {axes}{line}",
        CONSTRAINT,
    ),
    "reshard": Cause(
        "an activation, sharded otherwise and back",
        "constrain both sides alike{line}: the array is sharded in another way and back, and "
        "multiplied in between with nothing",
        CONSTRAINT,
    ),
    "summed": Cause(
        "gathered along the dimension that a product sums",
        "let {axes} shard the other dimension of the kernel that this array{line} is multiplied "
        "by, along which it comes in parts: then only the result is summed",
    ),
    "turned": Cause(
        "sums of products whose factor each device has whole",
        "let {axes} shard the other dimension of the kernel{line}: then each device computes its "
        "part of the result, and nothing is summed",
    ),
    "sliced": Cause(
        "gathered, though each device uses only one of the parts",
        "let each device send only the part that another one uses, such as by jax.lax.ppermute or "
        "jax.lax.all_to_all{line}; or let what comes in be sharded by {axes}",
    ),
    "again": Cause(
        "equal on all devices before it is summed",
        "do not sum over {axes}{line}: all devices along it have the same array",
    ),
    "unknown": Cause(
        "nothing planned explains it",
        "look at the line{line}: slices, rolls and concatenations along a sharded dimension move "
        "data; or constrain the array to be sharded along another one",
    ),
}  # fmt: skip
"""Reasons by key."""


class Movement(NamedTuple):
    """What a collective moves, and why."""

    what: Moved
    moves: str
    reason: str
    """Key of `REASONS`."""
    leaf: int | None = None
    """Leaf of the inputs."""


class Reasons:
    """Finds the reasons of a program's collectives.

    Args:
        executable: The compiled function; it has an HLO text and a mesh.
        carried: States, which come back changed.
        batches: Leaves of the inputs that are no states and no planned parameters.
        small: Bytes that a device sends, below which a collective needs no reason.
    """

    def __init__(
        self, executable: Executable, carried: Sequence[State], batches: Sequence[int], small: int
    ) -> None:
        assert executable.mesh is not None
        self.executable = executable
        self.small = small
        self.axis_sizes: dict[str, int] = dict(executable.mesh.shape)
        self._carried = carried
        self._batches = batches

    def movements(self, exchanges: Sequence[Exchange]) -> list[Movement]:
        """Find the reason of each of a module's exchanges."""
        rows = [Row(self, exchange) for exchange in exchanges]
        self._reduced = self._gradient_axes(rows)
        return [row.movement for row in rows]

    @property
    def values(self) -> Values:
        return self.executable.values

    @cached_property
    def leaf_of_copy(self) -> Sequence[int | None]:
        """Leaf of the inputs that each value is a copy of; -1 of a constant of the program."""
        found = (origin and origin.parameter for origin in self.executable.origins)
        leaf_of = self.executable.leaf_of
        return [None if number is None else leaf_of.get(number, -1) for number in found]

    @cached_property
    def next_state_of(self) -> Mapping[int, int]:
        """Leaf of the inputs whose next state is made of a value, element by element."""
        pairs = [pair for state in self._carried for pair in zip(*state[:2], strict=True)]
        # A gradient is that of the parameter, which more is made of than of its moments.
        number_of, used_by = self.executable.parameter_of, self.values.used_by
        pairs.sort(
            key=lambda pair: (
                -len(used_by[self.values.parameters[number_of[pair[0]]]])
                if pair[0] in number_of
                else 0
            )
        )
        return next_states(
            self.values, [(before, self.executable.results[after]) for before, after in pairs]
        )

    @cached_property
    def batch_dims(self) -> Sequence[DimParts]:
        """Dimensions of each value that come of the batch."""
        shapes, number_of = self.executable.inputs.shapes, self.executable.parameter_of
        leaves = [leaf for leaf in self._batches if leaf in number_of]
        return batch_dims(
            self.values, {number_of[leaf]: range(len(shapes[leaf])) for leaf in leaves}
        )

    @property
    def has_batch(self) -> bool:
        return any(self.executable.inputs.shapes[leaf] for leaf in self._batches)

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that shard the batch: those of its leaves, or else those that sum gradients.

        If the whole batch is on each device, it is those that are for it by their names.
        """
        axes = frozenset().union(*map(self.executable.axes_of, self._batches)) or self._reduced
        return axes or frozenset(axis for axis in self.axis_sizes if is_gathered(axis))

    def _gradient_axes(self, rows: Sequence[Row]) -> frozenset[str]:
        """Return the axes over which gradients are summed, but for those of a few."""
        leaves_of: dict[str, set[int]] = {}
        for row in rows:
            if row.what == "state" and row.leaf is not None and row.is_sum:
                for axis in row.axes:
                    leaves_of.setdefault(axis, set()).add(row.leaf)
        if not leaves_of:
            return frozenset()
        least = _BATCH_SHARE * self.size(chain(*(state.inputs for state in self._carried)))
        return frozenset(axis for axis, leaves in leaves_of.items() if self.size(leaves) > least)

    def size(self, leaves: Iterable[int]) -> int:
        """Count the elements of leaves of the inputs."""
        return sum(prod(self.executable.inputs.shapes[leaf]) for leaf in leaves)

    def count(self, axes: Iterable[str]) -> int:
        """Count the devices along mesh axes."""
        return prod(self.axis_sizes[axis] for axis in axes)

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """Mesh axes that shard the experts of arguments, or have a name for experts."""
        side = self.executable.inputs
        axes = set(expert_axes_among(self.axis_sizes))
        for leaf, sharding in enumerate(side.shardings):
            spec = getattr(sharding, "spec", None)
            dim = experts_dim(side.paths[leaf], side.shapes[leaf])
            if dim is not None and spec is not None:
                axes.update(chain(*map(entry_axes, spec[dim : dim + 1])))
        return frozenset(axes)


class Row:
    """Array that a collective moves, and what the table asks of it."""

    def __init__(self, reasons: Reasons, exchange: Exchange) -> None:
        self._reasons = reasons
        self._values = reasons.values
        self._exchange = exchange
        self.kind = exchange.kind
        self.axes = frozenset(exchange.axes)
        self.is_sum = exchange.kind in REDUCTIONS
        self.operand = self._values.operand(exchange.op, exchange.number)
        self.what: _What
        self.what, self.leaf = self._leaf()

    @property
    def movement(self) -> Movement:
        """Return what is moved, and the first reason that applies."""
        reason = next(key for key, applies in _TABLE[self.what] if applies(self))
        if self.leaf is not None:
            what, words = _WORDS[self.what]
            path = self._reasons.executable.inputs.paths[self.leaf]
            return Movement(what, words.format(path), reason, self.leaf)
        if not REASONS[reason].is_expected and self._is_of_table:
            reason = "rows"
        name = self._exchange.op.instruction.op_name or self._exchange.op.instruction.name
        return Movement("unexplained" if reason == "unknown" else "activation", name, reason)

    def _leaf(self) -> tuple[_What, int | None]:
        """Find the argument that is moved, or else the one whose new state is made of it."""
        leaf = self._reasons.leaf_of_copy[self.operand]
        if leaf is not None:
            return ("argument", leaf) if leaf >= 0 else ("activation", None)
        state_of = self._reasons.next_state_of
        leaf = state_of.get(self.result)
        if leaf is None and self.kind == "all-to-all":
            leaf = state_of.get(self._whole_of_piece)
        if leaf is None and self.kind == "all-gather":  # not returned so, as if evaluated
            leaf = state_of.get(source_of(self._values, self.operand))
            leaf = leaf if leaf is not None and self._is_made_of(leaf) else None
        if leaf is None:
            return "activation", None
        if self.is_sum:
            return "sum", leaf
        return (
            "state" if self.kind == "all-to-all" or self._is_made_of(leaf) else "gradient"
        ), leaf

    @cached_property
    def result(self) -> int:
        """The moved array; of the pieces of an all-to-all what they are joined to."""
        op, values = self._exchange.op, self._values
        nodes = values.results(op)
        if op.kind == "all-to-all" and len(nodes) > 1:
            whole = len(nodes) * values.shape(nodes[0]).elements
            pending = [nodes[0]]
            while pending:
                node = pending.pop()
                if values.shape(node).elements == whole:
                    return node
                if values.shape(node).elements * len(nodes) == whole:
                    pending += values.used_by[node]
            return nodes[0]
        node = nodes[self._exchange.number]
        if op.kind == "reduce-scatter" and values.opcodes[node] == "all-reduce":
            return next(
                (user for user in values.used_by[node] if values.opcodes[user] in SLICES), node
            )
        return node

    @property
    def _whole_of_piece(self) -> int:
        """The array that a piece is sliced from, or else the piece."""
        node = source_of(self._values, self.operand)
        if self._values.opcodes[node] == "slice":
            return source_of(self._values, self._values.made_of[node][0])
        return self.operand

    def _is_made_of(self, leaf: int) -> bool:
        """Say whether what is moved is made of the state's old value, element by element."""
        parameter = self._values.parameters[self._reasons.executable.parameter_of[leaf]]
        return parameter in self._made_of

    @cached_property
    def _made_of(self) -> Sequence[int]:
        return list(all_updated_from(self._values, self.operand))

    @cached_property
    def sent(self) -> int:
        times = self._exchange.times
        return self._exchange.sent_once * (1 if times is None else times)

    @property
    def is_small(self) -> bool:
        return self.sent < self._reasons.small

    @property
    def is_window(self) -> bool:
        """True if a loop sends parts on and multiplies them, in the place of one collective."""
        return self.kind != self._exchange.op.kind

    @property
    def is_ring(self) -> bool:
        """True if a product gets one part after another, each sent on around a ring.

        TPUs compute so what is gathered for a product, or scattered behind it.
        """
        if self.kind != "collective-permute" or self._called_name not in _PRODUCT_NAMES:
            return False
        target_of = {pair[0]: pair[1] for pair in self._exchange.op.groups}
        count = self._reasons.count(self.axes)
        return all(_cycle(target_of, device) == count for device in target_of)

    @property
    def _called_name(self) -> str:
        return (self._exchange.op.instruction.op_name or "").rpartition("/")[2]

    @property
    def is_called(self) -> bool:
        return self._called_name in _CALLED

    @property
    def is_named(self) -> bool:
        return bool(self._exchange.op.instruction.op_name)

    @property
    def is_batch(self) -> bool:
        return not self.axes.isdisjoint(self._reasons.batch_axes)

    @property
    def has_batch(self) -> bool:
        """True if examples of the batch lie along a dimension of it, if there is a batch."""
        return bool(self._reasons.batch_dims[self.operand]) or not self._reasons.has_batch

    @property
    def is_for_experts(self) -> bool:
        return self.axes <= self._reasons.expert_axes

    @property
    def is_training(self) -> bool:
        return self._values.hlo.has_gradients

    def _differs(self, node: int) -> bool:
        return bool(self.axes & self._reasons.executable.variation.of([node]))

    @property
    def is_alike(self) -> bool:
        return not self._differs(self.operand)

    @cached_property
    def uses(self) -> Sequence[ValueUse]:
        """Where the walk from the moved array ends, or from what is made of it by element."""
        # Only what is equal on all devices behind a gather can come to differ again.
        is_gather = self.kind == "all-gather"
        dimension = self._exchange.op.instruction.dimension
        dims = () if dimension is None else (dimension,)
        parts = whole_dims(self._values, self.result, dims) if is_gather else frozenset()
        return list(
            uses(self._values, self.result, parts, self._differs if is_gather else lambda _: False)
        )

    @property
    def is_sliced(self) -> bool:
        """True if each device uses one of the parts that it has gathered."""
        count = self._reasons.count(self.axes)
        return bool(self.uses) and all(
            use.kind == "other"
            and self._elements(use.user) * count <= self._elements(use.value)
            and self._differs(use.user)
            for use in self.uses
        )

    @property
    def is_for_rows(self) -> bool:
        """True if a few rows are all that is used of a gathered table.

        The devices could look them up in their parts of it, and sum what they get. An axis of the
        batch, over which parameters are gathered, is none that the table would be whole without.
        """
        rows = sum(self._elements(use.user) for use in self.uses)
        return (
            not self.is_batch
            and bool(self.uses)
            and all(use.kind == "lookup" for use in self.uses)
            and 2 * rows <= self._exchange.shape.elements
        )

    def _elements(self, node: int) -> int:
        return self._values.shape(node).elements

    @property
    def _sharding(self) -> frozenset[str]:
        return frozenset() if self.leaf is None else self._reasons.executable.axes_of(self.leaf)

    @property
    def is_of_shards(self) -> bool:
        """True if an axis that shards the leaf is gathered."""
        return self.kind == "all-gather" and not self._sharding.isdisjoint(self.axes)

    @property
    def is_next(self) -> bool:
        """True if it is returned as it is moved."""
        return self.result in self._reasons.next_state_of

    @property
    def is_written(self) -> bool:
        """True if a part of an old state is written anew, as of a cache."""
        return any(self._values.opcodes[node] in UPDATES for node in self._made_of)

    @property
    def is_repeated(self) -> bool:
        """True if more is summed in a step than the gradient has.

        Over axes that shard the leaf there is no choice: no device has room for all of the sum. A
        loop over leaves that the step stacks sums as much as the gradients of all of them have.
        """
        times, sharding = self._exchange.times, self._sharding
        if times in (None, 1) or self.leaf is None or sharding.issuperset(self.axes):
            return False
        count = self._reasons.count(sharding.difference(self.axes))
        summed = self._exchange.shape.elements * (times or 1) * count
        writes = (use.user for use in self.uses if self._values.opcodes[use.user] in UPDATES)
        stacks = [count * self._elements(node) for node in writes]
        return summed >= 2 * max([self._reasons.size([self.leaf]), *stacks])

    @property
    def is_stacked(self) -> bool:
        """True if a loop keeps whole gradients of its layers, of which devices have parts."""
        times, sharding = self._exchange.times, self._sharding
        if times in (None, 1) or self.leaf is None or sharding.isdisjoint(self.axes):
            return False
        stack = (times or 1) * self._exchange.shape.elements
        count = self._reasons.count(sharding.difference(self.axes))
        parts, rest = divmod(self._reasons.size([self.leaf]), stack)
        if rest or not parts or count % parts:
            return False  # of an activation, on its way to the gradient
        return any(
            self._values.opcodes[use.user] in UPDATES and self._elements(use.user) >= stack
            for use in self.uses
        )

    @property
    def is_sent_back(self) -> bool:
        """True if each device sends what it has just got to where that came from."""
        source = source_of(self._values, self.operand)
        if self.kind != "collective-permute" or self._values.opcodes[source] != self.kind:
            return False
        pairs = self._values.hlo.groups(self._values.lines[source].attributes)
        back = sorted((target, sender) for sender, target in self._exchange.op.groups)
        return sorted(map(tuple, pairs)) == back

    @cached_property
    def _summed_factors(self) -> Sequence[int]:
        """Factors of the product whose results are summed."""
        product = maker_of(self._values, self.operand, PRODUCTS)
        return () if product is None else self._values.made_of[product]

    def _is_planned(self, node: int) -> bool:
        return self._reasons.leaf_of_copy[node] is not None

    @property
    def has_planned_factor(self) -> bool:
        return any(map(self._is_planned, self._summed_factors))

    @property
    def is_of_whole(self) -> bool:
        """True if sums are computed in parts of an array that each device has whole.

        A kernel is sharded then along the dimension that is summed, though along the other one
        there would be nothing to sum.
        """
        count = self._reasons.count(self.axes)
        for factor in self._summed_factors:
            part = maker_of(self._values, factor, SLICES)
            if part is not None and not self._is_planned(factor):
                whole = self._values.made_of[part][0]
                size = count * self._elements(part)
                if self._elements(whole) == size and not self._differs(whole):
                    return True
        return False

    @cached_property
    def products(self) -> Sequence[ValueUse]:
        """Products with what is moved."""
        return [use for use in self.uses if use.kind == "product"]

    def _factors(self, use: ValueUse) -> list[int]:
        return [node for node in self._values.made_of[use.user] if node != use.value]

    @cached_property
    def differing(self) -> Sequence[int]:
        """Factors of what is moved that differ along the axes."""
        factors = (factor for use in self.products for factor in self._factors(use))
        return [factor for factor in factors if self._differs(factor)]

    @property
    def is_for_gradient(self) -> bool:
        """True if a gradient is computed in parts of what is moved, for fewer bytes.

        Otherwise each device would compute a sum over its part of the batch, in float32, for all
        devices to reduce.
        """
        leaves = {self._reasons.next_state_of.get(use.user) for use in self.products}
        sizes = [4 * self._reasons.size([leaf]) for leaf in leaves if leaf is not None]
        return len(sizes) == len(leaves) == 1 and self.sent <= sizes[0]

    @property
    def is_for_planned(self) -> bool:
        """True if it is multiplied by planned arrays, or for nothing but gradients."""
        state_of = self._reasons.next_state_of
        return any(map(self._is_planned, self.differing)) or all(
            use.user in state_of for use in self.products
        )

    @property
    def is_along_sum(self) -> bool:
        """True if a kernel's factor is gathered along the dimension that is summed.

        What comes of a sum may be sharded anyhow; what a product has computed in parts fits a
        kernel that is sharded along the dimension that is summed.
        """
        opcodes = (self._values.opcodes[node] for node in self._made_of)
        return not any(opcode in REDUCTIONS for opcode in opcodes) and any(
            any(map(self._is_planned, self._factors(use))) and self._is_summed(use)
            for use in self.products
        )

    def _is_summed(self, use: ValueUse) -> bool:
        place = self._values.made_of[use.user].index(use.value)
        dims = summed_dims(self._values.lines[use.user], place)
        return any(part.dim in dims for part in use.parts)

    @property
    def _is_of_table(self) -> bool:
        """True if rows of an argument that these axes shard are moved, or their gradients."""
        lookup = maker_of(self._values, self.operand, {"gather"})
        if lookup is not None:
            leaves = [self._reasons.leaf_of_copy[node] for node in self._values.made_of[lookup]]
        else:
            rows = [use.user for use in self.uses if use.kind == "rows"]
            leaves = [self._reasons.next_state_of.get(node) for node in rows]
            if len(leaves) < len(self.uses):
                return False
        known = (leaf for leaf in leaves if leaf is not None and leaf >= 0)
        return any(self.axes & self._reasons.executable.axes_of(leaf) for leaf in known)


def _cycle(target_of: Mapping[int, int], device: int) -> int:
    """Count the sends until what a device sends is back; 0 if it never is."""
    place = device
    for count in range(1, len(target_of) + 1):
        place = target_of.get(place, -1)
        if place == device:
            return count
    return 0


_What = Literal["argument", "sum", "state", "gradient", "activation"]
_WORDS: Final[Mapping[str, tuple[Moved, str]]] = {
    "argument": ("argument", "{}"),
    "sum": ("gradient", "gradient of {}"),
    "state": ("state", "new {}"),
    "gradient": ("gradient", "gradient of {}"),
}


def _otherwise(_: Row) -> bool:
    return True


_TABLE: Final[Mapping[_What, Sequence[tuple[str, Callable[[Row], bool]]]]] = {
    "argument": (
        ("gather", lambda row: row.is_window or row.is_ring),
        ("copy", lambda row: row.is_sum or (row.kind != "all-gather" and row.is_small)),
        ("moved", lambda row: row.kind != "all-gather"),
        ("gather", lambda row: row.is_small),
        ("sliced", lambda row: row.is_sliced),
        ("table", lambda row: row.is_for_rows),
        ("gather", _otherwise),
    ),
    "sum": (
        ("whole gradient", lambda row: row.is_stacked),
        ("microbatch", lambda row: row.is_repeated),
        ("gradient", lambda row: row.is_batch),
        ("partial", _otherwise),
    ),
    "gradient": (
        ("cache", lambda row: not row.is_training and row.is_of_shards),
        ("state", lambda row: not row.is_training),
        ("small", lambda row: row.is_small),
        ("whole gradient", lambda row: row.is_of_shards),
        ("gradient", _otherwise),
    ),
    "state": (
        ("state", lambda row: row.kind == "all-to-all" and row.is_training),
        ("cache", lambda row: row.kind == "all-to-all"),
        ("cache", lambda row: row.is_of_shards and not row.is_training and row.is_written),
        ("gather", lambda row: not row.is_next),
        ("update", lambda row: row.kind != "all-gather"),
        ("cache", lambda row: row.is_of_shards or row.is_written or row._exchange.times != 1),
        ("update", _otherwise),
    ),
    "activation": (
        ("small", lambda row: row.is_small),
        ("optimizer", lambda row: row.kind == "all-to-all" and not row.has_batch),
        ("back", lambda row: row.is_sent_back),
        ("again", lambda row: row.is_sum and row.is_alike),
        ("called", lambda row: row.is_called and row.kind != "all-gather"),
        # Sums along an axis of the batch without a kernel are of statistics, of gradients on their
        # way to a table, and of keys whose queries are on other devices.
        ("batch", lambda row: row.is_sum and row.is_batch and row.has_planned_factor),
        ("partial", lambda row: row.is_sum and row.is_batch),
        ("turned", lambda row: row.is_sum and row.has_planned_factor and row.is_of_whole),
        ("partial", lambda row: row.is_sum),
        ("aligned", lambda row: row.kind == "collective-permute" and not row.is_named),
        ("batch", lambda row: row.kind == "collective-permute" and row.is_batch),
        ("parts", lambda row: row.is_ring),
        ("unknown", lambda row: row.kind == "collective-permute"),
        ("experts", lambda row: row.kind != "all-gather" and row.is_for_experts),
        ("parts", lambda row: row.kind != "all-gather" and row.is_batch and row.is_for_gradient),
        ("batch", lambda row: row.kind != "all-gather" and row.is_batch),
        ("between", lambda row: row.kind != "all-gather" and bool(row.products)),
        ("reshard", lambda row: row.kind != "all-gather"),
        ("parts", lambda row: row.is_window and not row.is_batch),
        ("batch", lambda row: row.is_batch and not row.differing),
        ("sliced", lambda row: not row.differing and row.is_sliced),
        ("called", lambda row: row.is_called and not row.is_batch),
        ("alike", lambda row: not row.differing),
        ("summed", lambda row: not row.is_batch and row.is_along_sum),
        ("parts", lambda row: not row.is_batch or row.is_for_gradient),
        ("batch", lambda row: row.is_for_planned),
        ("parts", _otherwise),
    ),
}
"""Reasons by what is moved, the first that applies."""
