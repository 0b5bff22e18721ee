"""The command line, as a person and as CI would call it."""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shardrules as sr
from examples import demo
from tests.support.command_line import invoke as run
from tests.support.contexts import pseudo_terminal

MODEL, RULES, MESH = str(demo.MODEL), str(demo.RULES), "fsdp=64,sp=1,tp=8"
SMALL = {
    "model": "small",
    "params": [
        ["layers/0/wq/kernel", [512, 512], "BF16"],
        ["layers/1/wq/kernel", [512, 512], "BF16"],
        ["layers/1/norm", [512], "F32"],
        ["embed", [4096, 4096], "F32"],
    ],
}


@pytest.fixture
def small(tmp_path):
    model, rules = tmp_path / "small.json", tmp_path / "rules.toml"
    model.write_text(json.dumps(SMALL))
    rules.write_text(
        'replicated = ["norm"]\n'
        '[[rules]]\npattern = "wq/kernel"\nspec = ["fsdp", "tp"]\n'
        '[[rules]]\npattern = ".*"\nspec = []\n'
    )
    return model, rules


def test_plan_as_text_and_json(small):
    model, rules = small
    words = ("plan", model, "-r", rules, "-m", "fsdp=2,tp=4")
    result = run(*words)
    assert (result.exit_code, "P('fsdp', 'tp')" in result.stdout) == (0, True)
    told = json.loads(run(*words, "--format", "json").stdout)
    wq = next(row for row in told["folded"] if row["path"] == "layers/{0,1}/wq/kernel")
    assert (wq["leaves"], wq["bytes"]) == (2, 2 * 2 * 512**2)
    assert wq["device_bytes"] == 2 * 2 * 512**2 // 8
    assert told["device_bytes"]["total"] == wq["device_bytes"] + 4 * 512 + 4 * 4096**2


SLIP = {
    "model": "heads",
    "params": [["attn/k_proj/kernel", [4096, 768], "BF16"], ["attn/q_proj/kernel", [4096, 4096], "BF16"]],
}


@pytest.mark.parametrize(
    ("more", "told", "code"),
    [
        (("-m", "fdsp=8,tp=4"), "did you mean 'fdsp'?", 1),
        (("-m", "tp=4"), "error[unknown-axis]", 1),
        (("-m", "tp=4"), "or declare that a mesh may lack it: --optional-axes fsdp\n", 1),
        (("-m", "tp=4", "--optional-axes", "sp,fsdp"), "0 errors, 0 warnings", 0),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB"), "warning[unused-axis]", 1),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB"), "that it cuts data alone: --data-axes dp\n", 1),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB", "--data-axes", "dp"), "nothing found: 2 leaves", 0),
        (("-m", "tp=4,dp=2", "--large", "500kB"), "error[unknown-axis]", 1),
        (("-m", "tp=4,dp=2", "--large", "500kB", "-r", "declared.json"), "0 errors, 0 warnings", 0),
        (("-m", "fsdp=8,tp=4"), "nothing found: 2 leaves, 1 rule, on fsdp=8,tp=4\n", 0),
        (("-m", "fsdp=8,tp=4", "--format", "github"), "nothing found: 2 leaves, 1 rule, on fsdp=8,tp=4\n", 0),
        (("-m", "fsdp=8,tp=4", "--head-dim", "128"), "1.5 heads", 1),
        (("-m", "fsdp=8,tp=2", "--head-dim", "128"), "nothing found: 2 leaves", 0),
    ],
)  # fmt: skip
def test_a_slip_is_told_and_a_declaration_heard(tmp_path, monkeypatch, more, told, code):
    monkeypatch.chdir(tmp_path)
    model, rules = tmp_path / "model.json", tmp_path / "rules.json"
    declared = {"optional_axes": ["fsdp"], "data_axes": ["dp"]}
    Path("declared.json").write_text(json.dumps(declared))
    model.write_text(json.dumps(SLIP))
    rules.write_text(json.dumps([["proj", ["fsdp", "tp"]]]))
    result = run("check", model, "-r", rules, "--fail-on", "warning", *more)
    assert told in result.stdout
    assert result.exit_code == code


