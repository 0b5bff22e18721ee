"""Rules as plain data: the same in rule files, in locks, and in what `--fix` writes.

Records say which keys a table may have; what they describe a value as, an error advises. What a
value means is checked where it is made: by `RuleSpec`, `fsdp`, `Correction`, dialects and `Rules`.
Errors are ValueErrors and TypeErrors that begin with the place in the data, such as `rule 3: `;
`naming` puts the file before it.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from shardrules._base.io import FileError
from shardrules._base.rule_specs import (
    Correction,
    Fsdp,
    LibraryCorrection,
    RuleSpec,
    fsdp,
    rule_spec,
)
from shardrules._base.specs import (
    Entries,
    entry_axes,
    is_unconstrained,
    plain_entries,
    spec_shown,
    tags_of,
)
from shardrules._base.text import SLIP, byte_count, nearest, shown
from shardrules._rules import dialects as _dialects
from shardrules._rules.dialects import EFORMER, LINEN, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.patterns import with_inline_flags
from shardrules._rules.rules import Rules

DIALECTS: Final = {
    value.name.lower(): value for value in vars(_dialects).values() if isinstance(value, Dialect)
}
"""Dialects by their names in files, in lower case."""
LOGICAL_DIALECTS: Final = {
    value.name: value for value in vars(_dialects).values() if isinstance(value, LogicalDialect)
}
"""Dialects of logical rules by their names in files."""

# Parsing a pattern takes 220 bytes and 12 us per character.
_MOST_CHARACTERS: Final = 100_000

Axis = Annotated[str, Meta(min_length=1)]
Axes = Annotated[tuple[Axis, ...], Meta(description='a list of axes, as ["sp", "ep"]')]
Texts = Annotated[tuple[str, ...], Meta(description="a list of strings")]
Listed = Annotated[list[Any], Meta(description="a list")]


class FileTable(msgspec.Struct):
    """The keys of a table; those that it may lack have a default."""


class RuleTable(FileTable):
    """Rules with their policy, as rule files and locks have them."""

    rules: Listed
    dialect: Any = None
    kind: Annotated[str, Meta(pattern="^(regex|logical)$", description="one of regex, logical")] = (
        "regex"
    )
    correction: Any = None
    optional_axes: Axes = ()
    min_size: Annotated[int, Meta(ge=0, description="a number of elements")] = 0

    @property
    def is_logical(self) -> bool:
        """True if the rules are for logical axis names."""
        return self.kind == "logical"


class _PathRule(FileTable):
    pattern: Any
    spec: Any
    units: Annotated[tuple[Any, ...], Meta(description="a list, as [1, 128]")] = ()
    memory_kind: Any = None
    optional_axes: Axes = ()
    correction: Any = None


class _NameRule(FileTable):
    name: Any
    axes: Any


class _ShapedSpec(FileTable):
    """A spec that is made from shapes."""

    fsdp: Annotated[Axis | list[Any], Meta(description="a mesh axis, or a list of axes")]
    min_bytes: Annotated[int | str | None, Meta(description='bytes, as 4194304 or "4MiB"')] = None
    min_rank: Any = 0
    within: Any = None


_OPTIONS: Final = ("units", "memory_kind", "optional_axes")
_Entry = None | Axis | tuple[Axis, ...]
_Name = None | str | tuple[str | None, ...]
_AnyRecord = TypeVar("_AnyRecord", bound=FileTable)
_PLACE: Final = re.compile(r"`\$\.(\w+)")
_MISSING: Final = re.compile(r"missing required field `(\w+)`")


@contextmanager
def naming(name: object, fix: str = "") -> Iterator[None]:
    """Make a FileError, with the file's name and the fix, of what is wrong with its content."""
    try:
        yield
    except FileError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError, re.error) as error:
        what, *caret = (str(error) or type(error).__name__).split("\n")
        raise FileError(f"{name}: {what}{fix}", *caret) from error


