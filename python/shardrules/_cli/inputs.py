"""Plans, models and values from the options of a command line; wrong ones raise an exception."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace as Args
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from shardrules._base.arguments import check_choice
from shardrules._base.dtypes import numpy_name
from shardrules._base.hardware import as_hardware, device_of
from shardrules._base.io import FileError, memory_within
from shardrules._base.mesh_sizes import parse_mesh
from shardrules._base.text import and_more, byte_count, counted, mesh_shown
from shardrules._cli.options import MOMENTS
from shardrules._cli.process import hint, working
from shardrules._place.mesh import as_mesh
from shardrules._plan.codec import DIALECTS, LOGICAL_DIALECTS
from shardrules._plan.files.manifest import arrays_of
from shardrules._plan.files.models import nested_dicts, read_arrays
from shardrules._plan.files.modules import is_module_form, load_object
from shardrules._plan.files.rules import RuleFile, read_rule_source
from shardrules._plan.findings import Declared, Findings, all_declared, compiled_replicated
from shardrules._plan.memory import Room
from shardrules._plan.plan import Plan
from shardrules._plan.planning import plan
from shardrules._rules.dialects import EFORMER, LINEN, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._base.hardware import Hardware
    from shardrules._program.step.step import Step

_MOST_FALLBACKS: Final = 5
# A device or a host has more.
_LEAST_WITHOUT_UNIT: Final = 10**6


class Planned(NamedTuple):
    """Plan with the model and the rules that it was made from."""

    plan: Plan
    model: str
    rules: RuleFile
    fallbacks: tuple[str, ...]
    """A line for each pattern that `re` evaluates, with the reason."""


def load_model_plan(args: Args, *, mesh: str | None = None) -> Planned:
    """Plan the model of a command line."""
    (planned,) = _load(args, mesh or args.mesh, args.source)
    return planned


def _load(args: Args, mesh: str | None, *sources: str) -> list[Planned]:
    """Plan models within the bound on memory.

    Patterns that `re` evaluates get a note on stderr, since their time has no bound.
    """
    with working(args, f"reading {sources[0]}"), memory_within(byte_count(args.max_memory)):
        planned = [load_plan(args, source, mesh) for source in sources]
    for unread in dict.fromkeys(line for each in planned for line in each.rules.unread):
        hint(args, f"note: these rules are not read: {unread}")
    patterns = dict.fromkeys(line for plan in planned for line in plan.fallbacks)
    lines = [f"note: `re`, not the automaton, evaluates {pattern}" for pattern in patterns]
    for line in lines[:_MOST_FALLBACKS] + and_more(len(lines), _MOST_FALLBACKS, "pattern"):
        hint(args, line)
    return planned


def load_plan(args: Args, source: str, mesh: str | None) -> Planned:
    """Plan a model under the rules of the command line on a mesh; or takes the plan of a lock."""
    declared = Declared(
        replicated=tuple(getattr(args, "replicated", ())),
        optional_axes=tuple(names(getattr(args, "optional_axes", None))),
        data_axes=tuple(names(getattr(args, "data_axes", None))),
    )
    if is_lock(source):
        options = (args.rules, mesh, args.dialect, args.min_size, args.stacked, args.companions)
        if any(options):
            raise FileError(
                f"{source}: a lock has its own rules and mesh, so leave out --rules, --mesh and "
                "what else says how to plan; or give the model"
            )
        return _locked_plan(source, declared)
    if args.rules is None or mesh is None:
        missing = [*(() if args.rules else ("--rules/-r",)), *(() if mesh else ("--mesh/-m",))]
        raise click.UsageError(f"the following arguments are required: {', '.join(missing)}")
    axis_sizes = parse_mesh(mesh)
    companions = {"stacked": [*args.stacked], "companions": names(args.companions)}
    rules = read_rule_source(args.rules, dialect_of(args), companions)
    rules = rules._replace(declared=all_declared(rules.declared, declared))
    fallbacks = tuple(dict.fromkeys(_fallbacks(rules)))
    if fallbacks and args.no_fallbacks:
        raise FileError(
            f"{args.rules}: --no-fallbacks, but the automaton cannot evaluate "
            f"{'; '.join(fallbacks)}: rewrite the pattern, or leave out --no-fallbacks"
        )
    name, tree, axis_names = _tree(source, rules.rules.dialect)
    given = _with_policy(rules.rules, declared["optional_axes"], args.min_size)
    result = plan(tree, given, axis_sizes, companions=rules.companions, names=axis_names)
    return Planned(result, name, rules, fallbacks)


def _with_policy(
    rules: Rules | LogicalRules, optional_axes: tuple[str, ...], min_size: int
) -> Rules | LogicalRules:
    """Return the rules, with what the command line says beside the file."""
    optional = (*rules.optional_axes, *optional_axes)
    if isinstance(rules, Rules):
        return Rules(rules, optional_axes=optional, min_size=min_size or None)
    if min_size:
        raise FileError("--min-size: it is for rules of paths, and these are logical")
    return LogicalRules(rules, optional_axes=optional)


def _locked_plan(source: str, declared: Declared) -> Planned:
    """Return the plan of a lock, planned anew if that is the same: a lock has no corrections."""
    locked = Plan.from_lock(Path(source))
    fresh = locked.with_rules(locked.rules)
    same = fresh if fresh.fingerprint() == locked.fingerprint() else locked
    return Planned(same, source, RuleFile(locked.rules, declared, (), source), ())


def load_sides(args: Args) -> list[Plan]:
    """Plan both sides of a diff: locks, or models with rules and a mesh."""
    sides = (args.before, args.after)
    with memory_within(byte_count(args.max_memory)):
        locks = {side: Plan.from_lock(Path(side)) for side in sides if is_lock(side)}
    models = [side for side in sides if side not in locks]
    if not models:
        why = "both sides are locks, which have their own rules and mesh"
        options = ("rules", "mesh", "dialect", "min_size", "no_fallbacks", "stacked", "companions")
        refuse(why, args, *options)
        return [locks[side] for side in sides]
    mesh = args.mesh or next((mesh_shown(lock.axis_sizes) for lock in locks.values()), None)
    if args.rules is None or mesh is None:
        why = "not a lock" if Path(models[0]).exists() else "no such lock"
        raise FileError(f"{models[0]}: {why}; for a model, give --rules and --mesh as well")
    planned = zip(models, _load(args, mesh, *models), strict=True)
    plans = locks | {side: loaded.plan for side, loaded in planned}
    return [plans[side] for side in sides]


def load_model(args: Args) -> tuple[Any, dict[str, Any]]:
    """Read a model that rules are to be written for, and arguments of `suggest` about it."""
    with working(args, f"reading {args.source}"), memory_within(byte_count(args.max_memory)):
        dialect = dialect_of(args)
        like = getattr(args, "like", None)
        rules = None if like is None else read_rule_source(like, dialect).rules
        if isinstance(rules, LogicalRules):
            raise TypeError(
                f"{like}: it is for logical axis names; rules that are mended are for paths"
            )
        dialect = dialect if rules is None else rules.dialect
        _, tree, _ = _tree(args.source, dialect)
    return tree, {"dialect": dialect, "like": rules}


def load_arrays(args: Args, source: str) -> tuple[Plan, str]:
    """Read (a model that is planned without rules, on any mesh; its name)."""
    with working(args, f"reading {source}"), memory_within(byte_count(args.max_memory)):
        dialect = dialect_of(args)
        name, tree, axis_names = _tree(source, dialect)
        return arrays_of(tree, dialect, axis_names), name


def load_hardware(text: str) -> Hardware:
    """Read the hardware in a TOML file, or finds that of this name."""
    from shardrules._plan.files.hardware import read_hardware

    is_file = text.endswith(".toml") or "/" in text
    return read_hardware(text) if is_file else as_hardware("--hardware", text)


def _fallbacks(file: RuleFile) -> Iterator[str]:
    if isinstance(file.rules, Rules):
        for rule, why in file.rules.fallbacks:
            yield f"rule {rule} {file.rules[rule][0]!r} ({why})"
    replicated = compiled_replicated(file.declared["replicated"])
    for index, why in replicated.fallbacks:
        yield f"replicated {replicated[index][0]!r} ({why})"


def dialect_of(args: Args) -> Dialect | LogicalDialect | None:
    """Return the dialect of --dialect; None without the option."""
    if args.dialect is None:
        return None
    dialects: dict[str, Dialect | LogicalDialect] = {**DIALECTS, **LOGICAL_DIALECTS}
    if args.dialect.lower() not in dialects:
        names = ", ".join(sorted(dialects))
        raise ValueError(f"there is no dialect {args.dialect!r}; there are {names}")
    return dialects[args.dialect.lower()]


def is_lock(text: str) -> bool:
    """Tell whether the file of this name is a lock."""
    path = Path(text)
    if not path.is_file() or path.suffix == ".gz":
        return False
    with path.open("rb") as file:
        return b'"shardrules lock' in file.read(200)


def _tree(source: str, dialect: Dialect | LogicalDialect | None) -> tuple[str, Any, Any]:
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


def sweep_axes(text: str) -> tuple[list[str], dict[str, int]]:
    """Return the axes of fsdp,tp,sp=1 without a size, and {axis: size} of the others."""
    parts = names(text)
    free = [part for part in parts if "=" not in part]
    fixed = ",".join(part for part in parts if "=" in part)
    if text and not free:
        raise ValueError(f"--axes {text!r}: give at least one axis without a size")
    return free, parse_mesh(fixed) if fixed else {}


def choices(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Return the values of each choice of --try: numbers, true, false, none, and else texts."""
    pairs = _pairs(
        "--try", "list", texts, "a keyword of the function and its values, as batch=8,16"
    )
    return {name: [_value(text) for text in names(values)] for name, values in pairs.items()}


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def names(text: str | None) -> list[str]:
    """Return the parts of a text with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def moments(args: Args) -> tuple[str, ...] | None:
    """Return the dtypes of the optimizer's moments; None without --optimizer."""
    count = MOMENTS.get(args.optimizer or "", 0)
    if not count:
        why = "--optimizer names no optimizer with moments"
        refuse(why, args, "optimizer_dtype", "optimizer_memory")
    dtype = numpy_name(args.optimizer_dtype or "float32")
    return None if args.optimizer is None else (dtype,) * count


