"""Asks a compiler what it makes of a lowered step, in a child process that ends before code.

XLA writes the optimized module, its memory report and its live ranges before it generates code,
which takes most of the time: the child, `child`, ends itself then. It compiles for slices of TPUs
by libtpu, and for CPUs by XLA for as many host devices. In this process nothing starts: no backend,
thread, or change of the environment. `compile_or_read` alone compiles here, to the end.
"""

from __future__ import annotations

import gzip
import hashlib
import marshal
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.stages import Compiled

from shardrules._base.io import replace_file
from shardrules._base.text import printable_lines
from shardrules._place.mesh import has_devices
from shardrules._program import child
from shardrules._program.hlo import check_hlo
from shardrules._program.jax_names import (
    compiler_input,
    lowered_shardings,
    module_of,
    result_specs,
)
from shardrules._program.libraries import StoredProgram, inner_of
from shardrules._program.memory import LiveRanges, OutOfMemory, refusal, refused_bytes
from shardrules._program.topologies.topology import topology_of
from shardrules._program.topologies.tpu import ENVIRONMENT, Slices, libtpu_path

LIMIT: Final = 1200.0
"""Seconds after which the child is ended: it hangs, or the step is too large for this machine."""
_LAST_WORDS: Final = 2000
_NOTE: Final = "shardrules compiled the step, and this is what comes of it"
_CACHE_ENTRIES: Final = 100
"""Texts in the cache; those that are oldest go."""
_CACHE_NAMES: Final = f"{'[0-9a-f]' * 64}.gz"
"""Whatever else is in that folder is the user's."""
_FLAGS: Final = ("XLA_", "LIBTPU_", "TPU_")
_PACKAGES: Final = ("shardrules", "jax", "jaxlib", "numpy", "ml_dtypes", "opt_einsum", "scipy")
"""What children import."""
# What a user dumps is not to be mixed up with ours.
_DUMPS: Final = re.compile(r"--xla_dump\w*(=\S*)?")
_TOTAL: Final = re.compile(
    r"^(?:Memory Space: default \(color=0\)\nTotal bytes|Total bytes used): (\d+)", re.MULTILINE
)


