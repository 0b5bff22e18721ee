"""Dialects: how libraries apply rules to paths, and rules to logical names, as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeVar, get_args

from shardrules._base.arguments import boolean, check_choice, check_fields, strings
from shardrules._base.rule_specs import Correction, LibraryCorrection, check_correction
from shardrules._base.specs import RankPolicy
from shardrules._base.text import without_defaults
from shardrules._rules.patterns import ModeName


@dataclass(frozen=True, slots=True)
class Dialect:
    r"""How a library applies path rules to a tree.

    `dataclasses.replace` makes a dialect with other choices.

    Args:
        name: The library that the dialect is of.
        separator: What joins the keys of a path.
        correction: How `named_shardings` makes specs fit arrays and meshes.
        keys: What a path consists of: the keys' "text", that is their str(), joined by the
            separator; or JAX's "keystr", as in `['layers'][0].kernel`.
        match: The match modes: how a pattern meets a path. All rules are tried in the first mode
            before any is tried in the second. "search" and "fullmatch" are those of `re`; "exact"
            is equality.
        precedence: "first": of several rules that match, the first one wins. "only": at most one
            may match; more are an error. It is counted in the first match mode that has any match.
        scalars: Which leaves need no rule. "rank 0": those of rank 0 or without a shape. "size 1":
            these, and those of one element. "none": each leaf needs a rule.
        min_size: Whether leaves below `min_size` need a rule. "after": they do, since the size is
            looked at after the match. "before": they do not.
        rank: What `match` does with a spec that is longer than the leaf's rank: "truncate" it,
            "replicate" the leaf, "keep" it, or "error".
        unmatched: What becomes of leaves that no rule matches: an "error", or "replicate" them.
        hidden_key: The text of a last key that paths do not have, where it is the only key of its
            node: "value" of a variable of flax nnx. Default: none.

    Raises:
        ValueError: A choice that does not exist.
        TypeError: name or separator is not a string, or correction not a Correction.

    Example:
        >>> from dataclasses import replace
        >>> from shardrules import Rules
        >>> from shardrules.dialects import KERAS
        >>> before_3_14 = replace(KERAS, match=("exact", "search"))
        >>> Rules([("dense", None)], before_3_14).first_match("model/dense/kernel")
        0
    """

    name: str
    separator: str
    correction: Correction
    keys: Literal["text", "keystr"] = "text"
    match: tuple[ModeName, ...] = ("search",)
    precedence: Literal["first", "only"] = "first"
    scalars: Literal["rank 0", "size 1", "none"] = "rank 0"
    min_size: Literal["after", "before"] = "after"
    rank: RankPolicy = "truncate"
    unmatched: Literal["error", "replicate"] = "error"
    hidden_key: str | None = None

    def __repr__(self) -> str:
        return _NAMES.get(self) or without_defaults(self)

    def __post_init__(self) -> None:
        check_fields(self)
        modes = get_args(ModeName)
        is_plain = type(self.match) is tuple and {*map(type, self.match)} <= {str}
        if not is_plain or not {*self.match} <= {*modes}:
            object.__setattr__(self, "match", strings("match", self.match))
            for mode in self.match:
                check_choice("match", mode, modes)
        if not self.match:
            raise ValueError("match is empty; give at least one match mode")


# What JAX would refuse later is an error here, which names the path and the rule.
_NONE: Final = Correction(indivisible="error", rank="error", pad=False)

EFORMER = Dialect(name="eformer", separator="/", correction=Correction())
"""`eformer.escale.match_partition_rules`, as of eformer 0.0.101; the correction is that of its
`get_corrected_named_sharding`, but keeps PartitionSpec.UNCONSTRAINED."""

NNX = replace(EFORMER, name="nnx", hidden_key="value")
"""Eformer's, for the states and modules of flax nnx: without the `value` in which their paths end,
the paths are those of linen and of `nnx.to_pure_dict`."""

EASYLM = Dialect(name="EasyLM", separator="/", correction=_NONE, scalars="size 1", rank="keep")
"""`match_partition_rules` of EasyLM's jax_utils, and `TreePathShardingRule` of scalax 0.2.6."""

