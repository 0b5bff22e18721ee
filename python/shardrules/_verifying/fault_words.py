"""How faults of live leaves are told: a kind of finding, a level, a message and a fix for each.

Costs nothing but text. Must not know how a fault is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from shardrules._format import bytes_shown, counted
from shardrules._planning.asking.defaults import DEFAULT_LARGE
from shardrules._planning.asking.findings import Finding, Level, VerifyKind

if TYPE_CHECKING:
    from shardrules._verifying.faults import Fault, FaultKind

__all__ = ["extra_leaves", "finding_of", "fix_of_structure", "missing_leaves", "without_devices"]


class _Words(NamedTuple):
    """How a fault is told; the fields in braces are those of `finding_of`."""

    kind: VerifyKind
    message: str
    fix: str
    level: Level = "error"


_PLACE: Final = (
    "place them by shardrules.shard(tree, {shardings}), or have jit make them with "
    "out_shardings={shardings}"
)
_WORDS: Final[dict[FaultKind, _Words]] = {
    "unplanned": _Words(
        "unplanned", "the plan has no place for {leaves}: {planned}", "mend the rules: plan.check()"
    ),
    "type": _Words(
        "type",
        "{leaves} {are} {found}, planned {planned}: {held} on each device, planned {budget}",
        "plan the tree that is there, or make the one that was planned",
    ),
    "narrowed": _Words(
        "type",
        "{leaves} {are} {found}, planned {planned}, since jax_enable_x64 is not set",
        "plan what jax.eval_shape gives, whose bytes are those on the devices",
        "info",
    ),
    "deleted": _Words(
        "deleted",
        "{leaves} {are} deleted, by donation or by hand; planned {planned}",
        "audit what the call that they were donated to returned",
    ),
    "abstract": _Words(
        "unknown",
        "{leaves} {are} abstract and without sharding, so nothing is known; planned {planned}",
        "audit the arrays themselves, or abstract ones with their shardings",
    ),
    "host": _Words(
        "unplaced",
        "{leaves} {are} in this process's memory and on no device; planned {planned}",
        _PLACE,
    ),
    "uncommitted": _Words(
        "unplaced",
        "{leaves} {are} whole on a device that JAX chose; planned on {planned}",
        _PLACE,
    ),
    "devices": _Words("devices", "{leaves} {are} on {found}; planned on {planned}", _PLACE),
    "order": _Words(
        "devices",
        "{leaves} {are} on the plan's devices in another order, as {found}; planned {planned}",
        "make the mesh once and give it to all; or " + _PLACE,
    ),
    "memory-kind": _Words(
        "memory-kind",
        "{leaves} {are} in {found} memory, planned in {planned} memory",
        "move them by shardrules.shard(tree, {shardings}); or, if they are meant to be there, name "
        "it in their rule: RuleSpec(..., memory_kind={found!r})",
    ),
    "sharding": _Words(
        "sharding",
        "{leaves} {are} sharded as {found}, planned {planned}: {held} on each device, planned "
        "{budget}",
        _PLACE,
    ),
}


def finding_of(
    fault: Fault,
    *,
    paths: tuple[str, ...],
    leaves: int,
    rule: int | None,
    held: int,
    planned: int,
    is_cut: bool,
    has_devices: bool,
) -> Finding:
    """The finding of a fault.

    Args:
        fault: The fault.
        paths: The folded paths of its leaves.
        leaves: How many leaves have it.
        rule: The rule that decides them all, if it is one.
        held: Bytes of them on the device that holds most.
        planned: The planned bytes on that device.
        is_cut: Whether the plan cuts them.
        has_devices: Whether the plan's mesh has devices.
    """
    words = _WORDS[fault.kind]
    at_stake = held - planned if held > planned else planned
    is_small = words.kind == "unplaced" and not is_cut and at_stake < DEFAULT_LARGE
    told = {
        "leaves": counted(leaves, "leaf"),
        "are": _are(leaves),
        "found": fault.found,
        "planned": fault.planned,
        "held": bytes_shown(held),
        "budget": bytes_shown(planned),
        "shardings": f"plan{'' if has_devices else '.on_mesh(mesh)'}.shardings()",
    }
    level: Level = "warning" if is_small else words.level
    message, fix = words.message.format(**told), words.fix.format(**told)
    return Finding(level, words.kind, message, paths, leaves, rule, at_stake, fix)


def missing_leaves(paths: tuple[str, ...], leaves: int, held: int, fix: str) -> Finding:
    """The finding of arrays that the plan alone has."""
    message = f"the tree lacks {counted(leaves, 'array')} of the plan"
    return Finding("error", "structure", message, paths, leaves, None, held, fix)


def extra_leaves(paths: tuple[str, ...], leaves: int, held: int, fix: str) -> Finding:
    """The finding of arrays that the tree alone has."""
    message = f"{counted(leaves, 'array')} of the tree {_are(leaves)} not in the plan"
    return Finding("error", "structure", message, paths, leaves, None, held, fix)


def fix_of_structure(missing: list[str], extra: list[str], separator: str) -> str:
    """What to do about these paths of the plan alone, and these of the tree alone."""
    if under := _under(missing, extra, separator):
        return f"the plan's leaves are under {under!r} in the tree: audit that part of it"
    if under := _under(extra, missing, separator):
        return f"the tree's leaves are under {under!r} in the plan: audit the whole tree"
    return "audit the tree that was planned, or plan this one"


def without_devices(axes: str) -> Finding:
    """The finding that a plan on these axes has no devices to compare with."""
    message = f"the plan's mesh {axes} has no devices: the mesh of most of the arrays counts"
    fix = "give the mesh of devices: audit(tree, plan.on_mesh(mesh))"
    return Finding("info", "devices", message, (), 0, None, 0, fix)


def _under(paths: list[str], others: list[str], separator: str) -> str | None:
    """Where in the other tree all of these paths are; None if they are not in one place."""
    if not paths:
        return None
    end = f"{separator}{paths[0]}"
    found = next((other for other in others if other.endswith(end)), None)
    if found is None:
        return None
    under, known = found.removesuffix(end), set(others)
    return under if all(f"{under}{separator}{path}" in known for path in paths) else None


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
