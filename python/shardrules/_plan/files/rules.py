"""Rule files: TOML, JSON, MaxText's YAML, and objects of modules; and the lines of their rules.

The parsers of TOML and YAML are bounded, and no tag makes an object.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from shardrules._base.arguments import check_type
from shardrules._base.io import (
    FileError,
    first_repeated,
    parse_json,
    path_of,
    read_bytes,
    text_of,
)
from shardrules._base.text import record
from shardrules._plan.codec import (
    Axes,
    RuleTable,
    Texts,
    check_keys,
    check_length,
    dialect_named,
    naming,
    naming_place,
    record_of,
    rules_of,
)
from shardrules._plan.companions import Companion, stacked
from shardrules._plan.files.modules import file_name, is_module_form, load_object
from shardrules._plan.findings import NOTHING, Declared
from shardrules._rules.dialects import MAXTEXT, Dialect, LogicalDialect
from shardrules._rules.logical_rules import LogicalRules
from shardrules._rules.patterns import parse
from shardrules._rules.rules import Rules


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
    unread: tuple[str, ...] = ()
    """Lists of rules that decide nothing: of other keys of YAML, or replaced by a file after."""


def read_rules(
    path: str | os.PathLike[str],
    *more: str | os.PathLike[str],
    dialect: Dialect | LogicalDialect | None = None,
) -> RuleFile:
    """Read the rules in a TOML or JSON file, or MaxText's YAML, and what the file says of them.

    Nothing is executed, and files may come from anyone. The planning page shows such a file.

    Args:
        path: A .toml file; a JSON file, which may be gzipped; or MaxText's .yml or .yaml, which
            needs PyYAML.
        more: Files that are merged over it, as configurations are: of a key that several have, the
            last one's value counts, also of the rules. `RuleFile.unread` says which rules do not.
        dialect: The dialect. Default: the file's, or else eformer's; for logical rules linen, or in
            YAML MaxText's.

    Raises:
        FileError: There is no such file, or its content is invalid; a ValueError.

    Example:
        >>> import jax, json, os, tempfile
        >>> import shardrules as sr
        >>> table = {"data_axes": ["dp"], "rules": [["wq", ["fsdp", "tp"]]]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(os.path.join(directory, "rules.json"), "w") as file:
        ...         json.dump(table, file)
        ...     read = sr.read_rules(file.name)
        >>> model = {"wq": jax.ShapeDtypeStruct((4096, 4096), "bfloat16")}
        >>> plan = sr.plan(model, read.rules, {"dp": 2, "fsdp": 2, "tp": 2})
        >>> print(plan.check(**read.declared))
        nothing found: 1 leaf, 1 rule, on dp=2,fsdp=2,tp=2
    """
    what = "a Dialect, such as shardrules.dialects.EASYLM"
    check_type("dialect", dialect, Dialect | LogicalDialect | None, what)
    names = [file_name(path), *(file_name(each, "more") for each in more)]
    return read_rule_source(names, dialect)


def read_rule_source(
    source: str | Sequence[str],
    dialect: Dialect | LogicalDialect | None = None,
) -> RuleFile:
    """Read the rules in a file, of several that are merged, or of a module.

    Args:
        source: As in `read_rules`; or `package.module:NAME`, which is a `Rules` or `LogicalRules`,
            a list of (pattern, spec) pairs, or a function that returns one of these.
        dialect: The dialect. Default: the file's, or else eformer's; linen for logical rules.

    Raises:
        FileError: There is no such file or object, or its content is invalid.
    """
    sources = [source] if isinstance(source, str) else [*source]
    if len(sources) == 1 and is_module_form(sources[0]):
        return _of_module(sources[0], dialect)
    content: dict[str, Any] = {}
    unread: list[str] = []
    paths = list(map(path_of, sources))
    of_rules = paths[-1]
    for path in paths:
        table = _table_in(path, unread)
        if "rules" in table:
            unread += [f"rules of {of_rules}"] * ("rules" in content)
            of_rules = path
        content |= table
    if not isinstance(content.get("rules"), list):
        raise _without_rules(of_rules)
    with naming(", ".join(map(str, paths))):
        merged = record_of("", content, _RuleFileTable, _EXAMPLE)
        return _read_table(of_rules, merged, dialect)._replace(unread=tuple(unread))


def _of_module(source: str, dialect: Dialect | LogicalDialect | None) -> RuleFile:
    rules: Any = load_object(source)
    with naming(source):
        if isinstance(rules, LogicalRules) or isinstance(dialect, LogicalDialect):
            rules = LogicalRules(rules, dialect or rules.dialect)  # type: ignore[arg-type]
        elif dialect is not None or not isinstance(rules, Rules):
            rules = Rules(rules, dialect)
    return RuleFile(rules, NOTHING, (), source.partition(":")[2])


_EXAMPLE: Final = '{"rules": [["kernel", ["fsdp", "tp"]], ...]}, or [[rules]] tables in TOML'
MAXTEXT_KEY: Final = "logical_axis_rules"
"""The key of the rules in MaxText's YAML."""
YAML: Final = (".yml", ".yaml")


def _without_rules(path: Path) -> FileError:
    key, fix = "rules", f"write {_EXAMPLE}"
    if path.suffix in YAML:
        key = MAXTEXT_KEY
        fix = "give the file that it is merged over before it; other rules are in TOML or JSON"
    return FileError(f"{path}: key {key!r}: there is no list of rules; {fix}")


class _RuleFileTable(RuleTable):
    replicated: Texts = ()
    data_axes: Axes = ()
    stacked: Annotated[tuple[Any, ...], Meta(description="a list of paths or tables")] = ()
    companions: Texts = ()


def _read_table(path: Path, table: _RuleFileTable, dialect: Any) -> RuleFile:
    if dialect is not None and table.is_logical != isinstance(dialect, LogicalDialect):
        raise ValueError(f"these are {table.kind} rules, and {dialect.name} is for others")
    rules = rules_of(table, dialect or dialect_named(table.dialect, is_logical=table.is_logical))
    for index, pattern in enumerate(table.replicated):
        check_length(f"replicated[{index}]: ", pattern)
        parse(f"replicated[{index}]", pattern)
    declared = Declared(replicated=table.replicated, data_axes=table.data_axes)
    stem = Path(path.name.removesuffix(".gz")).stem
    return RuleFile(rules, declared, _companions(table), stem)


_STACK: Final = ("at", "layer", "axis", "mesh_axis")


def _companions(table: _RuleFileTable) -> tuple[Companion, ...]:
    """Read both keys of companions.

    Stacks come first: the base of a stacked leaf is one of a single layer, for which tables are.
    """
    if table.is_logical and (table.stacked or table.companions):
        raise ValueError("stacked, companions: they are for rules of paths, and these are logical")
    companions: list[Companion] = []
    for index, entry in enumerate(table.stacked):
        where = f"stacked[{index}]: "
        arguments = entry if isinstance(entry, dict) else {"at": entry}
        check_keys(where, arguments, _STACK)
        if "at" not in arguments:
            raise ValueError(f"{where}at is missing; write the path of the stack")
        with naming_place(where):
            companions.append(stacked(**arguments))
    for index, name in enumerate(table.companions):
        from shardrules._plan.companion_tables import LORA, QUANTIZED

        tables = {"lora": LORA, "quantized": QUANTIZED}
        if name.lower() not in tables:
            raise ValueError(
                f"companions[{index}]: there is no table {name!r}; there are {', '.join(tables)}"
            )
        companions += tables[name.lower()]
    return tuple(dict.fromkeys(companions))


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


def parse_toml(path: Path, data: bytes) -> dict[str, Any]:
    import tomllib  # few processes read any

    text = text_of(path, data)
    levels = [key.count(".") for key in _KEY.findall(_NO_KEY.sub("", text))]
    if max(levels, default=0) >= _MOST_LEVELS:
        raise FileError(f"{path}: a key has more than {_MOST_LEVELS} levels; rules need 3 levels")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise FileError(f"{path}: this is not TOML: {error}; correct it there") from None
    except RecursionError:
        raise FileError(f"{path}: the TOML is nested too deeply; rules need 3 levels") from None


def parse_yaml(path: Path, data: bytes) -> dict[str, Any]:
    """Return the keys of MaxText's YAML, with the lists of names below those of rules."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise FileError(f"{path}: reading YAML needs PyYAML; pip install pyyaml") from None
    try:
        root = yaml.compose(io.BytesIO(data), yaml.SafeLoader)  # a stream, as texts are quoted
    except RecursionError:
        raise FileError(f"{path}: the YAML is nested too deeply; rules need 4 levels") from None
    except (yaml.YAMLError, OverflowError, ValueError) as error:  # also of a wrong escape
        problem = " ".join(str(error).split())
        raise FileError(f"{path}: this is not YAML: {problem}; correct it there") from None
    if not isinstance(root, yaml.MappingNode):
        raise _without_rules(path)
    seen: set[int] = set()

    def line_of(node: Any) -> str:
        return f"{path}: line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"

    def names_in(node: Any) -> Any:
        # A few levels of aliases are more entries than any memory has.
        if id(node) in seen:
            raise FileError(f"{line_of(node)}: an alias: write out what it stands for")
        seen.add(id(node))
        if node.id == "sequence":
            return list(map(names_in, node.value))
        kind = "map" if node.id == "mapping" else node.tag.rpartition(":")[2]
        if kind not in ("str", "null"):
            raise FileError(f"{line_of(node)}: this is no name but {kind}; write a text, or a list")
        return node.value if kind == "str" else None

    for key, _ in root.value:
        if key.id != "scalar":  # whose text would be that of all its aliases
            raise FileError(f"{line_of(key)}: this key is no text; write one")
    nodes = {key.value: node for key, node in root.value}
    if len(nodes) < len(root.value):
        name = first_repeated([key.value for key, _ in root.value])
        raise FileError(f"{path}: the key {name!r} is there twice; remove one")
    return {key: names_in(nodes[key]) if key.endswith(MAXTEXT_KEY) else None for key in nodes}


BYTES_OF_TOML: Final = 512
"""Maximum bytes of memory per byte of a file: for the program of all patterns, and for the name of
a table in `tomllib`."""
# In PyYAML, a list of empty lists takes most.
_PARSERS: Final[Mapping[str, tuple[Any, int]]] = {
    ".toml": (parse_toml, BYTES_OF_TOML),
    **dict.fromkeys(YAML, (parse_yaml, 2048)),
}
_JSON: Final = (parse_json, 64)


def _table_in(path: Path, unread: list[str]) -> dict[str, Any]:
    """Return the table of one file; of MaxText's YAML the rules, as other keys are for MaxText."""
    parse, per_byte = _PARSERS.get(path.suffix, _JSON)
    content = parse(path, read_bytes(path, per_byte))
    if isinstance(content, list):
        return {"rules": content}
    if not isinstance(content, dict):
        raise _without_rules(path)
    if path.suffix not in YAML:
        return content
    others = [key for key in content if key.endswith(MAXTEXT_KEY) and key != MAXTEXT_KEY]
    unread += [f"{key} of {path}" for key in others]
    rules = {"rules": content[MAXTEXT_KEY]} if MAXTEXT_KEY in content else {}
    return {**rules, "kind": "logical", "dialect": MAXTEXT.name}


_TABLES: Final = re.compile(r"^[ \t]*(?=\[\[[ \t]*rules[ \t]*\]\])", re.MULTILINE)


def rule_places(source: str, rules: int) -> tuple[str | None, tuple[int, ...]]:
    """Return (file, the line of each of its rules in TOML from 1 on), for annotations.

    None or () if they are not known.
    """
    path = Path(source)
    if not path.is_file():
        return None, ()
    if path.suffix != ".toml":
        return source, ()
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = [text.count("\n", 0, table.end()) + 1 for table in _TABLES.finditer(text)]
    return source, tuple(lines) if len(lines) == rules else ()
