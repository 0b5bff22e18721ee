"""What tests of the compiler for CUDA need."""

import os

import pytest

from shardrules._program.topologies.topology import has_plugin

needs_cuda = pytest.mark.skipif(
    not has_plugin() or os.environ.get("JAX_PLATFORMS") != "cpu",
    reason="JAX's plugin for CUDA is not installed, or JAX_PLATFORMS not cpu: see CONTRIBUTING.md",
)