def test_gradients_and_optimizer_are_counted(small):
    model, rules = small
    args = ("plan", model, "-r", rules, "-m", "fsdp=2", "--format", "json")
    more = ("--gradients", "BF16", "--optimizer", "adamw")
    held = json.loads(run(*args, *more).stdout)["device_bytes"]
    elements = 512**2 + 512 + 4096**2  # wq's two halves make one
    assert (held["gradients"], held["optimizer"]) == (2 * elements, 2 * 4 * elements)
    result = run("plan", model, "-r", rules, "-m", "fsdp=2", "--hbm", "1MB")
    assert (result.exit_code, "DOES NOT FIT into 1.00 MB" in result.stdout) == (0, True)
    assert "fits" not in json.loads(run(*args).stdout)
    for hbm, fits in (("1MB", False), ("1GB", True)):
        assert json.loads(run(*args, "--hbm", hbm).stdout)["fits"] is fits


def test_the_memory_of_a_rule_in_a_file(tmp_path):
    model, rules = tmp_path / "model.json", tmp_path / "rules.toml"
    model.write_text(json.dumps(SLIP))
    rules.write_text("[[rules]]\npattern = 'proj'\nspec = ['tp', 'fsdp']\nmemory_kind = 'pinned_host'\n")
    args = (model, "-r", rules, "-m", "fsdp=8,tp=4")
    told = json.loads(run("plan", *args, "--format", "json").stdout)
    assert {row["memory_kind"] for row in told["folded"]} == {"pinned_host"}
    assert told["device_bytes"]["total"] == 0
    lock = tmp_path / "plan.lock"
    assert "in pinned_host" in run("plan", *args, "--lock", lock).stdout
    rules.write_text("[[rules]]\npattern = 'proj'\nspec = ['tp', 'fsdp']\n")
    result = run("diff", lock, *args)
    assert result.exit_code == 1
    assert "P('tp', 'fsdp') in pinned_host -> P('tp', 'fsdp')  (+" in result.stdout


def test_check_for_programs(small):
    model, rules = small
    args = ("check", model, "-r", rules, "-m", "fsdp=2,tp=4")
    findings = json.loads(run(*args, "--format", "json").stdout)["findings"]
    assert (findings[0]["kind"], findings[0]["paths"], findings[0]["rule"]) == ("catch-all", ["embed"], 1)
    annotated = run(*args, "--format", "github").stdout
    assert annotated.startswith(f"::error file={rules},line=5,title=shardrules catch-all::1 leaf of 4")


def test_an_annotation_names_the_file_from_the_root_of_the_checkout(small, monkeypatch):
    """A step may run in another directory, and GitHub looks from the root."""
    model, rules = small
    args = ("check", model, "-r", rules, "-m", "fsdp=2,tp=4", "--format", "github")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(rules.parent.parent))
    inside = f"::error file={rules.parent.name}/{rules.name},line=5,"
    assert run(*args).stdout.startswith(inside)
    elsewhere = rules.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    from_here = ("check", model, "-r", f"../{rules.name}", *args[4:])
    assert run(*from_here).stdout.startswith(inside)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(elsewhere))
    assert run(*from_here).stdout.startswith(f"::error file=../{rules.name},line=5,")


def test_explain(small):
    model, rules = small
    result = run("explain", model, "layers/1/wq/kernel", "-r", rules, "-m", "fsdp=3,tp=4")
    assert result.exit_code == 0
    assert "rule 0: 'wq/kernel' wins" in result.stdout
    assert "rule 1: '.*' matches, but comes after rule 0" in result.stdout
    assert "dim 0 of size 512 is not divisible by fsdp=3" in result.stdout
    missing = run("explain", model, "layers/1/wq/kernl", "-r", rules, "-m", "fsdp=3")
    assert missing.exit_code == 2
    assert "no leaf has the path 'layers/1/wq/kernl'; near it: layers/{0,1}/wq/kernel" in missing.stderr


