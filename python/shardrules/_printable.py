r"""Text that is safe to print: names come from files, and a file may be anybody's.

A name may hold what moves a terminal's cursor, what looks like another name, a line break, or a
command to the CI that runs us. `printable` makes one line harmless, and leaves the names of models
as they are; it is for where lines are put together, since later a name's line break cannot be told
from the layout's. Costs two looks at a line. Must not know what a line says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["printable", "printable_json", "printable_lines"]

# GitHub's runner takes ::name:: at the beginning of a line, behind white space. It and the runners
# of Azure and TeamCity take ##[name], ##vso[ and ##teamcity[ anywhere.
_COMMAND: Final = re.compile(r"^ *:(?=:)|#(?=#[\w.-]*\[)")


def printable(line: str) -> str:
    r"""One line of text without what a terminal or a CI runner would act upon.

    Characters that are not printable, as `str.isprintable` has it (controls, line breaks, marks of
    direction and other formats, halves of surrogate pairs), become \u001b; so does the first
    character of a runner's command.

    Example:
        >>> print(printable("a\x1b[2J\nb"), printable(r"layers/\d+/(wq|键)"))
        a\u001b[2J\u000ab layers/\d+/(wq|键)
        >>> print(printable("::error::x"), printable("##[error]x"))
        \u003a:error::x \u0023#[error]x
    """
    if not line.isprintable():
        line = "".join(c if c.isprintable() else _escaped(c) for c in line)
    return _COMMAND.sub(_without_command, line) if "::" in line or "##" in line else line


def printable_lines(lines: Iterable[str]) -> str:
    """A text of these lines, of which each is printable."""
    return "\n".join(map(printable, lines))


def printable_json(value: Any) -> str:
    """A value as indented JSON, which says the same without a runner's commands."""
    return re.sub("#(?=#)", r"\\u0023", json.dumps(value, indent=1))


def _without_command(found: re.Match[str]) -> str:
    return found[0][:-1] + _escaped(found[0][-1])


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
