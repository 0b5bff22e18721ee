"""`shardrules suggest`: rules for a model."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli import options
from shardrules._cli.project import command


@command("model.json --devices 512 > rules.toml")
def suggest(
    *, model: options.Model,
    mesh: Annotated[options.Sizes | None, options.mesh(excludes=("devices", "axes"),
        help="The mesh, such as fsdp=64,tp=8.")],
    devices: Annotated[int | None, options.devices(help="Choose a mesh of this many devices.")],
    axes: Annotated[tuple[str, ...] | None, options.axes(help="Axes of the chosen mesh, such as "
        "fsdp,tp. Default: fsdp,tp, and ep if the model has stacks of experts.")],
    dialect: options.Dialect, head_dim: options.HeadDim,
    format: Annotated[str, options.formats("toml", "python", "text",
        about="Output format; text has the reasons.")],
) -> int:  # fmt: skip
    """Write rules for a model on standard output.

    Exits with 1 if check warns of them.
    """
    from shardrules._cli import process, sources
    from shardrules._plan.suggest.suggest import suggest

    if mesh is None and devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    with process.working(f"reading {model}"):
        _, tree, _ = sources.read_tree(model, dialect)
    suggestion = suggest(tree, mesh, devices=devices, axes=axes, head_dim=head_dim, dialect=dialect)
    writers = {"toml": suggestion.to_toml, "python": suggestion.to_python}
    print(writers.get(format, suggestion.__str__)().rstrip("\n"))
    for warning in suggestion.warnings if format != "text" else ():
        for line in str(warning).splitlines():
            process.hint(line)
    return 1 if suggestion.warnings else 0
