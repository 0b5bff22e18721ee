"""Lockfiles: a plan as a JSON text that is read in reviews and compared in CI.

Siblings are folded, so a lock of 10^5 leaves has some dozens of lines, and nothing is lost. What is
read is checked and never executed. Must not know how a plan is made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._correction import Correction, RuleSpec, rule_spec
from shardrules._files.content import parse_json, read_bytes
from shardrules._files.errors import FileError
from shardrules._matching.dialects import Dialect
from shardrules._matching.rules import Rules
from shardrules._planning.fold import parts_of
from shardrules._planning.kinds import Kind, plain_entries, spec_shown
from shardrules._planning.survey import AMBIGUOUS, NO_RULE_NEEDED, UNMATCHED, Alike, Survey, checked
from shardrules._sharding.device_bytes import check_countable, held_of
from shardrules._sharding.mesh import checked_sizes
from shardrules._specs import Entries, entries_of, entry_axes, is_unconstrained, partition_spec
from shardrules._words import brief, shown

if TYPE_CHECKING:
    from shardrules._planning.plan import Plan

__all__ = ["content_of", "fingerprint", "lock", "read_lock"]

_FORMAT: Final = "shardrules lock 2"
# Version 0.1's, which nothing keeps from other rules than those that it was made with.
_OLD_FORMAT: Final = "shardrules lock 1"
# Ten times those of the largest models; a few characters of a pattern must not fill the memory.
_MOST_LEAVES: Final = 10**6
# Of paths, non-ASCII characters escaped: with it reading takes 400 MB.
_MOST_TEXT: Final = 10**8
# That are hashed at once.
_ROWS: Final = 1000
_OLD_FIELDS: Final = frozenset({"format", "fingerprint", "mesh", "dialect", "rules", "leaves"})
_FIELDS: Final = {_FORMAT: _OLD_FIELDS | {"rules_fingerprint"}, _OLD_FORMAT: _OLD_FIELDS}
_LEAF_FIELDS: Final = frozenset({"path", "shape", "dtype", "rule", "spec", "problem"})
_RULE_FIELDS: Final = frozenset({"rule", "pattern", "flags", "spec", "correction", "units"})
_FLAGS: Final = int(re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE)
# JSON's reader takes the two for the one character that they would stand for.
_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_UNCONSTRAINED: Final = {"unconstrained": True}
_WAY_OUT: Final = "make the lock again with Plan.lock"


def fingerprint(plan: Plan) -> str:
    """See `Plan.fingerprint`."""
    return _digest(plan.axis_sizes, plan.paths, plan.kind_of, plan.kinds)


def _digest(axis_sizes: dict[str, int], paths: list[str], kind_of: Any, kinds: list[Kind]) -> str:
    of_kind = [f"\t{k.shape}\t{k.dtype_shown}\t{spec_shown(k.spec)}\n" for k in kinds]
    told = map(of_kind.__getitem__, kind_of.tolist())
    return _hash(ascii(axis_sizes), map(operator.add, map(ascii, paths), told))


def _rules_digest(dialect: Any, rules: Any, patterns: list[str], decided_by: list[str]) -> str:
    """Of what decides the leaves, in whatever order.

    Args:
        dialect: As in a lock.
        rules: As in a lock.
        patterns: Of the folded paths.
        decided_by: Per pattern its rule and problem, as JSON.
    """
    head = json.dumps([dialect, rules], sort_keys=True)
    rows = (f"{one!a}\t{told}\n" for one, told in zip(patterns, decided_by, strict=True))
    return _hash(head, rows)


def _hash(head: str, rows: Iterable[str]) -> str:
    # With its tabs and newlines escaped no path can pass for a row of something else.
    digest = hashlib.sha256(head.encode())
    ordered = sorted(rows)
    for begin in range(0, len(ordered), _ROWS):
        text = "".join(ordered[begin : begin + _ROWS])
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def lock(plan: Plan) -> str:
    """See `Plan.lock`."""
    _check_lockable(plan.paths)
    patterns = [one.pattern for one in plan.folded]
    order = sorted(range(len(patterns)), key=patterns.__getitem__)
    patterns = [patterns[i] for i in order]
    kinds = [plan.folded[i].group for i in order]
    leaf_of = [_json(_leaf_entry(kind)).removeprefix("{") for kind in plan.kinds]
    leaves = [
        f'{{"path": {pattern}, {leaf_of[kind]}'
        for pattern, kind in zip(_each_json(patterns), kinds, strict=True)
    ]
    rules = [_rule_entry(index, rule) for index, rule in enumerate(plan.rules)]
    dialect = dataclasses.asdict(plan.rules.dialect)
    decided_by = [json.dumps([kind.rule, kind.problem]) for kind in plan.kinds]
    head = {
        "format": _FORMAT,
        "fingerprint": fingerprint(plan),
        "rules_fingerprint": _rules_digest(
            dialect, rules, patterns, [decided_by[kind] for kind in kinds]
        ),
        "mesh": plan.axis_sizes,
        "dialect": dialect,
    }
    parts = [f" {json.dumps(key)}: {_json(value)}" for key, value in head.items()]
    parts += [_one_a_line("rules", list(map(_json, rules))), _one_a_line("leaves", leaves)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _check_lockable(paths: list[str]) -> None:
    if len(paths) > _MOST_LEAVES:
        raise ValueError(f"a lock holds at most {_MOST_LEAVES:,} leaves, not {len(paths):,}")
    length = sum(map(_length, paths))
    if length > _MOST_TEXT:
        raise ValueError(
            f"a lock holds paths of at most {_MOST_TEXT:,} characters together, not {length:,}"
        )
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(
            f"two leaves have the path {twice!r}, and a lock tells leaves apart by their paths: "
            "rename one of them"
        )


def _length(path: str) -> int:
    """Of the path with non-ASCII characters escaped."""
    return len(path) if path.isascii() else len(ascii(path))


def read_lock(data: bytes, name: str) -> tuple[Survey, list[Kind], dict[str, int]]:
    """What a plan is made of, from a lock's content.

    Raises:
        FileError: It is no lock, or one that does not hold together; `name` is the file's.
    """
    content = parse_json(Path(name), data)
    with _errors_at(name):
        fields = _FIELDS.get(str(content.get("format"))) if isinstance(content, dict) else None
        if fields is None:
            raise ValueError(f"not a lock: its format is not {_FORMAT!r}")
        _check_known(content, fields)
        axis_sizes = checked_sizes(_typed(content["mesh"], dict))
        check_countable(axis_sizes)
        rule_entries = _typed(content["rules"], list)
        leaf_entries = _typed(content["leaves"], list)
    with _errors_at(f"{name}: rules"):
        pairs = [_rule(index, entry) for index, entry in enumerate(rule_entries)]
        rules = Rules(pairs, _dialect(_typed(content["dialect"], dict)))
    leaves = _Leaves(len(rules), axis_sizes)
    for number, entry in enumerate(leaf_entries):
        with _errors_at(f"{name}: leaves[{number}]"):
            leaves.add(entry)
        leaf_entries[number] = None  # so that what is made of them takes their place in the memory
    tree = {path: row for row, path in enumerate(leaves.paths)}
    kind_of = np.array(leaves.kind_of, np.int32)
    with _errors_at(name):
        if len(tree) < len(leaves.paths):
            raise ValueError("two of its patterns stand for the same path")
        found = {"fingerprint": _digest(axis_sizes, leaves.paths, kind_of, leaves.kinds)}
        if "rules_fingerprint" in fields:
            dialect = content["dialect"]
            found["rules_fingerprint"] = _rules_digest(
                dialect, rule_entries, leaves.patterns, leaves.decided_by
            )
        for field, digest in found.items():
            if digest != content[field]:
                what = field.replace("_", "' ")
                raise ValueError(f"its {what} is that of another plan: it was changed by hand")
    return Survey(rules, tree, leaves.paths, kind_of, leaves.alike), leaves.kinds, axis_sizes


class _Leaves:
    """What the entries of leaves stand for, as columns."""

    def __init__(self, rules: int, axis_sizes: dict[str, int]) -> None:
        self.paths: list[str] = []
        self.kind_of: list[int] = []
        self.alike: list[Alike] = []
        self.kinds: list[Kind] = []
        self.patterns: list[str] = []
        self.decided_by: list[str] = []
        self._rules = rules
        self._axis_sizes = axis_sizes
        self._known: dict[str, tuple[int, str]] = {}
        self._left = _MOST_TEXT

    def add(self, entry: Any) -> None:
        """One entry."""
        _check_known(_typed(entry, dict), _LEAF_FIELDS)
        pattern = _typed(entry.pop("path"), str)
        text = repr(entry)
        known = self._known.get(text)
        if known is None:
            self.alike.append(_alike(entry, self._rules))
            self.kinds.append(_kind(self.alike[-1], entry, self._axis_sizes))
            told = json.dumps([entry["rule"], entry.get("problem")])
            known = self._known[text] = len(self.kinds) - 1, told
        kind, told = known
        expanded = _expanded(pattern, _MOST_LEAVES - len(self.paths), self._left)
        self._left -= _length(pattern) * len(expanded)
        self.paths += expanded
        self.kind_of += [kind] * len(expanded)
        self.patterns.append(pattern)
        self.decided_by.append(told)


@contextmanager
def _errors_at(place: str) -> Iterator[None]:
    """Whatever is wrong with a lock becomes a FileError that names the place."""
    try:
        yield
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError, re.error) as error:
        what = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise FileError(f"{place}: {what}; {_WAY_OUT}") from error


def _check_known(entry: dict[str, Any], fields: frozenset[str]) -> None:
    if not entry.keys() <= fields:
        unknown = sorted(entry.keys() - fields)
        raise ValueError(f"there are fields that are not known: {shown(unknown)}")


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{shown(value)} stands where a {kind.__name__} belongs")
    return value


def content_of(lock_or_path: str | os.PathLike[str]) -> tuple[bytes, str]:
    """(content, name) of a lock that is given as its text or as a file."""
    if isinstance(lock_or_path, str) and lock_or_path.lstrip().startswith("{"):
        return lock_or_path.encode("utf-8", "surrogatepass"), "the lock"
    path = Path(lock_or_path)
    try:
        return read_bytes(path), str(path)
    except ValueError as error:  # such as a FileError, or no name that a file can have
        name = path if isinstance(lock_or_path, os.PathLike) else shown(lock_or_path)
        why = str(error).removeprefix(f"{path}: ")
        raise FileError(f"{name}: neither a lock nor a file with one: {why}") from error


def _json(value: Any) -> str:
    if _ADJACENT_SURROGATES.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(
            f"a lock cannot hold adjacent lone surrogates, as in {shown(value)}: give the leaf, "
            "pattern or axis another name"
        )
    return json.dumps(value)


def _each_json(texts: list[str]) -> list[str]:
    """Each text as JSON, all at once: ten times as fast."""
    for text in texts:
        if not text.isascii():
            _json(text)
    # In JSON a newline is escaped.
    return json.dumps(texts, separators=("\n", ":"))[1:-1].split("\n") if texts else []


def _one_a_line(key: str, entries: list[str]) -> str:
    lines = ",\n".join("  " + entry for entry in entries)
    return f" {json.dumps(key)}: [\n{lines}\n ]"


def _leaf_entry(kind: Kind) -> dict[str, Any]:
    entry = {
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
    return [_UNCONSTRAINED if is_unconstrained(e) else e for e in plain_entries(spec)]


def _rule_entry(index: int, rule: tuple[Any, Any]) -> dict[str, Any]:
    pattern, given = rule
    wanted = rule_spec(given)
    entry: dict[str, Any] = {"rule": index, "pattern": pattern}
    if isinstance(pattern, re.Pattern):
        entry |= {"pattern": pattern.pattern, "flags": int(pattern.flags) & _FLAGS}
    entry["spec"] = _spec_entry(wanted.spec)
    if wanted.correction is not None:
        entry["correction"] = dataclasses.asdict(wanted.correction)
    if wanted.units:
        entry["units"] = wanted.units
    return entry


def _rule(index: int, entry: Any) -> tuple[Any, RuleSpec]:
    _check_known(_typed(entry, dict), _RULE_FIELDS)
    if _typed(entry["rule"], int) != index:
        raise ValueError(f"rule {index} is {shown(entry)}")
    pattern = entry["pattern"]
    if isinstance(pattern, list):
        pattern = tuple(pattern)
    if "flags" in entry:
        flags = _typed(entry["flags"], int)
        if flags & ~_FLAGS:
            raise ValueError(f"rule {index} has flags that do not exist: {flags}")
        pattern = re.compile(_typed(pattern, str), flags)
    correction = None
    if "correction" in entry:
        correction = Correction(**_typed(entry["correction"], dict))
    units = tuple(_typed(entry.get("units", []), list))
    return pattern, RuleSpec(_spec(entry["spec"]), correction, units)


def _dialect(fields: dict[str, Any]) -> Dialect:
    _typed(fields["name"], str)
    match = tuple(_typed(way, str) for way in _typed(fields["match"], list))
    correction = Correction(**_typed(fields["correction"], dict))
    return Dialect(**{**fields, "match": match, "correction": correction})


def _spec(entries: Any) -> Any:
    plain = [_spec_part(entry) for entry in _typed(entries, list)]
    if _UNCONSTRAINED not in plain:
        return Entries(plain)
    from jax.sharding import PartitionSpec

    free = PartitionSpec.UNCONSTRAINED
    return partition_spec(*(free if isinstance(entry, dict) else entry for entry in plain))


def _spec_part(entry: Any) -> Any:
    if isinstance(entry, list):
        return tuple(_typed(axis, str) for axis in entry)
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and entry == _UNCONSTRAINED and entry["unconstrained"] is True:
        return entry
    raise TypeError(f"an entry of a spec is {shown(entry)}")


def _alike(entry: dict[str, Any], rules: int) -> Alike:
    rule, shape, problem = entry["rule"], entry["shape"], entry.get("problem")
    if rule is not None and not 0 <= _typed(rule, int) < rules:
        raise ValueError(f"there is no rule {rule}")
    if (problem is None) == (entry["spec"] is None):
        raise ValueError("a leaf has either a spec or a problem")
    dtype = _typed(entry["dtype"], str)
    if shape is not None:
        shape = tuple(_typed(shape, list))
    elif dtype != "-":
        raise ValueError(f"a leaf that is no array has the dtype {shown(dtype)}")
    without = {"unmatched": UNMATCHED, "ambiguous": AMBIGUOUS}.get(problem or "", NO_RULE_NEEDED)
    return checked(without if rule is None else rule, shape, dtype)


def _kind(alike: Alike, entry: dict[str, Any], axis_sizes: dict[str, int]) -> Kind:
    spec = None if entry["spec"] is None else _spec(entry["spec"])
    named = [axis for one in entries_of(spec or Entries()) for axis in entry_axes(one)]
    if len(set(named)) < len(named):
        raise ValueError(f"the spec {brief(spec_shown(spec))} names an axis twice")
    problem = entry.get("problem")
    return Kind(
        rule=entry["rule"],
        shape=alike.shape,
        dtype=alike.dtype,
        bits=alike.bits,
        wanted=None,
        spec=spec,
        losses=(),
        costs=(),
        problem=None if problem is None else _typed(problem, str),
        notes=(),
        origin="a lock",
        held=held_of(alike.shape or (), alike.bits, spec or Entries(), axis_sizes),
        axis_sizes=axis_sizes,
    )


def _expanded(pattern: str, most: int, most_text: int) -> list[str]:
    """The paths that a folded pattern stands for."""
    length = _length(pattern)
    choices: list[list[str]] = []
    count = 1
    for text, numbers in parts_of(pattern):
        if numbers is None:
            choices.append([text])
            continue
        ranges = [_range(one) for one in numbers.split(",")]
        # Not `len`, which is for numbers of 63 bits.
        count *= sum(numbers.stop - numbers.start for numbers in ranges)
        if count > most or count * length > most_text:
            raise ValueError(f"{shown(pattern)} stands for more leaves than a lock may have")
        choices.append([str(number) for one in ranges for number in one])
    if count > most or count * length > most_text:
        raise ValueError("there are more leaves than a lock may have")
    return ["".join(texts) for texts in itertools.product(*choices)]


def _range(text: str) -> range:
    first, _, last = text.partition("..")
    numbers = range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(f"no numbers are {text}")
    return numbers
