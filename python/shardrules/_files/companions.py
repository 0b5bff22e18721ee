"""Companions as rule files and the command line name them: stacks of layers, and tables by name.

Costs nothing but their making. Must not know how a companion is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from shardrules._file_error import FileError
from shardrules._format import shown
from shardrules._planning.companion import Companion
from shardrules._planning.companions import LORA, QUANTIZED, stacked, unstacked

__all__ = ["COMPANION_KEYS", "TABLES", "companions_in"]

TABLES: Final = {"lora": LORA, "quantized": QUANTIZED}
"""Tables of companions by their names in files."""


class _Stacks(NamedTuple):
    """A key whose entries make stacks: paths, or tables of arguments."""

    make: Callable[..., Companion]
    arguments: tuple[str, ...]


_STACKS: Final = {
    "stacked": _Stacks(stacked, ("at", "layer", "axis", "mesh_axis")),
    "unstacked": _Stacks(unstacked, ("at", "layer", "axis")),
}
# In the order in which they find leaves: the base of a stacked leaf is one of a single layer, for
# which the tables are; and rules for a stack have no single layers.
COMPANION_KEYS: Final = ("stacked", "companions", "unstacked")


def companions_in(
    where: str, table: Mapping[str, Any], also: Mapping[str, list[str]]
) -> tuple[Companion, ...]:
    """The companions of a rule file.

    Args:
        where: The file, for errors.
        table: Its content.
        also: Further entries, by key.

    Raises:
        FileError: An entry is invalid.
    """
    found: list[Companion] = []
    for key in COMPANION_KEYS:
        entries = table.get(key, [])
        if not isinstance(entries, list):
            raise FileError(f"{where}: {key} is {shown(entries)}; write a list of strings")
        for index, entry in enumerate([*entries, *also.get(key, [])]):
            place = f"{where}: {key}[{index}]"
            found += _table(place, entry) if key == "companions" else [_stack(place, key, entry)]
    return tuple(dict.fromkeys(found))


def _table(where: str, name: object) -> tuple[Companion, ...]:
    if isinstance(name, str) and name.lower() in TABLES:
        return TABLES[name.lower()]
    raise FileError(f"{where}: there is no table {shown(name)}; there are {', '.join(TABLES)}")


def _stack(where: str, key: str, entry: object) -> Companion:
    make, arguments = _STACKS[key]
    given = {"at": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or "at" not in given or not given.keys() <= set(arguments):
        raise FileError(
            f"{where}: it is {shown(entry)}; write the path of the stack, or a table of at and "
            f"any of {', '.join(arguments[1:])}"
        )
    try:
        return make(**given)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}") from None
