"""Project file: `shardrules.toml`, or `[tool.shardrules]` of pyproject.toml, and its jobs.

A job is click's `default_map` of the commands whose arguments it has.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from shardrules._base.io import FileError, read_bytes
from shardrules._base.text import printable, printable_json, shown
from shardrules._cli.command import Command, commands, said, usage_message
from shardrules._cli.process import FAILED, code_of, hint, is_quiet, print_note
from shardrules._cli.types import KeyValues, did_you_mean
from shardrules._plan.codec import check_keys, naming
from shardrules._plan.files.parsers import parse_toml

OWN_FILE: Final = "shardrules.toml"
_PYPROJECT: Final = "pyproject.toml"
# As of rule files in TOML: a table's name takes most.
_PER_BYTE: Final = 512
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
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
    found = find_project(ctx.params.get("project"))
    if found is None:
        text = f"{usage_message(missing)}; or a project file, which shardrules init writes"
        raise click.UsageError(text, ctx)
    path, jobs = found
    name = ctx.params.get("job")
    jobs = _jobs_of(command, path, jobs, name)
    _check_given(ctx, jobs)
    hint(f"project file: {path}")
    with contextlib.chdir(path.parent):
        runs = {job: functools.partial(_run_job, command, ctx, job, jobs[job], words)
                for job in jobs}  # fmt: skip
        if name is not None or ctx.params.get("fix"):  # one job, as if it were given by options
            return runs.popitem()[1]()
        if ctx.params.get("format") == "json":
            return _print_json(runs)
        return max(_print_job(job, runs[job]) for job in runs)


def _print_job(job: str, run: Callable[[], int]) -> int:
    """Print the job's name above what it prints; with --quiet only if it prints something."""
    if not is_quiet():
        click.echo(click.style(printable(f"{job}:"), bold=True), file=sys.stdout)
        return run()
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = run()
    if output.getvalue():
        print(printable(f"{job}:"), output.getvalue(), sep="\n", end="")
    return code


def _print_json(runs: Mapping[str, Callable[[], int]]) -> int:
    """Print {job: its JSON, the text of a step that does not fit, or null for errors}."""
    answers: dict[str, Any] = {}
    codes = []
    for job, run in runs.items():
        with contextlib.redirect_stdout(io.StringIO()) as output:
            codes.append(run())
        answers[job] = output.getvalue() or None
        with contextlib.suppress(ValueError):
            answers[job] = json.loads(output.getvalue())
    print(printable_json({"jobs": answers}))
    return max(codes)


def _jobs_of(command: Command, path: Path, jobs: Jobs, name: str | None) -> Jobs:
    """Return the jobs that have the arguments of a command; with a name, that one."""
    if name is not None:
        if name not in jobs:
            raise click.UsageError(f"--job: there is no job {name!r}{did_you_mean(name, jobs)}")
        jobs = {name: jobs[name]}
    if own := {job: jobs[job] for job in jobs if _is_of(command, jobs[job])}:
        return own
    which = "no job is" if name is None else f"job {name} is not"
    raise click.UsageError(f"{path}: {which} for {command.name}, which needs {_needed(command)}")


def _is_of(command: Command, values: Mapping[str, Any]) -> bool:
    return all(argument.name in values for argument in command.arguments)


def _needed(command: Command) -> str:
    return " and ".join(str(argument.name) for argument in command.arguments)


def _check_given(ctx: click.Context, jobs: Jobs) -> None:
    """Check that no option is given of which each job has its own, or that no job has a use for."""
    for option in ctx.command.params:
        name, first = str(option.name), next(iter(jobs))
        if ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        if len(jobs) > 1 and getattr(option, "of_one_job", False):
            raise click.UsageError(
                f"{said(ctx, name)} is of one job, and there are {', '.join(jobs)}: write "
                f"shardrules {ctx.command.name} --job {first}"
            )
        needs = () if getattr(option, "in_job", True) else getattr(option, "needs", ())
        if needs and not any(
            job.get(need) or ctx.params.get(need) for need in needs for job in jobs.values()
        ):
            raise click.UsageError(
                f"{said(ctx, name)}: no job has {' or '.join(needs)}; write it into job {first}"
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
    except click.UsageError as error:
        print_note(f"error: {printable(f'{job}: {usage_message(error)}')}")
        return FAILED
    except BrokenPipeError:
        raise
    except Exception as error:
        return code_of(error, printable(f"{job}: "))


def _own_items(parameter: Any, value: Any) -> Any:
    """Return the value of a key, or of a table the items that are for this parameter."""
    if isinstance(value, dict) and isinstance(parameter.type, KeyValues):
        return {key: item for key, item in value.items() if not parameter.type.odd(key)}
    return value


def find_project(named: str | None) -> tuple[Path, Jobs] | None:
    """Read the named project file, or that of the current folder or the nearest above it.

    Nothing is executed.

    Raises:
        FileError: The file is wrong, or was found, and may be another user's work.
    """
    here, file = Path.cwd(), named and Path(named).absolute()
    found = (file, _table_of(file)) if file else find_table(here)
    if found is None:
        return None
    path, table = found
    if table is None:
        raise FileError(f"{path}: it is no file, or has no [tool.shardrules]")
    if named is None and (why := stranger(path, here)):
        raise FileError(
            f"{path}: {why}, and its jobs may import code; if you trust it, give --project {path}"
        )
    return path, read_jobs(path, table)


def find_table(folder: Path) -> tuple[Path, Any] | None:
    """Find (the project file of a folder or the nearest above it, its table).

    The search goes no higher than the root of the repository, the home folder or a mount point.
    """
    home = Path(os.path.realpath(os.path.expanduser("~")))
    for place in (folder, *folder.parents):
        tables = {path: table for path in (place / OWN_FILE, place / _PYPROJECT)
                  if (table := _table_of(path)) is not None}  # fmt: skip
        if len(tables) > 1:
            raise FileError(
                f"{place / OWN_FILE}: {_PYPROJECT} beside it has [tool.shardrules] too; keep one"
            )
        if tables:
            return tables.popitem()
        if os.path.lexists(place / ".git") or place == home or os.path.ismount(place):
            return None
    return None


def stranger(path: Path, folder: Path) -> str | None:
    """Return why a project file found from this folder may be another user's; None if it cannot be.

    The file's folder counts too, as modules are imported from there. Root trusts the owner of the
    folder as well. All may write the current folder, as a disk of Windows has it. Nobody is asked
    on Windows itself.
    """
    if sys.platform == "win32":
        return None
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0:
        trusted.add(folder.stat().st_uid)
    for what, status in (
        ("it", path.lstat()),
        ("it", path.stat()),
        ("its folder", path.parent.stat()),
    ):
        if status.st_uid not in trusted:
            return f"{what} belongs to the user {status.st_uid}"
        is_writable = status.st_mode & stat.S_IWOTH and not stat.S_ISLNK(status.st_mode)
        if is_writable and path.parent != folder:
            return f"all users may write {what}"
    return None


def project_text(job: Mapping[str, Any]) -> str:
    """Write a project file with one job, whose name is that of its function or model."""
    _, _, name = job.get("function", job["model"]).rpartition(":")
    name = Path(name).name.partition(".")[0]
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in job.items()]
    key = name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)
    return "\n".join([f"[jobs.{key}]", *lines, ""])


