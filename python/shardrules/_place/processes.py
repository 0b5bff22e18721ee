"""Joint calls: all processes agree on a call by their rows, or all get an error.

Each process writes a digest of its rows to the store of JAX's coordination service. Process 0 reads
all and writes the verdict, for which the others wait. Who fails, or ends, writes it first.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from traceback import format_exception_only
from types import TracebackType
from typing import Any, Final

import jax
from jax import tree_util
from jax.sharding import NamedSharding, Sharding

import shardrules
from shardrules._base.jax_names import coordination_state
from shardrules._base.specs import entries_of, tags_shown
from shardrules._base.text import brief, mesh_shown
from shardrules._place.mesh import AnyMesh, axes_of_type, has_devices, memory_apart
from shardrules._place.transfers import canonical_dtype, check_reachable, crosses, is_spread

Row = tuple[str, str]
"""(path, dtype, shape and shardings as text)"""
DEVICES: Final = "the order of the mesh's devices"
"""In the place of a path, the last row of a call."""
_CONTEXT_CHARS: Final = 200
_MARK_CHARS: Final = 8


def rows_of(
    tree: Any,
    shardings: Sequence[NamedSharding | None] | Mapping[int, NamedSharding],
    options: str = "",
) -> list[Row]:
    """Return a row for each leaf, or for those of these indices, and one for all devices.

    Args:
        tree: The tree, from whose leaves arrays with shardings are made.
        shardings: The sharding of each leaf, or of some; None for a leaf that stays.
        options: The other arguments on which the processes agree, as text.

    Raises:
        ValueError: JAX does not move a leaf to its sharding.
    """
    texts, paths = _Texts(), tree_util.tree_flatten_with_path(tree)[0]
    rows = [("the options", options)] if options else []
    for index, to in shardings.items() if isinstance(shardings, Mapping) else enumerate(shardings):
        path, leaf = tree_util.keystr(paths[index][0]) or "(the tree)", paths[index][1]
        if to is not None:
            check_reachable(path, leaf, to)
        rows.append((path, texts.leaf(leaf, to)))
    return [*rows, (DEVICES, texts.devices())]


def digest(rows: list[Row]) -> str:
    """Return 64 hex digits that differ if any row differs."""
    import hashlib  # its OpenSSL takes as long to load as the rest of us

    return hashlib.sha256(repr(rows).encode()).hexdigest()


def marks_of(rows: list[Row]) -> str:
    """Return eight hex digits for each row, by which another process finds what differs."""
    return "".join(f"{zlib.crc32(repr(row).encode()):08x}" for row in rows)


def first_difference(marks: str, others: str) -> int:
    """Return the index of the first row that differs; -1 for the last one, of the devices."""
    leaves = (re.findall("." * _MARK_CHARS, each[:-_MARK_CHARS]) for each in (marks, others))
    pairs = enumerate(zip_longest(*leaves))
    return next((i for i, (mine, theirs) in pairs if mine != theirs), -1)


def row_at(rows: list[Row], index: int) -> Row | None:
    """Return the row that `first_difference` means; None if there is no such leaf."""
    return rows[index] if index < len(rows) - 1 else None  # that of the devices is at -1


def difference_shown(index: int, row: Row | None, peer: Row | None, names: Sequence[str]) -> str:
    """Return what differs in the rows of this index, with the text of each process."""
    if row and peer and row[0] == peer[0]:
        where, texts = row[0], (row[1], peer[1])
    else:
        where = f"leaf {index} of the tree"
        texts = tuple(" ".join(each) if each else "no such leaf" for each in (row, peer))  # type: ignore[assignment]
    same = len(commonprefix(texts))  # noqa: RUF071 these are no paths of files
    start = max(0, same - _CONTEXT_CHARS // 2) if max(map(len, texts)) > _CONTEXT_CHARS else 0
    parts = (f"{name} has {_excerpt(text, start)}" for name, text in zip(names, texts, strict=True))
    return f"{where}: {', and '.join(parts)}"


def _excerpt(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + _CONTEXT_CHARS else ""
    return f"{before}{text[start : start + _CONTEXT_CHARS]}{after}"


class _Texts:
    """Texts of leaves and shardings. The text of each distinct sharding is made once."""

    def __init__(self) -> None:
        # Holds the sharding too, so that no other object gets its id.
        self._texts: dict[int, tuple[Sharding, str]] = {}
        self._meshes: dict[AnyMesh, int] = {}

    def leaf(self, leaf: Any, to: NamedSharding | None) -> str:
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if to is not None and not isinstance(leaf, jax.Array):
            dtype = canonical_dtype(leaf)
        text = f"{_name(dtype)}{list(getattr(leaf, 'shape', ()))}"
        if to is not None and getattr(leaf, "weak_type", type(leaf) in (int, float, complex)):
            text += " weakly typed"
        if is_spread(leaf) or (to is not None and crosses(leaf, to)):
            text += f" {'deleted' if leaf.is_deleted() else 'spread'} as {self._of(leaf.sharding)}"
        return f"{text}, which stays" if to is None else f"{text} for {self._of(to)}"

    def devices(self) -> str:
        """Return the ids of the devices of all meshes, in order."""
        meshes = filter(has_devices, self._meshes)
        return "; ".join(
            " ".join(str(device.id) for device in mesh.devices.flat) for mesh in meshes
        )

    def _of(self, sharding: Sharding) -> str:
        entry = self._texts.get(id(sharding))
        if entry is None:
            entry = self._texts[id(sharding)] = (sharding, self._made(sharding))
        return entry[1]

    def _made(self, sharding: Any) -> str:
        if not isinstance(sharding, NamedSharding):
            return str(sharding)
        mesh = sharding.mesh
        number = self._meshes.setdefault(mesh, len(self._meshes))
        kinds = {kind: axes_of_type(mesh, kind) for kind in ("Explicit", "Manual")}
        types = [f"{kind}={','.join(sorted(axes))}" for kind, axes in kinds.items() if axes]
        which = [f"(mesh {number})"] if number else []
        tags = tags_shown(sharding.spec)
        if memory := memory_apart(sharding):
            tags.append(f"memory={memory}")
        spec = " ".join([f"P{entries_of(sharding.spec)!r}", *tags])
        return " ".join([f"{spec} on {mesh_shown(mesh.shape)}", *types, *which])


_name = functools.lru_cache(maxsize=256)(str)  # numpy takes 10 microseconds to name a dtype


# 2 is the version of the protocol.
_ROOT: Final = "shardrules/2"
_LIMIT: Final = "SHARDRULES_WAIT_SECONDS"
# JAX waits 300 s for a cluster to start; reading a part of a checkpoint may take longer.
_LIMIT_SECONDS: Final = 600.0
_QUIET_SECONDS: Final = 10.0
# Between two checks for signals.
_SLICE_SECONDS: Final = 1.0
# For processes that have answered in this round.
_ANSWER_SECONDS: Final = 60.0
_MAX_ERROR_CHARS: Final = 300
# The row of a process that has written the verdict itself.
_FAILED: Final = "failed"

_logger: Final = logging.getLogger("shardrules")
_lock: Final = threading.Lock()


class JointCall:
    """Context manager for one process's part of a joint call, up to the agreement.

    Any exception in the body, also SystemExit and KeyboardInterrupt, becomes an error in the other
    processes, unless `alone` or `agree` was called before it.

    Args:
        name: The name of the function.
        when: What has happened when the body fails, for the other processes.

    Attributes:
        joint: Whether the other processes still have to agree.
    """

    def __init__(self, name: str, when: str = "before anything was done") -> None:
        self._name = name
        self._when = when
        self.joint = False

    def __enter__(self) -> JointCall:
        self.joint = jax.process_count() > 1
        if self.joint:
            _leave_before_jax()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self.joint:
            # The process raises its own error, whatever happens here.
            with contextlib.suppress(RuntimeError), _lock:
                _Round(self._name).fail(error, self._when)

    def alone(self) -> None:
        """End the joint call, which uses only this process's devices."""
        self.joint = False

    def agree(self, rows: Callable[[], list[Row]]) -> None:
        """Wait until all processes have the same rows.

        Raises:
            RuntimeError: Their rows differ, a process has failed or is late, or there is no
                coordination service.
            ValueError: The environment's time limit is not a number above 0.
        """
        if self.joint:
            own_rows, limit = rows(), _wait_limit()
            self.joint = False
            with _lock:
                _Round(self._name).agree(own_rows, limit)


