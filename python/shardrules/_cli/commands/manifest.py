"""`shardrules manifest`: the shapes of a model in a file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from shardrules._cli import options
from shardrules._cli.options import FILE, Option
from shardrules._cli.project import command

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan


@command("my_package.model:shapes -o model.json.gz")
def manifest(
    *, model: options.Model, dialect: options.Dialect,
    output: Annotated[str | None, Option("-o", "--output", type=FILE,
        help="The file, gzipped if its name ends with .gz. Default: standard output.")],
    check: Annotated[str | None, Option("--check", type=FILE, excludes=("output",),
        help="Compare with this manifest instead of writing one.")],
) -> int:  # fmt: skip
    """Write the shapes of a model, as a model for places without its code.

    With --check nothing is written: exits with 1 if the manifest there is not of this model.
    """
    from shardrules._cli.sources import check_targets
    from shardrules._plan.files.models import manifest_text, write_packed

    check_targets({"--output": output}, [model])
    name, shapes = _shapes_of(model, dialect)
    if check:
        _, before = _shapes_of(check, dialect)
        rules = [("", ())]  # else each leaf would be told to be without a rule
        differences = before.with_rules(rules).diff(shapes.with_rules(rules))
        if differences:
            print(f"{check} is old: shardrules manifest {model} -o {check}")
        print(differences)
        return 1 if differences else 0
    text = manifest_text(shapes, name)
    if output:
        write_packed(output, text)
    else:
        sys.stdout.write(text)
    return 0


def _shapes_of(source: str, dialect: Any) -> tuple[str, Plan]:
    """Read a model: its name, and a plan without rules, on any mesh."""
    from shardrules._cli.process import working
    from shardrules._cli.sources import read_tree
    from shardrules._plan.files.models import arrays_of

    with working(f"reading {source}"):
        name, tree, names = read_tree(source, dialect)
        return name, arrays_of(tree, dialect, names)
