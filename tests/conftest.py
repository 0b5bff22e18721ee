"""Peers are the oracle; where one is not installed, its tests say so and are skipped."""

from __future__ import annotations

import random

import pytest

import shardrules


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Seeded by the test's name: the same run every time, another one for each test."""
    return random.Random(request.node.nodeid)


@pytest.fixture
def first_match():
    """first_match(patterns, path) through freshly compiled rules."""

    def call(patterns, path):
        return shardrules.Rules([(p, None) for p in patterns]).first_match(path)

    return call
