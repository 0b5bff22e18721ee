"""Atomic writes: a file is replaced as a whole, or kept."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path


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
