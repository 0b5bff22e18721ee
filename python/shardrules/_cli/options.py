"""Commands of `shardrules` for click, and their options, declared by decorators.

Options that several commands have are here, with records of groups; a command is in a file of
`commands`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.core import ParameterSource

from shardrules._cli import types
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
    values = dict(pairs)
    if len(values) < len(pairs):
        raise click.BadParameter("a key is given twice", ctx, option)
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
    """Make a decorator with an argument of a command; that of click before 8.1.4 works once."""

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
    Option, in_job=False, excludes=("model", "function", "before")
)
_OF_JOBS: Final = [
    _in_place_of_arguments(["--project"], type=FILE, help="Run the jobs of this project file, "
        "whoever owns it, and import what they name as package.module:function. Default: "
        "shardrules.toml in the current folder."),
    _in_place_of_arguments(["--job"], metavar="NAME", help="Run this job alone, with any options."),
]  # fmt: skip
_OF_ALL: Final = [
    Option(["-q", "--quiet"], is_flag=True, is_eager=True, expose_value=False, callback=_set_quiet,
        in_job=False, help="Write the result and errors alone: no notes, hints or progress."),
]  # fmt: skip


def command(example: str, *, has_jobs: bool = False) -> Callable[[Any], click.Command]:
    """Make a command of a function; without its arguments it may run the jobs of a project."""

    def make(function: Any) -> click.Command:
        name = function.__name__
        command = click.command(
            name, cls=Command, context_settings=CONTEXT,
            short_help=function.__doc__.partition("\n\n")[0],
            epilog=f"Example: shardrules {name} {example}",
        )(function)  # fmt: skip
        command.params += _OF_JOBS * has_jobs + _OF_ALL
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


# Names of dialects, tables, memories and devices are text here, which tests compare: help imports
# no modules that have them.
DEVICES: Final = (
    "v5p:8x8x8, v5e:4x4, v6e:16x16, v4:4x4x4, tpu7x:4x4x4; or GPUs of a host, and hosts: "
    "h100:8x16, h200:8, b200:8x2, gb200:72x2"
)
MOMENTS: Final = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}
"""Optimizers, with the number of moments that each keeps per parameter."""
Sizes = dict[str, int]
"""Devices per mesh axis."""

model = functools.partial(argument, "model", metavar="SOURCE", type=types.FILE)
of_model: Final = model(
    about="The model: a safetensors file, index or directory; a JSON manifest, also gzipped; - for "
    "a manifest on standard input; or package.module:function, which returns a tree."
)
of_step: Final = argument(
    "function", metavar="FUNCTION",
    about="package.module:function, which takes the mesh and, with --rules, the rules, and returns "
    "(step, arguments, outputs) or (step, arguments), as shardrules.prove takes them.",
)  # fmt: skip
mesh = functools.partial(option, "-m", "--mesh", type=types.MESH)
of_mesh: Final = mesh(required=True, help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4.")
rules = functools.partial(option, "-r", "--rules", type=types.FILE, multiple=True)
of_step_rules: Final = rules(help="Rules that the function takes behind the mesh.")
devices = functools.partial(option, "--devices", type=types.Number(min=1))
axes = functools.partial(option, "--axes", type=types.AXES)
on = functools.partial(option, "--on", metavar="TOPOLOGY", type=types.TOPOLOGY)
slices: Final = option(
    "--slices", type=types.Number(min=1), default=1, needs=("on",),
    help="Slices of TPUs, which the data centre's network connects.",
)  # fmt: skip
hbm = functools.partial(option, "--hbm", type=types.MEMORY)
dialect: Final = option(
    "--dialect", type=types.DIALECT,
    help="Semantics of the rules: big_vision, easylm, eformer, jaxseq, keras, nnx, spectrax; of "
    "logical rules linen, flax.core, maxtext, haliax. Default: the rule file's dialect, or else "
    "eformer, linen or, in YAML, maxtext.",
)  # fmt: skip
max_memory: Final = option(
    "--max-memory", type=types.BYTES, default="512MiB",
    help="Maximum memory for reading a file, beyond the file's size, such as 2GB.",
)  # fmt: skip
head_dim: Final = option(
    "--head-dim", type=types.Number(min=1),
    help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
)  # fmt: skip
fail_on: Final = option(
    "--fail-on", type=click.Choice(["error", "warning", "info", "never"]), default="error",
    help="Minimum level that makes the exit code 1.",
)  # fmt: skip


def formats(*names: str, about: str = "Output format.") -> Decorator:
    """Make a decorator with the formats, of which the first is the default."""
    choice = click.Choice(names)
    return option("--format", type=choice, default=names[0], in_job=False, help=about)


class HowToPlan(NamedTuple):
    """How a model is planned, beside its mesh."""

    rules: tuple[str, ...]
    dialect: Any
    max_memory: int


def how_to_plan(*, needs_rules: bool = True) -> Decorator:
    """Make a decorator with what says how a model is planned."""
    of_model = rules(required=needs_rules, help="The rules: a TOML or JSON file, MaxText's YAML, "
        "or package.module:NAME; files after the first are merged over it.")  # fmt: skip
    return bundle(HowToPlan, "how", of_model, dialect, max_memory)


class ToCount(NamedTuple):
    """What training adds to the parameters, and the memory that there is."""

    gradients: str | bool | None
    optimizer: str | None
    optimizer_dtype: str
    hbm: int | None

    @property
    def training(self) -> dict[str, Any]:
        """Arguments of `Plan.bytes_per_device`."""
        name = self.optimizer
        dtypes = None if name is None else (self.optimizer_dtype,) * MOMENTS[name]
        return {"gradients": self.gradients, "optimizer": dtypes}


def memory(*needs: str) -> Decorator:
    """Make a decorator with what is counted, which needs one of these options."""
    return bundle(
        ToCount, "memory",
        option("--gradients", type=types.DTYPE_OR_SAME, needs=needs,
            help="Count gradients of this dtype; 'same' is the parameters' own dtypes."),
        option("--optimizer", type=click.Choice([*MOMENTS]), needs=needs,
            help="Count the state of this optimizer."),
        option("--optimizer-dtype", type=types.DTYPE, default="float32", needs=("optimizer",),
            help="The dtype of the optimizer's moments."),
        hbm(help="Memory of one device, such as 96GB or 80GiB, or its name, such as v5p."),
    )  # fmt: skip
