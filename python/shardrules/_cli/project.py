"""Commands, whose arguments and options may be those of the jobs of a project file.

A job of `shardrules.toml` is click's `default_map` of its commands; a key that none of them has is
an error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, get_type_hints

import click
from click.core import ParameterSource

from shardrules._base.io import FileError, read_bytes
from shardrules._base.text import printable, shown
from shardrules._cli.options import CONTEXT, FILE, OF_ALL, OF_JOBS, Argument, KeyValues, Option
from shardrules._cli.process import code_of, hint, print_text

OWN_FILE: Final = "shardrules.toml"
# As of rule files in TOML: a table's name takes most.
_PER_BYTE: Final = 512
_MISSING: Final = "shardrules.missing"
"""Key of `click.Context.meta`: the words that lack an argument, and the error of click."""
_WRITTEN: Final = {str: "a text", list: 'a list of texts, as ["dp", "pp"]', dict: "a table"}
Jobs = dict[str, dict[str, Any]]
"""{name: {key: value}} of the jobs of a project file; their paths are relative to its folder."""


class Command(click.Command):
    """Command whose result is its exit code; without its arguments it may be for all jobs."""

    has_jobs = False

    @property
    def arguments(self) -> list[str]:
        """Names of its arguments."""
        return [str(each.name) for each in self.params if isinstance(each, Argument)]

    @functools.cached_property
    def keys(self) -> dict[str, Option | Argument]:
        """{key of a job: parameter}."""
        ours = [each for each in self.params if isinstance(each, Option | Argument)]
        return {str(each.name).replace("_", "-"): each for each in ours if each.in_job}

    def is_of(self, job: dict[str, Any]) -> bool:
        """True if the job has the arguments."""
        return job.keys() >= {*self.arguments}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; without its first argument a command may be for jobs."""
        words = [*args]
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if not self.has_jobs or error.param is None or error.param.name != self.arguments[0]:
                raise
            ctx.meta[_MISSING] = (words, error)
            return []
        for option in () if ctx.resilient_parsing else self.params:  # a shell completes a part
            if isinstance(option, Option) and (option.needs or option.excludes):
                option.check_beside(ctx)
        return rest

    def invoke(self, ctx: click.Context) -> int:
        """Run the command, or the jobs."""
        if missing := ctx.meta.pop(_MISSING, None):
            return _run_jobs(self, ctx, *missing)
        ctx.params = {key: ctx.params[key] for key in ctx.params if key not in ("project", "job")}
        return super().invoke(ctx) or 0


def command(example: str, *, has_jobs: bool = False) -> Callable[[Any], Command]:
    """Make a command of a function, whose parameters are `Annotated` with their options.

    Without its arguments a command may run the jobs of a project.
    """

    def make(function: Any) -> Command:
        name, hints = function.__name__, get_type_hints(function, include_extras=True)
        options = [hints[key].__metadata__[0] for key in hints if key != "return"]
        command = Command(
            name, callback=function, params=[*options, *OF_JOBS * has_jobs, *OF_ALL],
            help=function.__doc__, short_help=function.__doc__.partition("\n\n")[0],
            epilog=f"Example: shardrules {name} {example}", context_settings=CONTEXT,
        )  # fmt: skip
        command.has_jobs = has_jobs
        return command

    return make


@functools.cache
def names() -> list[str]:
    """Return the names of all commands, which are those of their files."""
    return sorted([each.stem for each in Path(__file__).with_name("commands").glob("[a-z]*.py")])


def command_named(name: str) -> Command:
    """Import the command of this name."""
    command: Command = getattr(importlib.import_module(f".commands.{name}", __package__), name)
    return command


def _run_jobs(
    command: Command, ctx: click.Context, words: list[str], missing: click.MissingParameter
) -> int:
    """Run a command for each job that has its arguments, and return the worst exit code."""
    project, name = ctx.params.get("project"), ctx.params.get("job")
    path = Path(project or OWN_FILE).absolute()
    if not project:
        if not path.is_file():
            text = f"{missing.format_message()} Or write a project file here, {OWN_FILE}."
            raise click.UsageError(text, ctx)
        _check_owner(path)
    all_jobs = read_jobs(path)
    jobs = {job: all_jobs[job] for job in all_jobs if command.is_of(all_jobs[job])}
    if name is not None:
        jobs = {job: jobs[job] for job in jobs if job == name}
    if not jobs:
        which = "" if name is None else f" {name!r}"
        raise click.UsageError(
            f"{path}: there is no job{which} for {command.name}, which needs "
            f"{' and '.join(command.arguments)}; there are {', '.join(all_jobs)}"
        )
    if len(jobs) > 1:
        _check_of_several(ctx, [*jobs])
    hint(f"project file: {path}")
    codes = []
    with contextlib.chdir(path.parent):
        for job, values in jobs.items():
            if name is None:
                print_text(click.style(printable(f"{job}:"), bold=True))
            codes.append(_run_job(command, ctx, job, values, words))
    return max(codes)


