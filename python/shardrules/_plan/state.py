"""Plans that follow a plan of parameters: the optimizer's state, with ZeRO-1."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.dtypes import is_inexact
from shardrules._base.mistakes import check_arrays
from shardrules._base.rule_specs import MemoryKind
from shardrules._base.specs import (
    Dim,
    Entries,
    entries_of,
    entry_axes,
    entry_of,
    is_unconstrained,
    with_dims,
    with_entries,
)
from shardrules._base.text import brief
from shardrules._place.boxes import unboxed
from shardrules._place.mesh import has_devices
from shardrules._place.shardings import check_memory_on_mesh
from shardrules._plan.align import check_distinct
from shardrules._plan.kinds import REPLICATED, Fit, Kind, Spec, axes_named, kind_with_bytes
from shardrules._plan.leaves import (
    NO_RULE_NEEDED,
    LeafType,
    Leaves,
    grouped,
    names_in_boxes,
    survey,
)
from shardrules._plan.resolve import PutOnMesh, SizedMesh, bound_rules
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.resolver import checked_names
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan


_Shape = tuple[int, ...]

# Where the dimension that the factor lacks stands in `np.argsort(shape)` of its parameter; as in
# `optax.scale_by_factored_rms`.
_FACTORS: Final = {"v_row": -1, "v_col": -2}
_FACTOR: Final = re.compile(rf"({'|'.join(_FACTORS)})\W*$")
_COLLECTION: Final = "params"
"""Name of flax's collection of the parameters."""
_NONE: Final = -1
"""In the place of a parameter's row or kind."""


class Followed(NamedTuple):
    """What a leaf of a state follows."""

    row: int
    """The row of its parameter, or _NONE."""
    factor: int | None
    """The value of `_FACTORS` that its path names, or None."""
    own: tuple[Any, ...] | None
    """What it says itself of its dimensions, if its parameter says otherwise."""


def put_of_state(
    params: Plan, state: Any, *, zero1: str | None, memory_kind: MemoryKind | None
) -> PutOnMesh:
    """Walk an optimizer's state, find its parameters, and return what puts it on a mesh."""
    is_boxed = isinstance(params.rules, LogicalRules)
    leaves = survey(
        unboxed(state).tree if is_boxed else state, Rules((), params._leaves.paths_dialect)
    )
    if all(leaf.shape is None for leaf in leaves.types):
        check_arrays("state", state)
    names = names_in_boxes(state, leaves.tree)
    followed = _find_parameters(params._leaves, leaves, names)
    return functools.partial(
        _put_state, params, leaves, followed, zero1=zero1, memory_kind=memory_kind
    )


def _put_state(
    params: Plan,
    leaves: Leaves,
    followed: list[Followed],
    mesh: SizedMesh,
    *,
    zero1: str | None,
    memory_kind: MemoryKind | None,
) -> tuple[Leaves, list[Kind]]:
    """Put an optimizer's state on the mesh, where its parameters may stand already."""
    if has_devices(mesh.form):
        check_memory_on_mesh("for_optimizer", memory_kind, mesh.form)
    params = params._on(mesh)
    if zero1 is not None and zero1 not in params.axis_sizes:
        raise ValueError(f"zero1: the mesh {params.axis_sizes} has no axis {zero1!r}")
    is_state = [False] * len(leaves.paths)
    if zero1 is not None or memory_kind is not None:
        for row in leaves.optimizer_rows or range(len(leaves.paths)):
            is_state[row] = True
    # A row of _NONE is the last, and the kind of it none.
    kind_of_parameter = [*params.kind_of.tolist(), _NONE]
    keys, kind_of = grouped(
        (number, kind_of_parameter[row], factor, own, is_in_state)
        for number, (row, factor, own), is_in_state in zip(
            leaves.kind_of.tolist(), followed, is_state, strict=True
        )
    )
    kinds = [
        _state_kind(
            leaves.types[number],
            None if parameter == _NONE else params.kinds[parameter],
            factor,
            own,
            params,
            zero1=zero1 if is_in_state and parameter != _NONE else None,
            memory_kind=memory_kind if is_in_state else None,
        )
        for number, parameter, factor, own, is_in_state in keys
    ]
    sources = [
        path if each.row == _NONE else params.sources[each.row]
        for path, each in zip(leaves.paths, followed, strict=True)
    ]
    state = replace(
        leaves,
        rules=params.rules,
        sources=sources,
        kind_of=kind_of,
        types=[leaves.types[number] for number, *_ in keys],
        follows_parameters=True,
    )
    return state, kinds