def _table_of(path: Path) -> Any:
    """Return the table of a project file; None if the file has none, or is not there."""
    if not path.is_file():
        return None
    table = parse_toml(path, read_bytes(path, _PER_BYTE))
    if path.name != _PYPROJECT:
        return table
    tools = table.get("tool", {})
    return tools.get("shardrules") if isinstance(tools, dict) else None


def read_jobs(path: Path, table: Any) -> Jobs:
    """Return the jobs of a project file's table; each has what is of all jobs, too."""
    jobs = table.get("jobs") if isinstance(table, dict) else None
    with naming(path):
        check_keys("", table if isinstance(table, dict) else {}, ["jobs", *parameters()])
    if not isinstance(jobs, dict) or not jobs:
        start = "tool.shardrules.jobs" if path.name == _PYPROJECT else "jobs"
        raise FileError(
            f'{path}: there are no jobs; write [{start}.NAME] with model = "model.json", rules and '
            "mesh"
        )
    of_all = {key: table[key] for key in table if key != "jobs"}
    whole: Jobs = {}
    for name, job in jobs.items():
        where = f"{path}: job {name}"
        if not isinstance(job, dict):
            raise FileError(f'{where}: it is {shown(job)}; write a table with model = "model.json"')
        whole[name] = {**of_all, **job}
        if not any(_is_of(command, whole[name]) for command in job_commands()):
            raise FileError(f"{where}: it has neither a model to check nor a function to prove")
        _check(where, job, [whole[name]])
    _check(f"{path}", of_all, [*whole.values()])
    return whole


def job_commands() -> Iterator[Command]:
    """Yield the commands that jobs are for."""
    return (command for command in commands() if command.has_jobs)


def _by_key(command: Command) -> dict[str, Any]:
    """Return {key of a job: a parameter of the command}."""
    own = [each for each in command.params if getattr(each, "in_job", False)]
    return {str(parameter.name).replace("_", "-"): parameter for parameter in own}


def parameters() -> dict[str, Any]:
    """Return {key of a job: a parameter of a command; those of a key have the same type}."""
    return {key: each for command in job_commands() for key, each in _by_key(command).items()}


def types_of(parameter: Any) -> tuple[type, ...]:
    """Return the types of TOML that a key may have."""
    if getattr(parameter, "is_flag", False):
        return (bool,)
    types: tuple[type, ...] = getattr(parameter.type, "toml", (str,))
    return (*types, list) if getattr(parameter, "multiple", False) else types


def _check(where: str, table: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    """Check that some command of these jobs reads each key and item, and the types of values.

    What a value means is for each command.
    """
    own = [command for command in job_commands() if any(_is_of(command, job) for job in jobs)]
    known = parameters()
    with naming(where):
        check_keys("", table, known)
    for key, value in table.items():
        types = types_of(known[key])
        if type(value) not in types or value == "":
            written = " or ".join(_WRITTEN[kind] for kind in dict.fromkeys(reversed(types)))
            raise FileError(f"{where}: {key} is {shown(value)}; write {written}")
        for item in value if isinstance(value, list) else ():
            if not isinstance(item, str):
                raise FileError(f"{where}: {key} has {shown(item)}; write a list of texts")
        readers = [_by_key(command)[key] for command in own if key in _by_key(command)]
        if not readers:
            reader = next(command for command in job_commands() if key in _by_key(command))
            raise FileError(f"{where}: {key} is of {reader.name}, which needs {_needed(reader)}")
        for item in value if isinstance(value, dict) else ():
            reasons = [one.type.odd(item) for one in readers if isinstance(one.type, KeyValues)]
            if reasons and all(reasons):
                raise FileError(f"{where}: {key}: {reasons[0]}")
