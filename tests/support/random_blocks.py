"""Random trees of blocks that are alike but for one thing, and what each leaf gets alone.

A block that is like an earlier one is copied by the core. What a leaf alone gets is never a copy.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import Rules
from shardrules._base.rule_specs import LibraryCorrection

MESH = {"fsdp": 2, "tp": 2}
DIALECTS = [
    sr.dialects.EFORMER, sr.dialects.EASYLM, sr.dialects.KEYSTR, sr.dialects.NNX, sr.dialects.SPECTRAX, sr.dialects.KERAS, sr.dialects.BIG_VISION,
]  # fmt: skip
# What any dialect may choose otherwise; its own choice is always tried as well.
CHOICES: dict[str, list[Any]] = {
    "scalars": ["rank 0", "size 1", "none"],
    "min_size": ["before", "after"],
    "rank": ["truncate", "replicate", "keep", "error"],
    "unmatched": ["error", "replicate"],
    "precedence": ["first", "only"],
    "correction": [sr.Correction(), LibraryCorrection(absent="drop_axis", rank="replicate")],
}
KEYS = ["kernel", "bias", "scale", "value", "a"]
SHAPES = [(), (1,), (8,), (64,), (1, 1), (1, 8), (4, 8), (8, 4), (3, 1024), (1, 1024), (2, 2, 2)]
MIN_SIZES = [0, 0, 2, 9, 65]


class Slotted:
    """As jax.ShapeDtypeStruct, its shape is read without a call. It is made faster."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...]):
        # Equal sizes are not the same objects.
        self.shape = tuple(int(str(size)) for size in shape)
        self.dtype = np.dtype("float32")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shape})"


class Shaped(Slotted):
    """Its shape is an attribute like any other."""

    __slots__ = ()

    @property
    def shape(self):
        return Slotted.shape.__get__(self)

    @shape.setter
    def shape(self, shape):
        Slotted.shape.__set__(self, shape)


class Text(str):
    """A key that is equal to a string, and none."""

    __slots__ = ()


class Case(NamedTuple):
    tree: list[Any]
    rules: Rules
    min_size: int
    strict: bool


Path = tuple[Any, ...]


def cases(seed: int, count: int) -> Iterator[Case]:
    """Trees for a few rule lists, most of which are met again and so have states."""
    draw = random.Random(seed)
    pool = [random_rules(draw) for _ in range(12)]
    for _ in range(count):
        if draw.random() < 0.03:
            pool[draw.randrange(len(pool))] = random_rules(draw)
        yield Case(random_tree(draw), draw.choice(pool), draw.choice(MIN_SIZES), draw.random() < 0.9)


def random_rules(draw: random.Random) -> Rules:
    dialect = draw.choice(DIALECTS)
    for name, choices in CHOICES.items():
        if draw.random() < 0.15:
            dialect = replace(dialect, **{name: draw.choice(choices)})
    texts = draw.sample(PATTERNS[dialect.match[-1]], draw.randint(1, 4))
    pairs = [(text, random_spec(draw)) for text in texts]
    return Rules(pairs, dialect, memory_budget=0 if draw.random() < 0.1 else 32 << 20)


PATTERNS: dict[str, list[Any]] = {
    "search": ["kernel", "bias$", "a/kernel", "^1?[1-3]/", "scale.*e", "kernel.$", "value", ".*",
               r"^\d*[13]/.*(?=kernel)"],
    "fullmatch": [".*kernel", ".*/bias", "[0-9]/.*", ".*a.*", ".*(scale|value)", ".*", ".*(?=k)kernel"],
}  # fmt: skip


def random_spec(draw: random.Random) -> P:
    entries = [None, "fsdp", "tp", ("fsdp", "tp")]
    return P(*(draw.choice(entries[: 3 if i else 4]) for i in range(draw.randint(0, 3))))


def random_tree(draw: random.Random) -> list[Any]:
    template = random_block(draw, draw.choice([0, 1, 1, 2, 4]))
    count = draw.choice([2, 3, 3, 4, 4, 5, 6, 20])
    blocks = [copied(template, draw) for _ in range(count)]
    for _ in range(draw.choice([0, 1, 1, 2])):
        change(draw.choice(blocks), draw)
    return blocks


def random_block(draw: random.Random, levels: int) -> dict[str, Any]:
    keys = draw.sample(KEYS, draw.choice([1, 1, 2, 3] if levels else [1, 2, 3, 5]))
    return {
        key: random_block(draw, levels - 1)
        if levels and (i == 0 or draw.random() < 0.3)
        else Slotted(draw.choice(SHAPES))
        for i, key in enumerate(keys)
    }


