"""Commands of `shardrules` for click: declared by decorators, one in each file of `commands`."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from shardrules._cli.process import QUIET
from shardrules._cli.types import FILE, KeyValues

CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}
_JOBS: Final = "shardrules.jobs"
"""Key of `click.Context.meta`: the words of a command whose arguments are those of jobs."""
Decorator = Callable[[Any], Any]


class Option(click.Option):
    """Option that needs one of some others, and excludes others; a job may have it, or not."""

    def __init__(
        self, declarations: Sequence[str], *, needs: tuple[str, ...] = (),
        excludes: tuple[str, ...] = (), in_job: bool = True, **attributes: Any,
    ) -> None:  # fmt: skip
        if isinstance(attributes.get("type"), KeyValues):
            attributes |= {"multiple": True, "callback": _one_each}
        super().__init__(declarations, **attributes)
        self.needs, self.excludes, self.in_job = needs, excludes, in_job

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Read the values; a file may have several as a table, or one without a list."""
        if self.multiple and isinstance(value, str | dict):
            value = [value] if isinstance(value, str) else [*value.items()]
        return super().type_cast_value(ctx, value)

    def check_beside(self, ctx: click.Context) -> None:
        """Check that what it needs is there, and nothing that it excludes."""
        if not _is_given(ctx, self):
            return
        others = {each.name: each for each in ctx.command.params}
        if self.needs and not any(ctx.params[name] for name in self.needs):
            needed = " or ".join(others[name].get_error_hint(ctx) for name in self.needs)
            raise click.UsageError(f"{self.get_error_hint(ctx)} needs {needed}.", ctx)
        source = ctx.get_parameter_source(str(self.name))
        for excluded in (others[name] for name in self.excludes if name in others):
            # A job's own are no contradiction to those of the command line.
            if _is_given(ctx, excluded) and ctx.get_parameter_source(str(excluded.name)) is source:
                pair = f"{self.get_error_hint(ctx)} and {excluded.get_error_hint(ctx)}"
                raise click.UsageError(f"{pair} exclude each other: leave out either.", ctx)


def _is_given(ctx: click.Context, parameter: click.Parameter) -> bool:
    name = str(parameter.name)
    source = ctx.get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT) and bool(ctx.params.get(name))


def _one_each(ctx: click.Context, option: click.Parameter, pairs: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if values.setdefault(key, value) != value:
            message = f"{key!r} has two values, {values[key]!r} and {value!r}"
            raise click.BadParameter(message, ctx, option)
    return values


class Argument(click.Argument):
    """Argument with a line of help; a job has it under its name."""

    in_job = True

    def __init__(self, declarations: Sequence[str], *, about: str, **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.help = about  # which arguments of click have since 8.5

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return str(self.metavar), self.help or ""


option = functools.partial(click.option, cls=Option)
"""Decorator with an option of a command, as `Option` takes it."""


def argument(*declarations: str, **attributes: Any) -> Decorator:
    """Make a decorator with an argument of a command; click 8.1.0's works once."""

    def decorate(function: Any) -> Any:
        return click.argument(*declarations, cls=Argument, **attributes)(function)

    return decorate


class Command(click.Command):
    """Command whose arguments and options may be those of the jobs of a project file."""

    has_jobs = False

    @property
    def arguments(self) -> list[Argument]:
        """Its arguments."""
        return [each for each in self.params if isinstance(each, Argument)]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words; without its arguments a command may be for the jobs of a project."""
        words = [*args]
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if not self.has_jobs or error.param is not self.arguments[0]:
                raise
            ctx.meta[_JOBS] = (words, error)
            return []
        for option in () if ctx.resilient_parsing else self.params:  # a shell completes a part
            if isinstance(option, Option) and (option.needs or option.excludes):
                option.check_beside(ctx)
        return rest

    def invoke(self, ctx: click.Context) -> int:
        """Run the command, or the jobs; the result is the exit code."""
        if asked := ctx.meta.pop(_JOBS, None):
            return int(ctx.obj(self, ctx, *asked))
        ctx.params = {key: ctx.params[key] for key in ctx.params if key not in ("project", "job")}
        return super().invoke(ctx) or 0


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value
    ctx.color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


_in_place_of_arguments = functools.partial(
    option, in_job=False, excludes=("model", "function", "before")
)
_OF_JOBS: Final = [
    _in_place_of_arguments("--project", type=FILE, help="Run the jobs of this project file, "
        "whoever owns it, and import what they name as package.module:function. Default: "
        "shardrules.toml in the current folder."),
    _in_place_of_arguments("--job", metavar="NAME", help="Run this job alone, with any options."),
]  # fmt: skip
_OF_ALL: Final = [
    option("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_set_quiet,
        in_job=False, help="Write the result and errors alone: no notes, hints or progress."),
]  # fmt: skip


def command(example: str, *, has_jobs: bool = False) -> Callable[[Any], click.Command]:
    """Make a command of a function; without its arguments it may run the jobs of a project."""

    def make(function: Any) -> click.Command:
        about, name = inspect.cleandoc(function.__doc__), function.__name__
        options, function.__click_params__ = function.__click_params__, []
        for decorate in reversed(_OF_JOBS * has_jobs + _OF_ALL):
            decorate(function)
        function.__click_params__ += options  # click reverses them
        command = click.command(
            name, cls=Command, context_settings=CONTEXT, help=about,
            short_help=about.partition("\n\n")[0], epilog=f"Example: shardrules {name} {example}",
        )(function)  # fmt: skip
        command.has_jobs = has_jobs
        return command

    return make


def bundle(record: Any, parameter: str, *options: Decorator) -> Decorator:
    """Make a decorator with options, whose values a function gets as a record of this type."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(**values: Any) -> Any:
            fields = {name: values.pop(name) for name in record._fields}
            return function(**values, **{parameter: record(**fields)})

        for each in reversed(options):
            each(run)
        return run

    return decorate


@functools.cache
def names() -> list[str]:
    """Return the names of all commands, which are those of their files."""
    return sorted(file.stem for file in Path(__file__).with_name("commands").glob("[a-z]*.py"))


def commands() -> Iterator[Command]:
    """Import and yield all commands."""
    return map(command_named, names())


def command_named(name: str) -> Command:
    """Import the command of this name."""
    command: Command = getattr(importlib.import_module(f".commands.{name}", __package__), name)
    return command
