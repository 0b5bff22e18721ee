"""Files of stores such as gs, s3 and hf, by URL: asked as a `Path`, and read in ranges.

fsspec reads them, which asks again for what fails.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Final

from shardrules._base.io import FileError

_CHECK: Final = "check the URL, your credentials and the connection"
_INSTALL: Final = (
    "pip install fsspec, and for gs:// gcsfs, for s3:// s3fs, for hf:// huggingface_hub"
)


@dataclass(frozen=True, order=True)
class RemotePath:
    """A URL, with the questions that are asked of a `Path`."""

    url: str

    def __str__(self) -> str:
        return self._without_secrets(self.url)

    def _without_secrets(self, text: str) -> str:
        """Return a text without this URL's password, and its query, where signatures are."""
        place, mark, query = self.url.partition("?")
        # hf://organization/model@revision has no user.
        user, at, _ = place.partition("://")[2].partition("/")[0].rpartition("@")
        return text.replace(mark + query, "").replace(user + at, "")

    @property
    def name(self) -> str:
        return PurePosixPath(str(self)).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(str(self)).suffix

    def with_name(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/').rpartition('/')[0]}/{name}")

    def is_file(self) -> bool:
        return self._type == "file"

    def is_dir(self) -> bool:
        return self._type == "directory"

    @cached_property
    def _type(self) -> object:
        with self.asked() as (store, place):
            try:
                return store.info(place)["type"]
            except FileNotFoundError:
                return None

    def state(self) -> tuple[int, int, int, int]:
        """Ask for the size and version of the file, as `StoredFile` has them."""
        with self.asked() as (store, place):
            store.invalidate_cache()
            size, version = store.info(place)["size"], store.ukey(place)
        return 0, 0, int(size), zlib.crc32(str(version).encode())

    def iterdir(self) -> list[RemotePath]:
        with self.asked() as (store, place):
            names = store.ls(place, detail=False)
        return [RemotePath(f"{self.url.rstrip('/')}/{PurePosixPath(name).name}") for name in names]

    def opened(self) -> RemoteFile:
        return RemoteFile(self)

    @contextmanager
    def asked(self) -> Iterator[tuple[Any, str]]:
        """Yield fsspec's store and the place in it; what goes wrong there is a FileError."""
        try:
            from fsspec.core import url_to_fs

            yield url_to_fs(self.url)
        except Exception as error:
            fix = _INSTALL if isinstance(error, ImportError) else _CHECK
            words = self._without_secrets(f"{type(error).__name__}: {error}")
            raise FileError(f"{self}: {words}; {fix}") from error


class RemoteFile(io.RawIOBase):
    """A file that is read in ranges; its `state` is that of a `StoredFile`."""

    def __init__(self, path: RemotePath) -> None:
        self.path, self.state, self._at = path, path.state(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self.state[2])
        data = self.ranges([self._at], [end])[0] if end > self._at else b""
        buffer[: len(data)] = data
        self._at = end
        return len(data)

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Read these ranges at once."""
        with self.path.asked() as (store, place):
            parts: list[Any] = store.cat_ranges([place] * len(begins), begins, ends)
            for begin, end, part in zip(begins, ends, parts, strict=True):
                if isinstance(part, Exception):
                    raise part
                if len(part) != end - begin:
                    raise OSError(f"byte {begin:,}: {len(part):,} of {end - begin:,} bytes came")
        return parts
