"""Locks: the text of a plan as JSON, a line for each folded path and each rule, and its reader."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardrules._base.correction import Correction, LibraryCorrection
from shardrules._base.io import parse_json
from shardrules._base.mesh_sizes import checked_sizes
from shardrules._base.rule_specs import Fsdp, RuleSpec, check_memory_kind, fsdp, rule_spec
from shardrules._base.specs import (
    Entries,
    entries_of,
    entry_axes,
    is_unconstrained,
    partition_spec,
    plain_entries,
    spec_shown,
    tags_of,
    with_tags,
)
from shardrules._base.text import brief, shown
from shardrules._plan.align import check_distinct
from shardrules._plan.fold import parts_of, runs_of
from shardrules._plan.kinds import (
    AMBIGUOUS_LEAVES,
    UNMATCHED_LEAVES,
    Fit,
    Kind,
    dtype_shown,
    kind_of,
    placement_shown,
    problem_shown,
)
from shardrules._plan.leaves import (
    AMBIGUOUS,
    NO_RULE_NEEDED,
    UNMATCHED,
    LeafType,
    Leaves,
    checked_type,
)
from shardrules._plan.lock_texts import (
    check_fields,
    checked_json,
    line_by_line,
    lock_errors,
    of_type,
)
from shardrules._rules.dialects import Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan

FORMAT: Final = "shardrules lock 2"
_FORMAT_1: Final = "shardrules lock 1"
MOST_LEAVES: Final = 10**6
"""Ten times those of the largest models; a few characters of a pattern must not fill the memory."""
MOST_TEXT: Final = 10**8
"""Characters of all paths, non-ASCII ones escaped: to read so many takes 400 MB."""
_LOGICAL: Final = "logical"
"""The `kind` of a lock whose rules are for logical axis names; others have none."""
_FIELDS: Final = frozenset(
    ("format", "fingerprint", "rules_fingerprint", "kind", "mesh", "dialect", "rules", "leaves")
)
_POLICY: Final = ("optional_axes", "min_size")
"""What rules say beside their dialect, in its entry; left out where they say nothing."""
_LEAF_FIELDS: Final = frozenset(
    ("path", "shape", "dtype", "rule", "names", "rules", "spec", "memory_kind", "problem")
)
_RULE_FIELDS: Final = frozenset(
    ("rule", "pattern", "flags", "spec", "correction", "units", "memory_kind", "optional_axes")
)
_NAME_RULE_FIELDS: Final = frozenset(("rule", "name", "axes"))
_FSDP_FIELDS: Final = frozenset(("fsdp", "min_bytes", "min_rank", "within"))
_TAG_FIELDS: Final = frozenset(("entries", "unreduced", "reduced", "unreduced_kind"))
"""Fields of a spec with unreduced or reduced axes; others are lists of entries."""
_FLAGS: Final = int(re.ASCII | re.IGNORECASE | re.MULTILINE | re.DOTALL | re.VERBOSE | re.UNICODE)
_UNCONSTRAINED: Final = {"unconstrained": True}
_ROWS_HASHED_AT_ONCE: Final = 1000
_FIX: Final = "make the lock again with Plan.lock"
_RULE_OF: Final = {"unmatched": UNMATCHED, "ambiguous": AMBIGUOUS}
_PROBLEMS: Final = {"unmatched": UNMATCHED_LEAVES, "ambiguous": AMBIGUOUS_LEAVES}


def plan_fingerprint(columns: Plan) -> str:
    return leaves_digest(columns.axis_sizes, columns.paths, columns.kind_of, columns.kinds)


def leaves_digest(
    axis_sizes: dict[str, int], paths: list[str], kind_of: Any, kinds: list[Kind]
) -> str:
    """Digest what each leaf gets on which mesh, whatever the order of the leaves."""
    kind_texts = [f"\t{k.shape}\t{dtype_shown(k)}\t{_placed(k)}\n" for k in kinds]
    rows = map(kind_texts.__getitem__, kind_of.tolist())
    return _sha256(ascii(axis_sizes), map(operator.add, map(ascii, paths), rows))


def _placed(kind: Kind) -> str:
    counted = "" if kind.status == "placed" or kind._counted is None else spec_shown(kind._counted)
    return placement_shown(kind) + counted


def rules_digest(dialect: Any, rules: Any, patterns: list[str], decided_by: list[str]) -> str:
    """Digest what decides the leaves, whatever their order."""
    head = json.dumps([dialect, rules], sort_keys=True)
    rows = (f"{path!a}\t{decider}\n" for path, decider in zip(patterns, decided_by, strict=True))
    return _sha256(head, rows)


def _decider_text(entry: dict[str, Any]) -> str:
    """Return what decides leaves, from their entry, for `rules_digest`."""
    decider = [entry["rule"], entry.get("problem")]
    return json.dumps([*decider, entry["names"], entry["rules"]] if "names" in entry else decider)


def _sha256(head: str, rows: Iterable[str]) -> str:
    # With its tabs and newlines escaped no path can pass for a row of something else.
    digest = hashlib.sha256(head.encode())
    ordered = sorted(rows)
    for begin in range(0, len(ordered), _ROWS_HASHED_AT_ONCE):
        text = "".join(ordered[begin : begin + _ROWS_HASHED_AT_ONCE])
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _length(path: str) -> int:
    """Count the characters of the path, non-ASCII ones escaped."""
    return len(path) if path.isascii() else len(ascii(path))


def lock_text(columns: Plan) -> str:
    """Write `Plan.lock`."""
    _check_lockable(columns.paths)
    folded = sorted(columns.folded, key=lambda paths: paths.pattern)
    patterns = [paths.pattern for paths in folded]
    kinds = [paths.group for paths in folded]
    entries = list(map(_leaf_entry, columns.kinds))
    leaf_of = [checked_json(entry).removeprefix("{") for entry in entries]
    leaves = [
        f'{{"path": {pattern}, {leaf_of[kind]}'
        for pattern, kind in zip(_each_json(patterns), kinds, strict=True)
    ]
    is_logical = isinstance(columns.rules, LogicalRules)
    rule_entry = _name_rule_entry if is_logical else _rule_entry
    rules = [{"rule": index, **rule_entry(*rule)} for index, rule in enumerate(columns.rules)]
    fields = dataclasses.asdict(columns.rules.dialect)
    dialect = {name: value for name, value in fields.items() if value is not None}
    policy = {name: getattr(columns.rules, name, None) for name in _POLICY}
    if said := {name: value for name, value in policy.items() if value}:
        dialect["policy"] = said
    deciders = list(map(_decider_text, entries))
    head = {
        "format": FORMAT,
        **({"kind": _LOGICAL} if is_logical else {}),
        "fingerprint": plan_fingerprint(columns),
        "rules_fingerprint": rules_digest(
            dialect, rules, patterns, [deciders[kind] for kind in kinds]
        ),
        "mesh": columns.axis_sizes,
        "dialect": dialect,
    }
    parts = [f" {json.dumps(key)}: {checked_json(value)}" for key, value in head.items()]
    parts += [line_by_line("rules", map(checked_json, rules)), line_by_line("leaves", leaves)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _check_lockable(paths: list[str]) -> None:
    if len(paths) > MOST_LEAVES:
        raise ValueError(f"a lock holds at most {MOST_LEAVES:,} leaves, not {len(paths):,}")
    characters = sum(map(_length, paths))
    if characters > MOST_TEXT:
        raise ValueError(
            f"a lock holds paths of at most {MOST_TEXT:,} characters together, not {characters:,}"
        )
    check_distinct(paths, "a lock tells leaves apart by their paths")


def _each_json(texts: list[str]) -> list[str]:
    """Write each text as JSON, all at once: ten times as fast."""
    for text in texts:
        if not text.isascii():
            checked_json(text)
    # In JSON a newline is escaped.
    return json.dumps(texts, separators=("\n", ":"))[1:-1].split("\n") if texts else []


def read_lock(data: bytes, name: str) -> tuple[Leaves, list[Kind], dict[str, int]]:
    """Read the leaves, their kinds and the mesh of a plan from a lock's content."""
    content = parse_json(Path(name), data)
    with lock_errors(name, _FIX):
        _check_format(content)
        axis_sizes = checked_sizes(of_type(content["mesh"], dict))
        rule_entries = of_type(content["rules"], list)
        leaf_entries = of_type(content["leaves"], list)
    with lock_errors(f"{name}: rules", _FIX):
        if content.get("kind", _LOGICAL) != _LOGICAL:
            raise ValueError(f"its kind is {shown(content['kind'])}, which is not known")
        rules = _read_rules(rule_entries, of_type(content["dialect"], dict), "kind" in content)
    leaves = _Leaves(len(rules), axis_sizes)
    for number, entry in enumerate(leaf_entries):
        with lock_errors(f"{name}: leaves[{number}]", _FIX):
            leaves.add(entry)
        leaf_entries[number] = None  # so that what is made of them takes their place in the memory
    tree = {path: row for row, path in enumerate(leaves.paths)}
    kind_of = np.array(leaves.kind_of, np.int32)
    with lock_errors(name, _FIX):
        if len(tree) < len(leaves.paths):
            raise ValueError("two of its patterns stand for the same path")
        of_leaves = leaves_digest(axis_sizes, leaves.paths, kind_of, leaves.kinds)
        _check_digest("fingerprint", content["fingerprint"], of_leaves)
        of_rules = rules_digest(
            content["dialect"], rule_entries, leaves.patterns, leaves.decided_by
        )
        _check_digest("rules' fingerprint", content["rules_fingerprint"], of_rules)
    found = Leaves(rules, tree, leaves.paths, leaves.paths, kind_of, leaves.types)
    return found, leaves.kinds, axis_sizes


