"""Files that are wrong: what each reader says of them, in one line that starts with the file."""

from __future__ import annotations

import gzip
import json
import re

import pytest

import shardrules as sr
from shardrules._plan.files.models import read_arrays
from shardrules._plan.files.rules import read_rule_source
from tests.support.files import message

ROWS = [["layers/0/kernel", [4, 8], "BF16"], ["step", [], "I32"]]


def rows(*changed):
    return {"params": [*ROWS, *changed]}


def named(names):
    return {"params": ROWS, "logical_axes": names}


MODELS = [
    (b"", "the file is empty; copy or download it again"),
    (b"\x80\x02}q\x00", "byte 0: this is not UTF-8 text"),
    (b'{"params": "\xff"}', "byte 12: this is not UTF-8 text"),
    (b'{"params": [\n["a", [1]', r"line 2, column 10: this is not JSON \(Expecting ','"),
    (b"[" * 200_000 + b"]" * 200_000, "the JSON is nested too deeply"),
    (b'{"params": {"a": 1, "b": 1, "a": 2}}', "key 'a' is there twice"),
    (b'{"params": ' + b"9" * 5000 + b"}", "integer string conversion"),
    (b'{"params": [["y", [NaN], "F32"]]}', "NaN is not a JSON number"),
    ([], r"line 1: this is \[\] \(a list\), which lists no arrays; give a \*.safetensors"),
    ({"params": 3}, r"key 'params': it is 3 \(an int\)"),
    (rows({"name": "x"}), r"params\[2\]: Expected `array`, got `object`: it is {'name': 'x'} .*; write \[\"name\", \[4096"),
    (rows([1, [1], "F32"]), r"params\[2\]: Expected `str`, got `int` - at `\$\[0\]`"),
    (rows(["a\ud800", [1], "F32"]), r"array 'a\\ud800' has half a surrogate pair"),
    (rows(["step", [1], "F32"]), "array 'step' is there twice; rename or remove one"),
    (named({"step": [True]}), r"logical_axes of 'step': Expected `str \| null`, got `bool` .*; write"),
    (rows(["x", [4, 8], "F32"], ["y", [4, True], "F32"]), r"params\[3\]: Expected `int`, got `bool` - at `\$\[1\]\[1\]`"),
    (rows(["x", [4, -1], "F32"]), r"array 'x': the shape \[4, -1\] has a negative"),
    (rows(["x", [2**62, 2], "F32"]), r"array 'x': .* more than 2\*\*63 - 1 elements"),
    (rows(["x", [4], "F8_E4M4"]), "array 'x': unknown dtype 'F8_E4M4'; known ones are F8_"),
    (named([]), "key logical_axes: it is"),
    (named({"x": []}), "logical_axes: there is no array 'x'"),
    (named({"step": "norm"}), "logical_axes of 'step': Expected `array`, got `str`: it is 'norm'"),
]  # fmt: skip
PACKED = gzip.compress(json.dumps({"params": ROWS}).encode())
GZIP = [
    (PACKED[:-20], "the gzip ends too early"),
    (PACKED[:-8] + bytes(8), "the gzip is damaged"),
    (PACKED[:12] + b"\xff" * 20 + PACKED[32:], "the gzip is damaged"),
    (b"{}", "byte 0: this is not gzip"),
]


def rule(**fields):
    return [{"pattern": "a", "spec": [], **fields}]


def table(**fields):
    return {"rules": [["w", ["tp"]]], **fields}


def logical(**fields):
    return {"kind": "logical", "rules": [["embed", "tp"]], **fields}


