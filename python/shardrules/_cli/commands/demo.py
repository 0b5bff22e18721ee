"""`shardrules demo`: a tour in one command."""

from __future__ import annotations

from shardrules.demo import main

__all__ = ["command"]


def command() -> int:
    """Plan DeepSeek-V3 with real rules: the finding, the fix, the bytes, the report."""
    return main()
