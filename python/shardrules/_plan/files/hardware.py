"""`read_hardware`: the figures of a device in a file."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields

from shardrules._base.arguments import check_type
from shardrules._base.hardware import Hardware
from shardrules._base.io import path_of, read_bytes
from shardrules._plan.codec import check_keys, naming
from shardrules._plan.files.rules import BYTES_OF_TOML, parse_toml


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
    table = parse_toml(file, read_bytes(file, BYTES_OF_TOML))
    needed = {field.name: field.default is MISSING for field in fields(Hardware)}
    with naming(file):
        check_keys("", table, needed)
        if missing := [key for key in needed if needed[key] and key not in table]:
            raise ValueError(f"it has no {', '.join(missing)}; write them as {missing[0]} = ...")
        memory = table["memory_bytes"]
        if isinstance(memory, float) and memory.is_integer():  # such as 96e9
            table["memory_bytes"] = int(memory)
        return Hardware(**table)
