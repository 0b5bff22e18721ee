"""Constraints of a solution: at which lines they are, and the step with them in its jaxpr.

An equation is named by its site, as operations of a step have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
from jax import tree_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._base.specs import constraint_line, entries_of_cuts, partition_spec, spec_shown
from shardrules._base.text import printable, record
from shardrules._place.mesh import axes_of_type
from shardrules._program.jax_names import user_line
from shardrules._program.solve.spread import PRODUCTS
from shardrules._program.step.equations import (
    BODIES,
    CONSTRAINTS,
    constrains,
    inner_jaxpr,
    open_jaxpr,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._program.solve.spread import Spread
    from shardrules._program.step.equations import Body, Cuts, Equations, Site, TracedOperation
    from shardrules._program.step.step import Step

# What makes arrays that XLA may shard otherwise; elementwise operations follow their operands.
_MAKES: Final = frozenset(
    ["dot_general", "ragged_dot_general", "conv_general_dilated", "gather",
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
        lines = (user_line(row.eqn) for row in (operation, *users) if row)
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


def _weight_of(step: Step, seam: Seam) -> str:
    """Return the path of the weight that a seam is of, or with which a product makes its array."""
    weights = step._roles.weights
    is_product = seam.place >= 0 and seam.operation.name in PRODUCTS
    numbers = seam.operation.inputs if is_product else [seam.number]
    places = [weights[number] for number in numbers if number in weights]
    if len(places) != 1:
        return ""
    path = dict(zip(step._equations.body.inputs, step._paths, strict=True))[places[0]]
    return path.removeprefix(f"inputs/{step._model_at}/")


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


def spec_of_cuts(cuts: Cuts) -> PartitionSpec:
    """Return the spec of these cuts, without the last entries that are None."""
    return partition_spec(*entries_of_cuts(cuts))


_OF_CALLS: Final = frozenset(["ctx_mesh", "in_shardings", "out_shardings"])


def constrained_step(step: Step, spread: Spread, mesh: Mesh) -> Any:
    """Return the step as a jitted function that shards its arrays so, with their gradients.

    It is made of the step's jaxpr: the program's text, and libraries that it calls, stay as they
    are. Its own constraints are left out where the solution has others.
    """
    if explicit := axes_of_type(mesh, "Explicit"):
        raise ValueError(
            f"mesh: {', '.join(sorted(explicit))} are Explicit, so that the types of arrays say "
            "how they are sharded, and no constraint does; give a mesh whose axes are Auto"
        )
    specs = {
        (seam.operation.site, seam.place): spec_of_cuts(seam.cuts) for seam in seams(step, spread)
    }
    closed = _Writer(mesh, specs).closed(step._closed, ())
    run = jaxpr_as_fun(closed)
    inputs = [value.shape for value in closed.in_avals]

    def run_step(*args: Any) -> Any:
        leaves = tree_util.tree_leaves(args)
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        if shapes != inputs:
            raise ValueError(
                f"{step.name}: it was traced with arrays of {inputs}, and is given {shapes}: trace "
                "and solve the step for these arguments"
            )
        return tree_util.tree_unflatten(step._out_tree, run(*leaves))

    run_step.__name__ = step.name
    outputs = [
        None if number is None else NamedSharding(mesh, spec_of_cuts(spread.cuts(number)))
        for number in step._equations.body.outputs
    ]
    results = tree_util.tree_unflatten(step._out_tree, outputs)
    return jax.jit(run_step, donate_argnums=_donated(step), out_shardings=results)


def _donated(step: Step) -> tuple[int, ...]:
    """Return the arguments whose memory results take, all of it."""
    donated, inputs = set(step._donated), step._equations.body.inputs
    return tuple(
        place
        for place, rows in enumerate(step._ranges)
        if rows and all(inputs[row] in donated for row in rows)
    )


class _Writer:
    """Writes constraints into jaxprs, from the innermost; of a place without one XLA is free.

    Specs are those of the results of equations, by site and place; `~place` is that of an operand.
    Constraints that the program has of another mesh are replaced, or left out.
    """

    def __init__(self, mesh: Mesh, specs: Mapping[tuple[Site, int], PartitionSpec]) -> None:
        self._mesh, self._specs = mesh, specs
        # The parameters of a call without shardings, on the mesh of the context.
        (call,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0).eqns
        self._call = dict(call.params)

    def closed(self, closed: Any, around: Site) -> Any:
        """Write into a jaxpr that has its constants, or has none."""
        jaxpr = open_jaxpr(closed)
        written = jaxpr.replace(eqns=list(self._equations(jaxpr, around)))
        return written if jaxpr is closed else closed.replace(jaxpr=written)

    def _equations(self, jaxpr: Any, around: Site) -> Iterator[Any]:
        for place, eqn in enumerate(jaxpr.eqns):
            site = (*around, place)
            if eqn.primitive.name in CONSTRAINTS:
                rank = len(eqn.outvars[0].aval.shape)
                free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * rank)
                new_spec = self._specs.get((site, 0), free)
                constraint = self._constraint(eqn, eqn.outvars[0], new_spec)
                yield constraint.replace(invars=eqn.invars, outvars=eqn.outvars)
                continue
            # Variables are compared by identity: those of a new constraint are new.
            invars, outvars, after = list(eqn.invars), list(eqn.outvars), []
            for operand, var in enumerate(eqn.invars):
                if (spec := self._specs.get((site, ~operand))) is not None:
                    constraint = self._constraint(eqn, var, spec)
                    yield constraint.replace(invars=[var])
                    (invars[operand],) = constraint.outvars
            for result, var in enumerate(eqn.outvars):
                if (spec := self._specs.get((site, result))) is not None:
                    constraint = self._constraint(eqn, var, spec)
                    after.append(constraint.replace(outvars=[var]))
                    (outvars[result],) = constraint.invars
            params = self._params(eqn, site)
            for name in _OF_CALLS & params.keys():  # before, those of the trace and the program
                plain = self._call[name]
                params[name] = plain if name == "ctx_mesh" else plain * len(params[name])
            yield eqn.replace(params=params, invars=invars, outvars=outvars)
            yield from after

    def _params(self, eqn: Any, site: Site) -> dict[str, Any]:
        """Return the parameters of an equation with what is written into its jaxprs."""
        params = dict(eqn.params)
        inner = inner_jaxpr(eqn)
        if inner is not None:
            name = next(name for name, value in params.items() if value is inner)
            params[name] = self.closed(inner, site)
        if name := BODIES.get(eqn.primitive.name, ""):
            bodies = params[name] if name == "branches" else (params[name],)
            written = tuple(self.closed(body, (*site, n)) for n, body in enumerate(bodies))
            params[name] = written if name == "branches" else written[0]
        return params

    def _constraint(self, eqn: Any, var: Any, spec: PartitionSpec) -> Any:
        """Return an equation that constrains an array like this, at the line of another one."""
        aval, sharding = var.aval, NamedSharding(self._mesh, spec)
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        make = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))
        return make(shape).jaxpr.eqns[0].replace(source_info=eqn.source_info)
