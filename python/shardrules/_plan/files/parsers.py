"""Parsers of TOML and YAML for files of others: bounded, and without tags that make objects."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NoReturn

from shardrules._base.io import FileError, first_repeated, text_of

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
    if any(key.count(".") >= _MOST_LEVELS for key in _KEY.findall(_NO_KEY.sub("", text))):
        raise FileError(f"{path}: a key has more than {_MOST_LEVELS} levels; rules need 3 levels")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also a number of thousands of digits
        raise FileError(f"{path}: this is not TOML: {error}; correct it there") from None
    except RecursionError:
        raise FileError(f"{path}: the TOML is nested too deeply; rules need 3 levels") from None


# What PyYAML raises for values such as a date that does not exist, or `!!int ""`.
_BAD_VALUES: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse_yaml(path: Path, data: bytes) -> Any:
    """Parse bytes of a file as YAML, without aliases, and without tags that make objects."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise FileError(f"{path}: reading YAML needs PyYAML; pip install pyyaml") from None
    try:
        return _loader(yaml)(data).get_single_data()
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        where, problem = f"line {mark.line + 1}, column {mark.column + 1}", error.problem
    except yaml.reader.ReaderError as error:
        where, problem = f"position {error.position}", error.reason
    except RecursionError:
        raise FileError(f"{path}: the YAML is nested too deeply; rules need 4 levels") from None
    except _BAD_VALUES as error:
        raise FileError(f"{path}: a value of this YAML is not of its type: {error}") from None
    raise FileError(f"{path}: {where}: this is not YAML ({problem}); correct it there")


def _loader(yaml: Any) -> type[Any]:
    """Make a safe loader of PyYAML that refuses keys that repeat, and aliases.

    A few levels of these are more entries than any memory has.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined, unused-ignore]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                refuse("an alias: write out what it stands for", self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            names = [key.value for key in keys]
            if len(set(names)) < len(names):
                name = first_repeated(names)
                again = [key for key in keys if key.value == name][1]
                refuse(f"the key {name!r} is there twice", again.start_mark)
            return node

    def refuse(problem: str, mark: Any) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, mark)

    return Loader
