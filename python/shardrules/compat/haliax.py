"""haliax's axis mappings: the mesh axes of an axis, and the spec of an array with such axes.

As rules, a mapping is `LogicalRules(mapping, sr.dialects.HALIAX)`, which `plan` and others take for
trees of NamedArrays. haliax has a mapping for parameters and one for compute; each makes a plan of
its own. Of haliax 1.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardrules._base.arguments import check_type
from shardrules._base.specs import partition_spec
from shardrules._base.text import shown

__all__ = ["physical_axis_name", "pspec_for_axis"]


def physical_axis_name(axis: Any, mapping: Mapping[str, Any]) -> Any:
    """Return the mesh axis, or axes, to which the mapping maps an axis; None if it has none.

    Args:
        axis: A name, or haliax's Axis.
        mapping: {name: mesh axes}. haliax takes the one of a context, too; here it is given.

    Raises:
        TypeError: It is something else.

    Example:
        >>> physical_axis_name("mlp", {"mlp": "model"})
        'model'
    """
    check_type("mapping", mapping, Mapping, "a dict from axis names to mesh axes")
    return mapping.get(_axis_name(axis))


def pspec_for_axis(axis: Any, mapping: Mapping[str, Any]) -> Any:
    """Return the PartitionSpec of an array with these axes, as `pspec_for_axis` of haliax does.

    Args:
        axis: A name, an Axis, a sequence of these, or {name: size}.
        mapping: As in `physical_axis_name`.

    Raises:
        TypeError: It is something else.

    Example:
        >>> tuple(pspec_for_axis(("embed", "mlp"), {"mlp": "model", "embed": ("data", "replica")}))
        (('data', 'replica'), 'model')
    """
    is_one = isinstance(axis, str) or hasattr(axis, "name")
    axes = (axis,) if is_one else axis
    check_type("axis", axes, tuple | list | Mapping, "an axis, or a sequence of them")
    entries = (physical_axis_name(item, mapping) for item in axes)
    return partition_spec(*(tuple(item) if isinstance(item, list) else item for item in entries))


def _axis_name(axis: Any) -> str:
    name = axis if isinstance(axis, str) else getattr(axis, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"axis is {shown(axis)}; it must be a name or an Axis of haliax")
    return name
