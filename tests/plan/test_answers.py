"""Tables of texts: aligned, and as HTML."""

from __future__ import annotations

from shardrules._plan.answers import Column, Table

COLUMNS = [Column("path"), Column("leaves", is_right=True), Column("spec")]


def test_lines_are_aligned():
    assert Table(COLUMNS[1:], [("1,024", "P('tp')"), ("3", "")]).lines() == [
        "leaves  spec",
        " 1,024  P('tp')",
        "     3",
    ]


def test_a_cell_of_a_megabyte_stands_out():
    huge = Table(COLUMNS[1:], [("1" * 1_000_000, "P()"), ("3", "P()")]).lines()
    assert [len(line) for line in huge[::2]] == [206, 205]


def test_html_is_escaped():
    assert Table(COLUMNS[2:], [("<b>",), ("x",)]).html(1) == (
        "<table><thead><tr><th>spec</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr>"
        '<tr><td colspan="1">... and 1 more row; print shows them</td></tr></tbody></table>'
    )
