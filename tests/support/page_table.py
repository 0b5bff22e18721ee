"""The table of steps on a page of the documentation, which a module writes and a test compares."""

from __future__ import annotations

from pathlib import Path

_BEGIN, _END = "<!-- table of steps -->\n\n", "\n<!-- /table of steps -->"


def shown(page: Path) -> str:
    """Return the table that a page has."""
    return page.read_text(encoding="utf-8").split(_BEGIN)[1].split(_END)[0]


def write(page: Path, table: str) -> None:
    """Put a table in the place of the one that a page has."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    page.write_text(f"{before}{_BEGIN}{table}{_END}{after}", encoding="utf-8")