def _find_parameters(
    params: Leaves, state: Leaves, names: Mapping[int, tuple[Any, ...]]
) -> list[Followed]:
    """Find the parameters of the leaves of a state, of which some name their axes themselves."""
    check_distinct(params.paths, "a state finds its parameters by their paths")
    separator = params.paths_dialect.separator
    # A component of `keystr` paths begins with [ or a dot.
    boundary = re.compile(re.escape(separator) if separator else r".(?=[\[.])", re.DOTALL)
    row_of = {**_rows_without_prefix(params, boundary), **params.rows}
    flat_names = functools.cache(lambda: _rows_of_flat_names(params))
    # A module may be called as a field of the state, such as `mu`.
    ends = functools.cache(lambda name: list(_ends_of_path(name, row_of, boundary)))
    choices: list[list[tuple[str, int]]] = []
    for path in state.paths:
        first = next(_ends_of_path(path, row_of, boundary), None)
        if first is None:
            last = max((passed.end() for passed in boundary.finditer(path)), default=0)
            choices.append([(path[:last], _row_of_flat_name(path[last:], flat_names))])
        else:
            start, _ = first
            choices.append([(path[: start + end], row) for end, row in ends(path[start:])])
    rows_behind = _rows_behind(choices) if any(len(each) > 1 for each in choices) else {}
    rows, factors = [], []
    for each in choices:
        # `max` takes the first of equals, which is the longest path.
        prefix, row = max(each, key=lambda choice: len(rows_behind.get(choice[0], ())))
        rows.append(row)
        factor = None if row == _NONE else _FACTOR.search(prefix)
        factors.append(None if factor is None else _FACTORS[factor[1]])
    if params.paths and all(row == _NONE for row in rows):
        _check_no_moments(params, state)
    return list(map(Followed, rows, factors, _own_axes(params, rows, names)))


def _own_axes(
    params: Leaves, rows: list[int], names: Mapping[int, tuple[Any, ...]]
) -> list[tuple[Any, ...] | None]:
    """Return, per leaf of a state, the axes that it names, if its parameter names others."""
    if not names:
        return [None] * len(rows)
    names_of_row = {_NONE: None} | {
        row: params.types[kind].names for row, kind in enumerate(params.kind_of.tolist())
    }
    names_of_row |= names_in_boxes(params.tree, params.tree)
    return [
        None if names.get(place) == names_of_row[row] else names.get(place)
        for place, row in enumerate(rows)
    ]


def _ends_of_path(
    path: str, row_of: Mapping[str, int], boundary: re.Pattern[str]
) -> Iterator[tuple[int, int]]:
    """Yield (where it begins, row) for each end of the path that is a parameter's path."""
    start = 0
    while True:
        if (row := row_of.get(path[start:], _NONE)) != _NONE:
            yield start, row
        if (passed := boundary.search(path, start)) is None:
            return
        start = passed.end()


def _rows_behind(choices: Iterable[list[tuple[str, int]]]) -> dict[str, set[int]]:
    """Return the parameters that leaves may belong to, by what stands before their paths.

    A moment is a tree of all parameters: of two places where it may begin, it does where more of
    them are found.
    """
    rows: dict[str, set[int]] = {}
    for prefix, row in itertools.chain.from_iterable(choices):
        if row != _NONE:
            rows.setdefault(prefix, set()).add(row)
    return rows


def _check_no_moments(params: Leaves, state: Leaves) -> None:
    for path, number in zip(state.paths, state.kind_of.tolist(), strict=True):
        leaf = state.types[number]
        if leaf.shape is not None and prod(leaf.shape) > 1 and is_inexact(leaf.dtype):
            raise ValueError(
                f"no leaf of the state follows a parameter: the state has {brief(path)}, and the "
                f"plan {brief(params.paths[0])}; plan the tree that the optimizer was initialized "
                "with, or give the state of the tree that the plan is of"
            )


