"""Writing a text file at once. Must not know what the text is."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_text"]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes the file at once: whoever opens it sees the old one or the whole new one."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
