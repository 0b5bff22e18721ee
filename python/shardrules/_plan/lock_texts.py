"""Texts of locks: JSON with a line for each entry, given as a text or as a file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from shardrules._base.io import FileError, read_bytes
from shardrules._base.text import shown

# JSON's reader takes the two for the one character that they would stand for.
_ADJACENT_SURROGATES: Final = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def checked_json(value: Any) -> str:
    """Write a value as JSON in one line, if reading gives the same value."""
    if _ADJACENT_SURROGATES.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(
            f"a lock cannot hold adjacent lone surrogates, as in {shown(value)}: give the leaf, "
            "pattern or axis another name"
        )
    return json.dumps(value)


def lines_of(head: Mapping[str, Any], **lists: Iterable[str]) -> str:
    """Write an object: a line for each item, and for each entry of lists that are JSON already."""
    parts = [f" {json.dumps(key)}: {checked_json(value)}" for key, value in head.items()]
    for key, entries in lists.items():
        lines = ",\n".join("  " + entry for entry in entries)
        parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def content_of(lock_or_path: str | os.PathLike[str], writer: str) -> tuple[bytes, str]:
    """Return (content, name) of a lock that is given as its text or as a file.

    `writer` is the method that writes such locks, for the message if there is none.
    """
    if isinstance(lock_or_path, str) and lock_or_path.lstrip().startswith("{"):
        return lock_or_path.encode("utf-8", "surrogatepass"), "the lock"
    path = Path(lock_or_path)
    try:
        return read_bytes(path), str(path)
    except ValueError as error:  # such as a FileError, or no name that a file can have
        name = path if isinstance(lock_or_path, os.PathLike) else shown(lock_or_path)
        why = str(error).removeprefix(f"{path}: ")
        text = f"{name}: neither a lock nor a file with one: {why}; {writer}(path) writes one"
        raise FileError(text) from error