def _check_format(content: Any) -> None:
    form = content.get("format") if isinstance(content, dict) else None
    if form == _FORMAT_1:
        raise ValueError(
            f"its format is {_FORMAT_1!r}, of shardrules 0.1, and this reads {FORMAT!r}"
        )
    if isinstance(form, str) and form.startswith("shardrules program lock"):
        raise ValueError("it is no plan's lock, but that of a program, which Program.diff compares")
    if form != FORMAT:
        raise ValueError(f"not a lock: its format is not {FORMAT!r}")
    check_fields(content, _FIELDS)


def _check_digest(what: str, written: object, digest: str) -> None:
    if digest != written:
        raise ValueError(f"its {what} is that of another plan: it was changed by hand")


class _Leaves:
    """Plan that the entries of a lock stand for."""

    def __init__(self, rules: int, axis_sizes: dict[str, int]) -> None:
        self.paths: list[str] = []
        self.kind_of: list[int] = []
        self.types: list[LeafType] = []
        self.kinds: list[Kind] = []
        self.patterns: list[str] = []
        self.decided_by: list[str] = []
        self._rules = rules
        self._axis_sizes = axis_sizes
        self._kinds: dict[str, tuple[int, str]] = {}
        self._text_left = MOST_TEXT

    def add(self, entry: Any) -> None:
        check_fields(of_type(entry, dict), _LEAF_FIELDS)
        pattern = of_type(entry.pop("path"), str)
        text = repr(entry)
        if text not in self._kinds:
            self.types.append(_read_leaf(entry, self._rules))
            self.kinds.append(_read_kind(self.types[-1], entry, self._axis_sizes, self._rules))
            self._kinds[text] = len(self.kinds) - 1, _decider_text(entry)
        kind, decider = self._kinds[text]
        expanded = _expanded(pattern, MOST_LEAVES - len(self.paths), self._text_left)
        self._text_left -= _length(pattern) * len(expanded)
        self.paths += expanded
        self.kind_of += [kind] * len(expanded)
        self.patterns.append(pattern)
        self.decided_by.append(decider)


