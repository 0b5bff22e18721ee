"""The table of who looks at what is one: in the README, the site's first page, and each docstring."""

import inspect

import pytest

import shardrules as sr
from tests.support.folders import ROOT

PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "docs/index.md")}
LOOKERS = {"check": sr.Plan.check, "prove": sr.prove, "verify": sr.verify, "audit": sr.audit, "rehearse": sr.rehearse}


def rows(text):
    """(what one has, how it is looked at) of each row."""
    lines = text.partition("| you have | it looks |")[2].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")[:2]) for line in lines]


def test_each_that_looks_has_a_row():
    of_readme, of_index = map(rows, PAGES.values())
    assert of_readme == of_index
    assert [call.split(".")[1].split("(")[0] for _, call in of_readme] == [*LOOKERS]


@pytest.mark.parametrize("name", LOOKERS)
def test_each_docstring_has_the_table(name):
    assert rows(inspect.getdoc(LOOKERS[name])) == rows(PAGES["README.md"])
