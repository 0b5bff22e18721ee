"""`shardrules sweep`: meshes, the best first."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final

from shardrules._cli import options
from shardrules._cli.options import KeyValues, Option
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
    model: Annotated[str, options.model(about="With --rules a model, as for plan. Without, a step: "
        "package.module:function, which takes the mesh, and the choices of --try as keywords, and "
        "returns what it does for prove.")],
    rules: Annotated[tuple[str, ...], options.rules_of_model()],
    dialect: options.Dialect,
    mesh: Annotated[tuple[options.Sizes, ...], options.mesh(multiple=True,
        excludes=("on", "devices", "axes"), help="A mesh to compare; of a model repeatable.")],
    on: Annotated[str | None, options.on(excludes=("devices",),
        help="Compare the meshes that exist on these TPUs or GPUs, such as v5p:8x8x8, with the "
        "axes of --axes.")],
    slices: options.Slices,
    devices: Annotated[int | None, options.devices(
        help="Compare all meshes of this many devices; of a step by XLA for CPU.")],
    axes: Annotated[tuple[str, ...] | None, options.axes(needs=("on", "devices"),
        help="Axes of these meshes, such as fsdp,tp.")],
    tries: Annotated[dict[str, Any], Option("--try", "tries", metavar="CHOICE",
        type=KeyValues("keyword=values", _values_to_try), excludes=("rules",),
        help="A keyword of the function of a step, and its values, such as batch=256,512,1024 or "
        "remat=true,false; repeatable, and all are tried with all.")],
    gradients: options.Gradients, optimizer: options.Optimizer, hbm: options.Hbm,
    format: Annotated[str, options.formats("text", "json",
        about="Output format; text has the best 20.")],
) -> int:  # fmt: skip
    """Compare meshes: of a model by bytes, or of a step by what the compiler makes of it.

    The best is the first. Exits with 1 if nothing of a step fits, as far as that is known.
    """
    from shardrules._cli import process, sources
    from shardrules._plan.files.modules import find_object
    from shardrules._program.topologies.topology import Topology
    from shardrules._program.verify.sweep import swept

    if not mesh and not axes:
        raise ValueError(
            "give meshes with --mesh; or --devices and --axes for all factorizations, or --on and "
            "--axes for those of a topology"
        )
    where: Any = Topology(on, slices) if on else devices
    if not rules:
        if len(mesh) > 1:
            raise ValueError("--mesh: of a step give one, or --on or --devices for several")
        if gradients or optimizer or dialect:
            raise ValueError(
                "a step has its own rules, gradients and optimizer: give --rules of a model"
            )
        if ":" not in model:
            raise ValueError(f"{model}: a model needs --rules; without them SOURCE is a step")
        with process.working("asking the compiler") as show:
            programs = swept(
                find_object(model), mesh[0] if mesh else where, axes or None, tries,
                hbm=hbm, show=show,
            )  # fmt: skip
        _print_rows(programs, format, "program")
        if not programs.is_whole:
            raise KeyboardInterrupt
        has_one = any(row.fits or (row.fits is None and row.peak) for row in programs)
        return 0 if has_one else 1
    first = mesh[0] if mesh else dict.fromkeys(axes or (), 1)
    plan, *_ = sources.plan_model(model, rules, dialect, first)
    with process.working("trying meshes"):
        rows = plan.sweep(
            mesh or None, devices=where, axes=axes or None, gradients=gradients,
            optimizer=optimizer, hbm=hbm,
        )  # fmt: skip
    _print_rows(rows, format, "mesh")
    return 0


def _print_rows(rows: Any, format: str, what: str) -> None:
    """Print the rows; as text the first, and how many more there are."""
    from shardrules._base.text import and_more

    if format == "json":
        print(rows.to_json())
    else:
        print(rows[:_MOST_ROWS], *and_more(len(rows), _MOST_ROWS, what), sep="\n")
