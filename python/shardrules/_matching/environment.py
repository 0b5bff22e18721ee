"""The two environment variables that eformer reads, and what they ask for.

They are looked at when a function is called, not at import. Must not know what the answers are for.
"""

from __future__ import annotations

import os
from typing import Any, Final

from shardrules._arguments import check_real
from shardrules._format import shown

__all__ = ["checked_min_size", "logs_moves"]

_DEFAULT_MIN_SIZE: Final = "16384"
_TRUE_WORDS: Final = ("true", "yes", "1", "on")


def checked_min_size(min_size: Any) -> Any:
    """A function's `min_size`; None stands for MIN_SHARDING_SIZE, or else 16384.

    Raises:
        TypeError: It is neither a number nor None.
        ValueError: It is None, and MIN_SHARDING_SIZE is not an integer.
    """
    if min_size is not None:
        check_real("min_size", min_size)
        return min_size
    text = os.environ.get("MIN_SHARDING_SIZE", _DEFAULT_MIN_SIZE)
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"the environment variable MIN_SHARDING_SIZE is {shown(text)}; it must be a number of "
            "elements, such as 16384"
        ) from None


def logs_moves() -> bool:
    """Whether LOG_SHARDING_MOVE asks to be warned of leaves that do not get their whole spec."""
    return os.environ.get("LOG_SHARDING_MOVE", "false") in _TRUE_WORDS