class Child:
    """A process that runs `main` of a module of ours; it and its files go when this is closed.

    Args:
        module: Its name.
        env: Its environment.
        request: What `main` takes beside its folder: plain data, and bytes.
    """

    def __init__(self, module: str, env: Mapping[str, str], **request: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shardrules-")).absolute()
        """Its files, which no other user can read."""
        self._process: subprocess.Popen[bytes] | None = None
        # An empty entry is the current folder, whichever that is by now.
        path = os.pathsep.join(filter(None, env.get("PYTHONPATH", "").split(os.pathsep)))
        try:  # and begin it at once: it removes the folder if this process is killed
            with open(self.folder / "stderr.txt", "wb") as stderr:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", child.__file__, str(self.folder), str(os.getpid())],
                    stdin=subprocess.PIPE,  # which closes when this process ends
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    # libtpu's files of log lines are among those that go with the folder.
                    env={**env, "PYTHONPATH": path, "TMPDIR": str(self.folder)},
                    start_new_session=True,  # an interrupt is for this process, which ends it
                )
            # Not all of sys.path: a folder of scripts in it may have a file of any name.
            files = [sys.modules[name].__file__ for name in _PACKAGES if name in sys.modules]
            places = [str(Path(file).absolute().parents[1]) for file in files if file]
            content = marshal.dumps((list(dict.fromkeys(places)), module, request))
            (self.folder / "request.part").write_bytes(content)
            (self.folder / "request.part").rename(self.folder / "request")  # there when it is whole
        except BaseException:
            self.close()
            raise

    def error(self, what: str) -> str:
        """Wait for its end, and return the error that it ends with, or "".

        Raises:
            TimeoutError: It has not ended within `LIMIT`.
            RuntimeError: It has crashed; with its last words.
        """
        assert self._process is not None
        try:
            code = self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{what} has not ended in {LIMIT:g} s, and was stopped") from None
        if code in (0, child.FAILED):
            return self.text("error.txt") if code else ""
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        hint = "; the system may have had no memory left for it" if code == -9 else ""
        words = self.text("stderr.txt")[-_LAST_WORDS:].splitlines() or ["it has said nothing"]
        lines = [f"{what} has crashed, by {how}{hint}. Its last words:", *words]
        raise RuntimeError(printable_lines(lines))

    def text(self, name: str) -> str:
        """Read one of its files, such as error.txt and stderr.txt."""
        return (self.folder / name).read_text("utf-8", "replace")

    def close(self) -> None:
        """End it, and remove its files."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):
                self._process.stdin.close()  # type: ignore[union-attr]
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class CompilerChild(Child):
    """A child process that compiles a step.

    Args:
        lowered: JAX's own, or that of flax or equinox.
        mesh: The devices; for CPUs, XLA is asked for as many host devices as it has.

    Raises:
        ImportError: The mesh is of described TPUs, and libtpu is not installed.
        OSError: There is no room for its files.
    """

    def __init__(self, lowered: Any, mesh: Any) -> None:
        self._lowered, self._topology, self._mesh = lowered, topology_of(mesh), mesh
        slices = self._topology and self._topology._layout
        assert slices is None or isinstance(slices, Slices)
        super().__init__(
            child.__name__,
            _environment(slices),
            program=tuple(compiler_input(inner_of(lowered))),
            topology=None if slices is None else slices.description,
            library=None if slices is None else libtpu_path(),
        )

    def answer(self) -> tuple[StoredProgram, str]:
        """Wait for what the compiler makes of the step, which is read as if JAX had compiled it.

        Returns:
            The program, and XLA's warnings.

        Raises:
            OutOfMemory: The step does not fit.
            RuntimeError: The compiler refuses the step for another reason than memory, or crashes;
                or this JAX does not say how the results are sharded.
            TimeoutError: It has not ended within `LIMIT`.
            OSError: There is no room for its files.
        """
        try:
            return self._read(self.error("the compiler"))
        except RuntimeError as error:
            error.add_note(_NOTE)
            raise
        finally:
            self.close()

    def _read(self, error: str) -> tuple[StoredProgram, str]:
        """Read what the child and XLA have written."""
        numbers = refused_bytes(error)
        if error and numbers is None:
            raise RuntimeError(printable_lines(error.splitlines()))
        folder, topology = self.folder, self._topology
        files = [next(folder.glob(f"dump/*{name}"), None) for name in child.FILES]
        proto, report, buffers = (b"" if file is None else file.read_bytes() for file in files)
        module, total = module_of(proto), _TOTAL.search(report.decode("utf-8", "replace"))
        text = module.to_string() if module else ""
        ranges = (
            file.read_text("utf-8", "replace") for file in folder.glob("dump/*-live-range.txt")
        )
        live = LiveRanges("".join(ranges), buffers.decode("utf-8", "replace"))
        if numbers is not None:
            raise refusal(*numbers, text, live)
        if not text or total is None:
            raise OSError(
                f"XLA has not written all that it makes of the step to {folder}: is there room?"
            )
        peak = int(total[1])
        if topology is not None and peak > (available := topology.hardware.memory_bytes):
            raise refusal(peak, available, text, live)
        sides = _shardings(inner_of(self._lowered), self._mesh, module)
        stored = StoredProgram(self._lowered, *sides, text, peak=peak, live=live)
        return stored, self.text("stderr.txt")


def _environment(slices: Slices | None) -> dict[str, str]:
    """Return the environment of the child: this one, and what the compiler reads of it."""
    env = dict(os.environ)
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        if name in env:
            env[name] = _DUMPS.sub("", env[name])
    levels = {"TF_CPP_MIN_LOG_LEVEL": "1"}  # its warnings are read
    if slices is not None:
        env = {**ENVIRONMENT, **env}
        levels |= {"TPU_MIN_LOG_LEVEL": "1", "TPU_STDERR_LOG_LEVEL": "1"}
    return env | levels


def _shardings(inner: Any, mesh: Any, module: Any) -> tuple[list[Any], list[Any]]:
    """Return the shardings of a step's arguments and results, which XLA has chosen or was told."""
    inputs, outputs = lowered_shardings(inner)
    if None in outputs and mesh is not None:
        specs = [PartitionSpec()] if mesh.size == 1 else result_specs(module, mesh)
        specs *= len(outputs) if len(specs) == 1 else 1  # XLA has one for equal ones
        if len(specs) != len(outputs):
            raise RuntimeError(
                "this version of JAX does not say how the results of the step are sharded: give "
                "jax.jit out_shardings=..., or prove(..., time=True), which compiles the step to "
                "its end"
            )
        pairs = zip(outputs, specs, strict=True)
        outputs = [sharding or NamedSharding(mesh, spec) for sharding, spec in pairs]
    return inputs, outputs


