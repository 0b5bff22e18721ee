"""Runs a test file of another library and prints the outcomes as JSON.

`python -m tests.support.peer_runner flax build/peers/flax-0.12.8/tests/nnx/spmd_test.py --patched` patches the library
first; `--compat` gives the file the names of `shardrules.compat` for flax's own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import types

import pytest

import shardrules

COMPAT = {
    "flax.core.meta": "shardrules.compat.flax_core_meta",
    "flax.core.spmd": "shardrules.compat.flax_core_spmd",
    "flax.linen.spmd": "shardrules.compat.flax_linen_spmd",
}


class Outcomes:
    """A pytest plugin that remembers how each test went."""

    def __init__(self):
        self.of_tests = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.of_tests[report.nodeid] = report.outcome


class CompatNames:
    """A pytest plugin that replaces what the globals of a test file have of flax by what we have."""

    def __init__(self):
        self.ours = {}
        for theirs, ours in COMPAT.items():
            of_flax, of_us = map(importlib.import_module, (theirs, ours))
            for name in of_us.__all__:
                if hasattr(of_flax, name):
                    self.ours[id(getattr(of_flax, name))] = (name, getattr(of_us, name))
        self.used = set()

    def pytest_collection_modifyitems(self, items):
        for namespace in {id(vars(i.module)): vars(i.module) for i in items}.values():
            for name, value in list(namespace.items()):
                namespace[name] = self.replaced(value)

    def replaced(self, value):
        if id(value) in self.ours:
            name, ours = self.ours[id(value)]
            self.used.add(name)
            return ours
        is_of_flax = isinstance(value, types.ModuleType) and value.__name__.startswith("flax")
        return View(value, self) if is_of_flax else value


class View(types.ModuleType):
    """A module of flax with our names."""

    def __init__(self, module, names):
        super().__init__(module.__name__)
        self._module, self._names = module, names

    def __getattr__(self, name):
        return self._names.replaced(getattr(self._module, name))


def main(library, file, *flags):
    replaced = shardrules.patch(library).replaced if "--patched" in flags else ()
    outcomes = Outcomes()
    names = [CompatNames()] if "--compat" in flags else []
    # This project's configuration and conftest.py are no part of it.
    options = ["-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    sys.argv[1:] = []  # absl reads them
    stdout, sys.stdout = sys.stdout, sys.stderr
    pytest.main([*options, file], plugins=[outcomes, *names])
    sys.stdout = stdout
    replaced = [*replaced, *(name for plugin in names for name in sorted(plugin.used))]
    print(json.dumps({"replaced": replaced, "outcomes": outcomes.of_tests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