def check_keys(where: str, table: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Check that a table has no other keys."""
    names = list(keys)
    for key in table:
        if key not in names:
            near = nearest(key, names, SLIP)
            hint = f"did you mean {near!r}?" if near else f"the keys are {', '.join(names)}"
            raise ValueError(f"{where}key {key!r} is unknown; {hint}")


def record_of(
    where: str, table: object, kind: type[_AnyRecord], example: str = "a table"
) -> _AnyRecord:
    """Return the record of a table, of which `example` is one; `where` is "" or ends in ": "."""
    if not isinstance(table, dict):
        raise TypeError(f"{where}it is {shown(table)}; write {example}")
    check_keys(where, table, kind.__struct_fields__)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        text = str(error)
    if missing := _MISSING.search(text):
        raise ValueError(f"{where}{missing[1]} is missing; write {example}")
    place = _PLACE.search(text)
    assert place is not None, text
    expected = _description(typing.get_type_hints(kind, include_extras=True)[place[1]])
    raise TypeError(f"{where}{place[1]} is {shown(table[place[1]])}; write {expected or text}")


def _description(hint: Any) -> str | None:
    """Return that of a type, or of a part of it."""
    for meta in getattr(hint, "__metadata__", ()):
        if meta.description:
            return str(meta.description)
    return next(filter(None, map(_description, typing.get_args(hint))), None)


def _field_names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


# Each thing is read by `read_...` and written by `..._data`.


def rules_of(table: RuleTable, dialect: Any) -> Rules | LogicalRules:
    """Return the rules of a table, in this dialect with the correction of the table."""
    correction = dialect.correction
    if table.correction is not None:
        correction = read_correction("correction: ", table.correction, correction)
        dialect = dataclasses.replace(dialect, correction=correction)
    if not table.is_logical:
        pairs = [_read_rule(f"rule {i}: ", rule, correction) for i, rule in enumerate(table.rules)]
        optional = table.optional_axes
        return Rules(pairs, dialect, optional_axes=optional, min_size=table.min_size)
    if table.min_size:
        raise ValueError("min_size: it is for rules of paths, and these are logical")
    pairs = [_read_name_rule(f"rule {i}: ", rule) for i, rule in enumerate(table.rules)]
    return LogicalRules(pairs, dialect, optional_axes=table.optional_axes)


def rules_data(rules: Rules | LogicalRules) -> dict[str, Any]:
    """Return the table of rules. The dialect is given whole: it may be one of the user's own."""
    is_logical = isinstance(rules, LogicalRules)
    data = _name_rule_data if is_logical else rule_data
    policy = {name: getattr(rules, name, None) for name in ("optional_axes", "min_size")}
    return {
        **({"kind": "logical"} if is_logical else {}),
        "dialect": _dialect_data(rules.dialect),
        **{name: value for name, value in policy.items() if value},
        "rules": [short(data(*rule)) for rule in rules],
    }


def short(rule: dict[str, Any]) -> list[Any] | dict[str, Any]:
    """Return the data of a rule as a pair, if it says no more."""
    return list(rule.values()) if len(rule) == 2 else rule


def dialect_named(name: object, *, is_logical: bool) -> Any:
    """Return the dialect of this name in files; None is the default."""
    dialects: Mapping[str, Any] = LOGICAL_DIALECTS if is_logical else DIALECTS
    if name is None:
        return LINEN if is_logical else EFORMER
    if isinstance(name, str) and name.lower() in dialects:
        return dialects[name.lower()]
    what = " for logical rules" if is_logical else ""
    raise ValueError(f"dialect {name!r} is unknown{what}; it is one of {', '.join(dialects)}")


def read_dialect(table: object, *, is_logical: bool) -> Any:
    """Return the dialect of a table with all its fields."""
    kind: Any = LogicalDialect if is_logical else Dialect
    if not isinstance(table, dict):
        raise TypeError(f"dialect: it is {shown(table)}; write a table of its fields")
    check_keys("dialect: ", table, _field_names(kind))
    where = "dialect: correction: "
    return kind(**table | {"correction": read_correction(where, table.get("correction"))})


def _dialect_data(dialect: Dialect | LogicalDialect) -> dict[str, Any]:
    fields = dataclasses.asdict(dialect)
    return {name: value for name, value in fields.items() if value is not None}


_DEFAULT: Final = Correction()


def read_correction(where: str, table: object, base: Correction = _DEFAULT) -> Correction:
    """Return the correction of a table, which may lack fields: then they are those of `base`."""
    if not isinstance(table, dict):
        raise TypeError(f"{where}it is {shown(table)}; write a table, as {{pad = false}}")
    check_keys(where, table, _field_names(LibraryCorrection))
    fields = (
        table if table.keys() >= {*_field_names(Correction)} else dataclasses.asdict(base) | table
    )
    kind = LibraryCorrection if "absent" in fields else Correction
    with naming_place(where):
        return kind(**fields)


@contextmanager
def naming_place(where: str) -> Iterator[None]:
    """Put the place before what is wrong with a value."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}{error}") from None


def _read_rule(where: str, rule: object, base: Correction) -> tuple[Any, Any]:
    if isinstance(rule, list) and len(rule) == 2:
        rule = {"pattern": rule[0], "spec": rule[1]}
    example = '["pattern", ["axis", ...]], or a table with both, where spec = [] replicates'
    table = record_of(where, rule, _PathRule, example)
    check_length(where, table.pattern)
    spec, correction = read_spec(where, table.spec), None
    if table.correction is not None:
        correction = read_correction(f"{where}correction: ", table.correction, base)
    options = {name: getattr(table, name) for name in _OPTIONS}
    if correction is None and [*options.values()] == [(), None, ()]:
        return table.pattern, spec
    with naming_place(where):
        return table.pattern, RuleSpec(spec, correction, **options)


def rule_data(pattern: Any, value: Any) -> dict[str, Any]:
    """Return the table of a rule for paths."""
    rule = rule_spec(value)
    data = {"pattern": with_inline_flags(pattern), "spec": spec_data(rule.spec)}
    for name in _OPTIONS:
        if extra := getattr(rule, name):
            data[name] = extra
    if rule.correction is not None:
        data["correction"] = dataclasses.asdict(rule.correction)
    return data


def check_length(where: str, pattern: object) -> None:
    length = len(str(pattern))
    if length > _MOST_CHARACTERS:
        raise ValueError(
            f"{where}the pattern has {length:,} characters, and at most {_MOST_CHARACTERS:,} are "
            "allowed; make several of it"
        )


def read_spec(where: str, spec: object, key: str = "spec") -> Any:
    """Return entries, or the value of `fsdp`."""
    if isinstance(spec, dict):
        return _read_shaped(where, spec)
    entries = [] if spec is None else [spec] if isinstance(spec, str) else spec
    if not isinstance(entries, list):
        raise TypeError(f'{where}{key} is {shown(spec)}; write a list, as ["fsdp", [], "tp"]')
    return Entries(
        _read_entry(f"{where}entry {dim} of {key}", entry) for dim, entry in enumerate(entries)
    )


def spec_data(spec: Any) -> Any:
    """Return a spec: a list of entries, or the table of one that is made from shapes."""
    if isinstance(spec, Fsdp):
        sizes = {name: getattr(spec, name) for name in ("min_bytes", "min_rank")}
        default = fsdp(spec.axes)
        data = {"fsdp": list(spec.axes)}
        data |= {name: size for name, size in sizes.items() if size != getattr(default, name)}
        return data | ({"within": spec_data(spec.within)} if spec.within else {})
    entries = plain_entries(spec)
    if tags_of(spec) or any(map(is_unconstrained, entries)):
        raise ValueError(
            f"a file cannot hold {spec_shown(spec)}: write None for UNCONSTRAINED, and leave "
            "unreduced and reduced axes out"
        )
    return [axes[0] if len(axes) == 1 else list(axes) for axes in map(entry_axes, entries)]


def _read_shaped(where: str, spec: dict[str, Any]) -> Fsdp:
    where = f"{where}spec: "
    table = record_of(where, spec, _ShapedSpec, 'the mesh axis, as {fsdp = "fsdp"}')
    within = read_spec(where, table.within, "within")
    with naming_place(where):
        least = table.min_bytes
        sizes: Any = {} if least is None else {"min_bytes": least}
        if isinstance(least, str):
            sizes = {"min_bytes": byte_count(least)}
        return fsdp(table.fsdp, **sizes, min_rank=table.min_rank, within=within)


def _read_entry(what: str, entry: object) -> Any:
    expected = "an axis, a list of axes, or [] for a dimension that is not sharded"
    return _convert(what, entry, _Entry, expected) or None


def _convert(what: str, data: Any, kind: Any, expected: str) -> Any:
    """Return a value of this type."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError:
        raise TypeError(f"{what} is {shown(data)}; write {expected}") from None


def _read_name_rule(where: str, rule: object) -> tuple[Any, Any]:
    if isinstance(rule, list) and len(rule) == 2:
        rule = {"name": rule[0], "axes": rule[1]}
    table = record_of(where, rule, _NameRule, '["embed", ["fsdp"]], or a table of name and axes')
    return read_name(f"{where}the name", table.name), _read_entry(f"{where}axes", table.axes)


def _name_rule_data(name: Any, axes: Any) -> dict[str, Any]:
    return {"name": name_data(name), "axes": name_data(axes)}


def read_name(what: str, name: object) -> Any:
    """Return a logical axis name, or a tuple of some."""
    if name == "":
        raise ValueError(f"{what} is ''; write a logical axis name")
    return _convert(what, name, _Name, "a logical axis name")


def name_data(name: Any) -> Any:
    """Return a logical axis name, several of a dimension, or a rule's mesh axes."""
    if name is None or isinstance(name, str):
        return name
    if isinstance(name, tuple):
        return list(map(name_data, name))
    if is_unconstrained(name):
        raise ValueError("a file cannot hold UNCONSTRAINED, in rules or names: write None for it")
    raise ValueError(f"a file cannot hold the logical axis name {shown(name)}: give it a text")
