"""Writes constraints into the jaxpr of a step, also inside of its loops, branches and calls.

An equation is named by its site: its place in the jaxpr, and the places in those around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardrules._program.step.jaxprs import BODIES, CONSTRAINTS, bodies_of, inner_jaxpr, open_jaxpr

if TYPE_CHECKING:
    from shardrules._program.step.equations import Body, TracedOperation

Site = tuple[int, ...]
"""Places of equations, the outermost first; after that of a branch its number."""
Shardings = Mapping[tuple[Site, int], Any]
"""NamedShardings of the results of equations, by site and place; `~place` is that of an operand."""
_OF_CALLS: Final = frozenset(["ctx_mesh", "in_shardings", "out_shardings"])


def sites(closed: Any, body: Body) -> Iterator[tuple[Site, TracedOperation]]:
    """Yield the operations of a step that constraints can follow, each with its site.

    Code by device, in `shard_map` and kernels, has none: arrays are parts there.
    """
    operations = iter(body.operations)
    yield from _sites(open_jaxpr(closed), _Ahead(operations), ())


class _Ahead:
    """Operations of a body, of which the next one can be looked at."""

    def __init__(self, operations: Iterator[TracedOperation]) -> None:
        self._operations = operations
        self.next = next(operations, None)

    def take(self, eqn: Any) -> TracedOperation | None:
        """Return the next operation if it is of this equation, and go on; None if XLA drops it."""
        operation = self.next
        if operation is None or operation.eqn is not eqn:
            return None
        self.next = next(self._operations, None)
        return operation


def _sites(jaxpr: Any, ahead: _Ahead, around: Site) -> Iterator[tuple[Site, TracedOperation]]:
    for place, eqn in enumerate(jaxpr.eqns):
        site = (*around, place)
        inner = inner_jaxpr(eqn)
        if inner is not None:
            ahead.take(eqn)  # the barrier before what is recomputed
            yield from _sites(open_jaxpr(inner), ahead, site)
            continue
        operation = ahead.take(eqn)
        if operation is None or eqn.primitive.name == "shard_map":
            continue
        for number, (_, within) in enumerate(bodies_of(eqn)):
            inside = _Ahead(iter(operation.bodies[number].operations))
            yield from _sites(open_jaxpr(within), inside, (*site, number))
        yield site, operation


def constrained(closed: Any, shardings: Shardings, constraint: Callable[[Any, Any], Any]) -> Any:
    """Return a closed jaxpr whose equations' results have these shardings.

    Constraints that the program has of another mesh are replaced, or left out.
    """
    return _Writer(shardings, constraint).closed(closed, ())


class _Writer:
    """Writes constraints into jaxprs, from the innermost."""

    def __init__(self, shardings: Shardings, constraint: Callable[[Any, Any], Any]) -> None:
        self._shardings, self._constraint = shardings, constraint
        self._call = _plain_call()

    def closed(self, closed: Any, around: Site) -> Any:
        """Write into a jaxpr that has its constants, or has none."""
        jaxpr = open_jaxpr(closed)
        written = jaxpr.replace(eqns=list(self._equations(jaxpr, around)))
        return written if jaxpr is closed else closed.replace(jaxpr=written)

    def _equations(self, jaxpr: Any, around: Site) -> Iterator[Any]:
        for place, eqn in enumerate(jaxpr.eqns):
            site = (*around, place)
            if eqn.primitive.name in CONSTRAINTS:
                template = self._constraint(eqn.outvars[0].aval, self._shardings.get((site, 0)))
                yield self._placed(template, eqn, eqn.invars, eqn.outvars)
                continue
            # Variables are compared by identity: those of a new constraint are new.
            invars, outvars, after = list(eqn.invars), list(eqn.outvars), []
            for operand, var in enumerate(eqn.invars):
                if sharding := self._shardings.get((site, ~operand)):
                    template = self._constraint(var.aval, sharding)
                    yield self._placed(template, eqn, [var], template.outvars)
                    (invars[operand],) = template.outvars
            for result, var in enumerate(eqn.outvars):
                if sharding := self._shardings.get((site, result)):
                    template = self._constraint(var.aval, sharding)
                    after.append(self._placed(template, eqn, template.invars, [var]))
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

    def _placed(
        self, template: Any, eqn: Any, invars: Sequence[Any], outvars: Sequence[Any]
    ) -> Any:
        source = eqn.source_info
        return template.replace(invars=list(invars), outvars=list(outvars), source_info=source)


def _plain_call() -> dict[str, Any]:
    """Return the parameters of a call without shardings, on the mesh of the context."""
    import jax

    (call,) = jax.make_jaxpr(jax.jit(lambda x: -x))(0).eqns
    return dict(call.params)
