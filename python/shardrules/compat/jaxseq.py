"""JAXSeq's `match_partition_rules` (JaxSeq.utils): EasyLM's, on JAX's `keystr` paths.

The dialect `shardrules.KEYSTR` under the library's signature; JAXSeq is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardrules._matching.dialects import KEYSTR
from shardrules._matching.match_modes import Pattern
from shardrules._matching.rules import Rules

__all__ = ["match_partition_rules"]


def match_partition_rules(rules: Iterable[tuple[Pattern, Any]], params: Any) -> Any:
    r"""The tree with each leaf replaced by the spec of the first rule found in its path.

    A path is `jax.tree_util.keystr`'s. Leaves of one element, and those without a shape, get
    `PartitionSpec()` and need no rule; specs are given whole. Semantics of
    JaxSeq.utils.match_partition_rules; all unmatched leaves are reported at once.

    Args:
        rules: (regex, spec) pairs.
        params: Any pytree; of its leaves only `.shape` is read.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: No rule matches some leaf.
        TypeError, re.error: As `shardrules.Rules`.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> rules = [(r"\['(q|k|v)'\]\['kernel'\]", P("fsdp", "mp"))]
        >>> specs = match_partition_rules(rules, {"q": {"kernel": np.ones((4, 4))}, "step": 3})
        >>> specs == {"q": {"kernel": P("fsdp", "mp")}, "step": P()}
        True
    """
    return Rules(rules, KEYSTR).match(params)
