"""`shardrules plan`: the spec of every array."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from shardrules._cli import options
from shardrules._cli.options import FILE, Option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.findings import Declared
    from shardrules._plan.plan import Plan

_MOST_MESHES: Final = 40


@command("model.json -r rules.toml -m fsdp=8,tp=4 --optimizer adam --hbm 96GB")
def plan(
    *, model: options.Model, rules: options.Rules, dialect: options.Dialect, mesh: options.Mesh,
    gradients: options.Gradients, optimizer: options.Optimizer, hbm: options.Hbm,
    format: Annotated[str, options.formats("text", "json")],
    lock: Annotated[str | None, Option("--lock", type=FILE,
        help="Write a lockfile to this path.")],
    html: Annotated[str | None, Option("--html", type=FILE,
        help="Write an HTML report to this path; it works offline.")],
) -> None:  # fmt: skip
    """Show the spec of every array, and its bytes on each device."""
    from shardrules._base.io import write_text
    from shardrules._base.text import bytes_shown
    from shardrules._cli import process, sources
    from shardrules._plan.report import heading, plan_json, plan_table

    sources.check_targets({"--lock": lock, "--html": html}, (model, *rules))
    model_plan, rule_file, name = sources.plan_model(model, rules, dialect, mesh)
    counted = {"gradients": gradients, "optimizer": optimizer}
    size = model_plan.bytes_per_device(**counted)
    # Made before anything is written: a failure leaves no file behind.
    page = html and _page(model_plan, rule_file.declared, title=name, hbm=hbm, **counted)
    if lock:
        model_plan.lock(lock)
    if html and page:
        write_text(Path(html), page)
        process.hint(f"{html}: a report in one file, which works offline")
    if format == "json":
        print(plan_json(model_plan, size, hbm))
        return
    print(heading(model_plan), *plan_table(model_plan, model_plan.folded).lines(), size, sep="\n")
    if hbm is not None:
        print(f"{'fits' if size.max <= hbm else 'DOES NOT FIT'} into {bytes_shown(hbm)}")


def _page(plan: Plan, declared: Declared, title: str, **counted: Any) -> str:
    """Return the HTML report: the plan, its findings, and meshes to compare."""
    from shardrules._cli.process import working

    sections: list[Any] = [plan.check(**declared)]
    axes = [axis for axis, size in plan.axis_sizes.items() if size > 1]
    if plan.devices > 1:
        with working("trying meshes"):
            sections.append(plan.sweep(axes=axes, **counted)[:_MOST_MESHES])
    return plan.to_html(sections=sections, title=title, **counted)
