"""The public API is what tests/data/api.txt says, and `help` shows it; CONTRIBUTING.md says what a change to it takes."""

import ast
import difflib
import importlib
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import get_type_hints

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
    changes = list(difflib.unified_diff(pinned, api.api().splitlines(), "pinned", "now", lineterm="", n=0))
    assert not changes, "see CONTRIBUTING.md; `python -m tests.support.api` pins it anew:\n" + "\n".join(changes)


def test_public_modules_have_what_they_offer():
    for name in EVERY_MODULE:
        module = importlib.import_module(name)
        offered = getattr(module, "__all__", [])
        assert len(set(offered)) == len(offered)
        assert [each for each in offered if not hasattr(module, each)] == [], name


@pytest.mark.parametrize("module", [shardrules, shardrules.types])
def test_each_name_of_a_stub_is_that_of_its_module(module):
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    exports = {
        alias.name: statement.module
        for statement in stub.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }
    for name, source in exports.items():
        vars(module).pop(name, None)
        assert getattr(module, name) is getattr(importlib.import_module(source), name)
        assert name in vars(module)
    submodules = {name for name, source in exports.items() if source == "shardrules"}
    assert sorted(exports.keys() - submodules) == module.__all__
    assert exports.keys() <= set(dir(module))
    assert len(module.__all__) <= 53


def test_unknown_names():
    with pytest.raises(AttributeError, match="module 'shardrules' has no attribute 'no_such_name'"):
        _ = shardrules.no_such_name
    assert set(dir(shardrules)) >= {"plan", "Rules", "__version__"}


def test_jax_and_planning_are_imported_on_first_use():
    code = (
        "import sys, shardrules as sr; sr.Rules([('a', ('tp',)), ('b', None)]).first_match('b');"
        "assert not {'jax', 'shardrules._plan.plan'} & sys.modules.keys();"
        "import numpy; sr.plan({'a': numpy.ones(2)}, [('a', ())], {'dp': 2});"
        "assert 'plan' in vars(sr);"
        "from shardrules import *; assert Plan is sr.Plan"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What no page of `help` shows: how typing keeps a name, where an object is, a record's every field.
UNREADABLE = re.compile(r"ForwardRef|<object object| at 0x|= \w*Dialect\(|= Correction\(absent")


def public_callables():
    found = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in api.modules()
        for name in api.public_names(module)
    }
    return {
        name: one
        for name, one in found.items()
        if callable(one) and getattr(one, "__module__", "").startswith("shardrules")
    }


def test_help_is_readable():
    pages = {name: pydoc.plain(pydoc.render_doc(one)) for name, one in public_callables().items()}
    assert len(pages) > 145
    # What a class inherits from Python is not ours to word.
    ours = {name: re.split("inherited from collections", page)[0] for name, page in pages.items()}
    wrong = {name: set(UNREADABLE.findall(page)) for name, page in ours.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_defaults_are_short():
    """Of every public function, class and method."""
    count = 0
    for name, one in public_callables().items():
        members = vars(one).items() if inspect.isclass(one) else ()
        methods = [it for own, it in members if inspect.isfunction(it) and own[0] != "_"]
        for thing in (one, *methods):
            with suppress(ValueError, TypeError):  # of an enum, or one made in C
                for parameter in inspect.signature(thing).parameters.values():
                    assert len(repr(parameter.default)) <= 60, (name, thing, parameter)
                    count += 1
    assert count > 500


def test_annotations_still_have_types():
    assert get_type_hints(shardrules.types.CutReason)["axes"] == tuple[str, ...]