def _rows_without_prefix(params: Leaves, boundary: re.Pattern[str]) -> dict[str, int]:
    """Map the parameters' paths to rows, without what begins them all, or flax's `params`.

    Of {"params": params} the optimizer sees params alone. A path that stands for several parameters
    is that of none, unless they are of one kind.
    """
    rows: dict[str, int] = {}
    shared = os.path.commonprefix(params.paths)  # noqa: RUF071 - by characters; cut to components
    common = max((passed.end() for passed in boundary.finditer(shared)), default=0)
    for row, path in enumerate(params.paths):
        first = boundary.search(path)
        end = 0 if first is None else first.end()
        is_collection = path[:end].strip("[]'./") == _COLLECTION
        if start := max(end if is_collection else 0, common):
            _add_unless_ambiguous(rows, path[start:], row, params)
    return rows


def _add_unless_ambiguous(rows: dict[str, int], name: str, row: int, params: Leaves) -> None:
    first = rows.setdefault(name, row)
    if first not in (_NONE, row) and params.kind_of[first] != params.kind_of[row]:
        rows[name] = _NONE


def _rows_of_flat_names(params: Leaves) -> dict[str, int]:
    """Map paths as Keras's optimizers write them to rows: `net_dense_kernel` of net/dense/kernel.

    A name that stands for several parameters is that of none, unless they are of one kind.
    """
    separator = params.paths_dialect.separator or "/"
    rows: dict[str, int] = {}
    for row, path in enumerate(params.paths):
        _add_unless_ambiguous(rows, path.replace(separator, "_"), row, params)
    return rows


def _row_of_flat_name(name: str, rows: Callable[[], Mapping[str, int]]) -> int:
    """Return the row of the longest of these names that `dense_kernel_momentum` begins with."""
    words = name.split("_")
    names = ("_".join(words[:count]) for count in range(len(words) - 1, 0, -1))
    return next((rows()[each] for each in names if each in rows()), _NONE)


def _relation(
    shape: _Shape | None, parameter: Kind, factor: int | None
) -> tuple[tuple[Dim, ...] | None, str]:
    """Relate an array of this shape to its parameter.

    Returns:
        (for each dimension, the parameter's dimension that it is, or None if it is none of them;
        None for an array that does not follow its parameter), and the origin of its spec.
    """
    full = parameter.shape or ()
    all_dims = tuple(range(len(full)))
    if shape == full:
        return all_dims, "the parameter's, same shape"
    if shape is None or prod(shape) == 1:
        return None, "one element for the parameter: not cut"
    pairs = zip(shape, full, strict=False)
    if len(shape) == len(full) and all(own in (1, size) for own, size in pairs):
        dims = tuple(None if own == 1 else dim for dim, own in enumerate(shape))
        return dims, "the parameter's, but for dimensions of size 1"
    if shape[1:] == full:
        return (None, *all_dims), "the parameter's, behind a dimension of its own"
    if (dim := _lacking_dim(shape, parameter, factor)) is not None:
        dims = _dims_without(dim, len(full))
        return dims, f"the parameter's without dim {dim} (factored moment)"
    return None, f"its shape has no known relation to the parameter's {full}: replicated"


def _lacking_dim(shape: _Shape, parameter: Kind, factor: int | None) -> int | None:
    """Return the dimension of the parameter that this shape lacks; None if that is uncertain."""
    full = parameter.shape or ()
    rank = len(full)
    dims = [dim for dim in range(rank) if full[:dim] + full[dim + 1 :] == shape]
    if factor is not None and dims:
        # The very call of optax: on equal sizes the answer is numpy's.
        by_size = int(np.argsort(full)[factor])
        if by_size in dims:
            return by_size
    specs = {_part_of_spec(parameter.spec or Entries(), _dims_without(dim, rank)) for dim in dims}
    return dims[0] if len(specs) == 1 else None


