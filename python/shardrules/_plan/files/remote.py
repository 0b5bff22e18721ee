"""Files of other machines, through fsspec: what is asked of a path, and ranges of bytes."""

from __future__ import annotations

import io
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from shardrules._base.io import FileError, path_of

# A range that fails is asked for again, after these seconds.
_PAUSES: Final = (0.1, 0.4, 1.6, 4.0)
# Seconds for an answer.
_PATIENCE: Final = 60.0
# What tells one content from another, in the words of several stores.
_VERSIONS: Final = (
    "ETag",
    "etag",
    "checksum",
    "md5Hash",
    "Content-MD5",
    "generation",
    "VersionId",
    "LastModified",
    "Last-Modified",
    "mtime",
    "last_modified",
    "blob_id",
)
_FILES: Final = (".safetensors", ".json", ".gz")


@lru_cache(maxsize=64)
def _store(protocol: str) -> Any:
    try:
        import fsspec

        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise FileError(
            f"{protocol}://: {error}; pip install 'shardrules[remote]', and for gs:// gcsfs, for "
            "s3:// s3fs, for hf:// huggingface_hub"
        ) from None


def place_of(source: str) -> RemotePath | Path:
    """Return the path of a URL, of which a `Path` leaves one slash; of a file here its `Path`."""
    protocol, _, place = source.partition(":/")
    if protocol == "file":
        from urllib.parse import urlparse
        from urllib.request import url2pathname

        url = urlparse(source)
        if url.netloc not in ("", "localhost"):
            raise FileError(
                f"{source}: it has no absolute path; write file:///{url.netloc}{url.path}"
            )
        return path_of(url2pathname(url.path))
    return RemotePath(f"{protocol}://{place.lstrip('/')}")


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL, with the questions that are asked of a `Path`."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """Return the last component."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return what follows the last dot of the name."""
        _, dot, end = self.name.rpartition(".")
        return dot + end

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    @property
    def store(self) -> Any:
        """Return fsspec's file system."""
        return _store(self.url.partition("://")[0])

    def resolve(self) -> RemotePath:
        """Return itself: there are no links."""
        return self

    def exists(self) -> bool:
        """Say whether there is such a file or directory."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return bool(_asked(self, "isfile"))

    def is_dir(self) -> bool:
        """Say whether it is a directory; a name of a file is none."""
        return not self.name.endswith(_FILES) and bool(_asked(self, "isdir"))

    def iterdir(self) -> Iterator[RemotePath]:
        for name in _asked(self, "ls", detail=False):
            yield self / str(name).rstrip("/").rpartition("/")[2]

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield what is in the directory and has such a name."""
        return (path for path in self.iterdir() if fnmatch(path.name, pattern))

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Yield the file, open for reading."""
        raw = RemoteFile(self)
        with io.BufferedReader(raw, 1 << 16) as file:
            yield cast("io.BufferedReader", file)


class RemoteFile(io.RawIOBase):
    """A file that is read in ranges.

    Attributes:
        path: Where it is.
        state: As that of a `StoredFile`.
    """

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self.path = path
        self.state = self.state_now()
        self._at = 0

    def state_now(self) -> tuple[int, int, int, int]:
        """Ask for its size and version."""
        self.path.store.invalidate_cache()
        info = _asked(self.path, "info")
        version = repr([info[key] for key in _VERSIONS if info.get(key) is not None])
        if not isinstance(info.get("size"), int):
            raise FileError(f"{self.path}: the store does not tell its size, so it is not read")
        return 0, 0, info["size"], zlib.crc32(version.encode())

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from the current place on."""
        end = min(self._at + len(buffer), self.state[2])
        data = self.range(self._at, end) if end > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def range(self, begin: int, end: int) -> bytes:
        """Read these bytes."""
        data = _asked(self.path, "cat_file", size=end - begin, start=begin, end=end)
        return bytes(data)


def _asked(path: RemotePath, question: str, *, size: int | None = None, **how: Any) -> Any:
    """Ask the store, again if it fails; with a size, for so many bytes."""
    where = "" if size is None else f"byte {how['start']:,}: "
    reason: object = ""
    for pause in (0.0, *_PAUSES):
        time.sleep(pause)
        try:
            answer = _answer(path, question, how)
        except FileNotFoundError:
            raise FileError(f"{path}: there is no such file; check the URL") from None
        except PermissionError as error:
            raise FileError(f"{path}: {error or 'not allowed'}; check your credentials") from None
        except FileError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            continue
        if size is None or len(answer) == size:
            return answer
        if len(answer) > size:
            raise FileError(
                f"{path}: {where}the server gives {len(answer):,} bytes and was asked for "
                f"{size:,}: it serves no ranges; copy the file here"
            )
        reason = f"{len(answer):,} bytes came, of {size:,}"
    raise FileError(
        f"{path}: {where}{reason}, {len(_PAUSES) + 1} times; check the connection and the store"
    )


def _answer(path: RemotePath, question: str, how: dict[str, Any]) -> Any:
    store = path.store
    asynchronous = getattr(store, f"_{question}", None)
    if not getattr(store, "async_impl", False) or asynchronous is None:
        return getattr(store, question)(path.url, **how)
    from fsspec.asyn import sync

    # Else a server that does not answer would be waited for.
    place = store._strip_protocol(path.url)
    return sync(store.loop, asynchronous, place, timeout=_PATIENCE, **how)
