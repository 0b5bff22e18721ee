r"""Text that is safe to print. Names come from files, and files may come from anyone.

A name may contain terminal controls, invisible characters, a line break, or a command to a CI
runner. `printable` escapes these in one line, and leaves ordinary names unchanged. It must be
called before lines are joined, because later a name's line break looks like the layout's. Costs two
looks at a line. Must not know what a line says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["is_command", "printable", "printable_json", "printable_lines"]

# GitHub's runner obeys ::name:: at the beginning of a line, after white space. It and the runners
# of Azure and TeamCity obey ##[name], ##vso[ and ##teamcity[ anywhere.
_COMMAND: Final = re.compile(r"^ *:(?=:)|#(?=#[\w.-]*\[)")


def printable(line: str) -> str:
    r"""Escape characters in a line that a terminal or a CI runner would act upon.

    These are characters for which `str.isprintable` is false (controls, line breaks, marks of
    direction and other formats, halves of surrogate pairs), and the first character of a command to
    a CI runner. They are written as \u001b.

    Example:
        >>> print(printable("a\x1b[2J\nb"), printable(r"layers/\d+/(wq|键)"))
        a\u001b[2J\u000ab layers/\d+/(wq|键)
        >>> print(printable("::error::x"), printable("##[error]x"))
        \u003a:error::x \u0023#[error]x
    """
    if not line.isprintable():
        line = "".join(c if c.isprintable() else _escaped(c) for c in line)
    return _COMMAND.sub(_without_command, line) if "::" in line or "##" in line else line


def is_command(line: str) -> bool:
    """Whether a CI runner would obey the line, if it stood in a job's log as it is."""
    return _COMMAND.search(line.lstrip()) is not None


def printable_lines(lines: Iterable[str]) -> str:
    """Join lines after making each of them printable."""
    return "\n".join(map(printable, lines))


def printable_json(value: Any) -> str:
    """A value as indented JSON without commands to a CI runner. The JSON value is the same."""
    return re.sub("#(?=#)", r"\\u0023", json.dumps(value, indent=1))


def _without_command(found: re.Match[str]) -> str:
    return found[0][:-1] + _escaped(found[0][-1])


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
