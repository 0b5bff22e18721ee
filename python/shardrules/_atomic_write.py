"""Atomic writes of text files: a reader sees either the old file or the whole new one.

Costs a temporary file beside the target and two calls of fsync. Must not know what the text is.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

__all__ = ["write_text"]

_STREAMS: Final = (1, 2)
_ACL: Final = "system.posix_acl_access"


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file. A regular file is replaced; any other file is written directly.

    A symbolic link stays, and its target is replaced; other hard links keep the old file, as with
    `sed -i` and git. A new file gets the mode that `open` gives. The rights of an existing file are
    kept, also in a POSIX ACL, and its owner if the system allows that; nobody gets more rights.
    Setuid and setgid bits and other extended attributes are not kept. A failed or interrupted write
    leaves the old file unchanged and no temporary file. Only a process that is killed (SIGKILL, or
    a loss of power) can leave one, `.` and 32 digits and `.part`, which may be deleted.

    Args:
        path: The file. A device, a FIFO and the process's own standard output are not replaced.
        text: The content, written as UTF-8. Newlines are not translated.

    Raises:
        OSError: The file cannot be written. The error has its name and the reason.
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
    """The status of the file behind any links; None if there is no file."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _stream(status: os.stat_result) -> int | None:
    """The number of the process's own output stream that is this file, such as a log; or None."""
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
    # Nobody can guess the name and plant a link there, and the mode "x" follows no link.
    part = target.with_name(f".{os.urandom(16).hex()}.part")
    # The system applies the umask. Nobody else may read the file before it has the old mode.
    mode = 0o666 if before is None else 0o600
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            if before is not None:
                _keep_rights(file.fileno(), target, before)
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    _sync_directory(target.parent)


def _keep_rights(file: int, target: Path, before: os.stat_result) -> None:
    """Gives the new file the owner and the rights of the old one, and no more."""
    if sys.platform == "win32":
        return
    with suppress(PermissionError):
        os.fchown(file, before.st_uid, before.st_gid)
    mode = before.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    if os.fstat(file).st_gid != before.st_gid or not _keep_acl(file, target):
        mode &= ~stat.S_IRWXG  # the rights of the old group are not for another one
    os.fchmod(file, mode)


def _keep_acl(file: int, target: Path) -> bool:
    """Gives the new file the ACL of the old one, or none; returns whether it could.

    The group's bits in the mode of a file with an ACL are the ACL's mask, not the group's rights.
    """
    if sys.platform != "linux":
        return True
    try:
        os.setxattr(file, _ACL, os.getxattr(target, _ACL))
    except OSError as error:
        if error.errno == errno.ENODATA:
            with suppress(OSError):  # the directory's default has given none
                os.removexattr(file, _ACL)
        return error.errno in (errno.ENODATA, errno.ENOTSUP)
    return True


def _sync_directory(directory: Path) -> None:
    """Writes the new name to the disk too, if the system can do that."""
    with suppress(OSError):
        file = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
