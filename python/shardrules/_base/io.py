"""Files: errors that name them, reading within a bound on memory, and JSON."""

from __future__ import annotations

import errno
import gc
import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from shardrules._base.text import SLIP, bytes_shown, nearest, printable_lines

_MOST: Final = 900
_END: Final = 300


class FileError(ValueError):
    """A file, or a name of an object, that cannot be used.

    The message starts with the file's name and the place in it, and ends with the fix. It is one
    line. Further arguments are lines below it. Very long lines are cut in the middle.
    """

    def __init__(self, *lines: str) -> None:
        super().__init__(*map(_shortened, lines))

    def __str__(self) -> str:
        return printable_lines(map(str, self.args))


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST else f"{text[: _MOST - _END]} ... {text[-_END:]}"


DEFAULT_MEMORY: Final = 512 << 20
max_memory: Final = ContextVar("max_memory", default=DEFAULT_MEMORY)
"""Maximum bytes of memory for reading one file, beyond the file's own size."""

_CHUNK: Final = 1 << 20
_STANDARD_INPUT: Final = Path("-")
# With these flags a FIFO without a writer or a terminal does not block. Windows lacks them.
_OPEN_FLAGS: Final = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
# Maximum bytes that CPython 3.11 to 3.13 take for each of these characters, beside the text. A
# bracket is a list of up to four values, a brace a dict, a quote half a string. A colon is an item
# of a dict and a pair, a comma an item of a list; both include a number, which a string after them
# does not need. Real files take 0.6 to 1 times the sum.
_COSTS: Final = {b"[": 96, b"{": 61, b":": 163, b",": 41, b'"': 13}
# The text and its strings, per byte. With one wide or escaped character, each takes four bytes.
_NARROW: Final = 2
_WIDE: Final = 8


@contextmanager
def memory_within(most: int) -> Iterator[None]:
    """Yield a context in which reading a file may take `most` bytes beyond the file's own size."""
    token = max_memory.set(most)
    try:
        yield
    finally:
        max_memory.reset(token)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector: for what makes no cycles, but many objects to visit."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file or directory to read.

    Python takes an empty text for the current one.
    """
    if not os.fspath(path):
        raise FileError("the path is empty; give the name of a file, or . for this directory")
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise FileError(f"{os.fspath(path)}: no file can have this name; correct it")
    return Path(path)


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Yield the file, open for reading in binary.

    Raises:
        FileError: It cannot be read, it is neither a regular file nor `-`, or standard input is a
            terminal.
    """
    if path == _STANDARD_INPUT:
        yield _standard_input()
        return
    if not isinstance(path, Path):  # of another machine
        with io.BufferedReader(path.opened(), 1 << 16) as file:
            yield file
        return
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(
                    f"{path}: this is not a regular file but a device or a pipe; "
                    "write its content into a file, or pipe it into `-`"
                )
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def _standard_input() -> io.BufferedReader:
    # A program may have replaced sys.stdin by any object.
    stream = getattr(sys.stdin, "buffer", None)
    if not isinstance(stream, io.BufferedReader) or stream.isatty():
        raise FileError(
            "-: standard input is not a pipe; give a file's name, or pipe a file into it"
        )
    return stream


def _open_at_once(name: str, flags: int) -> int:
    return os.open(name, flags | _OPEN_FLAGS)


def size_of(file: io.BufferedReader) -> int:
    """Return the bytes of an open file."""
    state: tuple[int, int, int, int] | None = getattr(file.raw, "state", None)
    return os.fstat(file.fileno()).st_size if state is None else state[2]


def read_bytes(path: Path, per_byte: int = 1) -> bytes:
    """Return the content of a file, unpacked if it is gzipped.

    Args:
        path: The file.
        per_byte: Maximum bytes of memory that each byte of the content takes, as text or parsed.

    Raises:
        FileError: It cannot be read, would take more than `max_memory`, also as JSON, or is named
            .gz but is not gzipped.
    """
    with opened(path) as file:
        size = size_of(file)
        if size * per_byte > max_memory.get():
            _raise_too_large(path, size)
        if file.peek(2)[:2] == b"\x1f\x8b":
            return _unpacked(path, file, size, per_byte)
        if path.suffix == ".gz":
            raise FileError(
                f"{path}: byte 0: this is not gzip; rename the file if it is not compressed"
            )
        # A read that would block, as of /proc/kmsg, gives None.
        return join_chunks(path, iter(lambda: file.read(_CHUNK) or b"", b""), size, per_byte)


def _unpacked(path: Path, file: io.BufferedReader, size: int, per_byte: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=file) as unpacked:
            return join_chunks(path, iter(partial(unpacked.read, _CHUNK), b""), size, per_byte)
    except EOFError:
        raise FileError(f"{path}: the gzip ends too early; copy or download it again") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise FileError(
            f"{path}: the gzip is damaged ({error}); copy or download it again"
        ) from None


