"""Companions as rule files and the command line name them: stacks of layers, and tables by name.

Few files name any, so the tables are imported when one does. Must not know how a companion is
applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from shardrules._file_error import FileError
from shardrules._format import shown

if TYPE_CHECKING:
    from shardrules._planning.companion import Companion

__all__ = ["COMPANION_KEYS", "TABLES", "companions_in"]

TABLES: Final = {"lora": "LORA", "quantized": "QUANTIZED"}
"""Tables of `_planning/companions.py` by their names in files."""
# Functions of it whose arguments are entries of these keys: the path of a stack, or a table.
_STACKS: Final = {
    "stacked": ("at", "layer", "axis", "mesh_axis"),
    "unstacked": ("at", "layer", "axis"),
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
    from shardrules._planning import companions

    if isinstance(name, str) and name.lower() in TABLES:
        table: tuple[Companion, ...] = getattr(companions, TABLES[name.lower()])
        return table
    raise FileError(f"{where}: there is no table {shown(name)}; there are {', '.join(TABLES)}")


def _stack(where: str, key: str, entry: object) -> Companion:
    from shardrules._planning import companions

    arguments = _STACKS[key]
    given = {"at": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or "at" not in given or not given.keys() <= set(arguments):
        raise FileError(
            f"{where}: it is {shown(entry)}; write the path of the stack, or a table of at and "
            f"any of {', '.join(arguments[1:])}"
        )
    try:
        stack: Companion = getattr(companions, key)(**given)
    except (TypeError, ValueError) as error:
        raise FileError(f"{where}: {error}") from None
    return stack
