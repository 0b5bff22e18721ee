"""Trees deeper than a thread's C stack has room for: RecursionError, as for those too deep for Python.

`python -m tests.trees.test_stack KIB` walks trees of each kind on a thread with a stack of that many KiB, and
prints, for each walk, the depths that got an answer: a process of its own, because a fault is a crash.
"""

import ast
import dataclasses
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import pytest
from jax import tree_util
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._core import aligned_values
from tests.support.slow import slow
from tests.support.trees import Block, Pair, WithKeys

DEPTHS = [20, 50, 90, 130, 180, 250, 350, 500, 700, 1000, 1400, 1600, 3000]
LEAF = jax.ShapeDtypeStruct((4, 8), "float32")
MESH = {"fsdp": 2, "tp": 2}
RULES = sr.Rules([("x$", P("tp")), (".*", P("fsdp"))])
KEYSTR_RULES = sr.Rules(RULES, sr.dialects.KEYSTR)


@tree_util.register_dataclass
@dataclasses.dataclass
class Called:
    a: Any

    def __post_init__(self):
        self.made = True


class Property:
    """A leaf whose shape is read by calling Python."""

    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sorted([8, 4], key=lambda size: int(str(size))))


NODES: dict[str, Callable[[Any], Any]] = {
    "dict": lambda child: {"a": child, "x": LEAF},
    "large dict": lambda child: {"a": child} | {f"x{i}": LEAF for i in range(9)},
    "list": lambda child: [child],
    "tuple": lambda child: (LEAF, child),
    "namedtuple": lambda child: Pair(child, LEAF),
    "OrderedDict": lambda child: OrderedDict(a=child),
    "defaultdict": lambda child: defaultdict(list, a=child),
    "fields": lambda child: Block(child, LEAF),
    "called": Called,
    "flattened": WithKeys,
}
WALKS: dict[str, Callable[[Any], Any]] = {
    "match": RULES.match,
    "match keystr": KEYSTR_RULES.match,
    "named_shardings": lambda tree: sr.named_shardings(tree, RULES, MESH),
    "plan": lambda tree: sr.plan(tree, RULES, MESH).specs(),
    "coverage": RULES.coverage,
}


def nested(node: Callable[[Any], Any], depth: int, leaf: Any = LEAF) -> Any:
    tree = leaf
    for _ in range(depth):
        tree = node(tree)
    return tree


def answered(walk: Callable[[Any], Any], trees: dict[int, Any]) -> list[int]:
    depths = []
    for depth, tree in trees.items():
        with suppress(RecursionError):
            walk(tree)
            depths.append(depth)
    return depths


def beside(tree: Any) -> None:
    if aligned_values(tree, tree, 1) is None:
        raise RecursionError


def all_walks(trees: dict[str, dict[int, Any]]) -> None:
    for name, walk in WALKS.items():
        for kind, of_kind in trees.items():
            print(name, kind, answered(walk, of_kind), sep=": ", flush=True)
    rows = {depth: nested(NODES["list"], depth, 0) for depth in DEPTHS}
    print("beside", "list", answered(beside, rows), sep=": ", flush=True)
    try:
        RULES.match(trees["dict"][3000])
    except RecursionError as error:
        print("error", error, *error.__notes__, sep=": ", flush=True)
    assert RULES.match({"x": LEAF}) == {"x": P("tp")}


def on_a_stack_of(kib: int, act: Callable[[], None]) -> None:
    threading.stack_size(kib << 10)
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.mark.parametrize("kib", [256, slow(512), slow(1024), slow(8192)])
def test_a_deep_tree_on_a_small_stack_does_not_crash(kib):
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.trees.test_stack", str(kib)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    *lines, done = run.stdout.splitlines()
    assert done == "done", run.stderr
    error = lines.pop() if lines[-1].startswith("error: ") else ""
    if kib < 8192:
        assert "levels deep, which is all that the C stack of this thread has room" in error
        assert "threading.stack_size()" in error
        assert ": shardrules: at 'a/a/" in error
    assert len(lines) == len(WALKS) * (len(NODES) + 1) + 1
    # The frames of AddressSanitizer are several times larger.
    small = 0 if "asan" in os.environ.get("LD_PRELOAD", "") else 20
    least = small if kib < 8192 else 500
    for line in lines:
        depths = ast.literal_eval(line.rpartition(": ")[2])
        # Up to a depth, each tree gets an answer.
        assert depths == DEPTHS[: len(depths)]
        assert max(depths, default=0) >= least, line


if __name__ == "__main__":
    # Freed by the main thread: CPython's own defaultdict is freed level by level on the C stack.
    made = {kind: {depth: nested(node, depth) for depth in DEPTHS} for kind, node in NODES.items()}
    made["property"] = {depth: nested(NODES["dict"], depth, Property()) for depth in DEPTHS}
    on_a_stack_of(int(sys.argv[1]), lambda: all_walks(made))
    print("done")
