"""The step with constraints in its jaxpr, also inside of its loops, branches and calls.

An equation is named by its site, as operations of a step have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
from jax import tree_util
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from shardrules._place.mesh import axes_of_type
from shardrules._program.solve.activations import seams, spec_of_cuts
from shardrules._program.step.jaxprs import BODIES, CONSTRAINTS, bodies_of, inner_jaxpr, open_jaxpr

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from shardrules._program.solve.spread import Spread
    from shardrules._program.step.equations import Site
    from shardrules._program.step.step import Step

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
            raise ValueError(_other_arguments(step, shapes, inputs))
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


def _other_arguments(step: Step, shapes: list[Any], inputs: list[Any]) -> str:
    texts = f"{len(shapes)} arrays are given, and it was traced with {len(inputs)}"
    if len(shapes) == len(inputs):
        rows = zip(step._paths, shapes, inputs, strict=True)
        path, given, traced = next(row for row in rows if row[1] != row[2])
        texts = f"{path} has the shape {list(given)}, and was traced with {list(traced)}"
    return f"{step.name}: {texts}: trace and solve the step for these arguments"


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
                free = PartitionSpec(
                    *[PartitionSpec.UNCONSTRAINED] * len(eqn.outvars[0].aval.shape)
                )
                template = self._constraint(eqn.outvars[0], self._specs.get((site, 0), free))
                yield _placed(template, eqn, eqn.invars, eqn.outvars)
                continue
            # Variables are compared by identity: those of a new constraint are new.
            invars, outvars, after = list(eqn.invars), list(eqn.outvars), []
            for operand, var in enumerate(eqn.invars):
                if (spec := self._specs.get((site, ~operand))) is not None:
                    template = self._constraint(var, spec)
                    yield _placed(template, eqn, [var], template.outvars)
                    (invars[operand],) = template.outvars
            for result, var in enumerate(eqn.outvars):
                if (spec := self._specs.get((site, result))) is not None:
                    template = self._constraint(var, spec)
                    after.append(_placed(template, eqn, template.invars, [var]))
                    (outvars[result],) = template.invars
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
        written = [self.closed(within, (*site, n)) for n, (_, within) in enumerate(bodies_of(eqn))]
        if eqn.primitive.name == "cond":
            params["branches"] = tuple(written)
        elif written:
            params[BODIES[eqn.primitive.name]] = written[0]
        return params

    def _constraint(self, var: Any, spec: PartitionSpec) -> Any:
        """Return the equation of a constraint of an array like this."""
        aval, sharding = var.aval, NamedSharding(self._mesh, spec)
        shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
        make = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))
        return make(shape).jaxpr.eqns[0]


def _placed(template: Any, eqn: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
    source = eqn.source_info
    return template.replace(invars=list(invars), outvars=list(outvars), source_info=source)
