"""Collective calls: all processes agree on a call by their rows, or all get an error."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
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
from shardrules._place.memory import memory_apart
from shardrules._place.mesh import AnyMesh, axes_of_type

# 1 is the version of the protocol.
_ROOT: Final = "shardrules/1"
_LIMIT: Final = "SHARDRULES_WAIT_SECONDS"
# JAX waits 300 s for a cluster to start; reading a part of a checkpoint may take longer.
_LIMIT_SECONDS: Final = 600.0
_QUIET_SECONDS: Final = 10.0
# Between two checks for signals.
_SLICE_SECONDS: Final = 1.0
# For processes that have answered in this round.
_ANSWER_SECONDS: Final = 60.0
# A gRPC message has at most 4 MiB.
_CHUNK: Final = 1 << 20
_TOLD: Final = 300
# The row of a process that has written the verdict itself.
_FAILED: Final = "failed"

Row = tuple[str, str]
"""(path, dtype, shape and shardings as text)"""
DEVICES: Final = "the order of the mesh's devices"
"""In the place of a path, the last row of a call."""
_SHOWN: Final = 200

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
            shardrules._leave_before_jax()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self.joint:
            fail(self._name, error, self._when)

    def alone(self) -> None:
        """End the joint call, which uses only this process's devices. Leaves a note for others."""
        if self.joint:
            self.joint = False
            note(f"{self._name} on devices of its own")

    def agree(self, rows: Callable[[], list[Row]]) -> None:
        """Wait until all processes have the same rows.

        Raises:
            RuntimeError: Their rows differ, a process has failed or is late, or there is no
                coordination service.
            ValueError: The environment's time limit is not a number above 0.
        """
        if self.joint:
            own_rows, limit = rows(), wait_limit()
            self.joint = False
            settle(self._name, own_rows, limit)


def settle(name: str, rows: list[Row], limit: float) -> None:
    """Return when all processes have these rows, for the call of this name; see `JointCall`."""
    with _lock:
        _next_round(name).settle(rows, limit)


def fail(name: str, error: BaseException, when: str) -> None:
    """Tell the other processes that this process has failed in its call, and when."""
    # The process raises its own error, whatever happens here.
    with contextlib.suppress(RuntimeError), _lock:
        _next_round(name).fail(error, when)


def note(text: str) -> None:
    """Tell waiting processes which call this process made last, without them."""
    with contextlib.suppress(RuntimeError):
        _current_job().note(text)


def leave() -> None:
    """Tell the others that this process has ended. Creates no backend, which needs all of them."""
    state = coordination_state()
    if state is None:
        return
    with contextlib.suppress(RuntimeError):
        job = _current_job()
        job.number += 1
        _Round(job, "exit").decide({"error": f"process {state.process_id} has ended"})


