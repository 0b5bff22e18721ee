"""Writes rules for the leaves of a tree: their specs, and patterns proven on the tree's paths.

The axes of each array are chosen first: few bytes on a device, and few choices experts avoid.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules._base.specs import Entries, entry_of, trimmed
from shardrules._base.text import brief, counted
from shardrules._plan.path_words import AxisUse, is_gathered, use_of, uses_of
from shardrules._plan.plan import Plan
from shardrules._plan.suggest.patterns import (
    Label,
    Path,
    Phrase,
    Unit,
    is_short,
    pattern_of,
    phrases,
)
from shardrules._rules.patterns import Pattern, pattern_shown
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.roles import Dims, Side
    from shardrules._rules.dialects import Dialect

Axes = tuple[str, ...]
Cuts = tuple[Axes, ...]
"""Axes that shard each dimension."""


class Draft(NamedTuple):
    """Rules with the leaves that they were written for."""

    rules: Rules
    units: list[tuple[Unit, ...]]
    """Units of each rule."""

    def strays(self, rule_of: npt.NDArray[np.int32]) -> list[int]:
        """List the rows that another rule decides than the one that is meant for them."""
        intended = rule_of.copy()
        for rule, units in enumerate(self.units):
            for unit in units:
                intended[unit.folded.rows] = rule
        rows: list[int] = np.flatnonzero(intended != rule_of).tolist()
        return rows


def draft(plan: Plan, units: Sequence[Unit]) -> Draft:
    """Write rules for the leaves of a plan."""
    rules, sizes = plan._leaves.path_rules, plan.axis_sizes
    assert rules is not None
    uses = uses_of(sizes)
    cuts = _with_followers(units, _choose_cuts(units, sizes, uses), sizes)
    labelled = [(unit, _label_of(unit, of_unit)) for unit, of_unit in zip(units, cuts, strict=True)]
    return _rules_for_labels(labelled, rules.dialect)


def draft_of_specs(units: Iterable[Unit], specs: Mapping[str, Entries], dialect: Dialect) -> Draft:
    """Write rules that give leaves these specs: at most `MOST_RULES`, where specs are no more."""
    labelled: list[tuple[Unit, Label]] = []
    for unit in units:
        rows_of: dict[Label, list[int]] = defaultdict(list)
        for row in unit.folded.rows.tolist():
            spec = specs[unit.paths[int(row)]]
            rows_of[Label(spec, is_plain=spec == Entries(), is_known=True)].append(row)
        labelled += [(unit.with_rows(rows), label) for label, rows in rows_of.items()]
    return _rules_for_labels(labelled, dialect, joins=True)


def _label_of(unit: Unit, cuts: Cuts) -> Label:
    """Label a unit that is cut so."""
    dims = unit.dims
    spec = Entries(trimmed(map(entry_of, cuts)))
    sides = tuple(side for side, axes in zip(dims.sides, cuts, strict=True) if axes)
    return Label(spec, dims.is_vector, dims.is_known, (dims.is_vector, dims.is_vector or sides))


# The share of the fewest bytes that comfort may cost in all.
SLACK: Final = 0.008
# A part of fewer elements, such as of LoRA's rank, is hardly worth what it sends.
_FEW_ELEMENTS: Final = 8
_COUNTED: Final = ("experts", "heads", "layers")
# Discomfort of sharding a side by an axis; sides that are not there are not sharded.
_DISCOMFORT: Final[dict[AxisUse, dict[Side, int]]] = {
    # Gathered whole before use: any side will do. Few and large parts are the residual side's.
    "fsdp": {"residual": 0, "hidden": 1, "heads": 1, "vocabulary": 2, "experts": 3, "head": 3,
             "window": 8, "vector": 10},
    # Column-parallel into heads and hidden units, row-parallel back: one sum for each pair.
    "tensor": {"hidden": 0, "heads": 0, "vocabulary": 0, "residual": 4, "experts": 2,
               "window": 9},
    # Beside experts, as another axis of fsdp.
    "experts": {"experts": -6, "residual": 2, "hidden": 3, "heads": 3, "vocabulary": 4,
                "window": 9, "vector": 11},
    # A stage of a pipeline has layers of its own.
    "layers": {"layers": -6},
    "data": {},
}  # fmt: skip
# Sides of keys and values, routers and latents that tensor axes may shard; of others any.
_TENSOR: Final[dict[str, tuple[Side, ...]]] = {"heads": ("heads", "hidden"), "none": ()}


class _Layout(NamedTuple):
    """A way to cut an array, and what it costs."""

    share: float
    """Share of the array on a device."""
    discomfort: int
    cuts: Cuts


def _choose_cuts(
    units: Sequence[Unit], axis_sizes: Mapping[str, int], uses: Mapping[str, AxisUse]
) -> list[Cuts]:
    """Choose the axes that shard each dimension of the units: see the table of discomforts.

    Each has the fewest bytes, and least discomfort among these. Arrays that are alike, and all
    biases and norms together, have least discomfort if the bytes that this costs are within
    `SLACK`, the cheapest first.
    """
    sizes = {axis: size for axis, size in axis_sizes.items() if size > 1 and uses[axis] != "data"}

    @cache
    def layouts_of(shape: tuple[int, ...], dims: Dims) -> tuple[_Layout, _Layout]:
        layouts = [*_layouts(shape, dims, sizes, uses)]
        return min(layouts, key=itemgetter(0, 1)), min(layouts, key=itemgetter(1, 0))

    groups: dict[object, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        groups[None if unit.dims.is_vector else (unit.shape, unit.dims)].append(number)
    pairs = [layouts_of(unit.shape, unit.dims) for unit in units]
    slack = SLACK * sum(pair[0].share * unit.bytes for pair, unit in zip(pairs, units, strict=True))
    cuts = [pair[0].cuts for pair in pairs]
    costs = {
        key: sum((pairs[n][1].share - pairs[n][0].share) * units[n].bytes for n in members)
        for key, members in groups.items()
    }
    for key in sorted(groups, key=costs.__getitem__):
        slack -= costs[key]
        if slack >= 0:
            for number in groups[key]:
                cuts[number] = pairs[number][1].cuts
    return cuts


def _layouts(
    shape: tuple[int, ...], dims: Dims, axis_sizes: Mapping[str, int], uses: Mapping[str, AxisUse]
) -> Iterator[_Layout]:
    """Yield all ways to lay the axes along the dimensions that they divide, and may shard."""
    choices: list[list[int | None]] = [
        [None, *(dim for dim, side in enumerate(dims.sides)
                 if side in _DISCOMFORT[uses[axis]] and shape[dim] % axis_sizes[axis] == 0
                 and (uses[axis] != "tensor" or side in _TENSOR.get(dims.tensor, (side,))))]
        for axis in axis_sizes
    ]  # fmt: skip
    for places in itertools.product(*choices):
        cuts: Cuts = tuple(
            tuple(axis for axis, place in zip(axis_sizes, places, strict=True) if place == dim)
            for dim in range(len(shape))
        )
        counts = [prod(axis_sizes[axis] for axis in axes) for axes in cuts]
        if any(size % count for size, count in zip(shape, counts, strict=True)):
            continue
        if dims.unit > 1 and "hidden" in dims.sides:
            # Axes that compute with parts keep heads whole; others gather them.
            hidden = dims.sides.index("hidden")
            count = prod(axis_sizes[axis] for axis in cuts[hidden] if not is_gathered(axis))
            if count > 1 and shape[hidden] // count % dims.unit:
                continue
        discomfort = sum(
            _DISCOMFORT[uses[axis]][side]
            for side, axes in zip(dims.sides, cuts, strict=True)
            for axis in axes
        )
        discomfort += 2 * sum(
            count > 1 and size // count < _FEW_ELEMENTS and side not in _COUNTED
            for size, count, side in zip(shape, counts, dims.sides, strict=True)
        )
        yield _Layout(1 / prod(counts), discomfort, cuts)


_SCALES: Final = re.compile(r"(.*_)?scales?(_\w+)?")
# Arrays that have such a name belong to the kernel of their module; others begin with its name.
_OF_MODULE: Final = re.compile(r"b|bias|scales?")


def _with_followers(
    units: Sequence[Unit], cuts: Sequence[Cuts], axis_sizes: Mapping[str, int]
) -> list[Cuts]:
    """Shard biases by the axes of their kernels' columns, and scales by all of their kernels'.

    What would hold more bytes then stays as it is.
    """

    def part_count(of: Cuts) -> int:
        return prod(axis_sizes[axis] for axes in of for axis in axes)

    kernels: dict[Axes, list[int]] = defaultdict(list)
    for number, unit in enumerate(units):
        if not unit.dims.is_vector:
            kernels[unit.names[:-1]].append(number)
    cuts_with_followers = list(cuts)
    for number, unit in enumerate(units):
        *module, name = unit.names
        siblings = kernels[*module] if unit.dims.is_vector else ()
        for kernel in siblings:
            if _belongs(name, units[kernel].names[-1], len(siblings)):
                followed = _followed_kernel(unit, units[kernel], cuts[kernel], axis_sizes)
                if part_count(followed) >= part_count(cuts[number]):
                    cuts_with_followers[number] = followed
                break
    return cuts_with_followers


def _belongs(name: str, kernel: str, kernels: int) -> bool:
    """Tell if an array of this name belongs to the kernel, one of so many in the module."""
    if _OF_MODULE.fullmatch(name):
        return kernels == 1
    is_its = name.startswith(f"{kernel}_") or name == f"{kernel.removesuffix('_blocks')}_scales"
    return is_its and (name.endswith("_bias") or _SCALES.fullmatch(name) is not None)


def _followed_kernel(unit: Unit, kernel: Unit, cuts: Cuts, axis_sizes: Mapping[str, int]) -> Cuts:
    """Return the axes of each dimension of the array as those of the kernel's, if any."""
    if _SCALES.fullmatch(unit.names[-1]) and 1 < len(unit.shape) <= len(kernel.shape):
        # Scales are of blocks, which are fewer: as many of the axes as divide them.
        return tuple(
            next(
                axes[:end]
                for end in range(len(axes), -1, -1)
                if size % prod(axis_sizes[axis] for axis in axes[:end]) == 0
            )
            for size, axes in zip(unit.shape, cuts, strict=False)
        )
    columns = [*kernel.dims.columns]
    cuts_of_columns: list[Axes] = []
    for size in unit.shape:
        column = next((column for column in columns if kernel.shape[column] == size), None)
        if column is None:
            cuts_of_columns.append(())
            continue
        columns.remove(column)
        # Along other dimensions, axes of experts are as those of fsdp.
        is_of_experts = kernel.dims.sides[column] == "experts"
        uses = {"tensor", "layers", *(["experts"] if is_of_experts else [])}
        cuts_of_columns.append(tuple(axis for axis in cuts[column] if use_of(axis) in uses))
    return tuple(cuts_of_columns)


