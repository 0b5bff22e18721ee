"""`shardrules check`: mistakes in the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

from shardrules._base.text import near_shown
from shardrules._cli import options
from shardrules._cli.options import KeyValues, Option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.findings import Finding
    from shardrules._plan.plan import Plan


def _level(value: str) -> str:
    from shardrules._base.arguments import check_choice

    check_choice("the level", value, ("error", "warning", "info", "off"))
    return value


def _odd_kind(kind: str) -> str:
    from shardrules._plan.findings import CheckKind

    kinds = get_args(CheckKind)
    return "" if kind in kinds else f"there is no finding {kind!r}{near_shown(kind, kinds)}"


def _not_planned(key: str) -> str:
    return "" if key == "device" else f"{key} is of prove; what is planned is of device"


_BUDGET: Final = KeyValues("memory=bytes", options.MEMORY.read, _not_planned)


@command("model.json -r rules.toml -m fsdp=8,tp=4 --fail-on warning", has_jobs=True)
def check(
    *, model: options.Model, rules: options.Rules, dialect: options.Dialect, mesh: options.Mesh,
    gradients: options.Gradients, optimizer: options.Optimizer, hbm: options.Hbm,
    budget: Annotated[dict[str, int], Option("--budget", type=_BUDGET,
        help="Maximum bytes of all that is counted in a device's memory, device=1.2GB.")],
    fail_on: options.FailOn,
    large: Annotated[int, Option("--large", type=options.BYTES, default="16MiB",
        help="Minimum bytes per device for a replicated leaf to be a warning.")],
    head_dim: options.HeadDim,
    replicated: Annotated[tuple[str, ...], Option("--replicated", metavar="PATTERN", multiple=True,
        help="Pattern of paths that are replicated on purpose; repeatable.")],
    optional_axes: Annotated[tuple[str, ...], Option("--optional-axes", type=options.AXES,
        default="", show_default=False,
        help="Axes of the rules that a mesh may lack, such as sp,ep.")],
    data_axes: Annotated[tuple[str, ...], Option("--data-axes", type=options.AXES, default="",
        show_default=False,
        help="Mesh axes that shard only batches, and no leaf, such as dp.")],
    level: Annotated[dict[Any, Any], Option("--level",
        type=KeyValues("kind=level", _level, _odd_kind),
        help="Level for a kind of finding: dead=off, uncut=error; repeatable.")],
    fix: Annotated[bool, Option("--fix", is_flag=True, in_job=False, excludes=("format",),
        help="Print the rules that are missing, to paste, instead of findings. Exits with 1 if "
        "there are some.")],
    format: Annotated[str, options.formats("text", "json", "github")],
) -> int:  # fmt: skip
    """Find mistakes in the rules; without SOURCE, in all jobs of the project file.

    Exits with 1 for findings of at least the level --fail-on. It is an error if the parameters,
    and the gradients and optimizer that are given, need more than --hbm, or than --budget.
    """
    from shardrules._cli import process, sources
    from shardrules._plan.files.rules import rule_places
    from shardrules._plan.findings import Declared, Findings, all_declared

    if (gradients or optimizer) and hbm is None and not budget:
        raise ValueError("--gradients and --optimizer are counted for --hbm or --budget: give one")
    plan, rule_file, _ = sources.plan_model(model, rules, dialect, mesh, optional_axes)
    of_options = Declared(replicated=replicated, data_axes=data_axes)
    declared = all_declared(rule_file.declared, of_options)
    findings = plan.check(**declared, large=large, head_dim=head_dim, levels=level)
    bounds = (
        ("memory", hbm, level.get("memory", "error"), "a device has"),
        ("budget", budget.get("device"), "error", "the budget is"),
    )
    if over := [*_over(plan, bounds, gradients=gradients, optimizer=optimizer)]:
        findings = Findings([*over, *findings], findings.scope)
    file, lines = rule_places(rules[-1], len(plan.rules))
    if fix:
        from shardrules._plan.suggest.suggest import missing_text, suggest

        if rule_file.companions:
            raise ValueError("--fix: some leaves follow others: leave out companions, and fix that")
        suggestion = suggest(plan, head_dim=head_dim)
        if text := missing_text(rules[-1], plan, suggestion, is_of_tables=bool(lines)):
            print(text, end="")
            return 0 if fail_on == "never" else 1
        process.hint(f"no rule is to be added; check without --fix: {findings.summary}")
        return process.exit_code(findings, fail_on)
    return process.show_findings(findings, format, fail_on, file, lines)


def _over(plan: Plan, bounds: tuple[Any, ...], **counted: Any) -> Iterator[Finding]:
    """Yield a finding for each bound, of (kind, bytes, level, words), that is less than needed."""
    from shardrules._base.text import bytes_shown
    from shardrules._plan.check_leaves import no_room

    if all(most is None for _, most, _, _ in bounds):
        return
    size = plan.bytes_per_device(**counted)
    largest = sorted(
        plan.folded, key=lambda part: -plan.kinds[part.group].device_bytes * len(part.rows)
    )
    for kind, most, level, has in bounds:
        if most is not None and size.max > most and level != "off":
            message = f"{size}; {has} {bytes_shown(most)}"
            finding = no_room(size, most, largest)
            yield finding._replace(kind=kind, level=level, message=message)
