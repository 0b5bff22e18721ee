"""Models, rules and steps that options name, read; what is wrong raises an exception."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from shardrules._base.io import FileError, memory_within
from shardrules._base.text import and_more
from shardrules._cli.options import HowToPlan
from shardrules._cli.process import hint, working
from shardrules._plan.files.manifest import arrays_of
from shardrules._plan.files.models import nested_dicts, read_arrays
from shardrules._plan.files.modules import is_module_form, load_object
from shardrules._plan.files.rules import RuleFile, read_rule_source
from shardrules._plan.findings import NOTHING, Declared, all_declared, compiled_replicated
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._rules.dialects import EFORMER, LINEN, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._program.step.step import Step

_MOST_FALLBACKS: Final = 5


class Planned(NamedTuple):
    """Plan with the model and the rules that it was made from."""

    plan: Plan
    model: str
    rules: RuleFile


def plan_model(
    source: str, how: HowToPlan, mesh: dict[str, int] | None, declared: Declared = NOTHING
) -> Planned:
    """Plan a model within the bound on memory, or take the plan of a lock; notes go to stderr."""
    if is_lock(source):
        if mesh or any(how._replace(max_memory=0)):
            raise FileError(
                f"{source}: a lock has its own rules and mesh, so leave out --rules, --mesh and "
                "what else says how to plan; or give the model"
            )
        return plan_lock(source, how.max_memory, declared)
    with working(f"reading {source}"), memory_within(how.max_memory):
        rules, mesh = _rules_of(how, mesh, declared)
        fallbacks = [*dict.fromkeys(_fallbacks(rules))]
        if fallbacks and how.no_fallbacks:
            raise FileError(
                f"{', '.join(how.rules)}: --no-fallbacks, but the automaton cannot evaluate "
                f"{'; '.join(fallbacks)}: rewrite the pattern, or leave out --no-fallbacks"
            )
        name, tree, names = read_tree(source, rules.rules.dialect)
        policy = rules.rules.optional_axes + declared["optional_axes"]
        given = _with_policy(rules.rules, policy, how.min_size)
        planned = plan(tree, given, mesh, companions=rules.companions, names=names)
    notes = [f"note: these rules are not read: {unread}" for unread in rules.unread]
    # Their time has no bound.
    lines = [f"note: `re`, not the automaton, evaluates {pattern}" for pattern in fallbacks]
    for line in notes + lines[:_MOST_FALLBACKS] + and_more(len(lines), _MOST_FALLBACKS, "pattern"):
        hint(line)
    return Planned(planned, name, rules)


def _rules_of(
    how: HowToPlan, mesh: dict[str, int] | None, declared: Declared
) -> tuple[RuleFile, dict[str, int]]:
    if not how.rules or mesh is None:
        missing = [*(() if how.rules else ("--rules/-r",)), *(() if mesh else ("--mesh/-m",))]
        raise click.UsageError(f"the following arguments are required: {', '.join(missing)}")
    companions = {"stacked": [*how.stacked], "companions": [*how.companions]}
    rules = read_rule_source(how.rules, how.dialect, companions)
    return rules._replace(declared=all_declared(rules.declared, declared)), mesh


def _with_policy(
    rules: Rules | LogicalRules, optional_axes: tuple[str, ...], min_size: int
) -> Rules | LogicalRules:
    """Return the rules, with what the command line says beside the file."""
    if isinstance(rules, Rules):
        return Rules(rules, optional_axes=optional_axes, min_size=min_size or None)
    if min_size:
        raise FileError("--min-size: it is for rules of paths, and these are logical")
    return LogicalRules(rules, optional_axes=optional_axes)


def plan_lock(source: str, max_memory: int, declared: Declared = NOTHING) -> Planned:
    """Return the plan of a lock, planned anew if that is the same: a lock has no corrections."""
    with memory_within(max_memory):
        locked = Plan.from_lock(Path(source))
    fresh = locked.with_rules(locked.rules)
    same = fresh if fresh.fingerprint() == locked.fingerprint() else locked
    return Planned(same, source, RuleFile(locked.rules, declared, (), source))


def _fallbacks(file: RuleFile) -> Iterator[str]:
    """Yield each pattern that only `re` evaluates, with the reason."""
    if isinstance(file.rules, Rules):
        for rule, why in file.rules.fallbacks:
            yield f"rule {rule} {file.rules[rule][0]!r} ({why})"
    replicated = compiled_replicated(file.declared["replicated"])
    for index, why in replicated.fallbacks:
        yield f"replicated {replicated[index][0]!r} ({why})"


def is_lock(text: str) -> bool:
    """Tell whether the file of this name is a lock."""
    path = Path(text)
    if not path.is_file() or path.suffix == ".gz":
        return False
    with path.open("rb") as file:
        return b'"shardrules lock' in file.read(200)


def read_tree(source: str, dialect: Any) -> tuple[str, Any, Any]:
    """Read (the model's name, its tree, the logical axis names beside it or None).

    Without a dialect of the rules for it, they are for names if the file has them.
    """
    if is_module_form(source):
        return source, load_object(source), None
    if is_lock(source):
        raise FileError(f"{source}: this is a lock of a plan; give the model")
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


def shapes_of(source: str, dialect: Any, max_memory: int) -> tuple[Plan, str]:
    """Read (a model that is planned without rules, on any mesh; its name)."""
    with working(f"reading {source}"), memory_within(max_memory):
        name, tree, names = read_tree(source, dialect)
        return arrays_of(tree, dialect, names), name


def step_on(source: str, mesh: Any, rules: Any = None) -> tuple[Any, ...]:
    """Return the parts of what a function of the mesh gives, and of rules or those in files."""
    from shardrules._program.lowering import step_parts

    given = read_rule_source(rules).rules if rules and type(rules) is tuple else rules
    arguments = (mesh,) if given is None or given == () else (mesh, given)
    return step_parts(load_object(source, *arguments), source)


def trace_on(source: str, mesh: dict[str, int], rules: Any = None) -> Step:
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
