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

from shardrules._base.text import nearest
from shardrules._cli.process import QUIET
from shardrules._cli.types import FILE, KeyValues

CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}
_JOBS: Final = "shardrules.jobs"
"""Key of `click.Context.meta`: the words of a command whose arguments are those of jobs."""


class Option(click.Option):
    """Option that needs one of some others, and excludes others; a job may have it, or not."""

    def __init__(
        self, declarations: Sequence[str], *, needs: tuple[str, ...] = (),
        excludes: tuple[str, ...] = (), in_job: bool = True, of_one_job: bool = False,
        **attributes: Any,
    ) -> None:  # fmt: skip
        if isinstance(attributes.get("type"), KeyValues):
            attributes |= {"multiple": True, "callback": _one_each}
        super().__init__(declarations, **attributes)
        self.needs, self.excludes, self.in_job = needs, excludes, in_job
        self.of_one_job = of_one_job or (in_job and self.type is FILE)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Read the values; a file may have several as a table, or one without a list."""
        if self.multiple and isinstance(value, str | dict):
            value = [value] if isinstance(value, str) else [*value.items()]
        return super().type_cast_value(ctx, value)


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


Decorator = Callable[[Any], Any]
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
                _check_beside(ctx, option)
        return rest

    def invoke(self, ctx: click.Context) -> int:
        """Run the command, or the jobs; the result is the exit code."""
        if asked := ctx.meta.pop(_JOBS, None):
            return int(ctx.obj(self, ctx, *asked))
        ctx.params = {key: ctx.params[key] for key in ctx.params if key not in ("project", "job")}
        return super().invoke(ctx) or 0


def _check_beside(ctx: click.Context, option: Option) -> None:
    """Check that what an option needs is there, and nothing that it excludes."""
    name = str(option.name)
    # What a run has for all jobs need not be of use to each.
    if not _is_given(ctx, name) or (isinstance(ctx.obj, str) and not option.in_job):
        return
    if option.needs and not any(ctx.params[other] for other in option.needs):
        others = " or ".join(said(ctx, other) for other in option.needs)
        raise click.UsageError(f"{said(ctx, name)} needs {others}", ctx)
    for other in filter(functools.partial(_is_given, ctx), option.excludes):
        why = f"{said(ctx, name)} and {said(ctx, other)} exclude each other: leave out either"
        raise click.UsageError(why, ctx)


def _is_given(ctx: click.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT) and bool(ctx.params.get(name))


def said(ctx: click.Context | None, name: str) -> str:
    """Return a parameter as who gave it knows it: an option, an argument, or a key of a file."""
    if ctx is None:
        return name
    if ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
        return name.replace("_", "-")
    parameter = next(each for each in ctx.command.params if each.name == name)
    is_argument = isinstance(parameter, Argument)
    return str(parameter.metavar) if is_argument else max(parameter.opts, key=len)


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value


def _set_color(ctx: click.Context, _: click.Parameter, choice: str) -> None:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    ctx.color = choice == "always" if choice != "auto" else False if is_plain else None


_of_run = functools.partial(option, in_job=False)
_in_place_of_arguments = functools.partial(_of_run, excludes=("model", "function", "before"))
_OF_JOBS: Final = [
    _in_place_of_arguments("--project", type=FILE, help="Run the jobs of this project file, "
        "whoever owns it, and import what they name as package.module:function. Default: the file "
        "in the current folder, or the nearest above it."),
    _in_place_of_arguments("--job", metavar="NAME", help="Run this job alone, with any options."),
]  # fmt: skip
_OF_ALL: Final = [
    _of_run("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_set_quiet,
        help="Write the result and errors alone: no notes, hints or progress."),
    _of_run("--color", type=click.Choice(["auto", "always", "never"]), default="auto",
        is_eager=True, expose_value=False, callback=_set_color,
        help="Colours: by default on a terminal, unless NO_COLOR is set."),
]  # fmt: skip


def command(example: str, *, has_jobs: bool = False) -> Callable[[Any], click.Command]:
    """Make a command of a function; without its arguments it may run the jobs of a project."""

    def make(function: Any) -> click.Command:
        about, name = inspect.cleandoc(function.__doc__), function.__name__
        own, function.__click_params__ = function.__click_params__, []
        for decorate in reversed(_OF_JOBS * has_jobs + _OF_ALL):
            decorate(function)
        function.__click_params__ += own  # click reverses them
        made = click.command(
            name, cls=Command, context_settings=CONTEXT, help=about,
            short_help=about.partition("\n\n")[0], epilog=f"Example: shardrules {name} {example}",
        )(function)  # fmt: skip
        made.has_jobs = has_jobs
        return made

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


def names() -> list[str]:
    """Return the names of all commands, which are those of their files."""
    return sorted(file.stem for file in Path(__file__).with_name("commands").glob("[a-z]*.py"))


def commands() -> Iterator[Command]:
    """Import and yield all commands."""
    return map(command_named, names())


def command_named(name: str) -> Command:
    """Import the command of this name."""
    made: Command = getattr(importlib.import_module(f".commands.{name}", __package__), name)
    return made


def usage_message(error: click.UsageError) -> str:
    """Return the message of wrong words, as one line, with options in the place of parameters."""
    parameters: list[Any] = error.ctx.command.params if error.ctx else []
    if isinstance(error, click.NoSuchOption):
        flags = [flag for each in parameters if isinstance(each, Option) for flag in each.opts]
        near = nearest(error.option_name, flags)
        hint = f" (did you mean {near}?)" if near else ""
        return f"there is no option {error.option_name}{hint}"
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        # Those that are there were read before.
        missing = (
            each for each in parameters if each.required and each.name not in error.ctx.params
        )
        flags = ["/".join(reversed(each.opts)) if isinstance(each, Option) else each.metavar
                 for each in missing]  # fmt: skip
        return f"the following arguments are required: {', '.join(flags)}"
    text = error.message if isinstance(error, click.BadParameter) else error.format_message()
    if isinstance(error, click.BadParameter) and error.param is not None:
        text = f"{said(error.ctx, str(error.param.name))}: {text}"
    text = text.rstrip(".")
    return text[:1].lower() + text[1:]
