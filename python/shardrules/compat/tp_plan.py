"""The parallel plans of a transformers model as sharding rules for its checkpoint's names.

The dialect `shardrules.dialects.TP_PLAN`, and a table of the dimension that each style cuts.
One match and one look-up for each leaf. Neither transformers nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from shardrules._base.arguments import boolean, check_tree, check_type, each
from shardrules._base.specs import partition_spec
from shardrules._place.align import key_text
from shardrules._rules.dialects import TP_PLAN
from shardrules._rules.rules import remembered_rules

__all__ = ["SHARDED_DIMENSIONS", "match_tp_plan", "parameter_tp_plan"]

_COLWISE: Final = (
    "colwise",
    "colwise_rep",
    "colwise_gather_output",
    "packed_colwise",
    "local_colwise",
)
_ROWWISE: Final = ("rowwise", "rowwise_rep", "rowwise_split_input", "local_rowwise")
_WHOLE: Final = (
    # For activations, gradients or the routing of tokens; parameters are not cut.
    "all_reduce",
    "ep_dispatch_experts",
    "ep_router",
    "gather",
    "local",
    "local_params",
    "megamoe_experts",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "replicate",
    "replicated_with_grad_allreduce",
    "sequence_parallel",
)

SHARDED_DIMENSIONS: Final[Mapping[str, tuple[int, int] | None]] = {
    **dict.fromkeys(_COLWISE, (-2, 1)),
    **dict.fromkeys(_ROWWISE, (-1, 1)),
    **dict.fromkeys(("packed_rowwise", "local_packed_rowwise"), (-1, 2)),
    "embedding_rowwise": (0, 1),
    "embedding_colwise": (1, 1),
    "grouped_gemm": (0, 1),
    **dict.fromkeys(_WHOLE),
}
"""Every style of transformers 4.50 to 5.23, as (dimension, least rank).

