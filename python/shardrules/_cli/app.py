"""The commands and their options. Each command loads a plan, asks one question, shows the answer.

Must not know how anything is decided or drawn.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ParamSpec, cast

import typer

from shardrules._atomic_write import write_text
from shardrules._cli.inputs import (
    MOMENTS,
    Planned,
    is_lock,
    load_hardware,
    load_model,
    load_patch,
    load_plan,
    load_side,
)
from shardrules._cli.process import FAILED, code_of, note
from shardrules._cli.show import (
    plan_json,
    show_findings,
    show_plan,
    show_sweep,
    sweep_json,
    working,
)
from shardrules._declared import Declared
from shardrules._dtypes import numpy_name
from shardrules._file_content import DEFAULT_MEMORY, memory_within
from shardrules._file_error import FileError
from shardrules._files.companions import TABLES
from shardrules._files.logical import LOGICAL_DIALECTS
from shardrules._files.modules import load_object
from shardrules._files.rule_places import NOWHERE, RulePlaces, rule_places
from shardrules._files.rules import DIALECTS
from shardrules._format import and_more, byte_count, shown
from shardrules._hardware import Hardware, public_hardware
from shardrules._logical.dialects import LINEN, MAXTEXT
from shardrules._logical.rules import LogicalRules
from shardrules._matching.dialects import EFORMER
from shardrules._memory_kinds import MEMORY_KINDS
from shardrules._mesh_sizes import parse_mesh
from shardrules._moving.forecast import forecast
from shardrules._planning.asking.budget import Room
from shardrules._planning.asking.findings import LEVELS, Findings, Level
from shardrules._planning.asking.sweep import Sweep
from shardrules._printable import printable
from shardrules._suggesting.suggestion import Suggestion

__all__ = ["app", "run"]

_P = ParamSpec("_P")
_MAX_MEMORY = f"{DEFAULT_MEMORY >> 20}MiB"
_MOST_BARS = 40
_MOST_FALLBACKS = 5
# The class of the click that typer is built on.
_UsageError: Any = typer.BadParameter.__mro__[1]
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan, check and budget the sharding of a JAX model's arrays, without a device.",
)

Source = Annotated[
    str,
    typer.Argument(
        help="The model: a safetensors file, index or directory; an orbax checkpoint; a JSON "
        "manifest, also gzipped; - for a manifest on standard input; or package.module:function, "
        "which returns a tree."
    ),
]
RulesFile = Annotated[
    str,
    typer.Option(
        "--rules",
        "-r",
        help="The rules: a TOML or JSON file, MaxText's YAML, or package.module:NAME.",
    ),
]
Mesh = Annotated[
    str, typer.Option("--mesh", "-m", help="Devices per mesh axis, such as dp=8,fsdp=16,tp=4.")
]
DialectName = Annotated[
    str | None,
    typer.Option(
        "--dialect",
        help=f"Semantics of the rules: {', '.join(sorted(DIALECTS))}; of logical rules "
        f"{', '.join(LOGICAL_DIALECTS)}. Default: the rule file's "
        f"dialect, or else {EFORMER.name}, {LINEN.name} or, in YAML, {MAXTEXT.name}.",
    ),
]
MinSize = Annotated[int, typer.Option(min=0, help="Replicate leaves with fewer elements.")]
MaxMemory = Annotated[
    str,
    typer.Option(help="Maximum memory for reading a file, beyond the file's size, such as 2GB."),
]
NoFallbacks = Annotated[
    bool,
    typer.Option(
        "--no-fallbacks",
        help="Refuse patterns that only Python's backtracking `re` can match, path by path.",
    ),
]
Gradients = Annotated[
    str | None,
    typer.Option(help="Count gradients of this dtype; 'same' is the parameters' own dtypes."),
]
Optimizer = Annotated[
    str | None,
    typer.Option(help=f"Count the state of this optimizer: {', '.join(MOMENTS)}. Default: none."),
]
OptimizerDtype = Annotated[
    str | None, typer.Option(help="The dtype of the optimizer's moments. Default: float32.")
]
Stacked = Annotated[
    list[str] | None,
    typer.Option(
        help="Path of a stack of layers, for rules of single layers; repeatable. Beside those of "
        "the rule file."
    ),
]
Companions = Annotated[
    str | None,
    typer.Option(
        help=f"Leaves that follow others: {', '.join(TABLES)}. Beside those of the rule file."
    ),
]
OptimizerMemory = Annotated[
    str | None,
    typer.Option(
        help=f"The memory of the optimizer's moments: {', '.join(MEMORY_KINDS)}. Default: that of "
        "their parameters."
    ),
]
HeadDim = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Size of an attention head. Default: that of a q_norm or k_norm, if there is one.",
    ),
]
Hbm = Annotated[str | None, typer.Option(help="Memory of one device, such as 96GB or 80GiB.")]
HostMemory = Annotated[
    str | None, typer.Option(help="The host's memory for each of its devices, such as 256GB.")
]
FindingsFormat = Annotated[
    str, typer.Option("--format", help="Output format: text, json or github.")
]
FailOn = Annotated[
    str,
    typer.Option(help="Minimum level that makes the exit code 1: error, warning, info, never."),
]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a training step, to reckon its time.")
]
HardwareName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help=f"The devices: {', '.join(public_hardware())}; or a TOML file. Without --hbm, their "
        "memory counts.",
    ),
]
AxesOverDcn = Annotated[
    str | None, typer.Option(help="Mesh axes between slices or nodes, such as dp.")
]
ExpertsPerToken = Annotated[
    int | None, typer.Option(min=1, help="Experts of a layer that each token meets.")
]


def run() -> int:
    """Runs the command that the process's arguments name, and returns the exit code."""
    try:
        return app(standalone_mode=False) or 0
    except _UsageError as error:
        # Without arguments typer has shown the help already.
        if len(sys.argv) > 1:
            note(f"error: {printable(error.format_message())}; see --help")
        return FAILED