def _expanded(pattern: str, most: int, most_text: int) -> list[str]:
    """List the paths that a folded pattern stands for."""
    characters = _length(pattern)
    choices: list[list[str]] = []
    count = 1
    for text, numbers in parts_of(pattern):
        if numbers is None:
            choices.append([text])
            continue
        runs = runs_of(numbers)
        # Not `len`, which is for numbers of 63 bits.
        count *= sum(run.stop - run.start for run in runs)
        if count > most or count * characters > most_text:
            raise ValueError(f"{shown(pattern)} stands for more leaves than a lock may have")
        choices.append([str(number) for run in runs for number in run])
    if count > most or count * characters > most_text:
        raise ValueError("there are more leaves than a lock may have")
    return ["".join(texts) for texts in itertools.product(*choices)]


# Each part of a lock is written by `_..._entry` and read by `_read_...`.


def _leaf_entry(kind: Kind) -> dict[str, Any]:
    names = None if kind.names is None else list(map(_name_entry, kind.names))
    entry = {
        "shape": kind.shape,
        "dtype": dtype_shown(kind),
        "rule": kind.rule,
        **({} if names is None else {"names": names, "rules": list(kind.dim_rules)}),
        "spec": None if kind._counted is None else _spec_entry(kind._counted),
        "memory_kind": kind.memory_kind,
        "problem": problem_shown(kind),
    }
    optional = ("memory_kind", "problem")
    return {key: value for key, value in entry.items() if key not in optional or value is not None}


