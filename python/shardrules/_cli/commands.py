"""Commands of `shardrules`: for each a function of its options, with their names and an example.

Functions import what they need, so that the help of all commands costs no more than their names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace as Args
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.atomic_write import write_bytes, write_text
from shardrules._base.io import FileError
from shardrules._base.text import byte_count, printable_json
from shardrules._cli.options import GROUPS
from shardrules._cli.process import hint, interruptible, working

if TYPE_CHECKING:
    from shardrules._plan.findings import Findings
    from shardrules._program.program import Program
    from shardrules._program.topologies.topology import Topology
    from shardrules._program.verify.prove import Proof

Function = Callable[[Args], int | None]


class Entry(NamedTuple):
    """Command before click knows it."""

    function: Function
    example: str
    options: tuple[str, ...]
    """Names in `GROUPS`."""
    changes: dict[str, dict[str, Any]]
    """Attributes of options that differ in this command."""


COMMANDS: Final[dict[str, Entry]] = {}
_PLAN: Final = "source rules mesh dialect stacked companions min_size max_memory no_fallbacks"
_TRAINING: Final = "gradients optimizer optimizer_dtype optimizer_memory hbm host_memory"
_NEEDED: Final = {"required": True}
_OR_LOCK: Final = {
    "help": f"{GROUPS['Arguments']['source'][1]} Or a lock, which has its rules and mesh."
}
_RULES_OF_STEP: Final = {"help": "Rules that the function takes behind the mesh."}
_FINDINGS: Final = {"usage": "--format {text,json,github}"}


def _command(example: str, *options: str, **changes: dict[str, Any]) -> Callable[[Function], None]:
    def register(function: Function) -> None:
        names = (*" ".join(options).split(), "quiet", "color")
        COMMANDS[function.__name__] = Entry(function, example, names, changes)

    return register


@_command(
    "model.json -r rules.toml -m fsdp=8,tp=4 --optimizer adam --hbm 96GB",
    _PLAN, _TRAINING, "must_fit format lock html manifest", source=_OR_LOCK,
)  # fmt: skip
def plan(args: Args) -> int:
    """Show the spec of every array, and its bytes on each device.

    Exits with 1 if the bytes do not fit and --must-fit is given.
    """
    from shardrules._cli import inputs, show
    from shardrules._plan.files.manifest import manifest_text, write_packed
    from shardrules._plan.show import plan_json

    room, training = inputs.room(args), inputs.training(args)
    if args.must_fit:
        inputs.check_room(room)
    targets = {"--lock": args.lock, "--html": args.html, "--manifest": args.manifest}
    _check_targets(targets, filter(None, (args.source, args.rules)))
    planned = inputs.load_model_plan(args)
    plan = planned.plan
    memory = plan.bytes_per_device(**training)
    # Made before anything is written: a failure leaves no file behind.
    report = args.html and show.report(args, planned, room, training)
    shapes = args.manifest and manifest_text(plan, planned.model)
    if args.lock:
        plan.lock(args.lock)
    if shapes:
        write_packed(args.manifest, shapes)
    if report:
        write_text(Path(args.html), report)
        hint(args, f"{args.html}: a report in one file, which works offline")
    fits = room.fits(memory)
    if args.format == "json":
        print(plan_json(plan, memory, room))
    else:
        show.show_plan(plan)
        print(memory)
        if fits is not None:
            print(f"{'fits' if fits else 'DOES NOT FIT'} into {room}")
    return 1 if args.must_fit and not fits else 0


def _check_targets(outputs: Mapping[str, str | None], sources: Iterable[str]) -> None:
    """Check that no output replaces an input or another output."""
    names = {os.path.realpath(source): source for source in sources}
    for option, path in outputs.items():
        if path is not None:
            name = names.setdefault(os.path.realpath(path), option)
            if name != option:
                raise ValueError(f"{option} {path} would replace {name}; give it another name")


@_command(
    "model.json -r rules.toml -m fsdp=8,tp=4 --fail-on warning",
    _PLAN, _TRAINING, "must_fit head_dim fail_on large replicated optional_axes data_axes level",
    "fix format project",
    source=_OR_LOCK,
    format=_FINDINGS,
)  # fmt: skip
def check(args: Args) -> int:
    """Find mistakes in the rules; without SOURCE, in all jobs of the project file.

    Exits with 1 for findings of at least the level --fail-on. With --must-fit, one of them is that
    parameters, gradients and optimizer do not fit together; without it, --hbm is of the parameters.
    """
    from shardrules._cli import inputs, show

    if args.fix and args.format != "text":
        raise ValueError("--fix prints rules, so leave out --format")
    if args.fix and args.rules is None:
        raise ValueError("--fix adds to a rule file, so give a model, and --rules")
    large, levels = byte_count(args.large), inputs.levels(args.level)
    room, training = inputs.room(args), inputs.training(args)
    if args.must_fit:
        inputs.check_room(room)
    else:
        why = "without --must-fit, only the parameters are counted"
        inputs.refuse(why, args, "gradients", "optimizer", "host_memory")
    planned = inputs.load_model_plan(args)
    findings = planned.plan.check(
        **planned.rules.declared, large=large, head_dim=args.head_dim, hbm=room.hbm,
        levels=levels,
    )  # fmt: skip
    if args.must_fit:
        findings = inputs.must_fit(findings, planned.plan, room, training)
    if args.fix:
        return show.show_fix(args, planned, findings)
    return show.show_findings(args, findings, planned)


def _check_lock(args: Args) -> None:
    """Check the options of a lock before anything takes time."""
    if args.update_lock and args.lock is None:
        raise ValueError("--update-lock writes the file of --lock, so give --lock as well")
    if args.lock and not args.update_lock and not Path(args.lock).exists():
        raise FileError(f"{args.lock}: no such file; write it with --update-lock")


def _with_lock(args: Args, program: Program, findings: Findings) -> Findings:
    """Write the lock of a program, or add what has grown since it was written."""
    from shardrules._plan.findings import Findings

    if args.update_lock:
        program.lock(args.lock)
        hint(args, f"{args.lock}: what the step sends and needs, for later runs to compare with")
        return findings
    grown = program.diff(Path(args.lock))
    return Findings([*findings, *grown], f"{findings.scope}; {grown.scope}")


@_command(
    "my_package.train:step_on --on v5p:8x8x8 --mesh fsdp=64,tp=8 --budget peak=90GB",
    "function on slices mesh axis_types rules time large budget hbm fail_on format lock",
    "update_lock html project",
    function={
        "help": "package.module:function, which takes the mesh, and the rules of --rules, and "
        "returns (step, arguments, outputs) or (step, arguments), as shardrules.prove takes them."
    },
    on={
        "help": f"{GROUPS['Arguments']['on'][1]} Without it XLA for CPU is asked: a TPU's "
        "partitioner may choose otherwise.",
        "required": False,
    },
    mesh={"help": "Devices per mesh axis, such as fsdp=64,tp=8.", **_NEEDED},
    rules=_RULES_OF_STEP,
    hbm={
        "help": "Memory that the step may need on a device, such as 90GB. Default: that of the "
        "devices of --on."
    },
    large={"help": "Minimum bytes on a device of a gathered array to be reported."},
    format=_FINDINGS,
    lock={"help": "Compare the bytes that are sent, and the peak, with those in this file."},
)
def prove(args: Args) -> int:
    """Ask the compiler for TPUs or GPUs that need not be there what it makes of a step.

    Without FUNCTION, it does so for all jobs of the project file that have one.
    Exits with 1 for findings of at least the level --fail-on, and if the step does not fit.
    """
    from shardrules._cli import inputs, show
    from shardrules._plan.plan import Plan
    from shardrules._program.refusal import OutOfMemory
    from shardrules._program.step_seconds import ProgramTime
    from shardrules._program.verify.prove import head_of, prove, time_shown

    _check_lock(args)
    _check_targets({"--lock": args.lock, "--html": args.html}, ())
    budget = inputs.budget_texts(args.budget)
    large, hbm = byte_count(args.large), inputs.memory("--hbm", "a device", args.hbm)
    mesh = inputs.mesh_of_step(args)
    step, arguments, *outputs = inputs.step_on(args.function, mesh, args.rules)
    plans = [argument for argument in arguments if isinstance(argument, Plan)]
    if args.html and not plans:
        raise ValueError("--html: none of the arguments is a Plan, of which the report is")

    def ask() -> Proof:
        return prove(
            step, *arguments, on=mesh, outputs=outputs[0] if outputs else None,
            large=large, hbm=hbm, budget=budget, time=args.time,
        )  # fmt: skip

    what = f"asking the compiler for {args.on or 'CPUs'}"
    try:
        if args.time:
            proof = interruptible(args, what, ask)
        else:
            with working(args, what):
                proof = ask()
    except OutOfMemory as refusal:
        print(f"does not fit: {refusal}")
        return 1
    if args.lock:
        proof = proof._replace(findings=_with_lock(args, proof.program, proof.findings))
    if args.html:
        plan = plans[0].on_mesh(mesh)
        sections: list[Any] = [proof.findings, proof.program]
        if isinstance(proof.time, ProgramTime):
            sections.append(proof.time)
        page = plan.to_html(title=args.function, sections=sections)
        write_text(Path(args.html), page)
        hint(args, f"{args.html}: a report in one file, which works offline")
    if args.format == "json":
        print(printable_json(proof.to_json()))
        return show.exit_code(args, proof.findings)
    if args.format == "text" and not args.quiet:
        print(head_of(proof), *proof.notes, proof.program, time_shown(proof), sep="\n")
    return show.show_findings(args, proof.findings)


@_command(
    "my_package.train:step_on --mesh fsdp=64,tp=8",
    "function array mesh rules format",
    function={
        "help": "package.module:function, which takes the mesh, here one without devices, and the "
        "rules of --rules, and returns (step, arguments), as shardrules.trace takes them, or "
        "further outputs."
    },
    mesh={"help": "Devices per mesh axis, such as fsdp=64,tp=8.", **_NEEDED},
    rules=_RULES_OF_STEP,
)
def step(args: Args) -> None:
    """Show what a step does before it is compiled: dimensions, their roles, and FLOPs by line."""
    from shardrules._base.text import printable_json
    from shardrules._cli import inputs

    traced = inputs.trace_on(args, args.function, args.mesh, args.rules)
    if args.array:
        print(traced.explain(args.array))
    else:
        print(printable_json(traced.to_json()) if args.format == "json" else traced)


@_command(
    "my_package.train:step_on --on v5p:8x8x8 > rules.toml",
    "function on slices mesh hardware axes rules hbm time_limit format html",
    function={
        "help": "package.module:function, which takes the mesh, here one without devices, and the "
        "rules of --rules, and returns (step, arguments), as shardrules.trace takes them, or "
        "further outputs."
    },
    on={
        "help": "The devices: v5p:8x8x8, v5e:4x4, v6e:16x16, v4:4x4x4, tpu7x:4x4x4, or as clouds "
        "have it v5p-1024; or GPUs of a host, and hosts: h100:8x16, h200:8, b200:8x2, gb200:72x2. "
        "Or give --mesh and --hardware, which need no compiler.",
        "required": False,
    },
    mesh={"help": "The mesh, such as fsdp=64,tp=8. Default: the best of those that exist there."},
    axes={"help": "Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp."},
    rules={"help": "Rules that the function takes; the solution does not need any."},
    hbm={"help": "Memory of one device, such as 96GB. Default: that of the devices."},
    format={"usage": "--format {toml,python,text}", "default": "toml",
            "help": "Output format; text has the choices, and what others cost."},
)  # fmt: skip
def solve(args: Args) -> None:
    """Find the sharding of a step that takes least time, and write its rules on standard output.

    The lines of with_sharding_constraint follow as comments; time, bound and gap go to standard
    error.
    """
    from shardrules._cli import inputs
    from shardrules._cli.advice import constraint_lines, solved, solver_notes

    _check_targets({"--html": args.html}, ())
    hbm = inputs.memory("--hbm", "a device", args.hbm)
    solution = solved(args, args.function, args.rules)
    suggestion = solution._suggestion
    if args.format == "text":
        print(solution, suggestion, *solution.activations, sep="\n")
    else:
        text = suggestion.to_toml() if args.format == "toml" else suggestion.to_python()
        print(text.rstrip("\n"), *constraint_lines(solution), sep="\n")
        hint(args, solution.summary)
    for note in solver_notes(solution):
        hint(args, note)
    if args.html:
        page = suggestion.plan.to_html(
            title=args.function, hbm=hbm, sections=[suggestion, solution]
        )
        write_text(Path(args.html), page)
        hint(args, f"{args.html}: a report in one file, which works offline")


@_command(
    "model.json layers/0/wq/kernel -r rules.toml -m fsdp=8,tp=4",
    _PLAN.replace(" ", " path ", 1),
    source=_OR_LOCK,
)
def explain(args: Args) -> None:
    """Explain the spec of one array: the rules that match it, and each correction."""
    from shardrules._cli import inputs

    print(inputs.load_model_plan(args).plan.explain(args.path))


@_command(
    "train:step_on --on v5p:8x8x8 --axes fsdp,tp --try batch=256,512",
    _PLAN, "on slices tries devices axes", _TRAINING, "format most",
    source={
        "help": "With --rules a model, as for plan. Without, a step: package.module:function, "
        "which takes the mesh, and the choices of --try as keywords, and returns what it does for "
        "prove."
    },
    rules={"help": "The rules of a model."},
    mesh={"usage": "-m --mesh MESH...", "help": "A mesh to compare; of a model repeatable."},
    on={"required": False, "help": "Compare the meshes that exist on these TPUs or GPUs, such as "
        "v5p:8x8x8, with the axes of --axes."},
    devices={"help": "Compare all meshes of this many devices; of a step by XLA for CPU."},
    axes={"help": "Axes of these meshes, such as fsdp,tp; of a model also sp=1, of fixed size."},
)  # fmt: skip
def sweep(args: Args) -> int:
    """Compare meshes: of a model by bytes, or of a step by what the compiler makes of it.

    The best is the first. Exits with 1 if nothing of a step fits, as far as that is known.
    """
    from shardrules._base.mesh_sizes import parse_mesh
    from shardrules._cli import inputs, show
    from shardrules._program.topologies.topology import Topology

    if args.mesh:
        inputs.refuse("the meshes are those of --mesh", args, "on", "devices", "axes")
    elif (args.devices is None) == (args.on is None) or args.axes is None:
        raise ValueError(
            "give meshes with --mesh; or --devices and --axes for all factorizations, or --on and "
            "--axes for those of a topology"
        )
    meshes = [parse_mesh(mesh) for mesh in args.mesh]
    axes, fixed = inputs.sweep_axes(args.axes or "")
    topology = None if args.on is None else Topology(args.on, args.slices)
    if fixed and (args.on or args.rules is None):
        raise ValueError("--axes: the meshes of --on, and those of a step, have no fixed sizes")
    if args.rules is None:
        return _sweep_of_step(args, meshes, topology, axes)
    if args.tries:
        raise ValueError("with --rules SOURCE is a model, which takes no choices: leave out --try")
    sizes = dict.fromkeys(axes, 1) | fixed
    first = args.mesh[0] if meshes else ",".join(f"{axis}={size}" for axis, size in sizes.items())
    room, training = inputs.room(args), inputs.training(args)
    plan = inputs.load_model_plan(args, mesh=first).plan
    with working(args, "trying meshes"):
        rows = plan.sweep(
            meshes or None, devices=topology or args.devices, axes=None if meshes else axes,
            fixed=fixed or None,
            hbm=room.hbm, host_memory=room.host, **training,
        )  # fmt: skip
    if args.format == "json":
        print(rows.to_json())
    else:
        show.show_sweep(rows, args.most)
    return 0


def _sweep_of_step(
    args: Args, meshes: list[dict[str, int]], topology: Topology | None, axes: list[str]
) -> int:
    """Ask the compiler for each mesh and each choice of --try."""
    from shardrules._cli import inputs, show
    from shardrules._plan.files.modules import find_object, is_module_form
    from shardrules._program.verify.sweep import swept

    if not is_module_form(args.source):
        raise ValueError(
            f"{args.source}: a model needs --rules; without them SOURCE is a step, "
            "package.module:function"
        )
    why = "without --rules SOURCE is a step, of which the compiler is asked"
    options = "dialect stacked companions min_size no_fallbacks gradients optimizer"
    inputs.refuse(why, args, *options.split(), "optimizer_dtype", "optimizer_memory", "host_memory")
    if len(meshes) > 1:
        raise ValueError("--mesh: of a step give one, or --on or --devices for several")
    on: Any = meshes[0] if meshes else topology or args.devices
    with working(args, "asking the compiler") as show_progress:
        rows = swept(
            find_object(args.source), on, axes or None, inputs.choices(args.tries),
            hbm=inputs.memory("--hbm", "a device", args.hbm), show=show_progress,
        )  # fmt: skip
    if args.format == "json":
        print(rows.to_json())
    else:
        show.show_step_sweep(rows, args.most)
    if not rows.is_whole:
        raise KeyboardInterrupt
    return 1 if not any(row.fits or (row.fits is None and row.peak) for row in rows) else 0


@_command(
    "model.json --devices 512 --hbm 96GB > rules.toml",
    "source mesh devices axes like dialect head_dim max_memory optimizer optimizer_dtype hbm",
    "format",
    mesh={"help": "The mesh, such as fsdp=64,tp=8."},
    optimizer={"default": "adam"},
    format={"usage": "--format {toml,python,text}", "default": "toml",
            "help": "Output format; text has the reasons."},
)  # fmt: skip
def suggest(args: Args) -> int:
    """Write rules for a model on standard output.

    Exits with 1 if check warns of them.
    """
    from shardrules._cli import inputs
    from shardrules._cli.advice import suggested

    if args.mesh is not None:
        inputs.refuse("the mesh is that of --mesh", args, "devices", "axes")
    suggestion = suggested(args)
    formats = {"toml": suggestion.to_toml, "python": suggestion.to_python}
    print(formats.get(args.format, suggestion.__str__)().rstrip("\n"))
    for warning in suggestion.warnings if args.format != "text" else ():
        for line in str(warning).splitlines():
            hint(args, line)
    return 1 if suggestion.warnings else 0


@_command("model.json > shapes.json.gz", "source dialect max_memory output check")
def manifest(args: Args) -> int:
    """Write the shapes of a model, as a model for places without its code.

    Without --output it goes to standard output, gzipped unless that is a terminal. With --check
    nothing is written: exits with 1 if the manifest there is not of this model.
    """
    from shardrules._cli import inputs
    from shardrules._plan.files.manifest import manifest_text, packed, write_packed

    if args.check:
        inputs.refuse("--check writes nothing", args, "output")
        before, after = (inputs.load_arrays(args, it)[0] for it in (args.check, args.source))
        differences = before.diff(after)
        if differences:
            print(f"{args.check} is old: shardrules manifest {args.source} -o {args.check}")
        print(differences)
        return 1 if differences else 0
    _check_targets({"--output": args.output}, [args.source])
    text = manifest_text(*inputs.load_arrays(args, args.source))
    if args.output:
        write_packed(args.output, text)
    elif sys.stdout.isatty():
        print(text, end="")
    else:
        sys.stdout.buffer.write(packed(text))
    return 0


@_command(
    "model.json --devices 512 --hbm 96GB",
    "source on slices mesh devices axes dialect head_dim max_memory optimizer optimizer_dtype hbm",
    source={
        "help": "The model: a file or package.module:function, as for plan. Or with --on a step: "
        "package.module:function, which takes the mesh and rules, as for prove."
    },
    on={"required": False, "help": "The devices of a step, such as v5p:8x8x8, as for prove."},
    mesh={"help": "The mesh, such as fsdp=64,tp=8. Of a step the default is the best there."},
    optimizer={"default": "adam"},
)
def init(args: Args) -> int:
    """Write a project file, shardrules.toml, and rules, rules.toml, for a model or a step.

    The rules of a model are those of suggest; those of a step are those of solve, and its model is
    written too, model.json.gz. Replaces no file. Exits with 1 if check warns of the rules.
    """
    from shardrules._cli.advice import project_of

    project = project_of(args)
    for path, content in project.files.items():
        write_bytes(path, content)
        print(f"wrote {path}")
    commands = "shardrules check checks" if args.on is None else "shardrules check and prove run"
    print(f"{commands} all jobs of the project file")
    for note in project.notes:
        hint(args, note)
    return 1 if project.has_warnings else 0


@_command(
    "plan.lock model.json -r rules.toml",
    "before after", _PLAN.removeprefix("source "), "fail_on_change tolerance format project",
    format={"usage": "--format {text,github}"},
    rules={"help": "Rules for models."},
    mesh={"help": "Mesh for models. Default: that of a lock."},
)  # fmt: skip
def diff(args: Args) -> int:
    """Show the differences between two plans.

    Without BEFORE, of all jobs of the project file that have one: between it and their models.
    Exits with 1 if there are any, or with --fail-on grown, if the plan needs more memory.
    """
    from shardrules._cli import inputs, show

    tolerance = inputs.share("--tolerance", args.tolerance)
    if tolerance and args.fail_on_change != "grown":
        raise ValueError("--tolerance is of --fail-on grown: give it, too")
    before, after = inputs.load_sides(args)
    differences = before.diff(after)
    if differences and args.format == "github":
        print(show.annotation(args, str(differences).splitlines()))
    else:
        print(differences)
    if args.fail_on_change == "grown":
        sizes = (differences.bytes, differences.host_bytes)
        return 1 if any(after > before * (1 + tolerance) for before, after in sizes) else 0
    return 1 if differences and args.fail_on_change == "any" else 0
