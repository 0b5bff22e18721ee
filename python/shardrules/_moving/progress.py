"""How far a load has come: a function of the caller's, or a bar of rich.

rich draws the bar on a terminal and in a notebook. Must not know what is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from shardrules._format import shown

__all__ = ["Progress", "checked_progress", "reported"]

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


def checked_progress(progress: object) -> bool | Progress | None:
    """The value, if it is a truth value, None or a function.

    Raises:
        TypeError: It is something else.
        ImportError: It is True, and rich is not installed.
    """
    if progress is True:
        try:
            import rich.progress  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"progress: the bar needs rich, which cannot be imported here ({error}); "
                "pip install 'shardrules[cli]', or give a function"
            ) from error
        return True
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise TypeError(
            f"progress is {shown(progress)}; it must be True or a function of two numbers"
        )
    return cast("Progress", progress)


@contextmanager
def reported(progress: bool | Progress | None, what: str) -> Iterator[Progress | None]:
    """The function to call; for True it moves a bar, in the first process alone."""
    import jax

    if progress is not True:
        yield progress or None
        return
    if jax.process_index() != 0:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    with Bar(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
