"""Random rule lists against `re`: `python -m tests.differential --lists 100000 --seed 7`.

Prints a reproducer of each difference and exits with 1 if there was one. A list has 1, 2 or 5 rules
and meets 8 texts, so a million cases are 125,000 lists.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import shardrules as sr
from tests.random_patterns import FLAGS, compiles, random_pattern, random_text

TEXTS = 8
BUDGETS = (1, 3000, 1 << 20)


class TooSlowForReError(Exception):
    pass


@dataclass
class Outcome:
    cases: int = 0
    slow: int = 0
    differences: list[str] = field(default_factory=list)


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


def differences(patterns, texts, **options) -> list[str]:
    """A reproducer for each text on which the answers are not those of `re`."""
    rules = sr.Rules([(p, None) for p in patterns], **options)
    found = []
    for text in texts:
        expected = [i for i, pattern in enumerate(patterns) if pattern.search(text)]
        first = expected[0] if expected else None
        if (rules.first_match(text), rules.all_matches(text)) != (first, expected):
            listed = ", ".join(f"(re.compile({p.pattern!r}, {p.flags}), None)" for p in patterns)
            found.append(f"sr.Rules([{listed}], **{options}).all_matches({text!r})  # {expected}")
    return found


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
    parser.add_argument("--lists", type=int, default=130_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    outcome = run(random.Random(options.seed), options.lists)
    print("\n".join(outcome.differences))
    print(f"{outcome.cases:,} cases, {len(outcome.differences)} differences; "
          f"{outcome.slow} lists given up because re took over a second")  # fmt: skip
    return 1 if outcome.differences else 0


if __name__ == "__main__":
    sys.exit(main())
