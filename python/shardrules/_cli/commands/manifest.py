"""`shardrules manifest`: the shapes of a model in a file."""

from __future__ import annotations

import sys
from typing import Any

from shardrules._cli import options
from shardrules._cli.options import FILE, option
from shardrules._cli.project import command


@command("my_package.model:shapes -o model.json.gz")
@options.of_model
@options.dialect
@option("-o", "--output", type=FILE,
    help="The file, gzipped if its name ends with .gz. Default: standard output.")  # fmt: skip
@option("--check", type=FILE, excludes=("output",),
    help="Compare with this manifest instead of writing one.")  # fmt: skip
def manifest(*, model: str, dialect: Any, output: str | None, check: str | None) -> int:
    """Write the shapes of a model, as a model for places without its code.

    With --check nothing is written: exits with 1 if the manifest there is not of this model.
    """
    from shardrules._cli.planning import check_targets, shapes_of
    from shardrules._plan.files.models import manifest_text, write_packed

    check_targets({"--output": output}, [model])
    shapes, name = shapes_of(model, dialect)
    if check:
        old, _ = shapes_of(check, dialect)
        rules = [("", ())]  # else each leaf would be told to be without a rule
        differences = old.with_rules(rules).diff(shapes.with_rules(rules))
        if differences:
            print(f"{check} is old: shardrules manifest {model} -o {check}")
        print(differences)
        return 1 if differences else 0
    if output:
        write_packed(output, manifest_text(shapes, name))
    else:
        sys.stdout.write(manifest_text(shapes, name))
    return 0
