"""On which lines of a file rules begin: every form of rule file, and files that hide it."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from shardrules._plan.files.rule_places import rule_places
from shardrules._plan.files.rules import read_rule_source

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
JSON = """{
 "replicated": ["rules", "\\\\["],
 "rules": [
  ["a\\"]", ["tp"]], {"pattern": "b",
   "spec": []},
  ["c", []]
 ]
}"""
YAML = """\
base_config: base.yml
logical_axis_rules: [
  ['activation_batch', ['data', 'fsdp']],
  # a comment
  ['embed',
   ['fsdp']], ['mlp', 'tensor'],
]
"""
PYTHON = """\
import shardrules as sr

RULES = []
RULES: list = [
    ("a", "tp"),

    ("b", ()),
]
WRAPPED = sr.Rules((("a", "tp"),
    ("b", ())), sr.dialects.EASYLM)
JOINED = [*RULES, ("c", ())]

def made():
    return [
        ("a", ()),
        ("b", ()),
    ]
"""


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("tables.toml", TABLES, (4, 11, 16)),
        ("tables.toml", TABLES.replace("\n", "\r\n"), (4, 11, 16)),
        ("inline.toml", INLINE, (3, 4, 4, 6)),
        ("rules.json", JSON, (4, 4, 6)),
        ("list.json", '[\n["a", []],\n["b", []]]', (2, 3)),
        ("list.json", '\ufeff[\n["a", []],\n["b", []]]', (2, 3)),
        ("none.json", "[]", ()),
        ("rules.yml", YAML, (3, 5, 6)),
    ],
)
def test_lines_of_a_file(tmp_path, name, text, lines):
    path = tmp_path / name
    path.write_bytes(text.encode())
    found = rule_places(str(path), len(read_rule_source(str(path)).rules))
    assert found == (str(path), lines)


@pytest.mark.parametrize("rules", [0, 2, 4])
def test_no_line_is_known_where_the_number_of_rules_is_another(tmp_path, rules):
    path = tmp_path / "rules.toml"
    path.write_text(TABLES)
    assert rule_places(str(path), rules) == (str(path), ())


def test_a_quoted_key_hides_the_rules(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text('[["rules"]]\npattern = "a"\nspec = []\n')
    assert rule_places(str(path), len(read_rule_source(str(path)).rules)) == (str(path), ())


def test_a_gzipped_file_has_no_lines(tmp_path):
    path = tmp_path / "rules.json.gz"
    path.write_bytes(gzip.compress(json.dumps([["a", []]]).encode()))
    assert rule_places(str(path), len(read_rule_source(str(path)).rules)).lines == ()


def test_standard_input_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rule_places("-", 3) == (None, ())


@pytest.mark.parametrize(
    ("name", "lines"),
    [("RULES", (5, 7)), ("WRAPPED", (9, 10)), ("made", (15, 16)), ("JOINED", ())],
)
def test_lines_of_a_module(tmp_path, monkeypatch, name, lines):
    (tmp_path / "lined_rules.py").write_text(PYTHON)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lined_rules", raising=False)
    source = f"lined_rules:{name}"
    assert rule_places(source, len(read_rule_source(source).rules)) == ("lined_rules.py", lines)
    monkeypatch.chdir("/")
    monkeypatch.setattr(sys.modules["lined_rules"], "__file__", "/nowhere/lined_rules.py")
    assert rule_places(source, 2).lines == ()


def test_a_module_elsewhere_is_no_file_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert rule_places("json:loads", 2) == (None, ())
