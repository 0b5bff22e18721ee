"""Keeps on disk what the compiler has made for described devices, so that CI pays for it once.

JAX's own cache cannot read such executables. A proof needs their text, their memory and the
shardings of their arguments and results, so an entry is a gzipped file of these: a line of JSON,
then the text. It is parsed within bounds, never unpickled, and what is not understood is compiled
again. What another user may have written is neither read nor followed: not his entry or folder,
nor a folder that all can write, nor a link.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardrules._base.atomic_write import replace_file
from shardrules._plan.lock_texts import of_type
from shardrules._program.buffers import SIZES, sizes_of
from shardrules._program.compiler import compile_whole
from shardrules._program.executable import Executable
from shardrules._program.jax_names import lowered_options
from shardrules._program.libraries import call_of
from shardrules._program.refusal import Refusal
from shardrules._program.stored import StoredProgram, boxed, inner_of
from shardrules._program.topologies.topology import device_identity, topology_of

_VARIABLE: Final = "SHARDRULES_CACHE"
_FORM: Final = 1
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
# No link is followed, and a FIFO without a writer does not block. Windows lacks them.
_READ_FLAGS: Final = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_MOST_BYTES: Final = 2**63
# What a damaged or forged entry may raise.
_DAMAGES: Final = (
    OSError, EOFError, zlib.error, ArithmeticError, AttributeError, LookupError, RecursionError,
    TypeError, ValueError,
)  # fmt: skip


class Result(NamedTuple):
    """What the compiler has made of a step, now or before."""

    content: Any
    """A Compiled, of JAX or of flax, or a `StoredProgram` in its place; or a `Refusal`."""
    seconds: float
    """Time that it took to compile."""
    is_cached: bool


def compiled_result(lowered: Any, mesh: Any) -> Result:
    """Return what the cache has of a lowered step, or compile it to its end and keep that."""
    path = None if topology_of(mesh) is None else _path_of(lowered, mesh)
    if path is not None:
        with suppress(*_DAMAGES):
            result = _read_result(path, lowered, mesh)
            with suppress(OSError, NotImplementedError):
                os.utime(path, follow_symlinks=False)
            return result
    begin = time.perf_counter()
    content = compile_whole(lowered, mesh)
    result = Result(content, time.perf_counter() - begin, False)
    if path is not None:
        with suppress(OSError):  # such as no room, or no right to write
            _write_result(path, result, mesh)
    return result


def _path_of(lowered: Any, mesh: Mesh) -> Path | None:
    """Return the file for a lowered step; None if it cannot be kept, or is not to be."""
    folder, inner = _folder(), inner_of(lowered)
    options = None if inner is None else lowered_options(inner)
    if folder is None or inner is None or options is None:
        return None
    flags = {name: text for name, text in os.environ.items() if name.startswith(_FLAGS)}
    if _DUMP in f"{flags} {options}":
        return None  # what is to be dumped has to be made
    facts = (device_identity(mesh), _versions(), sorted(flags.items()), _settings(), options)
    # With its lines, which findings name.
    text = inner.as_text(debug_info=True)
    key = hashlib.sha256(f"{_FORM} {facts!r}\n{text}".encode("utf-8", "surrogatepass"))
    return folder / f"{key.hexdigest()}.gz"


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


def _versions() -> list[tuple[str, str | None]]:
    versions: list[tuple[str, str | None]] = []
    for name in _PACKAGES:
        try:
            versions.append((name, version(name)))
        except PackageNotFoundError:
            versions.append((name, None))
    return versions


def _settings() -> list[tuple[str, str]]:
    """List JAX's settings, among them the level of optimization."""
    values: Mapping[str, Any] = jax.config.values
    return sorted((name, repr(value)) for name, value in values.items())


def _write_result(path: Path, result: Result, mesh: Mesh) -> None:
    """Keep a result, unless it has shardings that cannot be written down."""
    content = result.content
    if isinstance(content, Refusal):
        facts: dict[str, Any] = {"refusal": [content.required, content.available]}
        text = content.text
    else:
        described = _facts_and_text(content, mesh)
        if described is None:
            return
        facts, text = described
    head = json.dumps({"seconds": result.seconds, "characters": len(text), **facts})
    packed = gzip.compress(f"{head}\n{text}".encode(), _LEVEL, mtime=0)
    if len(packed) <= _LIMIT:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(os.stat(path.parent))
        replace_file(path, packed)
        _remove_oldest(path.parent)


