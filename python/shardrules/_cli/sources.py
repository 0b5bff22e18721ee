"""What options name: models, rules and steps, read; what is wrong raises an exception."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardrules._base.io import FileError
from shardrules._cli.process import hint, working
from shardrules._plan.files.models import nested_dicts, read_arrays
from shardrules._plan.files.modules import is_module_form, load_object
from shardrules._plan.files.rules import RuleFile, read_rule_source
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._rules.dialects import EFORMER, LINEN, LogicalDialect

if TYPE_CHECKING:
    from shardrules._program.step.step import Step


def plan_model(
    source: str, rule_files: tuple[str, ...], dialect: Any, mesh: dict[str, int],
    optional_axes: tuple[str, ...] = (),
) -> tuple[Plan, RuleFile, str]:  # fmt: skip
    """Return (the plan of a model, what the files have of rules, its name); notes go to stderr."""
    with working(f"reading {source}"):
        file = read_rule_source(rule_files, dialect)
        rules: Any = file.rules
        if optional_axes:
            rules = type(rules)(rules, optional_axes=rules.optional_axes + optional_axes)
        name, tree, names = read_tree(source, file.rules.dialect)
        of_model = plan(tree, rules, mesh, companions=file.companions, names=names)
    for unread in file.unread:
        hint(f"note: these rules are not read: {unread}")
    return of_model, file, name


def read_tree(source: str, dialect: Any) -> tuple[str, Any, Any]:
    """Read (the model's name, its tree, the logical axis names beside it or None).

    Without a dialect of the rules for it, they are for names if the file has them.
    """
    if is_module_form(source):
        return source, load_object(source), None
    arrays = read_arrays(source)
    if dialect is None:
        dialect = EFORMER if arrays.logical_axes is None else LINEN
    if isinstance(dialect, LogicalDialect):
        if arrays.logical_axes is None:
            raise FileError(
                f"{source}: the rules are for logical axis names, and this file has none; give a "
                'manifest with "logical_axes", or package.module:function'
            )
        return arrays.name, arrays.leaves, arrays.logical_axes
    joins_keys = dialect.keys != "text" or dialect.hidden_key is not None
    return arrays.name, nested_dicts(arrays) if joins_keys else arrays.leaves, None


def step_on(source: str, mesh: Any, rules: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """Return the parts of what a function of the mesh, and of the rules in files, gives."""
    from shardrules._program.lowering import step_parts

    arguments = (mesh, read_rule_source(rules).rules) if rules else (mesh,)
    return step_parts(load_object(source, *arguments), source)


def trace_on(source: str, mesh: dict[str, int], rules: tuple[str, ...] = ()) -> Step:
    """Trace the step that a function returns for a mesh without devices."""
    from shardrules._place.mesh import as_mesh
    from shardrules._program.step.step import trace

    with working("tracing"):
        function, arguments, *_ = step_on(source, as_mesh(mesh), rules)
        return trace(function, *arguments)


def check_targets(outputs: dict[str, str | None], sources: Iterable[str | None] = ()) -> None:
    """Check that no output replaces an input or another output."""
    names = {os.path.realpath(source): source for source in sources if source}
    for option, path in outputs.items():
        if path is not None:
            name = names.setdefault(os.path.realpath(path), option)
            if name != option:
                raise ValueError(f"{option} {path} would replace {name}; give it another name")
