"""The placements of a plan, for functions of this room that take companions.

Planning is a later room, which this one must not know; so it hands in how it finds them when it is
imported. Costs a plan.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, TypeAlias

from shardrules._arguments import listed
from shardrules._plan_like import PlanLike
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import PathRules, Rules, as_rules, where_rules_are
from shardrules._specs import Fsdp, is_partition_spec
from shardrules._text import brief, shown

RulesLike: TypeAlias = "PathRules | LogicalRules | PlanLike | Any"
"""(pattern, spec) pairs; `Rules`; `LogicalRules`; a `Plan`, whose leaves are found by their paths;
or PartitionSpecs or NamedShardings: one for all leaves, or a tree of them, which may be a prefix of
the tree that they are for."""

Decider: TypeAlias = "Rules | LogicalRules | PlanLike | None"
"""The same, with pairs compiled; None for specs and shardings, which are taken as they are."""

_SEQUENCES: Final = (list, tuple)
_PATTERNS: Final = (str, re.Pattern)
_DECIDERS: Final = (Rules, LogicalRules, PlanLike)


def as_decider(name: str, given: RulesLike) -> Decider:
    """What decides; `name` is the parameter's, for errors.

    Raises:
        TypeError: It is nothing of that.
        re.error: As `Rules`.
    """
    if isinstance(given, _DECIDERS):
        return given
    if _are_specs(given):
        return None
    if isinstance(given, str | bytes) or not hasattr(given, "__iter__"):
        raise TypeError(
            f"{name} is {shown(given)}; it must be (pattern, spec) pairs, Rules, LogicalRules, a "
            "Plan, a PartitionSpec, a NamedSharding, or a tree of these two"
            f"{where_rules_are(given)}"
        )
    return as_rules(name, given)


def _are_specs(given: Any) -> bool:
    """Whether it is a spec, a sharding, None, or a tree of them; pairs have a pattern in them."""
    if given is None or is_spec_of_mesh(given):
        return True
    if isinstance(given, _SEQUENCES):
        if not given or _begins_with_a_pair(given):
            return False
    elif isinstance(given, Iterator):
        return False
    if "jax" not in sys.modules:  # then nobody has a spec
        return False
    from jax import tree_util
    from jax.sharding import PartitionSpec, Sharding

    kinds = set(map(type, tree_util.tree_leaves(given)))
    if any(issubclass(kind, _PATTERNS) for kind in kinds):
        return False
    says = any(issubclass(kind, (Sharding, PartitionSpec, Fsdp)) for kind in kinds)
    return says or not kinds


def _begins_with_a_pair(given: Any) -> bool:
    """Whether the first of a list or tuple is a (pattern, anything) pair."""
    first = given[0]
    is_pair = isinstance(first, _SEQUENCES) and len(first) == 2 and isinstance(first[0], _PATTERNS)
    # In old versions of JAX a PartitionSpec is a tuple.
    return is_pair and not is_partition_spec(first) and not is_partition_spec(given)


def check_decided(name: str, given: Any, instead: str) -> None:
    """Checks that something is not rules where specs or shardings are wanted.

    Raises:
        TypeError: It is; `instead` says in the message what to give.
    """
    is_listed = isinstance(given, _SEQUENCES) and bool(given)
    if isinstance(given, _DECIDERS) or (is_listed and _begins_with_a_pair(given)):
        raise TypeError(f"{name} is {shown(given)}, and must be decided already: give {instead}")


def is_spec(node: Any) -> bool:
    """Whether it is a leaf of a tree of specs that JAX takes for none."""
    return node is None or is_partition_spec(node)


def is_spec_of_mesh(spec: Any) -> bool:
    """Whether it is a spec that needs a mesh."""
    return is_partition_spec(spec) or isinstance(spec, Fsdp)


def is_named_sharding(spec: Any) -> bool:
    """Whether it is a spec with its mesh."""
    from jax.sharding import NamedSharding

    return isinstance(spec, NamedSharding)


_NOT_TAKEN: Final = {
    Rules: ("names",),
    LogicalRules: ("min_size", "companions"),
    PlanLike: ("min_size", "companions", "names", "correction"),
    type(None): ("min_size", "companions", "names"),
}
_NUMBER_OR_TUPLE: Final = (int, float, tuple)
_CALLED: Final = {PlanLike: "a Plan, which has decided already", type(None): "specs"}


def check_taken(decider: Decider, **given: Any) -> None:
    """Checks that no argument is given that is not for what decides.

    Args:
        decider: What decides.
        given: Arguments by name; None, 0 and an empty tuple stand for nothing.

    Raises:
        TypeError: Names are given for other rules than `LogicalRules`.
        ValueError: Another one is given in vain.
    """
    said = {
        name: value
        for name, value in given.items()
        if value is not None and not (isinstance(value, _NUMBER_OR_TUPLE) and not value)
    }
    if not said:
        return
    kind = next(one for one in _NOT_TAKEN if isinstance(decider, one))
    what = _CALLED.get(kind, kind.__name__)
    for name in _NOT_TAKEN[kind]:
        if name not in said:
            continue
        value = said[name]
        if name == "names":
            raise TypeError(
                f"names: they are for LogicalRules alone, and are {shown(value)}: leave it"
            )
        if name == "companions":
            raise ValueError(f"companions are for rules of paths, not for {what}: leave them out")
        taken_by = "rules of paths" if name == "min_size" else "rules"
        raise ValueError(
            f"{name} is {brief(value)}; it is not for {what}, but for {taken_by}: leave it"
        )


_WHAT: Final = "Companion records, such as shardrules.LORA"
_finders: Final[list[Callable[..., Any]]] = []


def find_placements_by(finder: Callable[..., Any]) -> None:
    """Hands in the function that finds Placements; it has the parameters of `shardrules.plan`."""
    _finders[:] = [finder]


def checked_companions(companions: Any) -> tuple[Any, ...]:
    """The companions; what they are is for the plan to check.

    Raises:
        TypeError: They are not a sequence.
    """
    return listed("companions", companions, _WHAT)


def planned_placements(tree: Any, companions: tuple[Any, ...], *arguments: Any, **more: Any) -> Any:
    """The tree of Placements of the plan with these companions.

    Raises:
        TypeError, ValueError: As `shardrules.plan` and `Plan.shardings`.
    """
    if not _finders:  # as in a process that has read or unpickled its companions
        if not type(companions[0]).__module__.startswith("shardrules."):
            raise TypeError(f"companions[0] is {type(companions[0]).__name__}; give {_WHAT}")
        import_module("shardrules._plan.plan")
    return _finders[0](tree, *arguments, companions=companions, **more)
