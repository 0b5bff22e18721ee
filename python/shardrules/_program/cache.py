"""Keeps on disk the text of what is compiled to its end for described devices, for its cycles.

JAX's own cache cannot read such executables. An entry is the gzipped text. It is read within
bounds, never unpickled, and what is not understood is compiled again. A folder that another user
has made, or that all can write, is neither read nor written.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import stat
import time
import zlib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardrules._base.io import replace_file
from shardrules._program.compiler import compile_whole
from shardrules._program.hlo import check_hlo
from shardrules._program.jax_names import calls_python, compiler_input
from shardrules._program.libraries import call_of, inner_of
from shardrules._program.memory import Refusal
from shardrules._program.topologies.topology import device_identity, topology_of

_VARIABLE: Final = "SHARDRULES_CACHE"
_FORM: Final = 4
"""Of the entries, and of what they have been made with."""
_LIMIT: Final = 10**9
"""Bytes of all entries together; those that were not used for the longest time go."""
_MOST_UNPACKED: Final = 2**29
_PACKAGES: Final = (
    "jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "shardrules",
)  # fmt: skip
_FLAGS: Final = ("XLA_", "LIBTPU_", "TPU_")
_DUMP: Final = "xla_dump"
_ENTRY: Final = re.compile(r"[0-9a-f]{64}\.gz|\.[0-9a-f]{32}\.part")
_LEVEL: Final = 5
# What a damaged or forged entry may raise.
_DAMAGES: Final = (OSError, EOFError, zlib.error, ValueError)


class Finished(NamedTuple):
    """What the compiler has made of a step, to its end."""

    text: str
    """The module, which has the compiler's cycles; "" where the backend does not show it."""
    seconds: float
    """Time that it took to compile, or to read."""
    compiled: Any = None
    """A Compiled, of JAX or of flax; None if the cache has had the text."""


def finished(lowered: Any, mesh: Any, *, is_kept: bool) -> Finished | Refusal:
    """Compile a lowered step to its end, and keep its text; or return that of the cache.

    Where the text is not all that is needed, nothing is kept.
    """
    is_kept = is_kept and topology_of(mesh) is not None
    path, begin = _path_of(lowered, mesh) if is_kept else None, time.perf_counter()
    if path is not None:
        with suppress(*_DAMAGES):
            return Finished(_read_kept(path), time.perf_counter() - begin)
    compiled = compile_whole(lowered, mesh)
    if isinstance(compiled, Refusal):
        return compiled
    seconds = time.perf_counter() - begin
    text = call_of(getattr(compiled, "compiled", compiled), ()).compiled.as_text() or ""
    if path is not None and text:
        with suppress(OSError):  # such as no room, or no right to write
            _write(path, text)
    return Finished(text, seconds, compiled)


def _path_of(lowered: Any, mesh: Any) -> Path | None:
    """Return the file for a lowered step; None if it cannot be kept, or is not to be."""
    folder, inner = _folder(), inner_of(lowered)
    asked = None if inner is None or calls_python(inner) else compiler_input(inner)
    if folder is None or asked is None:
        return None
    flags = {name: text for name, text in os.environ.items() if name.startswith(_FLAGS)}
    if _DUMP in f"{flags} {asked.overrides}":
        return None  # what is to be dumped has to be made
    facts = (_FORM, device_identity(mesh), _versions(), sorted(flags.items()), asked)
    return folder / f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.gz"


def _folder() -> Path | None:
    """Return the folder of the cache; None if it is off."""
    name = os.environ.get(_VARIABLE)
    if name is not None:
        return None if name in ("", "off") else Path(name)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "shardrules")
    try:
        return Path.home() / ".cache" / "shardrules"
    except RuntimeError:  # nobody's
        return None


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _write(path: Path, text: str) -> None:
    packed = gzip.compress(text.encode(), _LEVEL, mtime=0)
    if len(packed) <= _LIMIT:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(path.parent)
        replace_file(path, packed)
        _remove_oldest(path.parent)


def _read_kept(path: Path) -> str:
    """Read an entry, which is then the one that was used last.

    Raises:
        Exception: One of `_DAMAGES`: there is no such entry, or not a whole one.
    """
    _check_own(path.parent)
    with gzip.open(path) as file:
        data = file.read(_MOST_UNPACKED + 1)
    if len(data) > _MOST_UNPACKED:
        raise ValueError("too large")
    text = data.decode()
    check_hlo(text)
    with suppress(OSError):
        os.utime(path)
    return text


def _check_own(folder: Path) -> None:
    """Check that the folder is this user's, or root's, and that not all can write there.

    Raises:
        PermissionError: What is in it may be anybody's.
    """
    status = folder.stat()
    if os.name == "posix" and (
        status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH
    ):
        raise PermissionError("another user may have written there")


def _remove_oldest(folder: Path) -> None:
    """Remove entries, and no other files, until those that are left are within the limit."""
    entries = [path for path in folder.iterdir() if _ENTRY.fullmatch(path.name)]
    total = 0
    with suppress(OSError):  # another process was faster
        for status, path in sorted(
            ((path.lstat(), path) for path in entries), key=lambda entry: -entry[0].st_mtime_ns
        ):
            total += status.st_size
            if total > _LIMIT:
                path.unlink()
