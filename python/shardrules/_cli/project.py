"""Project file, `shardrules.toml`: a job is click's `default_map` of its commands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from shardrules._base.io import FileError, read_bytes
from shardrules._base.text import printable, shown
from shardrules._cli.options import Command, commands
from shardrules._cli.process import code_of, hint
from shardrules._cli.types import FILE, KeyValues
from shardrules._plan.codec import check_keys, naming
from shardrules._plan.files.rules import parse_toml

OWN_FILE: Final = "shardrules.toml"
# As of rule files in TOML: a table's name takes most.
_PER_BYTE: Final = 512
_WRITTEN: Final = {
    bool: "true or false",
    int: "a number",
    list: 'a list, as ["dp", "pp"]',
    dict: "a table, as { fsdp = 8, tp = 4 }",
    str: "a text",
}
Jobs = dict[str, dict[str, Any]]
"""{name: {key: value}} of the jobs of a project file; their paths are relative to its folder."""


def run_jobs(
    command: Command, ctx: click.Context, words: list[str], missing: click.MissingParameter
) -> int:
    """Run a command for each job that has its arguments, and return the worst exit code."""
    named, job = ctx.params.get("project"), ctx.params.get("job")
    path = Path(named or OWN_FILE).absolute()
    if not named:
        if not path.is_file():
            text = f"{missing.format_message()} Or write a project file here, {OWN_FILE}."
            raise click.UsageError(text, ctx)
        _check_owner(path)
    jobs = _jobs_of_command(command, path, read_jobs(path), job)
    if len(jobs) > 1:
        _check_of_several(ctx, [*jobs])
    hint(f"project file: {path}")
    codes = []
    with contextlib.chdir(path.parent):
        for name, values in jobs.items():
            if job is None:
                click.echo(click.style(printable(f"{name}:"), bold=True), file=sys.stdout)
            codes.append(_run_job(command, ctx, name, values, words))
    return max(codes)


def _check_owner(path: Path) -> None:
    """Refuse the project file of another user; root trusts the owner of the folder, too."""
    if sys.platform == "win32":
        return
    folder = path.parent.stat()
    trusted = {0, os.geteuid(), *([folder.st_uid] if os.geteuid() == 0 else [])}
    for owned, status in (("it", path.lstat()), ("it", path.stat()), ("its folder", folder)):
        if status.st_uid not in trusted:
            raise FileError(
                f"{path}: {owned} belongs to the user {status.st_uid}, and its jobs may import "
                f"code; if you trust it, give --project {OWN_FILE}"
            )


def _jobs_of_command(command: Command, path: Path, jobs: Jobs, name: str | None) -> Jobs:
    """Return the jobs that have the arguments of a command; with a name, that one."""
    if name is not None:
        if name not in jobs:
            raise click.UsageError(f"--job: there is no job {name!r}; there are {', '.join(jobs)}")
        jobs = {name: jobs[name]}
    if jobs_of_command := {job: jobs[job] for job in jobs if _is_of(command, jobs[job])}:
        return jobs_of_command
    which = "no job is" if name is None else f"job {name} is not"
    raise click.UsageError(f"{path}: {which} for {command.name}, which needs {_needed(command)}")


def _is_of(command: Command, values: Mapping[str, Any]) -> bool:
    return all(argument.name in values for argument in command.arguments)


def _needed(command: Command) -> str:
    return " and ".join(str(argument.name) for argument in command.arguments)


def _check_of_several(ctx: click.Context, jobs: list[str]) -> None:
    """Check that no option is given that names a file of one job, and no JSON is asked for."""
    for option in ctx.command.params:
        is_given = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        is_own = getattr(option, "in_job", False) and option.type is FILE
        if is_given and (is_own or ctx.params.get(str(option.name)) == "json"):
            raise click.UsageError(
                f"{option.get_error_hint(ctx)} is of one job, and there are {', '.join(jobs)}: "
                f"write shardrules {ctx.command.name} --job {jobs[0]}"
            )


def _run_job(
    command: Command, ctx: click.Context, job: str, values: dict[str, Any], words: list[str]
) -> int:
    defaults = {
        parameter.name: _own_items(parameter, values[key])
        for key, parameter in _by_key(command).items()
        if key in values
    }
    try:
        with command.make_context(
            command.name, [*words], parent=ctx.parent, obj=job, default_map=defaults
        ) as of_job:
            return int(command.invoke(of_job))
    except Exception as error:
        return code_of(error, printable(f"{job}: "))


def _own_items(parameter: Any, value: Any) -> Any:
    """Return the value of a key, or of a table the items that are for this parameter."""
    if isinstance(value, dict) and isinstance(parameter.type, KeyValues):
        return {key: item for key, item in value.items() if not parameter.type.odd(key)}
    return value


def read_jobs(path: Path) -> Jobs:
    """Return the jobs of a project file; each has what is of all jobs, too. Nothing is executed.

    Raises:
        FileError: The file is wrong, or no command of a job reads one of its keys.
    """
    content = read_bytes(path, _PER_BYTE)
    of_all = parse_toml(path, content) if content else {}
    jobs = of_all.pop("jobs", None)
    if not isinstance(jobs, dict) or not jobs:
        raise FileError(
            f'{path}: there are no jobs; write [jobs.NAME] with model = "model.json", rules and '
            "mesh"
        )
    merged: Jobs = {}
    for name, job in jobs.items():
        where = f"{path}: job {name}"
        if not isinstance(job, dict):
            raise FileError(f'{where}: it is {shown(job)}; write a table with model = "model.json"')
        merged[name] = {**of_all, **job}
        _check_table(where, job, _commands_of([merged[name]]))
    _check_table(f"{path}", of_all, _commands_of([*merged.values()]))
    return merged


def _commands_of(jobs: list[dict[str, Any]]) -> list[Command]:
    """List the commands that some of these jobs are for."""
    return [each for each in _job_commands() if any(_is_of(each, job) for job in jobs)]


def _job_commands() -> Iterator[Command]:
    """Yield the commands that jobs are for."""
    return (command for command in commands() if command.has_jobs)


def _by_key(command: Command) -> dict[str, Any]:
    """Return {key of a job: a parameter of the command}."""
    return {
        str(parameter.name).replace("_", "-"): parameter
        for parameter in command.params
        if getattr(parameter, "in_job", False)
    }


def _types_of(parameter: Any) -> tuple[type, ...]:
    """Return the types of TOML that a key may have."""
    if getattr(parameter, "is_flag", False):
        return (bool,)
    types: tuple[type, ...] = getattr(parameter.type, "toml", (str,))
    return (*types, list) if getattr(parameter, "multiple", False) else types


def _check_table(where: str, table: dict[str, Any], job_commands: list[Command]) -> None:
    """Check that one of these commands reads each key and item, and the types of values.

    What a value means is for each command.
    """
    if not job_commands:
        raise FileError(f"{where}: it has neither a model to check nor a function to prove")
    owners = {key: command for command in _job_commands() for key in _by_key(command)}
    with naming(where):
        check_keys("", table, owners)
    for key, value in table.items():
        types = _types_of(_by_key(owners[key])[key])
        items = value if isinstance(value, list) else ()
        if type(value) not in types or value == "" or any(type(item) is not str for item in items):
            written = " or ".join(_WRITTEN[kind] for kind in dict.fromkeys(reversed(types)))
            raise FileError(f"{where}: {key} is {shown(value)}; write {written}")
        readers = [_by_key(command)[key] for command in job_commands if key in _by_key(command)]
        if not readers:
            owner = owners[key]
            raise FileError(f"{where}: {key} is of {owner.name}, which needs {_needed(owner)}")
        for item in value if isinstance(value, dict) else ():
            reasons = [each.type.odd(item) for each in readers if isinstance(each.type, KeyValues)]
            if reasons and all(reasons):
                raise FileError(f"{where}: {key}: {reasons[0]}")
