"""What tests of the TPU's compiler need."""

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: make test-all"
)
