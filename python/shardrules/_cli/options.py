"""Options of the commands for click, and their types.

Options that several commands have are here; a command is in a file of `commands`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Annotated, Any, Final

import click
from click.core import ParameterSource

from shardrules._cli.process import QUIET

CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}


class Type(click.ParamType):  # type: ignore[type-arg]
    """Type whose function reads a text, or raises what is wrong; TOML may have it in a form."""

    def __init__(self, name: str, read: Callable[[str], Any], form: type = str) -> None:
        self.name, self.read, self.form = name, read, form

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the value, as click asks for it."""
        try:
            return self.read(value)
        except (TypeError, ValueError) as error:
            self.fail(str(error), param, ctx)


class KeyValues(Type):
    """KEY=VALUE, in TOML a table; `odd` says of a key why it is none of this command, or ""."""

    def __init__(
        self, name: str, value: Callable[[str], Any], odd: Callable[[str], str] = lambda _: ""
    ) -> None:
        super().__init__(name, self._pair, dict)
        self.value, self.odd = value, odd

    def _pair(self, pair: str) -> tuple[str, Any]:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair!r}: write it as {self.name}")
        if why := self.odd(key):
            raise ValueError(why)
        try:
            return key, self.value(value)
        except ValueError as error:
            raise ValueError(f"{pair}: {error}") from None


def _mesh_sizes(value: str) -> dict[str, int]:
    from shardrules._base.arguments import parse_mesh

    return parse_mesh(value)


def _axes(value: str) -> tuple[str, ...]:
    if "=" in value:
        raise ValueError(f"{value!r} has sizes; write names alone, as fsdp,tp")
    return tuple(filter(None, map(str.strip, value.split(","))))


def _bytes(value: str) -> int:
    from shardrules._base.arguments import byte_size

    return byte_size("the value", value)


def _memory(value: str) -> int:
    """Return the bytes of a memory, or of a device of this name."""
    from shardrules._base.arguments import memory_bytes

    if value.strip()[:1].isalpha():
        from shardrules._base.hardware import Hardware

        return Hardware.named(value.strip()).memory_bytes
    return memory_bytes("the value", value)


def _dtype(value: str) -> str:
    from shardrules._base.dtypes import numpy_name

    return numpy_name(value)


# The number of moments that each keeps per parameter.
_MOMENTS: Final = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}


def _optimizer(value: str) -> tuple[str, ...]:
    name, colon, dtype = value.partition(":")
    if name not in _MOMENTS:
        raise ValueError(f"{name!r} is none of {', '.join(_MOMENTS)}; write it as adam:BF16")
    return (_dtype(dtype if colon else "float32"),) * _MOMENTS[name]


def _dialect(value: str) -> Any:
    from shardrules._plan.codec import DIALECTS, LOGICAL_DIALECTS

    dialects: dict[str, Any] = {**DIALECTS, **LOGICAL_DIALECTS}
    if value.lower() not in dialects:
        raise ValueError(f"dialect {value!r} is unknown; it is one of {', '.join(dialects)}")
    return dialects[value.lower()]


def _topology(value: str) -> str:
    from shardrules._program.topologies.topology import Topology

    return Topology(value).name


FILE: Final = click.Path(readable=False)  # whose names shells complete
NUMBER: Final = click.IntRange(min=1)
FILE.name, NUMBER.name = "file", "number"
MESH = Type("mesh", _mesh_sizes, dict)
AXES = Type("axes", _axes, list)
BYTES, MEMORY = Type("bytes", _bytes), Type("bytes", _memory)
TOPOLOGY, DIALECT = Type("topology", _topology), Type("name", _dialect)
OPTIMIZER = Type("name", _optimizer)
DTYPE_OR_SAME = Type("dtype", lambda value: value == "same" or _dtype(value))


class Option(click.Option):
    """Option that needs one of some others, and excludes others; a job may have it, or not."""

    def __init__(
        self, *declarations: str, needs: tuple[str, ...] = (),
        excludes: tuple[str, ...] = (), in_job: bool = True, **attributes: Any,
    ) -> None:  # fmt: skip
        if isinstance(attributes.get("type"), KeyValues):
            attributes |= {"multiple": True, "callback": _one_each}
        super().__init__(declarations, **attributes)
        self.needs, self.excludes, self.in_job = needs, excludes, in_job

    def check_beside(self, ctx: click.Context) -> None:
        """Check that what it needs is there, and nothing that it excludes, if it is given."""
        if not _is_given(ctx, self):
            return
        parameters = {each.name: each for each in ctx.command.params}
        if self.needs and not any(map(ctx.params.get, self.needs)):
            needed = " or ".join(parameters[name].get_error_hint(ctx) for name in self.needs)
            raise click.UsageError(f"{self.get_error_hint(ctx)} needs {needed}.", ctx)
        source = ctx.get_parameter_source(str(self.name))
        for other in (parameters[name] for name in self.excludes if name in parameters):
            # A job's own are no contradiction to those of the command line.
            if _is_given(ctx, other) and ctx.get_parameter_source(str(other.name)) is source:
                pair = f"{self.get_error_hint(ctx)} and {other.get_error_hint(ctx)}"
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

    def __init__(self, name: str, *, about: str, **attributes: Any) -> None:
        super().__init__([name], **attributes)
        self.help = about  # which arguments of click have since 8.5

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return str(self.metavar), self.help or ""


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value
    ctx.color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


