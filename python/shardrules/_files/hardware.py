"""`read_hardware`: the figures of a device from a TOML file, with the fields of `Hardware` as keys.

    name = "my cluster"
    memory_bytes = 96e9
    memory_bytes_per_second = 4e12
    link = "NVLink"
    link_bytes_per_second = 450e9     # that a device sends
    link_devices = 8
    dcn_bytes_per_second = 25e9
    torus_dimensions = 1              # default: 1, for a switch
    sources = ["measured in May"]     # default: none

    [flops_per_second]
    bfloat16 = 989e12

Any other key is an error. Must not know what the figures are for.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from shardrules._arguments import check_type
from shardrules._files.rules import parse_toml
from shardrules._hardware import Hardware
from shardrules._io import FileError, opened, path_of
from shardrules._text import bytes_shown, misspelt

_MOST_BYTES: Final = 1 << 16


def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """The figures of a device in a TOML file; the hardware page shows one.

    Nothing is executed, and files may come from anyone.

    Args:
        path: A .toml file whose keys are the fields of `Hardware`.

    Raises:
        FileError: There is no such file, or its content is invalid; a ValueError.

    Example:
        >>> import os, tempfile
        >>> import shardrules as sr
        >>> keys = {
        ...     "name": "'node'", "link": "'NVLink'", "link_devices": 8, "memory_bytes": 96e9,
        ...     "memory_bytes_per_second": 4e12, "link_bytes_per_second": 450e9,
        ...     "dcn_bytes_per_second": 25e9, "flops_per_second.bfloat16": 989e12,
        ... }
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(os.path.join(directory, "node.toml"), "w") as file:
        ...         for key, value in keys.items():
        ...             print(key, "=", value, file=file)
        ...     sr.read_hardware(file.name).link_devices
        8
    """
    check_type("path", path, str | os.PathLike, "the path of a file")
    file = path_of(path)
    with opened(file) as content:
        data = content.read(_MOST_BYTES + 1) or b""
    if len(data) > _MOST_BYTES:
        raise FileError(
            f"{file}: a device's figures take at most {bytes_shown(_MOST_BYTES)}, and it has more; "
            "give another file"
        )
    table = parse_toml(file, data)
    _check_keys(file, table)
    try:
        return Hardware(**{**table, "memory_bytes": _whole(table["memory_bytes"])})
    except (TypeError, ValueError) as error:
        raise FileError(f"{file}: {error}") from None


def _check_keys(file: Path, table: dict[str, Any]) -> None:
    known = {field.name: field.default is MISSING for field in fields(Hardware)}
    for key in table:
        if key not in known:
            meant = misspelt(key, known)
            hint = f"did you mean {meant!r}?" if meant else f"the keys are {', '.join(known)}"
            raise FileError(f"{file}: key {key!r} is unknown; {hint}")
    if missing := [key for key, is_needed in known.items() if is_needed and key not in table]:
        raise FileError(f"{file}: it has no {', '.join(missing)}; write them as {missing[0]} = ...")


def _whole(count: object) -> object:
    """A number of bytes such as 96e9 as an integer."""
    return int(count) if isinstance(count, float) and count.is_integer() else count
