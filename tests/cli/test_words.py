"""Words of a command line: options and arguments, what is refused, the help, and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardrules as sr
from shardrules import __version__
from shardrules._base.hardware import public_hardware
from shardrules._cli.project import command_named, names
from shardrules._plan.codec import DIALECTS, LOGICAL_DIALECTS
from shardrules._plan.findings import LEVELS
from tests.support.command_line import invoke, options_of

PLAN = {"model": "model", "mesh": {"tp": 2}, "rules": ("r",)}
COMMANDS = {command.name: command for command in map(command_named, names())}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("plan -r r model -m tp=2", {}),
        ("plan -r r -m tp=2 model", {}),
        ("plan -r r model -m tp=2 --lock -x", {"lock": "-x"}),
        ("plan -r r model -mtp=2 --hbm 5GB", {"hbm": 5 * 10**9}),
        ("plan -r r model -m tp=2 --rules=-b", {"rules": ("r", "-b")}),
        ("plan -r r model -m tp=2 --gradients same --optimizer adam", {"gradients": True, "optimizer": ("float32",) * 2}),
        ("plan -r r model -m tp=2 --gradients BF16", {"gradients": "bfloat16"}),
        ("plan -r r model -m tp=2 --dialect NNX", {"dialect": sr.dialects.NNX}),
        ("plan -r r -m tp=2 -q -- model", {}),
        ("plan -r r model -m tp=2 --hbm v5P", {"hbm": sr.Hardware.named("v5p").memory_bytes}),
        ("plan -r r model -m fsdp=2,tp=4", {"mesh": {"fsdp": 2, "tp": 4}}),
        ("plan -r r - -m tp=2", {"model": "-"}),
        ("sweep model --devices 8 --axes fsdp,tp", {"devices": 8, "axes": ("fsdp", "tp")}),
        ("sweep model -m tp=2 -m tp=4", {"mesh": ({"tp": 2}, {"tp": 4})}),
        ("sweep model -m tp=2 --try batch=8,1_000 --try remat=True,none,x,0.5,.5",
         {"tries": {"batch": [8, 1000], "remat": [True, None, "x", 0.5, 0.5]}}),
    ],
)  # fmt: skip
def test_words_are_options(words, options):
    got = vars(options_of(*words.split()))
    assert got | (PLAN if words.startswith("plan") else {}) | options == got


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help(name):
    shown = invoke(name, "--help")
    assert (shown.exit_code, shown.stderr, invoke(name, "-h")) == (0, "", shown)
    text = " ".join(shown.stdout.split())
    assert COMMANDS[name].epilog in text
    assert [each.help for each in COMMANDS[name].params if each.help not in text] == []


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"prove", "rehearse", "solve", "step", "sweep"}))
def test_the_example_of_each_command_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = [["layers/0/wq/kernel", [4096, 4096], "F32"], ["layers/0/norm", [4096], "F32"]]
    Path("model.json").write_text(json.dumps({"params": params}))
    rules = [["kernel", ["fsdp", "tp"]], ["norm", []]]
    Path("rules.toml").write_text(f"rules = {json.dumps(rules)}")
    planned = invoke("plan", "model.json", "-r", "rules.toml", "-m", "fsdp=2", "--lock", "plan.lock")
    assert planned.exit_code == 0
    example = COMMANDS[name].epilog.removeprefix("Example: shardrules ")
    example = example.replace("my_package.model:shapes", "model.json")
    done = invoke(*example.partition(" > ")[0].split())
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout_bytes or name == "manifest"


def test_the_help_names_what_there_is():
    """As a text, since it must not import the modules that have it."""
    shown = " ".join(invoke("plan", "--help").stdout.split())
    assert f"Semantics of the rules: {', '.join(sorted(DIALECTS))}; of logical" in shown
    assert f"of logical rules {', '.join(LOGICAL_DIALECTS)}. Default" in shown
    of_solve = " ".join(invoke("solve", "--help").stdout.split())
    assert f"without --on: {', '.join(public_hardware())}." in of_solve
    assert f"--fail-on [{'|'.join(LEVELS)}|never]" in invoke("check", "-h").stdout


def test_the_overview_is_the_help_of_all():
    shown = invoke("--help")
    assert (shown.exit_code, invoke()) == (0, shown._replace(exit_code=2))
    for name, command in COMMANDS.items():
        assert f"  {name} " in shown.stdout
        assert command.short_help in " ".join(shown.stdout.split())
    assert "128 + N" in shown.stdout
    assert invoke("--version").stdout == f"shardrules {__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("shardrules ch", {"plain,check"}),
        ("shardrules check x --fail-on w", {"plain,warning"}),
        ("shardrules check x --optimizer adam --fail-on w", {"plain,warning"}),
        ("shardrules check x --format ", {"plain,text", "plain,json", "plain,github"}),
        ("shardrules check x --rules ", {"file,"}),
    ],
)
def test_a_shell_completes(line, words):
    asked = {"_SHARDRULES_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-m", "shardrules"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == words
