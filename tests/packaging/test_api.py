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
# Folders whose own module has a docstring alone; and api, which has imports alone.
FOLDERS = ("_files", "_logical", "_matching", "_moving", "_patching", "_planning", "_sharding", "_suggesting",
           "_verifying")  # fmt: skip
ROOMS = ("api", "asking", "asking.checks", "asking.collectives", "locks", "placing", "showing")
EMPTY = [
    *(f"shardrules.{folder}" for folder in FOLDERS),
    *(f"shardrules._planning.{room}" for room in ROOMS),
    "shardrules._moving.api",
    "shardrules._verifying.api",
    "shardrules._suggesting.api",
]
OFFERING = ["shardrules", *(name for name in EVERY_MODULE if name not in EMPTY)]


def test_public_api():
    pinned = PINNED.read_text(encoding="utf-8").splitlines()
    changes = list(
        difflib.unified_diff(pinned, api.api().splitlines(), "pinned", "now", lineterm="", n=0)
    )
    assert not changes, "see CONTRIBUTING.md; `make api` pins it anew:\n" + "\n".join(changes)


@pytest.mark.parametrize("name", EVERY_MODULE)
def test_modules_offer_what_others_take(name):
    source = Path(importlib.import_module(name).__file__).read_text(encoding="utf-8")
    taken = {
        (statement.module, alias.name)
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.ImportFrom) and statement.module in EVERY_MODULE
        for alias in statement.names
    }
    for giver, taken_name in taken:
        module = importlib.import_module(giver)
        # Modules, and types for type checkers alone, cannot be in __all__.
        if f"{giver}.{taken_name}" not in EVERY_MODULE and hasattr(module, taken_name):
            assert taken_name in getattr(module, "__all__", [taken_name]), giver


@pytest.mark.parametrize("name", OFFERING)
def test_modules_have_what_they_offer(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])  # not of every private module
    assert len(set(names)) == len(names)
    assert all(hasattr(module, offered) for offered in names)


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'shardrules' has no attribute 'no_such_name'"):
        _ = shardrules.no_such_name
    assert set(dir(shardrules)) >= {"plan", "Rules", "__version__"}


def test_planning_is_imported_on_first_use():
    code = (
        "import sys, shardrules as sr; assert 'shardrules._planning.plan' not in sys.modules;"
        "import numpy; sr.plan({'a': numpy.ones(2)}, [('a', ())], {'dp': 2});"
        "assert 'plan' in vars(sr);"
        "from shardrules import *; assert Plan is sr.Plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
