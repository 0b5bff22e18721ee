"""Parts of checkpoints: which arrays are loaded, and what is made in the place of missing ones."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules._base.arguments import boolean, check_type
from shardrules._base.text import counted, shown
from shardrules._checkpoint.problems import Problems
from shardrules._plan.fold import fold_paths

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

_LOG = logging.getLogger("shardrules")


class Selection:
    """What is loaded of a checkpoint; by default all, and into a tree that it fills.

    Args:
        strict: Whether arrays that the tree does not have are an error.
        only: A regex that the paths of arrays to load have in them. None: all.
        missing: By a regex for paths of leaves that the checkpoint lacks, what they become.

    Attributes:
        left_out: The arrays that the tree does not have.
        made: The paths of leaves that are made.
    """

    def __init__(
        self, strict: Any = True, only: Any = None, missing: Mapping[str, Any] | None = None
    ) -> None:
        self.strict = boolean("strict", strict)
        check_type("only", only, str | re.Pattern | None, "a regex, or None")
        check_type("missing", missing, Mapping | None, "a dict of {pattern: init}, or None")
        self.only = None if only is None else _checked_regex("only", only)
        self.missing: dict[re.Pattern[str], Any] = {}
        for pattern, init in (missing or {}).items():
            check_type("missing", pattern, str | re.Pattern, "a dict whose keys are regexes")
            self.missing[_checked_regex("missing", pattern)] = init
            if init is None or isinstance(init, str):
                raise TypeError(
                    f"missing: {pattern!r} has {shown(init)}; give a number, an array, or a "
                    "function of shape and dtype such as jax.numpy.zeros"
                )
        self.left_out: list[str] = []
        self.made: dict[str, Any] = {}

    @property
    def options(self) -> str:
        """Return what several processes compare."""
        only = None if self.only is None else self.only.pattern
        return f"strict={self.strict}, only={only!r}, missing={[p.pattern for p in self.missing]}"

    def wants(self, path: str) -> bool:
        """Say whether the array at this path is loaded."""
        return self.only is None or self.only.search(path) is not None

    def makes(self, path: str) -> bool:
        """Say whether a leaf that the checkpoint lacks is made; it is noted then."""
        for pattern, init in self.missing.items():
            if pattern.search(path):
                self.made[path] = init
                return True
        return False

    def leaves_out(self, name: str) -> bool:
        """Say whether an array that the tree does not have is left out; it is noted then."""
        if not self.strict:
            self.left_out.append(name)
        return not self.strict or not self.wants(name)

    def check(self, paths: list[str], problems: Problems) -> None:
        """Note patterns that find none of the paths."""
        patterns = [("missing", pattern) for pattern in self.missing]
        if self.only is not None:
            patterns.append(("only", self.only))
        for keyword, pattern in patterns:
            if not any(map(pattern.search, paths)):
                problems.add(f"{keyword} finds no such path; correct the pattern", pattern.pattern)

    def tell(self, name: str) -> None:
        """Log what is left out and what is made."""
        import jax

        for what, paths in (("left out", self.left_out), ("made", list(self.made))):
            if paths and jax.process_index() == 0:
                count, patterns = counted(len(paths), "array"), ", ".join(fold_paths(paths))
                _LOG.warning("load: %s: %s %s: %s", name, count, what, patterns)


def _checked_regex(keyword: str, pattern: str | re.Pattern[str]) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{keyword}: {pattern!r} is not a regex: {error}") from None


def initial(path: str, init: Any, like: Any, sharding: NamedSharding) -> Any:
    """Make a leaf on its devices."""
    try:
        make = _init_program(init, like.shape, like.dtype, sharding)
    except TypeError:  # an array cannot be hashed
        make = _init_program.__wrapped__(init, like.shape, like.dtype, sharding)
    try:
        return make()
    except _ShapeError as error:
        raise ValueError(
            f"missing: the init of {path} makes {error}; the tree wants {list(like.shape)}"
        ) from None


class _ShapeError(Exception):
    """Shape that an init makes."""


@lru_cache(maxsize=256)
def _init_program(
    init: Any, shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    def make() -> Any:
        if not callable(init) and np.ndim(init) == 0:
            return jnp.full(shape, init, dtype)
        values = jnp.asarray(init(shape, dtype) if callable(init) else init)
        if values.shape != shape:
            raise _ShapeError(list(values.shape))
        return values.astype(dtype)

    return jax.jit(make, out_shardings=sharding)
