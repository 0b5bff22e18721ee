"""The one error of this subpackage: input that a user can put right.

A command line turns it into a message and an exit code. Must not know about kinds of files.
"""

from __future__ import annotations

__all__ = ["FileError"]


class FileError(ValueError):
    """What was given cannot be used.

    The message starts with the file's name and the place in it, and ends with the way out.
    """
