"""Writes constraints into the jaxpr of a step, also inside of its loops, branches and calls.

An equation is named by its site, as operations of a step have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shardrules._program.step.jaxprs import BODIES, CONSTRAINTS, bodies_of, inner_jaxpr, open_jaxpr

if TYPE_CHECKING:
    from shardrules._program.step.equations import Site

Shardings = Mapping[tuple["Site", int], Any]
"""NamedShardings of the results of equations, by site and place; `~place` is that of an operand."""
_OF_CALLS: Final = frozenset(["ctx_mesh", "in_shardings", "out_shardings"])


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
