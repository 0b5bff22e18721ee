"""Near paths in errors: the one that was meant comes first, at a bounded cost."""

import difflib
import random

import pytest

from shardrules._base.text import SLIP, near_names, near_shown, nearest

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
    choose, paths = random.Random(3), some_paths(100)
    assert sum(path in near_names(slip(path, choose), paths) for path in paths) >= 98
    # The end of a path is enough.
    assert near_names("embeding/table", [*paths, "model/encoder/embedding/table"])[0] == "model/encoder/embedding/table"


def test_only_few_paths_are_compared_in_full(monkeypatch):
    compared = []

    class Counted(difflib.SequenceMatcher):
        def ratio(self):
            compared.append(max(len(self.a), len(self.b)))
            return super().ratio()

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    paths = some_paths(20_000)
    assert paths[77] in near_names(paths[77][:-2], [*paths, paths[77] + "x" * 10**6])
    assert len(compared) <= 100
    assert max(compared) <= 100


def test_what_is_shown_is_printable_and_short():
    assert near_shown("a\x1b[2Jb", ["a\x1b[2Jc", "a" * 10**6]) == "; near it: a\\u001b[2Jc"
    assert len(near_shown("a" * 300, ["a" * 10**6])) < 300
    for path in ("", "%%%%%", "\0"):
        assert near_names(path, some_paths(50)) == []
        assert near_shown(path, []) == ""


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [
        ("v5", ["v4", "v5e"], "v5e"),
        ("H-100", ["A100", "H100"], "H100"),
        ("fsdp_axis", ["fsdp"], "fsdp"),
        ("sp", ["tp"], None),
        ("pt", ["tp"], "tp"),
        ("", ["tp"], None),
        ("a" * 130, ["a" * 131], "a" * 131),  # names were compared by their first 100 letters, and told cut to them
    ],
)
def test_a_short_name(name, names, meant):
    assert nearest(name, names) == meant


@pytest.mark.parametrize(
    ("name", "near"), [("exp", "exp_with_fsdp"), ("moe_layers", "layers"), ("layers", "moe_layers")]
)
def test_a_part_of_a_name_is_no_slip(name, near):
    assert nearest(name, [near], SLIP) is None
    assert nearest("fsdpp", ["fsdp", near], SLIP) == "fsdp"
