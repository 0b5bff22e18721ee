"""Writing a text file at once: whoever opens it sees the old file or the whole new one.

Costs a file beside the target and two calls of fsync. Must not know what the text is.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["write_text"]

_STREAMS: Final = (1, 2)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file: a regular file is replaced, anything else is written directly.

    A link stays, and the file that it leads to is replaced. A new file has the mode that `open`
    gives it. Of a file that was there the mode is kept, and the owner where the system allows it.
    What fails or is interrupted leaves the old file as it was, and nothing beside it.

    Args:
        path: The file. A device, a FIFO and our own standard output are not replaced.
        text: Its content, written as UTF-8; newlines stay as they are.

    Raises:
        OSError: The file cannot be written; the error has its name and the reason.
    """
    data = text.encode()
    try:
        before = _status(path)
        if before is None or _is_replaceable(before):
            _replace(Path(os.path.realpath(path)), data, before)
        else:
            _write_directly(path, data, before)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """What is there, behind any links; None for nothing."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _stream(status: os.stat_result) -> int | None:
    """Our own output if the file is that: /dev/stdout may lead to a log, which must stay."""
    for stream in _STREAMS:
        with suppress(OSError):  # it is closed
            if os.path.samestat(status, os.fstat(stream)):
                return stream
    return None


def _is_replaceable(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and _stream(status) is None


def _write_directly(path: str | os.PathLike[str], data: bytes, status: os.stat_result) -> None:
    stream = _stream(status)
    if stream is not None:
        sys.stdout.flush()  # what was printed comes first
    with open(path if stream is None else os.dup(stream), "wb") as file:
        file.write(data)


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> None:
    # A name that nobody can guess, to plant a link there; the mode "x" would not follow one.
    part = target.with_name(f".{secrets.token_hex(16)}.part")
    # The system takes the umask off. Before it has the old file's rights, no one else may read it.
    mode = 0o666 if before is None else 0o600
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            if before is not None:
                _keep_rights(file.fileno(), before)
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    _sync_directory(target.parent)


def _keep_rights(file: int, before: os.stat_result) -> None:
    """Owner and mode of the file that was there."""
    if sys.platform == "win32":
        return
    with suppress(PermissionError):
        os.fchown(file, before.st_uid, before.st_gid)
    mode = stat.S_IMODE(before.st_mode)
    if os.fstat(file).st_gid != before.st_gid:
        mode &= ~stat.S_IRWXG  # what the one group may do, another may not
    os.fchmod(file, mode)


def _sync_directory(directory: Path) -> None:
    """The new name is on the disk, too, where the system can do that."""
    with suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
