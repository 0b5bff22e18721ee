"""Writes rules for the leaves of a tree: their specs, and patterns proven on the tree's paths.

The axes of each array are chosen first: few bytes on a device, and few choices experts avoid.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from shardrules._base.rule_specs import RuleSpec
from shardrules._base.specs import Entries, entry_of, trimmed
from shardrules._base.text import brief, counted
from shardrules._plan.path_words import AxisUse, is_gathered, use_of, uses_of
from shardrules._plan.plan import Plan
from shardrules._plan.suggest.patterns import (
    TIGHTEST,
    Label,
    Path,
    Phrase,
    Unit,
    least_tightness,
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

# The share of the fewest bytes that comfort may cost in all.
SLACK: Final = 0.008
# A part of fewer elements is hardly worth what it sends.
_FEW_ELEMENTS: Final = 8
_COUNTED: Final = ("experts", "heads", "layers")

# Discomfort of sharding a side by an axis; sides that are not there are not sharded.
_DISCOMFORT: Final[dict[AxisUse, dict[Side, int]]] = {
    # Gathered whole before use: any side will do. Few and large parts are the residual side's.
    "fsdp": {"residual": 0, "hidden": 1, "heads": 1, "vocabulary": 2, "experts": 3, "head": 3,
             "window": 8, "vector": 10},
    # Column-parallel into heads and hidden units, row-parallel back: one sum for each pair.
    "tensor": {"hidden": 0, "heads": 0, "vocabulary": 0, "residual": 4, "experts": 2,
               "window": 9, "vector": 11},
    # Beside experts, as another axis of fsdp.
    "experts": {"experts": -6, "residual": 2, "hidden": 3, "heads": 3, "vocabulary": 4,
                "window": 9, "vector": 11},
    # A stage of a pipeline has layers of its own.
    "layers": {"layers": -6},
    "data": {},
}  # fmt: skip
# Sides of keys and values, routers and latents that tensor axes may shard; of others any.
_TENSOR: Final[dict[str, tuple[Side, ...]]] = {"heads": ("heads", "hidden"), "none": ()}


class _ArrayCuts(NamedTuple):
    """Cuts of an array, and what they cost."""

    bytes: float
    discomfort: int
    cuts: Cuts


def choose(
    units: Sequence[Unit], axis_sizes: Mapping[str, int], uses: Mapping[str, AxisUse]
) -> list[Cuts]:
    """Choose the axes that shard each dimension of the units: see the table of discomforts."""
    used = {axis: size for axis, size in axis_sizes.items() if size > 1 and uses[axis] != "data"}

    @cache
    def layouts_of(shape: tuple[int, ...], dims: Dims) -> list[_ArrayCuts]:
        return _pareto_front(_layouts(shape, dims, used, uses))

    fronts = [
        [
            layout._replace(bytes=layout.bytes * unit.bytes)
            for layout in layouts_of(*_unit_key(unit))
        ]
        for unit in units
    ]
    # Arrays that are alike are sharded alike; biases and norms are all whole, or all sharded.
    keys = [None if unit.dims.is_vector else _unit_key(unit) for unit in units]
    groups: dict[object, list[list[_ArrayCuts]]] = defaultdict(list)
    for key, front in zip(keys, fronts, strict=True):
        groups[key].append(front)
    most = _most_discomforts([*groups.values()], SLACK * sum(front[0].bytes for front in fronts))
    most_of = dict(zip(groups, most, strict=True))
    return [_at_most(front, most_of[key]).cuts for key, front in zip(keys, fronts, strict=True)]


def _unit_key(unit: Unit) -> tuple[tuple[int, ...], Dims]:
    return unit.shape, unit.dims


def _most_discomforts(groups: list[list[list[_ArrayCuts]]], slack: float) -> list[float]:
    """Lower the discomfort allowed to each group while the bytes last, the cheapest first."""
    levels = [inf] * len(groups)
    spent = [0.0] * len(groups)
    steps = sorted(
        (sum(_at_most(front, level).bytes - front[0].bytes for front in group), -level, place)
        for place, group in enumerate(groups)
        for level in {layout.discomfort for front in group for layout in front}
    )
    for cost, level, place in steps:
        if -level < levels[place] and cost - spent[place] <= slack:
            slack -= cost - spent[place]
            spent[place], levels[place] = cost, -level
    return levels


def _at_most(front: list[_ArrayCuts], discomfort: float) -> _ArrayCuts:
    """Return the layout with the fewest bytes among those of so much discomfort, or the least."""
    return next((layout for layout in front if layout.discomfort <= discomfort), front[-1])


def _layouts(
    shape: tuple[int, ...], dims: Dims, axis_sizes: Mapping[str, int], uses: Mapping[str, AxisUse]
) -> Iterator[_ArrayCuts]:
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
        yield _ArrayCuts(1 / prod(counts), _discomfort(shape, dims, cuts, counts, uses), cuts)


def _discomfort(
    shape: tuple[int, ...],
    dims: Dims,
    cuts: Cuts,
    counts: Sequence[int],
    uses: Mapping[str, AxisUse],
) -> int:
    """Weigh what an expert would avoid in these cuts, into so many parts of each dimension."""
    discomfort = 2 * sum(
        count > 1 and size // count < _FEW_ELEMENTS and side not in _COUNTED
        for size, count, side in zip(shape, counts, dims.sides, strict=True)
    )
    for side, axes in zip(dims.sides, cuts, strict=True):
        for axis in axes:
            # Of biases, tensor axes shard columns, if anything.
            is_odd = dims.is_vector and side == "experts" and uses[axis] == "tensor"
            discomfort += _DISCOMFORT[uses[axis]]["vector" if is_odd else side]
    return discomfort


def _pareto_front(layouts: Iterator[_ArrayCuts]) -> list[_ArrayCuts]:
    """Keep the layouts to which none is better in both costs, the fewest bytes first."""
    front: list[_ArrayCuts] = []
    for layout in sorted(layouts, key=lambda layout: (layout.bytes, layout.discomfort)):
        if not front or layout.discomfort < front[-1].discomfort:
            front.append(layout)
    return front


_SCALES: Final = re.compile(r"(.*_)?scales?(_\w+)?")
# Arrays that have such a name belong to the kernel of their module; others begin with its name.
_OF_MODULE: Final = re.compile(r"b|bias|scales?")


def with_followers(
    units: Sequence[Unit], cuts: Sequence[Cuts], axis_sizes: Mapping[str, int]
) -> list[Cuts]:
    """Shard biases by the axes of their kernels' columns, and scales by all of their kernels'.

    Axes that shard them already, for the bytes, do so where that is still possible; what would hold
    more bytes then stays as it is.
    """
    kernels: dict[Axes, list[int]] = {}
    for number, unit in enumerate(units):
        if not unit.dims.is_vector:
            kernels.setdefault(unit.names[:-1], []).append(number)
    joined_cuts = list(cuts)
    for number, unit in enumerate(units):
        if not unit.dims.is_vector:
            continue
        *module, name = unit.names
        for kernel in kernels.get(tuple(module), ()):
            if _belongs(name, units[kernel].names[-1], len(kernels[*module])):
                followed = dict(_followed_kernel(unit, units[kernel], cuts[kernel], name))
                joined = _joined_axes(unit.shape, followed, cuts[number], axis_sizes)
                if _part_count(joined, axis_sizes) >= _part_count(cuts[number], axis_sizes):
                    joined_cuts[number] = joined
                break
    return joined_cuts


def _part_count(cuts: Cuts, axis_sizes: Mapping[str, int]) -> int:
    return prod(axis_sizes[axis] for axes in cuts for axis in axes)


def _belongs(name: str, kernel: str, kernels: int) -> bool:
    """Tell if an array of this name belongs to the kernel, one of so many in the module."""
    if _OF_MODULE.fullmatch(name):
        return kernels == 1
    is_its = name.startswith(f"{kernel}_") or name == f"{kernel.removesuffix('_blocks')}_scales"
    return is_its and (name.endswith("_bias") or _SCALES.fullmatch(name) is not None)


def _followed_kernel(unit: Unit, kernel: Unit, cuts: Cuts, name: str) -> Iterator[tuple[int, Axes]]:
    """Yield dimensions of the array with the axes that shard those of the kernel, if any."""
    shape = kernel.shape
    if _SCALES.fullmatch(name) and 1 < len(unit.shape) <= len(shape):
        yield from ((dim, cuts[dim]) for dim in range(len(unit.shape)) if cuts[dim])
        return
    columns = [*kernel.dims.columns]
    for dim, size in enumerate(unit.shape):
        column = next((column for column in columns if shape[column] == size), None)
        if column is not None:
            columns.remove(column)
            # Along other dimensions, axes of experts are as those of fsdp.
            is_of_experts = kernel.dims.sides[column] == "experts"
            uses = {"tensor", "layers", *(["experts"] if is_of_experts else [])}
            yield dim, tuple(axis for axis in cuts[column] if use_of(axis) in uses)


def _joined_axes(
    shape: tuple[int, ...], followed: Mapping[int, Axes], cuts: Cuts, axis_sizes: Mapping[str, int]
) -> Cuts:
    """Join the axes of the kernel and then those of the array, as far as they divide it."""
    joined: list[Axes] = [()] * len(shape)
    used: set[str] = set()
    for dim, axes in (*followed.items(), *enumerate(cuts)):
        for axis in axes:
            count = prod(axis_sizes[name] for name in (*joined[dim], axis))
            if axis not in used and shape[dim] % count == 0:
                used.add(axis)
                joined[dim] = tuple(sorted((*joined[dim], axis), key=list(axis_sizes).index))
    return tuple(joined)


_MOST_NAMES: Final = 64
MOST_RULES: Final = 12
"""Rules of a solution, if it has no more specs."""
_Pairs = list[tuple["Pattern", Any]]


class Draft(NamedTuple):
    """Rules with the leaves that they were written for."""

    rules: Rules
    units: list[tuple[Unit, ...]]
    """Units of each rule."""

    def strays(self, rule_of: npt.NDArray[np.int32]) -> list[int]:
        """List the rows that another rule decides than the one written for them."""
        intended = rule_of.copy()
        for rule, units in enumerate(self.units):
            for unit in units:
                intended[unit.folded.rows] = rule
        rows: list[int] = np.flatnonzero(intended != rule_of).tolist()
        return rows


def draft(plan: Plan, units: Sequence[Unit], tightness: int = 0) -> Draft:
    """Write rules for the leaves of a plan, with patterns as tight as `pattern_of` has it."""
    rules, sizes = plan._leaves.path_rules, plan.axis_sizes
    assert rules is not None
    uses = uses_of(sizes)
    cuts = with_followers(units, choose(units, sizes, uses), sizes)
    spared = {axis for axis, size in sizes.items() if size > 1 and uses[axis] == "tensor"}
    labelled = [
        (unit, _label_of(unit, of_unit, spared)) for unit, of_unit in zip(units, cuts, strict=True)
    ]
    return _rules_for_labels(labelled, rules.dialect, tightness)


def draft_of_specs(
    units: Iterable[Unit], specs: Mapping[str, Entries | RuleSpec], dialect: Dialect, tightness: int
) -> Draft:
    """Write rules that give leaves these specs: at most `MOST_RULES`, where specs are no more."""
    labelled: list[tuple[Unit, Label]] = []
    for unit in units:
        rows_of: dict[Label, list[int]] = defaultdict(list)
        for row in unit.folded.rows.tolist():
            spec = specs[unit.paths[int(row)]]
            rows_of[Label(spec, is_plain=spec == Entries(), is_known=True)].append(row)
        labelled += [(unit.with_rows(rows), label) for label, rows in rows_of.items()]
    return _rules_for_labels(labelled, dialect, tightness, joins=True)


def _rules_for_labels(
    labelled: list[tuple[Unit, Label]], dialect: Dialect, tightness: int, *, joins: bool = False
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
    pairs, of_rules = _loosest_patterns(ends, units, dialect, tightness)
    if joins:
        pairs, of_rules = _joined_rules(ends, pairs, of_rules)
    return Draft(Rules(pairs, dialect), of_rules)


def _joined_rules(
    phrases: Sequence[Phrase], pairs: _Pairs, of_rules: list[tuple[Unit, ...]]
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Join all rules of what is whole; and of others with one spec the shortest, if they are many.

    A pattern matches its own paths alone, so that their order does not matter; patterns with
    numbers stay before those that leave these open.
    """
    patterns: list[tuple[str, ...]] = [(str(pattern),) for pattern, _ in pairs]
    units, labels = list(of_rules), [phrase.label for phrase in phrases]
    while True:
        alike = [
            (not labels[first].is_plain, sum(map(len, patterns[first] + patterns[second])), first,
             second)
            for first, second in itertools.combinations(range(len(labels)), 2)
            if labels[first] == labels[second] and not labels[first].is_numbered
        ]  # fmt: skip
        is_sharded, _, first, second = min(alike, default=(True, 0, 0, 0))
        if not alike or (is_sharded and len(labels) <= MOST_RULES):
            break
        patterns[first] += patterns.pop(second)
        units[first] += units.pop(second)
        del labels[second]
    texts = [names[0] if len(names) == 1 else f"({'|'.join(names)})" for names in patterns]
    return [(text, label.value) for text, label in zip(texts, labels, strict=True)], units