def _ended(command: Callable[_P, None]) -> Callable[_P, None]:
    """The command; whatever it raises becomes its exit code, which typer would not choose."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:
            raise
        except BaseException as error:
            raise typer.Exit(code_of(error)) from None

    return run


@app.command("plan")
@_ended
def plan_command(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
    gradients: Gradients = None,
    optimizer: Optimizer = None,
    optimizer_dtype: OptimizerDtype = None,
    optimizer_memory: OptimizerMemory = None,
    hbm: Hbm = None,
    host_memory: HostMemory = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    axes_over_dcn: AxesOverDcn = None,
    experts_per_token: ExpertsPerToken = None,
    format_: Annotated[str, typer.Option("--format", help="Output format: text or json.")] = "text",
    lock: Annotated[Path | None, typer.Option(help="Write a lockfile to this path.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML report to this path; it works offline.")
    ] = None,
) -> None:
    """Show the spec of every array, its bytes on each device, and the time of a step."""
    _one_of("--format", format_, ("text", "json"))
    step = _step(tokens, hardware, axes_over_dcn, experts_per_token)
    room = _room(hbm, host_memory, step["hardware"])
    counted = _counted(gradients, optimizer, optimizer_dtype, optimizer_memory)
    _check_targets({"--lock": lock, "--html": html}, (source, rules))
    planned = _load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        companions=_following(stacked, companions),
    )  # fmt: skip
    plan = planned.plan
    held = plan.bytes_per_device(**counted)
    time = None if tokens is None else plan.step_time(**step, **counted)
    # Made before anything is written: a failure leaves no file behind.
    report = None if html is None else _report(planned, room, counted, step)
    if lock is not None:
        plan.lock(lock)
    if html is not None and report is not None:
        write_text(html, report)
        note(printable(f"{html}: a report in one file, which works offline"))
    if format_ == "json":
        print(plan_json(plan, held, room, time))
        return
    show_plan(plan)
    print(held)
    if (fits := room.fits(held)) is not None:
        print(f"{'fits' if fits else 'DOES NOT FIT'} into {room}")
    if time is not None:
        print(time)


@app.command()
@_ended
def check(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
    format_: FindingsFormat = "text",
    fail_on: FailOn = "error",
    large: Annotated[
        str, typer.Option(help="Minimum bytes per device for a replicated leaf to be a warning.")
    ] = "16MiB",
    replicated: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of paths that are replicated on purpose; repeatable."),
    ] = None,
    optional_axes: Annotated[
        str | None, typer.Option(help="Axes of the rules that a mesh may lack, such as sp,ep.")
    ] = None,
    data_axes: Annotated[
        str | None, typer.Option(help="Mesh axes that shard only batches, and no leaf, such as dp.")
    ] = None,
    head_dim: HeadDim = None,
    level: Annotated[
        list[str] | None,
        typer.Option(help="Level for a kind of finding: dead=off, siblings=error; repeatable."),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Print a patch of the rule file instead: rules that decide nothing and the "
            "catch-all go, missing rules come. Exits with 1 if there is one.",
        ),
    ] = False,
) -> None:
    """Find mistakes in the rules. Exits with 1 for findings of at least the level --fail-on."""
    _check_findings_options(format_, fail_on)
    if fix and format_ != "text":
        raise ValueError("--fix prints a patch, so leave out --format")
    size, levels = byte_count(large), _levels(level or ())
    declared = Declared(
        replicated=tuple(replicated or ()),
        optional_axes=tuple(_names(optional_axes)),
        data_axes=tuple(_names(data_axes)),
    )
    planned = _load(
        source, rules, mesh, dialect, min_size,
        max_memory=max_memory, no_fallbacks=no_fallbacks,
        companions=_following(stacked, companions), declared=declared,
    )  # fmt: skip
    findings = planned.plan.check(
        **planned.rules.declared,
        large=size,
        head_dim=head_dim,
        levels=levels,
    )
    if not fix:
        places = rule_places(rules, len(planned.plan.rules)) if format_ == "github" else NOWHERE
        _report_findings(findings, format_, fail_on, places)
    elif patch := load_patch(rules, planned, dialect, head_dim):
        # As bytes: a file's line ends and characters, whatever those of standard output are.
        sys.stdout.buffer.write(patch.encode())
        if fail_on != "never":
            raise typer.Exit(1)
    elif findings.at_least("warning"):
        note(f"no rule is to be removed or added; check without --fix: {findings.summary}")
        _exit_for(findings, fail_on)


@app.command("verify")
@_ended
def verify_command(
    source: Annotated[
        str,
        typer.Argument(
            help="package.module:function, which returns (compiled, inputs, outputs) or (compiled, "
            "inputs), as shardrules.verify takes them."
        ),
    ],
    format_: FindingsFormat = "text",
    fail_on: FailOn = "error",
    large: Annotated[
        str, typer.Option(help="Minimum bytes on a device of a gathered array to be reported.")
    ] = "16MiB",
    hbm: Hbm = None,
) -> None:
    """Compare a compiled function with its plan. Exits as check does."""
    from shardrules._verifying.verify import verify

    _check_findings_options(format_, fail_on)
    sizes = byte_count(large), None if hbm is None else byte_count(hbm)
    arguments = load_object(source)
    if not isinstance(arguments, tuple) or len(arguments) not in (2, 3):
        raise FileError(
            f"{source}: this gives {shown(arguments)}; it must be (compiled, inputs, outputs) or "
            "(compiled, inputs)"
        )
    findings = verify(*arguments, large=sizes[0], hbm=sizes[1])
    _report_findings(findings, format_, fail_on)


@app.command()
@_ended
def explain(
    source: Source,
    path: Annotated[
        str,
        typer.Argument(
            help="The path of the array; or what several arrays that are alike have in common: a "
            "folded path, a glob such as 'layers/*/wq', or the end of their paths."
        ),
    ],
    rules: RulesFile,
    mesh: Mesh,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> None:
    """Explain the spec of one array: the rules that match it, and each correction."""
    planned = _load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        companions=_following(stacked, companions),
    )  # fmt: skip
    print(planned.plan.explain(path))


@app.command()
@_ended
def sweep(
    source: Source,
    rules: RulesFile,
    mesh: Annotated[
        list[str] | None, typer.Option("--mesh", "-m", help="A mesh to compare; repeatable.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Compare all meshes of this many devices.")
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(help="Axes of these meshes, such as fsdp,tp,sp=1, where sp has a fixed size."),
    ] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
    gradients: Gradients = None,
    optimizer: Optimizer = None,
    optimizer_dtype: OptimizerDtype = None,
    optimizer_memory: OptimizerMemory = None,
    hbm: Hbm = None,
    host_memory: HostMemory = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    axes_over_dcn: AxesOverDcn = None,
    experts_per_token: ExpertsPerToken = None,
    format_: Annotated[str, typer.Option("--format", help="Output format: text or json.")] = "text",
    most: Annotated[int, typer.Option(min=1, help="Maximum number of rows to show.")] = 20,
) -> None:
    """Compare meshes for one set of rules, the best first: by the time of a step, or by bytes."""
    _one_of("--format", format_, ("text", "json"))
    if mesh:
        _refuse("the meshes are those of --mesh", {"--devices": devices, "--axes": axes})
    elif devices is None or axes is None:
        raise ValueError("give meshes with --mesh, or --devices and --axes for all factorizations")
    step = _step(tokens, hardware, axes_over_dcn, experts_per_token)
    room = _room(hbm, host_memory, step["hardware"])
    counted = _counted(gradients, optimizer, optimizer_dtype, optimizer_memory)
    meshes = [parse_mesh(one) for one in mesh or ()]
    names, fixed = _axes(axes or "")
    first = mesh[0] if mesh else f"{names[0]}={devices}"
    plan = _load(
        source,
        rules,
        first,
        dialect,
        min_size,
        max_memory=max_memory,
        no_fallbacks=no_fallbacks,
        companions=_following(stacked, companions),
    ).plan  # fmt: skip
    with working("trying meshes"):
        found = plan.sweep(
            meshes or None,
            devices=devices,
            axes=names,
            fixed=fixed,
            hbm=room.hbm,
            host_memory=room.host,
            **step,
            **counted,
        )
    if format_ == "json":
        print(sweep_json(found))
    else:
        show_sweep(found, most)


@app.command("load")
@_ended
def load_command(
    source: Source,
    rules: RulesFile,
    mesh: Mesh,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Required: arrays are loaded in Python alone.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes that share the mesh's devices in their order.")
    ] = 1,
    bandwidth: Annotated[
        str, typer.Option(help="Bytes that a process reads in a second, such as 2GB.")
    ] = "2GB",
    in_flight: Annotated[
        str | None, typer.Option(help="Maximum bytes in flight, such as 512MiB. Default: 2GiB.")
    ] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> None:
    """Tell what shardrules.load would read: bytes per process and device, in flight, time."""
    if not dry_run:
        raise ValueError("give --dry-run; arrays are loaded in Python, by shardrules.load")
    speed = byte_count(bandwidth)
    if not speed:
        raise ValueError(f"--bandwidth is {bandwidth!r}; give bytes per second, such as 2GB")
    most = None if in_flight is None else byte_count(in_flight)
    plan = _load(
        source, rules, mesh, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        companions=_following(stacked, companions),
    ).plan  # fmt: skip
    print(forecast(plan._columns, processes=processes, in_flight=most, bandwidth=speed))


@app.command()
@_ended
def suggest(
    source: Source,
    mesh: Annotated[
        str | None, typer.Option("--mesh", "-m", help="The mesh, such as fsdp=64,tp=8.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Choose a mesh of this many devices.")
    ] = None,
    axes: Annotated[
        str | None,
        typer.Option(
            help="Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp, and ep if there are "
            "stacks of experts."
        ),
    ] = None,
    hbm: Hbm = None,
    tokens: Tokens = None,
    hardware: HardwareName = None,
    experts_per_token: ExpertsPerToken = None,
    optimizer: Optimizer = "adam",
    optimizer_dtype: OptimizerDtype = None,
    head_dim: HeadDim = None,
    like: Annotated[
        str | None,
        typer.Option(
            help="A rule file to mend: its rules that decide arrays stay, and others are added."
        ),
    ] = None,
    dialect: DialectName = None,
    max_memory: MaxMemory = _MAX_MEMORY,
    format_: Annotated[
        str, typer.Option("--format", help="Output format: toml, python, or text with reasons.")
    ] = "toml",
) -> None:
    """Write rules for a model. On standard output: shardrules suggest MODEL ... > rules.toml."""
    from shardrules._suggesting.suggest import suggest as suggested

    _one_of("--format", format_, ("toml", "python", "text"))
    if mesh is None and devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    if mesh is not None:
        unused = {"--devices": devices, "--axes": axes}
        _refuse("the mesh is that of --mesh", unused)
    counted = _counted(None, optimizer, optimizer_dtype, None)
    with working("reading"), memory_within(byte_count(max_memory)):
        model = load_model(source, dialect, like)
    found = suggested(
        model.tree,
        None if mesh is None else parse_mesh(mesh),
        devices=devices,
        axes=None if axes is None else _names(axes),
        hbm=None if hbm is None else byte_count(hbm),
        optimizer=counted.get("optimizer"),
        tokens=tokens,
        experts_per_token=experts_per_token,
        hardware=None if hardware is None else load_hardware(hardware),
        head_dim=head_dim,
        dialect=model.dialect,
        like=model.to_mend,
        names=model.names,
    )
    text = {"toml": found.to_toml, "python": found.to_python, "text": found.__str__}[format_]()
    print(text.rstrip("\n"))


@app.command()
@_ended
def diff(
    before: Annotated[str, typer.Argument(help="A lockfile or a model.")],
    after: Annotated[str, typer.Argument(help="A lockfile or a model.")],
    rules: Annotated[str | None, typer.Option("--rules", "-r", help="Rules for models.")] = None,
    mesh: Annotated[str | None, typer.Option("--mesh", "-m", help="Mesh for models.")] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = _MAX_MEMORY,
    no_fallbacks: NoFallbacks = False,
    stacked: Stacked = None,
    companions: Companions = None,
) -> None:
    """Show the differences between two plans. Exits with 1 if there are any."""
    if is_lock(before) and is_lock(after):
        given = {
            "--rules": rules,
            "--mesh": mesh,
            "--dialect": dialect,
            "--min-size": min_size or None,
            "--no-fallbacks": no_fallbacks or None,
            "--stacked": stacked or None,
            "--companions": companions,
        }
        _refuse("both sides are locks, which have their own rules and mesh", given)
    options = {
        "dialect": dialect,
        "min_size": min_size,
        "no_fallbacks": no_fallbacks,
        "companions": _following(stacked, companions),
    }
    with working("reading"), memory_within(byte_count(max_memory)):
        sides = [load_side(text, rules, mesh, **options) for text in (before, after)]
    _tell_fallbacks(dict.fromkeys(line for _, fallbacks in sides for line in fallbacks))
    found = sides[0][0].diff(sides[1][0])
    print(found)
    if found:
        raise typer.Exit(1)


@app.command()
@_ended
def demo() -> None:
    """Plan DeepSeek-V3 with real rules: the finding, the fix, the bytes, the report."""
    from shardrules.demo import main

    raise typer.Exit(main())


def _axes(text: str) -> tuple[list[str], dict[str, int]]:
    """The axes of fsdp,tp,sp=1 without a size, and {axis: size} of the others."""
    parts = _names(text)
    names = [part for part in parts if "=" not in part]
    fixed = ",".join(part for part in parts if "=" in part)
    if text and not names:
        raise ValueError(f"--axes {text!r}: give at least one axis without a size")
    return names, parse_mesh(fixed) if fixed else {}


def _names(text: str | None) -> list[str]:
    """The parts of a text with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _following(stacked: list[str] | None, companions: str | None) -> dict[str, list[str]]:
    """The companions of the command line, by the keys of a rule file."""
    return {"stacked": stacked or [], "companions": _names(companions)}