def _dims_without(dim: int, rank: int) -> tuple[int, ...]:
    return tuple(index for index in range(rank) if index != dim)


def _state_kind(
    leaf: LeafType,
    parameter: Kind | None,
    factor: int | None,
    own: tuple[Any, ...] | None,
    params: Plan,
    *,
    zero1: str | None,
    memory_kind: MemoryKind | None,
) -> Kind:
    """Return the kind of leaves that belong to a parameter of this kind, if to any."""
    fit, rule = REPLICATED, NO_RULE_NEEDED
    # What a factored moment says is its parameter's, of more dimensions.
    if own is not None and leaf.shape is not None and len(own) == len(leaf.shape):
        fit, origin = _own_fit(leaf, own, params), f"the axes that the state itself names: {own}"
    elif parameter is None:
        origin = "no parameter is found by its path: replicated"
    else:
        dims, origin = _relation(leaf.shape, parameter, factor)
        if dims is not None:
            fit = _followed_fit(parameter, dims)
            rule = rule if parameter.rule is None else parameter.rule
    if parameter is not None and fit is not REPLICATED:
        memory_kind = memory_kind or parameter.memory_kind
    if zero1 is not None and fit.spec is not None and leaf.shape is not None:
        cut = _cut_by_zero1(zero1, leaf.shape, fit.spec, params.axis_sizes)
        if cut is not None:
            fit = replace(fit, spec=cut)
            origin = f"{origin}, cut by {zero1} too (ZeRO-1)"
    fit = replace(fit, origin=origin, dim_rules=(), lost_rules=(), memory_kind=memory_kind)
    return kind_with_bytes(leaf._replace(rule=rule), fit, params.axis_sizes)


def _own_fit(leaf: LeafType, axes: tuple[Any, ...], params: Plan) -> Fit:
    """Return the fit of an array that names logical axes, or those of the mesh, itself."""
    if isinstance(params.rules, LogicalRules):
        leaf = leaf._replace(names=checked_names(axes))
        return bound_rules(params.rules, params._mesh).kind(leaf)
    rules = Rules(
        [("", axes)], correction=params.rules.correction, optional_axes=params.rules.optional_axes
    )
    fit = bound_rules(rules, params._mesh).kind(leaf._replace(rule=0))
    return fit if fit.losses else replace(fit, wanted=None)  # no rule of the plan says it


def _followed_fit(parameter: Kind, dims: tuple[Dim, ...]) -> Fit:
    """Return the fit of an array that has these of the parameter's dimensions."""
    if dims == tuple(range(len(parameter.shape or ()))):
        return parameter
    wanted, spec, counted = (
        None if spec is None else _part_of_spec(spec, dims)
        for spec in (parameter.wanted, parameter.spec, parameter._counted)
    )
    # Findings about the parameter's losses name the parameter.
    return replace(parameter, wanted=wanted, spec=spec, _counted=counted, losses=())


def _part_of_spec(spec: Spec, dims: tuple[Dim, ...]) -> Spec:
    """Return the entries of these dimensions; none if no axis is left, as `pad` has it."""
    part = with_dims(spec, dims)
    return part if any(entry is not None for entry in entries_of(part)) else with_entries(part, ())


def _cut_by_zero1(
    axis: str, shape: _Shape, spec: Spec, axis_sizes: Mapping[str, int]
) -> Spec | None:
    """Add the axis of ZeRO-1 to the spec; None if it is there already, or nothing divides."""
    entries = [*entries_of(spec), *[None] * (len(shape) - len(spec))]
    if axis_sizes[axis] == 1 or axis in axes_named(spec):
        return None
    part_sizes = {
        dim: size // parts
        for dim, (size, entry) in enumerate(zip(shape, entries, strict=False))
        for parts in [prod(axis_sizes.get(name, 1) for name in entry_axes(entry))]
        if size and size % (parts * axis_sizes[axis]) == 0 and not is_unconstrained(entry)
    }
    if not part_sizes:
        return None
    dim = max(part_sizes, key=part_sizes.__getitem__)
    entries[dim] = entry_of((*entry_axes(entries[dim]), axis))
    return with_entries(spec, entries)
