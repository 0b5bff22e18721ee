"""Compiles within a time limit, and reads what XLA has written before it generates code."""

from __future__ import annotations

import atexit
import re
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from threading import Thread
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

from jax.sharding import Mesh, NamedSharding

from shardrules._base.jax_names import dumped_specs, lowered_shardings
from shardrules._program.buffers import SIZES
from shardrules._program.computation import with_elements
from shardrules._program.stored import StoredProgram, boxed, inner_of

T = TypeVar("T")
_STAGE: Final = "after_optimizations_after_buffer_assignment"
_TEXT: Final = f"{_STAGE}.txt"
_OTHERS: Final = (f"{_STAGE}.hlo.pb", "after_optimizations-buffer-assignment.txt")
# "allocation 1: size 512, page 0, parameter 0, ..., maybe-live-out:"; a color is another memory.
_ALLOCATION: Final = re.compile(r"^allocation \d+: size (\d+), page 0, (.*)$", re.MULTILINE)


class XlaDump(NamedTuple):
    """What the compiler has written of a step at a time limit."""

    seconds: float
    text: str = ""
    """The module before the generation of code; "" if the compiler has not come to it."""
    module: bytes = b""
    """The same as an HloModuleProto."""
    buffers: str = ""
    """Its arrays in memory."""

    def error(self) -> TimeoutError:
        """Return it as the error to raise."""
        return TimeoutError(f"the compiler has not ended in {self.seconds:g} s")

    def program(self, lowered: Any, mesh: Mesh | None) -> Any:
        """Return what is known of the step, as what JAX gives for one that is compiled."""
        inner = inner_of(lowered)
        shardings = None if inner is None else lowered_shardings(inner)
        if mesh is None or shardings is None or not self.text:
            raise self.error()
        inputs, outputs = shardings
        if None in outputs:
            specs = dumped_specs(self.module, mesh) or []
            specs *= len(outputs) if len(specs) == 1 else 1  # XLA has one for equal ones
            if len(specs) != len(outputs):
                raise self.error()
            made = (NamedSharding(mesh, spec) for spec in specs)
            outputs = [known or other for known, other in zip(outputs, made, strict=True)]
        text = with_elements(self.text)
        return boxed(lowered, StoredProgram(inner, inputs, outputs, text, self._memory()))

    def _memory(self) -> SimpleNamespace:
        """Return the bytes of arguments, results, temporary arrays and those that share them."""
        sizes = dict.fromkeys(SIZES, 0)
        for size, kind in _ALLOCATION.findall(self.buffers):
            is_argument, is_result = kind.startswith("parameter"), "maybe-live-out" in kind
            for name, is_one in (
                ("argument", is_argument),
                ("output", is_result),
                ("alias", is_argument and is_result),
                ("temp", "preallocated-temp" in kind),
            ):
                sizes[f"{name}_size_in_bytes"] += int(size) * is_one
        return SimpleNamespace(**sizes)


def compiled_within(compile: Callable[[Mapping[str, Any]], T], seconds: float) -> T | XlaDump:
    """Compile in another thread; after the time limit return what is known by then.

    The compiler cannot be stopped: that thread goes on until it ends, or the process does.
    """
    folder = tempfile.mkdtemp(prefix="shardrules-")
    options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_as_proto": True}
    future: Future[T] = Future()

    def remove() -> None:
        rmtree(folder, ignore_errors=True)

    def run() -> None:
        try:
            future.set_result(compile(options))
        except BaseException as error:  # it is the other thread's
            future.set_exception(error)
        remove()
        atexit.unregister(remove)

    atexit.register(remove)
    Thread(target=run, name="shardrules-compiler", daemon=True).start()
    wait([future], seconds)
    return future.result() if future.done() else _read(Path(folder), seconds)


def _read(folder: Path, seconds: float) -> XlaDump:
    """Read a folder, if the compiler has written all that is to be known."""
    for file in folder.glob(f"*{_TEXT}"):
        begin = file.name.removesuffix(_TEXT)
        with suppress(OSError):  # not written yet
            module, buffers = ((folder / f"{begin}{name}").read_bytes() for name in _OTHERS)
            text = file.read_bytes().decode().rstrip()
            is_whole = "\nENTRY " in text and text.endswith("\n}")
            if is_whole and (module := _first_field(module)):
                return XlaDump(seconds, text, module, buffers.decode())
    return XlaDump(seconds)


def _first_field(message: bytes) -> bytes:
    """Return the first field of a protocol buffer: of an HloProto its module; b"" if cut."""
    size = shift = 0
    for end, byte in enumerate(message[1:11], 2):
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return message[end : end + size] if end + size <= len(message) else b""
    return b""