def _load(source: str, *args: Any, max_memory: str, **options: Any) -> Planned:
    with working(f"reading {source}"), memory_within(byte_count(max_memory)):
        planned = load_plan(source, *args, **options)
    _tell_fallbacks(planned.fallbacks)
    return planned


def _tell_fallbacks(fallbacks: Collection[str]) -> None:
    """Notes for the patterns that cost more than the automaton, without a bound on time."""
    lines = [f"note: `re`, not the automaton, evaluates {one}" for one in fallbacks]
    for line in lines[:_MOST_FALLBACKS] + and_more(len(lines), _MOST_FALLBACKS, "pattern"):
        note(printable(line))


def _report(planned: Planned, room: Room, counted: dict[str, Any], step: dict[str, Any]) -> str:
    """The HTML report; its numbers include the gradients and moments in `counted`."""
    plan = planned.plan
    findings = plan.check(**planned.rules.declared)
    given = {"hbm": room.hbm, "host_memory": room.host, **counted}
    ones = {axis: size for axis, size in plan.axis_sizes.items() if size == 1}
    with working("trying meshes"):
        found = plan.sweep(fixed=ones, **step, **given) if plan.devices > 1 else None
        suggestion = _suggestion(planned)
    chart = found and Sweep(found[:_MOST_BARS])
    return plan.to_html(
        findings=findings, sweep=chart, title=planned.model, suggestion=suggestion, **given
    )


