"""Bytes of the leaves of a plan, in the order of its paths."""

import shardrules as sr


def shard_bytes(plan: sr.Plan) -> list[int]:
    """Returns the bytes of each leaf on the device that holds most of it."""
    return [plan.kinds[kind].device_bytes for kind in plan.kind_of]
