"""From the arguments of a command line to a plan. Costs what reading and planning cost.

Must not print: wrong input raises an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shardrules._cli.arguments import UsageError
from shardrules._files.logical import LOGICAL_DIALECTS
from shardrules._files.models import nested, read_arrays
from shardrules._files.modules import is_module_form, load_object
from shardrules._files.rules import DIALECTS, RuleFile, read_rules
from shardrules._io import FileError
from shardrules._mesh_sizes import parse_mesh
from shardrules._plan.findings import NOTHING, Declared, all_declared, compiled_replicated
from shardrules._plan.plan import Plan, plan
from shardrules._rules.dialects import EFORMER, LINEN, Dialect, LogicalDialect, key_separator
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._hardware import Hardware

__all__ = [
    "MOMENTS",
    "Model",
    "Planned",
    "is_lock",
    "load_hardware",
    "load_model",
    "load_patch",
    "load_plan",
    "load_side",
]

# Optimizers, with the number of moments that each keeps per parameter.
MOMENTS: Final = {"sgd": 0, "momentum": 1, "lion": 1, "adam": 2, "adamw": 2}


class Planned(NamedTuple):
    """A plan with the model and the rules that it was made from."""

    plan: Plan
    model: str
    rules: RuleFile
    fallbacks: tuple[str, ...]
    """A line for each pattern that `re` evaluates, with the reason."""


def load_plan(
    source: str,
    rules: str | None,
    mesh: str | None,
    dialect: str | None = None,
    min_size: int = 0,
    *,
    no_fallbacks: bool,
    companions: Mapping[str, list[str]],
    declared: Declared = NOTHING,
) -> Planned:
    """The plan of a model under rules on a mesh.

    Args:
        source: A file of arrays, or `package.module:function` that returns a tree; or a lock,
            which has rules and a mesh of its own.
        rules: A rule file, or `package.module:NAME`.
        mesh: Axis sizes, such as dp=8,tp=4.
        dialect: The name of a dialect. Default: the rule file's dialect, or else eformer.
        min_size: As in `plan`.
        no_fallbacks: Whether a pattern that `re` has to evaluate is an error.
        companions: Companions beside those of the rule file, by its keys.
        declared: Declarations beside those of the rule file.

    Raises:
        FileError, ValueError, TypeError: One of the arguments is invalid.
        UsageError: A model comes without rules or a mesh.
    """
    if is_lock(source):
        given = (rules, mesh, dialect, min_size or None, *companions.values())
        if any(given):
            raise FileError(
                f"{source}: a lock has its own rules and mesh, so leave out --rules, --mesh and "
                "what else says how to plan; or give the model"
            )
        return _locked_plan(source, declared)
    if rules is None or mesh is None:
        missing = [
            option for option, value in (("--rules/-r", rules), ("--mesh/-m", mesh)) if not value
        ]
        raise UsageError(f"the following arguments are required: {', '.join(missing)}")
    axis_sizes = parse_mesh(mesh)
    chosen = None if dialect is None else _dialect_of(dialect)
    loaded = read_rules(rules, chosen, companions)
    loaded = loaded._replace(declared=all_declared(loaded.declared, declared))
    fallbacks = tuple(dict.fromkeys(_fallbacks(loaded)))
    if fallbacks and no_fallbacks:
        raise FileError(
            f"{rules}: --no-fallbacks, but the automaton cannot evaluate {'; '.join(fallbacks)}: "
            "rewrite the pattern, or leave out --no-fallbacks"
        )
    name, tree, names = _tree(source, loaded.rules.dialect)
    planned = plan(
        tree,
        loaded.rules,
        axis_sizes,
        min_size=min_size,
        companions=loaded.companions,
        names=names,
        optional_axes=loaded.declared["optional_axes"],
    )
    return Planned(planned, name, loaded, fallbacks)


def _locked_plan(source: str, declared: Declared) -> Planned:
    """The plan of a lock, planned anew if that gives the same: a lock holds no corrections."""
    locked = Plan.from_lock(Path(source))
    fresh = locked.with_rules(locked.rules)
    same = fresh if fresh.fingerprint() == locked.fingerprint() else locked
    return Planned(same, source, RuleFile(locked.rules, declared, (), source), ())


def load_hardware(text: str) -> Hardware:
    """The hardware in a TOML file, or with this name.

    Raises:
        ValueError: There is no such name, or the file is invalid.
    """
    from shardrules._files.public import read_hardware
    from shardrules._hardware import as_hardware

    is_file = text.endswith(".toml") or "/" in text
    return read_hardware(text) if is_file else as_hardware("--hardware", text)


class Model(NamedTuple):
    """A model that rules are to be written for."""

    tree: Any
    names: Any
    """The logical axis names beside it; None for rules of paths, or if they are in the tree."""
    dialect: Dialect | LogicalDialect | None
    """That of the rules; None if nothing says it."""
    to_mend: Rules | None


def load_model(source: str, dialect: str | None, like: str | None) -> Model:
    """A model that rules are to be written for.

    Raises:
        FileError, ValueError, TypeError: The model cannot be read, it has no names for the dialect,
            or rules to mend are not for paths.
    """
    chosen = None if dialect is None else _dialect_of(dialect)
    to_mend = None if like is None else read_rules(like, chosen).rules
    if isinstance(to_mend, LogicalRules):
        raise TypeError(
            f"{like}: it is for logical axis names; rules that are mended are for paths"
        )
    used = chosen if to_mend is None else to_mend.dialect
    _, tree, names = _tree(source, used)
    return Model(tree, names, used, to_mend)


def load_patch(source: str, planned: Planned, dialect: str | None, head_dim: int | None) -> str:
    """The patch that mends the rules of a plan in their file; "" if they are right.

    Raises:
        As `rule_patch`.
    """
    from shardrules._suggest.rule_patch import rule_patch

    chosen = None if dialect is None else _dialect_of(dialect)
    read_in = chosen if isinstance(chosen, Dialect) else None
    return rule_patch(source, planned.rules, planned.plan, dialect=read_in, head_dim=head_dim)


def load_side(
    text: str, rules: str | None, mesh: str | None, **options: Any
) -> tuple[Plan, tuple[str, ...]]:
    """The plan and the fallbacks of one side of a diff: a lock, or a model with rules and a mesh.

    Raises:
        As `load_plan`. FileError if a model comes without rules or a mesh.
    """
    if is_lock(text):
        return Plan.from_lock(Path(text)), ()
    if rules is None or mesh is None:
        why = "not a lock" if Path(text).exists() else "no such lock"
        raise FileError(f"{text}: {why}; for a model, give --rules and --mesh as well")
    planned = load_plan(text, rules, mesh, **options)
    return planned.plan, planned.fallbacks


def _fallbacks(loaded: RuleFile) -> Iterator[str]:
    if isinstance(loaded.rules, Rules):
        for rule, why in loaded.rules.fallbacks:
            yield f"rule {rule} {loaded.rules[rule][0]!r} ({why})"
    replicated = compiled_replicated(loaded.declared["replicated"])
    for index, why in replicated.fallbacks:
        yield f"replicated {replicated[index][0]!r} ({why})"


def _dialect_of(name: str) -> Dialect | LogicalDialect:
    """The dialect of this name.

    Raises:
        ValueError: There is no such dialect.
    """
    known: dict[str, Dialect | LogicalDialect] = {**DIALECTS, **LOGICAL_DIALECTS}
    if name.lower() not in known:
        raise ValueError(f"there is no dialect {name!r}; there are {', '.join(sorted(known))}")
    return known[name.lower()]


def is_lock(text: str) -> bool:
    """Whether the file of this name is a lock."""
    path = Path(text)
    if not path.is_file() or path.suffix == ".gz":
        return False
    with path.open("rb") as file:
        return b'"shardrules lock' in file.read(200)


def _tree(source: str, dialect: Dialect | LogicalDialect | None) -> tuple[str, Any, Any]:
    """(the model's name, its tree, the logical axis names beside it or None).

    Args:
        source: As in `load_plan`.
        dialect: The dialect of the rules for it. Default: one for names if the file has them.
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
    joins_keys = (
        dialect.keys != "text"
        or dialect.hidden_key is not None
        or key_separator(dialect) != dialect.separator
    )
    return arrays.name, nested(arrays) if joins_keys else arrays.leaves, None
