"""Calls that several processes make together: each one agrees on it first, or all have an error.

Costs a microsecond or two in one process. Must not know what is agreed on, nor how processes talk.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from shardrules._sharding.leaf_rows import Row

__all__ = ["JointCall"]


class JointCall:
    """What one process does of a call that all make: in the `with`, up to the agreement.

    Whatever is raised in it, SystemExit and KeyboardInterrupt too, becomes an error in the other
    processes, unless `alone` or `agree` was called before.

    Attributes:
        joint: Whether other processes are still to be asked.
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
        """The call touches this process's devices alone. Leaves a note for those who wait."""
        if self.joint:
            from shardrules._sharding import coordination

            self.joint = False
            coordination.note(f"{self._name} on devices of its own")

    def agree(self, rows: Callable[[], list[Row]]) -> None:
        """Returns when all processes are about to do the same.

        Raises:
            RuntimeError: They are not; or one has failed, or has not come in time; or there is no
                coordination service.
            ValueError: The environment's time limit is no number above 0.
        """
        if self.joint:
            from shardrules._sharding import coordination

            own, limit = rows(), coordination.wait_limit()
            self.joint = False
            coordination.settle(self._name, own, limit)


def _leave() -> None:
    distributed = sys.modules.get("jax._src.distributed")
    if distributed is not None and distributed.global_state.client is not None:
        from shardrules._sharding import coordination

        coordination.leave()


def _before_jax_ends() -> None:
    """Registers `_leave` last, so that it runs before JAX's own, which waits for all processes."""
    atexit.unregister(_leave)
    atexit.register(_leave)


_before_jax_ends()
