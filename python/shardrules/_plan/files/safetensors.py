"""Headers of safetensors files: of one file, of an index, or of a directory.

A header is checked as the safetensors library checks it. Some that the library accepts are refused:
a key that occurs twice, of which it takes the last; unknown fields of an array; and forms that no
writer uses, which are an array as a list of its fields, a dtype as an object, and a dimension above
2**63 - 1. A byte order mark before the header, and the sign of -0, are taken.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final

import msgspec

from shardrules._base.dtypes import RANDOM_KEYS, SAFETENSORS, bits_of
from shardrules._base.io import FileError, join_chunks, opened, parse_json
from shardrules._base.text import and_more, counted, near_shown, shown
from shardrules._plan.files.leaves import (
    ArraySpec,
    StoredFile,
    check_text,
    converted,
    leaves_of,
    state_of,
)

_LOG: Final = logging.getLogger("shardrules")
SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
# The bound of the safetensors library.
_MOST_HEADER_BYTES: Final = 100_000_000
_NUMBERED: Final = re.compile(r"(?P<begin>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_SHOWN: Final = 3
_READS: Final = 16
# What PEFT writes beside a model, and Mistral beside that of transformers.
_OF_OTHERS: Final = ("adapter_model", "consolidated.safetensors")
_METADATA: Final = "__metadata__"
KEYS: Final = "shardrules.random_keys"
"""In the metadata: JSON of {name: implementation}, for arrays that have words of random keys."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """Array in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, keeps_places: bool) -> dict[str, ArraySpec]:
    """Read the arrays of one file."""
    header, file, data = _header(path)
    metadata = _checked_metadata(path, header.pop(_METADATA, None))
    names, values = [*header], [*header.values()]
    fix = "write the file again"
    values_of_entries = converted(
        path, values, _Entry, lambda index: f"array {names[index]!r}", fix
    )
    entries = dict(zip(names, values_of_entries, strict=True))
    rows = [(name, entry.shape, entry.dtype) for name, entry in entries.items()]
    leaves = leaves_of(path, rows)
    _check_entries(path, entries, leaves, len(data))
    if KEYS in metadata:
        leaves |= _random_keys(path, metadata[KEYS], leaves)
    if not keeps_places:
        return leaves
    return {
        name: ArraySpec(leaf.shape, leaf.dtype, file, data.start + entries[name].data_offsets[0])
        for name, leaf in leaves.items()
    }


def _header(path: Path) -> tuple[dict[str, Any], StoredFile, range]:
    """Return (the parsed header, the file, the offsets of the data after the header)."""
    with opened(path) as file:
        state = state_of(file)
        size = state[2]
        length = int.from_bytes(file.read(8) or b"", "little")
        if size < 8 or length > size - 8:
            raise FileError(
                f"{path}: byte 0: the header's length is {length:,} bytes, but the file has "
                f"{size:,}; it is cut short, or not a safetensors file: download it again"
            )
        if length > _MOST_HEADER_BYTES:
            raise FileError(
                f"{path}: byte 0: the header's length is {length:,} bytes, and at most "
                f"{_MOST_HEADER_BYTES:,} are allowed; is this a safetensors file?"
            )
        text = join_chunks(path, [file.read(length)], length)
    header = parse_json(path, text)
    if not isinstance(header, dict):
        raise FileError(
            f"{path}: byte 8: the header is {shown(header)}, not an object of arrays; is this a "
            "safetensors file?"
        )
    return header, StoredFile(path, state), range(8 + length, size)


