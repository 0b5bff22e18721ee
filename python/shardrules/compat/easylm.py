"""EasyLM's `match_partition_rules` (jax_utils) and scalax 0.2.6's `TreePathShardingRule`.

Both have the dialect `sr.dialects.EASYLM` and the libraries' signatures. Neither library is needed.
Unlike the originals, they report all unmatched leaves at once and replicate leaves without a shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from shardrules._base.arguments import boolean
from shardrules._rules.dialects import EASYLM
from shardrules._rules.patterns import Pattern
from shardrules._rules.rules import remembered_rules

__all__ = ["TreePathShardingRule", "match_partition_rules"]

_NOT_STRICT: Final = replace(EASYLM, unmatched="replicate")


def match_partition_rules(rules: Iterable[tuple[Pattern, Any]], params: Any) -> Any:
    """Replace each leaf by the spec of the first rule that is found in its path.

    Leaves of one element get `PartitionSpec()` and need no rule. Specs are not truncated. Semantics
    of EasyLM.jax_utils.match_partition_rules.

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
        >>> params = {"wq": {"kernel": np.ones((4, 4))}, "count": np.ones((1,))}
        >>> specs = match_partition_rules([("wq/kernel", P("fsdp", "mp"))], params)
        >>> specs == {"wq": {"kernel": P("fsdp", "mp")}, "count": P()}
        True
    """
    return remembered_rules(rules, EASYLM).match(params)


class TreePathShardingRule:
    """A rule list as an object. Semantics of scalax.sharding.TreePathShardingRule, 0.2.6.

    Args:
        rules: (regex, spec) pairs, as separate arguments.
        strict: Whether a leaf that no rule matches is an error. Otherwise it is replicated.

    Raises:
        TypeError, re.error: As `shardrules.Rules`. scalax raises when it first uses the rule.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> rule = TreePathShardingRule(("kernel", P("fsdp")), strict=False)
        >>> rule.apply({"kernel": np.ones(4), "bias": np.ones(4)}) == {
        ...     "kernel": P("fsdp"), "bias": P()
        ... }
        True
    """

    def __init__(self, *rules: tuple[Pattern, Any], strict: bool = True) -> None:
        strict = boolean("strict", strict)
        self.rules = rules
        self.strict = strict
        self._compiled = remembered_rules(rules, EASYLM if strict else _NOT_STRICT)

    def apply(self, pytree: Any) -> Any:
        """Replace each leaf of a tree by its spec.

        Raises:
            ValueError: No rule matches one of the leaves, and `strict` is True.
        """
        return self._compiled.match(pytree)