def test_sweep(small):
    model, rules = small
    result = run("sweep", model, "-r", rules, "--devices", 8, "--axes", "fsdp,tp", "--hbm", "67MB")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1].startswith("fsdp=8,tp=1")
    assert len(result.stdout.splitlines()) == 5
    assert "does not fit" in result.stdout
    given = run("sweep", model, "-r", rules, "-m", "fsdp=2", "-m", "fsdp=4")
    assert [line.split()[0] for line in given.stdout.splitlines()] == ["mesh", "fsdp=4", "fsdp=2"]
    assert run("sweep", model, "-r", rules).exit_code == 2


@pytest.fixture
def lock(small, tmp_path):
    model, rules = small
    path = tmp_path / "plan.lock"
    assert run("plan", model, "-r", rules, "-m", "fsdp=2,tp=4", "--lock", path).exit_code == 0
    return path


def test_locks_are_compared(small, lock, tmp_path):
    """And a lock beside a model says the mesh."""
    model, rules = small
    other = tmp_path / "other.lock"
    assert run("plan", model, "-r", rules, "-m", "fsdp=4,tp=2", "--lock", other).exit_code == 0
    for words, code, told in (
        ((lock, model, "-r", rules, "-m", "fsdp=2,tp=4"), 0, "no differences\n"),
        ((lock, model, "-r", rules), 0, "no differences\n"),
        ((model, lock, "-r", rules), 0, "no differences\n"),
        ((lock, model, "-r", rules, "-m", "tp=8"), 1, "mesh fsdp=2,tp=4 -> tp=8"),
        ((lock, other), 1, "mesh fsdp=2,tp=4 -> fsdp=4,tp=2"),
        ((lock, model), 2, "not a lock; for a model, give --rules"),
        ((lock, tmp_path / "gone"), 2, "gone: no such lock"),
        ((lock, lock, "-m", "tp=2"), 2, "a lock has its own rules and mesh: leave out --rules"),
        ((lock, lock, "--dialect", "keras"), 2, "a lock has its own rules and mesh"),
    ):
        done = run("diff", *words)
        assert (done.exit_code, told in done.output) == (code, True), done.output


def test_a_module_s_tree_and_rules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text(
        textwrap.dedent("""
        import jax
        from jax.sharding import PartitionSpec as P
        RULES = [("w", P("tp"))]
        def params():
            return {"w": [jax.ShapeDtypeStruct((8, 8), "bfloat16")] * 3}
        def broken():
            raise RuntimeError("no weights here")
        """)
    )
    result = run("plan", "my_model:params", "-r", "my_model:RULES", "-m", "tp=4")
    assert result.exit_code == 0
    assert "w/{0..2}" in result.stdout
    broken = run("plan", "my_model:broken", "-r", "my_model:RULES", "-m", "tp=4")
    assert broken.exit_code == 2
    assert "no weights here" in broken.stderr


def on_terminal(*words, **environment):
    """What the command line writes on a terminal, without what it has wiped out."""
    ours, theirs = pseudo_terminal()
    line = [sys.executable, "-m", "shardrules", *map(str, words)]
    environment = {**os.environ, "TERM": "xterm-256color", **environment}
    with subprocess.Popen(line, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        chunks = []
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 1 << 16):
                chunks.append(chunk)
    os.close(ours)
    text = re.sub(r"[^\r\n]*\r\x1b\[K", "", b"".join(chunks).decode())
    return text.replace("\r\n", "\n")