KEYSTR = Dialect(
    name="JAXSeq", separator="", correction=_NONE, keys="keystr", scalars="size 1", rank="keep"
)
"""`match_partition_rules` of JAXSeq's utils: EasyLM's, on `jax.tree_util.keystr` paths."""

SPECTRAX = Dialect(
    name="Spectrax",
    separator="/",
    correction=LibraryCorrection(absent="drop_axis", rank="replicate", pad=False),
    min_size="before",
)
"""`match_partition_rules` of spectrax-lib 0.1.4; the correction is that of its
`sanitize_partition_spec_for_mesh_and_shape`, on a mesh without a pipeline axis."""

KERAS = Dialect(
    name="Keras",
    separator="/",
    correction=_NONE,
    match=("exact", "fullmatch"),
    precedence="only",
    scalars="none",
    rank="error",
    unmatched="replicate",
)
"""`keras.distribution.LayoutMap` of Keras 3.15. Up to 3.13 it searched, where it wants a full match
now."""

BIG_VISION = Dialect(
    name="big_vision",
    separator="/",
    correction=Correction(indivisible="drop", rank="error"),
    match=("fullmatch",),
    scalars="none",
    rank="error",
    unmatched="replicate",
)
"""`infer_sharding` of big_vision's sharding, as of 2026. Its tactics are `fsdp` and plain specs."""

# As long as the names, as flax's specs.
_NAMES_LONG: Final = Correction(pad=False)


@dataclass(frozen=True, slots=True)
class LogicalDialect:
    """How logical axis rules apply to the names of an array.

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
        check_fields(self)
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
    correction=LibraryCorrection(absent="drop_axis", indivisible="drop_axis", pad=False),
    tries_next=False,
    keeps_size_one=False,
)
"""The dialect of MaxText: flax.linen's choice of rules, of whose mesh axes those are then dropped
that the mesh lacks or that have one device, as by `remove_size_one_mesh_axis` of MaxText's
`utils.sharding` of 2026, or that do not divide, as by `adjust_pspec_for_indivisible_shapes`."""
HALIAX: Final = LogicalDialect(
    "haliax", last_wins=True, keeps_unknown=False, correction=_NONE, tries_next=False
)
"""The dialect of haliax's axis mappings, as of `haliax.partitioning.pspec_for_axis` of haliax 1.4:
each name has one entry, whatever other dimensions use. What JAX would refuse later is an error."""

_NAMES: Final = {
    value: name
    for name, value in [*globals().items()]
    if isinstance(value, Dialect | LogicalDialect)
}
"""What the dialects above are called here: a whole record would hide the signatures in `help`."""

_AnyDialect = TypeVar("_AnyDialect", Dialect, LogicalDialect)


def dialect_of(
    dialect: _AnyDialect | None,
    correction: Correction | None,
    inherited: _AnyDialect | None,
    default: _AnyDialect,
) -> _AnyDialect:
    """Return the dialect of rules, with their correction; they may be made of rules with one."""
    if correction is not None:
        check_correction(correction)
    elif inherited is not None and inherited not in _NAMES:
        correction = inherited.correction
    dialect = dialect or inherited or default
    if correction is None or correction == dialect.correction:
        return dialect
    return replace(dialect, correction=correction)


def optional_axes_of(
    optional_axes: Iterable[str] | None, inherited: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the axes that a mesh may lack; rules may be made of rules with some."""
    if optional_axes is None:
        return inherited
    return tuple(dict.fromkeys(strings("optional_axes", optional_axes)))


def policy_shown(dialect: Dialect | LogicalDialect, optional_axes: Iterable[str]) -> list[str]:
    """Return the dialect's name, a correction that is not its own, and axes that may be absent."""
    correction = [] if dialect in _NAMES else [repr(dialect.correction)]
    optional = [f"optional_axes={list(optional_axes)}"] if optional_axes else []
    return [dialect.name, *correction, *optional]
