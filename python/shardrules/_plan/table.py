"""The value under `Plan`: the spec and the bytes of each leaf of a tree on a mesh, as columns.

A column has a row for each leaf, in the order of the walk; what leaves have in common is in
`kinds`, once for each kind.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from shardrules._base.dtypes import is_inexact
from shardrules._base.rule_specs import Fsdp, MemoryKind, in_memory, plain_spec
from shardrules._base.specs import Entries, entries_of, entry_axes, is_unconstrained, spec_shown
from shardrules._base.text import record
from shardrules._plan.fold import Folded, Templates, fold, templates_of
from shardrules._rules.dialects import EFORMER, Dialect
from shardrules._rules.matcher import Coverage
from shardrules._rules.rules import Rules, matcher_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from jax.sharding import PartitionSpec

    from shardrules._place.spec_on_mesh import LossKind
    from shardrules._plan.companions import Companion, Link
    from shardrules._plan.device_bytes import Held
    from shardrules._rules.logical_rules import LogicalRules
    from shardrules._rules.resolver import LostRule

Spec: TypeAlias = "PartitionSpec | Entries"

DEFAULT_LARGE: Final = 16 * 2**20
"""Minimum bytes per device for a replicated leaf to be reported."""
"""Collectives that a device runs while it computes, by default."""


# flax's, EasyLM's, EasyDeL's and Levanter's train states, nnx.Optimizer and orbax checkpoints of
# them; Paxml and haiku; T5X. At the top alone, where no layer is called so: big_vision and others.
_OPTIMIZER: Final = ("_?opt_states?|optimizer_states?|param_states", "opt|optim|optimizer")
# Averages of the parameters: diffusers, scenic, haiku; at the top alone those of optax.ema.
_AVERAGES: Final = ("_?ema_params|params_ema|ema_state|ema_model|model_ema", "_?ema")

# At the top alone: flax's collection of what modules sow, and ours.
_ACTIVATIONS: Final = ("(?!)", "activations|intermediates")


def _component_pattern(anywhere: str, at_top: str) -> re.Pattern[str]:
    """Compile a pattern that finds the names as whole components of paths."""
    begin, end = r"[/.\[\]']", r"(?:[/.\[\]']|$)"
    return re.compile(rf"(?:(?:^|{begin})(?:{anywhere})|^{begin}*(?:{at_top})){end}")


_OF_OPTIMIZER: Final = _component_pattern(*_OPTIMIZER)
_OF_STATE: Final = _component_pattern(*map("|".join, zip(_OPTIMIZER, _AVERAGES, strict=True)))

_OF_ACTIVATIONS: Final = _component_pattern(*_ACTIVATIONS)


def optimizer_leaves(paths: list[str]) -> list[int]:
    """Return the indices of leaves of an optimizer's state, by the names of `DeviceBytes`."""
    return _matching(paths, _OF_OPTIMIZER, ("opt", "param_states"))


def state_leaves(paths: list[str]) -> list[int]:
    """Return the indices of the optimizer's state and of averages of the parameters."""
    return _matching(paths, _OF_STATE, ("opt", "param_states", "ema"))


def activation_leaves(paths: list[str]) -> list[int]:
    """Return the indices of activations, by the names of `DeviceBytes`."""
    return _matching(paths, _OF_ACTIVATIONS, ("activ", "interm"))


def _matching(paths: list[str], names: re.Pattern[str], words: tuple[str, ...]) -> list[int]:
    # Most trees have none of these words, and most paths of the others neither; looking for a word
    # is ten times as fast as the pattern.
    text = "\n".join(paths)
    present = [word for word in words if word in text]
    if not present:
        return []
    return [
        index
        for index, path in enumerate(paths)
        if any(word in path for word in present) and names.search(path)
    ]


# In the place of a rule's index.
NO_RULE_NEEDED: Final = -1
UNMATCHED: Final = -2
AMBIGUOUS: Final = -3


