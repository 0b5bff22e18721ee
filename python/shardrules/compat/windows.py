"""`set_partitions` of dalle-mini, and of the code of the t5x era that it comes from.

It has the dialect `sr.dialects.WINDOW` and the usual signature. The rules are an argument
instead of a constant of the module.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from shardrules._arguments import texts
from shardrules._rules.dialects import WINDOW
from shardrules._rules.rules import remembered_rules
from shardrules._specs import entries_of, partition_spec

__all__ = ["set_partitions"]


def set_partitions(
    in_dict: Any,
    rules: Iterable[tuple[tuple[str, ...], Any]],
    scanned: Collection[str] = (),
) -> Any:
    """Replace each leaf by the spec of the first rule whose window occurs in its path.

    A window is a tuple of regexes, which match as many consecutive components of the path. Each
    component is matched by `re.match` with `$` appended to the regex. Semantics of `set_partitions`
    in dalle-mini's model/partitions.py, except that rules with None give `PartitionSpec()`, that
    the result has the input's own types instead of a FrozenDict, and that unmatched leaves are a
    ValueError.

    Args:
        in_dict: Any pytree. Its leaves are not read.
        rules: (window, spec) pairs.
        scanned: Keys of scanned layers, such as "FlaxBartEncoderLayers". Specs of leaves below them
            get a None in front, as in dalle-mini if `use_scan` is true. Default: no keys.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: No rule matches one of the leaves.
        TypeError, re.error: As `shardrules.Rules`; for example, a window is not a tuple.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"GLU_0": {"Dense_1": {"kernel": 0, "bias": 0}}}
        >>> rules = [(("GLU.*", "Dense_1", "kernel"), P(None, "mp")), (("(bias|scale)",), None)]
        >>> specs = set_partitions(params, rules)
        >>> specs == {"GLU_0": {"Dense_1": {"kernel": P(None, "mp"), "bias": P()}}}
        True
    """
    import jax

    layers = set(texts("scanned", scanned))
    specs = remembered_rules(rules, WINDOW).match(in_dict)
    if not layers:
        return specs

    def stacked(path: tuple[Any, ...], spec: Any) -> Any:
        keys = {getattr(key, "key", None) for key in path}
        return partition_spec(None, *entries_of(spec)) if spec and keys & layers else spec

    return jax.tree_util.tree_map_with_path(stacked, specs)
