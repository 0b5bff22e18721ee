"""The commands and their options. Each loads a plan, asks it one thing, and shows the answer.

Must not know how anything is decided or drawn.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from shardrules._cli.inputs import (
    MOMENTS,
    Planned,
    byte_count,
    load_plan,
    load_side,
)
from shardrules._cli.show import plan_json, show_findings, show_plan, show_sweep, working
from shardrules._declared import Declared
from shardrules._files.content import memory_within
from shardrules._files.dtypes import numpy_name
from shardrules._files.meshes import parse_mesh
from shardrules._files.rules import DIALECTS
from shardrules._planning.findings import LEVELS
from shardrules._planning.sweep import Sweep

__all__ = ["app"]

_P = ParamSpec("_P")
_MOST_BARS = 40
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See, check and budget how every array of a JAX model is sharded, without a device.",
)

Source = Annotated[
    str,
    typer.Argument(
        help="The model: a safetensors file, index or directory, an orbax checkpoint, a JSON "
        "manifest (also .gz), or package.module:function that returns a tree."
    ),
]
RulesFile = Annotated[
    str, typer.Option("--rules", "-r", help="Rules: TOML, JSON, or package.module:NAME.")
]
Mesh = Annotated[str, typer.Option("--mesh", "-m", help="Devices per axis: dp=8,fsdp=16,tp=4.")]
DialectName = Annotated[
    str | None, typer.Option("--dialect", help=f"Semantics: {', '.join(sorted(DIALECTS))}.")
]
MinSize = Annotated[int, typer.Option(help="Leaves with fewer elements are replicated.")]
MaxMemory = Annotated[
    str,
    typer.Option(help="Memory that reading a file may take beyond the file's own size: 2GB."),
]
Gradients = Annotated[
    str | None, typer.Option(help="Count gradients of this dtype, or 'same' as the parameters.")
]
Optimizer = Annotated[str | None, typer.Option(help=f"Count its state: {', '.join(MOMENTS)}.")]
OptimizerDtype = Annotated[str, typer.Option(help="The dtype of the optimizer's moments.")]
Hbm = Annotated[str | None, typer.Option(help="Memory of a device: 96GB, 80GiB.")]


def _bad_input_is_2(command: Callable[_P, None]) -> Callable[_P, None]:
    """What is wrong with the input is said in a line, and the exit code is 2."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever read us has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, TypeError, KeyError, OSError, RecursionError, re.error) as error:
            text = error.args[0] if isinstance(error, KeyError) and error.args else error
            print(f"error: {text}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


@app.command("plan")
@_bad_input_is_2
def plan_command(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = "512MiB",
    gradients: Gradients = None,
    optimizer: Optimizer = None,
    optimizer_dtype: OptimizerDtype = "float32",
    hbm: Hbm = None,
    format_: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    lock: Annotated[Path | None, typer.Option(help="Write a lockfile.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report: one file, offline.")] = None,
) -> None:
    """What every array gets, and what that costs on each device."""
    _one_of("--format", format_, ("text", "json"))
    memory = None if hbm is None else byte_count(hbm)
    planned = _load(source, rules, mesh, dialect, min_size, max_memory)
    plan = planned.plan
    counted = {
        "gradients": _gradients(gradients),
        "optimizer": _moments(optimizer, optimizer_dtype),
    }
    held = plan.bytes_per_device(**counted)
    if lock is not None:
        plan.lock(lock)
    if html is not None:
        _write_report(planned, html, memory, counted)
        print(f"{html}: one file that works offline", file=sys.stderr)
    if format_ == "json":
        print(plan_json(plan, held))
        return
    show_plan(plan)
    print(held)
    if memory is not None:
        print("fits" if held.max <= memory else "DOES NOT FIT", f"into {hbm}")


@app.command()
@_bad_input_is_2
def check(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = "512MiB",
    format_: Annotated[str, typer.Option("--format", help="text, json or github.")] = "text",
    fail_on: Annotated[str, typer.Option(help="error, warning, info or never.")] = "error",
    large: Annotated[
        str, typer.Option(help="Minimum bytes per device for a replicated leaf to be a warning.")
    ] = "16MiB",
    replicated: Annotated[
        list[str] | None,
        typer.Option(help="A pattern of paths that are meant to be replicated; repeatable."),
    ] = None,
    optional_axes: Annotated[
        str | None, typer.Option(help="Mesh axes that rules name and a mesh may lack: sp,ep.")
    ] = None,
    data_axes: Annotated[
        str | None, typer.Option(help="Mesh axes that cut batches alone, and no leaf: dp.")
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
        ),
    ] = None,
    level: Annotated[
        list[str] | None, typer.Option(help="Another level: dead=off, siblings=error; repeatable.")
    ] = None,
) -> None:
    """The coverage contract: exits with 1 if something is replicated or ignored silently."""
    _one_of("--format", format_, ("text", "json", "github"))
    _one_of("--fail-on", fail_on, (*LEVELS, "never"))
    size, levels = byte_count(large), dict(map(_level, level or ()))
    planned = _load(source, rules, mesh, dialect, min_size, max_memory)
    told = Declared(tuple(replicated or ()), tuple(_names(optional_axes)), tuple(_names(data_axes)))
    findings = planned.plan.check(
        **planned.rules.declared.also(told)._asdict(),
        large=size,
        head_dim=head_dim,
        levels=levels,
    )
    if format_ == "json":
        print(findings.to_json())
    elif format_ == "github":
        print(findings.to_github(rules))
    else:
        show_findings(findings)
    if fail_on != "never" and findings.at_least(fail_on):
        raise typer.Exit(1)