_MOST_NAMES: Final = 64
MOST_RULES: Final = 12
"""Rules of a solution, if it has no more specs."""
_Pairs = list[tuple["Pattern", Entries]]


def _rules_for_labels(
    labelled: list[tuple[Unit, Label]], dialect: Dialect, *, joins: bool = False
) -> Draft:
    """Write rules for units with labels; those of one spec are joined, if they are to be few."""
    labelled = _with_numbers(labelled, dialect)
    ends, units = phrases(labelled), [unit for unit, _ in labelled]
    for end in ends:
        if any(len(word.names) > _MOST_NAMES for word in end.words):
            raise ValueError(
                f"{counted(len(end.units), 'path')}, such as {brief(units[end.units[0]].path)}, "
                "have too many names for rules: give the specs themselves to plan, or cut each "
                "array's largest dimension, with [('.*', shardrules.fsdp(axis))]"
            )
    pairs, of_rules = _loosest_patterns(ends, units, dialect)
    if joins:
        pairs, of_rules = _joined_rules(ends, pairs, of_rules)
    return Draft(Rules(pairs, dialect), of_rules)


def _with_numbers(labelled: list[tuple[Unit, Label]], dialect: Dialect) -> list[tuple[Unit, Label]]:
    """Write numbers out where only these tell labels apart; the commonest label may stay open."""
    leaves_of: dict[Path, Counter[Label]] = defaultdict(Counter)
    for unit, label in labelled:
        leaves_of[unit.words][label] += unit.leaves
    with_numbers: list[tuple[Unit, Label]] = []
    for unit, label in labelled:
        leaves = leaves_of[unit.words]
        is_open = dialect.precedence != "only" and label == max(leaves, key=leaves.__getitem__)
        if len(leaves) == 1 or is_open:
            with_numbers.append((unit, label))
        else:
            numbered = label._replace(is_numbered=True)
            with_numbers += ((part, numbered) for part in unit.numbered())
    return with_numbers


