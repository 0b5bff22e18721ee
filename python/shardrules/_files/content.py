"""The content of a file as bytes, as text and as JSON, with every way to fail made a `FileError`.

Costs what gunzip and `json` cost: nothing is done per value but a look for repeated keys. Must not
know what the JSON means.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import IO, Any, Final

from shardrules._files.errors import FileError

__all__ = ["MOST_BYTES", "first_repeated", "parse_json", "read_bytes", "text_of", "unreadable"]

# Far more than the names of any model take; a gzip bomb meets it before it fills the memory.
MOST_BYTES: Final = 1 << 30
_CHUNK: Final = 1 << 20


def read_bytes(path: Path) -> bytes:
    """The content of a file, unpacked if it is gzipped.

    Raises:
        FileError: It cannot be read, is longer than MOST_BYTES, or is not the gzip that its name
            promises.
    """
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    return _bounded(path, unpacked)
            if path.suffix == ".gz":
                raise FileError(f"{path}: byte 0: this is no gzip; rename it if it is not packed")
            return _bounded(path, file)
    except EOFError:
        raise FileError(f"{path}: the gzip ends too early; copy or download it anew") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FileError(
            f"{path}: the gzip is damaged ({error}); copy or download it anew"
        ) from None
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> FileError:
    """What to raise when the system refuses to read a file."""
    return FileError(f"{path}: {error.strerror or error}; check the name and the permissions")


def _bounded(path: Path, file: IO[bytes] | gzip.GzipFile) -> bytes:
    chunks, left = [], MOST_BYTES
    while chunk := file.read(_CHUNK):
        left -= len(chunk)
        if left < 0:
            raise FileError(
                f"{path}: the content is longer than {MOST_BYTES:,} bytes, which no list of names "
                "and shapes is; is this the right file?"
            )
        chunks.append(chunk)
    return b"".join(chunks)


def text_of(path: Path, data: bytes) -> str:
    """Bytes of that file as text.

    Raises:
        FileError: They are empty or no UTF-8.
    """
    if not data:
        raise FileError(f"{path}: the file is empty; copy or download it anew")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: byte {error.start}: this is no UTF-8 text, so it cannot be JSON or TOML; is "
            "this the right file?"
        ) from None


def parse_json(path: Path, data: bytes) -> Any:
    """The JSON value that bytes of that file are.

    Raises:
        FileError: They are no JSON, or an object has a key twice.
    """
    text = text_of(path, data)
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{path}: line {error.lineno}, column {error.colno}: this is no JSON ({error.msg}); "
            "correct it there, or make the file anew"
        ) from None
    except RecursionError:
        raise FileError(
            f"{path}: the JSON is nested too deeply; give each array under its whole name, in one "
            "level"
        ) from None
    except ValueError as error:  # a repeated key, or a number of thousands of digits
        raise FileError(f"{path}: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        key = first_repeated([key for key, _ in pairs])
        raise ValueError(f"key {key!r} is there twice in one object; rename or remove one")
    return content


def first_repeated(names: list[str]) -> str:
    """The first of the names that has been there before."""
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
