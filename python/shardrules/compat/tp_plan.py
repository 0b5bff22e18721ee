"""The `tp_plan` of a transformers model as sharding rules for its checkpoint's names.

The dialect `shardrules.TP_PLAN`, and a table from transformers' styles to the dimension that each
cuts. Neither transformers nor torch is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

from shardrules._arguments import boolean, check_tree, check_type, each
from shardrules._matching.dialects import TP_PLAN
from shardrules._matching.rules import Rules
from shardrules._specs import partition_spec

__all__ = ["SHARDED_DIMENSIONS", "match_tp_plan", "parameter_tp_plan"]

SHARDED_DIMENSIONS: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), (-2, 1)),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), (-1, 2)),
    "embedding_rowwise": (0, 2),
    "embedding_colwise": (1, 2),
}
"""Per style the dimension that it cuts, or the first one of a parameter that has fewer, such as a
bias; and the least rank of a parameter that it cuts at all. Other styles replicate."""


class _Style(NamedTuple):
    name: str


def _check_plan(tp_plan: Any) -> None:
    check_type("tp_plan", tp_plan, Mapping, "a dict of styles by names")
    each("the names of tp_plan", tuple(tp_plan), str, "a string")


def parameter_tp_plan(
    parameter_name: str, tp_plan: Mapping[str, str], is_weight: bool = True
) -> str | None:
    """The style that a plan has for a parameter, or None.

    Semantics of `_get_parameter_tp_plan` of transformers 5: the name itself is looked up, then its
    module's, then both with `*` for the numbers of layers. Compiles the plan each time; for many
    names make `Rules(tp_plan.items(), TP_PLAN)` once and ask its `first_match`.

    Args:
        parameter_name: A name such as "model.layers.3.mlp.up_proj.weight".
        tp_plan: {name of a parameter or module, with `*` for numbers: style}.
        is_weight: If False, only the parameter's own name is looked up, not its module's.

    Example:
        >>> plan = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
        >>> parameter_tp_plan("layers.3.mlp.up_proj.weight", plan)
        'colwise'
    """
    check_type("parameter_name", parameter_name, str, "a string")
    _check_plan(tp_plan)
    is_weight = boolean("is_weight", is_weight)
    dialect = TP_PLAN if is_weight else replace(TP_PLAN, match=("exact", "glob"))
    rule = Rules(tp_plan.items(), dialect).first_match(parameter_name)
    return None if rule is None else list(tp_plan.values())[rule]


def match_tp_plan(tp_plan: Mapping[str, str], tree: Any, prefix: str = "", axis: str = "tp") -> Any:
    """The tree with each leaf replaced by the PartitionSpec that the plan means.

    Args:
        tp_plan: As in `parameter_tp_plan`; `config.base_model_tp_plan`, for example.
        tree: A pytree whose paths, joined by dots, are names of a torch model, with arrays in
            torch's layout: [out, in].
        prefix: Where in the model the plan's names start: "model" for the base model of a
            `...ForCausalLM`, as transformers adds it.
        axis: The mesh axis.

    Returns:
        A tree of the same structure. What the plan does not name is replicated.

    Raises:
        TypeError: A name is no string.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> tree = {"model.layers.0.q_proj.weight": np.ones((8, 4)), "model.norm": np.ones(4)}
        >>> specs = match_tp_plan({"layers.*.q_proj": "colwise"}, tree, prefix="model")
        >>> specs == {"model.layers.0.q_proj.weight": P("tp", None), "model.norm": P()}
        True
    """
    import jax

    _check_plan(tp_plan)
    check_type("prefix", prefix, str, "a string")
    check_type("axis", axis, str, "a mesh axis")
    check_tree("tree", tree)
    at = f"{prefix}." if prefix else ""
    rules = Rules([(f"{at}{name}", _Style(style)) for name, style in tp_plan.items()], TP_PLAN)

    def spec(style: Any, leaf: Any) -> Any:
        rank = len(getattr(leaf, "shape", ()))
        dimension, least_rank = SHARDED_DIMENSIONS.get(getattr(style, "name", ""), (0, rank + 1))
        if rank < least_rank:
            return partition_spec()
        cut = max(dimension, -rank) % rank
        return partition_spec(*(axis if d == cut else None for d in range(rank)))

    styles = rules.match(tree)
    return jax.tree_util.tree_map(spec, styles, tree, is_leaf=lambda node: isinstance(node, _Style))
