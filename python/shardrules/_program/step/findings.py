"""Findings of a traced step under a plan: what the names of its parameters cannot tell.

Each is a function from a `View` to findings, which `Plan.check` gives with its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Final

from shardrules._base.specs import constraint_line, entries_of_cuts, spec_shown
from shardrules._base.text import bytes_shown, counted
from shardrules._plan.findings import finding_of
from shardrules._program.step.spread import PRODUCTS

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding
    from shardrules._program.step.dimension_roles import ClassRole, Roles
    from shardrules._program.step.equations import Body, Equations, TracedOperation
    from shardrules._program.step.spread import Spread

# Less than this part of a step's work may be repeated without a word: norms, routers, KV heads.
_REPEATED: Final = 0.1
_SHOWN: Final = 3
_HEADS: Final[tuple[ClassRole, ...]] = ("heads", "KV heads", "query heads of a KV head")
_warning: Final = partial(finding_of, "warning")


@dataclass
class View:
    """A step under a plan."""

    equations: Equations
    roles: Roles
    spread: Spread
    paths: dict[int, str]
    """Of the plan's leaves, by the number of the array."""
    large: int
    """Bytes on a device from which on an array is reported."""


def step_findings(view: View) -> Iterator[Finding]:
    yield from _repeated(view)
    yield from half_heads(view)
    yield from _whole_batches(view)
    yield from _whole_routes(view)
    yield from _gathered_state(view)


def _computing(body: Body) -> Iterator[tuple[TracedOperation, int]]:
    """Yield what computes, and how often, but code by device, which says itself who does."""
    for operation in body.operations:
        for inner in operation.running if operation.name != "shard_map" else ():
            for inside, trips in _computing(inner):
                yield inside, trips * operation.trips
        if operation.rule is not None and operation.flops:
            yield operation, 1


def _repeated(view: View) -> Iterator[Finding]:
    """Yield for each mesh axis the products that all devices along it compute."""
    spread = view.spread
    products = [
        (operation, operation.flops * trips / spread.share(operation))
        for operation, trips in _computing(view.equations.body)
        if operation.name in PRODUCTS
    ]
    total = sum(
        operation.flops * trips / spread.share(operation)
        for operation, trips in view.equations.operations(on_device=True)
        if operation.name in PRODUCTS or operation.rule is None
    )
    gathered = _gathered_weights(view)
    for axis, size in spread.sizes.items():
        lines: defaultdict[str, float] = defaultdict(float)
        weights: dict[str, None] = {}
        for operation, flops in products:
            if axis not in spread.axes_of(operation):
                lines[operation.line] += flops * (1 - 1 / size)
                weights |= dict.fromkeys(gathered.get((id(operation), axis), ()))
        wasted = sum(lines.values())
        if wasted <= _REPEATED * total:
            continue
        shown = ", ".join(sorted(lines, key=lambda line: -lines[line])[:_SHOWN])
        more = len(lines) - _SHOWN
        where = shown + (f" and {counted(more, 'more line')}" if more > 0 else "")
        (name,) = spread.named([axis])
        cause, fix = _cause(name, list(weights))
        many = f"the {size}" if name == axis else f"groups of {size}"
        yield _warning(
            "repeated",
            f"{many} devices along '{name}' compute the same: {wasted / total:.0%} of the "
            f"work of each of them, at {where}{cause}",
            fix,
            mend=f"({re.escape(next(iter(weights)))!r}, P(...))"
            if weights
            else constraint_line(f"P(...{axis!r}...)"),
            paths=tuple(weights)[:_SHOWN],
            leaves=len(weights),
        )


def _cause(axis: str, weights: list[str]) -> tuple[str, str]:
    """Return why devices along an axis compute the same, and the way out."""
    if weights:
        rest = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        return (
            f", for which {weights[0]}{rest} is gathered over '{axis}'",
            f"cut by '{axis}' the dimension that the product keeps or that its input is cut by "
            "too, or cut the batch by it as well",
        )
    return (
        "",
        f"cut the batch by '{axis}', or the dimensions of weights that these products have; where "
        f"the step loses the axis, constrain it: with_sharding_constraint(x, P(...'{axis}'...))",
    )


def _gathered_weights(view: View) -> dict[tuple[int, str], list[str]]:
    """Return by operation and axis the weights that are gathered for it."""
    gathered: dict[tuple[int, str], list[str]] = defaultdict(list)
    for sent in view.spread.sent:
        source = view.roles.weights.get(sent.value) if sent.value is not None else None
        if sent.kind == "all-gather" and source in view.paths:
            for axis in sent.axes:
                gathered[id(sent.operation), axis].append(view.paths[source])
    return gathered


def half_heads(view: View) -> Iterator[Finding]:
    """Yield the weights that are cut inside a head, and are not gathered before they are used."""
    equations, roles = view.equations, view.roles.of
    gathered = {
        (path, axis) for (_, axis), paths in _gathered_weights(view).items() for path in paths
    }
    groups: dict[str, list[str]] = defaultdict(list)
    for number, path in view.paths.items():
        cuts = view.spread.cuts.get(number, ())
        dims = [equations.dims.classes(dim) for dim in equations.values[number].dims]
        if not any(roles.get(c) in _HEADS for classes in dims for c in classes):
            continue
        for place, (classes, names) in enumerate(zip(dims, cuts, strict=False)):
            heads = [c for c in classes if roles.get(c) in _HEADS]
            rest = [c for c in classes if c not in heads]
            axes = [axis for axis in names if (path, axis) not in gathered]
            if not axes or [roles.get(c) for c in rest] != ["head size"]:
                continue
            count = prod(equations.dims.sizes[c] for c in heads)
            devices = view.spread.count(axes)
            if count % devices:
                size = equations.dims.sizes[rest[0]]
                groups[
                    f"dimension {place}, {counted(count, 'head')} of {size}, is cut into "
                    f"{devices} parts by {','.join(view.spread.named(axes))}"
                ].append(path)
    for text, paths in groups.items():
        yield _warning(
            "half-head",
            f"{text}; devices exchange parts of heads in each step",
            "cut by fewer devices, or keep heads whole with RuleSpec(..., units=...)",
            mend="shardrules.RuleSpec(P(...), units=...)",
            paths=tuple(paths[:_SHOWN]),
            leaves=len(paths),
        )