def _read_leaf(entry: dict[str, Any], rules: int) -> LeafType:
    rule, shape, problem = entry["rule"], entry["shape"], entry.get("problem")
    _check_rule(rule, rules)
    if problem is None and entry["spec"] is None:
        raise ValueError("a leaf has a spec, or a problem")
    dtype = of_type(entry["dtype"], str)
    if shape is not None:
        shape = tuple(of_type(shape, list))
    elif dtype != "-":
        raise ValueError(f"a leaf that is no array has the dtype {shown(dtype)}")
    if rule is None:
        rule = _RULE_OF.get(problem or "", NO_RULE_NEEDED)
    leaf, names = checked_type(rule, shape, dtype), entry.get("names")
    if names is None:
        return leaf
    return leaf._replace(names=tuple(map(_read_name, of_type(names, list))))


def _read_kind(
    leaf: LeafType, entry: dict[str, Any], axis_sizes: dict[str, int], rules: int
) -> Kind:
    spec = None if entry["spec"] is None else _read_spec(entry["spec"])
    axes = [axis for part in entries_of(spec or Entries()) for axis in entry_axes(part)]
    if len(set(axes)) < len(axes):
        raise ValueError(f"the spec {brief(spec_shown(spec))} names an axis twice")
    memory = entry.get("memory_kind")
    check_memory_kind("memory_kind", memory)
    what = entry.get("problem")
    fit = Fit(spec=spec)
    if what is not None:
        fit = _PROBLEMS.get(of_type(what, str)) or Fit(status="misfit", message=what)
    return kind_of(
        leaf,
        fit,
        axis_sizes,
        _counted=spec,
        dim_rules=_read_dim_rules(leaf, entry, rules),
        origin="a lock",
        memory_kind=memory,
    )


def _read_dim_rules(leaf: LeafType, entry: dict[str, Any], rules: int) -> tuple[int | None, ...]:
    if leaf.names is None:
        return ()
    dim_rules = of_type(entry["rules"], list)
    if dim_rules and len(dim_rules) != len(leaf.names):
        raise ValueError("there is not one rule, or null, for each name")
    for rule in dim_rules:
        _check_rule(rule, rules)
    return tuple(dim_rules)


def _check_rule(rule: Any, rules: int) -> None:
    if rule is not None and not 0 <= of_type(rule, int) < rules:
        raise ValueError(f"there is no rule {rule}")


def _read_rules(
    entries: list[Any], dialect: dict[str, Any], is_logical: bool
) -> Rules | LogicalRules:
    fields, read = (
        (_NAME_RULE_FIELDS, _read_name_rule) if is_logical else (_RULE_FIELDS, _read_rule)
    )
    pairs = []
    for index, entry in enumerate(entries):
        check_fields(of_type(entry, dict), fields)
        if of_type(entry["rule"], int) != index:
            raise ValueError(f"rule {index} is {shown(entry)}")
        pairs.append(read(entry))
    of_type(dialect["name"], str)
    policy = of_type(dialect.get("policy", {}), dict)
    check_fields(policy, frozenset(_POLICY))
    values = {name: value for name, value in dialect.items() if name != "policy"}
    values["correction"] = _read_correction(dialect["correction"])
    if is_logical:
        return LogicalRules(pairs, LogicalDialect(**values), **policy)
    values["match"] = tuple(of_type(mode, str) for mode in of_type(dialect["match"], list))
    return Rules(pairs, Dialect(**values), **policy)


def _read_correction(fields: Any) -> Correction:
    """Read a correction, or that of a library, which has another policy for absent axes."""
    kind = LibraryCorrection if "absent" in of_type(fields, dict) else Correction
    return kind(**fields)


def _name_rule_entry(name: Any, axes: Any) -> dict[str, Any]:
    return {"name": _name_entry(name), "axes": _name_entry(axes)}


def _read_name_rule(entry: dict[str, Any]) -> tuple[Any, Any]:
    return _read_name(entry["name"]), _read_name(entry["axes"])


