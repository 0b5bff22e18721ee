"""Patterns of sibling paths: `layers/{0..60}/w` stands for `layers/0/w` to `layers/60/w`.

Paths of one group that differ only in numbers become one pattern, which stands for exactly these
paths. Users write paths so, too, or as globs, or the ends of paths.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from shardrules import _core
from shardrules._base.text import and_more, brief, near_shown, printable, shown

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardrules._plan.plan import Plan

_HOLE: Final = "\0#"
_NUL: Final = "\0" + "0"
# {{ and }} are braces of the path; {0..3,7} is a set of numbers.
_PARTS: Final = re.compile(r"\{\{|\}\}|\{([0-9][0-9.,]*)\}|[^{}]+")
_MOST_CANDIDATES: Final = 10
_WILDCARDS: Final = {"*": ".*", "?": "."}
# Components of a path begin or end with one of these, in all dialects.
_SEPARATORS: Final = "/.[]"


class Folded(NamedTuple):
    """Paths of one group that one pattern stands for."""

    parts: tuple[str, ...]
    """Texts and sets of numbers in turn; the first and the last are texts."""
    group: int
    rows: npt.NDArray[np.intp]
    """Which of the paths, ascending."""

    @property
    def pattern(self) -> str:
        """The parts joined. As in a format string, a brace of the path itself is doubled."""
        texts = [*self.parts]
        texts[::2] = [text.replace("{", "{{").replace("}", "}}") for text in texts[::2]]
        return "".join(texts)


class Templates(NamedTuple):
    """Paths with holes for their numbers, equal for sibling layers."""

    texts: list[str]
    """Each template once. A hole is a NUL and #; a NUL of a path itself is a NUL and 0."""
    of_path: npt.NDArray[np.int32]
    """Per path an index of `texts`."""
    numbers: npt.NDArray[np.int64]
    """The numbers of all paths in a row, as many for each as its template has holes."""


def templates_of(paths: list[str]) -> Templates:
    """Return the templates of the paths, in the order of their first paths."""
    texts, of_path, numbers = _core.templates(paths)
    return Templates(texts, np.frombuffer(of_path, np.int32), np.frombuffer(numbers, np.int64))


def fold(
    paths: list[str], group_of: npt.NDArray[np.int32], templates: Templates | None = None
) -> list[Folded]:
    """Fold the paths of each group into patterns, in the order of their first paths."""
    if not paths:
        return []
    names, of_path, numbers = templates_of(paths) if templates is None else templates
    template_of = of_path.astype(np.int64)
    holes = np.array([name.count(_HOLE) for name in names], np.int64)[template_of]
    starts = np.cumsum(holes) - holes
    key = template_of * (int(group_of.max()) + 1) + group_of
    folded: list[Folded] = []
    firsts = []
    for count in _ranks(holes)[0].tolist():
        with_count = np.flatnonzero(holes == count)
        columns = [numbers[starts[with_count] + i] for i in range(count)]
        products = _products(_ranks(key[with_count])[1], columns)
        order = with_count[np.argsort(products, kind="stable")]
        bounds = np.append(0, np.cumsum(np.bincount(products)))
        firsts.append(order[bounds[:-1]])
        of_first = zip(firsts[-1].tolist(), group_of[firsts[-1]].tolist(), strict=True)
        sets = [_sets(products, column) for column in columns]
        limits = itertools.pairwise(bounds.tolist())
        for i, ((row, group), (begin, end)) in enumerate(zip(of_first, limits, strict=True)):
            # Its numbers are in the path as they are, if there is only one of each.
            values = [numbers_of[i] for numbers_of in sets]
            is_single = end - begin == 1 or all(len(numbers_of) == 1 for numbers_of in values)
            parts = (paths[row],) if is_single else _template_parts(names[template_of[row]], values)
            folded.append(Folded(parts, group, order[begin:end]))
    return [folded[i] for i in np.argsort(np.concatenate(firsts)).tolist()]


