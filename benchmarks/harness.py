"""Times calls in one process: checks that their results are equal, then interleaves them.

Reports medians and ratios. Absolute times are only for orientation.
"""

from __future__ import annotations

import gc
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter
from typing import Any, Final

from jax import tree_util
from jax.sharding import PartitionSpec

Call = Callable[[], Any]
PEERS: Final = ("eformer", "flax", "re loop")
"""The peers of the cases, in the order of the tables."""
_PACKAGES: Final = (
    "shardrules", "jax", "jaxlib", "numpy", "eformer", "flax", "equinox", "optax", "google-re2",
    "optree",
)  # fmt: skip


@dataclass
class Case:
    """One line of the report.

    Args:
        name: What is done, on what.
        ours: The call under test, cold unless the name says otherwise.
        identity: `tree_map(lambda x: x)` on the same tree.
        peers: Other implementations of the same, by name; their results must equal ours.
        bars: What docs/performance.md asks for, by reference: ours may take at most that many times
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

    @property
    def seconds(self) -> dict[str, float]:
        """The medians."""
        return {name: median(seconds) for name, seconds in self.rounds.items()}

    def ratio(self, reference: str) -> float:
        """Our to identity, or a peer to ours: how many times as long the numerator takes.

        The median of the rounds' own ratios: a machine that slows down for seconds slows both.
        """
        pairs = zip(self.rounds["ours"], self.rounds[reference], strict=True)
        return median(a / b if reference == "identity" else b / a for a, b in pairs)

    def verdict(self) -> str:
        """Return whether each bar is met."""
        words = []
        for reference, bar in self.case.bars.items():
            ratio = self.ratio(reference)
            met = ratio <= bar if reference == "identity" else ratio >= bar
            sign = "<=" if reference == "identity" else ">="
            words.append(f"{reference} {sign} {bar:g}x: {'met' if met else 'MISSED'}")
        return ", ".join(words)


def measure(case: Case, *, with_collector: bool, rounds: int = 5, quick_runs: int = 5) -> Result:
    """Run everything once to compare results, then times it, interleaved.

    In each round a peer runs once; ours and identity, which are quick, several times.
    """
    expected = case.ours()
    for name, call in case.peers.items():
        if not same(call(), expected):
            raise AssertionError(f"{case.name}: {name} and shardrules disagree")
    calls = {"ours": case.ours, "identity": case.identity, **case.peers}
    times: dict[str, list[float]] = {name: [] for name in calls}
    with collector(enabled=with_collector):
        for _ in range(rounds):
            for name, call in calls.items():
                runs = 1 if name in case.peers else quick_runs
                times[name] += interleaved_seconds([call], runs)
    return Result(case, times)


def measure_all(cases: Iterable[Case], tell: Callable[[str], None]) -> dict[bool, list[Result]]:
    """Return each case without (False) and with the garbage collector.

    `tell` hears how far it is.
    """
    results: dict[bool, list[Result]] = {False: [], True: []}
    for case in cases:
        for with_collector, measured in results.items():
            measured.append(measure(case, with_collector=with_collector))
        tell(f"measured: {case.name}")
    return results


def interleaved_seconds(calls: Sequence[Call], runs: int) -> list[float]:
    """Return the median time of each call, of runs in which all of them take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for call, taken in zip(calls, times, strict=True):
            start = perf_counter()
            result = call()
            taken.append(perf_counter() - start)
            del result
    return [median(taken) for taken in times]


def same(a: Any, b: Any) -> bool:
    """Return whether two trees of specs or shardings are equal."""

    def flat(tree: Any) -> Any:
        return tree_util.tree_flatten(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return bool(flat(a) == flat(b))


@contextmanager
def collector(*, enabled: bool) -> Iterator[None]:
    """With the garbage collector on, or off, and in any case run once before."""
    gc.collect()
    if not enabled:
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
