"""`Schedule`, the assumptions of `Plan.traffic`, and `Transmission`, a collective of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Final, Literal, NamedTuple, cast, get_args

from shardrules._base.arguments import (
    as_tuple,
    boolean,
    check_choice,
    check_items,
    check_real,
    check_type,
    integer,
    strings,
)
from shardrules._base.dtypes import given_bits
from shardrules._base.text import brief, mesh_shown, record
from shardrules._plan.axis_uses import data_axes_among
from shardrules._plan.roles import DIM_ROLES, DimRole

Reduce = Literal["reduce-scatter", "all-reduce"]
InputGradients = Literal["once", "each"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The arguments of `Plan.traffic`, checked; each is an assumption."""

    tokens: int
    batch_axes: tuple[str, ...]
    gathers: int = 2
    accumulate: int = 1
    reduce: Reduce = "reduce-scatter"
    zero1: str | None = None
    gradients: Any = None
    activations: Any = "bfloat16"
    sequence_parallel: bool = False
    input_gradients: InputGradients = "once"
    experts_per_token: int | None = None
    capacity_factor: float = 1.0
    roles: Mapping[str, tuple[DimRole, ...]] | None = None

    @property
    def assumptions(self) -> dict[str, Any]:
        """Each argument by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def tokens_per_device(self, axis_sizes: Mapping[str, int]) -> int:
        """Tokens of a step on the device that has most."""
        return -(-self.tokens // prod(axis_sizes[axis] for axis in self.batch_axes))


def schedule_of(
    axis_sizes: Mapping[str, int],
    *,
    tokens: int,
    batch_axes: Iterable[str] | None,
    roles: Mapping[str, Sequence[DimRole]] | None,
    **arguments: Any,
) -> Schedule:
    """Return the schedule on a mesh with these axes, of what a user gives."""
    named = data_axes_among(axis_sizes) if batch_axes is None else strings("batch_axes", batch_axes)
    checked = {
        name: check(name, arguments[name]) for name, check in _CHECKS.items() if name in arguments
    }
    zero1 = checked.get("zero1")
    for name, axes in {"batch_axes": named, "zero1": () if zero1 is None else (zero1,)}.items():
        if absent := [axis for axis in axes if axis not in axis_sizes]:
            raise ValueError(f"{name}: the mesh {mesh_shown(axis_sizes)} has no axis {absent[0]!r}")
    if len(set(named)) < len(named):
        raise ValueError(f"batch_axes is {brief(named)}; it must have each axis once")
    return Schedule(
        tokens=integer("tokens", tokens, 1),
        batch_axes=named,
        roles=None if roles is None else _roles(roles),
        **checked,
    )


def _roles(roles: Mapping[str, Sequence[DimRole]]) -> dict[str, tuple[DimRole, ...]]:
    check_type("roles", roles, Mapping, "a dict such as {'w2$': ('in', 'out')}")
    check_items("roles: a pattern", tuple(roles), str, "a regex")
    named = {pattern: as_tuple("roles", dims, "roles") for pattern, dims in roles.items()}
    for dims in named.values():
        for role in dims:
            check_choice("roles: a role", role, DIM_ROLES[:-1])
    return named


def _positive_count(name: str, value: Any) -> int:
    return integer(name, value, 1)


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else integer(name, value, 1)


def _axis(name: str, value: Any) -> str | None:
    check_type(name, value, str | None, "a mesh axis or None")
    return cast("str | None", value)


def _dtype_name(name: str, value: Any) -> Any:
    given_bits(name, value)
    return value


def _dtype_or_none(name: str, value: Any) -> Any:
    return None if value is None else _dtype_name(name, value)


def _capacity_factor(name: str, value: Any) -> float:
    check_real(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} is {brief(value)}; it must be a number above 0")
    return float(value)


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        check_choice(name, value, choices)
        return cast("str", value)

    return check


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "gathers": _positive_count,
    "accumulate": _positive_count,
    "reduce": _choice(*get_args(Reduce)),
    "zero1": _axis,
    "gradients": _dtype_or_none,
    "activations": _dtype_name,
    "sequence_parallel": boolean,
    "input_gradients": _choice(*get_args(InputGradients)),
    "experts_per_token": _count_or_none,
    "capacity_factor": _capacity_factor,
}
"""By argument, the function of its name and value that checks it and makes it what is used."""


CollectiveKind = Literal[
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"
]
Of = Literal["params", "gradients", "activations", "experts"]
Row = tuple[CollectiveKind, Iterable[str], Of, int, int]
"""(collective, axes, of, count, payload), as in `Transmission`."""


@record
class Transmission(NamedTuple):
    """Collectives of a training step that are alike; a row of `Traffic`.

    Example:
        >>> import jax, shardrules as sr
        >>> tree = {"w": jax.ShapeDtypeStruct((512, 512), "float32")}
        >>> first, *_ = sr.plan(tree, [("w", "fsdp")], {"fsdp": 8}).traffic(tokens=4096, gathers=1)
        >>> first.collective, first.axes, first.of, first.payload, first.sent
        ('all-gather', ('fsdp',), 'params', 1048576, 917504)
    """

    collective: CollectiveKind
    axes: tuple[str, ...]
    """The mesh axes over which it runs, in the mesh's order."""
    of: Of
    count: int  # type: ignore[assignment]
    """How many of them there are in a step, before the compiler combines any."""
    payload: int
    """Bytes of all of them on a device: the whole result of an all-gather, the operand of all
    others."""
    sent: int
    """Bytes that each device sends in a step by the ring algorithm: of n devices, (n - 1) / n of
    the payload, twice that for an all-reduce, and all of it for a collective-permute."""


def merged(
    rows: Iterable[Row],
    axis_sizes: Mapping[str, int],
    named: Callable[[Iterable[str]], tuple[str, ...]] = tuple,
) -> tuple[Transmission, ...]:
    """Merge (collective, axes, purpose, count, payload) rows that are alike.

    Rows over a single device, or without bytes, are left out. Those of parameters come first, those
    that send most first of their own. `named` gives the mesh's names of axes that are its parts.
    """
    payloads: Counter[tuple[CollectiveKind, tuple[str, ...], Of]] = Counter()
    counts = payloads.copy()
    for collective, axes, purpose, count, payload in rows:
        names = frozenset(axes)
        group = tuple(axis for axis, size in axis_sizes.items() if axis in names and size > 1)
        if group and payload:
            payloads[collective, group, purpose] += payload
            counts[collective, group, purpose] += count
    total: dict[tuple[CollectiveKind, tuple[str, ...], Of], Transmission] = {}
    for (collective, group, purpose), payload in payloads.items():
        sent = _ring(collective, payload, prod(axis_sizes[axis] for axis in group))
        key = collective, named(group), purpose
        row = total.get(key, Transmission(*key, 0, 0, 0))
        total[key] = row._replace(
            count=row.count + counts[collective, group, purpose],
            payload=row.payload + payload,
            sent=row.sent + sent,
        )
    order = ("params", "gradients", "activations", "experts")
    return tuple(sorted(total.values(), key=lambda row: (order.index(row.of), -row.sent, row.axes)))


def _ring(collective: CollectiveKind, payload: int, devices: int) -> int:
    if collective == "collective-permute":
        return payload
    rounds = 2 if collective == "all-reduce" else 1
    return -(-payload * rounds * (devices - 1) // devices)