RULES = [
    (3, "there is no list of rules"),
    (table(rulez=1), "key 'rulez' is unknown; the keys are rules, dialect"),
    (table(dialect="linen"), "dialect 'linen' is unknown; it is"),
    (table(correction=3), "correction: it is 3"),
    (table(correction={"x": 1}), "correction: key 'x' is unknown"),
    (table(replicated="x"), "replicated is 'x'"),
    (table(replicated=["a", "["]), r"replicated\[1\]: unterminated character set"),
    (table(optional_axes=[""]), r"optional_axes is \[''\]"),
    (table(min_size=-1), "min_size is -1"),
    (b'{"rules": [], "rules": []}', "key 'rules' is there twice"),
    (table(data_axes=[3]), r"data_axes is \[3\]"),
    (table(companions="lora"), "companions is 'lora' .*; write a list of strings"),
    (table(stacked="layers"), "stacked is 'layers' .*; write a list of paths or tables"),
    (table(companions=["lorra"]), r"companions\[0\]: there is no table 'lorra'.*lora, quantized"),
    (table(stacked=["a", 3]), r"stacked\[1\]: at is 3 .*; it must be a path"),
    (table(stacked=[{"layer": "h_*"}]), r"stacked\[0\]: at is missing; write the path"),
    (table(stacked=[{"at": "h", "axes": 1}]), r"stacked\[0\]: key 'axes' is unknown"),
    (table(stacked=[{"at": "h", "axis": -1}]), r"stacked\[0\]: axis is -1"),
    ([["a", []], 3], r'rule 1: it is 3 \(an int\); write \["pattern"'),
    ([{"pattern": "a", "specs": 1}], "rule 0: key 'specs' is unknown"),
    ([["a", 3]], "rule 0: spec is 3"),
    ([["a", [None, 3]]], r"rule 0: entry 1 of spec is 3 .*; write an axis"),
    ([["a", {"min_rank": 2}]], "rule 0: spec: fsdp is missing; write the mesh axis"),
    ([["a", {"fsdp": "x", "min_byte": 2}]], "rule 0: spec: key 'min_byte' is"),
    ([["a", {"fsdp": 3}]], "rule 0: spec: fsdp is 3 .*; write a mesh axis, or a list of axes"),
    ([["a", {"fsdp": []}]], "rule 0: spec: .*at least one mesh axis"),
    ([["a", {"fsdp": "x", "min_bytes": "4MB!"}]], "rule 0: spec: '4MB!' is not"),
    ([["a", {"fsdp": "x", "min_rank": "2"}]], "rule 0: spec: min_rank is '2'"),
    ([["a", {"fsdp": "x", "within": 3}]], "rule 0: spec: within is 3 .*; write a list"),
    ([["a", {"fsdp": "x", "within": ["x"]}]], "rule 0: spec: .* each only once"),
    ([["a", []], ["(", []]], r"rule 1: missing \)"),
    ([[3, []]], "rule 0: the pattern must be a string"),
    (rule(flags="i"), "rule 0: key 'flags' is unknown"),
    (rule(units=3), "rule 0: units is 3"),
    (rule(units=[0]), r"rule 0: units\[0\] is 0"),
    (rule(memory_kind="pinned_hsot"), "rule 0: memory_kind is 'pinned_hsot'; it must be one of None, 'device', 'pinned_host'"),
    (rule(optional_axes="sp"), "rule 0: optional_axes is 'sp'"),
    (rule(correction={"pad": 3}), "rule 0: correction: pad"),
    (table(kind="glob"), "kind is 'glob'.*one of regex, logical"),
    (logical(dialect="eformer"), "dialect 'eformer' is unknown for logical rules.*linen"),
    (logical(stacked=["layers"]), "stacked, companions: they are for rules of paths"),
    (logical(correction={"rank": "x"}), "correction: rank"),
    (logical(rules=[["embed"]]), r"rule 0: it is \['embed'\]"),
    (logical(rules=[["embed", 3]]), "rule 0: axes is 3"),
    (logical(rules=[["", "tp"]]), "rule 0: the name is ''"),
    (logical(rules=rule()), "rule 0: key 'pattern' is unknown; the keys are name, axes"),
]  # fmt: skip

TOML = [
    ("x = 1\ny = ?", r"this is not TOML: .*line 2, column 5"),
    ("x = " + "[" * 9000, "this is not TOML|nested too deeply"),
    ("", "the file is empty"),
    ("x = 1", "key 'rules': there is no list of rules; write"),
    ("[[rules]]\npattern = 'a'", r"rule 0: spec is missing; .*spec = \[\] rep"),
]

YAML = [
    ("a: 3", "key 'logical_axis_rules': there is no list of rules"),
    ("[" * 5000, "nested too deeply"),
    ("logical_axis_rules: []\nlogical_axis_rules: []", "the key 'logical_axis_rules' is there twice"),
    ("logical_axis_rules: [[embed, !!python/name:os.getcwd x]]", r"line 1, column 30: .*this is no name but os.getcwd"),
    ("logical_axis_rules: [[a, &a [tp]],\n[b, *a]]", r"line 1, column 26: an alias: write out"),
    ("b: *a", r"this is not YAML: found undefined alias .*line 1, column 4"),
    ("a: &a [x]\n? *a\n: 1", r"line 1, column 4: this key is no text"),
    ("logical_axis_rules: [[!!str {a: b}, tp]]", r"column 23: this is no name but map"),
    ("logical_axis_rules: [[a, 3]]", "this is no name but int"),
    ("logical_axis_rules: [[a, !!null {b: c}]]", "this is no name but map"),
    ('x: "\\UFFFFFFFF"', "this is not YAML: .*(too large|range)"),
    ("\x00", "not YAML"),
]

CASES = [
    pytest.param(read, name, data, expected, id=f"{name}-{number}")
    for read, name, cases in (
        (read_arrays, "model.json", MODELS), (read_arrays, "m.json.gz", GZIP), (read_rule_source, "rules.json", RULES),
        (read_rule_source, "rules.toml", TOML), (read_rule_source, "rules.yml", YAML),
    )
    for number, (data, expected) in enumerate(cases)
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "data", "expected"), CASES)
def test_a_wrong_file_is_refused(write, read, name, data, expected):
    told = message(read, write(name, data))
    assert re.search(expected, told)
    assert told.count("\n") == (2 if "^" in told else 0)  # with the pattern and a caret below it


@pytest.mark.parametrize("read", [read_arrays, sr.read_model, read_rule_source, sr.read_rules])
def test_a_file_that_is_not_there(tmp_path, read):
    assert "No such file or directory; check" in message(read, tmp_path / "none.toml")
    for name in ("a\0b", "é\ud800"):  # in no folder, whatever its system
        with pytest.raises(sr.FileError, match="no file can have this name"):
            read(name)
    assert "File name too long" in message(read, "x" * 300)
    (tmp_path / "readme.txt").write_text("nothing")
    assert re.search("Is a directory|the directory has no arrays", message(read, tmp_path))


# Names of files in an index: each is of a file beside it, or refused.
@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "a/b", "../m.safetensors", "a\0b", "\ud800", "x" * 300, "-", "~", "m.safetensors/", 3, None],
)
def test_a_name_in_an_index_is_of_a_file_beside_it(write, name):
    told = message(read_arrays, write("m.safetensors.index.json", {"weight_map": {"w": name}}))
    assert re.search("name of a file beside it|is missing beside the index|'weight_map': it is|name too long", told)
