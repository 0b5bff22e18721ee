"""Locks: the text of a plan as JSON, a line for each folded path and each rule, and its reader."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from msgspec import Meta

from shardrules._base.arguments import checked_sizes
from shardrules._base.io import FileError, parse_json, read_bytes
from shardrules._base.rule_specs import check_memory_kind
from shardrules._base.specs import Entries, entries_of, entry_axes, spec_shown
from shardrules._base.text import brief, counted, mesh_shown, shown
from shardrules._plan.align import check_distinct
from shardrules._plan.codec import (
    FileTable,
    Listed,
    RuleTable,
    name_data,
    naming,
    naming_place,
    read_dialect,
    read_name,
    read_spec,
    record_of,
    rules_data,
    rules_of,
    spec_data,
)
from shardrules._plan.fold import expanded, path_cost
from shardrules._plan.kinds import (
    WITHOUT_RULE,
    Fit,
    Kind,
    dtype_shown,
    kind_with_bytes,
    problem_shown,
)
from shardrules._plan.leaves import (
    AMBIGUOUS,
    NO_RULE_NEEDED,
    UNMATCHED,
    LeafType,
    Leaves,
    leaf_type_of,
)

if TYPE_CHECKING:
    from shardrules._plan.plan import Plan
    from shardrules._plan.resolve import PutOnMesh, SizedMesh

FORMAT: Final = "shardrules lock 3"
MOST_TEXT: Final = 10**8
"""Characters of all paths: a few of a pattern must not fill the memory."""
# JSON's reader takes the two for the one character that they would stand for.
_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_FIX: Final = "; make the lock again with Plan.lock or shardrules plan --lock"
_PROBLEMS: Final = {"unmatched": UNMATCHED, "ambiguous": AMBIGUOUS}


class _PlanLock(RuleTable, kw_only=True):
    """A plan: its rules as in rule files, but for the dialect, which is given whole."""

    format: str
    digest: Any
    mesh: Annotated[dict[str, Any], Meta(description="a table of axes and their sizes")]
    leaves: Listed


_Number = Annotated[int | None, Meta(description="the number of a rule, or null")]
_Text = Annotated[str, Meta(description="a text")]


class _LeafTable(FileTable, kw_only=True):
    """Leaves whose paths fold, with what they get."""

    path: _Text
    shape: Annotated[list[Any] | None, Meta(description="a list of sizes, or null")]
    dtype: _Text
    rule: _Number
    names: Annotated[list[Any] | None, Meta(description="a list of names")] = None
    rules: Annotated[tuple[_Number, ...], Meta(description="a list of numbers of rules")] = ()
    spec: Any
    memory_kind: Any = None
    problem: Annotated[str | None, Meta(description="a text")] = None


def lock_text(plan: Plan) -> str:
    """Write `Plan.lock`."""
    if (characters := sum(map(path_cost, plan.paths))) > MOST_TEXT:
        raise ValueError(
            f"{counted(len(plan.paths), 'leaf')} are too many for a lock: their paths "
            f"count as {characters:,} characters, of at most {MOST_TEXT:,}"
        )
    check_distinct(plan.paths, "a lock tells leaves apart by their paths")
    leaf_data = list(map(_leaf_data, plan.kinds))
    leaf_texts = [json.dumps(each).removeprefix("{") for each in leaf_data]
    folded = sorted([(siblings.pattern, siblings.group) for siblings in plan.folded])
    encoded = map(json.JSONEncoder().encode, [pattern for pattern, _ in folded])
    pairs = zip(encoded, folded, strict=True)
    leaves = [f'{{"path": {path}, {leaf_texts[group]}' for path, (_, group) in pairs]
    data = rules_data(plan.rules)
    text = json.dumps([plan.axis_sizes, data, leaf_data, folded], ensure_ascii=False)
    if not text.isascii() and (pair := _ADJACENT_SURROGATES.search(text)):
        raise ValueError(
            f"a lock cannot hold adjacent lone surrogates, {shown(pair[0])}: give the leaf, "
            "pattern or axis another name"
        )
    rules = list(map(json.dumps, data.pop("rules")))
    head = {"mesh": plan.axis_sizes, **data}
    digest = _digest(json.loads(lines_of(head, rules=rules, leaves=leaves)))
    return lines_of({"format": FORMAT, "digest": digest, **head}, rules=rules, leaves=leaves)


def _leaf_data(kind: Kind) -> dict[str, Any]:
    names = None if kind.names is None else list(map(name_data, kind.names))
    optional = {"memory_kind": kind.memory_kind, "problem": problem_shown(kind)}
    return {
        "shape": kind.shape,
        "dtype": dtype_shown(kind),
        "rule": kind.rule,
        **({} if names is None else {"names": names, "rules": list(kind.dim_rules)}),
        "spec": None if kind._counted is None else spec_data(kind._counted),
        **{key: value for key, value in optional.items() if value is not None},
    }


def lines_of(head: Mapping[str, Any], **lists: Iterable[str]) -> str:
    """Write an object: a line for each item, and for each entry of lists that are JSON already."""
    parts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in lists.items():
        lines = ",\n".join("  " + entry for entry in entries)
        parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _digest(content: Mapping[str, Any]) -> str:
    """Digest all that a lock says, however its JSON is laid out."""
    rest = {key: value for key, value in content.items() if key not in ("format", "digest")}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()


def read_lock(data: bytes, name: str) -> tuple[PutOnMesh, dict[str, int]]:
    """Read what puts a plan on its mesh, and the mesh, from a lock's content."""
    content = parse_json(Path(name), data)
    with naming(name, _FIX):
        form = content.get("format") if isinstance(content, dict) else None
        if form != FORMAT:
            raise ValueError(f"its format is {shown(form)}, and this reads {FORMAT!r}")
        table = record_of("", content, _PlanLock, "it")
        digest = _digest(content)
        axis_sizes = checked_sizes(table.mesh)
        rules = rules_of(table, read_dialect(table.dialect, is_logical=table.is_logical))
        paths: list[str] = []
        column: list[int] = []
        types: list[LeafType] = []
        kinds: list[Kind] = []
        numbers: dict[str, int] = {}
        text_left = MOST_TEXT
        for number, entry in enumerate(table.leaves):
            where = f"leaves[{number}]: "
            leaf = record_of(where, entry, _LeafTable)
            del entry["path"]
            kind = numbers.setdefault(repr(entry), len(kinds))
            with naming_place(where):
                if kind == len(kinds):
                    types.append(_read_type(leaf, len(rules)))
                    kinds.append(_read_kind(types[-1], leaf, axis_sizes))
                siblings = expanded(leaf.path, text_left)
            text_left -= path_cost(leaf.path) * len(siblings)
            paths += siblings
            column += [kind] * len(siblings)
        tree = {path: row for row, path in enumerate(paths)}
        if len(tree) < len(paths):
            raise ValueError("two of its patterns stand for the same path")
        if digest != table.digest:
            raise ValueError("its digest is that of another lock: it was changed by hand")
    locked = Leaves(rules, tree, paths, paths, np.array(column, np.int32), types)
    return partial(_put_locked, locked, kinds, axis_sizes), axis_sizes


