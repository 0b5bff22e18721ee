"""The fuzz targets on their seeds, on what once failed, and on mutations of both."""

from __future__ import annotations

import random

import pytest

from tests.fuzzing.__main__ import CORPUS, NAMES
from tests.fuzzing.targets import TARGETS

INPUTS = sorted(CORPUS.glob("*/*"))
MUTATIONS = 100


def test_every_target_has_seeds():
    assert set(TARGETS) == set(NAMES) == {path.parent.name for path in INPUTS}


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_kept_inputs(path):
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", NAMES)
def test_mutations(name, rng):
    seeds = [path.read_bytes() for path in INPUTS if path.parent.name == name]
    for _ in range(MUTATIONS):
        TARGETS[name](mutated(rng, seeds))


def mutated(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Some bytes changed, and runs of them dropped, repeated or taken from another seed."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 5))):
        begin = rng.randrange(len(data) + 1)
        end = min(len(data), begin + rng.choice((1, 1, 2, 8, 64)))
        other = rng.choice(seeds)
        at = rng.randrange(len(other) + 1)
        data[begin:end] = rng.choice(
            (b"", data[begin:end] * 2, bytes([rng.randrange(256)]), other[at : at + end - begin],
             rng.choice((b"null", b"-1", b"9" * 30, b'"', b"[]", b"{}", b"1e999", b"true")))
        )  # fmt: skip
    return bytes(data)