def join_chunks(path: Path, chunks: Iterable[bytes], size: int, per_byte: int = 1) -> bytes:
    """Join the chunks of a JSON text."""
    parts: list[bytes] = []
    length, values, width, most = 0, 0, _NARROW, max_memory.get() + size
    for chunk in chunks:
        length += len(chunk)
        values += sum([cost * chunk.count(mark) for mark, cost in _COSTS.items()])
        if not chunk.isascii() or b"\\" in chunk:
            width = _WIDE
        if max(length * width + values, length * per_byte) > most:
            _raise_too_large(path, size)
        parts.append(chunk)
    return b"".join(parts)


def _raise_too_large(path: Path, size: int) -> NoReturn:
    raise FileError(
        f"{path}: reading this file of {bytes_shown(size)} takes more than "
        f"{bytes_shown(max_memory.get())} of memory, which is the bound; is it the right file?"
    )


def unreadable(path: Path, error: OSError) -> FileError:
    """Return the error to raise if the system cannot read a file."""
    near = None
    if error.errno == errno.ENOENT:
        with suppress(OSError):
            near = nearest(path.name, os.listdir(path.parent), SLIP)
    fix = f"did you mean {near}?" if near else "check the name and the permissions"
    return FileError(f"{path}: {error.strerror or error}; {fix}")


def text_of(path: Path, data: bytes) -> str:
    """Decode the bytes of a file."""
    if not data:
        raise FileError(f"{path}: the file is empty; copy or download it again")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(
            f"{path}: byte {error.start}: this is not UTF-8 text, so it cannot be JSON or TOML; is "
            "this the right file?"
        ) from None


def parse_json(path: Path, data: bytes) -> Any:
    """Parse bytes of a file as JSON."""
    text = text_of(path, data)
    del data  # frees it, unless the caller holds it
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_no_json)
    except json.JSONDecodeError as error:
        raise FileError(
            f"{path}: line {error.lineno}, column {error.colno}: this is not JSON ({error.msg}); "
            "correct it there"
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


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number; write a number")


def first_repeated(names: list[str]) -> str:
    """Return the first name that is equal to an earlier one."""
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file as UTF-8, with newlines as they are. A regular file is replaced, or kept.

    A symbolic link stays, and its target is replaced; other hard links keep the old file. The
    replaced file's mode and extended attributes are kept, without setuid and setgid, and its owner
    if the system allows that. A device, a FIFO and the process's own output are written directly.
    Only a process that is killed leaves a temporary file, `.` and 32 digits and `.part`.

    Raises:
        OSError: The file cannot be written. The error has its name and the reason.
    """
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file as `write_text` does."""
    try:
        try:
            before = os.stat(path)
        except FileNotFoundError:
            before = None
        stream = None if before is None else _own_stream(before)
        if before is None or (stat.S_ISREG(before.st_mode) and stream is None):
            replace_file(Path(os.path.realpath(path)), data, before)
            return
        sys.stdout.flush()  # what was printed comes first
        with open(path if stream is None else os.dup(stream), "wb") as file:
            file.write(data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _own_stream(status: os.stat_result) -> int | None:
    """Return the process's own output stream that is this file, such as a log; or None."""
    for stream in (1, 2):
        with suppress(OSError):  # it is closed
            if os.path.samestat(status, os.fstat(stream)):
                return stream
    return None


def replace_file(target: Path, data: bytes, before: os.stat_result | None = None) -> None:
    """Put a new file under this name, whatever stands there, with the rights of the one before."""
    # Nobody can guess the name and plant a link there, and the mode "x" follows no link.
    part = target.with_name(f".{os.urandom(16).hex()}.part")
    # The system applies the umask. Nobody else may read the file before it has the old mode.
    mode = 0o666 if before is None else 0o600
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            if before is not None:
                _copy_rights(target, part, before)
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    sync_directory(target.parent)


def _copy_rights(target: Path, part: Path, before: os.stat_result) -> None:
    mode = before.st_mode & 0o777
    if sys.platform != "win32":
        with suppress(PermissionError):
            os.chown(part, before.st_uid, before.st_gid)
        if part.stat().st_gid != before.st_gid:
            mode &= ~stat.S_IRWXG  # the rights of the old group are not for another one
    import shutil  # with compressors, which no other command needs

    shutil.copystat(target, part)  # with an ACL, an extended attribute
    os.utime(part)
    part.chmod(mode)


def sync_directory(directory: Path) -> None:
    """Write the new name to the disk too, if the system can do that."""
    with suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
