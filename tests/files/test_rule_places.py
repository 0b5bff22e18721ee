"""On which lines of a file rules begin: TOML and YAML, and files that hide it."""

from __future__ import annotations

import sys

import pytest

from shardrules._plan.files.rules import read_rule_source, rule_places

MULTILINE = f'\npattern = {3 * chr(39)}\n[[rules]]\n{3 * chr(39)}\nspec = ["fsdp"]\n'
TABLES = f"""\
dialect = "eformer"  # [[rules]]
replicated = ["a[[rules]]", '[[rules]]']

[[rules]]                 # line 4{MULTILINE}
# About the second.
  [[ rules ]]             # line 11
pattern = "[[rules]]"
spec = {{fsdp = "fsdp"}}
[rules.correction]
indivisible = "error"
[[rules]]
pattern = "b"
spec = []
"""
INLINE = """
# rules = [
rules = [ ['\\[a', ["fsdp"]],  # ], [
  {pattern = "b", spec = [[], "tp"]}, ["c", []],

  ["d", []],
]
data_axes = ["dp"]
"""
YAML = """\
base_config: base.yml
logical_axis_rules: [
  ['activation_batch', ['data', 'fsdp']],
  # a comment
  ['embed',
   ['fsdp']], ['mlp', 'tensor'],
]
"""


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("tables.toml", TABLES, (4, 11, 16)),
        ("tables.toml", TABLES.replace("\n", "\r\n"), (4, 11, 16)),
        ("inline.toml", INLINE, (3, 4, 4, 6)),
        ("list.json", '[["a", []], ["b", []]]', ()),
        ("rules.yml", YAML, (3, 5, 6)),
    ],
)
def test_lines_of_a_file(write, name, text, lines):
    path = write(name, text)
    assert rule_places(path, len(read_rule_source(path).rules)) == (path, lines)


def test_no_line_is_known_where_the_number_of_rules_is_another(write):
    """As in a file whose rules are under a quoted key, which hides them."""
    path = write("rules.toml", TABLES)
    assert [rule_places(path, rules)[1] for rules in (0, 2, 4)] == [()] * 3
    path = write("hidden.toml", '[["rules"]]\npattern = "a"\nspec = []\n')
    assert rule_places(path, len(read_rule_source(path).rules)) == (path, ())


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
