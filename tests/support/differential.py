"""Ours against `re`: `python -m tests.support.differential --size 3 --lists 130000 --seed 7`.

First every pattern up to a size (exhaustive.py), then random rule lists, on all cores. Prints a
reproducer of each difference and exits with 1 if there was one. A random list has 1, 2 or 5 rules
and meets 8 texts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from tests.support import exhaustive
from tests.support.engines import Outcome, differences
from tests.support.random_patterns import FLAGS, compiles, random_pattern, random_text

TEXTS = 8
BUDGETS = (1, 3000, 1 << 20)
SHARES = 32
LISTS_OF_A_SHARE = 1000


class TooSlowForReError(Exception):
    pass


def run(rng: random.Random, lists: int) -> Outcome:
    """Compares first_match and all_matches with `re` on that many random rule lists."""
    outcome = Outcome()
    for _ in range(lists):
        patterns = _random_rules(rng)
        texts = [random_text(rng) for _ in range(TEXTS)]
        budget = rng.choice(BUDGETS)
        try:
            with _patience(1.0):
                outcome.differences += differences(patterns, texts, memory_budget=budget)
                outcome.cases += len(texts)
        except TooSlowForReError:
            outcome.slow += 1
    return outcome


def _random_rules(rng):
    irregular = rng.random() < 0.3
    size = rng.choice((1, 2, 5))
    patterns = []
    while len(patterns) < size:
        pattern = compiles(random_pattern(rng, irregular=irregular), rng.choice(FLAGS))
        if pattern is not None:
            patterns.append(pattern)
    return patterns


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """`re` takes exponential time on some patterns; nothing is learnt by waiting for it."""

    def stop(*_):
        raise TooSlowForReError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=3, help="of the patterns that are enumerated")
    parser.add_argument("--lists", type=int, default=130_000, help="how many random rule lists")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    # JAX has threads, which a forked process would lose.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = exhaustive.shares(options.size, SHARES)
        exact = _report("exhaustive", pool.map(exhaustive.check, shares))
        starts = range(0, options.lists, LISTS_OF_A_SHARE)
        seeds = [f"{options.seed}/{start}" for start in starts]
        counts = [min(LISTS_OF_A_SHARE, options.lists - start) for start in starts]
        exact &= _report("random", pool.map(_run_seeded, seeds, counts))
    return 0 if exact else 1


def _run_seeded(seed: str, lists: int) -> Outcome:
    return run(random.Random(seed), lists)


def _report(title: str, outcomes: Iterable[Outcome]) -> bool:
    """Prints the differences as they come, then the sums; whether there was none."""
    total = Outcome()
    for outcome in outcomes:
        for difference in outcome.differences:
            print(difference, flush=True)
        total.cases += outcome.cases
        total.slow += outcome.slow
        total.differences += outcome.differences
    print(f"{title}: {total.cases:,} cases, {len(total.differences)} differences")
    if total.slow:
        print(f"  {total.slow} lists given up because re took over a second")
    return not total.differences


if __name__ == "__main__":
    sys.exit(main())
