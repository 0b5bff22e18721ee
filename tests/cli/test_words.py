"""Words of a command line: options and arguments, what is refused, the help, and completion."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardrules import __version__
from shardrules._base.hardware import public_hardware
from shardrules._base.io import DEFAULT_MEMORY
from shardrules._base.rule_specs import MEMORY_KINDS
from shardrules._base.text import byte_count
from shardrules._cli.commands import COMMANDS
from shardrules._cli.options import GROUP_OF, GROUPS
from shardrules._plan.codec import DIALECTS, LOGICAL_DIALECTS
from shardrules._plan.files.rules import TABLES
from shardrules._plan.findings import LEVELS
from tests.support import command_page
from tests.support.command_line import invoke, options_of

PLAN = {"source": "model", "mesh": "tp=2", "rules": None, "min_size": 0, "stacked": ()}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("model -m tp=2", {}),
        ("-m tp=2 model", {}),
        ("--mesh=tp=2 model --min-size 3", {"min_size": 3}),
        ("model -m tp=2 --lock -x", {"lock": "-x"}),
        ("model -mtp=2 --hbm -5GB", {"hbm": "-5GB"}),
        ("model -m tp=2 --stacked a --must-fit --stacked=-b", {"stacked": ("a", "-b"), "must_fit": True}),
        ("-m tp=2 -q -- model", {"quiet": True}),
        ("- -m tp=2", {"source": "-"}),
    ],
)  # fmt: skip
def test_words_are_options(words, options):
    got = vars(options_of("plan", *words.split()))
    assert got | PLAN | options == got


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan", "the following arguments are required: SOURCE"),
        ("sweep", "the following arguments are required: SOURCE"),
        ("explain -r x", "the following arguments are required: SOURCE, PATH"),
        ("plan m", "the following arguments are required: --rules/-r, --mesh/-m"),
        ("plan m -m", "option '-m' requires an argument"),
        ("plan m --must-fit=3", "option '--must-fit' does not take a value"),
        ("plan --mash fsdp=8", "there is no option --mash (did you mean --mesh?)"),
        ("check --replicatd norm", "there is no option --replicatd (did you mean --replicated?)"),
        ("plan m --zzzzzzzz=3", "there is no option --zzzzzzzz"),
        ("plan m -z", "there is no option -z"),
        ("plan -- m --x", "got unexpected extra argument (--x)"),
        ("plan m --min-size -1", "invalid value for '--min-size': -1 is not in the range x>=0"),
        ("plan m --min-size 1.5", "invalid value for '--min-size': '1.5' is not a valid integer range"),
        ("chek", "there is no command 'chek' (did you mean check?)"),
        ("help chek", "there is no command 'chek' (did you mean check?)"),
        ("zzz", f"there is no command 'zzz'; there are {', '.join(COMMANDS)}"),
        ("--nothing", "there is no option --nothing"),
    ],
)  # fmt: skip
def test_other_words_are_refused(words, message):
    refused = invoke(*words.split())
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == f"error: {message}; see --help\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help(name):
    shown = invoke(name, "--help")
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert invoke("help", name) == shown == invoke(name, "-h")
    text = " ".join(shown.stdout.split())
    for option in COMMANDS[name].options:
        usage = (
            COMMANDS[name].changes.get(option, {}).get("usage", GROUPS[GROUP_OF[option]][option][0])
        )
        assert usage.removesuffix("...").replace(" --", ", --") in text
        assert f" {GROUP_OF[option]}: " in text
    assert f"Example: shardrules {name} {COMMANDS[name].example}".strip() in text


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"prove", "solve", "step", "sweep"}))
def test_the_example_of_each_command_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    params = [["layers/0/wq/kernel", [4096, 4096], "F32"], ["layers/0/norm", [4096], "F32"]]
    Path("model.json").write_text(json.dumps({"params": params}))
    rules = [["kernel", ["fsdp", "tp"]], ["norm", []]]
    Path("rules.toml").write_text(f"rules = {json.dumps(rules)}")
    planned = invoke(
        "plan", "model.json", "-r", "rules.toml", "-m", "fsdp=2", "--lock", "plan.lock"
    )
    assert planned.exit_code == 0
    if name == "init":
        Path("rules.toml").unlink()
    done = invoke(name, *COMMANDS[name].example.partition(" > ")[0].split())
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout_bytes


def test_the_help_names_what_there_is():
    """As a text, since it must not import the modules that have it."""
    shown = " ".join(invoke("plan", "--help").stdout.split())
    assert f"Semantics of the rules: {', '.join(sorted(DIALECTS))}; of logical" in shown
    assert f"of logical rules {', '.join(LOGICAL_DIALECTS)}. Default" in shown
    assert f"Leaves that follow others: {', '.join(TABLES)}." in shown
    of_solve = " ".join(invoke("solve", "--help").stdout.split())
    assert f"without --on: {', '.join(public_hardware())}; or" in of_solve
    assert f"--optimizer-memory {{{','.join(MEMORY_KINDS)}}}" in shown
    assert byte_count(options_of("plan", "x").max_memory) == DEFAULT_MEMORY
    assert f"--fail-on {{{','.join(LEVELS)},never}}" in invoke("check", "-h").stdout


def test_the_help_has_defaults_once():
    shown = " ".join(invoke("suggest", "--help").stdout.split())
    assert "Count the state of this optimizer. [default: adam] --optimizer-dtype" in shown
    assert "moments. Default: float32. --hbm" in shown


def test_the_overview_is_the_help_of_all():
    shown = invoke("--help")
    assert shown.exit_code == 0
    for name, entry in COMMANDS.items():
        assert f"  {name} " in shown.stdout
        line = " ".join(entry.function.__doc__.partition("\n\n")[0].split())
        assert line in " ".join(shown.stdout.split())
    for text in ("Exit codes:", "128 + N", "docs/command-line.md", "--version"):
        assert text in shown.stdout
    assert invoke() == shown._replace(exit_code=2)
    assert invoke("help") == shown


def test_the_version_is_told():
    assert invoke("--version").stdout == f"shardrules {__version__}\n"


def test_the_page_of_commands_is_theirs():
    text = command_page.PAGE.read_text()
    assert text == command_page.written(text), "python -m tests.support.command_page writes it anew"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("shardrules ch", {"plain,check"}),
        ("shardrules check x --fail", {"plain,--fail-on"}),
        ("shardrules check x --fail-on w", {"plain,warning"}),
        ("shardrules check x --format ", {"plain,text", "plain,json", "plain,github"}),
        ("shardrules check x --rules ", {"file,"}),
        ("shardrules check ", {"file,"}),
    ],
)
def test_a_shell_completes(line, words):
    count = line.count(" ")
    environment = {
        **os.environ, "_SHARDRULES_COMPLETE": "bash_complete", "COMP_WORDS": line,
        "COMP_CWORD": str(count),
    }  # fmt: skip
    command = [sys.executable, "-m", "shardrules"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.splitlines()) == words
    source = {**environment, "_SHARDRULES_COMPLETE": "zsh_source"}
    done = subprocess.run(command, env=source, capture_output=True, text=True, check=True)
    assert "#compdef shardrules" in done.stdout
