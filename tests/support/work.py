"""What a call costs, counted: the same number whatever else the machine does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_by_file(call: Callable[[], Any]) -> Counter[str]:
    """How many calls of functions, Python's and C's, each source file has part in."""
    counted: Counter[str] = Counter()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_call"}:
            counted[frame.f_code.co_filename] += 1

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted


def calls(call: Callable[[], Any]) -> int:
    """How many functions the call calls, itself and all in it."""
    return calls_by_file(call).total()
