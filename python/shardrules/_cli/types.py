"""Types of options: what a text of a command line, or a value of a project file, means."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, get_args

import click

from shardrules._base.io import FileError
from shardrules._base.text import near_shown, shown


class Type(click.ParamType):  # type: ignore[type-arg]
    """Type whose function reads a value, of one of the types of TOML, or raises what is wrong."""

    def __init__(self, name: str, read: Callable[[Any], Any], *toml: type) -> None:
        self.name, self.read, self.toml = name, read, toml or (str,)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the value, as click asks for it."""
        try:
            return self.read(value)
        except FileError:  # whose words are those of a file
            raise
        except (TypeError, ValueError) as error:
            self.fail(str(error), param, ctx)


class Number(click.IntRange):
    """An integer that is large enough."""

    name = "number"
    toml = (str, int)


class KeyValues(Type):
    """KEY=VALUE, or a table; `odd` says of a key why it is none of this command, or ""."""

    def __init__(
        self, name: str, value: Callable[[Any], Any], odd: Callable[[str], str] = lambda _: ""
    ) -> None:
        super().__init__(name, self._pair, str, list, dict)
        self.value, self.odd = value, odd

    def _pair(self, value: str | tuple[str, Any]) -> tuple[str, Any]:
        if isinstance(value, str):
            key, equals, text = value.partition("=")
            if not equals:
                raise ValueError(f"{value!r}: write it as {self.name}")
            value = (key, text)
        if why := self.odd(value[0]):
            raise ValueError(why)
        return value[0], self.value(value[1])


def _mesh_sizes(value: str | dict[str, int]) -> dict[str, int]:
    from shardrules._base.arguments import checked_sizes, parse_mesh

    return parse_mesh(value) if isinstance(value, str) else checked_sizes(value)


def _split_names(value: str | list[str]) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    return tuple(name.strip() for name in names if name.strip())


def _axes(value: str | list[str]) -> tuple[str, ...]:
    names = _split_names(value)
    if "=" in "".join(names):
        raise ValueError(f"{','.join(names)!r} has sizes; write names alone, as fsdp,tp")
    return names


def _bytes(value: str | int) -> int:
    from shardrules._base.arguments import byte_size

    return byte_size("the value", value)


def _memory(value: str | int) -> int:
    """Return the bytes of a memory, or of a device of this name."""
    from shardrules._base.arguments import memory_bytes

    text = str(value).strip()
    if text[:1].isalpha():
        from shardrules._base.hardware import Hardware

        return Hardware.named(text).memory_bytes
    return memory_bytes("the value", text)


def _share(value: str) -> float:
    with suppress(ValueError):
        part = float(value.removesuffix("%")) / 100
        if value.endswith("%") and 0 <= part < math.inf:
            return part
    raise ValueError(f"{value!r}: write a part, such as 2%")


def _dtype_of_text(value: str) -> str:
    from shardrules._base.dtypes import numpy_name

    return numpy_name(value)


def _dialect(value: str) -> Any:
    from shardrules._plan.codec import DIALECTS, LOGICAL_DIALECTS

    dialects: dict[str, Any] = {**DIALECTS, **LOGICAL_DIALECTS}
    if value.lower() not in dialects:
        raise ValueError(f"there is no dialect {value!r}{near_shown(value, dialects)}")
    return dialects[value.lower()]


def _hardware(value: str) -> Any:
    from shardrules._base.hardware import Hardware
    from shardrules._plan.files.hardware import read_hardware

    is_file = value.endswith(".toml") or "/" in value
    return read_hardware(value) if is_file else Hardware.named(value)


def _topology(value: str) -> str:
    from shardrules._program.topologies.topology import Topology

    return Topology(value).name


def _odd_kind(kind: str) -> str:
    from shardrules._plan.findings import CheckKind

    kinds = get_args(CheckKind)
    return "" if kind in kinds else f"there is no finding {kind!r}{near_shown(kind, kinds)}"


def _level(value: Any) -> Any:
    levels = ("error", "warning", "info", "off")
    if value not in levels:
        raise ValueError(f"{shown(value)} is no level; write one of {', '.join(levels)}")
    return value


def _values_to_try(text: str) -> list[Any]:
    """Return values of --try: numbers, true, false, none, and else texts."""
    words: dict[str, Any] = {"true": True, "false": False, "none": None}

    def choice(word: str) -> Any:
        for read in (int, float):
            with suppress(ValueError):
                return read(word)
        return words.get(word.lower(), word)

    return list(map(choice, _split_names(text)))


def _odd_planned(key: str) -> str:
    return "" if key == "device" else f"{key} is of prove; what is planned is of device"


def _odd_sent(key: str) -> str:
    return "" if _odd_planned(key) else f"{key} is of check, which counts what is planned"


FILE: Final = click.Path(readable=False)  # whose names shells complete
FILE.name = "file"
MESH = Type("mesh", _mesh_sizes, str, dict)
AXES = Type("axes", _axes, str, list)
BYTES, MEMORY = Type("bytes", _bytes, str, int), Type("bytes", _memory, str, int)
TOPOLOGY = Type("topology", _topology)
SHARE = Type("share", _share)
DTYPE = Type("dtype", _dtype_of_text)
DTYPE_OR_SAME = Type("dtype", lambda value: value == "same" or _dtype_of_text(value))
DIALECT, HARDWARE = Type("name", _dialect), Type("name", _hardware)
LEVELS = KeyValues("kind=level", _level, _odd_kind)
TRIES = KeyValues("keyword=values", _values_to_try)
PLANNED_BUDGET = KeyValues("memory=bytes", _memory, _odd_planned)
SENT_BUDGET = KeyValues("what=bytes", _bytes, _odd_sent)
