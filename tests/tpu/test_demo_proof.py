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
    assert lines[0].startswith("compiled for v5p:4x4x4, fsdp=16,tp=4 (")
    assert lines[1].startswith("each device sends ")
    assert lines[-1].startswith("nothing found: 2 of 3 inputs planned, 2 of 2 outputs planned")


def test_without_the_compiler_it_says_how_to_get_it(console, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    demo._print_proof(console)
    assert console.file.getvalue().rstrip().endswith("pip install 'shardrules[tpu]'")