def fold_paths(paths: Sequence[str]) -> list[str]:
    """Return the patterns of paths that are all alike."""
    return [folded.pattern for folded in fold(list(paths), np.zeros(len(paths), np.int32))]


def _products(
    group_of: npt.NDArray[np.intp], columns: list[npt.NDArray[np.int64]]
) -> npt.NDArray[np.intp]:
    """Return, per row of numbers, the index of its product.

    A product is a set of numbers for each column, all combinations of which are rows of one group.
    The rows of a group are words of an automaton that reads a number for each column. Numbers that
    lead from one state to the same other state are one set: a product is a way through the states
    of the smallest such automaton.
    """
    # Down the tree of all words: the node of each row, and of each node its parent and number.
    node_of, edges = [group_of], []
    for column in columns:
        distinct, number = _ranks(column)
        pairs, node = _ranks(node_of[-1] * len(distinct) + number)
        edges.append(np.divmod(pairs, len(distinct)))
        node_of.append(node)
    # And up again: nodes from which the same words lead to the end are one state.
    state = np.zeros(int(node_of[-1].max()) + 1, np.intp)
    state_of = []
    for node, (parent, number) in zip(node_of[:0:-1], edges[::-1], strict=True):
        state_of.append(state[node])
        state = _states(parent, _ranks(number * (int(state.max()) + 1) + state)[1])
    product = group_of
    for of_rows in reversed(state_of):
        product = _ranks(product * (int(of_rows.max()) + 1) + of_rows)[1]
    return product


