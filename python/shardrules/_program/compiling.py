"""Catches what XLA warns of while it compiles: arrays that it cannot reshard: `compiling`."""

from __future__ import annotations

import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from shardrules._base.text import answer, counted, printable_lines, record

# "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding {...} to {...}
# efficiently for HLO operation %add = f32[8,16]{1,0} add(...), ..., metadata={op_name="..."}"
_BRACES: Final = r"(\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})"
_WARNING: Final = re.compile(
    rf"Involuntary full rematerialization\. The compiler \D{{,30}} go from sharding {_BRACES} to "
    rf"{_BRACES} (?:efficiently|without) .*?for HLO operation:? %?\S+ = (\w+)\[([\d,]*)\](.*)"
)
_OP_NAME: Final = re.compile(r'op_name="([^"]*)"')
_AXIS: Final = re.compile(r"'([^']+)'(?::\(\d+\))?=?(\d*)")
_MESH: Final = re.compile(r"\{mesh\[([^\]]*)\](?:, device_ids=\([^)]*\))?, \[(.*?)\]")
_TILES: Final = re.compile(r"\{devices=\[([\d,]+)\]")


@record
class Reshard(NamedTuple):
    """Array that XLA replicates on all devices, since it cannot reshard it."""

    shape: str
    """Dtype and dimensions of the whole array, such as "f32[16,512]"."""
    source: str
    """Sharding of the array as it is computed; a spec, or in the words of XLA."""
    target: str
    """Sharding in which it is used."""
    op_name: str
    """JAX's name of the operation that computes it; "" if XLA does not name it."""

    def __str__(self) -> str:
        return f"{self.shape} ({self.op_name or 'of no name'}) from {self.source} to {self.target}"


@answer
class CompileLog:
    """Warnings of XLA while it compiles, from `compiling`."""

    def __init__(self, reshards: tuple[Reshard, ...] | None = None) -> None:
        self._reshards = reshards

    @property
    def reshards(self) -> tuple[Reshard, ...]:
        """Arrays that XLA cannot reshard.

        Raises:
            ValueError: The `with` block has not ended.
        """
        if self._reshards is None:
            raise ValueError("the log is complete when its with block ends: read it behind that")
        return self._reshards

    def __str__(self) -> str:
        if self._reshards is None:
            return "a log that is still open"
        head = f"XLA cannot reshard {counted(len(self.reshards), 'array')}"
        return printable_lines([head, *map(str, self.reshards)])


class _Stderr:
    """File descriptor 2, which leads to a file while any block is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def enter(self) -> int:
        """Return the position in the file from which on all is written in the block."""
        with self._lock:
            _flush()
            if not self._users:
                self._saved = os.dup(2)
                number, name = tempfile.mkstemp(".stderr", "shardrules-")
                os.dup2(number, 2)
                os.close(number)
                self._file = Path(name)
            self._users += 1
            return self._file.stat().st_size

    def leave(self, begin: int) -> str:
        """Return what was written in the block; the last one passes on what is no warning."""
        with self._lock:
            _flush()
            self._users -= 1
            if not self._users:
                os.dup2(self._saved, 2)
                os.close(self._saved)
            data = self._file.read_bytes()
            if not self._users:
                self._file.unlink()
                lines = data.splitlines(keepends=True)
                _write_stderr(b"".join(line for line in lines if _reshard(_decoded(line)) is None))
            return _decoded(data[begin:])


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _flush() -> None:
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
        sys.stderr.flush()


def _write_stderr(data: bytes) -> None:
    with suppress(OSError):  # such as a closed pipe
        while data:
            data = data[os.write(2, data) :]


_STDERR: Final = _Stderr()


@contextmanager
def compiling() -> Iterator[CompileLog]:
    """Catch XLA's warnings while it compiles, for `verify` to say which of them cost.

    XLA writes "Involuntary full rematerialization" to standard error if it cannot go from one
    sharding to another: it replicates the array on all devices. It does so of small arrays, too.
    `verify(..., log=log)` has a finding for those that send many bytes, with their line.

    While the block runs, file descriptor 2 of the process leads to a file. What is written to it,
    also by other threads and by Python, comes out when the block ends, without these warnings. If
    the process dies in the block, it is in the file `shardrules-*.stderr` of the temporary
    directory. Blocks may be nested, and run in several threads, which see each other's warnings.
    There are none of programs from a compilation cache, nor with TF_CPP_MIN_LOG_LEVEL=2 or more.

    Yields:
        A `CompileLog`, which is complete when the block ends.

    Raises:
        OSError: The process has no standard error, or there is no room for the file.

    Example:
        >>> import jax, shardrules as sr
        >>> step = jax.jit(lambda x: x * 2)
        >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
        >>> with sr.compiling() as log:
        ...     compiled = step.lower(x).compile()
        >>> log.reshards
        ()
        >>> findings = sr.verify(compiled, (None,), log=log)
    """
    log = CompileLog()
    begin = _STDERR.enter()
    try:
        yield log
    finally:
        lines = _STDERR.leave(begin).splitlines()
        log._reshards = tuple(filter(None, map(_reshard, lines)))


def _reshard(line: str) -> Reshard | None:
    """Parse a line; None if it is no such warning, or of another form than those of XLA's today."""
    match = _WARNING.search(line)
    if match is None:
        return None
    *shardings, dtype, dims, rest = match.groups()
    local = [int(size) for size in dims.split(",") if size]
    source, target = (_dims_and_text(sharding, len(local)) for sharding in shardings)
    if source is None or target is None:
        return None
    whole = ",".join(str(size * parts) for size, parts in zip(local, source[0], strict=True))
    op_name = _OP_NAME.search(rest)
    return Reshard(f"{dtype}[{whole}]", source[1], target[1], op_name[1] if op_name else "")


def _dims_and_text(sharding: str, rank: int) -> tuple[list[int], str] | None:
    """Return the parts of each dimension, and a text: a spec if mesh axes are named."""
    if mesh := _MESH.match(sharding):
        sizes = dict(_AXIS.findall(mesh[1]))
        entries = [_AXIS.findall(entry) for entry in re.findall(r"\{([^}]*)\}", mesh[2])]
        if len(entries) != rank or any(axis not in sizes for axes in entries for axis, _ in axes):
            return None
        parts = [math.prod(int(size or sizes[axis]) for axis, size in axes) for axes in entries]
        names = [tuple(axis for axis, _ in axes) for axes in entries]
        spec = ", ".join(repr(axes[0] if len(axes) == 1 else axes or None) for axes in names)
        return parts, f"P({spec})"
    tiles = _TILES.match(sharding)
    parts = [int(size) for size in tiles[1].split(",")][:rank] if tiles else [1] * rank
    is_known = tiles or sharding.startswith(("{replicated", "{maximal"))
    return (parts, sharding) if is_known and len(parts) == rank else None