def _suggestion(planned: Planned) -> Suggestion | None:
    """Rules that `suggest` writes for the same arrays and mesh; None, with a note, if it cannot."""
    from shardrules._suggesting.suggest import suggest as suggested

    rules = planned.rules.rules
    if isinstance(rules, LogicalRules):
        return None
    try:
        return suggested(planned.plan, dialect=rules.dialect)
    except ValueError as error:
        note(printable(f"note: the report has no suggested rules: {error}"))
        return None


def _check_targets(written: Mapping[str, Path | None], read: Iterable[str]) -> None:
    """Checks that no output replaces an input or another output."""
    taken = {os.path.realpath(name): name for name in read}
    for option, path in written.items():
        if path is None:
            continue
        name = taken.setdefault(os.path.realpath(path), option)
        if name != option:
            raise ValueError(f"{option} {path} would replace {name}; give it another name")


def _gradients(text: str | None) -> Any:
    return True if text == "same" else text if text is None else numpy_name(text)


def _moments(optimizer: str | None, dtype: str | None) -> tuple[str, ...] | None:
    if optimizer is not None:
        _one_of("--optimizer", optimizer, tuple(MOMENTS))
    if not MOMENTS.get(optimizer or ""):
        _refuse("--optimizer names no optimizer with moments", {"--optimizer-dtype": dtype})
    return None if optimizer is None else (numpy_name(dtype or "float32"),) * MOMENTS[optimizer]


