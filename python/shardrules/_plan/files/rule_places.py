"""Lines on which the rules of a file begin, for annotations."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from shardrules._base.io import FileError, read_bytes, text_of
from shardrules._plan.files.logical import MAXTEXT_KEY, yaml_nodes
from shardrules._plan.files.modules import is_module_form
from shardrules._plan.files.rules import without_strings

# Between the values of valid JSON.
_BETWEEN: Final = re.compile(r"[\s,:]*")
_TABLES: Final = re.compile(r"^[ \t]*(?=\[\[[ \t]*rules[ \t]*\]\])", re.MULTILINE)
_LIST: Final = re.compile(r"^[ \t]*rules[ \t]*=[ \t]*(?=\[)", re.MULTILINE)


class RulePlaces(NamedTuple):
    """File, and the line on which each of its rules begins."""

    file: str | None
    """None if the rules are not in a file of the current directory or a given one."""
    lines: tuple[int, ...]
    """Per rule a number from 1 on; empty if they are not known."""


NOWHERE: Final = RulePlaces(None, ())


def rule_places(source: str, rules: int) -> RulePlaces:
    if is_module_form(source):
        return _in_module(source, rules)
    path = Path(source)
    if not path.is_file():  # standard input
        return NOWHERE
    lines: list[int] = []
    # A line of gzipped JSON means nothing.
    if path.suffix != ".gz":
        # What was read once is read again: all that can come is a file that has changed.
        with suppress(FileError, ValueError, LookupError, StopIteration, RecursionError):
            text = text_of(path, read_bytes(path))
            lines = list(_LINES_OF.get(path.suffix, _json_lines)(text))
    return RulePlaces(source, tuple(lines) if len(lines) == rules else ())


def _line_of_offset(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _toml_lines(text: str) -> Iterator[int]:
    bare = without_strings(text)
    if rules := _LIST.search(bare):
        starts: Iterator[int] = _items_of(bare, rules.end())
    else:
        starts = (rules.end() for rules in _TABLES.finditer(bare))
    return (_line_of_offset(bare, start) for start in starts)


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


def _json_lines(text: str) -> Iterator[int]:
    at = after_separators(text, 0)
    if text[at] == "{":
        spans = json_spans(text, at)
        keys = zip(spans[::2], spans[1::2], strict=True)
        at = next(
            value for (begin, end), (value, _) in keys if json.loads(text[begin:end]) == "rules"
        )
    return (_line_of_offset(text, begin) for begin, _ in json_spans(text, at))


def json_spans(text: str, at: int) -> list[tuple[int, int]]:
    """Find each value of the array that begins there; in an object, each key and value."""
    decoder = json.JSONDecoder()
    spans, at = [], after_separators(text, at + 1)
    while text[at] not in "]}":
        _, end = decoder.raw_decode(text, at)
        spans.append((at, end))
        at = after_separators(text, end)
    return spans


def after_separators(text: str, at: int) -> int:
    """Return where the next value of valid JSON begins, or an array or object ends."""
    gap = _BETWEEN.match(text, at)
    assert gap is not None
    return gap.end()


def _yaml_lines(text: str) -> Iterator[int]:
    nodes = yaml_nodes(text)
    rules = next(value for key, value in nodes.value if key.value == MAXTEXT_KEY)
    return (rule.start_mark.line + 1 for rule in rules.value)


_LINES_OF: Final = {".toml": _toml_lines, ".yml": _yaml_lines, ".yaml": _yaml_lines}


def _in_module(source: str, rules: int) -> RulePlaces:
    """Find the lines of a list that a name of a module is given, itself or as an argument."""
    module, _, name = source.partition(":")
    file = getattr(sys.modules.get(module), "__file__", None)
    path = Path(file or "")
    if path.suffix != ".py" or not path.is_relative_to(Path.cwd()):
        return NOWHERE
    relative = path.relative_to(Path.cwd()).as_posix()
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return RulePlaces(relative, ())
    for value in filter(None, (_value_of(node, name) for node in reversed(body))):
        nodes = (value, *getattr(value, "args", ())[:1])
        lists = [node for node in nodes if _is_plain(node, rules)]
        if lists:
            return RulePlaces(relative, tuple(node.lineno for node in lists[0].elts))
        break
    return RulePlaces(relative, ())


def _value_of(statement: ast.stmt, name: str) -> ast.expr | None:
    """Return the expression that a statement gives the name, or a function of that name returns."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return statement.value
    if isinstance(statement, ast.FunctionDef) and statement.name == name:
        returned = [node.value for node in ast.walk(statement) if isinstance(node, ast.Return)]
        return returned[0] if len(returned) == 1 else None
    return None


def _is_plain(value: Any, rules: int) -> TypeGuard[ast.List | ast.Tuple]:
    """Say whether it is a list whose elements are these rules."""
    return (
        isinstance(value, ast.List | ast.Tuple)
        and len(value.elts) == rules
        and not any(isinstance(element, ast.Starred) for element in value.elts)
    )
