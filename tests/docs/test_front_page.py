"""The tables of the front page: lines find the mistakes beside which they stand; each docstring has who looks at what."""

import inspect
import re

import jax
import pytest

import shardrules as sr
from benchmarks.tables import front_table, with_text
from tests.support.folders import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MESH = {"fsdp": 4, "tp": 16}
TREE = {"q": jax.ShapeDtypeStruct((8192, 64, 128), "bfloat16"), "k": jax.ShapeDtypeStruct((8192, 8, 128), "bfloat16")}
RIGHT = [("q", ("fsdp", "tp")), ("k", ("fsdp",))]
WRONG = {
    "catch-all": [("query|key", ("fsdp", "tp")), (".*", ())],
    "unknown-axis": [("q", ("fsdp", "tpp")), ("k", ("fsdp",))],
    "correction": [("q|k", (None, "tp"))],
}


def test_the_readme_shows_the_speed_of_the_report():
    """It showed another run, with other bars missed; `python -m benchmarks --write` writes both."""
    report = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
    assert with_text(README, "speed", front_table(report)) == README
    missed = report.replace("identity <= 0.5x: met", "identity <= 0.5x: MISSED")
    assert missed != report
    assert front_table(missed) != front_table(report)


@pytest.mark.parametrize("kind", WRONG)
def test_the_line_finds_a_mistake_and_passes_right_rules(kind):
    (level,) = re.findall(r'`plan\.check\(\)\.raise_for\("(\w+)"\)`', README)
    sr.plan(TREE, RIGHT, MESH).check().raise_for(level)
    findings = sr.plan(TREE, WRONG[kind], MESH).check()
    assert kind in {one.kind for one in findings}
    with pytest.raises(sr.FindingsError):
        findings.raise_for(level)


LOOKERS = {"check": sr.Plan.check, "prove": sr.prove, "verify": sr.verify, "audit": sr.audit, "rehearse": sr.rehearse}


def rows(text):
    """(what one has, how it is looked at) of each row."""
    lines = text.partition("| you have | it looks |")[2].partition("\n\n")[0].splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("| ").split("|")[:2]) for line in lines]


def test_each_that_looks_has_a_row():
    assert [call.split(".")[1].split("(")[0] for _, call in rows(README)] == [*LOOKERS]


@pytest.mark.parametrize("name", LOOKERS)
def test_each_docstring_has_the_table(name):
    assert rows(inspect.getdoc(LOOKERS[name])) == rows(README)
