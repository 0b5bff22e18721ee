"""`shardrules explain`: why an array has its spec."""

from __future__ import annotations

from typing import Annotated

from shardrules._cli import options
from shardrules._cli.options import Argument
from shardrules._cli.project import command


@command("model.json layers/0/wq/kernel -r rules.toml -m fsdp=8,tp=4")
def explain(
    *, model: options.Model,
    path: Annotated[str, Argument("path", metavar="PATH",
        about="The path of the array; or what several arrays that are alike have in common: a "
        "folded path, a glob such as 'layers/*/wq', or the end of their paths.")],
    rules: options.Rules, dialect: options.Dialect, mesh: options.Mesh,
) -> None:  # fmt: skip
    """Explain the spec of one array: the rules that match it, and each correction."""
    from shardrules._cli.sources import plan_model

    plan, *_ = plan_model(model, rules, dialect, mesh)
    print(plan.explain(path))