def leave() -> None:
    """Tell the others that this process has ended. Creates no backend, which needs all of them."""
    state = coordination_state()
    if state is not None:
        with contextlib.suppress(RuntimeError):
            _Round("exit").decide({"error": f"process {state.process_id} has ended"})


@functools.cache
def _leave_before_jax() -> None:
    """Register `leave` once more, so that it runs before JAX's handler, which waits for all."""
    atexit.unregister(shardrules._leave)
    atexit.register(shardrules._leave)


def _wait_limit() -> float:
    """Return seconds to wait for the other processes."""
    text = os.environ.get(_LIMIT, "")
    try:
        seconds = float(text or _LIMIT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_LIMIT} is {brief(text)}; it must be a number of seconds above 0")
    return seconds


class _Job:
    """This process's client of the store, and the numbers of joint calls: the last, the oldest."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.number = 0
        self.oldest = 1


# In all processes numbers start again with each jax.distributed.initialize.
_job_of: Final = functools.lru_cache(maxsize=1)(_Job)


class _Round:
    """Data of the next joint call in the store: a row for each process, and the verdict."""

    def __init__(self, name: str) -> None:
        state = coordination_state()
        if state is None:
            raise RuntimeError(
                "several processes agree by JAX's coordination service, and there is none: call "
                "jax.distributed.initialize() in each of them before anything else"
            )
        self._name, self._job = name, _job_of(state.client)
        self._job.number += 1
        self._at = f"{_ROOT}/{self._job.number}"

    def fail(self, error: BaseException, when: str) -> None:
        """Write a verdict of failure, without waiting."""
        me = jax.process_index()
        verdict = {"error": f"process {me} failed {when}: {_first_line(error)}"}
        # Either may exist: others may have given up, or this process may be interrupted.
        for key, value in (("verdict", verdict), (f"row/{me}", _FAILED)):
            with contextlib.suppress(RuntimeError):
                self._set(key, value)

    def agree(self, rows: list[Row], limit: float) -> None:
        """Return when all processes have these rows; see `JointCall`."""
        try:
            self._set(f"row/{jax.process_index()}", [self._name, digest(rows)])
            verdict = self._verdict(limit)
            error = verdict.get("error")
            if "differ" in verdict:
                error = self._difference(rows, verdict["differ"])
        except BaseException as interruption:
            self.fail(interruption, "while it waited for the others")
            raise
        if error:
            raise RuntimeError(f"{self._name}: {error}; this is process {jax.process_index()}")

    def _verdict(self, limit: float) -> dict[str, Any]:
        start, is_quiet = time.monotonic(), True
        while (verdict := self._poll()) is None:
            waited = time.monotonic() - start
            if waited > limit:
                return self.decide(
                    {
                        "error": f"given up after waiting {self._missing(waited)}; a process that "
                        f"needs longer to come here gets it with {_LIMIT}, in all processes"
                    }
                )
            if is_quiet and waited > _QUIET_SECONDS:
                is_quiet = False
                me = jax.process_index()
                _logger.warning("%s: process %d waits %s", self._name, me, self._missing(waited))
        return verdict

    def _poll(self) -> dict[str, Any] | None:
        """Return the verdict, if there is one within a second. Process 0 makes it."""
        if jax.process_index() != 0:
            return self._found("verdict", _SLICE_SECONDS)  # type: ignore[no-any-return]
        rows = self._rows()
        if _FAILED in rows.values():
            return self._found("verdict")  # type: ignore[no-any-return]
        missing = [i for i in range(jax.process_count()) if i not in rows]
        if not missing:
            verdict = self.decide(_verdict_of(rows))
            # All processes are here, so none reads earlier calls any more.
            for number in range(self._job.oldest, self._job.number):
                self._job.client.key_value_delete(f"{_ROOT}/{number}")
            self._job.oldest = self._job.number
            return verdict
        if self._found(f"row/{missing[0]}", _SLICE_SECONDS) is None:
            return self._found("verdict")  # type: ignore[no-any-return]
        return None

    def _difference(self, rows: list[Row], others: list[int]) -> str:
        """Return the first difference between process 0 and the first of the others."""
        me, peer = jax.process_index(), others[0]
        if me == 0:
            self._set("marks", marks_of(rows))
        if me == peer and (marks := self._found("marks", _ANSWER_SECONDS)):
            index = first_difference(marks, marks_of(rows))
            self._set("answer", [index, row_at(rows, index)])
        if me == 0 and (answer := self._found("answer", _ANSWER_SECONDS)):
            index, theirs = answer
            names = ("process 0", f"process {peer}")
            self._set("first", difference_shown(index, row_at(rows, index), theirs, names))
        first = self._found("first", _ANSWER_SECONDS) or "(no answer)"
        return (
            f"not the same in process 0 and {_processes(others)}\n  {first}\n"
            "  All processes need the same code, rules, mesh, model configuration and settings of "
            "JAX, such as jax_enable_x64"
        )

    def _missing(self, waited: float) -> str:
        """Return for how long, and for which processes, this one has waited."""
        there = self._rows()
        # If all rows are there, the verdict of process 0 is missing.
        missing = [i for i in range(jax.process_count()) if i not in there] or [0]
        return f"{waited:.0f} s for {_processes(missing)}"

    def decide(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """Write the verdict, unless there is one already; returns the one that counts."""
        try:
            self._set("verdict", verdict)
        except RuntimeError:
            written = self._found("verdict")
            if written is None:
                raise
            return written  # type: ignore[no-any-return]
        return verdict

    def _rows(self) -> dict[int, Any]:
        """Return the rows so far, by process."""
        there = self._job.client.key_value_dir_get(f"{self._at}/row")
        return dict(sorted((int(key.rsplit("/", 1)[1]), json.loads(row)) for key, row in there))

    def _set(self, key: str, value: Any) -> None:
        self._job.client.key_value_set(f"{self._at}/{key}", json.dumps(value))

    def _found(self, key: str, seconds: float = 0.0) -> Any:
        """Return the value of a key, waiting up to this time; None if there is none."""
        get, path = self._job.client, f"{self._at}/{key}"
        try:
            if seconds:
                return json.loads(get.blocking_key_value_get(path, int(seconds * 1000)))
            return json.loads(get.key_value_try_get(path))
        except RuntimeError as error:
            if not any(status in str(error) for status in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None


def _verdict_of(rows: dict[int, Any]) -> dict[str, Any]:
    """Return the verdict on the rows of all processes."""
    name, mine = rows[0]
    others = [i for i, row in rows.items() if row[0] != name]
    if others:
        calls = f"process 0 calls {name}, and {_processes(others)} {rows[others[0]][0]}"
        return {"error": f"processes make different calls: {calls}"}
    others = [i for i, row in rows.items() if row[1] != mine]
    return {"differ": others} if others else {"agreed": True}


def _first_line(error: BaseException) -> str:
    text = "".join(format_exception_only(error)).strip().splitlines()[0]
    return text if len(text) <= _MAX_ERROR_CHARS else f"{text[:_MAX_ERROR_CHARS]}..."


def _processes(indices: list[int]) -> str:
    first = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"process{'es' if len(indices) > 1 else ''} {first}"
