"""Docstrings and the README run as tests."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import shardrules

MODULES = [
    "shardrules",
    *(f"shardrules.{m.name}" for m in pkgutil.iter_modules(shardrules.__path__)),
]
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_public_docstrings_have_examples():
    for name in ("Rules", "match_partition_rules"):
        assert ">>>" in getattr(shardrules, name).__doc__


def test_readme():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        # A comment behind an expression says its value.
        for line in block.splitlines():
            found = re.fullmatch(r"(compiled\..*?)\s+# (\d|\[.*\])", line)
            if found:
                assert eval(found[1], names) == ast.literal_eval(found[2])


def test_import_is_light():
    """JAX is imported only when one of its objects is needed."""
    import subprocess
    import sys

    code = (
        "import sys, shardrules; rules = shardrules.Rules([('a', ('tp',)), ('b', None)]);"
        "assert rules.first_match('b') == 1; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_demo(capsys):
    from shardrules import demo

    assert demo.main() == 0
    printed = capsys.readouterr().out
    assert "took 424 leaves" in printed
    assert "Rules that match nothing: 1" in printed