def training(args: Args) -> dict[str, Any]:
    """Return the arguments of `Plan.bytes_per_device` for gradients and moments."""
    gradients = args.gradients
    return {
        "gradients": gradients == "same" or (gradients and numpy_name(gradients)),
        "optimizer": moments(args),
        "optimizer_memory_kind": args.optimizer_memory,
    }


def step_on(source: str, mesh: Any, rules: Any = None) -> tuple[Any, ...]:
    """Return the parts of what a function of the mesh gives, and of rules or those in a file."""
    from shardrules._program.lowering import step_parts

    rules = read_rule_source(rules).rules if isinstance(rules, str) else rules
    arguments = (mesh,) if rules is None else (mesh, rules)
    return step_parts(load_object(source, *arguments), source)


def mesh_of_step(args: Args) -> Any:
    """Return the mesh of --mesh: on the devices of --on, or without any, for XLA for CPU."""
    from jax.sharding import AbstractMesh, AxisType

    from shardrules._program.topologies.topology import Topology

    sizes, words = parse_mesh(args.mesh), names(args.axis_types)
    known = {kind.name.lower(): kind for kind in (AxisType.Auto, AxisType.Explicit)}
    for word in words:
        check_choice("--axis-types", word.lower(), tuple(known))
    types = tuple(known[word.lower()] for word in words)
    types *= len(sizes) if len(types) == 1 else 1
    if len(types) != len(sizes):
        raise ValueError(
            f"--axis-types has {counted(len(types), 'type')}, and --mesh has "
            f"{counted(len(sizes), 'axis')}: give one for all, or one for each"
        )
    if args.on is not None:
        return Topology(args.on, args.slices).mesh(sizes, axis_types=types)
    if args.slices > 1:
        raise ValueError("--slices are of --on: give it, such as --on v5p:8x8x8")
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def trace_on(args: Args, source: str, mesh: str, rules: Any = None) -> Step:
    """Trace the step that a function returns for a mesh without devices."""
    from shardrules._program.step.step import trace

    with working(args, "tracing"):
        function, arguments, *_ = step_on(source, as_mesh(parse_mesh(mesh)), rules)
        return trace(function, *arguments)


