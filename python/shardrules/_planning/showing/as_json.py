"""Plans and sweeps as JSON objects, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardrules._planning.kinds import dtype_shown, problem_shown
from shardrules._printable import printable_json
from shardrules._specs import spec_shown

if TYPE_CHECKING:
    from shardrules._planning.asking.budget import DeviceBytes, Room
    from shardrules._planning.asking.step_time import StepTime
    from shardrules._planning.asking.sweep import Sweep
    from shardrules._planning.plan import Plan


def sweep_json(rows: Sweep) -> str:
    """Returns the sweep as a JSON object: a row for each mesh, the best first; assumptions."""
    contents = [{**row._asdict(), "time": row.time and _time_content(row.time)} for row in rows]
    return printable_json({"rows": contents, "assumptions": rows.assumptions})


def _time_content(time: StepTime) -> dict[str, Any]:
    content = time._asdict()
    del content["assumptions"]
    sent = [{"axes": axes, "seconds": seconds} for axes, seconds in time.sent.items()]
    return {**content, "sent": sent, "dominant": time.dominant}


def plan_json(plan: Plan, memory: DeviceBytes, room: Room, time: StepTime | None) -> str:
    """Returns the plan as a JSON object, with a row for each folded path.

    Args:
        plan: The plan.
        memory: Its bytes on each device.
        room: The memory that there is, for the key "fits". Without any there is no such key.
        time: The time of a step, for the key "time"; None for no such key.
    """
    leaves = [
        {
            "path": row.pattern,
            "leaves": len(row.rows),
            "shape": kind.shape,
            "dtype": dtype_shown(kind),
            "rule": kind.rule,
            **({} if kind.names is None else {"names": kind.names, "rules": kind.dim_rules}),
            "spec": spec_shown(kind.spec),
            "memory_kind": kind.memory_kind,
            "problem": problem_shown(kind),
            "bytes": kind.bytes * len(row.rows),
            "device_bytes": kind.device_bytes * len(row.rows),
            "lost": [loss.message for loss in kind.losses],
        }
        for row in plan.folded
        for kind in (plan.kinds[row.group],)
    ]
    parts = {name: int(part.max()) for name, part in zip(memory._fields, memory, strict=True)}
    content: dict[str, Any] = {
        "mesh": plan.axis_sizes,
        "leaves": len(plan),
        "bytes": plan.total_bytes,
        "device_bytes": {"total": memory.max, **parts},
        "fingerprint": plan.fingerprint(),
        "folded": leaves,
    }
    if (fits := room.fits(memory)) is not None:
        content["fits"] = fits
    if time is not None:
        content["time"] = {**_time_content(time), "assumptions": time.assumptions}
    return printable_json(content)
