"""Dialects: the choices in which rule-matching libraries differ, as data.

One engine reads them; a new dialect is a new record here, not a new code path.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardrules._correction import Correction


@dataclass(frozen=True, slots=True)
class Dialect:
    """How rules meet a tree.

    Args:
        name: The library that the dialect is of.
        separator: What joins the keys of a path.
        correction: How specs are made to fit arrays and meshes.
    """

    name: str
    separator: str
    correction: Correction


EFORMER = Dialect(name="eformer", separator="/", correction=Correction())
"""`eformer.escale.match_partition_rules`, as of eformer 0.0.101; the correction is that of its
`get_corrected_named_sharding`, but keeps PartitionSpec.UNCONSTRAINED."""
