"""`FileError`: an error in a file that the user can fix.

The command line turns it into a message and an exit code. Must not know about kinds of files.
"""

from __future__ import annotations

from typing import Final

from shardrules._printable import printable_lines

__all__ = ["FileError"]

_MOST: Final = 900
_END: Final = 300


class FileError(ValueError):
    """A file, or a name of an object, that cannot be used.

    The message starts with the file's name and the place in it, and ends with the fix. It is one
    line. Further arguments are lines below it. Very long lines are cut in the middle.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(_cut, lines))

    def __str__(self) -> str:
        return printable_lines(map(str, self.args))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - _END]} ... {text[-_END:]}"
