"""JAX's kinds of memory by name, and which of them are a host's.

Must not know about devices or shardings.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from shardrules._arguments import check_choice

__all__ = ["MEMORY_KINDS", "MemoryKind", "check_memory_kind", "in_memory", "is_on_host"]

MemoryKind = Literal["device", "pinned_host", "unpinned_host"]
MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)


def check_memory_kind(name: str, kind: object) -> None:
    """Checks that it is a kind of memory, or None.

    Raises:
        ValueError: It is something else; the message names the parameter and lists the kinds.
    """
    check_choice(name, kind, (None, *MEMORY_KINDS))


def is_on_host(kind: MemoryKind | None) -> bool:
    """Whether such memory is the host's, and not the device's."""
    return kind not in (None, "device")


def in_memory(text: str, kind: MemoryKind | None) -> str:
    """The text of a spec, with the kind of memory if there is one: P('tp') in pinned_host."""
    return text if kind is None else f"{text} in {kind}"
