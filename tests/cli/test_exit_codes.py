"""The command line's process: its exit codes, with every state of its streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import pytest

import shardrules as sr
from examples import demo
from shardrules._cli import process, sources
from tests.support.command_line import invoke
from tests.support.slow import slow

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
LARGE = [str(demo.MODEL), "-r", str(demo.RULES), "-m", "fsdp=64,sp=1,tp=8"]
FINDINGS, NOTHING, BAD = "tp=4,dp=2", "tp=4", "tp=0"
CODES = {NOTHING: 0, FINDINGS: 1, BAD: 2}


@pytest.fixture
def small(tmp_path):
    """Of a model with findings on some meshes."""
    model, rules = tmp_path / "model.json", tmp_path / "rules.json"
    model.write_text(json.dumps({"params": [["w", [4096, 4096], "F32"]]}))
    rules.write_text(json.dumps([["w", ["tp"]]]))
    return [str(model), "-r", str(rules), "-m"]


def run(command, redirection="", **more):
    """(exit code, stdout, stderr) of the command line, started by a shell."""
    words = [sys.executable, "-m", "shardrules", *command]
    shell = ["sh", "-c", f'"$@" {redirection}', "sh", *words]
    done = subprocess.run(shell, capture_output=True, text=True, check=False, timeout=120, **more)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@POSIX
@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", slow("<&- >&- 2>&-")])
@pytest.mark.parametrize("mesh", [slow(NOTHING), FINDINGS, slow(BAD)])
def test_a_closed_stream_is_like_the_null_device(small, tmp_path, redirection, mesh):
    code = CODES[mesh]
    ended, out, err = run(["check", *small, mesh, "--fail-on", "info"], redirection)
    assert ended == code
    # What is for one stream is not on the other.
    assert (out == "") == (redirection != "2>&-" or code == 2)
    assert (err == "") == ("2>&-" in redirection or code != 2)
    # Nor does a file take the place of a closed stream.
    assert run(["plan", *small, FINDINGS, "--lock", str(tmp_path / "plan.lock")], redirection)[0] == 0
    assert json.loads((tmp_path / "plan.lock").read_text())["mesh"] == {"tp": 4, "dp": 2}


@POSIX
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("mesh", [FINDINGS, slow(NOTHING)])
def test_a_full_device_is_no_finding(small, mesh):
    command = ["check", *small, mesh, "--fail-on", "info"]
    code, _, err = run(command, ">/dev/full")
    assert (code, err) == (2, "error: [Errno 28] No space left on device\n")
    assert run(command, ">/dev/full 2>/dev/full")[0] == 2
    assert run(["check", *small, BAD], "2>/dev/full")[0] == 2
    assert run(command, "2>/dev/full")[0] == (mesh == FINDINGS)


@POSIX
@pytest.mark.parametrize("command", [["plan", *LARGE, "--format", "json"], ["--help"]])
def test_a_reader_that_stops_is_no_finding(command):
    words = [sys.executable, "-m", "shardrules", *command]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(120) == 128 + signal.SIGPIPE


def ended_by(name, words, folder):
    """The exit code of a process that gets the signal when it has begun, and says nothing."""
    with subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE) as process:
        while not (folder / "begun").exists():
            time.sleep(0.01)
            assert process.poll() is None
        process.send_signal(getattr(signal, name))
        assert process.stderr.read().strip() == b""
        return process.wait(120)


@POSIX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_it_in_order(small, tmp_path, name):
    (tmp_path / "slow.py").write_text(
        textwrap.dedent("""
        import pathlib, time
        def tree():
            try:
                pathlib.Path("begun").touch()
                time.sleep(100)
            except Exception:  # what a model's code does
                pass
            finally:
                pathlib.Path("tidied").touch()
        """)
    )
    # A job in the background, as CI may be, is born with Ctrl-C ignored, and under nohup with SIGHUP.
    start = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); signal.signal(signal.SIGINT, signal.default_int_handler); from shardrules._cli import main; main()"
    words = [sys.executable, "-c", start, "plan", "slow:tree", *small[1:], NOTHING]
    assert ended_by(name, words, tmp_path) == 128 + getattr(signal, name)
    assert (tmp_path / "tidied").exists()


@POSIX
def test_what_nohup_ignores_stays_ignored():
    code = (
        "import signal, os; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from shardrules._cli.process import exit_with\n"
        "exit_with(lambda: os.kill(os.getpid(), signal.SIGHUP) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_a_stream_of_few_characters_gets_escapes(tmp_path, small):
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"params": [["层/é", [4096, 4096], "F32"]]}))
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
    code, out, err = run(["check", str(model), *small[1:], NOTHING], env=ascii_only)
    assert (code, err, r"\u5c42/\xe9" in out) == (1, "", True)
    code, out, err = run(["plan", "层", *small[1:], NOTHING], env={**ascii_only, "PYTHONUTF8": "1"})
    assert (code, out, err.startswith(r"error: \u5c42: ")) == (2, "", True)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError("Unable to allocate 8 GiB"), "error: MemoryError: Unable to allocate 8 GiB\n"),
        (KeyError("no leaf"), "error: no leaf\n"),
        (ValueError("bad"), "error: bad\n"),
        (ZeroDivisionError("a\n0 errors"), r"error: ZeroDivisionError: a\u000a0 errors: this is a bug in shardrules"),
    ],
)  # fmt: skip
def test_what_goes_wrong_inside_is_an_error_and_a_bug_is_called_one(monkeypatch, error, expected):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(sources, "plan_model", fails)
    done = invoke("plan", "m", "-r", "r", "-m", "tp=2")
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(expected)


def test_the_traceback_is_for_python_s_development_mode(small):
    command = [sys.executable, "-X", "dev", "-m", "shardrules", "check", "none.json", *small[1:], NOTHING]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "Traceback" in done.stderr) == (2, True)
    assert done.stderr.splitlines()[-1].startswith("error: none.json: No such file")


@POSIX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_compiler_that_hears_no_signal_is_ended(tmp_path, name):
    """As it never comes back, Python would see no signal."""
    deaf = (
        "import ctypes, pathlib, signal\n"
        "from shardrules._cli import process\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(256)\n"
        "process.let_signals_end()\n"
        "lock(mutex), pathlib.Path('begun').touch(), lock(mutex)\n"
    )
    words = [sys.executable, "-c", deaf]
    assert ended_by(name, words, tmp_path) == -getattr(signal, name)


@pytest.mark.parametrize(
    ("function", "options", "text"),
    [
        (lambda x: 1 / 0, {}, "the step fails: ZeroDivisionError: division by zero\n"),
        (lambda x: x, {"compiler_options": {"no_such_option": True}}, "the step fails: RuntimeError: INVALID_ARGUMENT: No"),
    ],
)  # fmt: skip
def test_an_error_of_the_step_is_no_bug_of_shardrules(capsys, function, options, text):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        sr.prove(jax.jit(function, **options), jax.ShapeDtypeStruct((8,), "float32"))
    assert process.code_of(caught.value) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {text}"), err
    assert "bug" not in err
    assert "JAX_TRACEBACK_FILTERING" not in err
    line = function.__code__.co_firstlineno
    assert options or f"which raises at {__file__}:{line}," in err
