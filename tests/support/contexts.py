"""What a test may find itself in: mesh contexts of the JAX that is installed, compilers, AddressSanitizer, a container."""

import os
import warnings
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import jax
import pytest

not_on_jax_0_7 = pytest.mark.skipif(
    jax.__version_info__ < (0, 8),
    reason="JAX 0.7 cannot: CPU programs with pinned_host, constraints where some axes are manual",
)
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: make test-all")
_PLUGINS = find_spec("jax_plugins") and [find_spec(f"jax_plugins.xla_cuda{number}") for number in (12, 13)]
needs_cuda = pytest.mark.skipif(
    not any(_PLUGINS or ()) or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason="JAX's plugin for CUDA is not installed, or JAX_PLATFORMS not cpu: see CONTRIBUTING.md",
)
measures_memory = pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="ASan keeps what is freed")


def pseudo_terminal() -> tuple[int, int]:
    """Both ends of one. A container may have none; the test is skipped then."""
    try:
        return os.openpty()
    except OSError as error:
        pytest.skip(f"no pseudo-terminal can be opened here: {error}")


def outcome(call, *args, **named):
    """What a call returns, or the type of its error: libraries and ours are to have the same."""
    try:
        return call(*args, **named)
    except Exception as error:
        return type(error)


def nothing(mesh):
    """No context, where others are of a mesh."""
    return nullcontext()


@contextmanager
def legacy(mesh):
    """`with mesh:`, whose deprecation warning is the user's, not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield mesh
    finally:
        mesh.__exit__(None, None, None)
