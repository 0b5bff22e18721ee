"""Options of the commands for click, declared by decorators, and their types.

Options that several commands have are here; a command is in a file of `commands`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, get_args

import click
from click.core import ParameterSource

from shardrules._base.text import near_shown
from shardrules._cli.process import QUIET

CONTEXT: Final = {
    "help_option_names": ["-h", "--help"],
    "show_default": True,
    "max_content_width": 100,
}
Decorator = Callable[[Any], Any]


class Type(click.ParamType):  # type: ignore[type-arg]
    """Type whose function reads a text, or one of `tables` of TOML, or raises what is wrong."""

    def __init__(self, name: str, read: Callable[[Any], Any], *tables: type) -> None:
        self.name, self.read, self.tables = name, read, tables

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the value, as click asks for it."""
        try:
            return self.read(value)
        except (TypeError, ValueError) as error:
            self.fail(str(error), param, ctx)


class KeyValues(Type):
    """KEY=VALUE, or a table; `odd` says of a key why it is none of this command, or ""."""

    def __init__(
        self, name: str, value: Callable[[Any], Any], odd: Callable[[str], str] = lambda _: ""
    ) -> None:
        super().__init__(name, self._pair, dict)
        self.value, self.odd = value, odd

    def _pair(self, pair: str | tuple[str, Any]) -> tuple[str, Any]:
        if isinstance(pair, str):
            key, equals, value = pair.partition("=")
            if not equals:
                raise ValueError(f"{pair!r}: write it as {self.name}")
            pair = key, value
        key, value = pair
        if why := self.odd(key):
            raise ValueError(why)
        try:
            return key, self.value(value)
        except ValueError as error:
            raise ValueError(f"{key}={value}: {error}") from None


def _mesh_sizes(value: str | dict[str, int]) -> dict[str, int]:
    from shardrules._base.arguments import checked_sizes, parse_mesh

    return parse_mesh(value) if isinstance(value, str) else checked_sizes(value)


def _axes(value: str | list[Any]) -> tuple[str, ...]:
    text = value if isinstance(value, str) else ",".join(map(str, value))
    if "=" in text:
        raise ValueError(f"{text!r} has sizes; write names alone, as fsdp,tp")
    return tuple(filter(None, map(str.strip, text.split(","))))


def _bytes(value: str | int) -> int:
    from shardrules._base.arguments import byte_size

    return byte_size("the value", value)


def _memory(value: str | int) -> int:
    """Return the bytes of a memory, or of a device of this name."""
    from shardrules._base.arguments import memory_bytes

    text = str(value).strip()
    if text[:1].isalpha():
        from shardrules._base.hardware import Hardware

        return Hardware.named(text).memory_bytes
    return memory_bytes("the value", text)