def room(args: Args) -> Room:
    """Return the memory of --hbm, and of --host-memory."""
    hbm = memory("--hbm", "a device", args.hbm)
    return Room(hbm, memory("--host-memory", "a host", args.host_memory))


def check_room(room: Room) -> None:
    """Check that there is a memory for --must-fit."""
    if not any(room):
        raise ValueError("--must-fit: give the memory that it must fit into, as --hbm 96GB")


def must_fit(findings: Findings, plan: Plan, room: Room, training: dict[str, Any]) -> Findings:
    """Add an error if the bytes of a step do not fit; it has the place of that of `hbm`."""
    from shardrules._plan.check_leaves import no_room

    needed, kinds = plan.bytes_per_device(**training), plan.kinds
    if room.fits(needed):
        return findings
    by_bytes = sorted(
        plan.folded, key=lambda part: -kinds[part.group].device_bytes * len(part.rows)
    )
    others = (finding for finding in findings if finding.kind != "memory")
    return Findings([no_room(needed, room, by_bytes), *others], findings.scope)


def memory(option: str, owner: str, text: str | None) -> int | None:
    """Return the bytes that an option means; few without a unit may be meant as gigabytes.

    The name of a device stands for the bytes of its memory.
    """
    if text is None:
        return None
    try:
        count = byte_count(text)
    except ValueError:
        if device := device_of(text.strip()):
            return device.memory_bytes
        raise
    if count == 0:
        raise ValueError(f"{option} is {text!r}; {owner} has memory, such as 96GB")
    if text.strip()[-1:].isdigit() and count < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"{option} {text}: that is {count:,} bytes; write {text}GB")
    return count


