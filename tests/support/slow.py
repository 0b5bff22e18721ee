"""What `make test` leaves to `make test-all`: parameters that take long, or that repeat what others show."""

from collections.abc import Iterable
from typing import Any, Final

import pytest

from tests.support import corpus


def slow(*values: Any) -> Any:
    """The parameters of a case that `make test-all` alone runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some(values: Iterable[Any], every: int) -> list[Any]:
    """The first value and every so many-th after it; the others are slow. A tuple is one case."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=() if i % every == 0 else pytest.mark.slow
        )
        for i, value in enumerate(values)
    ]


MODELS: Final = [slow(m) if m in corpus.LARGEST else m for m in corpus.manifest_names()]
"""All manifests."""
