"""The command line, as a person and as CI would call it."""

from __future__ import annotations

import gzip
import importlib
import io
import json
import re
import sys
from pathlib import Path

import pytest

import shardrules as sr
from examples import demo
from tests.support.command_line import ended
from tests.support.command_line import invoke as run

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
    result = run(*words, "--hbm", "1MB")
    assert (result.exit_code, "P('fsdp', 'tp')" in result.stdout) == (0, True)
    assert "DOES NOT FIT into 1.00 MB" in result.stdout
    told = json.loads(run(*words, "--format", "json", "--gradients", "BF16", "--optimizer", "adamw").stdout)
    wq = next(row for row in told["folded"] if row["path"] == "layers/{0,1}/wq/kernel")
    assert (wq["leaves"], wq["bytes"], wq["device_bytes"]) == (2, 2 * 2 * 512**2, 2 * 2 * 512**2 // 8)
    elements = 2 * 512**2 // 8 + 512 + 4096**2
    needed = {key: told["device_bytes"][key] for key in ("gradients", "optimizer")}
    assert needed == {"gradients": 2 * elements, "optimizer": 2 * 4 * elements}
    assert "fits" not in told
    for hbm, fits in (("1MB", False), ("1GB", True)):
        assert json.loads(run(*words, "--format", "json", "--hbm", hbm).stdout)["fits"] is fits


SLIP = {
    "model": "heads",
    "params": [["attn/k_proj/kernel", [4096, 768], "BF16"], ["attn/q_proj/kernel", [4096, 4096], "BF16"]],
}


@pytest.mark.parametrize(
    ("more", "told", "code"),
    [
        (("-m", "fdsp=8,tp=4"), "did you mean 'fdsp'?", 1),
        (("-m", "tp=4"), "or declare that a mesh may lack it: --optional-axes fsdp\n", 1),
        (("-m", "tp=4", "--optional-axes", "sp,fsdp"), "0 errors, 0 warnings", 0),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB"), "warning[unused-axis]", 1),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB"), "that it cuts data alone: --data-axes dp\n", 1),
        (("-m", "fsdp=8,tp=4,dp=2", "--large", "500kB", "--data-axes", "dp"), "nothing found: 2 leaves", 0),
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


def test_check_for_programs_and_for_the_root_of_the_checkout(small, monkeypatch):
    """A step may run in another directory, and GitHub looks from the root."""
    model, rules = small
    args = ("check", model, "-r", rules, "-m", "fsdp=2,tp=4", "--format")
    finding = json.loads(run(*args, "json").stdout)["findings"][0]
    assert (finding["kind"], finding["paths"], finding["rule"]) == ("catch-all", ["embed"], 1)
    findings = json.loads(run(*args, "json", "--hbm", "1MB").stdout)["findings"]
    assert {row["kind"]: row["paths"][0] for row in findings}["memory"] == "embed"  # the largest first
    place = ",line=5,title=shardrules catch-all::1 leaf of 4"
    assert run(*args, "github").stdout.startswith(f"::error file={rules}{place}")
    elsewhere = rules.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for root, file in ((rules.parent.parent, f"{rules.parent.name}/{rules.name}"), (elsewhere, f"../{rules.name}")):
        monkeypatch.setenv("GITHUB_WORKSPACE", str(root))
        from_here = (*args[:3], f"../{rules.name}", *args[4:], "github")
        assert run(*from_here).stdout.startswith(f"::error file={file}{place}")


def test_explain(small):
    model, rules = small
    result = run("explain", model, "layers/1/wq/kernel", "-r", rules, "-m", "fsdp=3,tp=4")
    assert result.exit_code == 0
    assert "rule 1: '.*' matches, but comes after rule 0" in result.stdout
    assert "dim 0 of size 512 is not divisible by fsdp=3" in result.stdout
    missing = run("explain", model, "layers/1/wq/kernl", "-r", rules, "-m", "fsdp=3")
    assert (missing.exit_code, "near it: layers/{0,1}/wq/kernel" in missing.stderr) == (2, True)


def test_sweep(small):
    model, rules = small
    result = run("sweep", model, "-r", rules, "--devices", 8, "--axes", "fsdp,tp", "--hbm", "67MB")
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines), lines[1].startswith("fsdp=8,tp=1")) == (0, 5, True)
    assert "does not fit" in result.stdout
    given = run("sweep", model, "-r", rules, "-m", "fsdp=2", "-m", "fsdp=4")
    assert [line.split()[0] for line in given.stdout.splitlines()] == ["mesh", "fsdp=4", "fsdp=2"]


