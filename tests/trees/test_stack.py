"""Trees deeper than a thread's C stack has room for: RecursionError, as for those too deep for Python."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading

import jax
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support import small_stacks


@pytest.mark.parametrize("kib", [256, 512, 1024, 8192])
def test_a_deep_tree_on_a_small_stack_does_not_crash(kib):
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.support.small_stacks", str(kib)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    *lines, done = run.stdout.splitlines()
    assert done == "done", run.stderr
    assert len(lines) == len(small_stacks.WALKS) * (len(small_stacks.NODES) + 1) + 1
    # The frames of AddressSanitizer are several times larger.
    small = 0 if "asan" in os.environ.get("LD_PRELOAD", "") else 20
    least = small if kib < 8192 else 500
    for line in lines:
        depths = ast.literal_eval(line.rpartition(": ")[2])
        # Up to a depth, each tree gets an answer.
        assert depths == small_stacks.DEPTHS[: len(depths)]
        assert max(depths, default=0) >= least, line


def say_the_error():
    """Print the error of a thread with a small stack; the main thread matches the tree."""
    tree = jax.ShapeDtypeStruct((4,), "float32")
    for _ in range(900):
        tree = {"a": tree}
    rules = sr.Rules([(".*", P("tp"))])

    def walk():
        try:
            rules.match(tree)
        except RecursionError as error:
            print(error, *error.__notes__, sep="\n")
        assert rules.match({"a": jax.ShapeDtypeStruct((4,), "float32")}) == {"a": P("tp")}

    threading.stack_size(512 << 10)
    thread = threading.Thread(target=walk)
    thread.start()
    thread.join()
    assert rules.match(tree)


def test_the_error_names_the_stack():
    # In a new process: glibc gives a thread the stack of an earlier one, up to four times as large.
    code = "from tests.trees.test_stack import say_the_error; say_the_error()"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, run.stderr
    error, note = run.stdout.splitlines()
    assert "levels deep, which is all that the C stack of this thread has room" in error
    assert "threading.stack_size()" in error
    assert note.startswith("shardrules: at 'a/a/")
