"""`shardrules init`: a project file, and rules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardrules._cli import options
from shardrules._cli.command import command
from shardrules._cli.commands.suggest import HowToSuggest, how_to_suggest

if TYPE_CHECKING:
    from shardrules._plan.suggest.suggestion import Suggestion

_RULES: Final = "rules.toml"
_MODEL: Final = "model.json.gz"


@command("model.json --devices 512 --hbm 96GB")
@options.model(about="The model: a file or package.module:function, as for plan. Or with --on a "
    "step: package.module:function, which takes the mesh and rules, as for prove.")  # fmt: skip
@options.on(help="The devices of a step, such as v5p:8x8x8, as for prove.",
    excludes=("devices", "dialect", "head_dim", "optimizer", "optimizer_dtype"))  # fmt: skip
@options.slices
@how_to_suggest
def init(*, model: str, on: str | None, slices: int, how: HowToSuggest) -> int:
    """Write a project file, shardrules.toml, and rules, rules.toml, for a model or a step.

    The rules of a model are those of suggest; those of a step are those of solve, and its model is
    written too, model.json.gz. Replaces no file. Exits with 1 if check warns of the rules.
    """
    from shardrules._base.atomic_write import write_bytes
    from shardrules._base.text import mesh_shown
    from shardrules._cli import process, project

    here = Path.cwd()
    if (found := project.find_table(here)) and not project.stranger(found[0], here):
        raise ValueError(f"{found[0]}: the project has this file; add a job to it")
    names = [*([_MODEL] if on else []), _RULES, project.OWN_FILE]
    if there := next(filter(os.path.lexists, names), None):
        raise ValueError(f"{there} exists, and is not replaced; rename it")
    if on is None:
        suggestion, files, notes = _of_model(model, how)
        job: dict[str, Any] = {"model": model, "rules": _RULES}
    else:
        suggestion, files, notes = _of_step(model, on, slices, how)
        job = {"model": _MODEL, "function": model, "rules": _RULES, "on": on}
        job |= {"slices": slices} if slices > 1 else {}
    job |= {"mesh": mesh_shown(suggestion.mesh), **({"hbm": how.hbm} if how.hbm else {})}
    files[project.OWN_FILE] = project.project_text(job)
    for name in names:
        content = files[name]
        write_bytes(name, content if isinstance(content, bytes) else content.encode())
        print(f"wrote {name}")
    commands = "shardrules check checks" if on is None else "shardrules check and prove run"
    print(f"{commands} all jobs of the project file")
    for note in (*notes, *map(str, suggestion.warnings)):
        process.hint(note)
    return 1 if suggestion.warnings else 0


_Written = tuple["Suggestion", dict[str, str | bytes], list[str]]
"""Rules, {name: content} of files, notes."""


def _of_model(model: str, how: HowToSuggest) -> _Written:
    """Make the rules of a model: `suggest` decides."""
    from shardrules._base.io import FileError
    from shardrules._cli.commands.suggest import suggested
    from shardrules._plan.files.modules import find_object, is_module_form

    if is_module_form(model) and not _takes(find_object(model)):
        raise FileError(
            f"{model}: it takes arguments, as a step does; for a step give --on v5p:8x8x8, "
            "for a model a function without arguments"
        )
    suggestion = suggested(model, how)
    return suggestion, {_RULES: suggestion.to_toml()}, []


def _of_step(function: str, on: str, slices: int, how: HowToSuggest) -> _Written:
    """Make rules and model of a step: `solve` decides, and prove compiles it under these rules."""
    from shardrules._cli.commands.solve import constraint_lines, solved, solver_notes
    from shardrules._plan.files.manifest import manifest_text, packed

    solution = solved(
        function, on=on, slices=slices, mesh=how.mesh, axes=how.axes, hbm=how.hbm,
        rules=_rules_of_step(function),
    )  # fmt: skip
    suggestion = solution._suggestion
    lines = [suggestion.to_toml().rstrip("\n"), *constraint_lines(solution), ""]
    model = packed(manifest_text(suggestion.plan, function))
    notes = [solution.summary, *solver_notes(solution)]
    return suggestion, {_RULES: "\n".join(lines), _MODEL: model}, notes


def _rules_of_step(function: str) -> Any:
    """Return the rules that a step is traced with before it has some; None if it has a default.

    Raises:
        FileError: It does not take rules: then prove would not compile it under those of the file.
    """
    from shardrules._base.io import FileError
    from shardrules._plan.files.modules import find_object
    from shardrules._rules.rules import Rules

    value = find_object(function)
    if not _takes(value, "mesh", "rules"):
        name = function.rpartition(":")[2]
        raise FileError(
            f"{function}: it must take the mesh and the rules, as def {name}(mesh, rules=RULES): "
            "prove then compiles it under the rules that are written"
        )
    return None if _takes(value, "mesh") else Rules([(".*", ())])


def _takes(value: Any, *arguments: str) -> bool:
    """Tell whether a value can be called with these arguments alone, or is no function."""
    from shardrules._plan.files.modules import takes

    return takes(value, arguments) if callable(value) else not arguments
