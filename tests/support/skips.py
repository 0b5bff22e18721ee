"""Which libraries may be missing where: a skip for want of another hides what it should have tried."""

import re
import sys

import jax

_NAMED = re.compile(r"(?:could not import '([\w-]+)|^([\w.-]+) is not installed(?:$|: ))")
_IS_OLDEST = jax.__version_info__ < (0, 8)  # the group `oldest` has no other peers
_IS_NEWEST = sys.version_info >= (3, 14)  # for which they have no wheels yet
MAY_BE_MISSING = {
    "eformer": _IS_OLDEST or _IS_NEWEST,
    "fsspec": _IS_OLDEST,
    "haliax": _IS_OLDEST or _IS_NEWEST,
    "keras": _IS_OLDEST,
    "libtpu": not any(path.endswith("-tpu") for path in sys.path),  # where `make test-all` has it
    "moto": True,
    "OR-tools": _IS_OLDEST or _IS_NEWEST,
    "orbax-checkpoint": _IS_OLDEST,
    "qwix": True,  # it brings flax from its repository
    "s3fs": True,
    "scalax": _IS_OLDEST,
}


def why_not_expected(reason: str) -> str | None:
    """Why a test must not be skipped for this reason; None if it may."""
    named = _NAMED.search(reason)
    if not named or MAY_BE_MISSING.get(named[1] or named[2]):
        return None
    return "its library is one that this environment has to have: see tests/support/skips.py"