def wait_limit() -> float:
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
    """Process in its job, and the number of its last joint call."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.number = 0
        self.oldest = 1
        self._noted: str | None = None

    @functools.cached_property
    def me(self) -> int:
        return jax.process_index()

    @functools.cached_property
    def count(self) -> int:
        return jax.process_count()  # type: ignore[no-any-return]

    def note(self, text: str) -> None:
        noted = f"{self.number} {text}"
        if noted != self._noted:
            self.client.key_value_set(f"{_ROOT}/note/{self.me}", noted, allow_overwrite=True)
            self._noted = noted

    def notes(self) -> dict[int, str]:
        """Return by process the calls that others have made alone since the last joint call."""
        notes = {}
        for key, noted in self.client.key_value_dir_get(f"{_ROOT}/note"):
            number, text = noted.split(" ", 1)
            if int(number) == self.number - 1:
                notes[_last_number(key)] = text
        return notes


class _Round:
    """Data of one joint call in the store: a row for each process, and the verdict."""

    def __init__(self, job: _Job, name: str) -> None:
        self._job, self._name = job, name
        self._at = f"{_ROOT}/{job.number}"

    def fail(self, error: BaseException, when: str) -> None:
        """Write a verdict of failure, without waiting."""
        why = f"failed {when}: {_first_line(error)}"
        verdict = {"error": f"process {self._job.me} {why}"}
        # Either may exist: others may have given up, or this process may be interrupted.
        for key, value in (("verdict", verdict), (f"row/{self._job.me}", _FAILED)):
            with contextlib.suppress(RuntimeError):
                self._set(key, value)

    def settle(self, rows: list[Row], limit: float) -> None:
        me = self._job.me
        try:
            self._set(f"row/{me}", [self._name, digest(rows)])
            verdict = self._verdict(limit)
            error = verdict.get("error")
            if "compare" in verdict:
                error = self._difference(rows, verdict["compare"])
        except BaseException as interruption:
            self.fail(interruption, "while it waited for the others")
            raise
        if error:
            raise RuntimeError(f"{self._name}: {error}; this is process {me}")

    def _verdict(self, limit: float) -> dict[str, Any]:
        start, quiet = time.monotonic(), _QUIET_SECONDS
        while (verdict := self._news()) is None:
            waited = time.monotonic() - start
            if waited > limit:
                return self.decide({"error": self._given_up(waited)})
            if waited > quiet:
                quiet *= 2
                _logger.warning(
                    "%s: process %d waits %s", self._name, self._job.me, self._for_whom(waited)
                )
        return verdict

    def _news(self) -> dict[str, Any] | None:
        """Return the verdict, if there is one within a second."""
        if self._job.me != 0:
            return self._found("verdict", _SLICE_SECONDS)  # type: ignore[no-any-return]
        rows = self._rows()
        if _FAILED in rows.values():
            return self._found("verdict")  # type: ignore[no-any-return]
        missing = [i for i in range(self._job.count) if i not in rows]
        if not missing:
            verdict = self.decide(_judged(rows))
            self._forget()
            return verdict
        if self._found(f"row/{missing[0]}", _SLICE_SECONDS) is None:
            return self._found("verdict")  # type: ignore[no-any-return]
        return None

    def _forget(self) -> None:
        """Delete earlier calls: all processes are here, so none reads them any more."""
        job = self._job
        for number in range(job.oldest, job.number):
            job.client.key_value_delete(f"{_ROOT}/{number}")
        job.oldest = job.number

    def _difference(self, rows: list[Row], others: list[int]) -> str:
        """Return the first difference between process 0 and the first of the others."""
        me, peer = self._job.me, others[0]
        if me == peer:
            self._set_rows(rows)
        if me == 0:
            names = ("process 0", f"process {peer}")
            theirs = self._rows_there()
            first = first_difference(rows, theirs, names) if theirs else "(no answer)"
            self._set("difference", first)
        first = self._found("difference", _ANSWER_SECONDS) or "(no answer)"
        return (
            f"not the same in process 0 and {_processes(others)}\n  {first}\n"
            "  All processes need the same code, rules, mesh, model configuration and settings of "
            "JAX, such as jax_enable_x64"
        )

    def _given_up(self, waited: float) -> str:
        return (
            f"given up after waiting {self._for_whom(waited)}; a process that needs longer to "
            f"come here gets it with {_LIMIT}, in all processes"
        )

    def _for_whom(self, waited: float) -> str:
        there, notes = self._rows(), self._job.notes()
        # If all rows are there, the verdict of process 0 is missing.
        missing = [i for i in range(self._job.count) if i not in there] or [0]
        alone = "".join(f"; process {i} last called {notes[i]}" for i in missing if i in notes)
        return f"{waited:.0f} s for {_processes(missing)}{alone}"

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
        return dict(sorted((_last_number(key), json.loads(row)) for key, row in there))

    def _set_rows(self, rows: list[Row]) -> None:
        packed = zlib.compress(json.dumps(rows).encode())
        chunks = [packed[i : i + _CHUNK] for i in range(0, len(packed), _CHUNK)]
        for i, chunk in enumerate(chunks):
            self._job.client.key_value_set_bytes(f"{self._at}/rows/{i}", chunk)
        self._set("rows", len(chunks))

    def _rows_there(self) -> list[Row] | None:
        count = self._found("rows", _ANSWER_SECONDS)
        if count is None:
            return None
        get = self._job.client.key_value_try_get_bytes
        chunks = (get(f"{self._at}/rows/{i}") for i in range(count))
        return [(path, text) for path, text in json.loads(zlib.decompress(b"".join(chunks)))]

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


def _current_job() -> _Job:
    state = coordination_state()
    if state is None:
        raise RuntimeError(
            "several processes agree by JAX's coordination service, and there is none: call "
            "jax.distributed.initialize() in each of them before anything else"
        )
    return _job_of(state.client)


# In all processes numbers start again with each jax.distributed.initialize.
_job_of: Final = functools.lru_cache(maxsize=1)(_Job)


def _next_round(name: str) -> _Round:
    job = _current_job()
    job.number += 1
    return _Round(job, name)


def _judged(rows: dict[int, Any]) -> dict[str, Any]:
    """Return the verdict on the rows of all processes."""
    name, mine = rows[0]
    others = [i for i, row in rows.items() if row[0] != name]
    if others:
        calls = f"process 0 calls {name}, and {_processes(others)} {rows[others[0]][0]}"
        return {"error": f"processes make different calls: {calls}"}
    others = [i for i, row in rows.items() if row[1] != mine]
    return {"compare": others} if others else {"agreed": True}


def _first_line(error: BaseException) -> str:
    text = "".join(format_exception_only(error)).strip().splitlines()[0]
    return text if len(text) <= _TOLD else f"{text[:_TOLD]}..."


def _processes(indices: list[int]) -> str:
    first = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
    return f"process{'es' if len(indices) > 1 else ''} {first}"


def _last_number(key: str) -> int:
    return int(key.rsplit("/", 1)[1])


def rows_of(tree: Any, shardings: Mapping[int, NamedSharding | None]) -> list[Row]:
    """Return a row for each of these leaves, and one for the devices of all meshes."""
    texts, paths = _Texts(), tree_util.tree_flatten_with_path(tree)[0]
    rows = [
        (tree_util.keystr(paths[index][0]) or "(the tree)", texts.leaf(paths[index][1], to))
        for index, to in shardings.items()
    ]
    return [*rows, (DEVICES, texts.devices())]


def digest(rows: list[Row]) -> str:
    """Return 64 hex digits that differ if any row differs."""
    import hashlib

    return hashlib.sha256(repr(rows).encode()).hexdigest()


def first_difference(rows: list[Row], other_rows: list[Row], names: tuple[str, str]) -> str:
    """Return the first row that differs between two processes, with the text of each process."""
    *leaves, devices = rows
    *other_leaves, other_devices = other_rows
    pairs = [*zip_longest(leaves, other_leaves), (devices, other_devices)]
    place, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    if a and b and a[0] == b[0]:
        where, texts = a[0], (a[1], b[1])
    else:
        where = f"leaf {place} of the tree"
        ends = "no such leaf"
        texts = (" ".join(a) if a else ends, " ".join(b) if b else ends)
    same = len(commonprefix(texts))  # noqa: RUF071 these are no paths of files
    start = max(0, same - _SHOWN // 2) if max(map(len, texts)) > _SHOWN else 0
    texts_of = [
        f"{name} has {_text_from(text, start)}" for name, text in zip(names, texts, strict=True)
    ]
    return f"{where}: {', and '.join(texts_of)}"


def is_spread(leaf: Any) -> bool:
    """Return whether other processes hold parts of this array."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


