"""Agreement of processes on a call, in the key-value store of JAX's coordination service.

The store has time limits and needs no device, and a process that fails can say so without waiting.
Rounds are numbered, so a call is never compared with another call. Costs a few round trips per
call. Imported by the first call in several processes. Must not know what processes agree on.

Process 0 collects a row from each process and writes a verdict. A verdict is written once: a
process that fails or gives up writes one too, and all processes follow the first verdict.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
import zlib
from traceback import format_exception_only
from typing import Any, Final

from shardrules._format import brief
from shardrules._jax import coordination_state
from shardrules._sharding.leaf_rows import Row, digest, first_difference

__all__ = ["fail", "leave", "note", "settle", "wait_limit"]

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

_logger: Final = logging.getLogger("shardrules")
_lock: Final = threading.Lock()


def settle(name: str, rows: list[Row], limit: float) -> None:
    """Returns when all processes have these rows, for the call of this name; see `JointCall`."""
    with _lock:
        _next_round(name).settle(rows, limit)


def fail(name: str, error: BaseException, when: str) -> None:
    """Tells the other processes that this process has failed in its call, and when."""
    # The process raises its own error, whatever happens here.
    with contextlib.suppress(RuntimeError), _lock:
        _next_round(name).fail(error, when)


def note(text: str) -> None:
    """Tells waiting processes which call this process made last, without them."""
    with contextlib.suppress(RuntimeError):
        _job().note(text)


def leave() -> None:
    """Tells the others that this process has ended. Creates no backend, which needs all of them."""
    state = coordination_state()
    if state is None:
        return
    with contextlib.suppress(RuntimeError):
        job = _job()
        job.number += 1
        _Round(job, "exit").decide({"error": f"process {state.process_id} has ended"})


def wait_limit() -> float:
    """Seconds to wait for the other processes.

    Raises:
        ValueError: The environment variable is not a number above 0.
    """
    given = os.environ.get(_LIMIT, "")
    try:
        seconds = float(given or _LIMIT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_LIMIT} is {brief(given)}; it must be a number of seconds above 0")
    return seconds


class _Job:
    """A process in its job, and the number of its last joint call."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.number = 0
        self.oldest = 1
        self._noted: str | None = None

    @functools.cached_property
    def me(self) -> int:
        import jax

        return jax.process_index()

    @functools.cached_property
    def count(self) -> int:
        import jax

        return jax.process_count()  # type: ignore[no-any-return]

    def note(self, text: str) -> None:
        noted = f"{self.number} {text}"
        if noted != self._noted:
            self.client.key_value_set(f"{_ROOT}/note/{self.me}", noted, allow_overwrite=True)
            self._noted = noted

    def notes(self) -> dict[int, str]:
        """By process, the calls that others have made alone since the previous joint call."""
        found = {}
        for key, noted in self.client.key_value_dir_get(f"{_ROOT}/note"):
            number, text = noted.split(" ", 1)
            if int(number) == self.number - 1:
                found[_last(key)] = text
        return found


class _Round:
    """The data of one joint call in the store: a row for each process, and the verdict."""

    def __init__(self, job: _Job, name: str) -> None:
        self._job, self._name = job, name
        self._at = f"{_ROOT}/{job.number}"

    def fail(self, error: BaseException, when: str) -> None:
        """Writes a verdict of failure, without waiting."""
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
        """The verdict, if there is one within a second."""
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
        """Deletes earlier calls: all processes are here, so none reads them any more."""
        job = self._job
        for number in range(job.oldest, job.number):
            job.client.key_value_delete(f"{_ROOT}/{number}")
        job.oldest = job.number

    def _difference(self, rows: list[Row], others: list[int]) -> str:
        """The first difference between process 0 and the first of the others."""
        me, other = self._job.me, others[0]
        if me == other:
            self._set_rows(rows)
        if me == 0:
            names = ("process 0", f"process {other}")
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
        """Writes the verdict, unless there is one already; returns the one that counts."""
        try:
            self._set("verdict", verdict)
        except RuntimeError:
            written = self._found("verdict")
            if written is None:
                raise
            return written  # type: ignore[no-any-return]
        return verdict

    def _rows(self) -> dict[int, Any]:
        """The rows so far, by process."""
        there = self._job.client.key_value_dir_get(f"{self._at}/row")
        return dict(sorted((_last(key), json.loads(row)) for key, row in there))

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
        """The value of a key, waiting up to this time; None if there is none."""
        get, path = self._job.client, f"{self._at}/{key}"
        try:
            if seconds:
                return json.loads(get.blocking_key_value_get(path, int(seconds * 1000)))
            return json.loads(get.key_value_try_get(path))
        except RuntimeError as error:
            if not any(status in str(error) for status in ("DEADLINE_EXCEEDED", "NOT_FOUND")):
                raise
            return None


def _job() -> _Job:
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
    job = _job()
    job.number += 1
    return _Round(job, name)


def _judged(rows: dict[int, Any]) -> dict[str, Any]:
    """The verdict on the rows of all processes."""
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


def _last(key: str) -> int:
    return int(key.rsplit("/", 1)[1])
