"""Dialects: the choices in which rule-matching libraries differ, as data.

One engine reads them; a new dialect is a new record here, not a new code path.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dialect:
    """How rules meet a tree.

    Args:
        name: The library that the dialect is of.
        separator: What joins the keys of a path.
    """

    name: str
    separator: str


EFORMER = Dialect(name="eformer", separator="/")
"""`eformer.escale.match_partition_rules`, as of eformer 0.0.101."""
