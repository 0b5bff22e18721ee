"""The public API is what tests/data/api.txt says; CONTRIBUTING.md says what a change to it takes."""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import shardrules
from tests.support import api
from tests.support.folders import DATA

PINNED = DATA / "api.txt"
EVERY_MODULE = [
    module.name
    for module in pkgutil.walk_packages(shardrules.__path__, "shardrules.")
    if module.name not in ("shardrules._core", "shardrules.__main__")
]


def test_public_api():
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    changes = list(
        difflib.unified_diff(pinned, api.api().splitlines(), "pinned", "now", lineterm="", n=0)
    )
    assert not changes, "see CONTRIBUTING.md; `make api` pins it anew:\n" + "\n".join(changes)


def test_public_modules_have_what_they_offer():
    for name in EVERY_MODULE:
        module = importlib.import_module(name)
        offered = getattr(module, "__all__", [])
        assert len(set(offered)) == len(offered)
        assert [each for each in offered if not hasattr(module, each)] == [], name


def exported(file):
    """{name: module} of what a file imports from the package as itself, for others to take."""
    return {
        alias.name: statement.module
        for statement in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }


def test_the_stub_says_what_is_there():
    exports = exported(Path(shardrules.__file__).with_suffix(".pyi"))
    for name in shardrules._SUBMODULES:
        assert exports.pop(name) == "shardrules"
    moved = {name for names in shardrules._MOVED.values() for name in names.split()}
    assert exports.keys() == set(shardrules.__all__) | moved
    for name in shardrules.__all__:
        assert exports[name] == f"shardrules.{shardrules._MODULES[name]}"
    assert len(shardrules.__all__) <= 53
    text = Path(shardrules.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    listed = text.partition("__all__ = ")[2].partition("]")[0] + "]"
    assert sorted(ast.literal_eval(listed)) == shardrules.__all__


@pytest.mark.parametrize("name", shardrules._MOVED)
def test_names_that_have_moved_warn_and_are_the_same(name):
    module = importlib.import_module(f"shardrules.{name}")
    new = {
        "Buffer",
        "Memory",
        "Totals",
        "Collective",
        "CompileLog",
        "DimensionClass",
        "Place",
        "Program",
        "ProgramTime",
        "Proof",
        "Reshard",
        "Activation",
        "Alternative",
        "Gain",
        "ProofRound",
        "SentBytes",
        "SolutionProof",
        "ClassChoice",
        "RematChoice",
        "Solution",
        "Span",
        "Step",
        "Timeline",
        "Work",
        "Affine",
        "from_hf",
        "inverse",
    }
    moved = set(shardrules._MOVED[name].split())
    stub = Path(module.__file__).with_suffix(".pyi")
    names = exported(stub if stub.exists() else Path(module.__file__))
    assert names.keys() - new == moved
    if stub.exists():
        assert names == {each: f"shardrules.{module._MODULES[each]}" for each in module.__all__}
    for each in moved:
        vars(shardrules).pop(each, None)
        with pytest.warns(DeprecationWarning, match=rf"use shardrules\.{name}\.{each}$"):
            assert getattr(shardrules, each) is getattr(module, each)
        vars(shardrules).pop(each)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'shardrules' has no attribute 'no_such_name'"):
        _ = shardrules.no_such_name
    assert set(dir(shardrules)) >= {"plan", "Rules", "__version__"}


def test_planning_is_imported_on_first_use():
    code = (
        "import sys, shardrules as sr; assert 'shardrules._plan.plan' not in sys.modules;"
        "import numpy; sr.plan({'a': numpy.ones(2)}, [('a', ())], {'dp': 2});"
        "assert 'plan' in vars(sr);"
        "from shardrules import *; assert Plan is sr.Plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