_in_place_of_arguments = functools.partial(
    Option, in_job=False, excludes=("model", "function", "before")
)
OF_JOBS: Final = [
    _in_place_of_arguments("--project", type=FILE, help="Run the jobs of this project file, "
        "whoever owns it, and import what they name as package.module:function. Default: "
        "shardrules.toml in the current folder."),
    _in_place_of_arguments("--job", metavar="NAME", help="Run this job alone, with any options."),
]  # fmt: skip
OF_ALL: Final = [
    Option("-q", "--quiet", is_flag=True, is_eager=True, expose_value=False, callback=_set_quiet,
        in_job=False, help="Write the result and errors alone: no notes, hints or progress."),
]  # fmt: skip


# Names of dialects, tables, memories and devices are text here, which tests compare: help imports
# no modules that have them.
DEVICES: Final = (
    "v5p:8x8x8, v5e:4x4, v6e:16x16, v4:4x4x4, tpu7x:4x4x4; or GPUs of a host, and hosts: "
    "h100:8x16, h200:8, b200:8x2, gb200:72x2"
)
Sizes = dict[str, int]
"""Devices per mesh axis."""

# What several commands have in other words, or with other needs.
model = functools.partial(Argument, "model", metavar="SOURCE", type=FILE)
mesh = functools.partial(Option, "-m", "--mesh", type=MESH)
rules = functools.partial(Option, "-r", "--rules", type=FILE, multiple=True)
rules_of_model = functools.partial(
    rules, help="The rules: a TOML or JSON file, MaxText's YAML, or package.module:NAME; files "
    "after the first are merged over it.",
)  # fmt: skip
devices = functools.partial(Option, "--devices", type=NUMBER)
axes = functools.partial(Option, "--axes", type=AXES)
on = functools.partial(Option, "--on", metavar="TOPOLOGY", type=TOPOLOGY)
hbm = functools.partial(Option, "--hbm", type=MEMORY)

Model = Annotated[str, model(
    about="The model: a safetensors file, index or directory; a JSON manifest, also gzipped; - for "
    "a manifest on standard input; or package.module:function, which returns a tree.",
)]  # fmt: skip
Function = Annotated[str, Argument(
    "function", metavar="FUNCTION",
    about="package.module:function, which takes the mesh and, with --rules, the rules, and returns "
    "(step, arguments, outputs) or (step, arguments), as shardrules.prove takes them.",
)]  # fmt: skip
Mesh = Annotated[
    Sizes, mesh(required=True, help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4.")
]
Rules = Annotated[tuple[str, ...], rules_of_model(required=True)]
StepRules = Annotated[tuple[str, ...], rules(help="Rules that the function takes behind the mesh.")]
Slices = Annotated[int, Option(
    "--slices", type=NUMBER, default=1, needs=("on",),
    help="Slices of TPUs, which the data centre's network connects.",
)]  # fmt: skip
Hbm = Annotated[
    int | None, hbm(help="Memory of one device, such as 96GB or 80GiB, or its name, such as v5p.")
]
Dialect = Annotated[Any, Option(
    "--dialect", type=DIALECT,
    help="Semantics of the rules: big_vision, easylm, eformer, jaxseq, keras, nnx, spectrax; of "
    "logical rules linen, flax.core, maxtext, haliax. Default: the rule file's dialect, or else "
    "eformer, linen or, in YAML, maxtext.",
)]  # fmt: skip
Gradients = Annotated[Any, Option(
    "--gradients", type=DTYPE_OR_SAME,
    help="Count gradients of this dtype; 'same' is the parameters' own dtypes.",
)]  # fmt: skip
Optimizer = Annotated[Any, Option(
    "--optimizer", type=OPTIMIZER,
    help="Count the state of this optimizer: sgd, momentum, lion, adam or adamw, whose moments are "
    "of float32, or as adam:BF16 says.",
)]  # fmt: skip
HeadDim = Annotated[int | None, Option(
    "--head-dim", type=NUMBER,
    help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
)]  # fmt: skip
FailOn = Annotated[str, Option(
    "--fail-on", type=click.Choice(["error", "warning", "info", "never"]), default="error",
    help="Minimum level that makes the exit code 1.",
)]  # fmt: skip


def formats(*names: str, about: str = "Output format.") -> Option:
    """Make an option with the formats, of which the first is the default."""
    choice = click.Choice(names)
    return Option("--format", type=choice, default=names[0], in_job=False, help=about)