def test_a_terminal_is_shown_what_a_pipe_gets_but_for_colours(small):
    model, rules = small
    words = ("check", model, "-r", rules, "-m", "fsdp=2,tp=4,dp=2")
    shown, piped = on_terminal(*words), run(*words).stdout
    assert ("\x1b[31m" in shown, "\x1b[" in piped) == (True, False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == piped == on_terminal(*words, NO_COLOR="1")


@pytest.mark.parametrize(
    ("dialect", "name", "pattern", "path"),
    [
        ("JAXSeq", "wq/kernel", r"\['wq'\]\['kernel'\]", "['wq']['kernel']"),
        ("nnx", "wq/kernel/value", "kernel$", "wq/kernel"),
    ],
)
def test_a_dialect_takes_the_names_of_a_file_apart(tmp_path, dialect, name, pattern, path):
    model, rules = tmp_path / "m.json", tmp_path / "r.json"
    model.write_text(json.dumps({"params": [[name, [8, 8], "F32"]]}))
    rules.write_text(json.dumps({"dialect": dialect, "rules": [[pattern, ["tp"]]]}))
    result = run("explain", model, path, "-r", rules, "-m", "tp=2")
    assert f"rule 0: {pattern!r} wins" in result.stdout, result.output


def test_quiet_leaves_the_result(small, tmp_path):
    model, rules = small
    words = (model, "-r", rules, "-m", "fsdp=2,tp=4", "-q")
    report = tmp_path / "plan.html"
    done = run("plan", *words, "--html", report)
    assert (done.exit_code, done.stderr, report.exists()) == (0, "", True)
    loud, quiet = run("check", *words[:-1]), run("check", *words)
    assert (loud.exit_code, quiet.exit_code) == (1, 1)
    hints = ["1 error, 0 warnings, 0 info", "--fix prints the missing rules"]
    assert loud.stdout.splitlines() == [*quiet.stdout.splitlines(), *hints]
    for more in (["--replicated", "embed"], ["--format", "json"]):
        assert "--fix" not in run("check", *words[:-1], *more).stdout
    rules.write_text('[[rules]]\npattern = "(?=w)"\nspec = []\n[[rules]]\npattern = ""\nspec = []')
    assert run("plan", *words[:-1]).stderr.startswith("note: `re`")
    assert run("plan", *words).stderr == ""
    assert run("plan", *words, "--hbm", "0").stderr.startswith("error: ")


def test_rules_that_fall_back_to_re_are_named(small, tmp_path):
    model, rules = small[0], tmp_path / "rules.json"
    rules.write_text(json.dumps([["wq(?=/kernel)", ["fsdp", "tp"]], ["(.)\\1\x1b", []], [".*", []]]))
    told = run("plan", model, "-r", rules, "-m", "tp=4")
    assert told.stderr.splitlines() == [
        "note: `re`, not the automaton, evaluates rule 0 'wq(?=/kernel)' (lookahead)",
        r"note: `re`, not the automaton, evaluates rule 1 '(.)\\1\x1b' (backreference)",
    ]
    rules.write_text(json.dumps([*([f"(?={i})", []] for i in range(10)), [".*", []]]))
    told = run("plan", model, "-r", rules, "-m", "tp=4").stderr.splitlines()
    assert (len(told), told[-1]) == (6, "... and 5 more patterns")


def test_rules_of_several_files_are_merged(small, tmp_path):
    model, rules = small
    own = tmp_path / "own.json"
    own.write_text(json.dumps([["embed", ["tp"]]]))
    done = run("explain", model, "embed", "-m", "fsdp=2,tp=2", "-r", rules, "-r", own)
    assert (done.exit_code, "P('tp', None)" in done.stdout) == (0, True), done.output
    assert f"these rules are not read: rules of {rules}" in done.stderr


FIXES = [
    ("toml", '[[rules]]\npattern = "wq"\nspec = ["tp"]\n', "at the end of the list", 'pattern = "embed"'),
    ("toml", '[[rules]]\npattern = ".*"\nspec = []\n', "before rule 0", 'pattern = "embed"'),
    ("json", '[["wq", ["tp"]]]', "at the end of the list", '["embed", ["tp", "fsdp"]],'),
    ("py", 'RULES = [("wq", ("tp",))]', "at the end of the list", "(r'embed', P('tp', 'fsdp')),"),
]


@pytest.mark.parametrize(("suffix", "text", "where", "told"), FIXES)
def test_rules_to_paste(small, tmp_path, monkeypatch, suffix, text, where, told):
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("own_rules", None)
    Path(f"own_rules.{suffix}").write_text(text)
    source = "own_rules:RULES" if suffix == "py" else f"own_rules.{suffix}"
    words = ("check", small[0], "-r", source, "-m", "fsdp=2,tp=2")
    done = run(*words, "--fix")
    assert done.exit_code == 1
    assert re.match(rf"# {source}: \d rules? to paste {where}:\n", done.stdout), done.output
    assert told in done.stdout
    assert run(*words, "--fix", "--fail-on", "never").exit_code == 0
    if suffix == "toml" and "before" not in where:
        Path(source).write_text(text + done.stdout)
        assert run(*words).exit_code == 0
        fine = run(*words, "--fix")
        assert (fine.exit_code, fine.stdout) == (0, "")
        assert "no rule is to be added" in fine.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('companions = ["lora"]\nrules = [["wq", ["tp"]]]', "leave out companions"),
        ('kind = "logical"\nrules = [["embed", ["tp"]]]', "logical axis names"),
    ],
)
def test_what_is_not_fixed(small, tmp_path, text, told):
    rules, model = tmp_path / "own.toml", small[0]
    rules.write_text(text)
    model.write_text(json.dumps(SMALL | {"logical_axes": {}}))
    done = run("check", model, "-r", rules, "-m", "tp=2", "--fix")
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def test_suggested_rules_are_clean_under_check(small, tmp_path):
    model, _ = small
    written = tmp_path / "suggested.toml"
    result = run("suggest", model, "--devices", 8, "--axes", "fsdp,tp")
    assert result.exit_code == 0
    assert 'dialect = "eformer"' in result.stdout
    written.write_text(result.stdout, encoding="utf-8")
    mesh = result.stdout.split(" on ")[1].split(":")[0]
    checked = run("check", model, "-r", written, "-m", mesh, "--fail-on", "warning")
    assert checked.exit_code == 0, checked.stdout


