"""The files that the command line reads: every kind, and a clear error for each damaged file.

The oracle is the library of numpy's dtypes, and each model's own manifest.
"""

from __future__ import annotations

import gzip
import json
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.io import FileError
from shardrules._plan.files.leaves import ArraySpec
from shardrules._plan.files.models import read_arrays
from shardrules._plan.files.modules import is_module_form, load_object
from shardrules._plan.files.rules import read_rule_source, rule_places
from tests.support import corpus
from tests.support.files import message

ROWS = [["layers/0/kernel", [4, 8], "BF16"], ["layers/0/bias", [8], "float32"], ["step", [], "I32"]]
LEAVES = {
    "layers/0/kernel": ArraySpec((4, 8), "bfloat16"),
    "layers/0/bias": ArraySpec((8,), "float32"),
    "step": ArraySpec((), "int32"),
}


# JSON manifests


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_manifest(write, pack):
    data = pack(json.dumps({"model": "small", "params": ROWS}).encode())
    arrays = read_arrays(write("m.json.gz" if pack is gzip.compress else "m.json", data))
    assert arrays[:4] == ("small", LEAVES, "/", None)
    both = read_arrays(write("b.json", {"params": [["a", [8], "F32"], ["b", [8], "float32"]]})).leaves
    assert both["a"] is both["b"] is arrays.leaves["layers/0/bias"]
    assert list(arrays.leaves) == list(LEAVES)
    assert len(jax.tree.leaves(arrays.leaves)) == 3


def test_names_separators_and_marks(write):
    assert read_arrays(write("flat.v1.json.gz", gzip.compress(b'{"params": []}'))).name == "flat.v1"
    dotted = read_arrays(write("m", {"params": [["a.b", [0, 3], "F4"]]}))
    assert dotted[:4] == ("m", {"a.b": ArraySpec((0, 3), "float4_e2m1fn")}, ".", None)
    assert read_arrays(write("m.json", b'\xef\xbb\xbf{"params": []}')).leaves == {}


def test_the_largest_array(write):
    path = write("m.json", {"params": [["x", [2**62, 1], "F32"], ["y", [0, 2**63 - 1], "F32"]]})
    shapes = [leaf.shape for leaf in read_arrays(path).leaves.values()]
    assert shapes == [(2**62, 1), (0, 2**63 - 1)]


# Modules


def test_the_form_of_modules(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(map(is_module_form, ("package.module:function", "train:Config.rules", "m:model", "m:Config.rules")))
    paths = (r"C:\models\rules.json", "C:/models/rules.json", "C:rules.json", "model.json")
    assert not any(map(is_module_form, (*paths, "a:b:c", "1a:b", "")))
    write("train:rules", "[]")
    assert not is_module_form("train:rules")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(source): writes the module `user_code` into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source):
        file = tmp_path / "user_code.py"
        file.write_text(source)
        return file

    yield write
    sys.modules.pop("user_code", None)


@pytest.mark.parametrize(
    ("source", "expected", "cause"),
    [
        ("", "module 'user_code' has no 'tree'; correct", AttributeError),
        ("import nonexistent_", "the import of 'user_code' at user_code.py:1 has raised ModuleNotFound", ImportError),
        ("1 +", "the import of 'user_code' has raised SyntaxError", SyntaxError),
        ("raise SystemExit", "'user_code' at user_code.py:1 has raised SystemExit; it", SystemExit),
        ("def tree():\n return 1 / 0", r"the call of tree\(\) at user_code.py:2 has raised ZeroDiv", ZeroDivisionError),
        ("import json\ntree = lambda: json.loads('x')", r"tree\(\) at user_code.py:2 has raised JSONDec", ValueError),
        ("def tree(): raise ValueError('a\\nb')", r"py:1 has raised ValueError: a\nb\nit must work without arguments$", ValueError),
        ("def tree(x): pass", r"TypeError: .*; it must work without arguments", TypeError),
    ],
)  # fmt: skip
def test_modules_that_fail(module, source, expected, cause):
    module(source)
    with pytest.raises(FileError, match=f"^user_code:tree: .*{expected}") as info:
        load_object("user_code:tree")
    assert isinstance(info.value.__cause__, cause)


def test_no_module():
    for name, expected in (("none_.sub:x", "'none_'"), ("shardrules.none_:x", "'shardrules.none_'"), ("m:x", "'m'")):
        assert f"there is no module {expected}; install it" in message(load_object, name)
    assert "write package.module:name" in message(load_object, "C:/x")


@pytest.mark.parametrize("folder", ["shardrules", "site-packages/project"])
def test_a_line_is_named_wherever_the_program_lies(module, folder, tmp_path, monkeypatch):
    """Nothing below a folder called like a library was the user's."""
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    module("raise ValueError").rename("user_code.py")
    assert "at user_code.py:1 has raised ValueError" in message(load_object, "user_code:tree")


# Rules

TOML = """
dialect = "EasyLM"
replicated = ["norm", "bias$"]
optional_axes = ["sp"]
min_size = 1
data_axes = ["dp"]

[correction]
indivisible = "prefix"

[[rules]]
pattern = "(?i)WQ/kernel"
spec = ["fsdp", [], ["tp", "sp"]]
units = [1, 1, 128]
memory_kind = "pinned_host"
optional_axes = ["sp"]
correction = { unconstrained = "drop" }

[[rules]]
pattern = "bias"
spec = "tp"

[[rules]]
pattern = ".*"
spec = []
"""