def _read_type(leaf: _LeafTable, rules: int) -> LeafType:
    if leaf.problem is None and leaf.spec is None:
        raise ValueError("a leaf has a spec, or a problem")
    for rule in (leaf.rule, *leaf.rules):
        if rule is not None and not 0 <= rule < rules:
            raise ValueError(f"there is no rule {rule}")
    if leaf.shape is None and leaf.dtype != "-":
        raise ValueError(f"a leaf that is no array has the dtype {shown(leaf.dtype)}")
    shape = None if leaf.shape is None else tuple(leaf.shape)
    rule = _PROBLEMS.get(leaf.problem or "", NO_RULE_NEEDED) if leaf.rule is None else leaf.rule
    leaf_type = leaf_type_of(rule, shape, leaf.dtype)
    if leaf.names is None:
        return leaf_type
    if leaf.rules and len(leaf.rules) != len(leaf.names):
        raise ValueError("there is not one rule, or null, for each name")
    return leaf_type._replace(names=tuple(read_name("a name", name) for name in leaf.names))


def _read_kind(leaf_type: LeafType, leaf: _LeafTable, axis_sizes: dict[str, int]) -> Kind:
    spec = None if leaf.spec is None else read_spec("", leaf.spec)
    axes = [axis for entry in entries_of(spec or Entries()) for axis in entry_axes(entry)]
    if len(set(axes)) < len(axes):
        raise ValueError(f"the spec {brief(spec_shown(spec))} names an axis twice")
    check_memory_kind("memory_kind", leaf.memory_kind)
    fit = Fit(spec=spec)
    if leaf.problem is not None:
        misfit = Fit(status="misfit", message=leaf.problem)
        fit = WITHOUT_RULE[_PROBLEMS[leaf.problem]] if leaf.problem in _PROBLEMS else misfit
    fit = replace(fit, origin="a lock", dim_rules=leaf.rules, memory_kind=leaf.memory_kind)
    return kind_with_bytes(leaf_type, replace(fit, _counted=spec), axis_sizes)


def _put_locked(
    leaves: Leaves, kinds: list[Kind], axis_sizes: dict[str, int], mesh: SizedMesh
) -> tuple[Leaves, list[Kind]]:
    if list(axis_sizes.items()) != list(mesh.axis_sizes.items()):
        raise ValueError(f"a locked plan is for the mesh {mesh_shown(axis_sizes)} alone")
    return leaves, kinds


def content_of(lock_or_path: str | os.PathLike[str], writer: str) -> tuple[bytes, str]:
    """Return (content, name) of a lock, its text or a file; `writer` is named if there is none."""
    if isinstance(lock_or_path, str) and lock_or_path.lstrip().startswith("{"):
        return lock_or_path.encode("utf-8", "surrogatepass"), "the lock"
    path = Path(lock_or_path)
    try:
        return read_bytes(path), str(path)
    except ValueError as error:  # such as a FileError, or no name that a file can have
        name = path if isinstance(lock_or_path, os.PathLike) else shown(lock_or_path)
        why = str(error).removeprefix(f"{path}: ")
        text = f"{name}: neither a lock nor a file with one: {why}; {writer}(path) writes one"
        raise FileError(text) from error
