"""JAXSeq's `match_partition_rules` (JaxSeq.utils): EasyLM's, on JAX's `keystr` paths.

It has the dialect `shardrules.dialects.KEYSTR` and the library's signature. JAXSeq is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardrules._rules.dialects import KEYSTR
from shardrules._rules.patterns import Pattern
from shardrules._rules.rules import remembered_rules

__all__ = ["match_partition_rules"]


def match_partition_rules(rules: Iterable[tuple[Pattern, Any]], params: Any) -> Any:
    r"""Replace each leaf by the spec of the first rule that is found in its path.

    A path has the form of `jax.tree_util.keystr`. Leaves of one element, and leaves without a
    shape, get `PartitionSpec()` and need no rule. Specs are not truncated. Semantics of
    JaxSeq.utils.match_partition_rules, except that one error reports all unmatched leaves.

    Args:
        rules: (regex, spec) pairs.
        params: Any pytree. Only `.shape` of its leaves is read.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: No rule matches one of the leaves.
        TypeError, re.error: As `shardrules.Rules`.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = [(r"\['(q|k|v)'\]\['kernel'\]", P("fsdp", "mp"))]
        >>> specs = match_partition_rules(rules, {"q": {"kernel": np.ones((4, 4))}, "step": 3})
        >>> specs == {"q": {"kernel": P("fsdp", "mp")}, "step": P()}
        True
    """
    return remembered_rules(rules, KEYSTR).match(params)
