"""What the words after options mean: counts, memories, moments, the time of a step.

Raises an error that names the option. Must not read a model, nor print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from shardrules._cli.inputs import MOMENTS, load_hardware
from shardrules._correction import MEMORY_KINDS
from shardrules._dtypes import numpy_name
from shardrules._mesh_sizes import parse_mesh
from shardrules._plan.memory import Room
from shardrules._text import byte_count

if TYPE_CHECKING:
    from shardrules._hardware import Hardware

__all__ = [
    "axes",
    "counted",
    "following",
    "levels",
    "memory",
    "names",
    "one_of",
    "refuse",
    "room",
    "step",
]

# A device or a host has more.
_LEAST_WITHOUT_UNIT: Final = 10**6


def axes(text: str) -> tuple[list[str], dict[str, int]]:
    """The axes of fsdp,tp,sp=1 without a size, and {axis: size} of the others."""
    parts = names(text)
    free = [part for part in parts if "=" not in part]
    fixed = ",".join(part for part in parts if "=" in part)
    if text and not free:
        raise ValueError(f"--axes {text!r}: give at least one axis without a size")
    return free, parse_mesh(fixed) if fixed else {}


def names(text: str | None) -> list[str]:
    """The parts of a text with commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def following(stacked: list[str] | None, companions: str | None) -> dict[str, list[str]]:
    """The companions of the command line, by the keys of a rule file."""
    return {"stacked": stacked or [], "companions": names(companions)}


def _gradients(text: str | None) -> Any:
    return True if text == "same" else text if text is None else numpy_name(text)


def _moments(optimizer: str | None, dtype: str | None) -> tuple[str, ...] | None:
    if optimizer is not None:
        one_of("--optimizer", optimizer, tuple(MOMENTS))
    if not MOMENTS.get(optimizer or ""):
        refuse("--optimizer names no optimizer with moments", {"--optimizer-dtype": dtype})
    return None if optimizer is None else (numpy_name(dtype or "float32"),) * MOMENTS[optimizer]


def counted(
    gradients: str | None, optimizer: str | None, dtype: str | None, memory: str | None
) -> dict[str, Any]:
    """The arguments of `Plan.bytes_per_device` that these options mean."""
    moments = _moments(optimizer, dtype)
    if memory is not None:
        one_of("--optimizer-memory", memory, MEMORY_KINDS)
    if not moments:
        refuse("--optimizer names no optimizer with moments", {"--optimizer-memory": memory})
    return {
        "gradients": _gradients(gradients),
        "optimizer": moments,
        "optimizer_memory_kind": memory,
    }


def step(
    tokens: int | None, hardware: str | None, over_dcn: str | None, experts_per_token: int | None
) -> dict[str, Any]:
    """The arguments of `Plan.sweep` for the time of a step that these options mean."""
    device = None if hardware is None else load_hardware(hardware)
    if tokens is None:
        given = {"--axes-over-dcn": over_dcn, "--experts-per-token": experts_per_token}
        refuse("without --tokens there is no time of a step", given)
        return {"hardware": device}
    if device is None:
        raise ValueError("--tokens: the time of a step needs --hardware, such as v5p")
    return {
        "tokens": tokens,
        "hardware": device,
        "axes_over_dcn": tuple(names(over_dcn)),
        "schedule": {"experts_per_token": experts_per_token},
    }


def room(hbm: str | None, host_memory: str | None, hardware: Hardware | None) -> Room:
    """The memory that these options mean; that of the hardware without --hbm."""
    own = memory("--hbm", "a device", hbm)
    if own is None and hardware is not None:
        own = hardware.memory_bytes
    return Room(own, memory("--host-memory", "a host", host_memory))


def memory(option: str, of: str, text: str | None) -> int | None:
    """The bytes that an option means.

    Raises:
        ValueError: They are none, or so few without a unit that gigabytes are meant.
    """
    count = None if text is None else byte_count(text)
    if count == 0:
        raise ValueError(f"{option} is {text!r}; {of} has memory, such as 96GB")
    is_bare = text is not None and text.strip()[-1:].isdigit()
    if is_bare and count is not None and count < _LEAST_WITHOUT_UNIT:
        raise ValueError(f"{option} {text}: that is {count:,} bytes; write {text}GB")
    return count


def levels(texts: Iterable[str]) -> dict[Any, Any]:
    """Levels by kind; that these exist is for `Plan.check` to say."""
    levels: dict[str, str] = {}
    for text in texts:
        kind, equals, level = text.partition("=")
        if not equals:
            raise ValueError(
                f"--level {text!r}: write a kind of finding and its level, as dead=off"
            )
        if levels.setdefault(kind, level) != level:
            raise ValueError(f"--level gives {kind!r} two levels, {levels[kind]!r} and {level!r}")
    return levels


def refuse(why: str, options: Mapping[str, object]) -> None:
    """Checks that none of these options is given, since they would be ignored."""
    given = [option for option, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{why}, so leave out {', '.join(given)}")


def one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{option} is {value!r}; it must be one of {', '.join(choices)}")
