"""`read_model`, `read_rules` and `read_hardware`: files that the command line reads, for Python."""

from __future__ import annotations

import os
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

from shardrules._base.arguments import boolean, check_type, integer
from shardrules._base.dtypes import key_dtype
from shardrules._base.hardware import Hardware, public_hardware
from shardrules._base.io import DEFAULT_MEMORY, FileError, memory_within, opened, path_of
from shardrules._base.text import SLIP, bytes_shown, nearest
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import nested as in_levels
from shardrules._plan.files.models import read_arrays
from shardrules._plan.files.modules import is_module_form
from shardrules._plan.files.parsers import parse_toml
from shardrules._plan.files.rules import RuleFile
from shardrules._plan.files.rules import read_rule_source as rules_in
from shardrules._rules.dialects import Dialect, LogicalDialect

_MOST_BYTES: Final = 1 << 16


def read_model(
    path: str | os.PathLike[str], *, nested: bool | None = None, max_memory: int = DEFAULT_MEMORY
) -> dict[str, Any]:
    """Read the arrays of a model in a file, as abstract arrays: their names, shapes and dtypes.

    Only the headers of tensor files are read, and nothing is executed. Files may come from anyone.

    Args:
        path: A safetensors file, the index of several, a directory of them, an orbax checkpoint
            (which needs `shardrules[orbax]`), or a JSON manifest, also gzipped:
            `{"params": [["name", [4096, 128], "BF16"], ...]}`. `-` is a manifest on standard input.
        nested: Whether names are split into the levels of a tree. Default: at `/`, as orbax has
            them; names with dots stay whole, as `safetensors.flax.load_file` has them. True splits
            these too; False splits none.
        max_memory: Maximum bytes of memory for reading, beyond the file's own size. Default:
            512 MiB.

    Returns:
        A dict of jax.ShapeDtypeStructs, or of such dicts; the lists of a checkpoint are dicts too.
        Equal leaves are one object.

    Raises:
        FileError: There is no such file, its kind is unknown, it is damaged, or it would take more
            memory; a ValueError.

    Example:
        >>> import json, os, tempfile
        >>> import shardrules as sr
        >>> manifest = {"params": [["layers/0/wq", [4096, 4096], "BF16"]]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(os.path.join(directory, "model.json"), "w") as file:
        ...         json.dump(manifest, file)
        ...     model = sr.read_model(file.name)
        >>> model
        {'layers': {'0': {'wq': ShapeDtypeStruct(shape=(4096, 4096), dtype=bfloat16)}}}
    """
    splits = nested if nested is None else boolean("nested", nested)
    with memory_within(integer("max_memory", max_memory, what="a number of bytes")):
        arrays = read_arrays(_file(path))
        structs = {leaf: _abstract_array(leaf) for leaf in set(arrays.leaves.values())}
        leaves = {name: structs[leaf] for name, leaf in arrays.leaves.items()}
        if splits or (splits is None and arrays.separator == "/"):
            return in_levels(arrays._replace(leaves=leaves))
    return leaves


def read_rules(
    path: str | os.PathLike[str],
    *,
    dialect: Dialect | LogicalDialect | None = None,
    max_memory: int = DEFAULT_MEMORY,
) -> RuleFile:
    """Read the rules in a TOML or JSON file, or MaxText's YAML, and what the file says of them.

    Nothing is executed, and files may come from anyone. The planning page shows such a file.

    Args:
        path: A .toml file; a JSON file, which may be gzipped; or MaxText's .yml or .yaml, which
            needs `shardrules[yaml]`.
        dialect: The dialect. Default: the file's, or else eformer's; for logical rules linen, or in
            YAML MaxText's.
        max_memory: As in `read_model`.

    Raises:
        FileError: There is no such file, or its content is invalid; a ValueError.

    Example:
        >>> import jax, json, os, tempfile
        >>> import shardrules as sr
        >>> table = {"data_axes": ["dp"], "rules": [["wq", ["fsdp", "tp"]]]}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with open(os.path.join(directory, "rules.json"), "w") as file:
        ...         json.dump(table, file)
        ...     read = sr.read_rules(file.name)
        >>> model = {"wq": jax.ShapeDtypeStruct((4096, 4096), "bfloat16")}
        >>> plan = sr.plan(model, read.rules, {"dp": 2, "fsdp": 2, "tp": 2})
        >>> print(plan.check(**read.declared))
        nothing found: 1 leaf, 1 rule, on dp=2,fsdp=2,tp=2
    """
    check_type(
        "dialect",
        dialect,
        Dialect | LogicalDialect | None,
        "a Dialect, such as shardrules.dialects.EASYLM",
    )
    with memory_within(integer("max_memory", max_memory, what="a number of bytes")):
        return rules_in(_file(path), dialect)


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
    if str(file) in public_hardware() and not file.exists():
        raise FileError(
            f"{file}: this is no file, but a device with public figures; write "
            f"shardrules.Hardware.named({str(file)!r})"
        )
    with opened(file) as content:
        data = content.read(_MOST_BYTES + 1) or b""
    if len(data) > _MOST_BYTES:
        raise FileError(
            f"{file}: a device's figures take at most {bytes_shown(_MOST_BYTES)}, and it has more; "
            "give another file"
        )
    table = parse_toml(file, data)
    _check_hardware_keys(file, table)
    try:
        return Hardware(**{**table, "memory_bytes": _whole(table["memory_bytes"])})
    except (TypeError, ValueError) as error:
        raise FileError(f"{file}: {error}") from None


def _abstract_array(leaf: ArraySpec) -> Any:
    import ml_dtypes
    from jax import ShapeDtypeStruct

    dtype = key_dtype(leaf.dtype) or getattr(ml_dtypes, leaf.dtype, leaf.dtype)
    return ShapeDtypeStruct(leaf.shape, dtype)


def _file(path: Any) -> str:
    check_type("path", path, str | os.PathLike, "the path of a file")
    # A `Path` leaves one slash of the two of a URL.
    name = path if path and isinstance(path, str) else str(path_of(path))
    if is_module_form(name):
        raise FileError(
            f"{name}: this is no file, and only the command line imports package.module:name; "
            "import it, and use the object itself"
        )
    return name


def _check_hardware_keys(file: Path, table: dict[str, Any]) -> None:
    is_required = {field.name: field.default is MISSING for field in fields(Hardware)}
    for key in table:
        if key not in is_required:
            meant = nearest(key, is_required, SLIP)
            hint = f"did you mean {meant!r}?" if meant else f"the keys are {', '.join(is_required)}"
            raise FileError(f"{file}: key {key!r} is unknown; {hint}")
    if missing := [key for key, is_needed in is_required.items() if is_needed and key not in table]:
        raise FileError(f"{file}: it has no {', '.join(missing)}; write them as {missing[0]} = ...")


def _whole(count: object) -> object:
    """Turn a number of bytes such as 96e9 into an integer."""
    return int(count) if isinstance(count, float) and count.is_integer() else count
