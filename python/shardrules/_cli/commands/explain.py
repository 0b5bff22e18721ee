"""`shardrules explain`: why an array has its spec."""

from __future__ import annotations

from typing import Any

from shardrules._cli import options
from shardrules._cli.options import argument
from shardrules._cli.project import command


@command("model.json layers/0/wq/kernel -r rules.toml -m fsdp=8,tp=4")
@options.of_model
@argument("path", metavar="PATH", about="The path of the array; or what several arrays that are "
    "alike have in common: a folded path, a glob such as 'layers/*/wq', or the end of their "
    "paths.")  # fmt: skip
@options.of_rules
@options.dialect
@options.of_mesh
def explain(
    *, model: str, path: str, rules: tuple[str, ...], dialect: Any, mesh: options.Sizes
) -> None:
    """Explain the spec of one array: the rules that match it, and each correction."""
    from shardrules._cli.planning import plan_model

    print(plan_model(model, rules, dialect, mesh).plan.explain(path))
