"""`audit`: live arrays that are not sharded, placed or kept in the memory that a plan says.

Costs a walk over the tree and a look at each array; all else is done once for each kind of leaves
and sharding. Must not know how a plan was made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._arguments import check_tree, check_type
from shardrules._dtypes import bits_of
from shardrules._format import bytes_shown, counted, mesh_shown
from shardrules._planning.asking.check import DEFAULT_LARGE
from shardrules._planning.asking.findings import Finding, Findings, Level, VerifyKind
from shardrules._planning.fold import fold
from shardrules._planning.kinds import axes_used, dtype_shown, placement_shown
from shardrules._planning.plan import Plan
from shardrules._sharding.agreement import JointCall
from shardrules._sharding.leaf_rows import DEVICES, Row
from shardrules._sharding.mesh import has_devices, has_own_devices
from shardrules._verifying.faults import Fault, FaultKind, Planned
from shardrules._verifying.live import Live, fields_of, is_committed, pairs_of

if TYPE_CHECKING:
    from shardrules._verifying.live import Fields

    _Case = tuple[Fields, int]
    """Leaves that are alike: the fields of `Live`, and the index of their kind in the plan."""

__all__ = ["audit"]


def audit(tree: Any, plan: Plan) -> Findings:
    """Compares live arrays with a plan: where they are, how they are sharded, in which memory.

    Nothing is moved, and no data is read. Shardings that cut alike are equal, whatever they are
    called: `P("tp")` and `P(("tp",), None)`, or a mesh axis of one device. In several processes,
    each process calls this with its tree; all get the same findings.

    | kind | level | what |
    |---|---|---|
    | structure | error | leaves of the plan that the tree lacks; leaves that the plan lacks |
    | unplanned | error | leaves that the plan has no place for; `Plan.check` says why |
    | type | error, info | leaves of another shape or dtype; info if only `jax_enable_x64` makes the
      difference |
    | deleted | error | arrays that were donated to a call, or deleted |
    | unknown | error | abstract arrays without a sharding |
    | unplaced | error, warning | numpy arrays and numbers, and arrays on a device that JAX chose;
      a warning if the plan replicates them and they are not large together (16 MiB) |
    | devices | error, info | arrays on other devices than those of the plan's mesh, or in another
      order of them; info that the plan's mesh has no devices to compare with |
    | memory-kind | error | arrays in another memory |
    | sharding | error | arrays that are sharded otherwise |

    Args:
        tree: A tree like the one that was planned: of jax.Arrays, or of abstract arrays with
            shardings. Its leaves are found by their paths if its structure is another.
        plan: The plan of such a tree; of an optimizer's state, that of `Plan.for_optimizer`. If its
            mesh has no devices, the arrays are compared on their own mesh.

    Returns:
        All findings, the worst first. `Finding.bytes` are what a device holds beyond the plan, or,
        if that is nothing, what it has to receive.

    Raises:
        TypeError: It is not a plan, not a tree of arrays, or the call is inside jit.
        RuntimeError: In several processes: what they have differs, and the message names the first
            path; or as `shard`.

    Example:
        >>> import jax, numpy as np, shardrules as sr
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tp",))
        >>> tree = {"w": np.ones((8, 8), "float32")}
        >>> plan = sr.plan(tree, [("w", "tp")], mesh)
        >>> [(finding.level, finding.kind) for finding in sr.audit(tree, plan)]
        [('error', 'unplaced')]
        >>> sr.audit(sr.shard(tree, plan.shardings()), plan).raise_for("error")
    """
    with JointCall("audit") as call:
        check_tree("tree", tree)
        check_type("plan", plan, Plan, "a Plan, as shardrules.plan makes one")
        if has_devices(plan.mesh) and has_own_devices(plan.mesh):
            call.alone()
        audited = _Audited(tree, plan)
        if call.joint and audited.is_of_this_process:
            call.alone()
        call.agree(audited.rows)
    return Findings(audited.findings())


class _Words(NamedTuple):
    """How a fault is told; the fields in braces are those of `_Audited._of_fault`."""

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


class _Audited:
    """A tree beside its plan."""

    def __init__(self, tree: Any, plan: Plan) -> None:
        self._columns = plan._columns
        self._pairs = pairs_of(tree, self._columns.leaves)
        self._fields = fields_of(self._pairs.found)
        self._planned = Planned(plan.axis_sizes, plan.mesh, map(itemgetter(0), self._fields))
        self._has_devices = has_devices(plan.mesh)

    @property
    def is_of_this_process(self) -> bool:
        """Whether all devices belong to this process."""
        mesh = self._planned.mesh
        return mesh is not None and has_own_devices(mesh)

    @cached_property
    def _cases(self) -> list[_Case]:
        """Per leaf that is in both."""
        kinds = self._columns.kind_of[self._pairs.rows].tolist()
        return list(zip(self._fields, kinds, strict=True))

    @cached_property
    def _faults(self) -> dict[_Case, tuple[Fault, ...]]:
        return {
            (live, kind): tuple(self._planned.faults(Live(*live), self._columns.kinds[kind]))
            for live, kind in set(self._cases)
        }

    def _faults_of(self, index: int) -> Iterator[Fault]:
        """The faults of one leaf."""
        for fault in self._faults[self._cases[index]]:
            is_chosen = fault.kind == "devices" and not is_committed(self._pairs.found[index])
            yield Fault("uncommitted", "", fault.planned) if is_chosen else fault

    def findings(self) -> Iterator[Finding]:
        """All of them, in any order."""
        yield from self._of_structure()
        leaves_of: dict[tuple[Fault, bool], list[int]] = defaultdict(list)
        if any(self._faults.values()):
            for index, (_, kind) in enumerate(self._cases):
                for fault in self._faults_of(index):
                    leaves_of[fault, self._is_cut(kind)].append(index)
        for (fault, is_cut), indices in leaves_of.items():
            yield self._of_fault(fault, indices, is_cut=is_cut)
        if not self._has_devices and self._planned.mesh is not None:
            yield _without_devices(mesh_shown(self._columns.axis_sizes))

    def _of_fault(self, fault: Fault, indices: list[int], *, is_cut: bool) -> Finding:
        words, cases = _WORDS[fault.kind], Counter(self._cases[index] for index in indices)
        held = sum(_held(Live(*live)) * count for (live, _), count in cases.items())
        kinds = self._columns.kinds
        planned = sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items())
        at_stake = held - planned if held > planned else planned
        told = {
            "leaves": counted(len(indices), "leaf"),
            "are": _are(len(indices)),
            "found": fault.found,
            "planned": fault.planned,
            "held": bytes_shown(held),
            "budget": bytes_shown(planned),
            "shardings": f"plan{'' if self._has_devices else '.on_mesh(mesh)'}.shardings()",
        }
        is_small = words.kind == "unplaced" and not is_cut and at_stake < DEFAULT_LARGE
        rules = {kinds[kind].rule for _, kind in cases}
        return Finding(
            "warning" if is_small else words.level,
            words.kind,
            words.message.format(**told),
            self._folded([self._pairs.rows[index] for index in indices]),
            len(indices),
            rules.pop() if len(rules) == 1 else None,
            at_stake,
            words.fix.format(**told),
        )

    def _of_structure(self) -> Iterator[Finding]:
        """Arrays of the plan alone, and of the tree alone."""
        columns, pairs = self._columns, self._pairs
        missing = [
            row for row in pairs.missing if columns.kinds[columns.kind_of[row]].shape is not None
        ]
        lives = map(Live._make, fields_of(list(pairs.extra.values())))
        extra = {
            path: _held(live)
            for path, live in zip(pairs.extra, lives, strict=True)
            if live.shape is not None and live.dtype is not None
        }
        absent = [columns.paths[row] for row in missing]
        fix = _fix_of_structure(absent, list(extra), columns.leaves.paths_dialect.separator)
        if missing:
            lacks = f"{counted(len(missing), 'array')} of the plan's {len(columns.paths):,} leaves"
            held = int(columns.device_bytes[missing].sum())
            paths = self._folded(missing)
            yield _structure(f"the tree lacks {lacks}", paths, len(missing), held, fix)
        if extra:
            has = f"{counted(len(extra), 'array')} of the tree {_are(len(extra))} not in the plan"
            folded = fold(list(extra), np.zeros(len(extra), np.int32))
            paths = tuple(one.pattern for one in folded)
            yield _structure(has, paths, len(extra), sum(extra.values()), fix)

    def _is_cut(self, kind: int) -> bool:
        return bool(axes_used(self._columns.kinds[kind].spec, self._columns.axis_sizes))

    def _folded(self, rows: list[int]) -> tuple[str, ...]:
        """Folded paths of these rows of the plan, those with most bytes first."""
        columns = self._columns
        folded = fold([columns.paths[row] for row in rows], columns.kind_of[rows])
        held = [kind.device_bytes for kind in columns.kinds]
        folded.sort(key=lambda one: -held[one.group] * len(one.rows))
        return tuple(one.pattern for one in folded)

    def rows(self) -> list[Row]:
        """What processes must have alike: of each leaf its path, and what there is of it."""
        texts = {row: self._text(index) for index, row in enumerate(self._pairs.rows)}
        planned = enumerate(self._columns.paths)
        rows = [(path, texts.get(row, "not in the tree")) for row, path in planned]
        rows += [(path, "not in the plan") for path in self._pairs.extra]
        mesh = self._planned.mesh
        ids = "" if mesh is None else " ".join(str(one.id) for one in mesh.devices.flat)
        return [*rows, (DEVICES, ids)]

    def _text(self, index: int) -> str:
        kind = self._columns.kinds[self._cases[index][1]]
        planned = f"{dtype_shown(kind)}{list(kind.shape or ())} {placement_shown(kind)}"
        faults = [f"{fault.kind} {fault.found}".strip() for fault in self._faults_of(index)]
        return f"{', '.join(faults) or 'as planned'}: planned {planned}"


def _structure(message: str, paths: tuple[str, ...], leaves: int, held: int, fix: str) -> Finding:
    return Finding("error", "structure", message, paths, leaves, None, held, fix)


def _fix_of_structure(missing: list[str], extra: list[str], separator: str) -> str:
    if under := _under(missing, extra, separator):
        return f"the plan's leaves are under {under!r} in the tree: audit that part of it"
    if under := _under(extra, missing, separator):
        return f"the tree's leaves are under {under!r} in the plan: audit the whole tree"
    return "audit the tree that was planned, or plan this one"


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


def _held(live: Live) -> int:
    """Bytes of a leaf on each device that it is on."""
    if isinstance(live.where, str):
        return 0
    return -(-prod(live.where.shard_shape(live.shape or ())) * bits_of(live.dtype) // 8)


def _without_devices(axes: str) -> Finding:
    return Finding(
        "info",
        "devices",
        f"the plan's mesh {axes} has no devices: arrays are compared on the mesh that most of them "
        "are on",
        (),
        0,
        None,
        0,
        "give the mesh of devices: audit(tree, plan.on_mesh(mesh))",
    )
