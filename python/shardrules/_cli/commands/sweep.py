"""`shardrules sweep`: meshes beside each other."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli import values
from shardrules._cli.arguments import Option
from shardrules._cli.loading import load
from shardrules._cli.options import (
    MAX_MEMORY,
    AxesOverDcn,
    Companions,
    DialectName,
    ExpertsPerToken,
    Gradients,
    HardwareName,
    Hbm,
    HostMemory,
    MaxMemory,
    MinSize,
    NoFallbacks,
    Optimizer,
    OptimizerDtype,
    OptimizerMemory,
    RulesFile,
    Source,
    Stacked,
    Tokens,
)
from shardrules._cli.show import show_sweep, sweep_json, working
from shardrules._mesh_sizes import parse_mesh

__all__ = ["command"]


def command(
    source: Source,
    rules: RulesFile,
    mesh: Annotated[
        list[str] | None, Option("--mesh", "-m", help="A mesh to compare; repeatable.")
    ] = None,
    devices: Annotated[
        int | None, Option(min=1, help="Compare all meshes of this many devices.")
    ] = None,
    axes: Annotated[
        str | None,
        Option(help="Axes of these meshes, such as fsdp,tp,sp=1, where sp has a fixed size."),
    ] = None,
    dialect: DialectName = None,
    min_size: MinSize = 0,
    max_memory: MaxMemory = MAX_MEMORY,
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
    format_: Annotated[str, Option("--format", help="Output format: text or json.")] = "text",
    most: Annotated[int, Option(min=1, help="Maximum number of rows to show.")] = 20,
) -> None:
    """Compare meshes for one set of rules, the best first: by the time of a step, or by bytes."""
    values.one_of("--format", format_, ("text", "json"))
    if mesh:
        values.refuse("the meshes are those of --mesh", {"--devices": devices, "--axes": axes})
    elif devices is None or axes is None:
        raise ValueError("give meshes with --mesh, or --devices and --axes for all factorizations")
    step = values.step(tokens, hardware, axes_over_dcn, experts_per_token)
    room = values.room(hbm, host_memory, step["hardware"])
    counted = values.counted(gradients, optimizer, optimizer_dtype, optimizer_memory)
    meshes = [parse_mesh(one) for one in mesh or ()]
    names, fixed = values.axes(axes or "")
    first = mesh[0] if mesh else f"{names[0]}={devices}"
    plan = load(
        source, rules, first, dialect, min_size, max_memory=max_memory, no_fallbacks=no_fallbacks,
        stacked=stacked, companions=companions,
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
