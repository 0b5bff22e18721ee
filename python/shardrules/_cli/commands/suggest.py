"""`shardrules suggest`: rules for a model."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli import values
from shardrules._cli.arguments import Option
from shardrules._cli.inputs import load_hardware, load_model
from shardrules._cli.options import (
    MAX_MEMORY,
    DialectName,
    ExpertsPerToken,
    HardwareName,
    Hbm,
    HeadDim,
    MaxMemory,
    Optimizer,
    OptimizerDtype,
    Source,
    Tokens,
)
from shardrules._cli.process import note
from shardrules._cli.show import working
from shardrules._io import memory_within
from shardrules._mesh_sizes import parse_mesh
from shardrules._suggest.suggest import suggest
from shardrules._text import byte_count

__all__ = ["command"]


def command(
    source: Source,
    mesh: Annotated[
        str | None, Option("--mesh", "-m", help="The mesh, such as fsdp=64,tp=8.")
    ] = None,
    devices: Annotated[
        int | None, Option(min=1, help="Choose a mesh of this many devices.")
    ] = None,
    axes: Annotated[
        str | None,
        Option(
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
        Option(
            help="A rule file to mend: its rules that decide arrays stay, and others are added."
        ),
    ] = None,
    dialect: DialectName = None,
    max_memory: MaxMemory = MAX_MEMORY,
    format_: Annotated[
        str, Option("--format", help="Output format: toml, python, or text with reasons.")
    ] = "toml",
) -> int:
    """Write rules for a model on standard output. Exits with 1 if check warns of them."""
    values.one_of("--format", format_, ("toml", "python", "text"))
    if mesh is None and devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    if mesh is not None:
        unused = {"--devices": devices, "--axes": axes}
        values.refuse("the mesh is that of --mesh", unused)
    counted = values.counted(None, optimizer, optimizer_dtype, None)
    with working("reading"), memory_within(byte_count(max_memory)):
        model = load_model(source, dialect, like)
    found = suggest(
        model.tree,
        None if mesh is None else parse_mesh(mesh),
        devices=devices,
        axes=None if axes is None else values.names(axes),
        hbm=values.memory("--hbm", "a device", hbm),
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
    for one in found.warnings if format_ != "text" else ():
        note(str(one))
    return 1 if found.warnings else 0
