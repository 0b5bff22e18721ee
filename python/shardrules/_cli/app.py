"""`shardrules` as a click group: commands made of their tables, help and usage errors."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Final

import click

from shardrules import __version__
from shardrules._base.io import FileError
from shardrules._base.text import printable
from shardrules._cli.commands import COMMANDS, Entry
from shardrules._cli.options import GROUP_OF, GROUPS
from shardrules._cli.process import FAILED, print_note

_COMPLETE: Final = "_SHARDRULES_COMPLETE"
_CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}
_EXIT_CODES: Final = [
    ("0", "Success, without findings or differences."),
    ("1", "Findings, differences, rules to add, or no room: each command says which."),
    ("2", "An error, such as bad input; its message is on stderr."),
    ("128 + N", "An end by signal N."),
]
_MORE: Final = [
    ("shardrules help COMMAND", "The options of a command, with an example."),
    (f'eval "$({_COMPLETE}=bash_source shardrules)"', "Completion in bash; zsh and fish alike."),
    ("docs/command-line.md", "All commands, as a page of the documentation."),
]


class OneOf(click.Choice):  # type: ignore[type-arg]
    """Choice whose error is a line like those of other values."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check that the value is one of the choices."""
        if value not in self.choices:
            option = param.opts[-1] if param else "it"
            raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(self.choices)}")
        return value


class Argument(click.Argument):
    """Argument with a line of help."""

    line = ""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return str(self.metavar), self.line


class Command(click.Command):
    """Command whose function takes the options as one record."""

    def __init__(self, name: str, entry: Entry) -> None:
        parameters = [_parameter(name, entry.changes.get(name, {})) for name in entry.options]
        about = inspect.cleandoc(entry.function.__doc__ or "")
        line = about.partition("\n\n")[0]
        super().__init__(name, _CONTEXT, params=parameters, help=about, short_help=line)
        self.entry = entry

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; without an argument, some commands are for the project file's jobs."""
        words = [*args]
        try:
            rest = super().parse_args(ctx, args)
        except click.MissingParameter as error:
            from shardrules._cli.project import ARGUMENTS_OF, find_project

            arguments = [each for each in self.params if isinstance(each, Argument)]
            if self.name not in ARGUMENTS_OF or error.param is not arguments[0]:
                raise
            project = find_project(ctx.params.get("project"))
            if project is None:
                text = f"{usage_message(error)}; or a project file, which shardrules init writes"
                raise click.UsageError(text, ctx) from None
            ctx.obj = (project, words)
            return []
        if ctx.params.get("project") and ctx.obj is None:
            first = next(each for each in self.params if isinstance(each, Argument))
            raise click.UsageError(f"--project has the arguments: leave out {first.metavar}", ctx)
        return rest

    def invoke(self, ctx: click.Context) -> int:
        """Run the command, and returns its exit code."""
        ctx.color = _color(ctx.params.get("color", "auto"))
        if isinstance(ctx.obj, tuple):
            from shardrules._cli.project import run_jobs

            project, words = ctx.obj
            return run_jobs(self, ctx, project, words, usage_message)
        args = SimpleNamespace(**ctx.params, job=ctx.obj)
        try:
            return self.entry.function(args) or 0
        except (TypeError, ValueError) as error:
            if not isinstance(error, FileError):  # whose words are those of a file
                error.args = tuple(_with_options(text, ctx.params) for text in error.args)
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, and the example."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            group = GROUP_OF.get(str(parameter.name), "General")
            if record := parameter.get_help_record(ctx):
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)
        with formatter.section("Example"):
            formatter.write_text(f"shardrules {self.name} {self.entry.example}".rstrip())


class Group(click.Group):
    """Group of all commands, of which only those that are asked for are made."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands, the most used first."""
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Make the command of this name."""
        return Command(cmd_name, COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or says which was meant."""
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            near = _did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}{near}", ctx)
        return super().resolve_command(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the exit codes, and where there is more."""
        for title, rows in (("Exit codes", _EXIT_CODES), ("More", _MORE)):
            with formatter.section(title):
                formatter.write_dl(rows)


def _parameter(name: str, changes: dict[str, Any]) -> click.Parameter:
    """Make a parameter for click, from its flags and value as `GROUPS` has them."""
    usage, text, defaults = GROUPS[GROUP_OF[name]][name]
    attributes: dict[str, Any] = {"help": text, **defaults, **changes}
    *flags, value = attributes.pop("usage", usage).split()
    if value.startswith("-"):
        return click.Option([name, *flags, value], is_flag=True, **attributes)
    if not flags:
        argument = Argument([name], metavar=value, type=click.Path(readable=False))
        argument.line = attributes["help"]
        return argument
    if value == "FILE":
        attributes["type"] = click.Path(readable=False)  # whose names shells complete
    if "least" in attributes:
        attributes["type"] = click.IntRange(min=attributes.pop("least"))
    if value.startswith("{"):
        attributes["type"] = OneOf(value[1:-1].split(","))
    attributes |= {"metavar": value.removesuffix("..."), "multiple": value.endswith("...")}
    return click.Option([name, *flags], **attributes)


def _color(choice: str) -> bool | None:
    """Return whether output is coloured; None if the stream decides."""
    if choice == "auto":
        return False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None
    return choice == "always"


def usage_message(error: click.UsageError) -> str:
    """Return the message of wrong words, as one line."""
    if isinstance(error, click.NoSuchOption):
        options = [] if error.ctx is None else error.ctx.command.get_params(error.ctx)
        names = [name for option in options for name in option.opts if option.opts != [option.name]]
        return f"there is no option {error.option_name}{_did_you_mean(error.option_name, names)}"
    if isinstance(error, click.MissingParameter) and error.ctx is not None:
        # Those that are there were read before.
        missing = (
            option for option in error.ctx.command.params
            if option.required and option.name not in error.ctx.params
        )  # fmt: skip
        names = [option.human_readable_name if isinstance(option, Argument)
                 else "/".join(reversed(option.opts)) for option in missing]  # fmt: skip
        return f"the following arguments are required: {', '.join(names)}"
    text = error.format_message().rstrip(".")
    return text[:1].lower() + text[1:]


def _did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of a message on an unknown word: which of these was meant."""
    from shardrules._base.text import nearest

    near = nearest(word, words)
    return f" (did you mean {near}?)" if near else ""


def _with_options(text: object, parameters: Iterable[str]) -> object:
    """Return a message of the library with options in the place of parameters."""
    for name in parameters:
        if "_" in name and isinstance(text, str):
            option = "--" + name.replace("_", "-")
            text = re.sub(rf"\b{name}\b", option, re.sub(rf"\b{name}=", f"{option} ", text))
    return text


APP: Final = Group(
    "shardrules",
    help="Plan, check and budget the sharding of a JAX model's arrays, without a device.",
    context_settings=_CONTEXT,
)
click.version_option(__version__, message="%(prog)s %(version)s")(APP)


def run() -> int:
    """Run the command that the process's arguments name, and returns the exit code.

    What the command raises is for `exit_with`.
    """
    words = sys.argv[1:]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if instruction := os.environ.get(_COMPLETE):
        from click.shell_completion import shell_complete

        return shell_complete(APP, {}, "shardrules", _COMPLETE, instruction)
    try:
        with APP.make_context("shardrules", [*words] or ["--help"]) as ctx:
            return int(APP.invoke(ctx))
    except click.exceptions.Exit as end:
        return end.exit_code if words else FAILED
    except click.UsageError as error:
        print_note(f"error: {printable(usage_message(error))}; see --help")
        return FAILED
