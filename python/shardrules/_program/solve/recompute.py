"""Recomputes what the backward pass of a loop reads, in a jaxpr that has its gradient already.

A loop over layers saves arrays of each turn, which the loop of its gradient reads. Without that it
saves what each turn begins with, and the other loop computes the rest again: what
`jax.checkpoint(body)` does where the program says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, combinations
from typing import Any, Final, NamedTuple

from shardrules._base.dtypes import bits_of
from shardrules._base.jax_names import user_line
from shardrules._base.text import bytes_shown, printable, record
from shardrules._place.mesh import in_force
from shardrules._program.solve.rewrite import Names, Rewriter, Site, named
from shardrules._program.step.jaxprs import bodies_of, inner_jaxpr, open_jaxpr, scan_counts
from shardrules._program.step.step import Step

# If there are more loops, all recompute or none.
_MOST_APART: Final = 2


@record
class RematChoice(NamedTuple):
    """A loop that saves arrays for its gradient, or recomputes them; a row of `Solution.remat`."""

    line: str
    """File and line of the loop; "" if that is not known."""
    turns: int
    residuals: int
    """Bytes that all turns save, over all devices."""
    recomputes: bool

    def __str__(self) -> str:
        where = self.line or "a loop"
        saved = f"{bytes_shown(self.residuals)} on all devices"
        if self.recomputes:
            return printable(
                f"{where}: jax.lax.scan(jax.checkpoint(body), ...)  # not saved: {saved}"
            )
        return printable(f"{where}: stays  # saved: {saved}")


class Block(NamedTuple):
    """A loop and that of its gradient."""

    forward: Site
    backward: Site
    saved: tuple[int, ...]
    """Results of the first that only the second reads, and which it can compute."""
    eqn: Any

    def choice(self, *, recomputes: bool) -> RematChoice:
        """Return what users read of it."""
        avals = [self.eqn.outvars[i].aval for i in self.saved]
        size = sum(aval.size * bits_of(aval.dtype) // 8 for aval in avals)
        line = str(user_line(self.eqn) or "")
        return RematChoice(line, self.eqn.params["length"], size, recomputes)


def subsets(blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
    """Return which blocks may recompute together, none first."""
    if len(blocks) > _MOST_APART:
        return [(), tuple(blocks)]
    counts = range(len(blocks) + 1)
    return list(chain.from_iterable(combinations(blocks, count) for count in counts))


def blocks_of(step: Step) -> list[Block]:
    """List the loops of a step that save for their gradient what could be computed again."""
    return list(_blocks(open_jaxpr(step._closed), ()))


def _blocks(jaxpr: Any, around: Site) -> Iterator[Block]:
    readers: dict[Any, list[int]] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        for var in {atom for atom in eqn.invars if not hasattr(atom, "val")}:
            readers.setdefault(var, []).append(place)
    kept = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    for place, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "scan" and not eqn.effects:
            sole = [readers.get(var, []) if var not in kept else [] for var in eqn.outvars]
            for back in sorted({rows[0] for rows in sole if len(rows) == 1}):
                other = jaxpr.eqns[back]
                saved = [i for i, rows in enumerate(sole) if rows == [back]]
                if saved := list(_recomputable(eqn, other, saved)):
                    yield Block((*around, place), (*around, back), tuple(saved), eqn)
        inner = inner_jaxpr(eqn)
        if inner is not None:
            yield from _blocks(open_jaxpr(inner), (*around, place))
        elif eqn.primitive.name == "scan":
            for number, (_, within) in enumerate(bodies_of(eqn)):
                yield from _blocks(open_jaxpr(within), (*around, place, number))


def _recomputable(eqn: Any, other: Any, results: Iterable[int]) -> Iterator[int]:
    """Yield which results of a scan another one slices, and are not what a turn begins with."""
    if other.primitive.name != "scan" or other.params["length"] != eqn.params["length"]:
        return
    body = eqn.params["jaxpr"]
    if getattr(body, "consts", ()) or getattr(other.params["jaxpr"], "consts", ()):
        return
    _, carries = scan_counts(eqn.params)
    stop = sum(scan_counts(other.params))
    sliced = [id(atom) for atom in other.invars[stop:]]
    whole = {id(atom) for atom in other.invars[:stop]}
    for result in results:
        var = eqn.outvars[result]
        is_input = any(open_jaxpr(body).outvars[result] is var for var in open_jaxpr(body).invars)
        if result >= carries and not is_input and id(var) in sliced and id(var) not in whole:
            yield result


def recomputed(step: Step, blocks: Collection[Block]) -> Step:
    """Return a step in which these blocks recompute what they have saved."""
    if not blocks:
        return step
    with in_force(step.mesh):
        return step._of_jaxpr(_Recomputing(blocks).closed(step._closed, ()))


class _Recomputing(Rewriter):
    """Writes blocks so that they recompute what they have saved."""

    def __init__(self, blocks: Collection[Block]) -> None:
        self._blocks = {block.forward: block for block in blocks}
        self._backward = {block.backward: block.forward for block in blocks}
        self._scans: dict[Site, tuple[list[Any], list[Any]]] = {}
        """By block, what the first loop reads, and what each of its turns begins with, stacked."""

    def equations(self, jaxpr: Any, around: Site, names: Names) -> Iterator[Any]:
        for place, before in enumerate(jaxpr.eqns):
            site = (*around, place)
            eqn = before.replace(invars=[named(names, atom) for atom in before.invars])
            if block := self._blocks.get(site):
                eqns, results = _written(partial(_with_begins, block), eqn.invars, eqn)
                kept = [i for i in range(len(eqn.outvars)) if i not in block.saved]
                names |= {eqn.outvars[i]: atom for i, atom in zip(kept, results, strict=False)}
                own = iter(results[len(kept) :])
                begins = [next(own) if i is None else results[kept.index(i)]
                          for i in _Loop(eqn).begins()]  # fmt: skip
                self._scans[site] = list(eqn.invars), begins
            elif forward := self._backward.get(site):
                eqns, results = self._computes_again(self._blocks[forward], eqn)
                names |= zip(eqn.outvars, results, strict=True)
            else:
                eqns = [eqn.replace(params=self.params(eqn, site))]
            yield from eqns

    def _computes_again(self, block: Block, eqn: Any) -> tuple[list[Any], list[Any]]:
        """Write the loop of a gradient with what the other one has saved in its body."""
        reads, begins = self._scans[block.forward]
        forward = _Loop(block.eqn)
        consts, _, slices = forward.split(reads)
        own = _Loop(eqn)
        saved = {id(block.eqn.outvars[i]): i for i in block.saved}
        own_consts, carried, own_slices = own.split(list(eqn.invars))
        of = [saved.get(id(atom)) for atom in own_slices]
        kept = [atom for atom, result in zip(own_slices, of, strict=True) if result is None]
        numbers = (len(consts), len(own_consts), len(carried), len(slices), len(begins))

        def run(*args: Any) -> Any:
            *parts, rest = _in_parts(args, numbers)

            def turn(carry: Any, x: Any) -> Any:
                import jax

                others, row, begin = x
                with jax.named_scope("rematted_computation"):
                    again = forward.run(*parts[0], *begin, *row)
                others = iter(others)
                values = [next(others) if i is None else again[i] for i in of]
                results = own.run(*parts[1], *carry, *values)
                return results[: own.carries], results[own.carries :]

            return own.scan(turn, parts[2], (rest, parts[3], parts[4]))

        invars = [*consts, *own_consts, *carried, *slices, *begins, *kept]
        return _written(run, invars, eqn)


class _Loop:
    """The scan of an equation."""

    def __init__(self, eqn: Any) -> None:
        from jax.extend.core import jaxpr_as_fun

        self._params, self._body = eqn.params, open_jaxpr(eqn.params["jaxpr"])
        self.consts, self.carries = scan_counts(eqn.params)
        self.run = jaxpr_as_fun(eqn.params["jaxpr"])

    def begins(self) -> list[int | None]:
        """Return for each carried array the result that stacks it, as it is before each turn."""
        results, carried = self._body.outvars, self._body.invars[self.consts :]
        stacked = {id(var): i for i, var in enumerate(results) if i >= self.carries}
        return [stacked.get(id(var)) for var in carried[: self.carries]]

    def split(self, args: Sequence[Any]) -> list[Sequence[Any]]:
        """Return what does not change, what is carried, and what is sliced."""
        return _in_parts(args, (self.consts, self.carries))

    def scan(self, turn: Any, carried: Any, slices: Any) -> list[Any]:
        """Run another body as often, in the same order."""
        import jax

        options = {name: self._params[name] for name in ("length", "reverse", "unroll")}
        carried, stacked = jax.lax.scan(turn, list(carried), slices, **options)
        return [*carried, *stacked]


def _in_parts(args: Sequence[Any], counts: Iterable[int]) -> list[Sequence[Any]]:
    """Cut a sequence into parts of these lengths and the rest."""
    stops = [0, *accumulate(counts)]
    return [args[a:b] for a, b in zip(stops, [*stops[1:], None], strict=True)]


def _with_begins(block: Block, *args: Any) -> list[Any]:
    """Run the first loop of a block: it saves what turns begin with, and not what is recomputed."""
    loop = _Loop(block.eqn)
    consts, carried, slices = loop.split(args)
    own = [place for place, result in enumerate(loop.begins()) if result is None]

    def turn(carry: Any, row: Any) -> Any:
        results = loop.run(*consts, *carry, *row)
        places = range(loop.carries, len(results))
        kept = [results[i] for i in places if i not in block.saved]
        return results[: loop.carries], kept + [carry[place] for place in own]

    return loop.scan(turn, carried, slices)


def _written(
    function: Callable[..., list[Any]], invars: Sequence[Any], eqn: Any
) -> tuple[list[Any], list[Any]]:
    """Trace a function for an equation's place; return its equations and results."""
    import jax

    avals = [atom.aval for atom in invars]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    names: Names = dict(zip(jaxpr.invars, invars, strict=True))
    rows = [
        row.replace(invars=[named(names, atom) for atom in row.invars], source_info=eqn.source_info)
        for row in jaxpr.eqns
    ]
    return rows, [named(names, atom) for atom in jaxpr.outvars]