A style cuts this dimension, or the first one of a parameter with fewer dimensions, such as a bias.
It does not cut parameters below the least rank. None stands for a style that cuts nothing. The
rowwise styles do not cut a parameter named `bias`.
"""


_NOT_OF_WEIGHTS: Final = replace(TP_PLAN, match=("exact", "glob"))


class _Style(NamedTuple):
    name: str
    axis: str | tuple[str, ...]


def _check_plan(plan: Any, called: str = "tp_plan") -> None:
    check_type(called, plan, Mapping, "a dict of styles by names")
    each(f"the names of {called}", tuple(plan), str, "a string")


def parameter_tp_plan(
    parameter_name: str, tp_plan: Mapping[str, str], is_weight: bool = True
) -> str | None:
    """Return the style of a parameter in a plan, or None.

    Semantics of `_get_parameter_plan` of transformers 5. It looks up the parameter's name with `*`
    for numbers of layers, then the name of its module. Names without `*` in the plan take
    precedence.

    Args:
        parameter_name: A name such as "model.layers.3.mlp.up_proj.weight".
        tp_plan: {name of a parameter or module, with `*` for numbers: style}.
        is_weight: Whether the name of the parameter's module is looked up too.

    Example:
        >>> plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
        >>> parameter_tp_plan("layers.3.mlp.up_proj.weight", plan)
        'colwise'
    """
    check_type("parameter_name", parameter_name, str, "a string")
    _check_plan(tp_plan)
    is_weight = boolean("is_weight", is_weight)
    dialect = TP_PLAN if is_weight else _NOT_OF_WEIGHTS
    rule = remembered_rules(tp_plan.items(), dialect).first_match(parameter_name)
    return None if rule is None else list(tp_plan.values())[rule]


def match_tp_plan(
    tp_plan: Mapping[str, str],
    tree: Any,
    prefix: str = "",
    axis: str | tuple[str, ...] = "tp",
    *,
    ep_plan: Mapping[str, str] | None = None,
    ep_axis: str | tuple[str, ...] = "ep",
) -> Any:
    """Replace each leaf by the PartitionSpec of its style in the plans.

    Semantics of `shard_param` of transformers 5.23's styles. As there, `tp_plan` does not apply to
    a module that `ep_plan` names.

    Args:
        tp_plan: As in `parameter_tp_plan`, for example `config.base_model_tp_plan`.
        tree: A pytree whose paths, joined by dots, are names of a torch model. Its arrays have
            torch's layout: [out, in], and [experts, out, in] for experts in one array.
        prefix: The prefix of the plans' names in the tree, such as "model" for the base model of a
            `...ForCausalLM`. Default: none.
        axis: The mesh axis, or tuple of axes, for `tp_plan`.
        ep_plan: A plan for experts, such as `config.base_model_ep_plan`. Default: none.
        ep_axis: The mesh axis, or tuple of axes, for `ep_plan`.

    Returns:
        A tree of the same structure. Leaves that no plan names are replicated.

    Raises:
        ValueError: transformers has no such style.
        TypeError: A name is not a string.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> tree = {"model.layers.0.q_proj.weight": np.ones((8, 4)), "model.norm": np.ones(4)}
        >>> specs = match_tp_plan({"layers.*.q_proj": "colwise"}, tree, prefix="model")
        >>> specs == {"model.layers.0.q_proj.weight": P("tp", None), "model.norm": P()}
        True
        >>> experts = {"layers.0.experts.up_proj": np.ones((8, 4, 2))}
        >>> specs = match_tp_plan({}, experts, ep_plan={"layers.*.experts.up_proj": "grouped_gemm"})
        >>> specs == {"layers.0.experts.up_proj": P("ep", None, None)}
        True
    """
    from jax import tree_util

    _check_plan(tp_plan)
    experts = {} if ep_plan is None else ep_plan
    _check_plan(experts, "ep_plan")
    check_type("prefix", prefix, str, "a string")
    check_type("axis", axis, str | tuple, "a mesh axis or a tuple of them")
    check_type("ep_axis", ep_axis, str | tuple, "a mesh axis or a tuple of them")
    check_tree("tree", tree)
    styles = {
        name: _checked_style(name, style, axis)
        for name, style in tp_plan.items()
        if not any(name == module or name.startswith(f"{module}.") for module in experts)
    }
    styles |= {name: _checked_style(name, style, ep_axis) for name, style in experts.items()}
    at = f"{prefix}." if prefix else ""
    numbers = [(f"{at}{name}", number) for number, name in enumerate(styles)]
    matches = list(styles.values())

    def spec(path: Any, rule: Any, leaf: Any) -> Any:
        if not isinstance(rule, int):
            return rule
        return _style_spec(matches[rule], _last_name(path), len(getattr(leaf, "shape", ())))

    return tree_util.tree_map_with_path(spec, remembered_rules(numbers, TP_PLAN).match(tree), tree)


def _last_name(path: tuple[Any, ...]) -> str:
    """Return the last component of a leaf's dotted name, since a key may be the whole name."""
    return key_text(path[-1]).rpartition(".")[2] if path else ""


def _checked_style(name: str, style: str, axis: str | tuple[str, ...]) -> _Style:
    if style not in SHARDED_DIMENSIONS:
        near = get_close_matches(str(style), SHARDED_DIMENSIONS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"the plan has the style {style!r} for {name!r}, which transformers does not have; "
            f"{hint}The styles are {', '.join(sorted(SHARDED_DIMENSIONS))}"
        )
    return _Style(style, axis)


def _style_spec(style: _Style, parameter: str, rank: int) -> Any:
    cut = SHARDED_DIMENSIONS[style.name]
    if cut is None or rank < cut[1] or (parameter == "bias" and style.name in _ROWWISE):
        return partition_spec()
    # A parameter with fewer dimensions is cut along the first one.
    dimension = cut[0] % rank if -rank <= cut[0] < rank else 0
    return partition_spec(*(style.axis if d == dimension else None for d in range(rank)))