def test_a_report_that_fails_leaves_nothing_behind(small, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise ValueError("no report")

    monkeypatch.setattr(sr.Plan, "to_html", fails)
    lock, page = tmp_path / "plan.lock", tmp_path / "plan.html"
    model, rules = small
    result = run("plan", model, "-r", rules, "-m", "fsdp=2", "--lock", lock, "--html", page)
    assert result.exit_code == 2
    assert "no report" in result.stderr
    assert not lock.exists()
    assert not page.exists()


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("-m fsdp=8 --format python", 0, "P(None, 'fsdp')"),
        ("-m fsdp=8 --format text", 0, "rule 0 wq/kernel: 2 leaves"),
        ("-m fsdp=8 --dialect nnx", 0, 'dialect = "nnx"'),
        ("", 2, "give a mesh with --mesh, or --devices"),
        ("-m fsdp=8 --devices 8", 2, "'--mesh' and '--devices' exclude each other"),
        ("-m fsdp=8 --dialect maxtext", 2, "for logical axis names"),
        ("-m fsdp=8 --format yaml", 2, "not one of 'toml', 'python', 'text'"),
    ],
)
def test_suggested_rules_in_other_forms(small, words, code, told):
    result = run("suggest", small[0], *words.split())
    output = result.output.replace("'-m' / ", "")
    assert (result.exit_code, told in output) == (code, True), result.output


def test_warnings_of_suggested_rules_are_lines(tmp_path):
    model = tmp_path / "m.json"
    model.write_text(json.dumps({"params": [["up/kernel", [4096, 8192], "F32"]]}))
    result = run("suggest", model, "-m", "fsdp=3")
    assert result.exit_code == 1
    label, path, _ = result.stderr.splitlines()
    assert (label.partition(":")[0], path) == ("warning[replicated]", "    up/kernel")
    quiet = run("suggest", model, "-m", "fsdp=3", "-q")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, result.stdout, "")


