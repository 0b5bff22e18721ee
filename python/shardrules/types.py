"""Types of results, for annotations and `isinstance`; nobody needs to construct them."""

from shardrules._base import lazy

# Most of the types' modules import JAX. Type checkers read `types.pyi` as well.
__getattr__, _NAMES = lazy(__name__, __file__)
__all__ = _NAMES  # noqa: PLE0605


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(_NAMES))
