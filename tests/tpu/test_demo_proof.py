"""`make demo` ends with a proof, if the TPU's compiler is there."""

from __future__ import annotations

import importlib.util
import io

import pytest
from rich.console import Console

from shardrules import demo
from tests.tpu.marks import needs_libtpu


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=200, highlight=False, markup=False)


@needs_libtpu
def test_it_proves_a_layer(console):
    demo._print_proof(console)
    lines = console.file.getvalue().splitlines()
    assert lines[0].startswith("it fits: ")
    assert " of 103 GB, on v5p:8x8x8, fsdp=64,tp=8 (" in lines[0]
    assert lines[1].startswith("each device sends ")


def test_without_the_compiler_xla_for_cpu_is_asked(console, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    demo._print_proof(console)
    lines = console.file.getvalue().splitlines()
    assert " on fsdp=64,tp=8 by XLA for CPU: a TPU's partitioner may choose otherwise" in lines[0]
    assert lines[1].endswith("pip install 'shardrules[tpu]'")
    assert lines[2].startswith("each device sends ")
