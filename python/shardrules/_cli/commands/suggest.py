"""`shardrules suggest`: rules for a model."""

from __future__ import annotations

from typing import Any

from shardrules._cli import options
from shardrules._cli.project import command


@command("model.json --devices 512 > rules.toml")
@options.of_model
@options.mesh(excludes=("devices", "axes"), help="The mesh, such as fsdp=64,tp=8.")
@options.devices(help="Choose a mesh of this many devices.")
@options.axes(help="Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp, and ep if the "
    "model has stacks of experts.")  # fmt: skip
@options.dialect
@options.head_dim
@options.formats("toml", "python", "text", about="Output format; text has the reasons.")
def suggest(
    *, model: str, mesh: options.Sizes | None, devices: int | None, axes: tuple[str, ...] | None,
    dialect: Any, head_dim: int | None, format: str,
) -> int:  # fmt: skip
    """Write rules for a model on standard output.

    Exits with 1 if check warns of them.
    """
    from shardrules._cli import planning, process
    from shardrules._plan.suggest.suggest import suggest

    if mesh is None and devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    with process.working(f"reading {model}"):
        _, tree, _ = planning.read_tree(model, dialect)
    suggestion = suggest(tree, mesh, devices=devices, axes=axes, head_dim=head_dim, dialect=dialect)
    written = {"toml": suggestion.to_toml, "python": suggestion.to_python}
    print(written.get(format, suggestion.__str__)().rstrip("\n"))
    for warning in suggestion.warnings if format != "text" else ():
        for line in str(warning).splitlines():
            process.hint(line)
    return 1 if suggestion.warnings else 0
