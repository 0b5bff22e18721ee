"""When something fails in the middle of a walk: one error, nothing leaks, the same rules work after."""

import itertools
import subprocess
import sys

import pytest
from jax import tree_util

from tests.support import failing

tree_util.register_pytree_with_keys(failing.Node, failing.flatten_with_keys, failing.unflatten)
for block in (failing.Block, failing.Called):
    tree_util.register_dataclass(block, data_fields=["a", "b"], meta_fields=["note"])


class OrdinaryError(Exception):
    pass


class OtherError(BaseException):
    """Like KeyboardInterrupt: nothing may swallow it."""


@pytest.mark.parametrize("case", failing.CASES)
def test_every_allocation_fails(case):
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi.set_nomemory")
    run = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.support.failing", case],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "allocations" in run.stdout


@pytest.mark.parametrize("error", [OrdinaryError, OtherError])
@pytest.mark.parametrize("case", [c for c in failing.CASES if c != "templates"])
def test_every_hook_raises(case, error):
    make, hooks = failing.CASES[case]
    use = make()
    failing.HOOKS.arm(None, None)
    expected, before = repr(use()), failing.references()
    failed = set()
    for k in itertools.count(1):
        failing.HOOKS.arm(k, error)
        try:
            result = use()
        except error as raised:
            assert str(raised) == failing.HOOKS.failed
            if case not in ("searches", "count"):  # no walk, which would name the leaf
                assert raised.__notes__[0].startswith("shardrules: at ")
            failed.add(str(raised))
            continue
        hook = failing.HOOKS.failed
        failing.HOOKS.arm(None, None)
        assert repr(result) == expected
        del result
        if not hook:
            break
        # A class may answer the question for its shape with any error of its own.
        assert (hook, error) == ("class shape", OrdinaryError)
    failing.HOOKS.arm(None, None)
    assert repr(use()) == expected
    assert failing.references() == before
    assert failed >= {hook.replace("-", " ") for hook in hooks.split()}