def _check_owner(path: Path) -> None:
    """Refuse the project file of another user; root trusts the owner of the folder, too."""
    if sys.platform == "win32":
        return
    folder = path.parent.stat()
    owners = {0, os.geteuid(), *([folder.st_uid] if os.geteuid() == 0 else [])}
    for what, status in (("it", path.lstat()), ("it", path.stat()), ("its folder", folder)):
        if status.st_uid not in owners:
            raise FileError(
                f"{path}: {what} belongs to the user {status.st_uid}, and its jobs may import "
                f"code; if you trust it, give --project {OWN_FILE}"
            )


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
    keys = command.keys
    try:
        defaults = {
            keys[key].name: _as_option(keys[key], key, values[key]) for key in values if key in keys
        }
        with command.make_context(
            command.name, [*words], parent=ctx.parent, obj=job, default_map=defaults
        ) as of_job:
            return command.invoke(of_job)
    except Exception as error:
        return code_of(error, printable(f"{job}: "))


def _as_option(option: Option | Argument, key: str, value: Any) -> Any:
    """Return a value in TOML as click takes it: a text, or several; a table as KEY=VALUE."""
    is_repeatable = getattr(option, "multiple", False)
    forms = {str, getattr(option.type, "form", str), *([list] if is_repeatable else [])}
    if not isinstance(value, list | dict):
        value = str(value)  # numbers and flags are texts
    texts = [*value] if isinstance(value, list | dict) else [value]
    if type(value) not in forms or not all(isinstance(text, str) and text for text in texts):
        forms_shown = " or ".join(_WRITTEN[form] for form in _WRITTEN if form in forms)
        raise FileError(f"{key} is {shown(value)}; write {forms_shown}, and nothing empty in it")
    if isinstance(value, dict):
        odd = option.type.odd if isinstance(option.type, KeyValues) else lambda _: ""
        texts = [f"{item}={value[item]}" for item in value if not odd(item)]
    return texts if is_repeatable else ",".join(texts)


def read_jobs(path: Path) -> Jobs:
    """Return the jobs of a project file; each has what is of all jobs, too. Nothing is executed.

    Raises:
        FileError: The file is wrong, or no command of a job reads one of its keys.
    """
    from shardrules._plan.files.rules import parse_toml

    content = read_bytes(path, _PER_BYTE)
    of_all = parse_toml(path, content) if content else {}
    jobs = of_all.pop("jobs", None)
    if not isinstance(jobs, dict) or not jobs:
        raise FileError(
            f'{path}: there are no jobs; write [jobs.NAME] with model = "model.json", rules and '
            "mesh"
        )
    whole_jobs: Jobs = {}
    for name, job in jobs.items():
        where = f"{path}: job {name}"
        if not isinstance(job, dict):
            raise FileError(f'{where}: it is {shown(job)}; write a table with model = "model.json"')
        whole_jobs[name] = {**of_all, **job}
        _check_keys(where, job, [whole_jobs[name]])
    _check_keys(f"{path}", of_all, [*whole_jobs.values()])
    return whole_jobs


def _check_keys(where: str, table: dict[str, Any], jobs: list[dict[str, Any]]) -> None:
    """Check that a command of one of these jobs reads each key of a table, and each item of it.

    What a value means is for each command.
    """
    from shardrules._plan.codec import check_keys, naming

    with_jobs = [each for each in map(command_named, names()) if each.has_jobs]
    readers = [command for command in with_jobs if any(map(command.is_of, jobs))]
    if not readers:
        raise FileError(f"{where}: it has neither a model to check nor a function to prove")
    owners = {key: command for command in with_jobs for key in command.keys}
    with naming(where):
        check_keys("", table, owners)
    for key, value in table.items():
        parameters = [command.keys[key] for command in readers if key in command.keys]
        if not parameters:
            needed = " and ".join(owners[key].arguments)
            raise FileError(f"{where}: {key} is of {owners[key].name}, which needs {needed}")
        types = [each.type for each in parameters if isinstance(each.type, KeyValues)]
        for item in value if isinstance(value, dict) and types else ():
            reasons = [type.odd(item) for type in types]
            if all(reasons):
                raise FileError(f"{where}: {key}: {reasons[0]}")
