"""The table of the front page: its lines find the mistakes beside which they stand."""

import re

import jax
import pytest

import shardrules as sr
from benchmarks.tables import front_table, with_text
from tests.support.folders import ROOT

TABLE = re.compile(r"^\| what goes wrong .*?\n\n", re.M | re.S)
MESH = {"fsdp": 4, "tp": 16}
TREE = {"q": jax.ShapeDtypeStruct((8192, 64, 128), "bfloat16"), "k": jax.ShapeDtypeStruct((8192, 8, 128), "bfloat16")}
RIGHT = [("q", ("fsdp", "tp")), ("k", ("fsdp",))]
WRONG = {
    "catch-all": [("query|key", ("fsdp", "tp")), (".*", ())],
    "unknown-axis": [("q", ("fsdp", "tpp")), ("k", ("fsdp",))],
    "correction": [("q|k", (None, "tp"))],
}


def table(page):
    return TABLE.search((ROOT / page).read_text(encoding="utf-8"))[0]


def test_the_readme_shows_the_speed_of_the_report():
    """It showed another run, with other bars missed; `python -m benchmarks --write` writes both."""
    report = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert with_text(readme, "speed", front_table(report)) == readme
    missed = report.replace("eformer >= 60x: met", "eformer >= 60x: MISSED")
    assert missed != report
    assert front_table(missed) != front_table(report)


def test_both_front_pages_have_the_same_table():
    assert table("README.md").replace("](docs/", "](") == table("docs/index.md")


@pytest.mark.parametrize("kind", WRONG)
def test_the_line_finds_a_mistake_and_passes_right_rules(kind):
    (level,) = re.findall(r'`plan\.check\(\)\.raise_for\("(\w+)"\)`', table("README.md"))
    sr.plan(TREE, RIGHT, MESH).check().raise_for(level)
    findings = sr.plan(TREE, WRONG[kind], MESH).check()
    assert kind in {one.kind for one in findings}
    with pytest.raises(sr.FindingsError):
        findings.raise_for(level)