def _facts_and_text(compiled: Any, mesh: Mesh) -> tuple[dict[str, Any], str] | None:
    """Return the facts and the text of what was compiled; None if an entry cannot have them."""
    call = call_of(getattr(compiled, "compiled", compiled), ())
    executable, stats = Executable(call), call.compiled.memory_analysis()
    text = call.compiled.as_text()
    if not text or stats is None:
        return None
    records: dict[Any, int] = {}
    numbers: dict[str, list[int | None]] = {}
    for side in (executable.inputs, executable.outputs):
        numbers[side.name] = [
            None if sharding is None else records.setdefault(sharding, len(records))
            for sharding in side.shardings
        ]
    try:
        shardings = [_sharding_json(sharding, mesh) for sharding in records]
    except _DAMAGES:
        return None
    memory = sizes_of(stats)
    return {**numbers, "shardings": shardings, "memory": memory}, text


def _sharding_json(sharding: Any, mesh: Mesh) -> list[Any]:
    """Return a sharding as JSON has it.

    Raises:
        Exception: One of `_DAMAGES`: it would be read as another one.
    """
    written: list[Any] = json.loads(json.dumps([list(sharding.spec), sharding.memory_kind]))
    if _sharding(written, mesh) != sharding:
        raise ValueError("it is not of the mesh")
    return written


def _sharding(written: Any, mesh: Mesh) -> Any:
    """Read what `_sharding_json` has made."""
    entries, memory_kind = written
    entries = [tuple(entry) if isinstance(entry, list) else entry for entry in entries]
    return NamedSharding(mesh, PartitionSpec(*entries), memory_kind=memory_kind)


def _read_result(path: Path, lowered: Any, mesh: Mesh) -> Result:
    """Read a result.

    Raises:
        Exception: One of `_DAMAGES`: there is no such entry, or not a whole one.
    """
    _check_own(os.stat(path.parent))
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _READ_FLAGS)) as file:
        status = os.fstat(file.fileno())
        _check_own(status)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("no regular file")
        with gzip.GzipFile(fileobj=file) as unpacked:
            data = unpacked.read(_MOST_UNPACKED + 1)
    if len(data) > _MOST_UNPACKED:
        raise ValueError("too large")
    head, _, text = data.decode().partition("\n")
    facts = json.loads(head)
    seconds = of_type(facts["seconds"], float)
    if facts["characters"] != len(text) or not 0 <= seconds < math.inf:
        raise ValueError("cut")
    if "refusal" in facts:
        required, available = map(_whole, facts["refusal"])
        refusal = Refusal(required, available, text)
        refusal.error()  # it is read from the text
        return Result(refusal, seconds, True)
    shardings = [_sharding(written, mesh) for written in facts["shardings"]]
    inputs, outputs = (
        [None if number is None else shardings[_whole(number)] for number in facts[side]]
        for side in ("inputs", "outputs")
    )
    sizes = [_whole(size) for size in facts["memory"]]
    memory = SimpleNamespace(**dict(zip(SIZES, sizes, strict=True)))
    stored = StoredProgram(inner_of(lowered), inputs, outputs, text, memory=memory)
    return Result(boxed(lowered, stored), seconds, True)


def _check_own(status: os.stat_result) -> None:
    """Check that no other user may have written a folder or an entry; root may.

    Raises:
        PermissionError: One may have.
    """
    if sys.platform == "win32":
        return
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        raise PermissionError("another user may have written it")


def _whole(number: Any) -> int:
    """Return a number of bytes, or of a sharding."""
    if not 0 <= of_type(number, int) < _MOST_BYTES:
        raise ValueError(f"{number} is too small or too large")
    return int(number)


def _remove_oldest(folder: Path) -> None:
    """Remove entries, and no other files, until those that are left are within the limit."""
    files = sorted(_cache_entries(folder), reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > _LIMIT:
            with suppress(OSError):  # another process was faster
                path.unlink()


def _cache_entries(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield time of the last use, bytes and path of each entry."""
    for item in os.scandir(folder):
        if _ENTRY.fullmatch(item.name):
            with suppress(OSError):
                status = item.stat(follow_symlinks=False)
                yield status.st_mtime_ns, status.st_size, folder / item.name
