"""Rule files: JSON and TOML, MaxText's YAML, and objects of modules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from shardrules._base.correction import Correction
from shardrules._base.io import FileError, parse_json, path_of, read_bytes, text_of
from shardrules._base.rule_specs import Fsdp, RuleSpec, fsdp
from shardrules._base.text import byte_count, record, shown
from shardrules._plan import companions
from shardrules._plan.companions import Companion
from shardrules._plan.files.logical import (
    LOGICAL_DIALECTS,
    logical_rules,
    parse_yaml,
    rules_of_maxtext,
)
from shardrules._plan.files.modules import is_module_form, load_object
from shardrules._plan.findings import NOTHING, Declared
from shardrules._rules import dialects as _dialects
from shardrules._rules.dialects import EFORMER, LINEN, MAXTEXT, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.rules import Rules

# Five more than a rule needs.
_MOST_LEVELS: Final = 8
# Strings and comments, where dots mean nothing. An unclosed one extends to the end of the text, so
# the search never starts again.
_NO_KEY: Final = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?(?:\"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)"""
    r"""|"(?:\\.|[^"\\\n])*"?|'[^'\n]*'?|\#[^\n]*""",
    re.DOTALL,
)
_KEY: Final = re.compile(r"[\w\-. \t]+")
_CHARACTER: Final = re.compile(r"[^\n]")


def parse_toml(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib  # few processes read any

    text = text_of(path, data)
    if any(key.count(".") >= _MOST_LEVELS for key in _KEY.findall(_NO_KEY.sub("", text))):
        raise FileError(f"{path}: a key has more than {_MOST_LEVELS} levels; rules need 3 levels")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise FileError(f"{path}: this is not TOML: {error}; correct it there") from None
    except RecursionError:
        raise FileError(f"{path}: the TOML is nested too deeply; rules need 3 levels") from None


def without_strings(text: str) -> str:
    """Make strings underscores and comments spaces, of the same length and lines."""

    def blank(text: re.Match[str]) -> str:
        return _CHARACTER.sub(" " if text[0].startswith("#") else "_", text[0])

    return _NO_KEY.sub(blank, text)


TABLES: Final = {"lora": "LORA", "quantized": "QUANTIZED"}
"""Tables of companions by their names in files."""
# Functions whose arguments are entries of these keys: the path of a stack, or a table.
_STACKS: Final = {
    "stacked": ("at", "layer", "axis", "mesh_axis"),
    "unstacked": ("at", "layer", "axis"),
}
# In the order in which they find leaves: the base of a stacked leaf is one of a single layer, for
# which the tables are; and rules for a stack have no single layers.
COMPANION_KEYS: Final = ("stacked", "companions", "unstacked")


def companions_in(
    where: str, table: Mapping[str, Any], also: Mapping[str, list[str]]
) -> tuple[Companion, ...]:
    """Read the companions of a rule file."""
    records: list[Companion] = []
    for key in COMPANION_KEYS:
        entries = table.get(key, [])
        if not isinstance(entries, list):
            raise FileError(f"{where}: {key} is {shown(entries)}; write a list of strings")
        for index, entry in enumerate([*entries, *also.get(key, [])]):
            place = f"{where}: {key}[{index}]"
            records += (
                _companion_table(place, entry)
                if key == "companions"
                else [_stack_companion(place, key, entry)]
            )
    return tuple(dict.fromkeys(records))


def _companion_table(where: str, name: object) -> tuple[Companion, ...]:
    if isinstance(name, str) and name.lower() in TABLES:
        table: tuple[Companion, ...] = getattr(companions, TABLES[name.lower()])
        return table
    raise FileError(f"{where}: there is no table {shown(name)}; there are {', '.join(TABLES)}")


def _stack_companion(where: str, key: str, entry: object) -> Companion:
    names = _STACKS[key]
    arguments = {"at": entry} if isinstance(entry, str) else entry
    if not isinstance(arguments, dict) or "at" not in arguments or not arguments.keys() <= {*names}:
        raise FileError(
            f"{where}: it is {shown(entry)}; write the path of the stack, or a table of at and "
            f"any of {', '.join(names[1:])}"
        )
    try:
        stack: Companion = getattr(companions, key)(**arguments)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}") from None
    return stack


DIALECTS: Final = {
    value.name.lower(): value for value in vars(_dialects).values() if isinstance(value, Dialect)
}
"""Dialects by their names in files, in lower case."""

_AnyDialect = TypeVar("_AnyDialect", Dialect, LogicalDialect)

