"""Bytes of single leaves of a plan, in the order of its paths."""

import shardrules as sr


def leaf_bytes(plan: sr.Plan) -> list[int]:
    """Returns the bytes of each whole leaf."""
    return [plan.kinds[kind].bytes for kind in plan.kind_of]


def shard_bytes(plan: sr.Plan) -> list[int]:
    """Returns the bytes of each leaf on the device that holds most of it."""
    return [plan.kinds[kind].device_bytes for kind in plan.kind_of]