@pytest.mark.parametrize("target", ["out.json", "out.json.gz", "stream"])
def test_a_manifest_is_written_without_rules(tmp_path, monkeypatch, target):
    (tmp_path / "shapes_here.py").write_text(
        "import jax\n"
        "def model():\n"
        "    leaf = jax.ShapeDtypeStruct((8, 16), 'bfloat16')\n"
        "    return {'layers': [{'w': leaf}] * 3, 'n': 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("manifest", "shapes_here:model")
    if target == "stream":
        target = "out.json"
        (tmp_path / target).write_bytes(run(*words).stdout_bytes)
    else:
        assert run(*words, "-o", target).exit_code == 0
    assert ((tmp_path / target).read_bytes()[:2] == b"\x1f\x8b") is target.endswith(".gz")
    Path("r.json").write_text(json.dumps([["w", ["fsdp"]]]))
    plans = [run("plan", model, "-r", "r.json", "-m", "fsdp=2") for model in (words[1], target)]
    assert plans[0].stdout.splitlines()[1:3] == plans[1].stdout.splitlines()[1:3]
    plan = sr.plan(sr.read_model(target), [], {"tp": 2})
    assert list(plan.paths) == [f"layers/{i}/w" for i in range(3)]
    assert {(kind.shape, str(kind.dtype)) for kind in plan.kinds} == {((8, 16), "bfloat16")}
    twice = run("manifest", target, "-o", "second.json.gz")
    assert twice.exit_code == 0
    clash = run("manifest", target, "-o", target)
    assert (clash.exit_code, "would replace" in clash.stderr) == (2, True)
    refused = run("manifest", target, "--dialect", "jaxseq")
    assert (refused.exit_code, "a manifest has paths such as" in refused.stderr) == (2, True)


def test_a_manifest_in_the_paths_of_nnx_stands_for_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("nnx_here.py").write_text(
        "import jax\ndef model(): return {'w': {'value': jax.ShapeDtypeStruct((8, 16), 'bfloat16')}, 'n': 3}\n"
    )
    Path("r.json").write_text(json.dumps([["w$", ["fsdp"]]]))
    words = ("-r", "r.json", "-m", "fsdp=2", "--dialect", "nnx")
    assert run("manifest", "nnx_here:model", "--dialect", "nnx", "-o", "m.json").exit_code == 0
    of_model, of_file = (run("plan", one, *words).stdout for one in ("nnx_here:model", "m.json"))
    assert "P('fsdp', None)" in of_model
    assert of_model.splitlines()[1:2] == of_file.splitlines()[1:2]


def test_a_manifest_of_boxes_has_their_names(tmp_path, monkeypatch):
    nn = pytest.importorskip("flax.linen")
    jax = pytest.importorskip("jax")
    leaf = jax.ShapeDtypeStruct((8, 16), "float32")
    tree = {"w": nn.LogicallyPartitioned(leaf, ("embed", None)), "b": leaf}
    plan = sr.plan(tree, sr.LogicalRules([("embed", "fsdp")]), {"fsdp": 2})
    sr.write_manifest(tree, tmp_path / "m.json.gz")
    text = gzip.decompress((tmp_path / "m.json.gz").read_bytes()).decode()
    assert json.loads(text)["logical_axes"] == {"w": ["embed", None]}
    sr.write_manifest(plan, tmp_path / "p.json")
    assert (tmp_path / "p.json").read_text() == text
    with pytest.raises(ValueError, match="a manifest has paths such as"):
        sr.write_manifest(sr.plan({"w": leaf}, sr.Rules([], sr.dialects.KEYSTR), {"a": 1}), "x")
    monkeypatch.chdir(tmp_path)
    done = run("manifest", "m.json.gz", "-o", "n.json")
    assert (done.exit_code, done.stdout) == (0, "")
    assert json.loads((tmp_path / "n.json").read_text())["logical_axes"] == {"w": ["embed", None]}


OFF = "--level catch-all=off"


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ("", 1, "error[catch-all]"),
        ("--fail-on never", 0, "error[catch-all]"),
        ("--level catch-all=warning", 0, "warning[catch-all]"),
        ("--level catch-all=warning --fail-on warning", 1, "warning[catch-all]"),
        ("--replicated embed", 0, ""),
        ("--large 1GB", 0, ""),
        ("--large 1GB --fail-on info", 1, ""),
        (f"{OFF} --hbm 80MB", 0, ""),
        (f"{OFF} --hbm 80MB --optimizer adam", 1, "error[memory]: 2"),
        (f"{OFF} --hbm 300MB --optimizer adam", 0, ""),
        (f"{OFF} --hbm 250MB --optimizer adam --gradients same", 1, "gradients 67"),
        (f"{OFF} --hbm 1MB --level memory=off", 0, "not looked for: "),
        (f"{OFF} --hbm 1MB --level memory=warning", 0, "warning[memory]: 67"),
        (f"{OFF} --budget device=80MB", 0, ""),
        (f"{OFF} --budget device=80MB --optimizer adam", 1, "error[budget]: 2"),
        (f"{OFF} --budget device=v5p --optimizer adam --gradients same", 0, ""),
        ("--optimizer adam", 2, "'--optimizer' needs '--hbm' or '--budget'"),
        ("--budget peak=1GB", 2, "'--budget': peak is of prove; what is planned is of device"),
        ("--budget device", 2, "'--budget': 'device': write it as memory=bytes"),
        ("--budget device=1GB --budget device=2GB", 2, "'--budget': 'device' has two values"),
    ],
)  # fmt: skip
def test_what_check_tells_and_how_it_exits(small, options, code, told):
    model, rules = small
    done = run("check", model, "-r", rules, "-m", "fsdp=2,tp=1", *options.split())
    assert (done.exit_code, told in done.output) == (code, True), done.output
    if OFF in options:
        assert done.stdout.count("error[") == code


