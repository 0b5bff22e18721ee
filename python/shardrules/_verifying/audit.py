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
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules._arguments import check_tree, check_type, in_order
from shardrules._dtypes import bits_of
from shardrules._format import counted, mesh_shown
from shardrules._planning.asking.findings import Finding, Findings
from shardrules._planning.fold import fold
from shardrules._planning.kinds import axes_used, dtype_shown, placement_shown
from shardrules._planning.plan import Plan
from shardrules._sharding.agreement import JointCall
from shardrules._sharding.device_bytes import held_of
from shardrules._sharding.leaf_rows import DEVICES, Row
from shardrules._sharding.mesh import has_devices, has_own_devices
from shardrules._verifying.fault_words import (
    extra_leaves,
    finding_of,
    fix_of_structure,
    missing_leaves,
    without_devices,
)
from shardrules._verifying.faults import Fault, PlannedKinds
from shardrules._verifying.live import Live, fields_of, is_committed, live_leaves

if TYPE_CHECKING:
    from shardrules._verifying.live import Fields

    _Case = tuple[Fields, int]
    """Leaves that are alike: the fields of `Live`, and the index of their kind in the plan."""

__all__ = ["audit"]


@in_order("tree", "plan")
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
        if has_own_devices(plan.mesh):
            call.alone()
        audited = _Audited(tree, plan)
        if call.joint and audited.is_of_this_process:
            call.alone()
        call.agree(audited.rows)
    return Findings(audited.findings(), audited.scope)


class _Audited:
    """A tree beside its plan."""

    def __init__(self, tree: Any, plan: Plan) -> None:
        self._columns = plan._columns
        self._pairs = live_leaves(tree, self._columns.leaves)
        self._fields = fields_of(self._pairs.found)
        self._planned = PlannedKinds(plan.axis_sizes, plan.mesh, map(itemgetter(0), self._fields))
        self._has_devices = has_devices(plan.mesh)

    @property
    def is_of_this_process(self) -> bool:
        """Whether all devices belong to this process."""
        mesh = self._planned.mesh
        return mesh is not None and has_own_devices(mesh)

    @property
    def scope(self) -> str:
        """What is looked at, in words."""
        mesh = mesh_shown(self._columns.axis_sizes) or "one device"
        return f"{counted(len(self._pairs.found), 'leaf')}, on {mesh}"

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
            yield without_devices(mesh_shown(self._columns.axis_sizes))

    def _of_fault(self, fault: Fault, indices: list[int], *, is_cut: bool) -> Finding:
        cases, kinds = Counter(self._cases[index] for index in indices), self._columns.kinds
        rules = {kinds[kind].rule for _, kind in cases}
        return finding_of(
            fault,
            paths=self._folded([self._pairs.rows[index] for index in indices]),
            leaves=len(indices),
            rule=rules.pop() if len(rules) == 1 else None,
            held=sum(_held(Live(*live)) * count for (live, _), count in cases.items()),
            planned=sum(kinds[kind].device_bytes * count for (_, kind), count in cases.items()),
            is_cut=is_cut,
            has_devices=self._has_devices,
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
        separator = columns.leaves.paths_dialect.separator
        fix = fix_of_structure([columns.paths[row] for row in missing], list(extra), separator)
        if missing:
            held = int(columns.device_bytes[missing].sum())
            yield missing_leaves(self._folded(missing), len(missing), held, fix)
        if extra:
            folded = fold(list(extra), np.zeros(len(extra), np.int32))
            paths = tuple(one.pattern for one in folded)
            yield extra_leaves(paths, len(extra), sum(extra.values()), fix)

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


def _held(live: Live) -> int:
    """Bytes of a leaf on the device that holds most of it."""
    if isinstance(live.where, str):
        return 0
    shape, bits = live.shape or (), bits_of(live.dtype)
    mesh, spec = getattr(live.where, "mesh", None), getattr(live.where, "spec", None)
    if mesh is not None and spec is not None:
        return held_of(shape, bits, spec, mesh.shape).most
    return -(-prod(live.where.shard_shape(shape)) * bits // 8)