def _states(parent: npt.NDArray[np.intp], edge: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Number the parents, equally for equal edges; both arrays are ordered by parent."""
    counts = np.bincount(parent)
    ends = np.cumsum(counts)
    states: npt.NDArray[np.intp] = edge[ends - counts]
    state_of: dict[bytes, int] = {}
    new = int(edge.max()) + 1
    # Those with several edges are no more than the rows, whatever the number of columns.
    for i in np.flatnonzero(counts > 1).tolist():
        edges = edge[ends[i] - counts[i] : ends[i]].tobytes()
        states[i] = state_of.setdefault(edges, new + len(state_of))
    return states


def _ranks(values: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
    """Return the distinct values, ascending, and the place of each value among them."""
    most = int(values.max()) + 1
    if most > 4 * len(values):
        distinct, places = np.unique(values, return_inverse=True)
        return distinct, places.astype(np.intp)
    # Small numbers need no sorting, which takes ten times as long.
    seen = np.zeros(most, np.bool_)
    seen[values] = True
    return np.flatnonzero(seen), (np.cumsum(seen) - 1)[values]


def _sets(product_of: npt.NDArray[np.intp], column: npt.NDArray[np.int64]) -> list[list[int]]:
    """Return, per product, the numbers of a column, ascending, each once."""
    values, place = _ranks(column)
    products, places = np.divmod(_ranks(product_of * len(values) + place)[0], len(values))
    ends = np.cumsum(np.bincount(products)).tolist()
    numbers = values[places].tolist()
    return [numbers[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def _template_parts(template: str, values: list[list[int]]) -> tuple[str, ...]:
    """Return the template's texts and the sets of its holes; a set of one number is text."""
    first, *texts = template.split(_HOLE)
    parts = [first]
    for numbers, text in zip(values, texts, strict=True):
        if len(numbers) == 1:
            parts[-1] += f"{numbers[0]}{text}"
        else:
            parts += [_set_shown(numbers), text]
    return tuple(part.replace(_NUL, "\0") for part in parts)


def _set_shown(numbers: list[int]) -> str:
    """Format numbers as {0..60}, or {0,2..5}."""
    begins = [i for i, number in enumerate(numbers) if i == 0 or number > numbers[i - 1] + 1]
    texts: list[str] = []
    for begin, end in itertools.pairwise([*begins, len(numbers)]):
        run = numbers[begin:end]
        texts += [f"{run[0]}..{run[-1]}"] if len(run) > 2 else map(str, run)
    return "{" + ",".join(texts) + "}"


def parts_of(pattern: str) -> Iterator[tuple[str, str | None]]:
    """Yield a pattern's parts: (a text of its paths, None), or ("", a set without its braces)."""
    end = 0
    for part in _PARTS.finditer(pattern):
        if part.start() != end:
            break
        end = part.end()
        text = part.group()
        yield ("", part[1]) if part[1] is not None else (text[0] if text[0] in "{}" else text, None)
    if end != len(pattern):
        raise ValueError(f"its braces make no sense from character {end} on")


def runs_of(numbers: str) -> list[range]:
    """Return the runs of a set without its braces."""
    return [_range(run) for run in numbers.split(",")]


def _range(run: str) -> range:
    first, _, last = run.partition("..")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(f"no numbers are {run}")
    return numbers


def expanded(pattern: str, most_text: int) -> list[str]:
    """List the paths that a folded pattern stands for, if they cost no more than that."""
    choices: list[list[str]] = []
    most = most_text // path_cost(pattern)
    for text, numbers in parts_of(pattern):
        runs = [] if numbers is None else runs_of(numbers)
        # Not `len`, which is for numbers of 63 bits.
        most //= max(1, sum(run.stop - run.start for run in runs))
        if not most:
            break
        choices.append([str(number) for run in runs for number in run] or [text])
    if not most:
        raise ValueError(f"{shown(pattern)} stands for more leaves than a lock may have")
    return ["".join(texts) for texts in itertools.product(*choices)]


def path_cost(path: str) -> int:
    """Count the characters of a path, and what it takes beside them."""
    return 100 + len(path)


class _PathError(KeyError):
    """A path that means no leaf, or several; `str` of a KeyError would show the message quoted."""

    def __str__(self) -> str:
        return str(self.args[0])


def rows_meant(plan: Plan, path: str) -> list[int]:
    """Return the rows of a path, which may be folded, a glob, or the end of paths.

    All are of one folded path.
    """
    row = plan._leaves.rows.get(path)
    if row is not None:
        return [row]
    folded = plan.folded
    patterns = [siblings.pattern for siblings in folded]
    if path in patterns:
        rows: list[int] = folded[patterns.index(path)].rows.tolist()
        return rows
    rows = _rows_like(path, plan) if path else []
    if not rows:
        near = near_shown(path, patterns) or "; a glob such as '*mlp*' finds what is inside"
        raise _PathError(f"no leaf has the path {brief(path)}{near}")
    distinct = set(rows)
    candidates = [
        siblings.pattern for siblings in folded if not distinct.isdisjoint(siblings.rows.tolist())
    ]
    if len(candidates) > 1:
        texts = map(printable, candidates[:_MOST_CANDIDATES])
        rest = and_more(len(candidates), _MOST_CANDIDATES, "path")
        raise _PathError(
            f"{brief(path)} is ambiguous: it may be any of {len(candidates)} folded paths: "
            f"{', '.join([*texts, *rest])}; give more of the path"
        )
    return rows


def _rows_like(path: str, plan: Plan) -> list[int]:
    """Return the rows of the paths that this one fits as a whole, or else at their end."""
    regex = "".join(_WILDCARDS.get(char) or re.escape(char) for char in re.sub(r"\*+", "*", path))
    # An end begins with a component: before a separator, or after one.
    begin = "" if path[0] in _SEPARATORS else f"[{re.escape(_SEPARATORS)}]"
    for searched in (rf"\A(?:{regex})\Z", rf"{begin}(?:{regex})\Z"):
        fits = re.compile(searched, re.DOTALL).search
        if rows := [row for row, other in enumerate(plan.paths) if fits(other)]:
            return rows
    return []
