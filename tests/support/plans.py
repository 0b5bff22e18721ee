"""What is compared of a plan: the cuts of a spec, and the bytes of leaves."""

from typing import Any

import shardrules as sr


def cuts(spec: Any) -> tuple[Any, ...]:
    """Return a spec's entries without the whole dimensions at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def shard_bytes(plan: sr.Plan) -> list[int]:
    """Return the bytes of each leaf on the device that holds most of it, in the order of the plan's paths."""
    return [plan.kinds[kind].device_bytes for kind in plan.kind_of]
