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


_MOST_MERGED: Final = 10_000
# What PyYAML raises for values such as a date that does not exist, or `!!int ""`.
_BAD_VALUES: Final = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def parse_yaml(path: Path, data: bytes) -> Any:
    """Parse bytes of a file as YAML, without tags that make objects."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise FileError(f"{path}: reading YAML needs PyYAML; pip install pyyaml") from None
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
