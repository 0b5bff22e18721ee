"""EasyLM's `match_partition_rules` (jax_utils) and scalax 0.2.6's `TreePathShardingRule`.

Both are the dialect `shardrules.EASYLM` under the libraries' signatures; neither library is needed.
Unlike theirs, these report all unmatched leaves at once, and replicate leaves without a shape.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from shardrules._arguments import boolean
from shardrules._matching.dialects import EASYLM
from shardrules._matching.match_modes import Pattern
from shardrules._matching.rules import Rules

__all__ = ["TreePathShardingRule", "match_partition_rules"]

_NOT_STRICT: Final = replace(EASYLM, unmatched="replicate")


def match_partition_rules(rules: Iterable[tuple[Pattern, Any]], params: Any) -> Any:
    """The tree with each leaf replaced by the spec of the first rule found in its path.

    Leaves of one element get `PartitionSpec()` and need no rule; specs are given whole. Semantics
    of EasyLM.jax_utils.match_partition_rules.

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
        >>> params = {"wq": {"kernel": np.ones((4, 4))}, "count": np.ones((1,))}
        >>> specs = match_partition_rules([("wq/kernel", P("fsdp", "mp"))], params)
        >>> specs == {"wq": {"kernel": P("fsdp", "mp")}, "count": P()}
        True
    """
    return Rules(rules, EASYLM).match(params)


class TreePathShardingRule:
    """A rule list as an object. Semantics of scalax.sharding.TreePathShardingRule, 0.2.6.

    Args:
        rules: (regex, spec) pairs, one after the other.
        strict: Whether leaves that no rule matches are an error; they are replicated otherwise.

    Raises:
        TypeError, re.error: As `shardrules.Rules`; scalax would raise when it first tries the rule.

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
        self._compiled = Rules(rules, EASYLM if strict else _NOT_STRICT)

    def apply(self, pytree: Any) -> Any:
        """The tree with each leaf replaced by its spec.

        Raises:
            ValueError: No rule matches some leaf, and the rule is strict.
        """
        return self._compiled.match(pytree)