def copied(node: Any, draw: random.Random) -> Any:
    if isinstance(node, dict):
        # Equal keys are not the same objects, either.
        kinds = {0: Text, 1: lambda key: "".join(list(key))}
        return {kinds.get(draw.randrange(20), str)(key): copied(child, draw) for key, child in node.items()}
    return node if draw.random() < 0.5 else Slotted(node.shape)


def change(block: dict[str, Any], draw: random.Random) -> None:
    key = draw.choice(list(block))
    if isinstance(block[key], dict) and draw.random() < 0.8:
        return change(block[key], draw)
    kind = draw.randrange(8)
    if kind < 4:
        block[key] = Slotted(draw.choice(SHAPES))
    elif kind == 4:
        block[key] = draw.choice([Shaped((4, 8)), np.float32(1), None, [Slotted((4, 8))]])
    elif kind == 5:
        block[draw.choice(KEYS)] = block.pop(key)
    elif kind == 6:
        block[draw.choice(KEYS)] = Slotted(draw.choice(SHAPES))
    else:
        block[key] = {draw.choice(KEYS): Slotted(draw.choice(SHAPES))}
    return None


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, (dict, list)):
        for key, child in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(child, (*path, key))
    elif tree is not None:
        yield path, tree


def alone(tree: Any, path: Path) -> Any:
    """The tree with None for every other leaf: a leaf of NNX is to have as many siblings as it had."""
    if not path:
        return tree
    if isinstance(tree, list):
        return [alone(tree[i], path[1:]) if i == path[0] else None for i in range(path[0] + 1)]
    return {key: alone(tree[key], path[1:]) if key == path[0] else None for key in tree}


def at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError as error:
        return str(error)


def check_walk(name: str, case: Case, walk: Callable[[Any], Any]) -> None:
    """Compares a walk of the whole tree, twice, with walks for one leaf each."""
    expected = {
        path: attempt(lambda path=path: at(walk(alone(case.tree, path)), path)) for path, _ in leaves(case.tree)
    }
    errors = [answer for answer in expected.values() if isinstance(answer, str)]
    for _ in range(2):
        answers = attempt(lambda: walk(case.tree))
        if errors or isinstance(answers, str):
            assert errors, (name, case, answers)
            assert isinstance(answers, str), (name, case, errors)
            continue
        found = {path: at(answers, path) for path, _ in leaves(case.tree)}
        wrong = [(path, found[path], expected[path]) for path in expected if found[path] != expected[path]]
        assert wrong == [], (name, case)
        assert orders(answers) == orders(case.tree), (name, case)


def orders(tree: Any) -> Any:
    if isinstance(tree, list):
        return [orders(child) for child in tree]
    return [(key, orders(child)) for key, child in tree.items()] if isinstance(tree, dict) else None


def check_match(case: Case) -> None:
    options = case.min_size, case.strict
    check_walk("match", case, lambda tree: sr.match_partition_rules(case.rules, tree, *options))


def with_min_size(case: Case) -> sr.Rules:
    return sr.Rules(case.rules, case.rules.dialect, min_size=case.min_size)


def specs_of_shardings(case: Case, tree: Any) -> Any:
    found = sr.named_shardings(tree, with_min_size(case), MESH)
    return of_each(lambda sharding: sharding.spec, found)


def check_named_shardings(case: Case) -> None:
    check_walk("named_shardings", case, lambda tree: specs_of_shardings(case, tree))


def of_each(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, list):
        return [of_each(change, child) for child in tree]
    if isinstance(tree, dict):
        return {key: of_each(change, child) for key, child in tree.items()}
    return None if tree is None else change(tree)


def check_plan(case: Case) -> None:
    """Its specs are those of `named_shardings`, for the whole tree and for the last leaf alone."""
    *_, (path, _) = leaves(case.tree)
    for tree in (case.tree, alone(case.tree, path)):
        planned = attempt(lambda tree=tree: sr.plan(tree, with_min_size(case), MESH).specs())
        placed = attempt(lambda tree=tree: specs_of_shardings(case, tree))
        both_fail = isinstance(planned, str) and isinstance(placed, str)
        assert both_fail or planned == placed, ("plan", case)


CHECKS = [check_match, check_named_shardings, check_plan]