_KEYS: Final = (
    "rules", "dialect", "correction", "replicated", "optional_axes", "min_size", "data_axes",
    *COMPANION_KEYS, "kind",
)  # fmt: skip
_KINDS: Final = ("regex", "logical")
# A spec is a list such as ["fsdp", [], ["tp", "sp"]], or { fsdp = "fsdp", min_bytes = "4MiB" } with
# the arguments of `fsdp`; flags are letters of `re`; all else is as in `RuleSpec`.
_RULE_KEYS: Final = (
    "pattern", "spec", "flags", "units", "memory_kind", "optional_axes", "correction",
)  # fmt: skip
_CORRECTION_KEYS: Final = tuple(field.name for field in fields(Correction))
_NO_COMPANIONS: Final[Mapping[str, list[str]]] = {}
_FSDP_KEYS: Final = ("fsdp", "min_bytes", "min_rank", "within")
_FLAGS: Final = {"a": re.A, "i": re.I, "m": re.M, "s": re.S, "u": re.U, "x": re.X}

# Maximum bytes of memory per byte of a file: for the program of all patterns, and for the name of a
# table in `tomllib`; in PyYAML, a list of empty lists. Parsing a pattern takes 220 bytes and 12 us
# per character.
_PER_BYTE: Final = 64
_PER_BYTE_OF_TOML: Final = 512
_PER_BYTE_OF_YAML: Final = 2048
_YAML: Final = (".yml", ".yaml")
_PARSERS: Final = {
    ".toml": (parse_toml, _PER_BYTE_OF_TOML),
    **dict.fromkeys(_YAML, (parse_yaml, _PER_BYTE_OF_YAML)),
}
_MOST_CHARACTERS: Final = 100_000


@record
class RuleFile(NamedTuple):
    """Rules in a file, with what the file says about them."""

    rules: Rules | LogicalRules
    declared: Declared
    """What is intended, for `Plan.check(**declared)`: replicated and data_axes."""
    companions: tuple[Companion, ...]
    """Leaves that follow the rules of other paths, for `plan` and others."""
    name: str
    """The file's name without suffixes, or the object's name."""


def read_rule_source(
    source: str,
    dialect: Dialect | LogicalDialect | None = None,
    companions: Mapping[str, list[str]] = _NO_COMPANIONS,
) -> RuleFile:
    """Read the rules in a file or of a module.

    Args:
        source: A .toml file; a JSON file, which may be gzipped; MaxText's .yml or .yaml; or
            `package.module:NAME`, which is a `Rules` or `LogicalRules`, a list of (pattern, spec)
            pairs, or a function that returns one of these.
        dialect: The dialect. Default: the file's, or else eformer's; linen for logical rules.
        companions: Companions beside those of the file, by its keys.

    Raises:
        FileError: There is no such file or object, or its content is invalid.
    """
    if is_module_form(source):
        return _of_module(source, dialect, companions)
    path = path_of(source)
    content = _content(path)
    if path.suffix in _YAML:
        _check_no_companions(path, companions)
        logical = _logical_dialect(path, dialect, MAXTEXT.name)
        return RuleFile(rules_of_maxtext(path, content, logical), NOTHING, (), path.stem)
    table = {"rules": content} if isinstance(content, list) else content
    if not isinstance(table, dict) or not isinstance(table.get("rules"), list):
        raise FileError(
            f"{path}: key 'rules': there is no list of rules; write "
            '{"rules": [["kernel", ["fsdp", "tp"]], ...]}, or [[rules]] tables in TOML'
        )
    _check_table(f"{path}", table, _KEYS)
    kind = table.get("kind", "regex")
    if kind not in _KINDS:
        raise FileError(f"{path}: kind is {shown(kind)}; it is one of {', '.join(_KINDS)}")
    if kind == "logical":
        logical = _logical_dialect(path, dialect, table.get("dialect", LINEN.name))
        return _of_logical_table(path, table, logical, companions)
    if isinstance(dialect, LogicalDialect):
        raise FileError(f"{path}: the rules are for paths, and {dialect.name} is for logical names")
    dialect = dialect or _dialect(path, table.get("dialect", EFORMER.name))
    return _of_table(path, table, dialect, companions)


def _of_module(
    source: str, dialect: Dialect | LogicalDialect | None, companions: Mapping[str, list[str]]
) -> RuleFile:
    rules = load_object(source)
    if isinstance(rules, LogicalRules) or isinstance(dialect, LogicalDialect):
        logical = _logical_dialect(source, dialect, getattr(rules, "dialect", LINEN).name)
        try:
            rules = LogicalRules(rules, logical)
        except (TypeError, ValueError) as error:
            raise FileError(f"{source}: {error}") from error
        _check_no_companions(source, companions)
    elif dialect is not None or not isinstance(rules, Rules):
        rules = _compiled_rules(source, rules, dialect)
    name = source.partition(":")[2]
    return RuleFile(rules, NOTHING, companions_in(source, {}, companions), name)