def _rule_entry(pattern: Any, value: Any) -> dict[str, Any]:
    rule = rule_spec(value)
    entry: dict[str, Any] = {"pattern": pattern}
    if isinstance(pattern, re.Pattern):
        entry = {"pattern": pattern.pattern, "flags": int(pattern.flags) & _FLAGS}
    entry["spec"] = (
        _fsdp_entry(rule.spec) if isinstance(rule.spec, Fsdp) else _spec_entry(rule.spec)
    )
    if rule.correction is not None:
        entry["correction"] = dataclasses.asdict(rule.correction)
    for name in ("units", "memory_kind", "optional_axes"):
        if extra := getattr(rule, name):
            entry[name] = extra
    return entry


def _read_rule(entry: dict[str, Any]) -> tuple[Any, RuleSpec]:
    pattern, value = entry["pattern"], entry["spec"]
    if isinstance(pattern, list):
        pattern = tuple(pattern)
    if "flags" in entry:
        flags = of_type(entry["flags"], int)
        if flags & ~_FLAGS:
            raise ValueError(f"rule {entry['rule']} has flags that do not exist: {flags}")
        pattern = re.compile(of_type(pattern, str), flags)
    correction = None
    if "correction" in entry:
        correction = _read_correction(entry["correction"])
    units, optional = (of_type(entry.get(key, []), list) for key in ("units", "optional_axes"))
    memory = entry.get("memory_kind")
    is_fsdp = isinstance(value, dict) and "fsdp" in value
    spec = _read_fsdp(value) if is_fsdp else _read_spec(value)
    return pattern, RuleSpec(spec, correction, units, memory_kind=memory, optional_axes=optional)


def _fsdp_entry(spec: Fsdp) -> dict[str, Any]:
    return {
        "fsdp": list(spec.axes),
        "min_bytes": spec.min_bytes,
        "min_rank": spec.min_rank,
        "within": _spec_entry(spec.within),
    }


def _read_fsdp(entry: dict[str, Any]) -> Fsdp:
    check_fields(entry, _FSDP_FIELDS)
    return fsdp(
        of_type(entry["fsdp"], list),
        min_bytes=of_type(entry["min_bytes"], int),
        min_rank=of_type(entry["min_rank"], int),
        within=_read_spec(entry["within"]),
    )


def _spec_entry(spec: Any) -> list[Any] | dict[str, Any]:
    entries = [_UNCONSTRAINED if is_unconstrained(e) else e for e in plain_entries(spec)]
    tags = tags_of(spec)
    return {"entries": entries, **tags} if tags else entries


def _read_spec(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return _read_entries(entry)
    check_fields(entry, _TAG_FIELDS)
    tags = {name: value for name, value in entry.items() if name != "entries"}
    for name, value in tags.items():
        if name == "unreduced_kind":
            of_type(value, str)
        elif not of_type(value, list) or not all(isinstance(axis, str) for axis in value):
            raise TypeError(f"the {name} axes of a spec are {shown(value)}")
    return with_tags(_read_entries(entry["entries"]), tags)


def _read_entries(entries: Any) -> Any:
    plain = [_read_entry(entry) for entry in of_type(entries, list)]
    if _UNCONSTRAINED not in plain:
        return Entries(plain)
    from jax.sharding import PartitionSpec

    free = PartitionSpec.UNCONSTRAINED
    return partition_spec(*(free if isinstance(entry, dict) else entry for entry in plain))


def _read_entry(entry: Any) -> Any:
    if isinstance(entry, list):
        return tuple(of_type(axis, str) for axis in entry)
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and entry == _UNCONSTRAINED and entry["unconstrained"] is True:
        return entry
    raise TypeError(f"an entry of a spec is {shown(entry)}")


def _name_entry(name: Any) -> Any:
    """Return the entry of a logical axis name, of several, or of a rule's mesh axes."""
    if is_unconstrained(name):
        return _UNCONSTRAINED
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return list(map(_name_entry, name))
    raise ValueError(f"a lock cannot hold the logical axis name {shown(name)}: give it a text")


def _read_name(entry: Any) -> Any:
    name = entries_of(_read_spec([entry]))[0]
    if isinstance(name, tuple) and not all(part is None or isinstance(part, str) for part in name):
        raise TypeError(f"{shown(entry)} stands where names belong")
    return name
