"""`GivenPairs`: pairs as a user gave them, as the key of the rules that were compiled from them.

Equal where nobody can tell them apart: 1 and True are equal to Python, and are two specs. Costs one
hash of the pairs, and a comparison of those that are not the same objects as before. Must not know
how rules are compiled.
"""

from __future__ import annotations

import re
from typing import Any, Final

from shardrules._correction import Correction, RuleSpec
from shardrules._matching.dialects import Dialect
from shardrules._shape_specs import Fsdp
from shardrules._specs import Entries, entries_of, is_partition_spec

__all__ = ["GivenPairs"]

# Equal ones are the same to everybody. An object of the user's own is the same only as itself.
_VALUES: Final = (str, int, re.Pattern)
_SEQUENCES: Final = (tuple, Entries)
_RECORDS: Final = (RuleSpec, Correction, Fsdp)


class GivenPairs:
    """Pairs for a dialect.

    Raises:
        TypeError: Something in the pairs cannot be hashed, such as a list.
    """

    __slots__ = ("_hash", "dialect", "pairs")

    def __init__(self, pairs: tuple[Any, ...], dialect: Dialect) -> None:
        self.pairs: Final = tuple(map(_plain_pair, pairs))
        self.dialect: Final = dialect
        self._hash: Final = hash((self.pairs, id(dialect)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, GivenPairs)
            and self.dialect is other.dialect
            and _same(self.pairs, other.pairs)
        )


def _plain_pair(pair: Any) -> Any:
    """Read a pair of a type of its own, as a namedtuple, in the way that `Rules` reads it."""
    if type(pair) is tuple or not isinstance(pair, tuple) or len(pair) != 2:
        return pair
    return pair[0], pair[1]


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _VALUES:
        return bool(a == b)
    if kind in _SEQUENCES:
        return len(a) == len(b) and all(map(_same, a, b))
    if kind in _RECORDS:
        return all(_same(getattr(a, name), getattr(b, name)) for name in kind.__slots__)
    # The entries are looked at as well: one may be a string of the user's own type.
    return is_partition_spec(a) and bool(a == b) and _same(entries_of(a), entries_of(b))
