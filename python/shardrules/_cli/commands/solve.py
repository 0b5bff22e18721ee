"""`shardrules solve`: the sharding of a step that takes least time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from shardrules._cli import options
from shardrules._cli.options import Option, Type
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._program.solve.solution import Solution


def _hardware(value: str) -> Any:
    from shardrules._base.hardware import Hardware

    return Hardware.named(value)


@command("my_package.train:step_on --on v5p:8x8x8 > rules.toml")
def solve(
    *, function: options.Function,
    on: Annotated[str | None, options.on(excludes=("hardware",), help=f"The devices: "
        f"{options.DEVICES}. Or give --mesh and --hardware, which need no compiler.")],
    slices: options.Slices,
    mesh: Annotated[options.Sizes | None, options.mesh(excludes=("axes",),
        help="The mesh, such as fsdp=64,tp=8. Default: the best that exists there.")],
    hardware: Annotated[Any, Option("--hardware", type=Type("name", _hardware),
        help="The devices of --mesh, without --on: v4, v5e, v5p, v6e, 7x, A100, H100, H200, B200, "
        "GB200.")],
    axes: Annotated[tuple[str, ...] | None,
        options.axes(help="Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp.")],
    rules: Annotated[tuple[str, ...],
        options.rules(help="Rules that the function takes; the solution does not need any.")],
    hbm: Annotated[int | None,
        options.hbm(help="Memory of one device, such as 96GB. Default: that of the devices.")],
    format: Annotated[str, options.formats("toml", "python", "text",
        about="Output format; text has the choices, and what others cost.")],
) -> None:  # fmt: skip
    """Find the sharding of a step that takes least time, and write its rules on standard output.

    The lines of with_sharding_constraint follow as comments; time, bound and gap go to standard
    error.
    """
    from shardrules._base.io import FileError
    from shardrules._cli import process, sources
    from shardrules._program.solve.solution import solved
    from shardrules._program.topologies.topology import Topology

    place: Any = mesh
    if on is not None:
        place = topology = Topology(on, slices)
        hardware = topology.hardware
        if mesh is None:
            meshes = topology.meshes(axes or ("fsdp", "tp"))
            mesh = meshes[len(meshes) // 2]  # as the function may not take one whose axis is 1
        else:
            try:
                place = topology.mesh(mesh)  # what does not exist there is an error
            except ImportError as error:
                process.hint(f"links count as whole, since {error}")
                place = mesh
    if mesh is None or hardware is None:
        missing = "--on v5p:8x8x8, or --mesh and --hardware" if mesh is None else "--hardware v5p"
        raise ValueError(f"give the devices: {missing}")
    step = sources.trace_on(function, mesh, rules)
    if step.plan is None:
        raise ValueError(
            f"{function}: none of the arguments is a Plan: give shardrules.plan of the "
            "parameters, whose rules the solution replaces"
        )
    with process.working("solving; Ctrl-C takes the best so far") as show:
        try:
            solution = solved(step, place, hardware, hbm, show=show)
        except ValueError as error:  # of several lines, where nothing fits
            raise FileError(*str(error).splitlines()) from None
    _print_solution(solution, format)


def _print_solution(solution: Solution, format: str) -> None:
    from shardrules._cli.process import hint

    suggestion = solution._suggestion
    if format == "text":
        print(solution, suggestion, *solution.activations, sep="\n")
    else:
        text = suggestion.to_toml() if format == "toml" else suggestion.to_python()
        print(text.rstrip("\n"), *(f"# {line}" for line in solution.activations), sep="\n")
        hint(solution.summary)
    for line in solution.step.unmodelled:
        hint(f"not looked into: {line}")