@app.command()
@_bad_input_is_2
def explain(
    source: Source,
    path: Annotated[str, typer.Argument(help="The array's path.")],
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = "512MiB",
) -> None:
    """Why one array gets what it gets: each rule that matches, and each correction."""
    print(_load(source, rules, mesh, dialect, min_size, max_memory).plan.explain(path))


@app.command()
@_bad_input_is_2
def sweep(
    source: Source,
    rules: RulesFile,
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", "-m", help="A mesh to try; repeatable.")
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Try all meshes of so many devices.")] = None,
    axes: Annotated[str | None, typer.Option(help="Their axes: fsdp,tp,sp=1.")] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = "512MiB",
    gradients: Gradients = None,
    optimizer: Optimizer = None,
    optimizer_dtype: OptimizerDtype = "float32",
    hbm: Hbm = None,
    most: Annotated[int, typer.Option(help="Rows to show.")] = 20,
) -> None:
    """One set of rules on many meshes: what fits, those with the fewest bytes first."""
    if not mesh and (devices is None or axes is None):
        raise ValueError("give meshes with --mesh, or --devices and --axes for all factorizations")
    meshes = [parse_mesh(one) for one in mesh or ()]
    names, fixed = _axes(axes or "")
    first = mesh[0] if mesh else f"{names[0]}={devices}"
    plan = _load(source, rules, first, dialect, min_size, max_memory).plan
    with working("trying meshes"):
        found = plan.sweep(
            meshes or None,
            devices=devices,
            axes=names,
            fixed=fixed,
            hbm=None if hbm is None else byte_count(hbm),
            gradients=_gradients(gradients),
            optimizer=_moments(optimizer, optimizer_dtype),
        )
    show_sweep(found, most)


@app.command()
@_bad_input_is_2
def diff(
    before: Annotated[str, typer.Argument(help="A lockfile, or a model.")],
    after: Annotated[str, typer.Argument(help="A lockfile, or a model.")],
    rules: Annotated[str | None, typer.Option("--rules", "-r", help="For models.")] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", "-m", help="For models.")] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = "512MiB",
) -> None:
    """What differs between two plans: exits with 1 if anything does."""
    with working("reading"), memory_within(byte_count(max_memory)):
        sides = [load_side(text, rules, mesh, dialect, min_size) for text in (before, after)]
    found = sides[0].diff(sides[1])
    print(found)
    if found:
        raise typer.Exit(1)


@app.command()
@_bad_input_is_2
def demo() -> None:
    """DeepSeek-V3 meets real rules: the plan, the finding, the fix, the bytes, the report."""
    from shardrules.demo import main

    raise typer.Exit(main())


def _axes(text: str) -> tuple[list[str], dict[str, int]]:
    """The names of fsdp,tp,sp=1, and the sizes of those that have one."""
    parts = _names(text)
    names = [part for part in parts if "=" not in part]
    fixed = ",".join(part for part in parts if "=" in part)
    if text and not names:
        raise ValueError(f"--axes {text!r}: name an axis without a size, whose sizes are tried")
    return names, parse_mesh(fixed) if fixed else {}


def _names(text: str | None) -> list[str]:
    """The parts of a list with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _load(
    source: str, rules: str, mesh: str, dialect: str | None, min_size: int, max_memory: str
) -> Planned:
    with working(f"reading {source}"), memory_within(byte_count(max_memory)):
        return load_plan(source, rules, mesh, dialect, min_size)


def _write_report(
    planned: Planned, html: Path, memory: int | None, counted: dict[str, Any]
) -> None:
    """The report, with all that is counted beside the parameters in each of its numbers."""
    plan = planned.plan
    findings = plan.check(**planned.rules.declared._asdict())
    ones = {axis: size for axis, size in plan.axis_sizes.items() if size == 1}
    with working("trying meshes"):
        found = plan.sweep(fixed=ones, hbm=memory, **counted) if plan.devices > 1 else None
    chart = found and Sweep(found[:_MOST_BARS])
    plan.to_html(html, findings=findings, sweep=chart, title=planned.model, hbm=memory, **counted)


def _gradients(text: str | None) -> Any:
    return True if text == "same" else text if text is None else numpy_name(text)


def _moments(optimizer: str | None, dtype: str) -> tuple[str, ...] | None:
    if optimizer is None:
        return None
    _one_of("--optimizer", optimizer, tuple(MOMENTS))
    return (numpy_name(dtype),) * MOMENTS[optimizer]


def _level(text: str) -> tuple[str, str]:
    kind, equals, level = text.partition("=")
    if not equals:
        raise ValueError(f"--level {text!r}: write a kind of finding and its level, as dead=off")
    return kind, level


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(choices)}")
