"""Rules for logical axis names in files: tables of ours, and YAML of MaxText."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NoReturn

from shardrules._base.io import FileError, first_repeated
from shardrules._base.text import shown
from shardrules._rules import dialects as _dialects
from shardrules._rules.dialects import LogicalDialect
from shardrules._rules.logical_rules import LogicalRules

LOGICAL_DIALECTS: Final = {
    value.name: value for value in vars(_dialects).values() if isinstance(value, LogicalDialect)
}
"""Dialects of logical rules by their names in files."""

_RULE_KEYS: Final = ("name", "axes")
MAXTEXT_KEY: Final = "logical_axis_rules"
"""The key of the rules in MaxText's YAML."""
_MOST_MERGED: Final = 10_000
# What PyYAML raises for values such as a date that does not exist, or `!!int ""`.
_BAD_VALUES: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def logical_rules(path: Path, rules: list[Any], dialect: LogicalDialect) -> LogicalRules:
    """Read the rules of a list of tables {name, axes} or pairs [name, axes]."""
    return LogicalRules(
        [_rule_pair(f"{path}: rule {i}", rule) for i, rule in enumerate(rules)], dialect
    )


def _rule_pair(where: str, rule: object) -> tuple[str, str | tuple[str, ...] | None]:
    if isinstance(rule, list) and len(rule) == 2:
        rule = dict(zip(_RULE_KEYS, rule, strict=True))
    if not isinstance(rule, dict) or rule.keys() != set(_RULE_KEYS):
        raise FileError(
            f'{where}: it is {shown(rule)}; write ["embed", ["fsdp"]], or a table of name and axes'
        )
    name, axes = rule["name"], rule["axes"]
    if not isinstance(name, str) or not name:
        raise FileError(f"{where}: the name is {shown(name)}; write a logical axis name")
    if isinstance(axes, str) and axes:
        return name, axes
    entries = [] if axes is None else axes
    if isinstance(entries, list) and len(entries) == 1 and isinstance(entries[0], list):
        entries = entries[0]  # the one entry of a spec, as for paths
    if not isinstance(entries, list) or not all(isinstance(a, str) and a for a in entries):
        raise FileError(
            f"{where}: axes is {shown(axes)}; write an axis, a list of axes, or [] for a dimension "
            "that is not sharded"
        )
    return name, tuple(entries) or None


def rules_of_maxtext(path: Path, content: object, dialect: LogicalDialect) -> LogicalRules:
    """Read the rules in the content of a YAML file of MaxText, whose other keys are for MaxText."""
    rules = content.get(MAXTEXT_KEY) if isinstance(content, dict) else None
    if not isinstance(rules, list):
        raise FileError(
            f"{path}: key {MAXTEXT_KEY!r}: there is no list of rules, as MaxText's YAML has one; "
            "rules of other kinds are in TOML or JSON"
        )
    return logical_rules(path, rules, dialect)


def parse_yaml(path: Path, data: bytes) -> Any:
    """Parse bytes of a file as YAML, without tags that make objects."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise FileError(
            f"{path}: reading YAML needs PyYAML; install it with: pip install 'shardrules[yaml]'"
        ) from None
    try:
        return _loader(yaml, _MOST_MERGED + len(data))(data).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        raise FileError(
            f"{path}: line {mark.line + 1}, column {mark.column + 1}: this is not YAML "
            f"({error.problem}); correct it there"
        ) from None
    except yaml.reader.ReaderError as error:
        raise FileError(
            f"{path}: position {error.position}: this is not YAML ({error.reason}); correct it "
            "there"
        ) from None
    except RecursionError:
        raise FileError(f"{path}: the YAML is nested too deeply; rules need 4 levels") from None


def yaml_nodes(text: str) -> Any:
    """Return the nodes of YAML that `parse_yaml` has read, which know their lines."""
    import yaml

    return yaml.compose(text, yaml.SafeLoader)


def _loader(yaml: Any, most: int) -> type[Any]:
    """Make a safe loader of PyYAML that refuses keys that repeat, and more than `most` entries."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined, unused-ignore]
        entries = 0
        place = None
        """Where the value begins that is being made."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = [key.value for key in keys]
            if len(set(names)) < len(names):
                name = first_repeated(names)
                again = [key for key in keys if key.value == name][1]
                self.refuse(f"the key {name!r} is there twice", again.start_mark)
            return node

        def flatten_mapping(self, node: Any) -> None:
            # PyYAML calls this before it copies the entries of a merged mapping: n levels of w
            # aliases are w**n entries.
            super().flatten_mapping(node)
            self.entries += len(node.value)
            if self.entries > most:
                self.refuse("merge keys (<<) make it too large: write it without", node.start_mark)

        def get_single_data(self) -> Any:
            try:
                return super().get_single_data()
            except _BAD_VALUES as error:
                # An escape beyond Unicode: chr's words, an OverflowError before Python 3.14.
                is_clear = isinstance(error, ValueError) and "chr()" not in str(error)
                problem = str(error) if is_clear else "the value is not of its type"
                self.refuse(problem, self.place or self.get_mark())

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            self.place = node.start_mark
            return super().construct_object(node, deep)

        def refuse(self, problem: str, mark: Any) -> NoReturn:
            raise yaml.constructor.ConstructorError(None, None, problem, mark)

    return Loader
