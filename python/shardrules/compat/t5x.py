"""T5X's rules for logical axis names, and the names in its collection `params_axes`.

The rules are `LogicalRules` in linen's dialect, which T5X uses. Of T5X's partitioning.py of 2025.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from shardrules._base.arguments import check_type, integer
from shardrules._base.text import shown
from shardrules._rules.logical_rules import LogicalRules

__all__ = ["axis_names", "standard_logical_axis_rules"]

# By (activation, parameter) dims, the mesh axes of "embed"; the first that is free wins.
_EMBED: Final[dict[tuple[int, int], tuple[str | None, ...]]] = {
    (1, 1): (None,),
    (2, 1): ("model",),
    (1, 2): ("data",),
    (2, 2): ("model", "data"),
}
_ON_MODEL: Final = ("vocab", "mlp", "heads", "joined_kv")
_WHOLE: Final = (
    "kv", "relpos_buckets", "abspos_buckets", "length", "layers", "stack", "mlp_activations",
)  # fmt: skip
_SUFFIX: Final = "_axes"


def standard_logical_axis_rules(
    activation_partitioning_dims: int = 1,
    parameter_partitioning_dims: int = 1,
    additional_rules: Iterable[tuple[str, Any]] | None = None,
) -> LogicalRules:
    """Return the default rules of T5X, for a mesh with the axes data and model.

    They decide as T5X's do. Rules for different names may stand in another order.

    Args:
        activation_partitioning_dims: 2 cuts "embed" by model, as for 2-D activations.
        parameter_partitioning_dims: 2 cuts "embed" by data, as for 2-D parameters.
        additional_rules: Rules behind these.

    Raises:
        ValueError: Dims are neither 1 nor 2.
        TypeError: As `LogicalRules`.

    Example:
        >>> import shardrules as sr
        >>> rules = standard_logical_axis_rules(parameter_partitioning_dims=2)
        >>> tuple(sr.logical_to_mesh(("embed", "mlp"), rules))
        ('data', 'model')
    """
    dims = (
        integer("activation_partitioning_dims", activation_partitioning_dims, 1, 2),
        integer("parameter_partitioning_dims", parameter_partitioning_dims, 1, 2),
    )
    extra = () if additional_rules is None else LogicalRules(additional_rules)
    return LogicalRules(
        [
            ("batch", "data"),
            *((name, "model") for name in _ON_MODEL),
            *(("embed", axis) for axis in _EMBED[dims]),
            *((name, None) for name in _WHOLE),
            *extra,
        ]
    )


def axis_names(params_axes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the logical axis names of parameters, from the collection `params_axes` of a model.

    As `flax.linen.partitioning.get_axis_names`: the entry `kernel_axes` is about `kernel`.

    Args:
        params_axes: `model.init(...)["params_axes"]`: dicts in dicts of flax's AxisMetadata.

    Returns:
        The names as a tree like the parameters, for `plan(params, rules, mesh, names=...)`.

    Raises:
        TypeError: An entry has no names.

    Example:
        >>> from types import SimpleNamespace
        >>> axis_names({"mlp": {"kernel_axes": SimpleNamespace(names=("embed", "mlp"))}})
        {'mlp': {'kernel': ('embed', 'mlp')}}
    """
    check_type("params_axes", params_axes, Mapping, "the collection params_axes, a dict")
    names: dict[str, Any] = {}
    for key, entry in params_axes.items():
        if isinstance(entry, Mapping):
            names[key] = axis_names(entry)
        else:
            names[key.removesuffix(_SUFFIX)] = _axis_names_of(key, entry)
    return names


def _axis_names_of(key: str, entry: Any) -> tuple[Any, ...]:
    names = getattr(entry, "names", None)
    if not isinstance(names, tuple | list):
        raise TypeError(
            f"params_axes: the entry {key!r} is {shown(entry)}; it must be flax's AxisMetadata, "
            "which has names"
        )
    return tuple(names)
