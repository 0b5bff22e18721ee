"""`shardrules suggest`: rules for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardrules._cli import options
from shardrules._cli.command import bundle, command, option
from shardrules._cli.types import FILE

if TYPE_CHECKING:
    from shardrules._plan.suggest.suggestion import Suggestion


class HowToSuggest(NamedTuple):
    """What rules are to be written for, beside the model."""

    mesh: options.Sizes | None
    devices: int | None
    axes: tuple[str, ...] | None
    dialect: Any
    head_dim: int | None
    max_memory: int
    optimizer: str
    optimizer_dtype: str
    hbm: int | None


how_to_suggest = bundle(
    HowToSuggest, "how",
    options.mesh(excludes=("devices", "axes"),
        help="The mesh, such as fsdp=64,tp=8. Of a step the default is the best there."),
    options.devices(help="Choose a mesh of this many devices."),
    options.axes(help="Axes of the chosen mesh, such as fsdp,tp. Default: fsdp,tp, and of a model "
        "ep if it has stacks of experts."),
    options.dialect,
    options.head_dim,
    options.max_memory,
    options.optimizer(default="adam"),
    options.optimizer_dtype,
    options.of_one_device,
)  # fmt: skip


@command("model.json --devices 512 --hbm 96GB > rules.toml")
@options.of_model
@how_to_suggest
@option("--like", type=FILE,
    help="A rule file to mend: its rules that decide arrays stay, others are added.")  # fmt: skip
@options.formats("toml", "python", "text", about="Output format; text has the reasons.")
def suggest(*, model: str, how: HowToSuggest, like: str | None, format: str) -> int:
    """Write rules for a model on standard output.

    Exits with 1 if check warns of them.
    """
    from shardrules._cli.process import hint

    suggestion = suggested(model, how, like)
    written = {"toml": suggestion.to_toml, "python": suggestion.to_python}
    print(written.get(format, suggestion.__str__)().rstrip("\n"))
    for warning in suggestion.warnings if format != "text" else ():
        for line in str(warning).splitlines():
            hint(line)
    return 1 if suggestion.warnings else 0


def suggested(model: str, how: HowToSuggest, like: str | None = None) -> Suggestion:
    """Suggest rules for a model."""
    from shardrules._base.io import memory_within
    from shardrules._cli import planning, process
    from shardrules._plan.files.rules import read_rule_source
    from shardrules._plan.suggest.suggest import suggest as suggest_rules
    from shardrules._rules.logical_rules import LogicalRules

    if how.mesh is None and how.devices is None:
        raise ValueError("give a mesh with --mesh, or --devices to have one chosen")
    with process.working(f"reading {model}"), memory_within(how.max_memory):
        rules = None if like is None else read_rule_source(like, how.dialect).rules
        if isinstance(rules, LogicalRules):
            raise TypeError(
                f"{like}: it is for logical axis names; rules that are mended are for paths"
            )
        dialect = how.dialect if rules is None else rules.dialect
        _, tree, _ = planning.read_tree(model, dialect)
    return suggest_rules(
        tree, how.mesh, devices=how.devices, axes=how.axes, hbm=how.hbm, head_dim=how.head_dim,
        optimizer=options.moments(how.optimizer, how.optimizer_dtype), dialect=dialect, like=rules,
    )  # fmt: skip