def _checked_metadata(path: Path, metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    words: list[Any] = [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not isinstance(metadata, dict) or not {*map(type, words)} <= {str}:
        raise FileError(
            f"{path}: {_METADATA} is {shown(metadata)}, not an object of strings; write the file "
            "again"
        )
    check_text(path, words, _METADATA)
    return metadata


def _random_keys(path: Path, text: str, leaves: dict[str, ArraySpec]) -> dict[str, ArraySpec]:
    """Return the arrays of whose words random keys are made again."""
    keys = parse_json(path, text.encode())
    key_arrays = {}
    for name, implementation in keys.items() if isinstance(keys, dict) else [("", keys)]:
        words = leaves.get(name, ArraySpec((), ""))
        dtype = RANDOM_KEYS.get(implementation) if isinstance(implementation, str) else None
        bits = 32 * words.shape[-1] if words.shape and words.dtype == "uint32" else 0
        if dtype is None or bits != bits_of(dtype):
            raise FileError(
                f"{path}: {_METADATA}: {KEYS} has {name!r}: {shown(implementation)}, which are no "
                "words of random keys; write the file again"
            )
        key_arrays[name] = ArraySpec(words.shape[:-1], dtype)
    return key_arrays


def _check_entries(
    path: Path, entries: dict[str, _Entry], leaves: dict[str, ArraySpec], data_bytes: int
) -> None:
    """Check dtypes, that each array has the bytes it needs, and that the arrays fill the data."""
    for (name, entry), leaf in zip(entries.items(), leaves.values(), strict=True):
        begin, end = entry.data_offsets
        if entry.dtype not in SAFETENSORS:
            raise FileError(
                f"{path}: array {name!r}: the dtype {entry.dtype!r} is not written as safetensors "
                "does, as in F32 or BF16; write the file again with the safetensors library"
            )
        bits = prod(leaf.shape) * bits_of(leaf.dtype)
        if 8 * (end - begin) != bits:
            raise FileError(
                f"{path}: array {name!r}: data_offsets [{begin}, {end}] are {end - begin:,} bytes, "
                f"but {leaf.dtype}{list(leaf.shape)} takes {bits / 8:,.10g}; write the file again"
            )
        if begin < 0 or end > data_bytes:
            raise FileError(
                f"{path}: array {name!r}: data_offsets [{begin}, {end}] lie outside the file's "
                f"{data_bytes:,} bytes of data; it is cut short: download it again"
            )
    # In the order of their offsets, each array begins where the previous one ends.
    places = sorted(entry.data_offsets for entry in entries.values())
    if [*(begin for begin, _ in places), data_bytes] != [0, *(end for _, end in places)]:
        raise FileError(
            f"{path}: the arrays' data_offsets leave bytes out or overlap; write the file again "
            "with the safetensors library"
        )


def read_index(path: Path, weight_map: Any, keeps_places: bool) -> dict[str, ArraySpec]:
    """Read the arrays of the files in an index of Hugging Face, in the order of the index."""
    if not isinstance(weight_map, dict) or not {*map(type, weight_map.values())} <= {str}:
        raise FileError(
            f"{path}: key 'weight_map': it is {shown(weight_map)}; write "
            '{"array": "file.safetensors", ...}'
        )
    names_in: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        names_in.setdefault(shard, []).append(name)
    _check_series(path, [*names_in])
    leaves: dict[str, ArraySpec] = {}
    paths = [_beside(path, shard, names[0]) for shard, names in names_in.items()]
    of_files = zip(names_in.items(), _headers(paths, keeps_places), strict=True)
    for (shard, names), arrays in of_files:
        for name in names:
            if name not in arrays:
                raise FileError(
                    f"{path}: array {name!r}: file {shard!r} should have it and has not"
                    f"{near_shown(name, arrays)}; download the index and its files again"
                )
            leaves[name] = arrays[name]
        if left_out := [name for name in arrays if name not in weight_map]:
            _LOG.warning(
                "%s: %s of %s, such as %s, which the index leaves out",
                path, counted(len(left_out), "array"), shard, left_out[0],
            )  # fmt: skip
    return {name: leaves[name] for name in weight_map}


def is_part(path: str) -> bool:
    """Return whether a file is one of several, by its number."""
    number = _NUMBERED.fullmatch(path)
    return number is not None and int(number["count"]) > 1


def _headers(paths: list[Path], keeps_places: bool) -> Iterator[dict[str, ArraySpec]]:
    """Read the headers of files; those of another machine at once, as each takes a while."""
    if all(isinstance(path, Path) for path in paths):
        yield from (read_header(path, keeps_places) for path in paths)
        return
    with ThreadPoolExecutor(_READS, "shardrules-headers") as pool:
        yield from pool.map(partial(read_header, keeps_places=keeps_places), paths)


def _beside(path: Path, shard: str, name: str) -> Path:
    if not shard or Path(shard).name != shard:
        raise FileError(f"{path}: array {name!r} needs the name of a file beside it, not {shard!r}")
    beside = path.with_name(shard)
    if not beside.is_file():
        raise FileError(
            f"{path}: array {name!r}: file {shard!r} is missing beside the index; download it"
        )
    return beside


def _check_series(source: Path, names: list[str]) -> None:
    """Check that of files that are numbered, such as model-00001-of-00003, none is missing."""
    series: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if numbering := _NUMBERED.fullmatch(name):
            begin, number, count = numbering.groups()
            series.setdefault((begin, count), set()).add(int(number))
    for (begin, count), numbers in series.items():
        first = min(numbers & {0}, default=1)
        if missing := sorted({*range(first, first + int(count))} - numbers):
            files = [f"{begin}-{number:05}-of-{count}{SUFFIX}" for number in missing[:_SHOWN]]
            raise FileError(
                f"{source}: files end in -of-{count}, and {len(numbers):,} are here; missing: "
                f"{', '.join([*files, *and_more(len(missing), _SHOWN, 'file')])}; download the "
                "model again, or give the name of one file"
            )


def read_files(directory: Path, paths: list[Path], keeps_places: bool) -> dict[str, ArraySpec]:
    """Read the arrays of several files of a directory together."""
    _check_series(directory, [path.name for path in paths])
    for path in paths:
        if path.name.startswith(_OF_OTHERS) and len(paths) > 1:
            raise FileError(
                f"{directory}: {path.name} is beside {min({*paths} - {path}).name}, and would be a "
                "model of its own; give the name of one file, or put them into directories"
            )
    leaves: dict[str, ArraySpec] = {}
    for path, arrays in zip(paths, _headers(paths, keeps_places), strict=True):
        for name in leaves.keys() & arrays.keys():
            raise FileError(
                f"{path}: array {name!r}: another {SUFFIX} file of the directory has it too; give "
                "the name of one file"
            )
        leaves |= arrays
    return leaves
