"""`match_partition_rules` of `spectrax.sharding`, as of spectrax-lib 0.1.4, without Spectrax.

It has the dialect `sr.dialects.SPECTRAX` and the library's signature. Spectrax's pipeline axes and
stages are not supported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from shardrules._base.arguments import boolean
from shardrules._rules.dialects import SPECTRAX
from shardrules._rules.patterns import Pattern
from shardrules._rules.rules import remembered_rules

__all__ = ["match_partition_rules"]

_NOT_STRICT: Final = replace(SPECTRAX, scalars="none", rank="keep")


def match_partition_rules(
    rules: Iterable[tuple[Pattern, Any]],
    tree: Any,
    min_size: int | None = None,
    strict: bool = True,
) -> Any:
    """Replace each leaf by the spec of the first rule that is found in its path.

    Semantics of spectrax.sharding.match_partition_rules, except that a string is one axis name, and
    that one error reports all unmatched leaves.

    Args:
        rules: (regex, spec) pairs.
        tree: Any pytree. Only `.shape` of its leaves is read.
        min_size: Leaves with fewer elements get `PartitionSpec()` and need no rule. Default: none.
        strict: Whether scalars and leaves without a shape need no rule, and specs are truncated to
            the leaf's rank.

    Returns:
        A tree of the same structure.

    Raises:
        ValueError: No rule matches one of the leaves.
        TypeError, re.error: As `shardrules.Rules`.

    Example:
        >>> import numpy as np
        >>> from jax.sharding import PartitionSpec as P
        >>> tree = {"kernel": np.ones((8, 8)), "bias": np.ones(8)}
        >>> specs = match_partition_rules([("kernel", P("fsdp", "tp"))], tree, min_size=16)
        >>> specs == {"kernel": P("fsdp", "tp"), "bias": P()}
        True
    """
    compiled = remembered_rules(rules, SPECTRAX if boolean("strict", strict) else _NOT_STRICT)
    return compiled.match(tree, min_size=0 if min_size is None else min_size)
