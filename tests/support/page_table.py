"""The table of steps on a page of the documentation, which a module writes and a test compares."""

from __future__ import annotations

from pathlib import Path


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- table of {name} -->\n\n", f"\n<!-- /table of {name} -->"


def shown(page: Path, name: str = "steps") -> str:
    """Return the table that a page has."""
    begin, end = _marks(name)
    return page.read_text(encoding="utf-8").split(begin)[1].split(end)[0]


def write(page: Path, table: str, name: str = "steps") -> None:
    """Put a table in the place of the one that a page has."""
    begin, end = _marks(name)
    text = page.read_text(encoding="utf-8")
    before, after = text.split(begin)[0], text.split(end)[1]
    page.write_text(f"{before}{begin}{table}{end}{after}", encoding="utf-8")
