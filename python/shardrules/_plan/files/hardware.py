"""`read_hardware`: the figures of a device in a file."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from typing import Final

from shardrules._base.arguments import check_type
from shardrules._base.hardware import Hardware
from shardrules._base.io import FileError, opened, path_of
from shardrules._base.text import bytes_shown
from shardrules._plan.codec import check_keys, naming
from shardrules._plan.files.rules import parse_toml

_MOST_BYTES: Final = 1 << 16


def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """Read the figures of a device in a TOML file; the hardware page shows one.

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
    needed = {field.name: field.default is MISSING for field in fields(Hardware)}
    with naming(file):
        check_keys("", table, needed)
        if missing := [key for key in needed if needed[key] and key not in table]:
            raise ValueError(f"it has no {', '.join(missing)}; write them as {missing[0]} = ...")
        memory = table["memory_bytes"]
        if isinstance(memory, float) and memory.is_integer():  # such as 96e9
            table["memory_bytes"] = int(memory)
        return Hardware(**table)
