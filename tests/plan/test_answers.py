"""Tables of texts: aligned, narrow, and as HTML."""

from __future__ import annotations

import pytest

from shardrules._plan.answers import Column, Table, elided

COLUMNS = [Column("path", is_elided=True), Column("leaves", is_right=True, is_optional=True), Column("spec")]
LONG = "model/layers/{0..2}/attention/query/kernel"
TABLE = Table(COLUMNS, [("a", "1,024", "P('tp')"), (LONG, "3", "P()")])


def test_lines_are_aligned():
    assert Table(COLUMNS[1:], [("1,024", "P('tp')"), ("3", "")]).lines() == [
        "leaves  spec",
        " 1,024  P('tp')",
        "     3",
    ]


def test_a_cell_of_a_megabyte_stands_out():
    huge = Table(COLUMNS[1:], [("1" * 1_000_000, "P()"), ("3", "P()")]).lines()
    assert [len(line) for line in huge[::2]] == [206, 205]


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (42, LONG),
        (41, "model/layers/.../attention/query/kernel"),
        (38, "model/layers/{0..2}/.../query/kernel"),
        (32, "model/layers/.../query/kernel"),
        (24, "model/.../query/kernel"),
        (15, ".../kernel"),
        (9, "mod...nel"),
        (1, "m...l"),
    ],
)
def test_a_path_loses_its_middle(width, text):
    assert elided(LONG, width) == text


@pytest.mark.parametrize("width", range(1, 100))
def test_a_table_is_as_wide_as_it_may_be(width):
    lines = TABLE.narrow(width).lines()
    assert max(map(len, lines)) <= max(width, 24 + 2 + 7)
    assert ("leaves" in lines[0]) == (width >= 24 + 2 + 6 + 2 + 7)
    assert (LONG in lines[2]) == (width >= len(LONG) + 2 + 6 + 2 + 7)


def test_html_is_escaped():
    page = Table(COLUMNS[2:], [("<b>",)]).html("a & b", "... and 1 more row")
    assert page == (
        "<table><caption>a &amp; b</caption><thead><tr><th>spec</th></tr></thead>"
        "<tbody><tr><td>&lt;b&gt;</td></tr>"
        '<tr><td colspan="1">... and 1 more row</td></tr></tbody></table>'
    )
