"""The one error of this subpackage: input that a user can put right.

A command line turns it into a message and an exit code. Must not know about kinds of files.
"""

from __future__ import annotations

from typing import Final

from shardrules._printable import printable_lines

__all__ = ["FileError"]

_MOST: Final = 900
_END: Final = 300


class FileError(ValueError):
    """What was given cannot be used.

    The message starts with the file's name and the place in it, and ends with the way out. It is
    one line; further arguments are lines below it. Names of megabytes are cut in the middle.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(_cut, lines))

    def __str__(self) -> str:
        return printable_lines(map(str, self.args))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - _END]} ... {text[-_END:]}"
