"""`shardrules sweep`: a step on several meshes, the best first."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final

from shardrules._cli import options
from shardrules._cli.options import Argument, KeyValues, Option
from shardrules._cli.project import command

_MOST_ROWS: Final = 20
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "none": None}


def _values_to_try(text: str) -> list[Any]:
    """Return values of --try: numbers, true, false and none, and else texts."""
    return [*map(_value_of, options.AXES.read(text))]


def _value_of(word: str) -> Any:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for read in (int, float):
        with suppress(ValueError):
            return read(word)
    return word


@command("train:step_on --on v5p:8x8x8 --axes fsdp,tp --try batch=256,512")
def sweep(
    *,
    function: Annotated[str, Argument("function", metavar="FUNCTION",
        about="package.module:function, which takes the mesh, and the choices of --try as "
        "keywords, and returns what it does for prove.")],
    mesh: Annotated[options.Sizes | None, options.mesh(excludes=("on", "devices", "axes"),
        help="The one mesh, where choices alone are compared.")],
    on: Annotated[str | None, options.on(excludes=("devices",),
        help="Compare the meshes that exist on these TPUs or GPUs, such as v5p:8x8x8, with the "
        "axes of --axes.")],
    slices: options.Slices,
    devices: Annotated[int | None, options.devices(
        help="Compare all meshes of this many devices, by XLA for CPU.")],
    axes: Annotated[tuple[str, ...] | None, options.axes(needs=("on", "devices"),
        help="Axes of these meshes, such as fsdp,tp.")],
    tries: Annotated[dict[str, Any], Option("--try", "tries", metavar="CHOICE",
        type=KeyValues("keyword=values", _values_to_try),
        help="A keyword of the function, and its values, such as batch=256,512,1024 or "
        "remat=true,false; repeatable, and all are tried with all.")],
    hbm: options.Hbm,
    format: Annotated[str, options.formats("text", "json",
        about="Output format; text has the best 20.")],
) -> int:  # fmt: skip
    """Compare meshes and choices of a step by what the compiler makes of it, the best first.

    Exits with 1 if nothing fits, as far as that is known.
    """
    from shardrules._base.text import and_more
    from shardrules._cli.process import working
    from shardrules._plan.files.modules import find_object
    from shardrules._program.topologies.topology import Topology
    from shardrules._program.verify.sweep import swept

    if not mesh and not axes:
        raise ValueError(
            "give --mesh; or --devices and --axes for all factorizations, or --on and --axes for "
            "those of a topology"
        )
    on_meshes: Any = mesh or (Topology(on, slices) if on else devices)
    with working("asking the compiler") as show:
        rows = swept(find_object(function), on_meshes, axes or None, tries, hbm=hbm, show=show)
    if format == "json":
        print(rows.to_json())
    else:
        print(rows[:_MOST_ROWS], *and_more(len(rows), _MOST_ROWS, "program"), sep="\n")
    if not rows.is_whole:
        raise KeyboardInterrupt
    return 0 if any(row.fits or (row.fits is None and row.peak) for row in rows) else 1