def _counted(
    gradients: str | None, optimizer: str | None, dtype: str | None, memory: str | None
) -> dict[str, Any]:
    """The arguments of `Plan.bytes_per_device` that these options mean."""
    moments = _moments(optimizer, dtype)
    if memory is not None:
        _one_of("--optimizer-memory", memory, MEMORY_KINDS)
    if not moments:
        _refuse("--optimizer names no optimizer with moments", {"--optimizer-memory": memory})
    return {
        "gradients": _gradients(gradients),
        "optimizer": moments,
        "optimizer_memory_kind": memory,
    }


def _step(
    tokens: int | None, hardware: str | None, over_dcn: str | None, experts_per_token: int | None
) -> dict[str, Any]:
    """The arguments of `Plan.sweep` for the time of a step that these options mean."""
    device = None if hardware is None else load_hardware(hardware)
    if tokens is None:
        given = {"--axes-over-dcn": over_dcn, "--experts-per-token": experts_per_token}
        _refuse("without --tokens there is no time of a step", given)
        return {"hardware": device}
    if device is None:
        raise ValueError("--tokens: the time of a step needs --hardware, such as v5p")
    return {
        "tokens": tokens,
        "hardware": device,
        "axes_over_dcn": tuple(_names(over_dcn)),
        "schedule": {"experts_per_token": experts_per_token},
    }


