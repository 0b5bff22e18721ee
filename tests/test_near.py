"""Near paths in errors: the one that was meant comes first, at a bounded cost."""

from __future__ import annotations

import difflib
import random

import pytest

from shardrules._base.text import near_paths, near_shown

WORDS = ("attention", "mlp", "query", "key", "value", "gate_proj", "up_proj", "kernel", "norm")


def some_paths(count):
    choose = random.Random(7)
    return [f"layers/{i}/{'/'.join(choose.sample(WORDS, 3))}" for i in range(count)]


def slip(path, choose):
    """The path with a letter left out, doubled, or swapped with the next one."""
    i = choose.randrange(len(path) - 1)
    a, b = path[i], path[i + 1]
    return path[:i] + choose.choice([b, a + a + b, b + a]) + path[i + 2 :]


def test_a_misspelt_path_is_near_what_was_meant():
    choose, paths = random.Random(3), some_paths(300)
    found = [path in near_paths(slip(path, choose), paths) for path in paths]
    assert sum(found) >= 295


def test_the_end_of_a_path_is_enough():
    paths = [*some_paths(50), "model/encoder/embedding/table"]
    assert near_paths("embeding/table", paths)[0] == "model/encoder/embedding/table"


@pytest.mark.parametrize("path", ["", "%%%%%", "\0"])
def test_what_is_near_nothing(path):
    assert near_paths(path, some_paths(50)) == []
    assert near_shown(path, []) == ""


def test_only_few_paths_are_compared_in_full(monkeypatch):
    compared = []

    class Counted(difflib.SequenceMatcher):
        def ratio(self):
            compared.append(max(len(self.a), len(self.b)))
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    paths = some_paths(20_000)
    assert paths[77] in near_paths(paths[77][:-2], [*paths, "x" * 10**6])
    assert len(compared) <= 100
    assert max(compared) <= 100


def test_shown_names_are_printable_and_short():
    shown = near_shown("a\x1b[2Jb", ["a\x1b[2Jc", "a" * 10**6])
    assert shown == "; near it: a\\u001b[2Jc"
    assert len(near_shown("a" * 300, ["a" * 10**6])) < 300
