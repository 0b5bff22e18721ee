"""Words of a command line into the arguments of a command's function."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Annotated

import pytest

from shardrules import __version__
from shardrules._cli.app import COMMANDS
from shardrules._cli.arguments import Argument, Option, UsageError, parser_of
from shardrules._hardware import public_hardware
from tests.support.command_line import invoke


def command(
    source: Annotated[str, Argument(help="A model.")],
    mesh: Annotated[str, Option("--mesh", "-m", help="A mesh.")],
    least: Annotated[int, Option(min=1, help="An integer.")] = 20,
    lock: Annotated[Path | None, Option(help="A file, 100% of it.")] = None,
    stacked: Annotated[list[str] | None, Option(help="Several. Default: none.")] = None,
    dry_run: Annotated[bool, Option(help="A flag.")] = False,
) -> None:
    """Do nothing."""


DEFAULTS = {"least": 20, "lock": None, "stacked": None, "dry_run": False}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("model -m tp=2", {}),
        ("-m tp=2 model", {}),
        ("--mesh=tp=2 model --least 3", {"least": 3}),
        ("model -m tp=2 --lock -x", {"lock": Path("-x")}),
        ("model -mtp=2 --stacked a --dry-run --stacked=-b", {"stacked": ["a", "-b"], "dry_run": True}),
    ],
)  # fmt: skip
def test_words_are_arguments(words, found):
    given = {"source": "model", "mesh": "tp=2"}
    assert parser_of("x", command).parse(words.split()) == given | DEFAULTS | found


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model", "required: --mesh/-m"),
        ("-m tp=2", "required: SOURCE"),
        ("model -m", "--mesh/-m: expected one argument"),
        ("model -m tp=2 --lea 3", "there is no option --lea (did you mean --least?)"),
        ("--mash fsdp=8", "there is no option --mash (did you mean --mesh?)"),
        ("model -m tp=2 --dry-rnu", "there is no option --dry-rnu (did you mean --dry-run?)"),
        ("model -m tp=2 --zzzzzzzz=3", "there is no option --zzzzzzzz"),
        ("-m tp=2 -- --mesh-file --x", "unrecognized arguments: --x"),
        ("model -m tp=2 --least 0", "--least: 0 is below 1"),
        ("model -m tp=2 --least 1.5", "--least: '1.5' is not a whole number"),
        ("model another -m tp=2", "unrecognized arguments: another"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        parser_of("x", command).parse(words.split())


def test_help_has_defaults_once(capsys):
    assert parser_of("x", command).parse(["--help"]) is None
    told = " ".join(capsys.readouterr().out.split())
    assert "usage: shardrules x [-h] --mesh TEXT [--least INTEGER] [--lock PATH]" in told
    assert "An integer. Default: 20." in told
    assert "A file, 100% of it. --stacked TEXT Several. Default: none. --dry-run" in told


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_help(name):
    function = import_module(f"shardrules._cli.commands.{name}").command
    told = invoke(name, "--help")
    assert (told.exit_code, told.stderr) == (0, "")
    for parameter in inspect.signature(function).parameters.values():
        option = "--" + parameter.name.strip("_").replace("_", "-")
        assert option in told.stdout or parameter.name.upper() in told.stdout


def test_the_help_names_all_devices():
    """As a text, since their figures are in a file that few commands need."""
    told = " ".join(invoke("plan", "--help").stdout.split())
    assert f"The devices: {', '.join(public_hardware())}; or" in told


def test_the_overview_is_the_help_of_all():
    told = invoke("--help")
    assert told.exit_code == 0
    for name, line in COMMANDS.items():
        assert f"    {name} " in told.stdout
        assert line in " ".join(told.stdout.split())
    assert invoke() == told._replace(exit_code=2)
    assert "there is no option --nothing; see --help" in invoke("--nothing").stderr
    assert "required: COMMAND; see --help" in invoke("-x").stderr


def test_the_version_is_told():
    assert invoke("--version").stdout == f"shardrules {__version__}\n"
    assert "--version" in invoke("--help").stdout


def test_the_help_of_suggest_has_one_default_for_the_optimizer():
    told = " ".join(invoke("suggest", "--help").stdout.split())
    assert "lion, adam, adamw. Default: adam. --optimizer-dtype" in told