def _of_table(
    path: Path, table: dict[str, Any], dialect: Dialect, companions: Mapping[str, list[str]]
) -> RuleFile:
    corrected = _with_correction(path, table, dialect)
    pairs = [
        _path_rule(f"{path}: rule {index}", rule, corrected.correction)
        for index, rule in enumerate(table["rules"])
    ]
    least = table.get("min_size", 0)
    if type(least) is not int or least < 0:
        raise FileError(f"{path}: min_size is {shown(least)}; write a number of elements")
    policy: Any = {"optional_axes": _optional_axes(path, table), "min_size": least}
    rules = _compiled_rules(f"{path}", pairs, corrected, **policy)
    records = companions_in(f"{path}", table, companions)
    return RuleFile(rules, _declared(path, table), records, _stem(path))


def _of_logical_table(
    path: Path, table: dict[str, Any], dialect: LogicalDialect, companions: Mapping[str, list[str]]
) -> RuleFile:
    rules = logical_rules(path, table["rules"], _with_correction(path, table, dialect))
    rules = LogicalRules(rules, optional_axes=_optional_axes(path, table))
    if "min_size" in table:
        raise FileError(f"{path}: min_size: it is for rules of paths, and these are logical")
    entries: dict[str, Any] = {key: table[key] for key in COMPANION_KEYS if key in table}
    _check_no_companions(path, {**companions, **entries})
    return RuleFile(rules, _declared(path, table), (), _stem(path))


def _with_correction(path: Path, table: dict[str, Any], dialect: _AnyDialect) -> _AnyDialect:
    entries = table.get("correction", {})
    correction = _correction(f"{path}: correction", dialect.correction, entries)
    return replace(dialect, correction=correction)


def _declared(path: Path, table: dict[str, Any]) -> Declared:
    return Declared(
        replicated=_patterns(path, table.get("replicated", [])),
        optional_axes=(),
        data_axes=_axis_names(f"{path}", "data_axes", table),
    )


def _optional_axes(path: Path, table: dict[str, Any]) -> tuple[str, ...]:
    return _axis_names(f"{path}", "optional_axes", table)


def _stem(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).stem


def _check_no_companions(where: object, companions: Mapping[str, list[str]]) -> None:
    if keys := [key for key, entries in companions.items() if entries]:
        raise FileError(f"{where}: {keys[0]}: it is for rules of paths, and these are logical")


def _logical_dialect(where: object, dialect: object, name: object) -> LogicalDialect:
    """Return the dialect, or else the one of this name."""
    if isinstance(dialect, LogicalDialect):
        return dialect
    if dialect is not None:
        raise FileError(f"{where}: the rules are logical, and {shown(dialect)} is for paths")
    if isinstance(name, str) and name.lower() in LOGICAL_DIALECTS:
        return LOGICAL_DIALECTS[name.lower()]
    raise FileError(
        f"{where}: dialect {name!r} is unknown for logical rules; it is one of "
        f"{', '.join(LOGICAL_DIALECTS)}"
    )


def _content(path: Path) -> Any:
    parse, per_byte = _PARSERS.get(path.suffix, (parse_json, _PER_BYTE))
    return parse(path, read_bytes(path, per_byte))


def _check_table(where: str, table: dict[str, Any], keys: Iterable[str]) -> None:
    for key in table:
        if key not in keys:
            raise FileError(f"{where}: key {key!r} is unknown; the keys are {', '.join(keys)}")


def _dialect(path: Path, name: object) -> Dialect:
    if isinstance(name, str) and name.lower() in DIALECTS:
        return DIALECTS[name.lower()]
    raise FileError(f"{path}: dialect {name!r} is unknown; it is one of {', '.join(DIALECTS)}")


def _correction(where: str, base: Correction, table: object) -> Correction:
    """Replace fields of `base` by those of the table."""
    if not isinstance(table, dict):
        raise FileError(f"{where}: it is {shown(table)}; write a table, as {{pad = false}}")
    _check_table(where, table, _CORRECTION_KEYS)
    try:
        return replace(base, **table)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}") from None