def has_child(mesh: Any) -> bool:
    """Say whether a child can be asked for a mesh: of described TPUs, or of CPUs."""
    topology = topology_of(mesh)
    return is_of_cpus(mesh) if topology is None else isinstance(topology._layout, Slices)


def is_of_cpus(mesh: Any) -> bool:
    """Say whether a step is compiled by XLA for CPU: a mesh without devices is."""
    if mesh is None:
        return jax.default_backend() == "cpu"
    return not has_devices(mesh) or mesh.devices.flat[0].platform == "cpu"


def compile_whole(lowered: Any, mesh: Any) -> Compiled:
    """Compile a lowered step to its end in this process, as it will run.

    Raises:
        OutOfMemory: It does not fit.
    """
    config: Any = jax.config
    name = "jax_persistent_cache_min_compile_time_secs"
    before, is_described = getattr(config, name), topology_of(mesh) is not None
    if is_described:  # of which JAX can write its cache, and cannot read it
        config.update(name, inf)
    try:
        return lowered.compile()  # type: ignore[no-any-return]
    except Exception as error:
        if numbers := refused_bytes(str(error)):
            raise OutOfMemory(*numbers, ()) from None
        error.add_note(_NOTE)
        raise
    finally:
        if is_described:
            config.update(name, before)


def compile_or_read(lowered: Any, mesh: Any) -> tuple[str, Compiled | None]:
    """Compile a lowered step to its end; for described TPUs keep the text, or read what is kept.

    The folder has gzipped texts, which are read and never unpickled. What is not understood is
    compiled again. A folder that another user may have written is neither read nor written.

    Returns:
        The module, which has the compiler's cycles, "" where the backend does not show it; and what
        JAX or flax has compiled, None if the cache has had the text.
    """
    path = _cache_file(lowered, mesh)
    if path is not None:
        with suppress(OSError, EOFError, zlib.error, ValueError):  # none, or a damaged one
            _check_own(path.parent)
            text = gzip.decompress(path.read_bytes()).decode()
            check_hlo(text)
            return text, None
    compiled = compile_whole(lowered, mesh)
    text = getattr(compiled, "compiled", compiled).as_text() or ""
    if path is not None:
        with suppress(OSError):  # such as no room, or no right to write
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_own(path.parent)
            replace_file(path, gzip.compress(text.encode(), mtime=0))
            entries = sorted(
                path.parent.glob(_CACHE_NAMES), key=lambda entry: entry.stat().st_mtime
            )
            for entry in entries[:-_CACHE_ENTRIES]:
                entry.unlink()
    return text, compiled


def _cache_file(lowered: Any, mesh: Any) -> Path | None:
    """Return the file for a step, its devices, versions and flags; None where nothing is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # Of nobody's home, and by the standard of a relative folder, there is none.
    usual = f"{base}/shardrules" if os.path.isabs(base) else ""
    folder, topology = os.environ.get("SHARDRULES_CACHE", usual), topology_of(mesh)
    if folder in ("", "off") or topology is None or not isinstance(topology._layout, Slices):
        return None
    flags = {name: text for name, text in os.environ.items() if name.startswith(_FLAGS)}
    program = compiler_input(inner_of(lowered))
    if "xla_dump" in f"{flags} {program.overrides}":
        return None  # what is to be dumped has to be made
    versions = jax.__version__, mesh.devices.flat[0].client.platform_version
    facts = topology._layout, versions, sorted(flags.items()), program
    return Path(folder, f"{hashlib.sha256(repr(facts).encode()).hexdigest()}.gz")


def _check_own(folder: Path) -> None:
    """Check that the folder, also behind a link, is this user's, or root's, and not all's.

    Raises:
        PermissionError: What is in it may be anybody's.
    """
    status = folder.stat()
    if os.name == "posix" and (
        status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH
    ):
        raise PermissionError("another user may have written there")