def first_rules(rules: Rules, paths: Iterable[str]) -> dict[str, int]:
    """Return, per path, the index of the rule that decides it, or UNMATCHED or AMBIGUOUS."""
    matcher = matcher_of(rules).for_whole_paths()
    decided = matcher.decide(
        dict.fromkeys(paths, 0),
        matcher.rule_indices(),
        NO_RULE_NEEDED,
        UNMATCHED,
        AMBIGUOUS,
        strict=False,
    )
    return decided.tree  # type: ignore[no-any-return]


class LeafType(NamedTuple):
    """Rule, shape and dtype of leaves of one kind, on any mesh."""

    rule: int
    """Index of the rule that decides them, or one of the negative numbers of `path_rules`."""
    shape: tuple[int, ...] | None
    """None for a leaf that is not an array."""
    dtype: Any
    bits: int
    """Bits of one element; 0 for a leaf that is not an array."""
    names: tuple[Any, ...] | None = None
    """The logical axis names of its dimensions; None for a leaf without."""


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
    companions: tuple[Companion, ...] = ()
    """The companions that were given."""
    links: Mapping[int, tuple[Link, ...]] = field(default_factory=dict)
    """For each row that companions find, the links to its base, to the base of that, and so on. The
    row's source is the last of these bases that a rule matches, or its own path."""

    @cached_property
    def rows(self) -> dict[str, int]:
        """Maps each path to its row."""
        return {path: row for row, path in enumerate(self.paths)}

    @cached_property
    def path_rules(self) -> Rules | None:
        """Returns the rules if they are for paths; None for logical rules."""
        return self.rules if isinstance(self.rules, Rules) else None

    @cached_property
    def paths_dialect(self) -> Dialect:
        return self.rules.dialect if isinstance(self.rules, Rules) else EFORMER

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Counts the leaves of each kind."""
        return np.bincount(self.kind_of, minlength=len(self.types)).astype(np.int64)

    @cached_property
    def templates(self) -> Templates:
        """Returns the paths with holes for their numbers."""
        return templates_of(self.paths)

    @cached_property
    def optimizer_rows(self) -> list[int]:
        """Lists the rows of an optimizer's state, by the names in their paths."""
        rows: list[int] = self._rows(optimizer_leaves).tolist()
        return rows

    @cached_property
    def state_rows(self) -> npt.NDArray[np.intp]:
        """Finds the rows of an optimizer's state and of averages of the parameters."""
        return self._rows(state_leaves)

    @cached_property
    def activation_rows(self) -> npt.NDArray[np.intp]:
        return self._rows(activation_leaves)

    @cached_property
    def gradient_rows(self) -> npt.NDArray[np.intp]:
        """Finds the rows of leaves with gradients: parameters of real or complex numbers."""
        has_gradient = np.array([is_inexact(leaf.dtype) for leaf in self.types], bool)[self.kind_of]
        has_gradient[self.state_rows] = False
        has_gradient[self.activation_rows] = False
        return np.flatnonzero(has_gradient)

    @cached_property
    def state_counts(self) -> npt.NDArray[np.int64]:
        """Counts, per kind, the leaves of an optimizer's state or of averages of parameters."""
        return self._counts(self.state_rows)

    @cached_property
    def activation_counts(self) -> npt.NDArray[np.int64]:
        """Counts, per kind, the leaves that are activations."""
        return self._counts(self.activation_rows)

    @cached_property
    def gradient_counts(self) -> npt.NDArray[np.int64]:
        """Counts, per kind, the leaves with gradients."""
        return self._counts(self.gradient_rows)

    def _rows(self, indices_of: Callable[[list[str]], list[int]]) -> npt.NDArray[np.intp]:
        is_in = np.zeros(len(self.templates.texts), np.bool_)
        is_in[indices_of(self.templates.texts)] = True
        return np.flatnonzero(is_in[self.templates.of_path])

    def _counts(self, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        return np.bincount(self.kind_of[rows], minlength=len(self.types)).astype(np.int64)

    @cached_property
    def folded(self) -> list[Folded]:
        """Folds siblings, a kind each."""
        return fold(self.paths, self.kind_of, self.templates)

    @cached_property
    def guessed(self) -> dict[str, tuple[str, ...]]:
        """Returns what names say of bytes: {"optimizer" or "activations": folded paths}."""
        rows = {"optimizer": self.state_rows, "activations": self.activation_rows}
        of_row = {row: name for name, of in rows.items() for row in of.tolist()}
        paths: dict[str, list[str]] = {}
        for part in self.folded if of_row else ():
            if (name := of_row.get(int(part.rows[0]))) is not None:
                paths.setdefault(name, []).append(part.pattern)
        return {name: tuple(of) for name, of in paths.items()}


Status = Literal["placed", "unmatched", "ambiguous", "misfit"]


@record
class Loss(NamedTuple):
    """Axes of the rule's spec that leaves do not get; in `Kind.losses`.

    Example:
        >>> import jax, shardrules as sr
        >>> plan = sr.plan({"w": jax.ShapeDtypeStruct((6,), "float32")}, [("w", "tp")], {"tp": 4})
        >>> (loss,) = plan.kind("w").losses
        >>> loss.kind, loss.axes, loss.bytes
        ('indivisible', ('tp',), 18)
    """

    kind: LossKind
    """Why: "absent" from the mesh, or so as is declared that it may be ("optional"); "indivisible";
    beyond the leaf's "rank"; or a "duplicate"."""
    dim: int
    """The dimension that they were to cut."""
    axes: tuple[str, ...]
    meant: tuple[str, ...]
    """Axes of the mesh that absent ones were probably meant to be."""
    beside: tuple[str, ...]
    """Axes of the mesh that are lost only because they stand beside absent ones."""
    bytes: int
    """Bytes on the fullest device that there would not be without this loss."""
    message: str
    fix: str
    is_error: bool = False
    """Whether the correction forbids it, so that the leaves are not placed."""


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Leaves with one rule, shape and dtype, hence with one spec and one number of bytes."""

    rule: int | None
    """Index of the rule that decides them; None if none matches or none is needed."""
    shape: tuple[int, ...] | None
    """None for leaves that are not arrays."""
    dtype: Any
    """The leaves' own dtype; None for leaves that are not arrays."""
    status: Status
    """"placed"; or why there is no spec: no rule matches ("unmatched"), several do where only one
    may ("ambiguous"), or the rule's spec does not fit the shape or the mesh ("misfit")."""
    message: str | None
    """The reason why they are not placed; None if they are."""
    fix: str | None
    """A remedy, if one is known."""
    wanted: Spec | None
    """The spec that the rule says or makes of the shape, before it was made to fit; None without a
    rule."""
    spec: Spec | None
    """The corrected spec; None if they are not placed."""
    losses: tuple[Loss, ...]
    """The axes that `spec` lacks of `wanted`."""
    origin: str | None
    """Where the wanted spec comes from, if it is not the rule's own."""
    names: tuple[Any, ...] | None
    """The logical axis names of the dimensions; None for leaves without."""
    dim_rules: tuple[int | None, ...]
    """Per dimension with a name, the index of the logical rule that decides it, if one does."""
    lost_rules: tuple[LostRule, ...] = field(repr=False)
    """The logical rules for the names that do not decide them, and why."""
    memory_kind: MemoryKind | None
    """The memory that the rule names; None if it says nothing."""
    bytes: int
    """Bytes of one whole leaf."""
    device_bytes: int
    """Bytes of one leaf for the device that holds most of it, in the device's memory or the
    host's."""
    _held: Held = field(repr=False)
    """The parts of one leaf that the devices hold."""
    _counted: Spec | None = field(repr=False)
    """The spec that bytes are counted by: that of leaves that are placed, and for others the one
    without the axes that the mesh lacks, if these alone are wrong."""

    @property
    def deciders(self) -> tuple[int, ...]:
        """Returns the indices of the rules that decide the leaves, ascending."""
        rules = (self.rule, *self.dim_rules)
        return tuple(sorted({rule for rule in rules if rule is not None}))

    @property
    def decided_by(self) -> int | tuple[Any, ...] | None:
        """Returns the index of the rule that decides, or the leaves' names; None without both."""
        return self.rule if self.names is None else self.names


def decided_shown(kind: Kind) -> str:
    """Return what decides, for a table: a rule, or the names with their rules; - for neither."""
    if kind.names is None:
        return "-" if kind.rule is None else str(kind.rule)
    rules = kind.dim_rules or (None,) * len(kind.names)
    texts = (
        "-" if name is None else str(name) if rule is None else f"{name}: {rule}"
        for name, rule in zip(kind.names, rules, strict=True)
    )
    return ", ".join(texts)


def dtype_shown(kind: Kind) -> str:
    """Return the dtype's name; - for leaves that are not arrays."""
    return "-" if kind.dtype is None else str(kind.dtype)


def problem_shown(kind: Kind) -> str | None:
    """Return the text in the place of a spec in tables and locks; None for placed leaves."""
    if kind.status == "placed":
        return None
    return kind.message if kind.status == "misfit" else kind.status


def placement_shown(kind: Kind) -> str:
    """Format the spec and the memory kind as people write them; - for leaves not placed."""
    return in_memory(spec_shown(kind.spec), kind.memory_kind)


def refused(losses: Sequence[Loss]) -> tuple[str, str]:
    """Return (message, fix) of leaves with these losses, which the correction forbids."""
    messages = dict.fromkeys(loss.message for loss in losses)
    return "; ".join(messages), "; ".join(dict.fromkeys(loss.fix for loss in losses))


@lru_cache(maxsize=4096)
def axes_named(spec: Spec | Fsdp | None) -> frozenset[str]:
    if isinstance(spec, Fsdp):
        return spec.named
    entries = entries_of(spec if spec is not None else Entries())
    return frozenset(axis for entry in entries for axis in entry_axes(entry))


def axes_used(spec: Spec | None, axis_sizes: Mapping[str, int]) -> frozenset[str]:
    """Return the axes of more than one device that cut an array with this spec."""
    return frozenset(axis for axis in axes_named(spec) if axis_sizes.get(axis, 1) > 1)


def could_cut(axis: str, kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Tell whether the axis cuts no dimension of these leaves, and could cut one further."""
    if kind.spec is None or kind.shape is None or len(kind.shape) < 2:
        return False
    if axis in axes_named(kind.spec):
        return False
    dims = [*_axes_of_dims(kind.spec), *[()] * (len(kind.shape) - len(kind.spec))]
    return any(
        size > 0
        and axes is not None
        and size % prod(axis_sizes.get(name, 1) for name in (*axes, axis)) == 0
        for size, axes in zip(kind.shape, dims, strict=True)
    )


@lru_cache(maxsize=4096)
def _axes_of_dims(spec: Spec) -> tuple[tuple[str, ...] | None, ...]:
    """Return the axes of each entry; None for UNCONSTRAINED."""
    return tuple(None if is_unconstrained(e) else entry_axes(e) for e in entries_of(spec))


def is_replicated(kind: Kind, axis_sizes: Mapping[str, int]) -> bool:
    """Tell whether each of several devices holds these leaves whole."""
    several = kind.spec is not None and kind.bytes > 0 and prod(axis_sizes.values()) > 1
    return several and not axes_used(kind.spec, axis_sizes)


def coverage_of_names(
    rules: Iterable[tuple[Any, Any]], kinds: Iterable[Kind], counts: Iterable[int]
) -> Coverage:
    """Count, per rule, the leaves with its name, and those of which it decides a dimension."""
    pairs = tuple(rules)
    of_name: dict[Any, list[int]] = defaultdict(list)
    for index, (name, _) in enumerate(pairs):
        of_name[name].append(index)
    matched, won = [0] * len(pairs), [0] * len(pairs)
    lost: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    unmatched = 0
    for kind, count in zip(kinds, counts, strict=True):
        names = kind.names or ()
        if not any(name in of_name for name in names):
            unmatched += count
        for name in dict.fromkeys(names):
            for rule in of_name.get(name, ()):
                matched[rule] += count
        for winner in set(kind.dim_rules) - {None}:
            won[winner] += count  # type: ignore[index]
        for loser in kind.lost_rules:
            if loser.why == "dim taken" and loser.to is not None:
                lost[loser.rule][loser.to] += count
    return Coverage(
        tuple(matched), tuple(won), unmatched, {rule: dict(by) for rule, by in lost.items()}
    )


@dataclass(frozen=True, eq=False)
class Columns:
    """Shardings of the leaves of a tree on a mesh."""

    _leaves: Leaves
    kinds: list[Kind]
    """The kinds of leaves: one record for all leaves that are alike."""
    axis_sizes: dict[str, int]
    """Devices along each axis of `mesh`, in its order."""
    _explicit_axes: frozenset[str] = frozenset()
    """The mesh axes of type Explicit; those of a dict are of type Auto."""

    @cached_property
    def rules(self) -> Rules | LogicalRules:
        """Returns the rules that decide the leaves."""
        return self._leaves.rules

    @cached_property
    def paths(self) -> list[str]:
        """Lists the leaves' paths: a column."""
        return self._leaves.paths

    @cached_property
    def sources(self) -> list[str]:
        """Lists the paths that rules match, of the leaves or of what they follow: a column."""
        return self._leaves.sources

    @cached_property
    def kind_of(self) -> npt.NDArray[np.int32]:
        """Returns the index of each leaf's kind in `kinds`: a column, int32."""
        return self._leaves.kind_of

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """Counts the leaves of each kind, int64."""
        return self._leaves.counts

    @cached_property
    def folded(self) -> list[Folded]:
        """Folds siblings: patterns such as `layers/{0..60}/w`, a kind each."""
        return self._leaves.folded

    @cached_property
    def rule(self) -> npt.NDArray[np.int32]:
        """Returns the index of the rule that decides each leaf, or -1: a column, int32."""
        rules = [-1 if kind.rule is None else kind.rule for kind in self.kinds]
        return np.array(rules, np.int32)[self.kind_of]

    @property
    def total_bytes(self) -> int:
        """Sums the bytes of all leaves, exactly where int64 is too small for the sum."""
        counted = zip(self.kinds, self.counts.tolist(), strict=True)
        return sum(kind.bytes * count for kind, count in counted)

    @cached_property
    def devices(self) -> int:
        """Counts the devices of the mesh."""
        return prod(self.axis_sizes.values())

    @cached_property
    def _held(self) -> list[Held]:
        """Returns, per kind, what the devices hold of one leaf."""
        return [kind._held for kind in self.kinds]

    @cached_property
    def coverage(self) -> Coverage:
        """Counts the leaves that each rule matches and wins, among those that need a rule."""
        rules = self._leaves.path_rules
        if rules is None:
            return coverage_of_names(self.rules, self.kinds, self.counts.tolist())
        needed = [kind.rule is not None or kind.status != "placed" for kind in self.kinds]
        sources = self.sources
        if not all(needed):
            rows = np.flatnonzero(np.array(needed, bool)[self.kind_of])
            sources = list(map(sources.__getitem__, rows.tolist()))
        if sources is not self._leaves.paths:  # several leaves may follow one
            sources = list(dict.fromkeys(sources))
        return matcher_of(rules).coverage_of_paths(sources)

    def _spec_of_rule(self, index: int) -> Spec:
        """Return the spec that a rule asks for; of one dimension for a logical rule."""
        value = self.rules[index][1]
        is_for_paths = self._leaves.path_rules is not None
        return plain_spec(value) if is_for_paths else Entries((value,))

    def _is_on(self, axis_sizes: Mapping[str, int]) -> bool:
        """Tell whether the mesh has these axes, in this order."""
        return list(self.axis_sizes.items()) == list(axis_sizes.items())