def _path_rule(where: str, rule: object, base: Correction) -> tuple[Any, Any]:
    if isinstance(rule, list) and len(rule) == 2:
        rule = {"pattern": rule[0], "spec": rule[1]}
    if not isinstance(rule, dict):
        raise FileError(f'{where}: it is {shown(rule)}; write ["pattern", ["axis", ...]]')
    _check_table(where, rule, _RULE_KEYS)
    for key in ("pattern", "spec"):
        if key not in rule:
            raise FileError(f"{where}: it has no {key}; write one, where spec = [] replicates")
    _check_length(where, rule["pattern"])
    pattern = _file_pattern(where, rule["pattern"], rule.get("flags", ""))
    spec = _file_spec(where, rule["spec"])
    if rule.keys() <= {"pattern", "spec", "flags"}:
        return pattern, spec
    units, correction = rule.get("units", []), None
    if "correction" in rule:
        correction = _correction(f"{where}: correction", base, rule["correction"])
    if not isinstance(units, list):
        raise FileError(f"{where}: units is {shown(units)}; write a list, as [1, 128]")
    memory, optional = rule.get("memory_kind"), _axis_names(where, "optional_axes", rule)
    try:
        return pattern, RuleSpec(
            spec, correction, tuple(units), memory_kind=memory, optional_axes=optional
        )
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}") from None


def _check_length(where: str, pattern: object) -> None:
    length = len(str(pattern))
    if length > _MOST_CHARACTERS:
        raise FileError(
            f"{where}: the pattern has {length:,} characters, and at most {_MOST_CHARACTERS:,} are "
            "allowed; make several of it"
        )


def _file_pattern(where: str, pattern: object, flags: object) -> object:
    """Return the pattern for `Rules`, which itself checks a pattern without flags."""
    if flags == "":
        return pattern
    if not isinstance(flags, str) or not set(flags) <= _FLAGS.keys():
        raise FileError(f"{where}: flags is {flags!r}; they are letters of {''.join(_FLAGS)!r}")
    if not isinstance(pattern, str):
        raise FileError(f"{where}: flags need a pattern that is a string, not {shown(pattern)}")
    return _compiled_regex(where, pattern, sum(_FLAGS[flag] for flag in set(flags)))


def _compiled_regex(where: str, pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise FileError(f"{where}: the pattern {pattern!r} is invalid: {error}") from None


def _file_spec(where: str, spec: object) -> object:
    """Return None, a tuple of entries, or the value of `fsdp`."""
    if spec is None:
        return None
    if isinstance(spec, dict):
        return _fsdp(where, spec)
    entries = [spec] if isinstance(spec, str) else spec
    if not isinstance(entries, list):
        raise FileError(f'{where}: spec is {shown(spec)}; write a list, as ["fsdp", [], "tp"]')
    return tuple(_axes_entry(where, dim, entry) for dim, entry in enumerate(entries))


def _fsdp(where: str, table: dict[str, Any]) -> Fsdp:
    """Call `fsdp` with the arguments in a table."""
    _check_table(f"{where}: spec", table, _FSDP_KEYS)
    if "fsdp" not in table:
        raise FileError(f'{where}: spec has no fsdp; write the mesh axis, as {{fsdp = "fsdp"}}')
    arguments = dict(table, within=_file_spec(where, table.get("within")))
    axis, least = arguments.pop("fsdp"), arguments.get("min_bytes")
    try:
        if isinstance(least, str):
            arguments["min_bytes"] = byte_count(least)
        return fsdp(axis, **arguments)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: spec: {error}") from None


def _axes_entry(where: str, dim: int, entry: object) -> object:
    axes = entry if isinstance(entry, list) else [] if entry is None else [entry]
    if not all(isinstance(axis, str) and axis for axis in axes):
        raise FileError(
            f"{where}: entry {dim} of spec is {shown(entry)}; write an axis, a list of axes, or [] "
            "for a dimension that is not sharded"
        )
    return tuple(axes) if isinstance(entry, list) and axes else entry or None


def _patterns(path: Path, patterns: object) -> tuple[str, ...]:
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise FileError(f"{path}: replicated is {shown(patterns)}; write a list of patterns")
    for index, pattern in enumerate(patterns):
        _check_length(f"{path}: replicated[{index}]", pattern)
        _compiled_regex(f"{path}: replicated[{index}]", pattern, 0)
    return tuple(patterns)


def _axis_names(where: str, key: str, table: dict[str, Any]) -> tuple[str, ...]:
    axes = table.get(key, [])
    if not isinstance(axes, list) or not all(isinstance(axis, str) and axis for axis in axes):
        raise FileError(f'{where}: {key} is {shown(axes)}; write a list of axes, as ["sp", "ep"]')
    return tuple(axes)


def _compiled_rules(source: str, rules: Any, dialect: Dialect | None, **policy: Any) -> Rules:
    try:
        return Rules(rules, dialect, **policy)
    except (TypeError, ValueError, re.error, OverflowError, RecursionError) as error:
        what, *caret = str(error).split("\n")
        raise FileError(f"{source}: {what}", *caret) from error
