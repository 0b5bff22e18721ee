"""Placeholder."""
from __future__ import annotations
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
@dataclass(frozen=True)
class Built:
    compiled: Any
    inputs: tuple[Any, ...]
    outputs: Any
class Step(NamedTuple):
    name: str
    build: Callable[..., Built]
    faults: Mapping[str, Mapping[str, Any]]
