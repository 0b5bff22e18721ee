"""Constraints of a solution: which arrays of a step it shards, and at which lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.specs import constraint_line, entries_of_cuts, partition_spec, spec_shown
from shardrules._base.text import printable, record
from shardrules._program.jax_names import user_line
from shardrules._program.solve.price import PRODUCTS
from shardrules._program.step.equations import RESULT
from shardrules._program.step.jaxprs import constrains

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from shardrules._program.solve.spread import Spread
    from shardrules._program.step.equations import Body, Equations, TracedOperation
    from shardrules._program.step.jaxprs import Cuts
    from shardrules._program.step.step import Step

# What makes arrays that XLA may shard otherwise; elementwise operations follow their operands.
_MAKES: Final = frozenset(
    ["dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "gather",
     "scatter-add", "scatter", "concatenate", "cumsum", "sort", "top_k"]
)  # fmt: skip
# Arrays of a smaller part of the largest one are left to XLA; of what is sent for an operation it
# is less, as weights are small beside what attention makes.
_SMALL: Final = 1e-3
_SMALL_SENT: Final = 1e-5


@record
class Activation(NamedTuple):
    """Arrays of one line of a step that a solution shards; a row of `Solution.activations`."""

    operation: str
    """JAX's names around the operation that makes them, and its own."""
    line: str
    """File and line of it, or of what reads it, if JAX itself adds it; "" if none is known."""
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    replaces: bool
    """True if the program has a constraint there, whose spec this is to be."""
    is_read: bool
    """True if the operation is to read the array so, False if it makes it."""
    weight: str
    """Path of the weight that is read, or with which the operation makes the array; "" without
    one."""

    def __str__(self) -> str:
        array = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        last = self.weight.rpartition("/")[2]
        operand = last if self.is_read and last.isidentifier() else "x"
        text = constraint_line(spec_shown(self.spec), operand)
        name = self.operation.rpartition("/")[2]
        verb = "constrains already" if self.replaces else f"into {name}" if self.is_read else name
        if self.weight:
            verb = f"{self.weight} {verb}" if self.is_read else f"{verb} with {self.weight}"
        line = self.line or f"no line is known of {self.operation}"
        return printable(f"{line}: {text}  # {array}, {verb}")


def _weight_of(step: Step, seam: Seam) -> str:
    """Return the path of the weight that a seam is of, or with which a product makes its array."""
    weights = step._roles.weights
    is_product = seam.place >= 0 and seam.operation.name in PRODUCTS
    numbers = seam.operation.inputs if is_product else [seam.number]
    places = [weights[number] for number in numbers if number in weights]
    if len(places) != 1:
        return ""
    path = dict(zip(step._equations.body.inputs, step._paths, strict=True))[places[0]]
    return path.removeprefix(f"inputs/{step._place}/")


class Seam(NamedTuple):
    """An array that a solution shards where an operation makes it, or reads it."""

    place: int
    """Of a result; of what is read, that of an operand as `~place`."""
    number: int
    """The array's, among the values of the step."""
    cuts: Cuts
    operation: TracedOperation


def seams(step: Step, spread: Spread) -> list[Seam]:
    """List the arrays that are to be sharded: those that XLA may shard otherwise, and are large.

    What an operation reads otherwise than it lies is one of them: XLA may gather another operand.
    """
    equations = step._equations
    values, constants = equations.values, set(equations.constants)
    sizes = (value.bits for number, value in enumerate(values) if number not in constants)
    largest = max(sizes, default=0)
    carried = set(_carried(equations))
    rows: list[Seam] = []

    def is_large(number: int, part: float) -> bool:
        return values[number].bits >= part * largest and bool(values[number].shape)

    for operation in _constrainable(equations.body):
        is_constraint = constrains(operation.eqn)
        if not operation.bodies and not is_constraint:
            for place, number in enumerate(operation.inputs):
                if number is None or number in constants:
                    continue
                cuts = spread.reads.get((id(operation), number))
                if cuts not in (None, spread.cuts(number)) and is_large(number, _SMALL_SENT):
                    rows.append(Seam(~place, number, cuts, operation))
        is_made = operation.name in _MAKES or is_constraint or _is_new(operation)
        for place, number in enumerate(operation.outputs):
            is_sum = number in spread.sums and is_large(number, _SMALL_SENT)
            if is_sum or ((is_made or number in carried) and is_large(number, _SMALL)):
                rows.append(Seam(place, number, spread.cuts(number), operation))
    return rows


def _constrainable(body: Body) -> Iterator[TracedOperation]:
    """Yield the operations that constraints can follow: not in code by device, which has parts."""
    for operation in body.operations:
        if operation.site and operation.name != "shard_map":
            for inner in operation.bodies:
                yield from _constrainable(inner)
            yield operation


def _is_new(operation: TracedOperation) -> bool:
    """Say whether an operation makes an array of a scalar, which follows what reads it."""
    rule = operation.rule
    return operation.name == "broadcast_in_dim" and rule is not None and not any(rule.operands[0])


def _carried(equations: Equations) -> Iterator[int | None]:
    """Yield what loops carry from a turn to the next, such as the arrays between layers."""
    for operation, _ in equations.everything():
        if operation.name in ("scan", "while"):
            yield from operation.bodies[0].outputs[: operation.carries]


def activations(step: Step, spread: Spread) -> tuple[Activation, ...]:
    """List the constraints that a program may have, line by line, in its order."""
    rows: dict[Any, Activation] = {}
    for seam in seams(step, spread):
        operation, value = seam.operation, step._equations.values[seam.number]
        # The backward pass of an array has its sharding, as JAX has it for a constraint.
        is_result = seam.place >= 0
        if "transpose(" in operation.scope or (
            is_result and step._roles.is_like_weights(seam.number)
        ):
            continue
        users = step._equations.users.get(seam.number, ())
        lines = (user_line(row.eqn) for row in (operation, *users) if row is not RESULT)
        row = Activation(
            operation.path,
            str(next(filter(None, lines), "")),
            value.shape,
            getattr(value.dtype, "name", str(value.dtype)),
            spec_of_cuts(seam.cuts),
            constrains(operation.eqn),
            seam.place < 0,
            _weight_of(step, seam),
        )
        rows.setdefault(row[1:] if row.line else row, row)
    return tuple(rows.values())


def spec_of_cuts(cuts: Cuts) -> PartitionSpec:
    """Return the spec of these cuts, without the last entries that are None."""
    return partition_spec(*entries_of_cuts(cuts))
