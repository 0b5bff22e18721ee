"""Folding: what the patterns stand for are the paths of each group, all and only these."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardrules._plan.fold import fold

TOKEN = r"(\{\{|\}\}|[^{}])|\{([0-9.,]+)\}"


def expanded(pattern):
    """The paths of a pattern, by its grammar: doubled braces, other characters, and sets of numbers."""
    assert re.fullmatch(f"({TOKEN})*", pattern, re.S), pattern
    choices = []
    for text, items in re.findall(TOKEN, pattern, re.S):
        ranges = [list(map(int, item.split(".."))) for item in items.split(",") if items]
        numbers = [str(number) for first, *last in ranges for number in range(first, (last or [first])[0] + 1)]
        choices.append(numbers or [text[0]])
    return ["".join(parts) for parts in itertools.product(*choices)]


def check_lossless(paths, groups):
    folded = fold(paths, np.array(groups, np.int32))
    rows = [row for one in folded for row in one.rows.tolist()]
    assert sorted(rows) == list(range(len(paths)))
    assert [one.rows[0] for one in folded] == sorted(one.rows[0] for one in folded)
    for one in folded:
        mine = [paths[row] for row in one.rows]
        assert list(one.rows) == sorted(one.rows)
        assert {groups[row] for row in one.rows} == {one.group}
        stands_for = expanded(one.pattern)
        assert len(stands_for) == len(set(stands_for))
        assert set(stands_for) == set(mine), one.pattern
    # And each path of a group stands in one pattern alone.
    told = Counter((one.group, path) for one in folded for path in expanded(one.pattern))
    assert set(told) == set(zip(groups, paths, strict=True))
    assert set(told.values()) <= {1}
    return [one.pattern for one in folded]


NUMBERS = st.sampled_from(["0", "1", "2", "3", "9", "10", "11", "00", "01", "007", "9" * 18, "1" + "0" * 17,
                           "9" * 19, "1" + "0" * 18, str(2**63), "٣", "１", "²"])  # fmt: skip
TEXTS = st.sampled_from(["a", "b", "/", "{", "}", "{{", "}}", "{0..2}", ",", "..", "\0", "\0#", "\\0", "\\",
                         "\n", "é", "\ud800", "\udfff", "\U0001f600", "#", "-", "", "N"])  # fmt: skip
PATHS = st.lists(NUMBERS | TEXTS, max_size=5).map("".join) | st.text(max_size=4)


@given(st.lists(st.tuples(PATHS, st.integers(0, 2)), max_size=40))
@example([("a\0", 0), ("a\\0", 0), ("a\0#", 0), ("a1", 0)])
@example([("{1}", 0), ("{2}", 0), ("{{1}}", 0), ("{0..1}", 0)])
@example([("x/1", 0), ("x/01", 0), ("x/2", 0), ("x/1", 0), ("x/1", 1), ("", 0)])
@example([(f"a/{i}/b/{i}", 0) for i in range(5)])
def test_any_paths(pairs):
    check_lossless([path for path, _ in pairs], [group for _, group in pairs])


@given(st.sets(st.tuples(*[st.integers(0, 3)] * 3), max_size=64), st.integers(1, 3))
def test_sets_of_numbers_that_are_no_product(numbers, groups):
    numbers = sorted(numbers)
    paths = [f"a/{i}/b{j}/{k}" for i, j, k in numbers]
    patterns = check_lossless(paths, [(i * j) % groups for i, j, _ in numbers])
    assert len(patterns) <= len(paths)


def patterns_of(paths):
    return check_lossless(paths, [0] * len(paths))


def test_products_of_numbers_are_one_pattern():
    assert patterns_of([f"l/{i}/e/{j}/w" for i in range(3, 61) for j in range(256)]) == ["l/{3..60}/e/{0..255}/w"]
    assert patterns_of([f"{i}" for i in (0, 1, 3, 4, 5, 9)]) == ["{0,1,3..5,9}"]
    assert patterns_of(["w7", "w7"]) == ["w7"]


def test_only_the_columns_that_depend_on_each_other_are_split():
    """The first number stands beside all others alike, so it stays one set."""
    paths = [f"l/{i}/e/{j}/{k}" for i in range(50) for j, k in [(0, 0), (0, 1), (1, 1)]]
    assert sorted(patterns_of(paths)) == ["l/{0..49}/e/0/{0,1}", "l/{0..49}/e/1/1"]


@pytest.mark.parametrize("count", [15, 16, 17, 64, 65, 1000])
def test_a_path_with_many_numbers(count):
    """64 were more than NumPy can index by. The first 16 make sets; others are text."""
    numbers = "/1" * count
    assert patterns_of([f"{i}{numbers}" for i in range(3)]) == ["{0..2}" + numbers]
    patterns = patterns_of([f"{numbers}/{i}" for i in range(3)])
    assert len(patterns) == (1 if count < 16 else 3)
