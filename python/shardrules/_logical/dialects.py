"""Dialects of logical axis rules: how the libraries of the field choose a rule for each name.

Records. Must not know how names are resolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from shardrules._arguments import boolean, check_type
from shardrules._correction import Correction
from shardrules._display import without_defaults

__all__ = ["FLAX_CORE", "HALIAX", "LINEN", "MAXTEXT", "LogicalDialect"]


# As long as the names, as flax's specs.
_NAMES_LONG: Final = Correction(pad=False)


@dataclass(frozen=True, slots=True)
class LogicalDialect:
    """A way in which logical axis rules apply to the names of an array.

    Args:
        name: The name of the dialect.
        last_wins: Whether the last rule for a name wins, even if other dimensions use its mesh
            axes. Names may then repeat, and a tuple of names can have a rule. Otherwise the first
            rule wins whose mesh axes are free.
        keeps_unknown: Whether a name without a rule stays in the spec. Otherwise its dimension is
            unsharded.
        correction: The policies for mesh axes that the mesh lacks or that do not divide a
            dimension, where no other correction is given.
        tries_next: Whether a rule of which the correction leaves no mesh axes loses to the next
            rule for the name. Otherwise names alone choose the rules, and the correction cuts the
            specs.
        keeps_size_one: Whether mesh axes of one device stay in the specs, where they cut nothing.
    """

    name: str
    last_wins: bool
    keeps_unknown: bool
    correction: Correction = _NAMES_LONG
    tries_next: bool = True
    keeps_size_one: bool = True

    def __repr__(self) -> str:
        return _NAMES.get(self) or without_defaults(self)

    def __post_init__(self) -> None:
        check_type("name", self.name, str, "a string")
        check_type("correction", self.correction, Correction, "a Correction")
        for field in ("last_wins", "keeps_unknown", "tries_next", "keeps_size_one"):
            value = getattr(self, field)
            if type(value) is not bool:
                object.__setattr__(self, field, boolean(field, value))


LINEN: Final = LogicalDialect("linen", last_wins=False, keeps_unknown=False)
"""The dialect of `flax.linen.logical_to_mesh_axes` of flax 0.12 and T5X."""
FLAX_CORE: Final = LogicalDialect("flax.core", last_wins=True, keeps_unknown=True, tries_next=False)
"""The dialect of `flax.core.spmd.get_pspec` of flax 0.12 and nnx."""
MAXTEXT: Final = LogicalDialect(
    "maxtext",
    last_wins=False,
    keeps_unknown=False,
    correction=Correction(absent="drop_axis", indivisible="drop_axis", pad=False),
    tries_next=False,
    keeps_size_one=False,
)
"""The dialect of MaxText: flax.linen's choice of rules, of whose mesh axes those are then dropped
that the mesh lacks or that have one device, as by `remove_size_one_mesh_axis` of MaxText's
`utils.sharding` of 2026, or that do not divide, as by `adjust_pspec_for_indivisible_shapes`."""
HALIAX: Final = LogicalDialect(
    "haliax",
    last_wins=True,
    keeps_unknown=False,
    correction=Correction(absent="error", indivisible="error", rank="error", pad=False),
    tries_next=False,
)
"""The dialect of haliax's axis mappings, as of `haliax.partitioning.pspec_for_axis` of haliax 1.4:
each name has one entry, whatever other dimensions use. What JAX would refuse later is an error."""

_NAMES: Final = {globals()[name]: name for name in __all__ if name.isupper()}
"""What the dialects above are called here: a whole record would hide the signatures in `help`."""
