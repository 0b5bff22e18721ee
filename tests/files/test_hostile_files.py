"""Hostile files: memory and time are bounded, and a file that never ends is not opened.

Each is read in a process of its own, whose peak of memory the system has measured.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import threading

import pytest

import shardrules as sr
from shardrules._base import io as content
from shardrules._base.io import FileError, memory_within
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import Arrays, nested_dicts, read_arrays
from shardrules._plan.files.rules import read_rule_source
from tests.support.command_line import invoke
from tests.support.contexts import pseudo_terminal
from tests.support.files import header_file, message
from tests.support.slow import slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc")

MIB = 1 << 20
MOST = 512 * MIB
# The interpreter and our modules; and what a bomb may take at most, in seconds.
IDLE = 60 * MIB
SECONDS = 30

READ = """
import sys
from pathlib import Path
from shardrules import FileError
from shardrules._plan.files.models import read_arrays
from shardrules._base.io import parse_json, read_bytes
from shardrules._plan.files.rules import read_rule_source
read = {"json": lambda path: parse_json(Path(path), read_bytes(Path(path))),
        "arrays": lambda path: read_arrays(path).leaves, "rules": lambda path: read_rule_source(path).rules}
try:
    print("read", len(read[sys.argv[1]](sys.argv[2])))
except FileError as error:
    print("refused", error)
# Not `ru_maxrss`, which remembers the process that has started this one.
status = Path("/proc/self/status").read_text()
print(1024 * int(status.partition("VmHWM:")[2].split()[0]))
"""


def read_alone(kind, path):
    """What a process has said that reads the file, and its peak of memory in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", READ, kind, str(path)],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    said, peak = done.stdout.rstrip("\n").rsplit("\n", 1)
    return said, int(peak)


