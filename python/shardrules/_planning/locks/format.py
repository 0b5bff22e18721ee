"""The format of a lock: its fields, its limits, and digests that show changes by hand.

Costs a line of text per leaf to hash. Must not know how a plan is made.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Iterable
from typing import Any, Final

from shardrules._planning.kinds import Kind, dtype_shown, placement_shown
from shardrules._specs import spec_shown

__all__ = [
    "FIELDS",
    "FLAGS",
    "FORMAT",
    "LEAF_FIELDS",
    "LOGICAL",
    "LOGICAL_RULE_FIELDS",
    "MOST_LEAVES",
    "MOST_TEXT",
    "RULE_FIELDS",
    "TAG_FIELDS",
    "UNCONSTRAINED",
    "decided_by",
    "leaves_digest",
    "length",
    "rules_digest",
]

FORMAT: Final = "shardrules lock 2"
# Version 0.1's first: nothing in it says whether the rules are those that it was made with.
_OLD_FORMAT: Final = "shardrules lock 1"
MOST_LEAVES: Final = 10**6
"""Ten times those of the largest models; a few characters of a pattern must not fill the memory."""
MOST_TEXT: Final = 10**8
"""Characters of all paths, non-ASCII ones escaped: to read so many takes 400 MB."""
_OLD_FIELDS: Final = frozenset({"format", "fingerprint", "mesh", "dialect", "rules", "leaves"})
FIELDS: Final = {
    FORMAT: _OLD_FIELDS | {"rules_fingerprint", "kind"},
    _OLD_FORMAT: _OLD_FIELDS,
}
LOGICAL: Final = "logical"
"""The `kind` of a lock whose rules are for logical axis names; others have none."""
LEAF_FIELDS: Final = frozenset(
    {"path", "shape", "dtype", "rule", "names", "rules", "spec", "memory_kind", "problem"}
)
RULE_FIELDS: Final = frozenset(
    {"rule", "pattern", "flags", "spec", "correction", "units", "memory_kind", "optional_axes"}
)
LOGICAL_RULE_FIELDS: Final = frozenset({"rule", "name", "axes"})
TAG_FIELDS: Final = frozenset({"entries", "unreduced", "reduced", "unreduced_kind"})
"""Fields of a spec with unreduced or reduced axes; others are lists of entries."""
FLAGS: Final = int(re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE)
UNCONSTRAINED: Final = {"unconstrained": True}
_ROWS_HASHED_AT_ONCE: Final = 1000


def length(path: str) -> int:
    """Characters of the path, non-ASCII ones escaped."""
    return len(path) if path.isascii() else len(ascii(path))


def leaves_digest(
    axis_sizes: dict[str, int], paths: list[str], kind_of: Any, kinds: list[Kind]
) -> str:
    """A digest of what each leaf gets on which mesh, whatever the order of the leaves."""
    of_kind = [f"\t{k.shape}\t{dtype_shown(k)}\t{_placed(k)}\n" for k in kinds]
    of_row = map(of_kind.__getitem__, kind_of.tolist())
    return _hash(ascii(axis_sizes), map(operator.add, map(ascii, paths), of_row))


def _placed(kind: Kind) -> str:
    counted = "" if kind.status == "placed" or kind._counted is None else spec_shown(kind._counted)
    return placement_shown(kind) + counted


def decided_by(entry: dict[str, Any]) -> str:
    """What decides leaves, from their entry, for `rules_digest`."""
    decided = [entry["rule"], entry.get("problem")]
    return json.dumps([*decided, entry["names"], entry["rules"]] if "names" in entry else decided)


def rules_digest(dialect: Any, rules: Any, patterns: list[str], decided_by: list[str]) -> str:
    """A digest of what decides the leaves, whatever their order.

    Args:
        dialect: As in a lock.
        rules: As in a lock.
        patterns: The folded paths.
        decided_by: Per pattern the result of `decided_by`.
    """
    head = json.dumps([dialect, rules], sort_keys=True)
    rows = (f"{one!a}\t{decided}\n" for one, decided in zip(patterns, decided_by, strict=True))
    return _hash(head, rows)


def _hash(head: str, rows: Iterable[str]) -> str:
    # With its tabs and newlines escaped no path can pass for a row of something else.
    digest = hashlib.sha256(head.encode())
    ordered = sorted(rows)
    for begin in range(0, len(ordered), _ROWS_HASHED_AT_ONCE):
        text = "".join(ordered[begin : begin + _ROWS_HASHED_AT_ONCE])
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
