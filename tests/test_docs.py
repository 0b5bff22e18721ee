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
    *(m.name for m in pkgutil.walk_packages(shardrules.__path__, "shardrules.")),
]
# Values that are read, not made; and what needs arrays on several devices to be worth showing.
WITHOUT_EXAMPLES = {
    "AxisMetadata", "Change", "Counters", "Coverage", "Decision", "DeviceBytes", "Dialect", "Difference", "Explanation", "FileError", "Finding", "Findings", "Kind", "LogicalDialect", "Plan", "PlanDiff", "RulesFallback", "Sweep", "SweepRow", "Tried", "make_shard_and_gather_fns", "with_sharding_constraint",
}  # fmt: skip
README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    failures, _ = doctest.testmod(importlib.import_module(name))
    assert failures == 0


def test_public_docstrings_have_examples():
    public = (name for name in MODULES if name == "shardrules" or ".compat." in name)
    modules = map(importlib.import_module, public)
    for module in modules:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if callable(thing) and name not in WITHOUT_EXAMPLES:
                assert ">>>" in (thing.__doc__ or ""), (module.__name__, name)


def test_readme():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
        # A comment behind an expression says its value.
        for line in block.splitlines():
            found = re.fullmatch(r"(compiled\..*?)\s+# (\d|\[.*\])", line)
            if found:
                assert eval(found[1], names) == ast.literal_eval(found[2])
            found = re.fullmatch(r"(sr\.spec_for.*?)\s+# (P\(.*?\)):.*", line)
            if found:
                assert eval(found[1], names) == eval(found[2], names)


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
    assert "44,544 leaves of 45,395 (1.31 TB of 1.34 TB) match no rule but the catch-all" in printed
    assert "check: 0 errors" in printed
