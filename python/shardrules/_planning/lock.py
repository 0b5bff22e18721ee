"""Lockfiles: a plan as a JSON text that is read in reviews and compared in CI.

Siblings are folded, so a lock of 10^5 leaves has some dozens of lines, and nothing is lost. What is
read is checked and never executed. Must not know how a plan is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._correction import Correction, RuleSpec
from shardrules._device_bytes import device_bytes
from shardrules._dialects import Dialect
from shardrules._files.errors import FileError
from shardrules._mesh import checked_sizes
from shardrules._planning.fold import fold
from shardrules._planning.kinds import Kind, spec_shown
from shardrules._planning.survey import NO_RULE_NEEDED, Alike, Survey, checked
from shardrules._rules import Rules
from shardrules._specs import Entries, entries_of, is_unconstrained, partition_spec

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan

_FORMAT: Final = "shardrules lock 1"
_MOST_LEAVES: Final = 10**8
# What comes of a list for an object, a number beyond all bounds, a field that is not there, ...
_MALFORMED: Final = (
    *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(RecursionError, re.error),
)
_FIELDS: Final = frozenset({"path", "shape", "dtype", "rule", "spec", "problem"})


def fingerprint(plan: Plan) -> str:
    """See `Plan.fingerprint`."""
    of_kind = [f"\t{k.shape}\t{k.dtype_shown}\t{spec_shown(k.spec)}\n" for k in plan.kinds]
    rows = [path + of_kind[kind] for path, kind in zip(plan.paths, plan.kind_of, strict=True)]
    digest = hashlib.sha256(repr(plan.axis_sizes).encode())
    digest.update("".join(sorted(rows)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def lock(plan: Plan) -> str:
    """See `Plan.lock`."""
    leaves = [
        _leaf_entry(plan.kinds[one.group], one.pattern)
        for one in sorted(fold(plan.paths, plan.kind_of), key=lambda one: one.pattern)
    ]
    head = {
        "format": _FORMAT,
        "fingerprint": fingerprint(plan),
        "mesh": plan.axis_sizes,
        "dialect": dataclasses.asdict(plan.rules.dialect),
    }
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rules = [_rule_entry(index, rule) for index, rule in enumerate(plan.rules)]
    parts += [_one_a_line("rules", rules), _one_a_line("leaves", leaves)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_lock(text: str, name: str) -> tuple[Survey, list[Kind], dict[str, int]]:
    """What a plan is made of, from a lock's text.

    Raises:
        FileError: It is no lock, or one that does not hold together; `name` is the file's.
    """
    try:
        content = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise FileError(f"{name}: not a lock: its format is not {_FORMAT!r}")
        axis_sizes = checked_sizes(content["mesh"])
        rules = Rules(map(_rule, content["rules"]), _dialect(content["dialect"]))
        alike: list[Alike] = []
        kinds: list[Kind] = []
        paths: list[str] = []
        kind_of: list[int] = []
        for number, entry in enumerate(content["leaves"]):
            alike.append(_alike(entry, len(rules)))
            kinds.append(_kind(alike[-1], entry, axis_sizes))
            expanded = _expanded(entry["path"], _MOST_LEAVES - len(paths))
            paths += expanded
            kind_of += [number] * len(expanded)
    except FileError:
        raise
    except _MALFORMED as error:
        raise FileError(f"{name}: not a lock: {type(error).__name__}: {error}") from error
    tree = {path: row for row, path in enumerate(paths)}
    if len(tree) < len(paths):
        raise FileError(f"{name}: not a lock: two of its patterns stand for the same path")
    return Survey(rules, tree, paths, np.array(kind_of, np.int32), alike), kinds, axis_sizes


def text_of(lock_or_path: str | Path) -> tuple[str, str]:
    """(text, name) of a lock that is given as its text or as a file."""
    if isinstance(lock_or_path, str) and lock_or_path.lstrip().startswith("{"):
        return lock_or_path, "the lock"
    try:
        return Path(lock_or_path).read_text(encoding="utf-8"), str(lock_or_path)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{lock_or_path}: not readable as a lock: {error}") from error


def _one_a_line(key: str, entries: list[Any]) -> str:
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    return f" {json.dumps(key)}: [\n{lines}\n ]"


def _leaf_entry(kind: Kind, pattern: str) -> dict[str, Any]:
    entry = {
        "path": pattern,
        "shape": kind.shape,
        "dtype": kind.dtype_shown,
        "rule": kind.rule,
        "spec": None if kind.spec is None else _spec_entry(kind.spec),
        "problem": kind.problem,
    }
    return {key: value for key, value in entry.items() if key != "problem" or value is not None}


def _spec_entry(spec: Any) -> list[Any]:
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ValueError(f"a lock cannot hold the unreduced or reduced axes of {spec_shown(spec)}")
    return [{"unconstrained": True} if is_unconstrained(e) else e for e in entries_of(spec)]


def _rule_entry(index: int, rule: tuple[Any, Any]) -> dict[str, Any]:
    pattern, given = rule
    wanted = given if isinstance(given, RuleSpec) else RuleSpec(given)
    entry: dict[str, Any] = {"rule": index, "pattern": pattern}
    if isinstance(pattern, re.Pattern):
        entry |= {"pattern": pattern.pattern, "flags": int(pattern.flags)}
    entry["spec"] = _spec_entry(wanted.spec)
    if wanted.correction is not None:
        entry["correction"] = dataclasses.asdict(wanted.correction)
    if wanted.units:
        entry["units"] = wanted.units
    return entry


def _rule(entry: dict[str, Any]) -> tuple[Any, RuleSpec]:
    pattern = entry["pattern"]
    if isinstance(pattern, list):
        pattern = tuple(pattern)
    if "flags" in entry:
        pattern = re.compile(pattern, entry["flags"])
    correction = Correction(**entry["correction"]) if "correction" in entry else None
    return pattern, RuleSpec(_spec(entry["spec"]), correction, tuple(entry.get("units", ())))


def _dialect(fields: dict[str, Any]) -> Dialect:
    correction = Correction(**fields["correction"])
    return Dialect(**{**fields, "match": tuple(fields["match"]), "correction": correction})


def _spec(entries: list[Any]) -> Any:
    if not isinstance(entries, list):
        raise TypeError(f"a spec is a list, not {entries!r}")
    plain = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
    for entry in plain:
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        if not all(isinstance(name, str) or name == {"unconstrained": True} for name in names):
            raise TypeError(f"an entry of a spec is {entry!r}")
    if {"unconstrained": True} not in plain:
        return Entries(plain)
    from jax.sharding import PartitionSpec

    free = PartitionSpec.UNCONSTRAINED
    return partition_spec(*(free if isinstance(entry, dict) else entry for entry in plain))


def _alike(entry: dict[str, Any], rules: int) -> Alike:
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS:
        raise TypeError(f"a leaf has fields that are not known: {entry!r}")
    rule = entry["rule"]
    if rule is not None and (not isinstance(rule, int) or not 0 <= rule < rules):
        raise ValueError(f"there is no rule {rule!r}")
    shape = None if entry["shape"] is None else tuple(entry["shape"])
    return checked(NO_RULE_NEEDED if rule is None else rule, shape, entry["dtype"])


def _kind(alike: Alike, entry: dict[str, Any], axis_sizes: dict[str, int]) -> Kind:
    spec = None if entry["spec"] is None else _spec(entry["spec"])
    held = device_bytes(alike.shape or (), alike.bits, spec or Entries(), axis_sizes)
    return Kind(
        rule=entry["rule"],
        shape=alike.shape,
        dtype=alike.dtype,
        bits=alike.bits,
        wanted=None,
        spec=spec,
        losses=(),
        costs=(),
        problem=entry.get("problem"),
        notes=(),
        origin="a lock",
        device_bytes=held,
    )


# {{ and }} are braces of the path; {0..3,7} is a set of numbers.
_PARTS: Final = re.compile(r"\{\{|\}\}|\{([0-9][0-9.,]*)\}|[^{}]+")


def _expanded(pattern: str, most: int) -> list[str]:
    """The paths that a folded pattern stands for."""
    choices: list[list[str]] = []
    end, count = 0, 1
    for part in _PARTS.finditer(pattern):
        if part.start() != end:
            break
        end = part.end()
        text = part.group()
        choices.append([text[0] if text in ("{{", "}}") else text])
        if part.group(1) is not None:
            choices[-1] = [str(n) for numbers in _ranges(part.group(1), most) for n in numbers]
            count *= len(choices[-1])
        if count > most:
            raise ValueError(f"{pattern} stands for more leaves than a lock may have")
    if end != len(pattern):
        raise ValueError(f"{pattern} is no folded path: at {end} its braces make no sense")
    return ["".join(texts) for texts in itertools.product(*choices)]


def _ranges(text: str, most: int) -> Iterator[range]:
    for one in text.split(","):
        first, _, last = one.partition("..")
        numbers = range(int(first), int(last or first) + 1)
        if len(numbers) > most:
            raise ValueError(f"{{{text}}} stands for more leaves than a lock may have")
        yield numbers