def crosses(leaf: Any, sharding: NamedSharding) -> bool:
    """Return whether an array goes to other devices by collectives of all processes."""
    if not isinstance(leaf, jax.Array):
        return False
    if leaf.sharding.device_set == sharding.device_set:
        return False
    return is_held_elsewhere(leaf, holders_of(leaf.sharding), holders_of(sharding))


def is_held_elsewhere(leaf: Any, holders: frozenset[int], takers: frozenset[int]) -> bool:
    """Return whether these processes need parts of an array that only others hold.

    One process that holds all of it says so if it is committed to that and none of the takers; the
    others, which hold nothing of it, agree with it on that.
    """
    if not is_spread(leaf):
        return bool(getattr(leaf, "committed", False)) and takers.isdisjoint(holders)
    if leaf.is_fully_replicated:
        return not takers <= holders
    return len(holders) > 1 or takers != holders


@functools.lru_cache(maxsize=4096)
def holders_of(sharding: Sharding) -> frozenset[int]:
    """Return the processes of its devices."""
    devices: set[Any] = sharding.device_set
    return frozenset(device.process_index for device in devices)


def canonical_dtype(leaf: Any) -> Any:
    """Return the dtype of a numpy array or a number on devices, which depends on jax_enable_x64."""
    import numpy as np

    return jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)


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
        meshes = [getattr(mesh, "devices", None) for mesh in self._meshes]
        return "; ".join(
            " ".join(str(device.id) for device in devices.flat)
            for devices in meshes
            if devices is not None
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


def _text_from(text: str, start: int) -> str:
    before, after = "..." if start else "", "..." if len(text) > start + _SHOWN else ""
    return f"{before}{text[start : start + _SHOWN]}{after}"