def _loosest_patterns(
    phrases: list[Phrase], units: Sequence[Unit], dialect: Dialect
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Write patterns as loose as they may be: of the path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.
    """
    tight = {n for n, phrase in enumerate(phrases) if is_short(phrase)}
    owner = {unit: number for number, phrase in enumerate(phrases) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, units, dialect, is_tight=number in tight), phrase.label.spec)
            for number, phrase in enumerate(phrases)
        ]
        wrong = dict(_mismatches(Rules(pairs, dialect), paths, owner, phrases))
        if wrong.keys() <= tight:
            break
        tight |= wrong.keys()
    for rule, path in wrong.items():
        raise ValueError(
            f"{brief(path)}: no pattern of the dialect {dialect.name} tells it from the leaves of "
            f"{pattern_shown(pairs[rule][0])}: rename it, or choose another dialect"
        )
    return pairs, [tuple(units[number] for number in phrase.units) for phrase in phrases]


def _mismatches(
    rules: Rules, paths: Sequence[str], owner: Mapping[int, int], phrases: Sequence[Phrase]
) -> Iterator[tuple[int, str]]:
    """Yield rules that match a path of another, or miss one of their own, and a path of each."""
    for unit, path in enumerate(paths):
        mine, matches = owner[unit], rules.all_matches(path)
        if mine not in matches:
            yield mine, path
        for rule in matches:
            is_later = rule > mine and phrases[mine].label.is_numbered
            if rule != mine and not is_later:
                yield rule, path


def _joined_rules(
    phrases: Sequence[Phrase], pairs: _Pairs, of_rules: list[tuple[Unit, ...]]
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Join the rules of what is whole; and those of each other spec, if they are many.

    A pattern matches its own paths alone, so that their order does not matter; patterns with
    numbers stay before those that leave these open.
    """
    labels = [phrase.label for phrase in phrases]
    are_many = sum(not label.is_plain for label in labels) >= MOST_RULES
    groups: dict[object, list[int]] = defaultdict(list)
    for number, label in enumerate(labels):
        joins = (label.is_plain or are_many) and not label.is_numbered
        groups[label if joins else number].append(number)
    pairs_of_groups: _Pairs = []
    for members in groups.values():
        first, *others = (str(pairs[number][0]) for number in members)
        text = f"({'|'.join([first, *others])})" if others else first
        pairs_of_groups.append((text, labels[members[0]].spec))
    return pairs_of_groups, [sum((of_rules[n] for n in members), ()) for members in groups.values()]
