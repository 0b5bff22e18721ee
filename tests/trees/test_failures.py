"""When something fails in a walk: one error, nothing leaks, the same rules work after. Ctrl-C stops what takes long."""

import itertools
import signal
import subprocess
import sys
import threading
import time

import pytest
from jax import tree_util

import shardrules as sr
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


# Millions of leaves, few of them different objects; each must take longer than it may go on.
SETUP = """
import gc, signal, time
import shardrules as sr
from shardrules import _core

# A job in the background, as CI may be, is born with it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Leaf:
    shape = (4, 8)

def stopped(use):
    print("ready", flush=True)
    begin = time.monotonic()
    try:
        use()
    except KeyboardInterrupt as error:
        print("stopped", getattr(error, "__notes__", [""])[0])
    else:
        print("ended after", time.monotonic() - begin)

rules = sr.Rules([(r"1/.*\\d7", "x"), (".*", None)])
SLOW = sr.Rules([("a.{0,9000}b.{0,9000}c", None)])  # minutes for these
leaf = Leaf()
rules.match([leaf])  # imports JAX
gc.disable()  # JAX's callback of the collector may swallow a Ctrl-C
"""
WALKS = {
    "match": "tree = [[leaf] * 10_000] * 3_000; stopped(lambda: rules.match(tree, strict=False))",
    "no leaves": "tree = [[{}] * 10_000] * 3_000; stopped(lambda: rules.match(tree))",
    "survey": "tree = [[leaf] * 10_000] * 300; stopped(lambda: sr.plan(tree, rules, {'tp': 2}))",
    "templates": "paths = ['layers/1/x' * 9] * 20_000_000; stopped(lambda: _core.templates(paths))",
    "long key": "stopped(lambda: SLOW.match({'ab' * 40_000: leaf}))",
    "long path": "stopped(lambda: SLOW.all_matches('ab' * 40_000))",
    "compile": "stopped(lambda: sr.Rules([(f'a{i}.*{i}[b-d]+', None) for i in range(100_000)]))",
}
AFTER = """
assert list(rules.match({"1": {"27": leaf}, "b": leaf})["1"]["27"]) == ["x"]
print("works", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
@pytest.mark.parametrize("walk", WALKS)
def test_ctrl_c(walk):
    process = subprocess.Popen([sys.executable, "-c", SETUP + WALKS[walk] + AFTER], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)  # in the middle of it
        process.send_signal(signal.SIGINT)
        try:
            stopped, works = process.communicate(timeout=60)[0].splitlines()
        finally:
            process.kill()
    assert stopped.startswith("stopped")
    assert works == "works"


@pytest.mark.parametrize("search", ["first_match", "all_matches"])
def test_another_thread_runs_during_a_long_search_that_asks_no_python(search):
    search = getattr(sr.Rules([("[ab]q", None)]), search)
    for _ in range(40):
        search("ab" * 50)  # once it has its states, a search has no other pause
    long = "ab" * 10**7
    assert any(advances_during(lambda: search(long)) for _ in range(20))
    assert not advances_during(lambda: search(long + "é"))  # [ab] is asked about é
    assert not advances_during(lambda: search("ab"))


def advances_during(act):
    """Say whether a thread that waits for the GIL gets it while this one acts."""
    gate, seen = threading.Lock(), []
    gate.acquire()
    other = threading.Thread(target=lambda: (gate.acquire(), seen.append(True)))
    other.start()
    interval = sys.getswitchinterval()
    time.sleep(0.05)
    sys.setswitchinterval(1000)  # nobody is asked to release it
    try:
        gate.release()
        act()
        return bool(seen)
    finally:
        sys.setswitchinterval(interval)
        other.join()


def test_other_threads_run_while_a_key_takes_long():
    slow = sr.Rules([("a.{0,4000}b.{0,4000}c", None)])
    walk = threading.Thread(target=slow.first_match, args=("ab" * 2000,))
    turns = 0
    walk.start()
    while walk.is_alive():
        time.sleep(0.001)  # those that it has before the walk begins are few
        turns += 1
    assert turns > 10  # about 30