def packed(*parts):
    """A gzip of (text, how often) pairs."""

    def write(path):
        with gzip.open(path, "wb") as file:
            for text, times in parts:
                for _ in range(10):
                    file.write(text * (times // 10))
                file.write(text * (times % 10))

    return write


def plain(*parts):
    return lambda path: path.write_bytes(b"".join(text * times for text, times in parts))


def sparse(size, head=b""):
    def write(path):
        path.write_bytes(head)
        os.truncate(path, size)

    return write


LARGE = "takes more than 537 MB of memory, which is the bound; is it the right file?"
LEVELS = "a key has more than 8 levels; rules need 3 levels"
KEY = (b"a.", 40_000)
# By file: how it is made, and what is said of it.
BOMBS = {
    "lists.json.gz": (packed((b'{"params":[', 1), (b"[],", 60_000_000), (b"[]]}", 1)), LARGE),
    "wide.json": (plain((b'["', 1), (b"a", 90_000_000), ("😀".encode(), 1), (b'"]', 1)), LARGE),
    "escaped.json": (plain((b'["', 1), (b"a", 90_000_000), (rb"\ud83d\ude00", 1), (b'"]', 1)), LARGE),
    "sparse.json": (sparse(3 << 30), LARGE),
    "zeros.json": (sparse(250 * MIB), "line 1, column 1: this is not JSON"),
    "fraction.json": (plain((b"[0.", 1), (b"9", 10_000_000), (b"]", 1)), "which lists no arrays"),
    "name.json": (plain((b'{"params":[["', 1), (b"a", 5_000_000), (b'",[1],"F99"]]}', 1)), "unknown dtype 'F99'"),
    "shape.json": (plain((b'{"params":[["a",[2', 1), (b",2", 2_000_000), (b'],"F32"]]}', 1)), "more than 2**63 - 1 elements"),
    "lists.safetensors": (lambda path: path.write_bytes(header_file(b'{"a":[' + b"[]," * 30_000_000 + b"1]}")), LARGE),
    "key.toml": (plain(KEY, (b"a=1", 1)), LEVELS),
    "quoted key.toml": (plain((b'"a" . ', 20_000), (b"a=1", 1)), LEVELS),
    "key behind a string.toml": (plain((b'x={a="""a""""",', 1), KEY, (b"a=1}", 1)), LEVELS),
    "tables.toml": (
        lambda path: path.write_text("".join(f"[{i:x}.a.a.a.a.a.a.a]\n" for i in range(43_000))),
        "key 'rules': there is no list of rules",
    ),
    "quotes.toml": (plain((b'x="', 1), (b'\\"', 500_000)), "this is not TOML: Unterminated string"),
    "long.toml": (plain((b"#\n", 600_000)), "reading this file of 1.20 MB takes more than 537 MB"),
    "nested.toml": (plain((b"x=", 1), (b"{a=", 300_000)), "the TOML is nested too deeply"),
    "pattern.json": (plain((b'[["', 1), (b"a", 5_000_000), (b'",[]]]', 1)), "rule 0: the pattern has 5,000,000 characters"),
    "replicated.json": (plain((b'{"rules":[],"replicated":["', 1), (b"a", 5_000_000), (b'"]}', 1)), "replicated[0]: the pattern has 5"),
    "many rules.json": (plain((b"[", 1), (b'["abc",[]],', 1_000_000), (b'["abc",[]]]', 1)), "reading this file of 11.0 MB takes"),
    "unread rules.toml": (sparse(400 * MIB), LARGE),
    "unread rules.json.gz": (packed((b" ", 300_000_000), (b"[]", 1)), LARGE),
}  # fmt: skip
RULES = re.compile("toml|yml|rules|pattern|flags|replicated")
SLOW = {"zeros.json", "tables.toml"}


@pytest.mark.parametrize("name", [slow(name) if name in SLOW else name for name in BOMBS])
def test_a_bomb_meets_the_bound_on_memory(tmp_path, name):
    path = tmp_path / name
    make, expected = BOMBS[name]
    make(path)
    kind = "rules" if RULES.search(name) else "arrays"
    said, peak = read_alone(kind, path)
    assert said.startswith(f"refused {path}: ")
    assert expected in said
    assert len(said) < 3000
    # What its parser could not hold is not even read.
    assert peak < (2 * IDLE if "unread" in name else MOST + 512 * path.stat().st_blocks + IDLE)


# Values of one kind.
NEAR = {
    "lists": b"[]", "lists of one": b"[999]", "lists of five": b"[1,1,1,1,1]", "objects": b"{}",
    "objects of one": b'{"a":1}', "strings": b'"ab"', "long strings": b'"' + b"a" * 50 + b'"',
    "numbers": b"999", "ones": b"1", "fractions": b"1.5",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", NEAR)
def test_what_is_just_below_the_bound_takes_no_more(tmp_path, kind):
    """The estimate is one from above, whatever the file is made of, and not a wild one."""
    value, path = NEAR[kind], tmp_path / "near.json"
    one = value + b","
    cost = sum(cost * one.count(byte) for byte, cost in content._COSTS.items())
    count = MOST * 99 // 100 // (cost + content._NARROW * len(one) - len(one))
    path.write_bytes(b"[" + b",".join([value] * count) + b"]")
    said, peak = read_alone("json", path)
    assert said == f"read {count}"
    assert MOST // 5 < peak < MOST + path.stat().st_size + IDLE


LEAF = ArraySpec((2,), "float32")


def test_dicts_are_counted_as_they_are_made():
    names = [f"layers/{i}/attention/{name}/kernel" for i in range(1000) for name in "qkvo"]
    arrays = Arrays("m", dict.fromkeys(names, LEAF), "/")
    with memory_within(6005 * 320):
        assert nested_dicts(arrays)["layers"]["999"]["attention"]["o"] == {"kernel": LEAF}
    with memory_within(5000 * 320), pytest.raises(FileError, match="more levels"):
        nested_dicts(arrays)
    with pytest.raises(FileError, match="^m: .* the names have more levels than can") as info:
        nested_dicts(Arrays("m", {"a/" * 3_000_000 + "b": LEAF}, "/"))
    assert len(str(info.value)) < 3000


# What is no regular file


@pytest.fixture
def at_once():
    """Reads in a thread, which must be done soon: what hangs would hang the tests, too."""

    def call(read, source):
        said = []
        thread = threading.Thread(target=lambda: said.append(message(read, source)), daemon=True)
        thread.start()
        thread.join(10)
        assert said, "it hangs"
        return said[0]

    return call


NOT_REGULAR = "this is not a regular file but a device or a pipe"


@pytest.mark.parametrize(
    "name",
    ["x", "x.json.gz", "x.safetensors", "x.toml", "x.safetensors.index.json", "link", "loop", "/dev/zero", "/dev/null", "/dev/tty", "/dev/random"],
)  # fmt: skip
def test_what_is_no_file_is_not_waited_for(tmp_path, at_once, name):
    path = tmp_path / name  # which a whole path is in place of
    if name in ("link", "loop"):
        path.symlink_to("x" if name == "link" else "loop")
    if not name.startswith("/") and name != "loop":
        os.mkfifo(path.resolve())
    for read in (read_arrays, read_rule_source):
        assert re.search(f"{NOT_REGULAR}|No such device or address|Too many levels of symbolic", at_once(read, path))


MANIFEST = b'{"params": [["w", [8, 8], "BF16"]]}'
BOMB = gzip.compress(b"[" + b"[]," * 10_000_000 + b"[]]", 1)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        *((name, None, NOT_REGULAR) for name in ("/dev/stdin", "/proc/self/fd/0", "/dev/fd/0")),  # not waited for
        ("-", MANIFEST, "read 1"),
        ("-", gzip.compress(MANIFEST), "read 1"),
        ("-", BOMB, LARGE),
    ],
)
def test_standard_input_is_read_where_it_is_asked_for(name, given, expected):
    command = [sys.executable, "-c", READ, "arrays", name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        said = child.communicate(given)[0] if given else child.stdout.read()
        assert expected in said.decode()
        assert child.wait(SECONDS) == 0


def test_a_terminal_is_not_waited_for():
    above, terminal = pseudo_terminal()
    command = [sys.executable, "-c", READ, "arrays", "-"]
    child = subprocess.run(command, stdin=terminal, stdout=subprocess.PIPE, timeout=SECONDS, check=True)
    os.close(above)
    os.close(terminal)
    assert b"standard input is not a pipe" in child.stdout


def test_the_files_of_a_directory_are_regular(tmp_path, at_once):
    os.mkfifo(tmp_path / "m.safetensors")
    assert NOT_REGULAR in at_once(read_arrays, tmp_path)
    index = tmp_path / "m.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "m.safetensors"}}')
    assert "'m.safetensors' is missing beside the index" in at_once(read_arrays, tmp_path)
    index.unlink()
    os.mkfifo(index)
    assert NOT_REGULAR in at_once(read_arrays, tmp_path)


@pytest.mark.parametrize("name", ["m.json", "m.safetensors", "r.toml"])
def test_a_file_that_has_nothing_yet_is_not_waited_for(tmp_path, at_once, monkeypatch, name):
    """As /proc/kmsg, which is a regular file whose reads would block."""
    path = tmp_path / name
    path.touch()
    opener = content._open_at_once

    def open_empty_pipe(file, flags):
        if file != path:
            return opener(file, flags)
        end, _ = os.pipe2(os.O_NONBLOCK)
        return end

    monkeypatch.setattr(content, "_open_at_once", open_empty_pipe)
    monkeypatch.setattr(content.stat, "S_ISREG", lambda _: True)
    read = {"m": read_arrays, "r": read_rule_source}[name[0]]
    assert str(path) in at_once(read, path)


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_bytes(MANIFEST)
    for read in (sr.read_model, sr.read_rules, read_arrays, read_rule_source,
                 lambda path: sr.load(path, [("w", None)], {"tp": 1})):  # fmt: skip
        assert message(read, "").startswith("the path is empty; give the name of a file")
    for words in (("plan", "", "-r", ""), ("check", "m.json", "-r", "")):
        done = invoke(*words, "-m", "tp=1")
        assert (done.exit_code, "the path is empty" in done.output) == (2, True)
