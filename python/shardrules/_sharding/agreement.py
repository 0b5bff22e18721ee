"""Calls that several processes make together: all agree on the call, or all get an error.

Costs a microsecond or two in one process. Must not know what the processes agree on, nor how they
communicate.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from types import TracebackType

from shardrules._jax import is_coordinated
from shardrules._sharding.leaf_rows import Row

__all__ = ["JointCall"]


class JointCall:
    """A context manager for one process's part of a joint call, up to the agreement.

    Any exception in the body, also SystemExit and KeyboardInterrupt, becomes an error in the other
    processes, unless `alone` or `agree` was called before it.

    Attributes:
        joint: Whether the other processes still have to agree.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.joint = False

    def __enter__(self) -> JointCall:
        import jax

        self.joint = jax.process_count() > 1
        if self.joint:
            _before_jax_ends()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and self.joint:
            from shardrules._sharding import coordination

            coordination.fail(self._name, error)

    def alone(self) -> None:
        """Ends the joint call, which uses only this process's devices. Leaves a note for others."""
        if self.joint:
            from shardrules._sharding import coordination

            self.joint = False
            coordination.note(f"{self._name} on devices of its own")

    def agree(self, rows: Callable[[], list[Row]]) -> None:
        """Waits until all processes have the same rows.

        Raises:
            RuntimeError: Their rows differ, a process has failed or is late, or there is no
                coordination service.
            ValueError: The environment's time limit is not a number above 0.
        """
        if self.joint:
            from shardrules._sharding import coordination

            own, limit = rows(), coordination.wait_limit()
            self.joint = False
            coordination.settle(self._name, own, limit)


def _leave() -> None:
    if is_coordinated():
        from shardrules._sharding import coordination

        coordination.leave()


def _before_jax_ends() -> None:
    """Registers `_leave` last, so that it runs before JAX's handler, which waits for all."""
    atexit.unregister(_leave)
    atexit.register(_leave)


_before_jax_ends()
