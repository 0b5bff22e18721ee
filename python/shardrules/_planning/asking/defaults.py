"""Defaults of questions, which signatures show before the question is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shardrules._planning.asking.collectives.sent import Of

__all__ = ["DEFAULT_LARGE", "OVERLAP"]

DEFAULT_LARGE: Final = 16 * 2**20
"""Bytes on a device from which a replicated leaf is a warning."""
OVERLAP: Final[tuple[Of, ...]] = ("params", "gradients")
"""What is sent while a device computes."""
