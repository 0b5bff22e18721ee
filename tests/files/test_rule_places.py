"""On which lines of a TOML file rules begin, for annotations."""

from __future__ import annotations

import sys

import pytest

from shardrules._plan.files.rules import read_rule_source, rule_places

TABLES = """\
dialect = "eformer"  # [[rules]]
replicated = ["a[[rules]]", '[[rules]]']

[[rules]]                 # line 4
pattern = "a"
spec = ["fsdp"]
# About the second.
  [[ rules ]]             # line 8
pattern = "[[rules]]"
spec = {fsdp = "fsdp"}
[rules.correction]
indivisible = "error"
"""


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("tables.toml", TABLES, (4, 8)),
        ("tables.toml", TABLES.replace("\n", "\r\n"), (4, 8)),
        ("list.toml", "rules = [['a', []],\n['b', []]]", ()),
        ("list.json", '[["a", []], ["b", []]]', ()),
        # What looks like a table, or is hidden: their number is another.
        ("text.toml", TABLES.replace('"a"', "'''\n[[rules]]\n'''"), ()),
        ("quoted.toml", '[["rules"]]\npattern = "a"\nspec = []\n', ()),
    ],
)
def test_lines_of_a_file(write, name, text, lines):
    path = write(name, text)
    assert rule_places(path, len(read_rule_source(path).rules)) == (path, lines)


def test_a_module_is_a_file_without_lines(tmp_path, monkeypatch):
    """If it is one of the repository; and standard input is none."""
    (tmp_path / "lined_rules.py").write_text("RULES = [('a', 'tp')]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lined_rules", raising=False)
    assert len(read_rule_source("lined_rules:RULES").rules) == 1
    assert rule_places("lined_rules:RULES", 1) == ("lined_rules.py", ())
    assert rule_places("json:loads", 2) == (None, ())
    assert rule_places("-", 3) == (None, ())