def test_a_manifest_that_is_old_is_told(tmp_path, monkeypatch):
    """Nothing told that the committed manifest was of another model, so its check was green."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def model(width):
        Path("old_manifest.py").write_text(
            f"import jax\ndef model(): return {{'w': jax.ShapeDtypeStruct(({width}, 8), 'float32')}}"
        )
        sys.modules.pop("old_manifest", None)
        importlib.invalidate_caches()

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    model(8)
    assert run("manifest", "old_manifest:model", "-o", "m.json").exit_code == 0
    same = run("manifest", "old_manifest:model", "--check", "m.json")
    assert (same.exit_code, same.stdout) == (0, "no differences\n")
    model(16)
    before = Path("m.json").read_bytes()
    old = run("manifest", "old_manifest:model", "--check", "m.json")
    assert old.exit_code == 1
    told, difference, *_ = old.stdout.splitlines()
    assert told == "m.json is old: shardrules manifest old_manifest:model -o m.json"
    assert difference.startswith("~ w  (8, 8) -> (16, 8)") or "[8, 8] -> [16, 8]" in difference
    assert Path("m.json").read_bytes() == before
    both = run("manifest", "old_manifest:model", "--check", "m.json", "-o", "n.json")
    assert (both.exit_code, "'--check' and '-o' / '--output' exclude each other" in both.stderr) == (2, True)


@pytest.mark.parametrize(
    ("rows", "words", "code"),
    [
        (64, "", 0),
        (32, "", 1),
        (32, "--fail-on grown", 0),
        (66, "--fail-on grown", 1),
        (66, "--fail-on grown --tolerance 5%", 0),
        (66, "--fail-on grown --tolerance 1%", 1),
        (66, "--fail-on never", 0),
    ],
)
def test_diff_fails_on(rows, words, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.json").write_text(json.dumps({"rules": [["w", ["tp"]]]}))
    for name, size in (("a.json", 64), ("b.json", rows)):
        Path(name).write_text(json.dumps({"params": [["w", [size, 8], "F32"]]}))
    assert run("plan", "a.json", "-r", "r.json", "-m", "tp=2", "--lock", "a.lock").exit_code == 0
    done = run("diff", "a.lock", "b.json", "-r", "r.json", *words.split())
    assert done.exit_code == code, done.output
