"""Lines on which the rules of a TOML or YAML file begin, for annotations; of others, the file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from shardrules._base.io import FileError, read_bytes, text_of
from shardrules._plan.files.modules import is_module_form
from shardrules._plan.files.parsers import without_strings, yaml_nodes
from shardrules._plan.files.rules import MAXTEXT_KEY

_TABLES: Final = re.compile(r"^[ \t]*(?=\[\[[ \t]*rules[ \t]*\]\])", re.MULTILINE)
_LIST: Final = re.compile(r"^[ \t]*rules[ \t]*=[ \t]*(?=\[)", re.MULTILINE)


def rule_places(source: str, rules: int) -> tuple[str | None, tuple[int, ...]]:
    """Return (file, the line of each of its rules from 1 on); None or () if they are not known."""
    if is_module_form(source):
        return _file_of_module(source), ()
    path = Path(source)
    if not path.is_file():  # standard input
        return None, ()
    lines: list[int] = []
    if lines_of := _LINES_OF.get(path.suffix):
        # What was read once is read again: all that can come is a file that has changed.
        with suppress(FileError, ValueError, LookupError, StopIteration, RecursionError):
            lines = list(lines_of(text_of(path, read_bytes(path))))
    return source, tuple(lines) if len(lines) == rules else ()


def _file_of_module(source: str) -> str | None:
    file = getattr(sys.modules.get(source.partition(":")[0]), "__file__", None)
    path = Path(file or "")
    if path.suffix != ".py" or not path.is_relative_to(Path.cwd()):
        return None
    return path.relative_to(Path.cwd()).as_posix()


def _toml_lines(text: str) -> Iterator[int]:
    bare = without_strings(text)
    if rules := _LIST.search(bare):
        starts: Iterator[int] = _items_of(bare, rules.end())
    else:
        starts = (rules.end() for rules in _TABLES.finditer(bare))
    return (bare.count("\n", 0, start) + 1 for start in starts)


def _items_of(bare: str, start: int) -> Iterator[int]:
    """Yield the place of each item of the list that begins there, in a text without strings."""
    depth, expected = 0, False
    for place in range(start, len(bare)):
        char = bare[place]
        if expected and char not in ", \t\r\n]":
            yield place
            expected = False
        depth += (char in "[{") - (char in "]}")
        if depth == 0:
            return
        expected = expected or (depth == 1 and (char == "," or place == start))


def _yaml_lines(text: str) -> Iterator[int]:
    nodes = yaml_nodes(text)
    rules = next(value for key, value in nodes.value if key.value == MAXTEXT_KEY)
    return (rule.start_mark.line + 1 for rule in rules.value)


_LINES_OF: Final = {".toml": _toml_lines, ".yml": _yaml_lines, ".yaml": _yaml_lines}
