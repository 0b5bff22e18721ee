"""Runs a test file of another project, tests/vendor/<library>/<file>, and prints the outcomes as JSON.

`python -m tests.vendored_runner flax/spmd_test.py --patched` patches that library first.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import shardrules


class Outcomes:
    """A pytest plugin that remembers how each test went."""

    def __init__(self):
        self.of_tests = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.of_tests[report.nodeid] = report.outcome


def main(file, *flags):
    replaced = shardrules.patch(file.split("/")[0]).replaced if "--patched" in flags else ()
    outcomes = Outcomes()
    # This project's configuration and conftest.py are no part of it.
    options = ["-q", "--noconftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    sys.argv[1:] = []  # absl reads them
    stdout, sys.stdout = sys.stdout, sys.stderr
    path = Path(__file__).parent / "vendor" / file
    pytest.main([*options, str(path)], plugins=[outcomes])
    sys.stdout = stdout
    print(json.dumps({"replaced": replaced, "outcomes": outcomes.of_tests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