def test_locks_are_compared(small, tmp_path):
    """And a lock beside a model says the mesh."""
    model, rules = small
    lock, other = tmp_path / "plan.lock", tmp_path / "other.lock"
    for path, mesh in ((lock, "fsdp=2,tp=4"), (other, "fsdp=4,tp=2")):
        assert run("plan", model, "-r", rules, "-m", mesh, "--lock", path).exit_code == 0
    for words, code, told in (
        ((lock, model, "-r", rules), 0, "no differences\n"),
        (
            (model, lock),
            2,
            "this reads 'shardrules lock 3'; make the lock again with Plan.lock or shardrules plan --lock",
        ),
        ((lock, model, "-r", rules, "-m", "tp=8"), 1, "mesh fsdp=2,tp=4 -> tp=8"),
        ((lock, other), 1, "mesh fsdp=2,tp=4 -> fsdp=4,tp=2"),
        ((lock, model), 2, "not a lock; for a model, give --rules"),
        ((lock, tmp_path / "gone"), 2, "gone: no such lock"),
        ((tmp_path / "gone.lock", lock), 2, "gone.lock: no such file; shardrules plan --lock "),
        ((lock, lock, "-m", "tp=2"), 2, "a lock has its own rules and mesh: leave out --rules"),
    ):
        done = run("diff", *words)
        assert (done.exit_code, told in done.output) == (code, True), done.output


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module of a model, which is imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(text):
        Path("my_model.py").write_text(f"import jax\n{text}")
        sys.modules.pop("my_model", None)
        importlib.invalidate_caches()

    return write


def test_a_module_s_tree_and_rules(module):
    leaf = "jax.ShapeDtypeStruct((8, 8), 'bfloat16')"
    module(f"RULES = [('w', ('tp',))]\ndef params(): return {{'w': [{leaf}] * 3}}\ndef broken(): raise IOError('gone')")
    words = ("-r", "my_model:RULES", "-m", "tp=4")
    assert "w/{0..2}" in run("plan", "my_model:params", *words).stdout
    broken = run("plan", "my_model:broken", *words)
    assert (broken.exit_code, "gone" in broken.stderr) == (2, True)


