"""Answers a step that asks JAX where it runs, while it is traced for a slice: `answered`.

A step may choose by `jax.devices()[0].platform`, or leave out its constraints on a CPU: it would be
proved as another program than the one that runs. While `answered` is entered, JAX's public
functions tell this thread of the mesh; other threads, and JAX itself, are answered as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NamedTuple

import jax

from shardrules._base.text import Place
from shardrules._place.mesh import AnyMesh, has_devices
from shardrules._program.jax_names import is_library, legacy_contexts


class Question(NamedTuple):
    """What a step that is traced asks JAX."""

    name: str
    """Such as `jax.devices()`."""
    place: Place
    is_answered: bool
    """True if it was answered as on the mesh, and not as here."""

    def __str__(self) -> str:
        end = "answered as on the devices of the mesh"
        if not self.is_answered:
            end = "answered as here, as a mesh without devices has none: the program may be another"
        return f"the step asks {self.name} at {self.place}: {end}"


def _answers(mesh: AnyMesh) -> dict[str, Any]:
    """Return what JAX's functions say on the devices of a mesh, by name."""
    if not has_devices(mesh):
        return {"default_backend": "cpu", "device_count": mesh.size, "devices": None}
    devices = list(mesh.devices.flat)
    own = [device for device in devices if device.process_index == devices[0].process_index]
    return {
        "default_backend": devices[0].platform,
        "device_count": len(devices),
        "devices": sorted(devices, key=lambda device: device.id),
        "local_device_count": len(own),
        "local_devices": sorted(own, key=lambda device: device.id),
        "process_count": len({device.process_index for device in devices}),
    }


_NAMES: Final = (
    "default_backend", "device_count", "devices", "local_device_count", "local_devices",
    "process_count",
)  # fmt: skip
_here = threading.local()
_lock = threading.Lock()
_tracing: Final[list[None]] = []
"""One for each thread that traces a step."""
_saved: Final[dict[str, Callable[..., Any]]] = {}


@contextmanager
def answered(mesh: AnyMesh | None) -> Iterator[list[Question]]:
    """Answer JAX's questions of this thread for a mesh, and list those of the program."""
    questions: list[Question] = []
    if mesh is None:
        yield questions
        return
    before = getattr(_here, "answers", None)
    _here.answers = _answers(mesh), questions
    _watch()
    threads = legacy_contexts()
    context = getattr(threads, "env", None)
    if context is not None:
        threads.env = _WatchedContext(context, mesh, questions)
    try:
        yield questions
    finally:
        if context is not None:
            threads.env = context
        _unwatch()
        _here.answers = before


def _watch() -> None:
    with _lock:
        _tracing.append(None)
        if len(_tracing) == 1:
            for name in _NAMES:
                _saved[name] = getattr(jax, name)
                setattr(jax, name, _Watched(name, _saved[name]))


def _unwatch() -> None:
    with _lock:
        _tracing.pop()
        if not _tracing:
            for name, function in _saved.items():
                if isinstance(getattr(jax, name), _Watched):  # and nobody has replaced it since
                    setattr(jax, name, function)


class _Watched:
    """One of JAX's functions, while a step is traced."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._name = name
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        known = getattr(_here, "answers", None)
        place = None if known is None else _asker(sys._getframe(1))
        if known is None or place is None:
            return self._function(*args, **kwargs)
        answers, questions = known
        answer = answers.get(self._name)
        backend = next(iter((*args, *kwargs.values())), None)
        is_other = backend not in (None, answers["default_backend"])
        questions.append(
            Question(f"jax.{self._name}()", place, answer is not None and not is_other)
        )
        if answer is None or is_other:
            return self._function(*args, **kwargs)
        return list(answer) if isinstance(answer, list) else answer


class _WatchedContext:
    """JAX's context of `with mesh:` in this thread, of which some libraries read the mesh.

    So does JAX 0.7 for the specs of constraints, where the mesh in force has no devices.
    """

    def __init__(self, context: Any, mesh: AnyMesh, questions: list[Question]) -> None:
        self._context = context
        self._mesh = mesh
        self._questions = questions

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._context, name)
        if name != "physical_mesh" or not value.empty:
            return value
        frame = sys._getframe(1)
        place = _asker(frame)
        if place is None:
            return self._mesh if frame.f_code.co_name == "with_sharding_constraint" else value
        is_answered = has_devices(self._mesh)
        self._questions.append(Question("the mesh of `with mesh:`", place, is_answered))
        return self._mesh if is_answered else value


def _asker(frame: FrameType) -> Place | None:
    """Return the line that asks; None if JAX itself does."""
    if frame.f_globals.get("__name__", "").partition(".")[0] in ("jax", "shardrules"):
        return None
    line: FrameType | None = frame
    while line is not None and is_library(line.f_code.co_filename):
        line = line.f_back
    line = line or frame
    return Place(line.f_code.co_filename, line.f_lineno)
