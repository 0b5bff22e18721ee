"""Finds by dataflow what each collective moves, and whether a planned array explains it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import Final, NamedTuple

from shardrules._base.specs import entry_axes
from shardrules._plan.axis_uses import expert_axes_among, is_gathered
from shardrules._plan.roles import experts_dim
from shardrules._plan.table import axes_used
from shardrules._program.collectives import Exchange, Moved
from shardrules._program.dataflow import REDUCTIONS, Value, origin_of, source_of, updated_values
from shardrules._program.executable import Executable
from shardrules._program.flow import (
    Consumer,
    elements,
    is_lookup,
    is_slice_of_whole,
    is_summed,
    is_written_in_part,
    lookup_of,
    product_of,
    uses,
    whole_of_piece,
    whole_of_pieces,
)
from shardrules._program.states import State
from shardrules._program.variation import Variation

# Names of collectives in user programs, as JAX has them in op_name.
_CALLED: Final = frozenset({
    "all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute",
    "psum", "psum2", "psum_invariant", "psum_scatter", "ragged_all_to_all", "reduce_scatter",
})  # fmt: skip
_PRODUCTS: Final = ("conv_general_dilated", "dot_general")
_REDUCED: Final = 256
"""Ratio of elements of an array to those of its sums."""
_BATCH_SHARE: Final = 0.1
"""Share of the elements of all states whose gradients an axis of the batch sums."""


class Cause(NamedTuple):
    """Reason for which a program moves an array."""

    text: str
    is_expected: bool = True


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
    "small": Cause("statistics of a few bytes"),
    "table": Cause("a planned table, gathered for a few of its rows", False),
    "moved": Cause("an argument, sharded otherwise where it is used", False),
    "reduced": Cause("gathered, though only sums of it are used", False),
    "back": Cause("sent back to where it came from", False),
    "microbatch": Cause("a gradient, summed in every micro-batch", is_expected=False),
    "whole gradient": Cause("a gradient, made whole though its parameter is sharded", False),
    "cache": Cause("a state, gathered though it is sharded, or only a part of it is new", False),
    "batch": Cause("an activation, moved along an axis that shards the batch", False),
    "alike": Cause("an activation, gathered, and then used alike on all devices", False),
    "reshard": Cause("an activation, sharded otherwise and back", False),
    "summed": Cause("gathered along the dimension that a product sums", False),
    "turned": Cause("sums of products whose factor each device has whole", False),
    "sliced": Cause("gathered, though each device uses only one of the parts", False),
    "again": Cause("equal on all devices before it is summed", False),
    "unknown": Cause("nothing planned explains it", False),
}
"""Reasons by key; findings have a fix for each that is not expected."""


class Movement(NamedTuple):
    """What a collective moves, and why."""

    what: Moved
    moves: str
    reason: str
    """Key of `REASONS`."""
    leaf: int | None = None
    """Leaf of the inputs."""


class Tracer:
    """Traces what collectives move to arguments, to outputs, and to products.

    Args:
        executable: The compiled function; it has an HLO text and a mesh.
        carried: States, which come back changed.
        batches: Leaves of the inputs that are no states and no planned parameters.
        small: Bytes that a device sends, below which a collective needs no reason.
    """

    def __init__(
        self, executable: Executable, carried: Sequence[State], batches: Sequence[int], small: int
    ) -> None:
        assert executable.hlo is not None
        assert executable.mesh is not None
        self._executable = executable
        self._hlo = executable.hlo
        self._carried = carried
        self._batches = batches
        self._small = small
        self._axis_sizes: dict[str, int] = dict(executable.mesh.shape)

    def movements(self, exchanges: Sequence[Exchange]) -> list[Movement]:
        """Trace each of a module's exchanges."""
        leaves = [self._leaf_of(exchange) for exchange in exchanges]
        self._reduced = self._gradient_axes(exchanges, leaves)
        return [
            self._movement(exchange, leaf) for exchange, leaf in zip(exchanges, leaves, strict=True)
        ]

    def _leaf_of(self, exchange: Exchange) -> tuple[str, int] | None:
        """Find the argument that is moved, or else the one whose new state is made of it."""
        operand = _operand(exchange)
        if _is_window(exchange):
            operand = self._before_loop(operand)
        origin = origin_of(self._hlo, operand)
        if origin is not None:
            leaf = self._executable.leaf_of.get(origin.parameter)
            return None if leaf is None else ("argument", leaf)
        leaf = self._next_state_of.get(self._result(exchange))
        if leaf is None and exchange.kind == "all-to-all":
            leaf = self._next_state_of.get(whole_of_piece(self._hlo, _operand(exchange)))
        if leaf is None and exchange.kind == "all-gather":
            leaf = self._gathered_state(_operand(exchange))
        return None if leaf is None else ("state", leaf)

    def _before_loop(self, value: Value) -> Value:
        """Return what a loop begins with in the place of a value that it sends on."""
        inner = source_of(self._hlo, value)
        callers = list(self._hlo.callers(inner.computation))
        if self._hlo[inner.computation][inner.name].parameter is None or len(callers) != 1:
            return value
        computation, loop = callers[0]
        before = source_of(self._hlo, Value(computation, loop.operands[0], inner.element))
        line = self._hlo[computation][before.name]
        while line.opcode.startswith("collective-permute"):  # the first part is sent before it
            before = source_of(self._hlo, Value(computation, line.operands[0]))
            line = self._hlo[computation][before.name]
        return before

    def _gathered_state(self, value: Value) -> int | None:
        """Find the leaf of a new state that is gathered and not returned so, as if evaluated."""
        leaf = self._next_state_of.get(source_of(self._hlo, value))
        return leaf if leaf is not None and self._is_update(leaf, value) else None

    def _is_update(self, leaf: int, value: Value) -> bool:
        """Say whether a value is made of the state's old value, element by element."""
        return self._executable.parameter_of[leaf] in self._parameters_of(value)

    @cached_property
    def _next_state_of(self) -> Mapping[Value, int]:
        """Leaf of the inputs whose next state is made of a value, element by element."""
        leaf_of: dict[Value, int] = {}
        sources = self._executable.sources
        pairs = [pair for state in self._carried for pair in zip(*state[:2], strict=True)]
        # A gradient is that of the parameter, which more is made of than of its moments.
        for before, after in sorted(pairs, key=lambda pair: -self._uses_of_leaf[pair[0]]):
            for value in updated_values(self._hlo, sources[after], leaf_of):
                leaf_of[value] = before
        return leaf_of

    @cached_property
    def _uses_of_leaf(self) -> Mapping[int, int]:
        """Number of instructions that have an argument as an operand, by leaf of the inputs."""
        entry = self._hlo[self._hlo.entry]
        names = {line.parameter: line.name for line in entry.parameters}
        uses = {
            leaf: len(entry.users(names[number]))
            for number, leaf in self._executable.leaf_of.items()
            if number in names
        }
        return defaultdict(int, uses)

    def _gradient_axes(
        self, exchanges: Sequence[Exchange], leaves: Sequence[tuple[str, int] | None]
    ) -> frozenset[str]:
        """Return the axes over which gradients are summed, but for those of a few."""
        leaves_of: dict[str, set[int]] = {}
        for exchange, leaf in zip(exchanges, leaves, strict=True):
            if leaf and leaf[0] == "state" and exchange.kind in REDUCTIONS:
                for axis in exchange.axes:
                    leaves_of.setdefault(axis, set()).add(leaf[1])
        if not leaves_of:
            return frozenset()
        least = _BATCH_SHARE * self._size(chain(*(state.inputs for state in self._carried)))
        return frozenset(axis for axis, leaves in leaves_of.items() if self._size(leaves) > least)

    def _size(self, leaves: Iterable[int]) -> int:
        return sum(prod(self._executable.inputs.shapes[leaf]) for leaf in leaves)

    @cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that shard the batch: those of its leaves, or else those that sum gradients.

        If the whole batch is on each device, it is those that are for it by their names.
        """
        of_batches = (self._leaf_axes(leaf) for leaf in self._batches)
        axes = frozenset().union(*of_batches) or self._reduced
        return axes or frozenset(axis for axis in self._axis_sizes if is_gathered(axis))

    def _leaf_axes(self, leaf: int) -> frozenset[str]:
        spec = getattr(self._executable.inputs.shardings[leaf], "spec", None)
        return frozenset() if spec is None else axes_used(spec, self._axis_sizes)

    @cached_property
    def variation(self) -> Variation:
        """Axes along which values differ between devices."""
        axes = {number: self._leaf_axes(leaf) for number, leaf in self._executable.leaf_of.items()}
        return Variation(self._hlo, self._axis_sizes, axes)

    def _differs(self, axes: frozenset[str], value: Value) -> bool:
        return bool(axes) and bool(axes & self.variation.of(value.computation, [value.name]))

    def _movement(self, exchange: Exchange, leaf: tuple[str, int] | None) -> Movement:
        if leaf is not None:
            kind, number = leaf
            path = self._executable.inputs.paths[number]
            if kind == "argument":
                return Movement("argument", path, self._of_argument(exchange), number)
            return self._of_state(exchange, number, path)
        name = exchange.op.instruction.op_name or exchange.op.instruction.name
        reason = self._of_activation(exchange)
        is_known = reason != "unknown"
        return Movement("activation" if is_known else "unexplained", name, reason)

    def _of_argument(self, exchange: Exchange) -> str:
        """Return the reason for which an argument is moved."""
        is_small = self._sent(exchange) < self._small
        if _is_window(exchange) or (
            exchange.kind == "collective-permute" and self._is_turn(exchange)
        ):
            return "gather"
        if exchange.kind != "all-gather":
            return "copy" if is_small or exchange.kind in REDUCTIONS else "moved"
        if not is_small and self._is_sliced_again(exchange, frozenset(exchange.axes)):
            return "sliced"
        if not is_small and self._is_only_reduced(exchange):
            return "reduced"
        return "table" if not is_small and self._is_for_rows(exchange) else "gather"

    def _is_for_rows(self, exchange: Exchange) -> bool:
        """Say whether a few rows are all that is used of a gathered table.

        The devices could look them up in their parts of it, and sum what they get. An axis of the
        batch, over which parameters are gathered, is none that the table would be whole without.
        """
        ends = [(use, _result_of(use)) for use in self._uses(exchange)]
        rows = sum(elements(self._hlo, result) for _, result in ends)
        return (
            self.batch_axes.isdisjoint(exchange.axes)
            and bool(ends)
            and all(is_lookup(self._hlo, use.instruction) for use, _ in ends)
            and 2 * rows <= exchange.shape.elements
        )

    def _is_turn(self, exchange: Exchange) -> bool:
        """Say whether a product gets one part after another, each sent on around a ring.

        TPUs compute so what is gathered for a product, or scattered behind it.
        """
        if _called_name(exchange) not in _PRODUCTS:
            return False
        target_of = {pair[0]: pair[1] for pair in exchange.op.groups}
        count = prod(self._axis_sizes[axis] for axis in exchange.axes)
        return all(_cycle(target_of, device) == count for device in target_of)

    def _is_only_reduced(self, exchange: Exchange) -> bool:
        """Say whether sums, or the like, are all that is made of an array."""
        ends = [(use, _result_of(use)) for use in self._uses(exchange)]
        return bool(ends) and all(
            use.kind == "other"
            and not is_lookup(self._hlo, use.instruction)
            and elements(self._hlo, result) * _REDUCED <= elements(self._hlo, use.value)
            for use, result in ends
        )

    def _of_state(self, exchange: Exchange, leaf: int, path: str) -> Movement:
        """Say what is moved on the way to the next state of a leaf."""
        axes = frozenset(exchange.axes)
        if exchange.kind in REDUCTIONS:
            reason = "gradient" if axes & self.batch_axes else "partial"
            reason = "microbatch" if self._is_repeated(exchange, leaf) else reason
            reason = "whole gradient" if self._is_stacked_whole(exchange, leaf) else reason
            return Movement("gradient", f"gradient of {path}", reason, leaf)
        if exchange.kind == "all-to-all":
            return Movement("state", path, "state" if self._hlo.has_gradients else "cache", leaf)
        if self._is_update(leaf, _operand(exchange)):
            return Movement("state", f"new {path}", self._of_update(exchange, leaf), leaf)
        is_gather = exchange.kind == "all-gather" and bool(axes & self._leaf_axes(leaf))
        if not self._hlo.has_gradients:
            return Movement("state", f"new {path}", "cache" if is_gather else "state", leaf)
        reason = "whole gradient" if is_gather else "gradient"
        if self._sent(exchange) < self._small:
            reason = "small"
        return Movement("gradient", f"gradient of {path}", reason, leaf)

    def _of_update(self, exchange: Exchange, leaf: int) -> str:
        """Return the reason for which a new state is moved."""
        if self._result(exchange) not in self._next_state_of:
            is_cache = not self._hlo.has_gradients and self._is_written_in_part(_operand(exchange))
            is_sharded = bool(self._leaf_axes(leaf).intersection(exchange.axes))
            return "cache" if is_cache and is_sharded else "gather"
        is_bad = exchange.kind == "all-gather" and (
            exchange.times != 1
            or bool(self._leaf_axes(leaf).intersection(exchange.axes))
            or self._is_written_in_part(_operand(exchange))
        )
        return "cache" if is_bad else "update"

    def _is_written_in_part(self, value: Value) -> bool:
        """Say whether a new state has a part of the old one written anew, as a cache has."""
        return any(
            is_written_in_part(self._hlo, self._hlo[source.computation][source.name])
            for source in updated_values(self._hlo, value, {})
        )

    def _parameters_of(self, value: Value) -> Iterator[int]:
        """Yield the module's parameters that a value is made of, element by element."""
        for source in updated_values(self._hlo, value, {}):
            if source.computation == self._hlo.entry:
                number = self._hlo[source.computation][source.name].parameter
                if number is not None:
                    yield number

    def _is_repeated(self, exchange: Exchange, leaf: int) -> bool:
        """Say whether more is summed in a step than the gradient has.

        Over axes that shard the leaf there is no choice: no device has room for all of the sum.
        """
        sharding = self._leaf_axes(leaf)
        if exchange.times in (None, 1) or sharding.issuperset(exchange.axes):
            return False
        count = prod(self._axis_sizes[axis] for axis in sharding.difference(exchange.axes))
        summed = exchange.shape.elements * (exchange.times or 1) * count
        return summed >= 2 * prod(self._executable.inputs.shapes[leaf])

    def _is_stacked_whole(self, exchange: Exchange, leaf: int) -> bool:
        """Say whether a loop keeps whole gradients of its layers, of which devices have parts."""
        sharding = self._leaf_axes(leaf)
        if exchange.times in (None, 1) or sharding.isdisjoint(exchange.axes):
            return False
        stack = (exchange.times or 1) * exchange.shape.elements
        count = prod(self._axis_sizes[axis] for axis in sharding.difference(exchange.axes))
        parts, rest = divmod(prod(self._executable.inputs.shapes[leaf]), stack)
        if rest or not parts or count % parts:
            return False  # of an activation, on its way to the gradient
        return any(
            is_written_in_part(self._hlo, use.instruction)
            and elements(self._hlo, _result_of(use)) >= stack
            for use in self._uses(exchange)
        )

    def _result(self, exchange: Exchange) -> Value:
        """Return the moved array, as the computation has it that the collective is executed in."""
        op = exchange.op
        fusion = self._hlo.fusion_of(op.computation)
        if fusion is None:
            if op.kind == "all-to-all" and len(op.results) > 1:
                pieces = Value(op.computation, op.instruction.name)
                return whole_of_pieces(self._hlo, pieces, len(op.results))
            element = exchange.number if len(op.results) > 1 else None
            return Value(op.computation, op.instruction.name, element)
        computation, instruction = fusion
        if self._hlo.is_async_start(op.computation):
            return Value(computation, instruction.name, 1)  # behind the operand
        element = exchange.number if len(instruction.results) > 1 else None
        return Value(computation, instruction.name, element)

    def _sent(self, exchange: Exchange) -> int:
        times = exchange.times
        return exchange.sent_once * (1 if times is None else times)

    def _of_activation(self, exchange: Exchange) -> str:
        """Return the reason for which an activation is moved."""
        if self._sent(exchange) < self._small:
            return "small"
        if exchange.kind == "collective-permute" and self._is_sent_back(exchange):
            return "back"
        axes = frozenset(exchange.axes)
        is_batch = not axes.isdisjoint(self.batch_axes)
        is_called = _called_name(exchange) in _CALLED
        if exchange.kind in REDUCTIONS:
            operand = _operand(exchange)
            if not self._differs(axes, operand):
                return "again"
            reason = "called" if is_called else self._of_sum(operand, axes, is_batch=is_batch)
        elif exchange.kind == "all-gather":
            reason = self._of_gathered_activation(exchange, axes, is_batch=is_batch)
            if reason == "alike" and self._is_sliced_again(exchange, axes):
                reason = "sliced"
            elif is_called and not is_batch:
                reason = "called"
        else:
            reason = "called" if is_called else self._of_moved_activation(exchange, axes, is_batch)
        is_bad = not REASONS[reason].is_expected
        return "rows" if is_bad and self._is_of_table(exchange, axes) else reason

    def _of_sum(self, value: Value, axes: frozenset[str], *, is_batch: bool) -> str:
        """Return the reason for which sums are reduced, as those of products in parts.

        Along an axis of the batch there are sums without a kernel: of statistics, of gradients on
        their way to a table, and of keys whose queries are on other devices.
        """
        product = product_of(self._hlo, value)
        factors = () if product is None else product.operands
        values = [Value(value.computation, name) for name in factors]
        weights = [origin_of(self._hlo, factor) is not None for factor in values]
        if is_batch:
            return "batch" if any(weights) else "partial"
        rest = [factor for factor, is_weight in zip(values, weights, strict=True) if not is_weight]
        return "turned" if any(weights) and self._are_parts_of_whole(rest, axes) else "partial"

    def _are_parts_of_whole(self, values: Iterable[Value], axes: frozenset[str]) -> bool:
        """Say whether sums are computed in parts of an array that each device has whole.

        A kernel is sharded then along the dimension that is summed, though along the other one
        there would be nothing to sum.
        """
        count = prod(self._axis_sizes[axis] for axis in axes)
        differs = partial(self._differs, axes)
        return any(is_slice_of_whole(self._hlo, value, count, differs) for value in values)

    def _is_sent_back(self, exchange: Exchange) -> bool:
        """Say whether each device sends what it has just got to where that came from."""
        source = source_of(self._hlo, _operand(exchange))
        line = self._hlo[source.computation][source.name]
        if line.opcode.startswith("collective-permute") and line.opcode.endswith("-done"):
            line = self._hlo[source.computation][line.operands[0]]
        if not line.opcode.startswith("collective-permute"):
            return False
        pairs = self._hlo.groups(line.attributes)
        return sorted(map(tuple, pairs)) == sorted(
            (target, sender) for sender, target in exchange.op.groups
        )

    def _is_sliced_again(self, exchange: Exchange, axes: frozenset[str]) -> bool:
        """Say whether each device uses one of the parts that it has gathered."""
        count = prod(self._axis_sizes[axis] for axis in axes)
        ends = [(use, _result_of(use)) for use in self._uses(exchange)]
        return bool(ends) and all(
            use.kind == "other"
            and not is_lookup(self._hlo, use.instruction)
            and elements(self._hlo, part) * count <= elements(self._hlo, use.value)
            and self._differs(axes, part)
            for use, part in ends
        )

    def _of_moved_activation(self, exchange: Exchange, axes: frozenset[str], is_batch: bool) -> str:
        """Return the reason of an all-to-all, or a collective-permute, that XLA has inserted."""
        if exchange.kind == "collective-permute":
            if not exchange.op.instruction.op_name:
                return "aligned"
            is_part = not is_batch and self._is_turn(exchange)
            return "batch" if is_batch else "parts" if is_part else "unknown"
        if axes <= self._expert_axes:
            return "experts"
        if is_batch:
            return "parts" if self._is_for_gradient(exchange) else "batch"
        is_used = any(use.kind == "product" for use in self._uses(exchange))
        return "between" if is_used else "reshard"

    def _of_gathered_activation(
        self, exchange: Exchange, axes: frozenset[str], *, is_batch: bool
    ) -> str:
        products = [factors for factors in self._factors(exchange, axes) if factors]
        if _is_window(exchange) and not is_batch:
            return "parts"
        if not products:
            return "batch" if is_batch else "alike"
        if not is_batch:
            return "summed" if self._is_along_sum(exchange) else "parts"
        if self._is_for_gradient(exchange):
            return "parts"
        is_with_weights = any(
            origin_of(self._hlo, factor) is not None for factors in products for factor in factors
        )
        is_gradient = all(total in self._next_state_of for total in self._totals(exchange))
        return "batch" if is_with_weights or is_gradient else "parts"

    def _is_along_sum(self, exchange: Exchange) -> bool:
        """Say whether a kernel's factor is gathered along the dimension that is summed.

        What comes of a sum may be sharded anyhow; what a product has computed in parts fits a
        kernel that is sharded along the dimension that is summed.
        """
        dims, dimension = exchange.shape.dims, exchange.op.instruction.dimension
        sources = updated_values(self._hlo, _operand(exchange), {})
        lines = (self._hlo[source.computation][source.name] for source in sources)
        if dimension is None or any(line.opcode.startswith(REDUCTIONS) for line in lines):
            return False
        inner = prod(dims[dimension + 1 :])
        return any(
            is_summed(self._hlo, use, inner, inner * dims[dimension])
            and any(
                origin_of(self._hlo, Value(use.value.computation, name)) is not None
                for name in use.instruction.operands
                if name != use.value.name
            )
            for use in self._uses(exchange)
            if use.kind == "product"
        )

    def _is_for_gradient(self, exchange: Exchange) -> bool:
        """Say whether a gradient is computed in parts of what is moved, for fewer bytes.

        Otherwise each device would compute a sum over its part of the batch, in float32, for all
        devices to reduce.
        """
        leaves = {self._next_state_of.get(total) for total in self._totals(exchange)}
        sizes = [4 * self._size([leaf]) for leaf in leaves if leaf is not None]
        return len(sizes) == len(leaves) == 1 and self._sent(exchange) <= sizes[0]

    def _totals(self, exchange: Exchange) -> list[Value]:
        """List the products with what is moved."""
        return [_result_of(use) for use in self._uses(exchange) if use.kind == "product"]

    def _factors(self, exchange: Exchange, axes: frozenset[str]) -> Iterator[list[Value]]:
        """Yield, for each product with what is moved, the factors that differ along the axes."""
        for use in self._uses(exchange):
            if use.kind == "product":
                computation = use.value.computation
                others = [name for name in use.instruction.operands if name != use.value.name]
                values = (Value(computation, name) for name in others)
                yield [value for value in values if self._differs(axes, value)]

    def _uses(self, exchange: Exchange) -> Iterator[Consumer]:
        # Only what is equal on all devices behind a gather can come to differ again.
        is_gather = exchange.kind == "all-gather"
        axes = frozenset(exchange.axes if is_gather else ())
        return uses(self._hlo, self._result(exchange), partial(self._differs, axes))

    def _is_of_table(self, exchange: Exchange, axes: frozenset[str]) -> bool:
        """Say whether rows of an argument that these axes shard are moved, or their gradients."""
        operand = _operand(exchange)
        lookup = lookup_of(self._hlo, operand)
        names = () if lookup is None else lookup.operands
        origins = [origin_of(self._hlo, Value(operand.computation, name)) for name in names]
        leaves = [origin and self._executable.leaf_of.get(origin.parameter) for origin in origins]
        if lookup is None:
            sums = [(use.kind, _result_of(use)) for use in self._uses(exchange)]
            leaves = [self._next_state_of.get(total) for kind, total in sums if kind == "rows"]
            if len(leaves) < len(sums):
                return False
        return any(leaf is not None and bool(axes & self._leaf_axes(leaf)) for leaf in leaves)

    @cached_property
    def _expert_axes(self) -> frozenset[str]:
        """Mesh axes that shard the experts of arguments, or have a name for experts."""
        side = self._executable.inputs
        axes = set(expert_axes_among(self._axis_sizes))
        for leaf, sharding in enumerate(side.shardings):
            spec = getattr(sharding, "spec", None)
            dim = experts_dim(side.paths[leaf], side.shapes[leaf])
            if dim is not None and spec is not None:
                axes.update(chain(*map(entry_axes, spec[dim : dim + 1])))
        return frozenset(axes)


def _is_window(exchange: Exchange) -> bool:
    """Say whether a loop sends parts on and multiplies them, in the place of one collective."""
    return exchange.kind != exchange.op.kind


def _operand(exchange: Exchange) -> Value:
    return Value(exchange.op.computation, exchange.op.instruction.operands[exchange.number])


def _cycle(target_of: Mapping[int, int], device: int) -> int:
    """Count the sends until what a device sends is back; 0 if it never is."""
    place = device
    for count in range(1, len(target_of) + 1):
        place = target_of.get(place, -1)
        if place == device:
            return count
    return 0


def _result_of(use: Consumer) -> Value:
    return Value(use.value.computation, use.instruction.name)


def _called_name(exchange: Exchange) -> str:
    return (exchange.op.instruction.op_name or "").rpartition("/")[2]