@pytest.mark.parametrize("no_color", [None, "1"])
def test_a_terminal_is_shown_what_a_pipe_gets_but_for_colours(small, monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color or "")
    words = ("check", small[0], "-r", small[1], "-m", "fsdp=2,tp=4,dp=2")
    monkeypatch.setattr("sys.argv", ["shardrules", *map(str, words)])
    monkeypatch.setattr("sys.stdout", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    assert ended() == 1
    shown, piped = screen.getvalue(), run(*words).stdout
    assert ("\x1b[31m" in shown, "\x1b[" in piped) == (no_color is None, False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == piped


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
    hints = ["1 error, 0 warnings, 0 info", "--fix prints the missing rules"]
    assert loud.stdout.splitlines() == [*quiet.stdout.splitlines(), *hints]
    for more in (["--replicated", "embed"], ["--format", "json"]):
        assert "--fix" not in run("check", *words[:-1], *more).stdout
    assert run("plan", *words, "--hbm", "0").stderr.startswith("error: ")


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
    assert re.match(rf"# {source}: \d rules? to paste {where}:\n", done.stdout), done.output
    assert (done.exit_code, told in done.stdout) == (1, True)
    assert run(*words, "--fix", "--fail-on", "never").exit_code == 0
    if suffix == "toml" and "before" not in where:
        Path(source).write_text(text + done.stdout)
        fine = run(*words, "--fix")
        assert (run(*words).exit_code, fine.exit_code, fine.stdout) == (0, 0, "")
        assert "no rule is to be added" in fine.stderr


@pytest.mark.parametrize(
    ("text", "told"), [('companions = ["lora"]', "leave out companions"), ('kind = "logical"', "logical axis names")]
)
def test_what_is_not_fixed(small, text, told):
    model, rules = small
    rules.write_text(f'{text}\nrules = [["wq", ["tp"]]]')
    model.write_text(json.dumps(SMALL | {"logical_axes": {}}))
    done = run("check", model, "-r", rules, "-m", "tp=2", "--fix")
    assert (done.exit_code, told in done.stderr) == (2, True), done.output


def test_suggested_rules_are_clean_under_check(small, tmp_path):
    written = tmp_path / "suggested.toml"
    result = run("suggest", small[0], "--devices", 8, "--axes", "fsdp,tp")
    written.write_text(result.stdout, encoding="utf-8")
    mesh = result.stdout.split(" on ")[1].split(":")[0]
    checked = run("check", small[0], "-r", written, "-m", mesh, "--fail-on", "warning")
    assert (result.exit_code, checked.exit_code) == (0, 0), checked.stdout


def test_a_report_that_fails_leaves_nothing_behind(small, tmp_path, monkeypatch):
    monkeypatch.delattr(sr.Plan, "to_html")
    lock, page = tmp_path / "plan.lock", tmp_path / "plan.html"
    result = run("plan", small[0], "-r", small[1], "-m", "fsdp=2", "--lock", lock, "--html", page)
    assert (result.exit_code, lock.exists(), page.exists()) == (2, False, False)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("-m fsdp=8 --format python", 0, "P(None, 'fsdp')"),
        ("-m fsdp=8 --format text", 0, "rule 0 wq/kernel: 2 leaves"),
        ("-m fsdp=8 --dialect nnx", 0, 'dialect = "nnx"'),
        ("", 2, "give a mesh with --mesh, or --devices"),
        ("-m fsdp=8 --devices 8", 2, "'--mesh' and '--devices' exclude each other"),
        ("-m fsdp=8 --dialect maxtext", 2, "for logical axis names"),
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
    assert (result.exit_code, result.stderr.partition(":")[0]) == (1, "warning[replicated]")
    assert result.stderr.splitlines()[1] == "    up/kernel"


@pytest.mark.parametrize("target", ["out.json", "out.json.gz", "stream"])
def test_a_manifest_is_written_without_rules(module, target):
    module("def model(): return {'layers': [{'w': jax.ShapeDtypeStruct((8, 16), 'bfloat16')}] * 3, 'n': 3}")
    words = ("manifest", "my_model:model")
    if target == "stream":
        Path(target := "out.json").write_bytes(run(*words).stdout_bytes)
    else:
        assert run(*words, "-o", target).exit_code == 0
    assert (Path(target).read_bytes()[:2] == b"\x1f\x8b") is target.endswith(".gz")
    plan = sr.plan(sr.read_model(target), [], {"tp": 2})
    assert list(plan.paths) == [f"layers/{i}/w" for i in range(3)]
    assert {(kind.shape, str(kind.dtype)) for kind in plan.kinds} == {((8, 16), "bfloat16")}
    for more, told in ((("-o", target), "would replace"), (("--dialect", "jaxseq"), "a manifest has paths such as")):
        refused = run("manifest", target, *more)
        assert (refused.exit_code, told in refused.stderr) == (2, True)


def test_a_manifest_in_the_paths_of_nnx_stands_for_the_model(module):
    module("def model(): return {'w': {'value': jax.ShapeDtypeStruct((8, 16), 'bfloat16')}, 'n': 3}")
    Path("r.json").write_text(json.dumps([["w$", ["fsdp"]]]))
    words = ("-r", "r.json", "-m", "fsdp=2", "--dialect", "nnx")
    assert run("manifest", "my_model:model", "--dialect", "nnx", "-o", "m.json").exit_code == 0
    of_model, of_file = (run("plan", source, *words).stdout for source in ("my_model:model", "m.json"))
    assert "P('fsdp', None)" in of_model
    assert of_model.splitlines()[1:2] == of_file.splitlines()[1:2]


def test_a_manifest_of_boxes_has_their_names(tmp_path):
    nn = pytest.importorskip("flax.linen")
    jax = pytest.importorskip("jax")
    leaf = jax.ShapeDtypeStruct((8, 16), "float32")
    tree = {"w": nn.LogicallyPartitioned(leaf, ("embed", None)), "b": leaf}
    paths = [tmp_path / name for name in ("m.json.gz", "p.json", "n.json")]
    sr.write_manifest(tree, paths[0])
    sr.write_manifest(sr.plan(tree, sr.LogicalRules([("embed", "fsdp")]), {"fsdp": 2}), paths[1])
    assert run("manifest", paths[0], "-o", paths[2]).exit_code == 0
    texts = [gzip.decompress(paths[0].read_bytes()).decode(), *(path.read_text() for path in paths[1:])]
    assert texts[0] == texts[1]
    assert [json.loads(text)["logical_axes"] for text in texts] == [{"w": ["embed", None]}] * 3
    with pytest.raises(ValueError, match="a manifest has paths such as"):
        sr.write_manifest(sr.plan({"w": leaf}, sr.Rules([], sr.dialects.KEYSTR), {"a": 1}), "x")


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
        (f"{OFF} --budget device=80MB --optimizer adam", 1, "; the budget is 80.0 MB\n"),
        (f"{OFF} --budget device=v5p --optimizer adam --gradients same", 0, ""),
        ("--optimizer adam", 2, "'--optimizer' needs '--hbm' or '--budget'"),
        ("--budget peak=1GB", 2, "'--budget': peak is of prove; what is planned is of device"),
        ("--budget device", 2, "'--budget': 'device': write it as memory=bytes"),
        ("--budget device=1GB --budget device=2GB", 2, "'--budget': a key is given twice"),
    ],
)  # fmt: skip
def test_what_check_tells_and_how_it_exits(small, options, code, told):
    model, rules = small
    done = run("check", model, "-r", rules, "-m", "fsdp=2,tp=1", *options.split())
    assert (done.exit_code, told in done.output) == (code, True), done.output
    if OFF in options:
        assert done.stdout.count("error[") == code


def test_a_manifest_that_is_old_is_told(module):
    """Nothing told that the committed manifest was of another model, so its check was green."""
    text = "def model(): return {{'w': jax.ShapeDtypeStruct(({}, 8), 'float32')}}"
    module(text.format(8))
    words = ("manifest", "my_model:model", "--check", "m.json")
    assert run(*words[:2], "-o", "m.json").exit_code == 0
    assert run(*words).stdout == "no differences\n"
    module(text.format(16))
    before = Path("m.json").read_bytes()
    old = run(*words)
    assert (old.exit_code, Path("m.json").read_bytes()) == (1, before)
    told, difference, *_ = old.stdout.splitlines()
    assert told == "m.json is old: shardrules manifest my_model:model -o m.json"
    assert "w" in difference
    assert "'--check' and '-o' / '--output' exclude each other" in run(*words, "-o", "n.json").stderr


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
