"""shardrules decides how every array of a huge JAX model is sharded.

Start with `match_partition_rules` and `named_shardings`. `shard` and `with_sharding_constraint`
apply shardings to arrays, `plan` works without devices, and `Rules` compiles a rule list once.
"""

import atexit
import sys

from shardrules._base import lazy

# Matching needs neither planning nor files nor proofs. Type checkers and IDEs read the stub too.
_get, _NAMES = lazy(__name__, __file__)
_SUBMODULES = ("compat", "dialects", "types")
__all__ = [name for name in _NAMES if name not in _SUBMODULES]
__version__ = "0.4.0"


def __getattr__(name: str) -> object:
    return _get(name)


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(_NAMES))


def _leave() -> None:
    """Tell the other processes of a job, which may be waiting for this one, that it ends."""
    if "jax" in sys.modules:
        from shardrules._base.jax_names import is_coordinated

        if is_coordinated():
            from shardrules._place.processes import leave

            leave()


# Before JAX's handler, which waits for all: if JAX came later, the first joint call sees to that.
atexit.register(_leave)
