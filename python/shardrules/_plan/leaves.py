"""Leaves of a tree from one walk: their paths, and types that leaves which are alike share."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from shardrules._base.dtypes import bits_of, is_inexact
from shardrules._base.rule_specs import Correction, RuleSpec
from shardrules._base.specs import is_partition_spec
from shardrules._base.text import brief, shown
from shardrules._core import resolve_all
from shardrules._place.boxes import (
    box_types,
    named_array_types,
    open_boxes,
    unboxed,
    unboxed_with_names,
    variable_types,
)
from shardrules._place.mesh import memory_apart
from shardrules._place.spec_trees import (
    broadcast_specs,
    by_row,
    is_named_sharding,
    is_spec,
    is_spec_of_mesh,
    names_beside,
    no_rules,
)
from shardrules._plan.fold import Folded, Templates, fold, runs_of, templates_of
from shardrules._rules.dialects import EFORMER, Dialect
from shardrules._rules.resolver import checked_names
from shardrules._rules.rules import Rules, matcher_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._place.mesh import MeshLike
    from shardrules._plan.companions import Companion, DimStep, Link
    from shardrules._rules.logical_rules import LogicalRules

# In the place of a rule's index.
NO_RULE_NEEDED: Final = -1
UNMATCHED: Final = -2
AMBIGUOUS: Final = -3


class LeafType(NamedTuple):
    """Rule, shape and dtype of leaves of one kind, on any mesh."""

    rule: int
    """Index of the rule that decides them; or NO_RULE_NEEDED, UNMATCHED or AMBIGUOUS."""
    shape: tuple[int, ...] | None
    """None for a leaf that is not an array."""
    dtype: Any
    bits: int
    """Bits of one element; 0 for a leaf that is not an array."""
    names: tuple[Any, ...] | None = None
    """The logical axis names of its dimensions; None for a leaf without."""
    steps: tuple[DimStep, ...] = ()
    """From a leaf that companions find to the base whose rule decides it."""


_COMPONENTS: Final = re.compile(r"[^/.\[\]']+")


class _RoleNames(NamedTuple):
    """Components of paths that name what is beside the parameters."""

    anywhere: set[str]
    at_top: set[str]


# flax's, EasyLM's, EasyDeL's and Levanter's train states, nnx.Optimizer and orbax checkpoints of
# them; Paxml and haiku; T5X. At the top alone, where no layer is called so: big_vision and others.
_OPTIMIZER: Final = _RoleNames(
    {"opt_state", "opt_states", "_opt_state", "_opt_states"}
    | {"optimizer_state", "optimizer_states", "param_states"},
    {"opt", "optim", "optimizer"},
)
# And averages of the parameters: diffusers, scenic, haiku; at the top alone those of optax.ema.
_STATE: Final = _RoleNames(
    _OPTIMIZER.anywhere
    | {"ema_params", "_ema_params", "params_ema", "ema_state", "ema_model", "model_ema"},
    _OPTIMIZER.at_top | {"ema", "_ema"},
)


@dataclass(frozen=True, eq=False)
class Leaves:
    """Leaves of a tree; rows are leaves in the order of the walk."""

    rules: Rules | LogicalRules
    tree: Any
    """The tree with the number of its row for each leaf."""
    paths: list[str]
    sources: list[str]
    """Per leaf the path that the rules meet: its own, or that of what it follows."""
    kind_of: npt.NDArray[np.int32]
    """Per leaf an index of `types`."""
    types: list[LeafType]
    follows_parameters: bool = False
    """Whether they are states or gradients, for which the rules were not written."""
    by_specs: bool = False
    """Whether a tree of specs decides, each by a rule for exactly its paths."""
    is_corrected: bool = True
    """Whether specs that do not fit are corrected: not those of others, if nobody says so."""
    companions: tuple[Companion, ...] = ()
    """The companions that were given."""
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)
    """For each row that companions find, the links to its base, to the base of that, and so on. The
    row's source is the last of these bases that a rule matches, or its own path."""

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of each path."""
        return {path: row for row, path in enumerate(self.paths)}

    @cached_property
    def flat(self) -> tuple[npt.NDArray[np.int64], Any]:
        """The rows in the order of JAX's own flattening, and its structure."""
        from jax import tree_util

        rows, structure = tree_util.tree_flatten(self.tree)
        return np.array(rows, np.int64), structure

    @cached_property
    def path_rules(self) -> Rules | None:
        """The rules if they are for paths; None for logical rules."""
        return self.rules if isinstance(self.rules, Rules) else None

    @cached_property
    def paths_dialect(self) -> Dialect:
        return self.rules.dialect if isinstance(self.rules, Rules) else EFORMER

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """The number of leaves of each kind."""
        return np.bincount(self.kind_of, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def templates(self) -> Templates:
        """The paths with holes for their numbers."""
        return templates_of(self.paths)

    def _is_named(self, names: _RoleNames) -> npt.NDArray[np.bool_]:
        texts, of_path, _ = self.templates
        is_named = [
            not (names.anywhere.isdisjoint(parts) and names.at_top.isdisjoint(parts[:1]))
            for parts in map(_COMPONENTS.findall, texts)
        ]
        return np.array(is_named, np.bool_)[of_path]

    @cached_property
    def optimizer_rows(self) -> list[int]:
        """The rows of an optimizer's state, by the names in their paths."""
        return np.flatnonzero(self._is_named(_OPTIMIZER)).tolist()

    @cached_property
    def counts_by_role(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Leaves of each kind: of an optimizer's state or an average; and with a gradient.

        Gradients have the other leaves of real or complex numbers.
        """
        is_state = self._is_named(_STATE)
        inexact = np.array([is_inexact(leaf.dtype) for leaf in self.types], np.bool_)
        has_gradient = inexact[self.kind_of] & ~is_state
        state, gradients = (
            np.bincount(self.kind_of[of_role], minlength=len(self.types))
            for of_role in (is_state, has_gradient)
        )
        return state, gradients

    @cached_property
    def folded(self) -> list[Folded]:
        """Siblings folded, a kind each."""
        return fold(self.paths, self.kind_of, self.templates)


def survey(tree: Any, rules: Rules | None = None) -> Leaves:
    """Walk the tree once, by rules or by none; errors of shapes and dtypes name the path."""
    rules = no_rules() if rules is None else rules
    of_rows, paths, kinds, column = matcher_of(rules).survey(
        tree, replicated=NO_RULE_NEEDED, unmatched=UNMATCHED, ambiguous=AMBIGUOUS
    )
    kind_of = np.frombuffer(column, np.int32)
    types = []
    for number, kind in enumerate(kinds):
        try:
            types.append(leaf_type_of(*kind))
        except (TypeError, ValueError) as error:
            path = paths[int(np.argmax(kind_of == number))]
            raise type(error)(f"{path}: {error}") from None
    return Leaves(rules, of_rows, paths, paths, kind_of, types)


_MOST_BITS: Final = 2**63 - 1


def leaf_type_of(rule: int, shape: tuple[Any, ...] | None, dtype: Any) -> LeafType:
    """Return the type of leaves whose shape and dtype make sense."""
    if shape is None:
        return LeafType(rule, None, None, 0)
    for size in shape:
        if not isinstance(size, int | np.integer) or isinstance(size, bool):
            raise TypeError(
                f"a dimension of the shape {brief(shape)} is {shown(size)}, not an integer"
            )
        if size < 0:
            raise ValueError(f"a dimension of the shape {brief(shape)} is negative")
    bits = bits_of(dtype)
    # A dimension of 0 would hide others that are too large to calculate with.
    if prod([max(int(size), 1) for size in shape]) * bits > _MOST_BITS:
        raise ValueError(f"an array of shape {brief(shape)} has more bytes than can be counted")
    return LeafType(rule, tuple(map(int, shape)), dtype, bits)


def survey_named(tree: Any, rules: LogicalRules, names: Any = None) -> Leaves:
    """Walk the tree once, for rules of names."""
    if names is not None:
        leaves = replace(survey(tree), rules=rules)
        return _with_names(leaves, names_beside(leaves.tree, leaves.paths, names))
    from jax.tree_util import tree_leaves

    boxes = unboxed_with_names(tree)
    leaves = survey(boxes.tree)
    names = by_row(tree_leaves(leaves.tree), boxes.names_of_arrays())
    return _with_names(replace(leaves, rules=rules, tree=boxes.boxed(leaves.tree)), names)


def _with_names(leaves: Leaves, names: list[Any]) -> Leaves:
    """Return the leaves with their kinds told apart by their names as well."""
    numbers: dict[tuple[Any, int], int] = {}
    types: list[LeafType] = []

    def number(value: Any, kind: int) -> int:
        checked = None if value is None else checked_names(value)
        index = numbers.setdefault((checked, kind), len(types))
        if index == len(types):
            types.append(leaves.types[kind]._replace(rule=NO_RULE_NEEDED, names=checked))
        return index

    if list in set(map(type, names)):
        names = [tuple(value) if type(value) is list else value for value in names]
    kinds = leaves.kind_of.tolist()
    try:
        kind_of = resolve_all(names, kinds, {}, number)
    except TypeError:  # something is no names, or cannot be hashed
        kind_of = []
        for path, value, kind in zip(leaves.paths, names, kinds, strict=True):
            try:
                kind_of.append(number(value, kind))
            except TypeError as error:
                raise TypeError(f"names: {path}: {error}") from None
    return replace(leaves, kind_of=np.array(kind_of, np.int32), types=types)


def has_names(tree: Any) -> bool:
    """Tell whether an array of the tree has logical axis names; free without such libraries."""
    return _may_have_boxes() and any(unboxed(tree).names)


def names_in_boxes(tree: Any, rows: Any) -> dict[int, tuple[Any, ...]]:
    """Return what boxes and Variables say of the dimensions of their arrays, by row.

    `rows` has the numbers of the rows, for the tree with or without its boxes.
    """
    if not _may_have_boxes():
        return {}
    from jax.tree_util import tree_leaves

    pairs = zip(tree_leaves(rows), open_boxes(tree).names_of_arrays(), strict=True)
    return {
        row: tuple(names)
        for row, names in pairs
        if isinstance(names, tuple | list) or is_partition_spec(names)
    }


def _may_have_boxes() -> bool:
    return bool(box_types() or variable_types() or named_array_types())


_PLAIN: Final = re.compile(r"[\w-]+")


def check_rules_are_for_paths(leaves: Leaves, rules: Rules, tree: Any) -> None:
    """Check that rules for paths are not logical axis rules for the tree's boxes."""
    if not _may_have_boxes():
        return
    patterns = [pattern for pattern, _ in rules]
    if not all(isinstance(pattern, str) and _PLAIN.fullmatch(pattern) for pattern in patterns):
        return
    names = {name for of_row in names_in_boxes(tree, leaves.tree).values() for name in of_row}
    if names.isdisjoint(patterns):
        return
    matches_nothing = set(matcher_of(rules).coverage_of_paths(leaves.paths).dead)
    if all(p in names or index in matches_nothing for index, p in enumerate(patterns)):
        raise TypeError(
            "the rules are for the logical axis names in the tree's boxes, such as "
            f"{next(p for p in patterns if p in names)!r}, and here patterns are searched for in "
            "paths. Give shardrules.LogicalRules(rules); if they are patterns of paths, unbox the "
            "tree first"
        )


def first_rules(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Return, per path, the index of the rule that decides it, or UNMATCHED or AMBIGUOUS."""
    matcher = matcher_of(rules).for_whole_paths()
    indices = matcher.decide(
        dict.fromkeys(paths, 0),
        matcher.rule_indices(),
        NO_RULE_NEEDED,
        UNMATCHED,
        AMBIGUOUS,
        strict=False,
    )
    return indices.tree  # type: ignore[no-any-return]


def leaves_by_rules(leaves: Leaves, rules: Rules) -> Leaves:
    """Decide the same leaves by other rules; the tree is not walked again."""
    before, after = leaves.paths_dialect, rules.dialect
    for name in ("keys", "separator", "hidden_key", "scalars"):
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"the dialect {after.name} has other {name} than {before.name}, whose paths these "
                "are: plan the tree itself with the rules"
            )
    first = first_rules(rules, leaves.paths)
    count = len(leaves.paths)
    rule_of = np.fromiter(map(first.__getitem__, leaves.paths), np.int64, count)
    needs_none = np.array([_needs_no_rule(leaf, rules) for leaf in leaves.types], bool)
    is_small = np.array([prod(leaf.shape or ()) < rules.min_size for leaf in leaves.types], bool)
    rule_of[(is_small[leaves.kind_of] & (rule_of >= 0)) | needs_none[leaves.kind_of]] = (
        NO_RULE_NEEDED
    )
    # AMBIGUOUS is the least that a rule's number is.
    pairs, kind_of = np.unique(
        leaves.kind_of * np.int64(len(rules) - AMBIGUOUS) + (rule_of - AMBIGUOUS),
        return_inverse=True,
    )
    types = [
        leaves.types[kind]._replace(rule=rule + AMBIGUOUS, steps=())
        for kind, rule in (divmod(pair, len(rules) - AMBIGUOUS) for pair in pairs.tolist())
    ]
    kind_of = kind_of.astype(np.int32)
    return Leaves(rules, leaves.tree, leaves.paths, leaves.paths, kind_of, types)


def _needs_no_rule(leaf: LeafType, rules: Rules) -> bool:
    """Tell whether the dialect replicates such a leaf, whatever matches its path."""
    dialect, size = rules.dialect, prod(leaf.shape or ())
    if dialect.min_size == "before" and size < rules.min_size:
        return True
    return dialect.scalars != "none" and (
        not leaf.shape or (dialect.scalars == "size 1" and size == 1)
    )


def mesh_of_shardings(specs: Any) -> MeshLike | None:
    """Return the mesh of the shardings in a tree of specs; None if they have none or several."""
    from jax import tree_util

    leaves = tree_util.tree_leaves(specs, is_leaf=is_spec)
    meshes = {sharding.mesh for sharding in leaves if is_named_sharding(sharding)}
    return meshes.pop() if len(meshes) == 1 else None


def leaves_by_specs(leaves: Leaves, specs: Any, correction: Correction | None = None) -> Leaves:
    """Decide leaves by specs or shardings, one for all or a tree of them."""
    leaves = leaves_by_rules(leaves, _rules_of_specs(leaves, specs, correction))
    return replace(leaves, by_specs=True, is_corrected=correction is not None)


_GIVE: Final = "give a PartitionSpec, a NamedSharding, or None for a leaf that nothing decides"


def _rules_of_specs(leaves: Leaves, specs: Any, correction: Correction | None) -> Rules:
    """Return the rules that give each leaf, surveyed by no rules, its spec in a tree of specs."""
    from jax import tree_util

    rows, treedef = tree_util.tree_flatten(leaves.tree)
    spread = broadcast_specs("rules", leaves.tree, treedef, specs)
    spec_of = dict(zip(rows, spread, strict=True))
    if spread and all(spec is None for spec in spread):
        raise TypeError(f"rules: no leaf has a spec: {shown(specs)}; {_GIVE}")
    needs_none = [leaf.rule == NO_RULE_NEEDED for leaf in leaves.types]
    with_spec = [
        row
        for row, kind in enumerate(leaves.kind_of.tolist())
        if spec_of[row] is not None and not needs_none[kind]
    ]
    values, group_of = grouped(_rule_value(leaves.paths[row], spec_of[row]) for row in with_spec)
    # No path matches two of these patterns: each lists exactly its own paths.
    folded = fold([leaves.paths[row] for row in with_spec], group_of)
    pairs = [(rf"^{''.join(_regexes(paths))}$", values[paths.group]) for paths in folded]
    return Rules(pairs, EFORMER, correction=correction)


def _rule_value(path: str, spec: Any) -> Any:
    """Return what a rule says for this spec or sharding."""
    if is_spec_of_mesh(spec):
        return spec
    if not is_named_sharding(spec):
        raise TypeError(f"rules: for the leaf {path} the spec is {shown(spec)}; {_GIVE}")
    memory: Any = memory_apart(spec)
    return spec.spec if memory is None else RuleSpec(spec.spec, memory_kind=memory)


def _regexes(folded: Folded) -> Iterator[str]:
    for place, part in enumerate(folded.parts):
        if place % 2 == 0:
            yield re.escape(part).replace(r"\-", "-")
        else:
            numbers = (str(number) for run in runs_of(part.strip("{}")) for number in run)
            yield f"({'|'.join(numbers)})"


_Key = TypeVar("_Key", bound=Hashable)


def grouped(keys: Iterable[_Key]) -> tuple[list[_Key], np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Return the distinct keys in order, and per key the index of its equal among them."""
    numbers: dict[_Key, int] = {}
    column = [numbers.setdefault(key, len(numbers)) for key in keys]
    return list(numbers), np.array(column, np.int32)
