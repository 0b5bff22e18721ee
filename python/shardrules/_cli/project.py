"""Commands without arguments: they run for each job of the project file."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from shardrules._base.text import printable, printable_json
from shardrules._cli.commands import COMMANDS
from shardrules._cli.options import GROUP_OF, GROUPS
from shardrules._cli.process import FAILED, code_of, print_note
from shardrules._plan.files.project import ProjectFile, ProjectJob, form_of, read_project

ARGUMENTS_OF: Final = {"check": ("model",), "prove": ("function",), "diff": ("before", "model")}
"""The commands that run jobs, with the keys of their arguments."""
_EXAMPLES: Final = {
    "model": "model.json",
    "function": "package.module:function",
    "before": "plan.lock",
}
# What belongs to one run, not to a job.
_OF_A_RUN: Final = (
    "project", "format", "fix", "update_lock", "fail_on_change", "tolerance", "quiet", "color",
)  # fmt: skip


def forms() -> dict[str, str]:
    """Return {key of a job: the form of its value}: the options of the commands."""
    names = dict.fromkeys(name for command in ARGUMENTS_OF for name in COMMANDS[command].options)
    usages = {name: GROUPS[GROUP_OF[name]][name][0] for name in names if name not in _OF_A_RUN}
    return {
        name.replace("_", "-"): form_of(usage.split()[-1])
        for name, usage in usages.items()
        if usage.startswith("-")
    }


def find_project(named: str | None) -> ProjectFile | None:
    """Read the named project file, or that of the current folder or of one above it."""
    return read_project(Path.cwd(), forms(), None if named is None else Path(named).absolute())


def run_jobs(
    command: click.Command,
    ctx: click.Context,
    project: ProjectFile,
    words: list[str],
    usage_message: Callable[[click.UsageError], str],
) -> int:
    """Run a command for each job that has its arguments, and return the worst exit code."""
    _check_options(command, ctx)
    name = str(command.name)
    jobs = [job for job in project.jobs if job.arguments.keys() >= {*ARGUMENTS_OF[name]}]
    if not jobs:
        keys = " and ".join(f"{key} = {_EXAMPLES[key]!r}" for key in ARGUMENTS_OF[name])
        raise click.UsageError(f"{project.path}: no job is for {name}; write into one {keys}")
    if not ctx.params.get("quiet"):
        print_note(printable(f"project file: {project.path}"))
    is_json = ctx.params.get("format") == "json"
    answers: dict[str, Any] = {}
    codes: list[int] = []
    with contextlib.chdir(project.path.parent):
        for job in jobs:
            is_kept = is_json or ctx.params.get("quiet")
            if not is_kept:
                click.echo(click.style(printable(f"{job.name}:"), bold=True), file=sys.stdout)
            output = io.StringIO()
            with contextlib.redirect_stdout(output) if is_kept else contextlib.nullcontext():
                try:
                    codes.append(_run_job(command, ctx, job, words))
                except click.UsageError as error:
                    print_note(f"error: {printable(f'{job.name}: {usage_message(error)}')}")
                    codes.append(FAILED)
            if is_json:
                answers[job.name] = _json_of(output.getvalue())
            elif output.getvalue():
                print(printable(f"{job.name}:"), output.getvalue(), sep="\n", end="")
    if is_json:
        print(printable_json({"jobs": answers}))
    return max(codes)


def _json_of(text: str) -> Any:
    """Return what a job printed: JSON, or the text of a step that does not fit; None of errors."""
    try:
        return json.loads(text)
    except ValueError:
        return text or None


def _check_options(command: click.Command, ctx: click.Context) -> None:
    """Check that no option names a file, of which each job has its own."""
    for option in command.params:
        is_given = ctx.params.get(str(option.name)) not in (None, False, ())
        if (
            is_given
            and option.name != "project"
            and (isinstance(option.type, click.Path) or option.name == "fix")
        ):
            raise click.UsageError(
                f"{option.opts[-1]} is of one job: give the arguments of {command.name} too, or "
                "write it into the project file", ctx
            )  # fmt: skip


def _run_job(command: click.Command, ctx: click.Context, job: ProjectJob, words: list[str]) -> int:
    name = str(command.name)
    options = [option.replace("_", "-") for option in COMMANDS[name].options]
    arguments = [job.arguments[key] for key in ARGUMENTS_OF[name]]
    if "lock" not in job.options:
        words = [word for word in words if word != "--update-lock"]
    line = [*job.words(options), *words, "--", *arguments]
    try:
        with command.make_context(name, line, parent=ctx.parent, obj=job.name) as job_ctx:
            return int(command.invoke(job_ctx))
    except (click.UsageError, BrokenPipeError):
        raise
    except Exception as error:
        return code_of(error, printable(f"{job.name}: "))