def test_rules_of_toml(write):
    file = read_rule_source(write("llama.toml", TOML))
    correction = sr.Correction(indivisible="prefix", rank="error", pad=False)
    own = sr.Correction(unconstrained="drop", indivisible="prefix", rank="error", pad=False)
    wq = sr.RuleSpec(
        ("fsdp", None, ("tp", "sp")), own, (1, 1, 128),
        memory_kind="pinned_host", optional_axes=("sp",),
    )  # fmt: skip
    assert file.name == "llama"
    assert file.declared == {
        "replicated": ("norm", "bias$"), "data_axes": ("dp",)
    }  # fmt: skip
    assert (file.rules.optional_axes, file.rules.min_size) == (("sp",), 1)
    assert file.rules.dialect.name == "EasyLM"
    assert file.rules.dialect.correction == correction
    assert list(file.rules) == [("(?i)WQ/kernel", wq), ("bias", ("tp",)), (".*", ())]
    tree = {"wq": {"kernel": np.ones((2, 2, 2))}, "bias": np.ones(2), "x": np.ones(2)}
    assert file.rules.match(tree) == {
        "wq": {"kernel": P("fsdp", None, ("tp", "sp"))}, "bias": P("tp"), "x": P(),
    }  # fmt: skip
    assert read_rule_source(write("x.toml", TOML), sr.dialects.SPECTRAX).rules.dialect.name == "Spectrax"


def test_rules_with_specs_from_shapes(write):
    toml = """
        [[rules]]
        pattern = "wo"
        spec = { fsdp = ["dp", "fsdp"], min_bytes = "2MiB", min_rank = 2, within = [[], "tp"] }
        units = [8]
        [[rules]]
        pattern = ".*"
        spec = { fsdp = "fsdp" }
    """
    wo = sr.fsdp(("dp", "fsdp"), min_bytes=2 * 2**20, min_rank=2, within=(None, "tp"))
    expected = [("wo", sr.RuleSpec(wo, units=(8,))), (".*", sr.fsdp("fsdp"))]
    assert list(read_rule_source(write("rules.toml", toml)).rules) == expected
    in_json = [[".*", {"fsdp": "fsdp", "min_bytes": 4 * 2**20, "within": None}]]
    assert list(read_rule_source(write("rules.json", in_json)).rules) == expected[1:]


@pytest.mark.parametrize("name", corpus.regex_rule_sets())
def test_rules_of_json(write, name):
    listed = corpus.rule_file(name)["rules"]
    for form in ({"rules": listed}, listed):
        rules = read_rule_source(write("rules.json.gz", gzip.compress(json.dumps(form).encode()))).rules
        assert [(pattern, P(*spec)) for pattern, spec in rules] == corpus.rules(name)


def test_companions_of_a_rule_file(write):
    keys = (
        'companions = ["quantized", "LoRA"]\n'
        'stacked = ["layers", {at = "h", layer = "h_*", axis = 1, mesh_axis = "stage"}]\n'
    )
    path = write("x.toml", keys + '[[rules]]\npattern = "w"\nspec = "tp"\n')
    stacks = (sr.stacked("layers"), sr.stacked("h", "h_*", axis=1, mesh_axis="stage"))
    assert read_rule_source(path).companions == (*stacks, *sr.QUANTIZED, *sr.LORA)


def test_rules_of_a_module(module):
    module(
        "import shardrules as sr\nPAIRS = [('w', 'tp')]\nWRONG = 3\n"
        "def rules(): return sr.Rules(PAIRS, sr.dialects.KERAS)\n"
        "LOGICAL = sr.LogicalRules(PAIRS, sr.dialects.MAXTEXT)\n"
        "class Config:\n    @staticmethod\n    def rules(): return PAIRS\n"
    )
    pairs, dialects = [("w", "tp")], sr.dialects
    for name, dialect, expected in (
        ("PAIRS", None, sr.Rules(pairs)),
        ("Config.rules", None, sr.Rules(pairs)),
        ("rules", None, sr.Rules(pairs, dialects.KERAS)),
        ("rules", dialects.EASYLM, sr.Rules(pairs, dialects.EASYLM)),
        ("PAIRS", dialects.LINEN, sr.LogicalRules(pairs)),
        ("LOGICAL", None, sr.LogicalRules(pairs, dialects.MAXTEXT)),
        ("LOGICAL", dialects.LINEN, sr.LogicalRules(pairs, dialects.LINEN)),
    ):
        read = read_rule_source(f"user_code:{name}", dialect)
        assert (read.rules, read.rules.dialect) == (expected, expected.dialect)
        assert read.name == name
    for dialect in (None, dialects.LINEN):
        with pytest.raises(FileError, match="user_code:WRONG: rules must be "):
            read_rule_source("user_code:WRONG", dialect)


# On which lines of a TOML file rules begin, for annotations

LINED = """\
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
        ("tables.toml", LINED, (4, 8)),
        ("tables.toml", LINED.replace("\n", "\r\n"), (4, 8)),
        ("list.toml", "rules = [['a', []],\n['b', []]]", ()),
        ("list.json", '[["a", []], ["b", []]]', ()),
        # What looks like a table, or is hidden: their number is another.
        ("text.toml", LINED.replace('"a"', "'''\n[[rules]]\n'''"), ()),
        ("quoted.toml", '[["rules"]]\npattern = "a"\nspec = []\n', ()),
    ],
)
def test_lines_of_a_file(write, name, text, lines):
    path = write(name, text)
    assert rule_places(path, len(read_rule_source(path).rules)) == (path, lines)
    assert rule_places("json:loads", 2) == rule_places("-", 3) == (None, ())