def share(option: str, text: str) -> float:
    """Return the part that a text such as 2% or 0.02 means."""
    number = text.strip().removesuffix("%")
    try:
        part = float(number) / (100 if number != text.strip() else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < math.inf:
        raise ValueError(f"{option} is {text!r}; write a part, such as 2%")
    return part


def levels(texts: Iterable[str]) -> dict[Any, Any]:
    """Return levels by kind; that these exist is for `Plan.check` to say."""
    return _pairs("--level", "level", texts, "a kind and its level, as dead=off")


def budget_texts(texts: Iterable[str]) -> dict[str, str]:
    """Return budgets by what they are of; that they are sizes is for `verify` to say."""
    return _pairs("--budget", "budget", texts, "what it is of and its bytes, as fsdp=25GB")


def _pairs(option: str, noun: str, texts: Iterable[str], form: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text!r}: write {form}")
        if pairs.setdefault(key, value) != value:
            raise ValueError(f"{option} gives {key!r} two {noun}s, {pairs[key]!r} and {value!r}")
    return pairs


def refuse(why: str, args: Args, *options: str) -> None:
    """Check that none of these options is given, since they would be ignored."""
    flags = [f"--{name.replace('_', '-')}" for name in options if getattr(args, name, None)]
    if flags:
        raise ValueError(f"{why}, so leave out {', '.join(flags)}")