def _whole_batches(view: View) -> Iterator[Finding]:
    """Yield for each axis of the batch what has the batch and is not cut by it."""
    for axis, (batch, sizes) in _batch_axes(view).items():
        rows = sorted(_whole_arrays(view, axis, batch), key=lambda row: -row[0])
        if not rows:
            continue
        size, line, constraint = rows[0]
        more = _and_at(len({line for _, line, _ in rows}) - 1)
        (name,) = view.spread.named([axis])
        yield _warning(
            "whole-batch",
            f"'{name}' cuts the batch of the inputs, but not {bytes_shown(size)} at {line}{more}: "
            f"each of the {sizes} devices along it has the same",
            f"constrain it there: {constraint}",
            bytes=size,
            mend=constraint,
        )


def _batch_axes(view: View) -> dict[str, tuple[set[int], int]]:
    """Return {axis that cuts the batch of an argument: (classes that it cuts, its devices)}."""
    equations, spread = view.equations, view.spread
    axes: dict[str, tuple[set[int], int]] = {}
    for number in equations.body.inputs:
        if number in view.roles.weights:
            continue
        for dim, names in zip(
            equations.values[number].dims, spread.cuts.get(number, ()), strict=False
        ):
            classes = {c for c in equations.dims.classes(dim) if view.roles.of.get(c) == "batch"}
            for axis in names if classes else ():
                axes.setdefault(axis, (set(), spread.sizes[axis]))[0].update(classes)
    return axes


def _and_at(count: int) -> str:
    return f" and at {counted(count, 'more line')}" if count else ""


def _whole_arrays(view: View, axis: str, batch: set[int]) -> Iterator[tuple[int, str, str]]:
    """Yield (bytes, line, the constraint that cuts it) of what has the batch and an axis leaves.

    These are large results of products and constraints.
    """
    equations, spread = view.equations, view.spread
    for operation, _ in _computing(equations.body):
        for number in operation.outputs:
            cuts = spread.cuts.get(number)
            if cuts is None or any(axis in names for names in cuts):
                continue
            dims = equations.values[number].dims
            places = [
                place
                for place, dim in enumerate(dims)
                if batch.intersection(equations.dims.classes(dim))
            ]
            size = spread.bytes(number)
            if places and size >= view.large:
                entries = [*cuts]
                entries[places[0]] = (*entries[places[0]], axis)
                yield size, operation.line, _constraint_of(map(spread.named, entries))


def _whole_routes(view: View) -> Iterator[Finding]:
    """Yield the masks of routed tokens that no constraint cuts by the batch.

    XLA computes `top_k` of the whole batch, and what is made of it alone, and cuts these as the
    product with the tokens is cut, by experts: so it gathers the tokens for that product.
    """
    spread = view.spread
    masks: dict[str, tuple[int, int]] = {}
    for operation, routed in spread.routes:
        (tokens,) = {*operation.inputs} - {routed}
        masks.setdefault(operation.line, (routed, spread.bytes(tokens or 0)))
    rows = {line: row for line, row in masks.items() if row[1] >= view.large}
    for line, (routed, size) in list(rows.items())[:1]:
        more = _and_at(len(rows) - 1)
        constraint = _constraint_of(map(spread.named, spread.cuts.get(routed, ())))
        yield _warning(
            "whole-batch",
            f"nothing cuts by the batch what top_k has chosen: for the product at {line}{more} XLA "
            f"gathers {bytes_shown(size)} of each device's tokens instead of exchanging them",
            f"constrain the masks, before the product: {constraint}",
            bytes=size,
            mend=constraint,
        )


def _constraint_of(cuts: Iterable[tuple[str, ...]]) -> str:
    """Return the line that cuts an array by these axes."""
    return constraint_line(spec_shown(entries_of_cuts(cuts)))


def _gathered_state(view: View) -> Iterator[Finding]:
    """Yield what products of the optimizer gather, such as the matrices of Muon."""
    lines: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for sent in view.spread.sent:
        if (
            sent.kind == "all-gather"
            and sent.operation.name == "dot_general"
            and sent.value not in view.roles.weights
            and all(n is not None and view.roles.is_like_weights(n) for n in sent.operation.inputs)
        ):
            lines[sent.operation.line, view.spread.named(sent.axes)] += sent.payload * sent.trips
    for (line, axes), size in lines.items():
        if size >= view.large:
            yield _warning(
                "gathered-state",
                f"a product of the optimizer gathers matrices over {','.join(axes)}: "
                f"{bytes_shown(size)} on each device in a step, at {line}",
                "give each device whole matrices, cut along layers or experts, with a constraint "
                "before the product",
                bytes=size,
                mend=constraint_line("P(...)"),
            )
