"""Files with logical rules, and with the logical axis names of a model; and the commands on them."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardrules as sr
from shardrules._base.io import memory_within
from shardrules._plan.files.rules import read_rule_source
from tests.support.command_line import invoke as run

DUMPS = Path(__file__).parents[1] / "data" / "maxtext-dumps"
TOML = """
kind = "logical"
replicated = ["norm"]
optional_axes = ["expert"]

[[rules]]
name = "embed"
axes = ["fsdp", "expert"]

[[rules]]
name = "mlp"
axes = "tp"

[[rules]]
name = "kv"
axes = []
"""
RULES = sr.LogicalRules([("embed", ("fsdp", "expert")), ("mlp", "tp"), ("kv", None)])


def written(folder, name, text):
    file = folder / name
    file.write_text(text)
    return str(file)


class TestRules:
    def test_toml(self, tmp_path):
        read = sr.read_rules(written(tmp_path, "rules.toml", TOML))
        assert read.rules == sr.LogicalRules(RULES, RULES.dialect, optional_axes=["expert"])
        assert read.declared["replicated"] == ("norm",)
        assert read.companions == ()

    def test_json_with_pairs_and_a_correction(self, tmp_path):
        table = {
            "kind": "logical",
            "dialect": "MaxText",
            "correction": {"indivisible": "drop"},
            "rules": [["embed", ["fsdp", "expert"]], ["mlp", ["tp"]], ["kv", None]],
        }
        read = sr.read_rules(written(tmp_path, "rules.json", json.dumps(table)))
        assert tuple(read.rules) == (RULES[0], ("mlp", ("tp",)), RULES[2])
        assert read.rules.dialect.name == "maxtext"
        assert read.rules.correction == replace(sr.dialects.MAXTEXT.correction, indivisible="drop")

    def test_the_yaml_of_maxtext(self):
        dump = json.loads(gzip.decompress(next(DUMPS.glob("qwen3*")).read_bytes()))
        read = sr.read_rules(DUMPS / "base.yml")
        assert read.rules == sr.LogicalRules(dump["logical_axis_rules"], sr.dialects.MAXTEXT)
        assert read.name == "base"
        assert sr.read_rules(DUMPS / "pure-fsdp.yml", dialect=sr.dialects.LINEN).rules.dialect == sr.dialects.LINEN

    def test_files_that_are_merged(self, tmp_path):
        base = written(tmp_path, "base.yml", "logical_axis_rules: [[embed, tp]]\nmodel: a")
        model = written(tmp_path, "model.yml", "base_config: base.yml\nmodel: b")
        own = written(tmp_path, "own.yml", "logical_axis_rules: [[embed, fsdp]]")
        assert tuple(sr.read_rules(base, model).rules) == (("embed", "tp"),)
        assert sr.read_rules(base, model).unread == ()
        read = sr.read_rules(base, Path(own))
        assert (tuple(read.rules), read.name) == ((("embed", "fsdp"),), "own")
        assert read.unread == (f"rules of {base}",)
        with pytest.raises(sr.FileError, match="model.yml: .*give the file that it is merged over"):
            sr.read_rules(model)

    def test_tables_that_are_merged(self, tmp_path):
        first = written(tmp_path, "a.toml", 'data_axes = ["dp"]\nrules = [["w", ["tp"]]]')
        later = written(tmp_path, "b.json", json.dumps({"data_axes": ["pp"]}))
        read = sr.read_rules(first, later)
        assert (list(read.rules), read.declared["data_axes"]) == ([("w", ("tp",))], ("pp",))
        with pytest.raises(sr.FileError, match="a.toml, .*b.json: rule 0: spec is 3"):
            sr.read_rules(written(tmp_path, "a.toml", 'rules = [["w", 3]]'), later)

    def test_a_second_list_of_yaml_is_told(self, tmp_path):
        text = "logical_axis_rules: [[embed, tp]]\nvae_logical_axis_rules: [[embed, fsdp]]"
        file = written(tmp_path, "rules.yml", text)
        assert sr.read_rules(file).unread == (f"vae_logical_axis_rules of {file}",)
        model = written(tmp_path, "model.json", json.dumps(MANIFEST))
        done = run("plan", model, "-r", file, "-m", "tp=2")
        assert "note: these rules are not read: vae_logical_axis_rules of" in done.stderr

    def test_aliases_that_stand_for_much_are_refused_in_rules(self, tmp_path):
        lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
        text = "\n".join(["a0: &a0 [x, x]", *lines, "logical_axis_rules: "])
        with pytest.raises(sr.FileError, match="line 1, .*an alias: write out what it stands for"):
            read_rule_source(written(tmp_path, "rules.yml", f"{text}*a39"))
        assert len(read_rule_source(written(tmp_path, "rules.yml", f"{text}[[embed, tp]]")).rules) == 1

    def test_without_pyyaml_or_memory_a_message_says_what_to_do(self, tmp_path, monkeypatch):
        file = written(tmp_path, "rules.yml", "# " + "x" * 10**6)
        with memory_within(2**28), pytest.raises(sr.FileError, match="is it the right file"):
            read_rule_source(file)
        monkeypatch.setitem(sys.modules, "yaml", None)
        with pytest.raises(sr.FileError, match=r"pip install pyyaml"):
            read_rule_source(written(tmp_path, "rules.yml", "a: 3"))


MANIFEST = {
    "model": "small",
    "params": [["layers/0/wi", [4096, 8192], "BF16"], ["layers/1/wi", [4096, 8192], "BF16"], ["norm", [4096], "F32"]],
    "logical_axes": {"layers/0/wi": ["embed", "mlp"], "layers/1/wi": ["embed", "mlp"], "norm": ["norm"]},
}


@pytest.fixture
def files(tmp_path):
    model = written(tmp_path, "model.json", json.dumps(MANIFEST))
    return model, "-r", written(tmp_path, "rules.toml", TOML), "-m", "fsdp=4,tp=2,expert=1"


def test_commands(files, tmp_path):
    model, _, rules, *mesh = files
    wrong = written(tmp_path, "wrong.toml", TOML.replace('"embed"', '"embd"'))
    plain = {key: value for key, value in MANIFEST.items() if key != "logical_axes"}
    nameless = written(tmp_path, "plain.json", json.dumps(plain))
    lock = str(tmp_path / "plan.lock")
    for words, code, expected in (
        (("plan", *files), 0, "P(('fsdp', 'expert'), 'tp')"),
        (("plan", *files, "--format", "json"), 0, '"rules": [\n    0,\n    1\n   ]'),
        (("plan", *files, "--dialect", "keras"), 2, "these are logical rules"),
        (("check", *files), 0, ""),
        (("explain", model, "layers/0/wi", "-r", rules, *mesh), 0, "dim 0 'embed': rule 0"),
        (("check", model, "-r", wrong, *mesh), 1, "unknown-name"),
        (("plan", nameless, "-r", rules, *mesh), 2, "rules are for logical axis names, and this file has none"),
        (("plan", *files, "--lock", lock), 0, ""),
        (("diff", lock, *files), 0, ""),
    ):  # fmt: skip
        done = run(*words)
        assert (done.exit_code, expected in done.output) == (code, True), done.output
