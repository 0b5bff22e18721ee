"""Times calls in one process: checks that their results are equal, then interleaves them.

Reports medians and ratios. Absolute times are only for orientation.
"""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Final, NamedTuple

from jax import tree_util
from jax.sharding import PartitionSpec

from shardrules._base.text import seconds_shown

Call = Callable[[], Any]
PEERS: Final = ("eformer", "flax", "re loop")
"""The peers of the cases, in the order of the tables."""
_ROUNDS: Final = 5
_QUICK_RUNS: Final = 5
_PACKAGES: Final = (
    "shardrules", "jax", "jaxlib", "numpy", "eformer", "flax", "equinox", "optax",
)  # fmt: skip


class Row(NamedTuple):
    """A measurement beside its bar; at most that much is asked for."""

    name: str
    measured: float
    unit: str
    bar: float | None = None
    note: str = ""
    quartiles: tuple[float, float] | None = None
    """Between these is the middle half of the rounds."""

    @property
    def verdict(self) -> str:
        """Whether the bar, if there is one, is met."""
        return "" if self.bar is None else "met" if self.measured <= self.bar else "MISSED"


@dataclass
class Case:
    """One line of the report.

    Args:
        name: What is done, on what.
        ours: The call under test, cold unless the name says otherwise.
        identity: `tree_map(lambda x: x)` on the same tree.
        peers: Other implementations of the same, by name; their results must equal ours.
        bars: What docs/evidence.md asks for, by reference: ours may take at most that many times
            as long as identity, or must be at least that many times faster than a peer.
    """

    name: str
    ours: Call
    identity: Call
    peers: dict[str, Call]
    bars: dict[str, float] = field(default_factory=dict)


@dataclass
class Result:
    """Seconds per round, by implementation ("ours", "identity", or a peer)."""

    case: Case
    rounds: dict[str, list[float]]

    def ratio(self, reference: str) -> float:
        """Our to identity, or a peer to ours: how many times as long the numerator takes.

        The median of the rounds' own ratios: a machine that slows down for seconds slows both.
        """
        return median(self.ratios(reference))

    def ratios(self, reference: str) -> list[float]:
        """Return the ratio of each round."""
        pairs = zip(self.rounds["ours"], self.rounds[reference], strict=True)
        return [a / b if reference == "identity" else b / a for a, b in pairs]

    def verdict(self) -> str:
        """Return whether each bar is met."""
        words = []
        for reference, bar in self.case.bars.items():
            ratio = self.ratio(reference)
            met = ratio <= bar if reference == "identity" else ratio >= bar
            sign = "<=" if reference == "identity" else ">="
            words.append(f"{reference} {sign} {bar:g}x: {'met' if met else 'MISSED'}")
        return ", ".join(words)


def measure(case: Case) -> Result:
    """Run everything once to compare results, then time it, interleaved, without the collector.

    In each round a peer runs once; ours and identity, which are quick, several times.
    """
    expected = case.ours()
    for name, call in case.peers.items():
        if not same(call(), expected):
            raise AssertionError(f"{case.name}: {name} and shardrules disagree")
    calls = {"ours": case.ours, "identity": case.identity, **case.peers}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with without_collector():
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                runs = 1 if name in case.peers else _QUICK_RUNS
                times[name] += interleaved_seconds([call], runs)
    return Result(case, times)


def compared(name: str, ours: Call, reference: Call, *, runs: int, bar: float | None = None) -> Row:
    """Return how many times as long ours takes as the reference, in rounds of both."""
    return row_of(name, [interleaved_seconds([ours, reference], runs=1) for _ in range(runs)], bar)


def row_of(name: str, rounds: Sequence[Sequence[float]], bar: float | None = None) -> Row:
    """Return how many times as long ours takes, of rounds of (ours, reference), in seconds."""
    ratios = [ours / reference for ours, reference in rounds]
    times = "; ".join(seconds_shown(median(seconds)) for seconds in zip(*rounds, strict=True))
    return Row(name, median(ratios), "x", bar, times, quartiles_of(ratios))


def quartiles_of(ratios: Sequence[float]) -> tuple[float, float] | None:
    """Return what the middle half of the ratios lies between; None of one ratio."""
    if len(ratios) == 1:
        return None
    low, _, high = quantiles(ratios, method="inclusive")
    return low, high


def interleaved_seconds(calls: Sequence[Call], runs: int) -> list[float]:
    """Return the median time of each call, of runs in which all of them take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for call, seconds in zip(calls, times, strict=True):
            start = perf_counter()
            result = call()
            seconds.append(perf_counter() - start)
            del result
    return [median(seconds) for seconds in times]


def same(a: Any, b: Any) -> bool:
    """Return whether two trees of specs or shardings are equal."""

    def flat(tree: Any) -> Any:
        return tree_util.tree_flatten(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return bool(flat(a) == flat(b))


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep the garbage collector from running, after it has run once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def environment() -> list[str]:
    """Hardware, versions and commit, one line each."""
    return [
        f"CPU: {_cpu()}, {os.cpu_count()} cores; {platform.system()} {platform.release()}",
        f"Python {platform.python_version()} ({platform.python_compiler()}); "
        + ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        f"commit {_commit()}",
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or "unknown"


def _commit() -> str:
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = " with uncommitted changes" if git("status", "--porcelain") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + changed