def _label_of(unit: Unit, cuts: Cuts, spared: set[str]) -> Label:
    """Label a unit; `spared` are the axes that some kernels are not sharded by on purpose."""
    dims = unit.dims
    value: Any = Entries(trimmed(map(entry_of, cuts)))
    if dims.unit > 1 and not dims.is_assumed and "hidden" in dims.sides:
        hidden = dims.sides.index("hidden")
        # Axes that compute keep heads whole on other meshes, too. Units bind all axes, and along
        # those of fsdp heads may be cut.
        if cuts[hidden] and not any(map(is_gathered, cuts[hidden])):
            value = RuleSpec(value, units=(*[1] * hidden, dims.unit))
    sides = tuple(side for side, axes in zip(dims.sides, cuts, strict=True) if axes)
    used = {axis for axes in cuts for axis in axes}
    has_spared = dims.tensor != "any" and bool(spared) and spared.isdisjoint(used)
    meaning = (dims.is_vector, dims.is_vector or sides, has_spared)
    return Label(value, dims.is_vector, dims.is_known, meaning)


def _with_numbers(labelled: list[tuple[Unit, Label]], dialect: Dialect) -> list[tuple[Unit, Label]]:
    """Write numbers out where only these tell labels apart; the commonest label may stay open."""
    leaves_of: dict[Path, Counter[Label]] = defaultdict(Counter)
    for unit, label in labelled:
        leaves_of[unit.words][label] += unit.leaves
    told_apart: list[tuple[Unit, Label]] = []
    for unit, label in labelled:
        leaves = leaves_of[unit.words]
        is_open = dialect.precedence != "only" and label == max(leaves, key=leaves.__getitem__)
        if len(leaves) == 1 or is_open:
            told_apart.append((unit, label))
        else:
            numbered = label._replace(is_numbered=True)
            told_apart += ((part, numbered) for part in unit.numbered())
    return told_apart


def _loosest_patterns(
    phrases: list[Phrase], units: Sequence[Unit], dialect: Dialect, least: int
) -> tuple[_Pairs, list[tuple[Unit, ...]]]:
    """Write patterns as loose as they may be: of the path of each unit only its own matches.

    Patterns that leave numbers open may also match what patterns with numbers, before them, match.
    """
    tightness = [max(least, least_tightness(phrase)) for phrase in phrases]
    owner = {unit: number for number, phrase in enumerate(phrases) for unit in phrase.units}
    paths = [unit.path for unit in units]
    while True:
        pairs = [
            (pattern_of(phrase, units, dialect, tight), phrase.label.value)
            for phrase, tight in zip(phrases, tightness, strict=True)
        ]
        wrong = dict(_mismatches(Rules(pairs, dialect), paths, owner, phrases))
        loose = [rule for rule in wrong if tightness[rule] < TIGHTEST]
        if not loose:
            break
        for rule in loose:
            tightness[rule] += 1
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