def _share(value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?%", value):
        raise ValueError(f"{value!r}: write a part, such as 2%")
    return float(value[:-1]) / 100


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


def _hardware(value: str) -> Any:
    from shardrules._base.hardware import Hardware
    from shardrules._plan.files.hardware import read_hardware

    is_file = value.endswith(".toml") or "/" in value
    return read_hardware(value) if is_file else Hardware.named(value)


def _topology(value: str) -> str:
    from shardrules._program.topologies.topology import Topology

    return Topology(value).name


def _level(value: Any) -> Any:
    from shardrules._base.arguments import check_choice

    check_choice("the level", value, ("error", "warning", "info", "off"))
    return value


def _odd_kind(kind: str) -> str:
    from shardrules._plan.findings import CheckKind

    kinds = get_args(CheckKind)
    return "" if kind in kinds else f"there is no finding {kind!r}{near_shown(kind, kinds)}"


def _values_to_try(text: str) -> list[Any]:
    """Return values of --try: numbers, true, false and none, and else texts."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}

    def value_of(word: str) -> Any:
        if word.lower() in words:
            return words[word.lower()]
        for read in (int, float):
            with suppress(ValueError):
                return read(word)
        return word

    return list(map(value_of, _axes(text)))


def _odd_planned(key: str) -> str:
    return "" if key == "device" else f"{key} is of prove; what is planned is of device"


def _odd_sent(key: str) -> str:
    return "" if key != "device" else f"{key} is of check, which counts what is planned"


FILE: Final = click.Path(readable=False)  # whose names shells complete
NUMBER: Final = click.IntRange(min=1)
FILE.name, NUMBER.name = "file", "number"
MESH = Type("mesh", _mesh_sizes, dict)
AXES = Type("axes", _axes, list)
BYTES, MEMORY = Type("bytes", _bytes), Type("bytes", _memory)
TOPOLOGY, SHARE = Type("topology", _topology), Type("share", _share)
DIALECT, HARDWARE = Type("name", _dialect), Type("name", _hardware)
OPTIMIZER = Type("name", _optimizer)
DTYPE_OR_SAME = Type("dtype", lambda value: value == "same" or _dtype(value))
LEVELS = KeyValues("kind=level", _level, _odd_kind)
TRIES = KeyValues("keyword=values", _values_to_try)
PLANNED_BUDGET = KeyValues("memory=bytes", _memory, _odd_planned)
SENT_BUDGET = KeyValues("what=bytes", _bytes, _odd_sent)


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

    def of_file(self, value: Any) -> Any:
        """Return the value of a key in TOML as click takes it: texts, or a table of its type."""
        if isinstance(self.type, KeyValues) and isinstance(value, dict):
            return [(key, item) for key, item in value.items() if not self.type.odd(key)]
        if self.multiple:
            return [*map(str, value if isinstance(value, list) else [value])]
        return value if type(value) in getattr(self.type, "tables", ()) else str(value)

    @property
    def forms(self) -> set[type]:
        """The types of TOML that a key may have; numbers and flags are texts."""
        tables: tuple[type, ...] = getattr(self.type, "tables", ())
        return {str, *tables, *([list] if self.multiple else [])}

    def check_beside(self, ctx: click.Context) -> None:
        """Check that what it needs is there, and nothing that it excludes, if it is given."""
        if not _is_given(ctx, self):
            return
        others = {each.name: each for each in ctx.command.params}
        if self.needs and not any(map(ctx.params.get, self.needs)):
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
    of_file = str
    forms = frozenset({str})

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


def _set_quiet(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.meta[QUIET] = value
    ctx.color = False if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" else None


_in_place_of_arguments = functools.partial(
    Option, in_job=False, excludes=("model", "function", "before")
)
OF_JOBS: Final = [
    _in_place_of_arguments(["--project"], type=FILE, help="Run the jobs of this project file, "
        "whoever owns it, and import what they name as package.module:function. Default: "
        "shardrules.toml in the current folder."),
    _in_place_of_arguments(["--job"], metavar="NAME", help="Run this job alone, with any options."),
]  # fmt: skip
OF_ALL: Final = [
    Option(["-q", "--quiet"], is_flag=True, is_eager=True, expose_value=False, callback=_set_quiet,
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

model = functools.partial(argument, "model", metavar="SOURCE", type=FILE)
of_model: Final = model(
    about="The model: a safetensors file, index or directory; a JSON manifest, also gzipped; - for "
    "a manifest on standard input; or package.module:function, which returns a tree."
)
of_step: Final = argument(
    "function", metavar="FUNCTION",
    about="package.module:function, which takes the mesh and, with --rules, the rules, and returns "
    "(step, arguments, outputs) or (step, arguments), as shardrules.prove takes them.",
)  # fmt: skip
mesh = functools.partial(option, "-m", "--mesh", type=MESH)
of_mesh: Final = mesh(required=True, help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4.")
rules = functools.partial(option, "-r", "--rules", type=FILE, multiple=True)
rules_of_model = functools.partial(
    rules, help="The rules: a TOML or JSON file, MaxText's YAML, or package.module:NAME; files "
    "after the first are merged over it.",
)  # fmt: skip
of_rules: Final = rules_of_model(required=True)
of_step_rules: Final = rules(help="Rules that the function takes behind the mesh.")
devices = functools.partial(option, "--devices", type=NUMBER)
axes = functools.partial(option, "--axes", type=AXES)
on = functools.partial(option, "--on", metavar="TOPOLOGY", type=TOPOLOGY)
slices: Final = option(
    "--slices", type=NUMBER, default=1, needs=("on",),
    help="Slices of TPUs, which the data centre's network connects.",
)  # fmt: skip
hbm = functools.partial(option, "--hbm", type=MEMORY)
dialect: Final = option(
    "--dialect", type=DIALECT,
    help="Semantics of the rules: big_vision, easylm, eformer, jaxseq, keras, nnx, spectrax; of "
    "logical rules linen, flax.core, maxtext, haliax. Default: the rule file's dialect, or else "
    "eformer, linen or, in YAML, maxtext.",
)  # fmt: skip
head_dim: Final = option(
    "--head-dim", type=NUMBER,
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


def memory(*needs: str) -> Decorator:
    """Make a decorator with what is counted, which needs one of these options."""
    parts = (
        option("--gradients", type=DTYPE_OR_SAME, needs=needs,
            help="Count gradients of this dtype; 'same' is the parameters' own dtypes."),
        option("--optimizer", type=OPTIMIZER, needs=needs,
            help="Count the state of this optimizer: sgd, momentum, lion, adam or adamw, whose "
            "moments are of float32, or as adam:BF16 says."),
        hbm(help="Memory of one device, such as 96GB or 80GiB, or its name, such as v5p."),
    )  # fmt: skip
    return lambda function: functools.reduce(lambda last, part: part(last), parts[::-1], function)