def _room(hbm: str | None, host_memory: str | None, hardware: Hardware | None) -> Room:
    own = _memory("--hbm", "a device", hbm)
    if own is None and hardware is not None:
        own = hardware.memory_bytes
    return Room(own, _memory("--host-memory", "a host", host_memory))


def _memory(option: str, of: str, text: str | None) -> int | None:
    memory = None if text is None else byte_count(text)
    if memory == 0:
        raise ValueError(f"{option} is {text!r}; {of} has memory, such as 96GB")
    return memory


def _levels(texts: Iterable[str]) -> dict[Any, Any]:
    """Levels by kind; that these exist is for `Plan.check` to say."""
    levels: dict[str, str] = {}
    for text in texts:
        kind, equals, level = text.partition("=")
        if not equals:
            raise ValueError(
                f"--level {text!r}: write a kind of finding and its level, as dead=off"
            )
        if levels.setdefault(kind, level) != level:
            raise ValueError(f"--level gives {kind!r} two levels, {levels[kind]!r} and {level!r}")
    return levels


def _refuse(why: str, options: Mapping[str, object]) -> None:
    """Checks that none of these options is given, since they would be ignored."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{why}, so leave out {', '.join(given)}")


def _check_findings_options(format_: str, fail_on: str) -> None:
    _one_of("--format", format_, ("text", "json", "github"))
    _one_of("--fail-on", fail_on, (*LEVELS, "never"))


def _report_findings(
    findings: Findings, format_: str, fail_on: str, places: RulePlaces = NOWHERE
) -> None:
    """Shows findings, and exits with 1 if there are any of at least the level."""
    if format_ == "json":
        print(findings.to_json())
    elif format_ == "github":
        print(findings.to_github(*places))
    else:
        show_findings(findings)
    _exit_for(findings, fail_on)


def _exit_for(findings: Findings, fail_on: str) -> None:
    """Exits with 1 if there are findings of at least the level."""
    if fail_on != "never" and findings.at_least(cast(Level, fail_on)):
        raise typer.Exit(1)


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(choices)}")
