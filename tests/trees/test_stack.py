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


def test_the_error_names_the_stack():
    tree = jax.ShapeDtypeStruct((4,), "float32")
    for _ in range(900):
        tree = {"a": tree}
    rules = sr.Rules([(".*", P("tp"))])
    errors = []

    def walk():
        with pytest.raises(RecursionError) as info:
            rules.match(tree)
        errors.append(info.value)
        assert rules.match({"a": jax.ShapeDtypeStruct((4,), "float32")}) == {"a": P("tp")}

    before = threading.stack_size(512 << 10)
    try:
        thread = threading.Thread(target=walk)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert "levels deep, which is all that the C stack of this thread has room" in str(errors[0])
    assert "threading.stack_size()" in str(errors[0])
    assert errors[0].__notes__[0].startswith("shardrules: at 'a/a/")
    assert rules.match(tree)  # of the main thread, whose stack is larger
