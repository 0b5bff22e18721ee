"""Rules from the options of a command line: of `suggest` and `solve`, and the files of `init`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Args
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._base.io import FileError
from shardrules._base.mesh_sizes import parse_mesh
from shardrules._base.text import mesh_shown
from shardrules._cli import inputs
from shardrules._cli.process import hint, working
from shardrules._plan.files.manifest import manifest_text, packed
from shardrules._plan.files.modules import find_object, is_module_form, takes
from shardrules._plan.files.project import OWN_FILE, find_table, project_text, stranger
from shardrules._plan.suggest.suggest import suggest
from shardrules._plan.suggest.suggestion import Suggestion
from shardrules._program.topologies.topology import Topology
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._program.solve.solution import Solution

_RULES: Final = "rules.toml"
_MODEL: Final = "model.json.gz"


class NewProject(NamedTuple):
    """What `init` writes."""

    files: dict[str, bytes]
    """{name: content}."""
    notes: tuple[str, ...]
    has_warnings: bool


def suggested(args: Args) -> Suggestion:
    """Suggest rules for the model of a command line."""
    _check_mesh(args)
    moments = inputs.moments(args)
    tree, about = inputs.load_model(args)
    return suggest(
        tree,
        None if args.mesh is None else parse_mesh(args.mesh),
        devices=args.devices,
        axes=None if args.axes is None else inputs.names(args.axes),
        hbm=inputs.memory("--hbm", "a device", args.hbm),
        optimizer=moments,
        head_dim=args.head_dim,
        **about,
    )


def _check_mesh(args: Args) -> None:
    if args.mesh is None and args.devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    if args.mesh is not None and args.devices is not None:
        raise ValueError("--devices has a mesh chosen, and --mesh gives one: leave out either")


def solved(args: Args, function: str, rules: Any = None) -> Solution:
    """Solve a step for the devices of a command line."""
    from shardrules._program.solve.meshes import progress_shown
    from shardrules._program.solve.solution import solve

    hardware = getattr(args, "hardware", None)
    sizes = None if args.mesh is None else parse_mesh(args.mesh)
    if sizes is not None:
        inputs.refuse("the mesh is that of --mesh", args, "axes")
    if args.on is not None:
        inputs.refuse("--on says the devices", args, "hardware")
        on: Any = Topology(args.on, args.slices)
        hardware = on.hardware
    elif sizes is None or hardware is None:
        raise ValueError("give the devices: --on v5p:8x8x8, or --mesh and --hardware")
    else:
        on, hardware = sizes, inputs.load_hardware(hardware)
    if sizes is None:
        meshes = on.meshes(("fsdp", "tp") if args.axes is None else inputs.names(args.axes))
        sizes = meshes[len(meshes) // 2]  # as the function may not take one whose axis is 1
    elif args.on is not None:
        try:
            on = on.mesh(sizes)  # what does not exist there is an error
        except ImportError as error:
            hint(args, f"links count as whole, since {error}")
            on = sizes
    step = inputs.trace_on(args, function, mesh_shown(sizes), rules)
    if step.plan is None:
        raise ValueError(
            f"{function}: none of the arguments is a Plan: give shardrules.plan of the "
            "parameters, whose rules the solution replaces"
        )
    with (
        working(args, f"solving for {args.on or args.mesh}; Ctrl-C takes the best so far") as show,
        progress_shown(show),
    ):
        try:
            return solve(
                step, on, hardware=hardware, hbm=inputs.memory("--hbm", "a device", args.hbm),
                time_limit=getattr(args, "time_limit", None),
            )  # fmt: skip
        except ValueError as error:  # of several lines, where nothing fits
            raise FileError(*str(error).splitlines()) from None


def constraint_lines(solution: Solution) -> list[str]:
    """Return the lines of constraints as comments of a rule file."""
    return [f"# {line}" for line in solution.activations]


def solver_notes(solution: Solution) -> Iterator[str]:
    """Yield what is to be told beside the rules of a solution."""
    for text in solution.unconstrained:
        yield f"not constrained: {text}"


def project_of(args: Args) -> NewProject:
    """Make the files of `init`: the project file, rules, and of a step its model."""
    here = Path.cwd()
    if (project := find_table(here)) and not stranger(project[0], here):
        raise ValueError(f"{project[0]}: the project has this file; add a job to it")
    names = (OWN_FILE, _RULES) if args.on is None else (OWN_FILE, _RULES, _MODEL)
    if there := next(filter(os.path.lexists, names), None):
        raise ValueError(f"{there} exists, and is not replaced; rename it")
    job = {"hbm": args.hbm} if args.hbm else {}
    if args.on is not None:
        return _project_of_step(args, job)
    if args.slices > 1:
        raise ValueError("--slices: without --on there are none; leave it out")
    _check_mesh(args)
    if is_module_form(args.source) and not _takes(find_object(args.source)):
        raise FileError(
            f"{args.source}: it takes arguments, as a step does; for a step give --on v5p:8x8x8, "
            "for a model a function without arguments"
        )
    suggestion = suggested(args)
    job = {"model": args.source, "rules": _RULES, "mesh": mesh_shown(suggestion.mesh), **job}
    files = {_RULES: suggestion.to_toml(), OWN_FILE: project_text(job)}
    warnings = tuple(map(str, suggestion.warnings))
    return NewProject({name: files[name].encode() for name in files}, warnings, bool(warnings))


def _project_of_step(args: Args, job: dict[str, str]) -> NewProject:
    """Make the files for a step: `solve` decides, and prove is to compile it under these rules."""
    inputs.refuse("--on says the devices", args, "devices")
    inputs.refuse("the step says it", args, "dialect", "head_dim", "optimizer_dtype")
    solution = solved(args, args.source, _rules_of_step(args.source))
    suggestion = solution._suggestion
    plan = suggestion.plan
    job = {
        "model": _MODEL, "function": args.source, "rules": _RULES, "on": args.on,
        **({"slices": str(args.slices)} if args.slices > 1 else {}),
        "mesh": mesh_shown(plan.axis_sizes), **job,
    }  # fmt: skip
    rules = "\n".join([suggestion.to_toml().rstrip("\n"), *constraint_lines(solution), ""])
    files = {
        _MODEL: packed(manifest_text(plan, args.source)),
        _RULES: rules.encode(),
        OWN_FILE: project_text(job).encode(),
    }
    warnings = tuple(map(str, suggestion.warnings))
    notes = (solution.summary, *solver_notes(solution), *warnings)
    return NewProject(files, notes, bool(warnings))


def _rules_of_step(source: str) -> Rules | None:
    """Return the rules that a step is traced with before it has some; None if it has a default.

    Raises:
        FileError: It does not take rules: then prove would not compile it under those of the file.
    """
    function = find_object(source)
    if not _takes(function, "mesh", "rules"):
        name = source.rpartition(":")[2]
        raise FileError(
            f"{source}: it must take the mesh and the rules, as def {name}(mesh, rules=RULES): "
            "prove then compiles it under the rules that are written"
        )
    return None if _takes(function, "mesh") else Rules([(".*", ())])


def _takes(value: Any, *arguments: str) -> bool:
    """Tell whether a value can be called with these arguments alone, or is no function."""
    return takes(value, arguments) if callable(value) else not arguments
