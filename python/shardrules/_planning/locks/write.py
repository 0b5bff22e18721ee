"""The text of a lock: JSON, a line for each folded path and each rule.

Costs a line of text per folded path. Must not know how a plan is made.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from shardrules._correction import rule_spec
from shardrules._format import shown
from shardrules._logical.rules import LogicalRules
from shardrules._planning.kinds import Kind, dtype_shown, problem_shown
from shardrules._planning.locks.format import (
    FLAGS,
    FORMAT,
    LOGICAL,
    MOST_LEAVES,
    MOST_TEXT,
    UNCONSTRAINED,
    decided_by,
    leaves_digest,
    length,
    rules_digest,
)
from shardrules._shape_specs import Fsdp
from shardrules._specs import is_unconstrained, plain_entries, tags_of

if TYPE_CHECKING:
    from shardrules._planning.columns import Columns

__all__ = ["fingerprint", "lock_text"]

# JSON's reader takes the two for the one character that they would stand for.
_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def fingerprint(columns: Columns) -> str:
    """See `Plan.fingerprint`."""
    return leaves_digest(columns.axis_sizes, columns.paths, columns.kind_of, columns.kinds)


def lock_text(columns: Columns) -> str:
    """See `Plan.lock`."""
    _check_lockable(columns.paths)
    patterns = [one.pattern for one in columns.folded]
    order = sorted(range(len(patterns)), key=patterns.__getitem__)
    patterns = [patterns[i] for i in order]
    kinds = [columns.folded[i].group for i in order]
    entries = list(map(_leaf_entry, columns.kinds))
    leaf_of = [_json(entry).removeprefix("{") for entry in entries]
    leaves = [
        f'{{"path": {pattern}, {leaf_of[kind]}'
        for pattern, kind in zip(_each_json(patterns), kinds, strict=True)
    ]
    is_logical = isinstance(columns.rules, LogicalRules)
    rule_entry = _logical_rule_entry if is_logical else _rule_entry
    rules = [rule_entry(index, rule) for index, rule in enumerate(columns.rules)]
    fields = dataclasses.asdict(columns.rules.dialect)
    dialect = {name: value for name, value in fields.items() if value is not None}
    decided = list(map(decided_by, entries))
    head = {
        "format": FORMAT,
        **({"kind": LOGICAL} if is_logical else {}),
        "fingerprint": fingerprint(columns),
        "rules_fingerprint": rules_digest(
            dialect, rules, patterns, [decided[kind] for kind in kinds]
        ),
        "mesh": columns.axis_sizes,
        "dialect": dialect,
    }
    parts = [f" {json.dumps(key)}: {_json(value)}" for key, value in head.items()]
    parts += [_one_a_line("rules", list(map(_json, rules))), _one_a_line("leaves", leaves)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _check_lockable(paths: list[str]) -> None:
    if len(paths) > MOST_LEAVES:
        raise ValueError(f"a lock holds at most {MOST_LEAVES:,} leaves, not {len(paths):,}")
    characters = sum(map(length, paths))
    if characters > MOST_TEXT:
        raise ValueError(
            f"a lock holds paths of at most {MOST_TEXT:,} characters together, not {characters:,}"
        )
    if len(set(paths)) < len(paths):
        twice = next(path for path, count in Counter(paths).items() if count > 1)
        raise ValueError(
            f"two leaves have the path {twice!r}, and a lock tells leaves apart by their paths: "
            "rename one of them"
        )


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
        "dtype": dtype_shown(kind),
        "rule": kind.rule,
        **({} if kind.names is None else _of_names(kind.names, kind.dim_rules)),
        "spec": None if kind._counted is None else _spec_entry(kind._counted),
        "memory_kind": kind.memory_kind,
        "problem": problem_shown(kind),
    }
    optional = ("memory_kind", "problem")
    return {key: value for key, value in entry.items() if key not in optional or value is not None}


def _spec_entry(spec: Any) -> list[Any] | dict[str, Any]:
    entries = [UNCONSTRAINED if is_unconstrained(e) else e for e in plain_entries(spec)]
    tags = tags_of(spec)
    return {"entries": entries, **tags} if tags else entries


def _of_names(names: tuple[Any, ...], rules: tuple[int | None, ...]) -> dict[str, Any]:
    return {"names": [_name_entry(name) for name in names], "rules": list(rules)}


def _name_entry(name: Any) -> Any:
    if is_unconstrained(name):
        return UNCONSTRAINED
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return [_name_entry(one) for one in name]
    raise ValueError(f"a lock cannot hold the logical axis name {shown(name)}: give it a text")


def _logical_rule_entry(index: int, rule: tuple[Any, Any]) -> dict[str, Any]:
    name, axes = rule
    return {"rule": index, "name": _name_entry(name), "axes": _name_entry(axes)}


def _fsdp_entry(spec: Fsdp) -> dict[str, Any]:
    return {
        "fsdp": list(spec.axes),
        "min_bytes": spec.min_bytes,
        "min_rank": spec.min_rank,
        "within": _spec_entry(spec.within),
    }


def _rule_entry(index: int, rule: tuple[Any, Any]) -> dict[str, Any]:
    pattern, given = rule
    wanted = rule_spec(given)
    entry: dict[str, Any] = {"rule": index, "pattern": pattern}
    if isinstance(pattern, re.Pattern):
        entry |= {"pattern": pattern.pattern, "flags": int(pattern.flags) & FLAGS}
    is_fsdp = isinstance(wanted.spec, Fsdp)
    entry["spec"] = _fsdp_entry(wanted.spec) if is_fsdp else _spec_entry(wanted.spec)
    if wanted.correction is not None:
        entry["correction"] = dataclasses.asdict(wanted.correction)
    if wanted.units:
        entry["units"] = wanted.units
    if wanted.memory_kind is not None:
        entry["memory_kind"] = wanted.memory_kind
    if wanted.optional_axes:
        entry["optional_axes"] = wanted.optional_axes
    return entry
