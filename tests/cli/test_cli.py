"""The command line, as a person and as CI would call it."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import shardrules as sr
from tests.support.command_line import invoke as run

KERNELS = [[f"layers/{i}/wq/kernel", [512, 512], "BF16"] for i in range(2)]
SMALL = {"model": "small", "params": [*KERNELS, ["layers/1/norm", [512], "F32"], ["embed", [4096, 4096], "F32"]]}
RULES = """replicated = ["norm"]
[[rules]]
pattern = "wq/kernel"
spec = ["fsdp", "tp"]
[[rules]]
pattern = ".*"
spec = []
"""
HEADS = [["attn/k_proj/kernel", [4096, 768], "BF16"], ["attn/q_proj/kernel", [4096, 4096], "BF16"]]
FILES = {
    "model.json": SMALL, "rules.toml": RULES,
    "heads.json": {"params": HEADS}, "proj.json": [["proj", ["fsdp", "tp"]]],
    "sp.json": {"optional_axes": ["fsdp"], "rules": [["proj", [["fsdp", "sp"], "tp"]]]},
    "declared.json": {"optional_axes": ["fsdp"], "data_axes": ["dp"]},
    "named.json": SMALL | {"logical_axes": {}}, "logical.toml": 'kind = "logical"\nrules = []', "lora.toml": 'companions = ["lora"]\nrules = []',
    "w64.json": {"params": [["w", [64, 8], "F32"]]}, "w32.json": {"params": [["w", [32, 8], "F32"]]},
    "w66.json": {"params": [["w", [66, 8], "F32"]]}, "w.json": [["w", ["tp"]]],
    "step.py": "def no_plan(mesh): return (lambda x: x), (3.0,)\ndef no_step(mesh): return 3",
}  # fmt: skip
CHECK, OFF = "check model.json -r rules.toml -m fsdp=2,tp=1", "--level catch-all=off"
SLIP, MORE = "check heads.json -r proj.json --fail-on warning -m", "fsdp=8,tp=4,dp=2 --large 500kB"
LOCKS = "plan model.json -r rules.toml -m fsdp=2,tp=4 --lock a.lock; plan model.json -r rules.toml -m fsdp=4,tp=2 --lock b.lock; diff"
GROWN = "plan w64.json -r w.json -m tp=2 --lock a.lock; diff a.lock"
SUGGEST, SWEEP, PLAN = "suggest model.json", "sweep model.json -r rules.toml", "plan model.json -r rules.toml"
SOLVE = "solve step:no_plan -m fsdp=4,tp=2 --hardware v5p"
# Commands, the exit code of the last one, and a part of what it says.
SAID = [
    # Slips are told, and declarations heard.
    (f"{SLIP} fdsp=8,tp=4", 1, "did you mean 'fdsp'?"),
    (f"{SLIP} tp=4", 1, "or declare that a mesh may lack it: --optional-axes fsdp\n"),
    (f"{SLIP} tp=4 --optional-axes sp,fsdp", 0, "0 errors, 0 warnings"),
    (f"{SLIP} tp=4 -r sp.json --optional-axes sp", 0, "0 errors, 0 warnings"),
    (f"{SLIP} {MORE}", 1, "that it cuts data alone: --data-axes dp\n"),
    (f"{SLIP} {MORE} --data-axes dp", 0, "nothing found: 2 leaves"),
    (f"{SLIP} tp=4,dp=2 --large 500kB -r declared.json", 0, "0 errors, 0 warnings"),
    (f"{SLIP} fsdp=8,tp=4", 0, "nothing found: 2 leaves, 1 rule, on fsdp=8,tp=4\n"),
    (f"{SLIP} fsdp=8,tp=4 --format github", 0, "nothing found: 2 leaves, 1 rule, on fsdp=8,tp=4\n"),
    (f"{SLIP} fsdp=8,tp=4 --head-dim 128", 1, "1.5 heads"),
    # Levels, memory and budgets of check.
    (CHECK, 1, "error[catch-all]"),
    (f"{CHECK} --fail-on never", 0, "error[catch-all]"),
    (f"{CHECK} --level catch-all=warning", 0, "warning[catch-all]"),
    (f"{CHECK} --level catch-all=warning --fail-on warning", 1, "warning[catch-all]"),
    (f"{CHECK} --replicated embed", 0, "nothing found"),
    (f"{CHECK} --large 1GB", 0, "0 errors"),
    (f"{CHECK} --large 1GB --fail-on info", 1, "info["),
    (f"{CHECK} {OFF} --hbm 80MB", 0, "nothing found"),
    (f"{CHECK} {OFF} --hbm 80MB --optimizer adam", 1, "error[memory]: 2"),
    (f"{CHECK} {OFF} --hbm 130MB --optimizer adam:BF16", 1, "optimizer 68"),
    (f"{CHECK} {OFF} --hbm 250MB --optimizer adam --gradients same", 1, "gradients 67"),
    (f"{CHECK} {OFF} --hbm 1MB --level memory=off", 0, "not looked for: "),
    (f"{CHECK} {OFF} --hbm 1MB --level memory=warning", 0, "warning[memory]: 67"),
    (f"{CHECK} {OFF} --budget device=80MB", 0, "nothing found"),
    (f"{CHECK} {OFF} --budget device=80MB --optimizer adam", 1, "; the budget is 80.0 MB\n"),
    (f"{CHECK} {OFF} --budget device=v5p --optimizer adam --gradients same", 0, "nothing found"),
    (f"{CHECK} --optimizer adam", 2, "--optimizer are counted for --hbm or --budget: give one"),
    (f"{CHECK} --budget peak=1GB", 2, "'--budget': peak is of prove; what is planned is of device"),
    (f"{CHECK} --budget device", 2, "'--budget': 'device': write it as memory=bytes"),
    (f"{CHECK} --budget device=1GB --budget device=2GB", 2, "'--budget': a key is given twice"),
    (f"{CHECK} --level ded=off", 2, "'--level': there is no finding 'ded'; near it: dead"),
    (f"{CHECK} --level dead=loud", 2, "'--level': dead=loud: the level is 'loud'; it must be one of 'error'"),
    (f"{CHECK} --fix --format json", 2, "'--fix' and '--format' exclude each other"),
    (f"{CHECK} --job a", 2, "'--job' and 'SOURCE' exclude each other"),
    (f"{CHECK} --head-dim 0.5", 2, "'--head-dim': '0.5' is not a valid number"),
    ("check model.json -r lora.toml -m tp=2 --fix", 2, "leave out companions"),
    ("check named.json -r logical.toml -m tp=2 --fix", 2, "logical axis names"),
    ("check model.json --fix=3", 2, "'--fix' does not take a value"),
    # plan and explain
    ("plan", 2, "Missing argument 'SOURCE'"),
    ("plan model.json", 2, "Missing option '-r' / '--rules'"),
    (PLAN, 2, "Missing option '-m' / '--mesh'"),
    (f"{PLAN} -m", 2, "'-m' requires an argument"),
    (f"{PLAN} --mash fsdp=8", 2, "Did you mean"),
    (f"{PLAN} -z", 2, "No such option"),
    (f"{PLAN} -m tp=2 -- --x", 2, "Got unexpected extra argument (--x)"),
    ("chek", 2, "No such command 'chek'"),
    (f"{PLAN} -m tp=2 --hbm 80", 2, "'--hbm': the value is '80': a unit is missing; write '80GB'"),
    (f"{PLAN} -m tp=2 --hbm v5q", 2, "'--hbm': name: there are no figures for 'v5q'; there are some for v4"),
    (f"{PLAN} -m tp=2 --lock x --html x", 2, "--html x would replace --lock"),
    (f"{PLAN} -m tp=2 --lock model.json", 2, "--lock model.json would replace"),
    (f"{PLAN} -m tp=2 --optimizer magic", 2, "'--optimizer': 'magic' is none of sgd, momentum, lion, adam, adamw; write it as adam:BF16"),
    (f"{PLAN} -m tp=2 --optimizer adam:bf61", 2, "'--optimizer': unknown dtype 'bf61'"),
    (f"{PLAN} -m tp=-1", 2, "the size of the mesh axis 'tp' is -1 (an int); it must be an integer from 1"),
    (f"{PLAN} -m tp=nan", 2, "'-m' / '--mesh': mesh 'tp=nan': the size of 'tp' is not an integer; write tp=4"),
    (f"{PLAN} --mesh=", 2, "the mesh is empty; write its axes as dp=8,tp=4"),
    (f"{PLAN} -m tp=2 --dialect nxn", 2, "'--dialect': dialect 'nxn' is unknown; it is one of eformer"),
    (f"{PLAN} -m tp=2 --dialect linen", 2, "these are regex rules, and linen is for others"),
    (f"{PLAN} -m tp=2 --dialect maxtxt", 2, "big_vision, linen, flax.core, maxtext, haliax"),
    (f"{PLAN} -m tp=2 --optimizer adam:", 2, "'--optimizer': unknown dtype ''"),
    ("plan step:no_step -r rules.toml -m tp=2", 2, "step:no_step: the call of no_step() has raised TypeError"),
    ("explain model.json layers/1/wq/kernel -r rules.toml -m fsdp=3,tp=4", 0, "rule 1: '.*' matches, but comes after rule 0"),
    ("explain model.json layers/1/wq/kernel -r rules.toml -m fsdp=3,tp=4", 0, "dim 0 of size 512 is not divisible by fsdp=3"),
    ("explain model.json layers/1/wq/kernl -r rules.toml -m fsdp=3", 2, "near it: layers/{0,1}/wq/kernel"),
    ("explain model.json embed -m fsdp=2,tp=2 -r rules.toml -r proj.json", 0, "note: these rules are not read: rules of rules.toml\n"),
    ("explain heads.json attn/k_proj/kernel -m fsdp=2,tp=2 -r rules.toml -r proj.json", 0, "P('fsdp', 'tp')"),
    # A lock beside a model says the mesh.
    (f"{LOCKS} a.lock model.json -r rules.toml", 0, "no differences\n"),
    (f"{LOCKS} model.json a.lock", 2, "this reads 'shardrules lock 3'; make the lock again with Plan.lock or shardrules plan --lock"),
    (f"{LOCKS} a.lock model.json -r rules.toml -m tp=8", 1, "mesh fsdp=2,tp=4 -> tp=8"),
    (f"{LOCKS} a.lock b.lock", 1, "mesh fsdp=2,tp=4 -> fsdp=4,tp=2"),
    (f"{LOCKS} a.lock model.json", 2, "model.json: give its --rules; the name of a lock ends with .lock"),
    (f"{LOCKS} a.lock gone.lock", 2, "gone.lock: neither a lock nor a file with one: No such file"),
    (f"{LOCKS} gone.lock a.lock", 2, "gone.lock: no such file; shardrules plan --lock "),
    (f"{LOCKS} a.lock a.lock -m tp=2", 2, "a lock has its own rules and mesh: leave out --rules"),
    (f"{LOCKS} a.lock b.lock --tolerance 2%", 2, "--tolerance is of --fail-on grown"),
    (f"{LOCKS} a.lock b.lock --fail-on grown --tolerance -1%", 2, "'--tolerance': '-1%': write a part"),
    (f"{GROWN} w64.json -r w.json", 0, "no differences"),
    (f"{GROWN} w32.json -r w.json", 1, "(32, 8)"),
    (f"{GROWN} w32.json -r w.json --fail-on grown", 0, "(32, 8)"),
    (f"{GROWN} w66.json -r w.json --fail-on grown", 1, "(66, 8)"),
    (f"{GROWN} w66.json -r w.json --fail-on grown --tolerance 5%", 0, "(66, 8)"),
    (f"{GROWN} w66.json -r w.json --fail-on grown --tolerance 1%", 1, "(66, 8)"),
    (f"{GROWN} w66.json -r w.json --fail-on never", 0, "(66, 8)"),
    # suggest, sweep, solve and prove
    (f"{SUGGEST} -m fsdp=8 --format python", 0, "P(None, 'fsdp')"),
    (f"{SUGGEST} -m fsdp=8 --format text", 0, "rule 0 wq/kernel: 2 leaves"),
    (f"{SUGGEST} -m fsdp=8 --dialect nnx", 0, 'dialect = "nnx"'),
    (SUGGEST, 2, "give a mesh with --mesh, or --devices"),
    (f"{SUGGEST} -m fsdp=8 --dialect maxtext", 2, "for logical axis names"),
    (f"{SWEEP} --devices 8 --axes fsdp,tp --hbm 67MB", 0, "does not fit"),
    (f"{SWEEP} -m tp=2 --devices 8", 2, "'-m' / '--mesh' and '--devices' exclude each other: leave out either"),
    (f"{SWEEP} -m tp=2 --axes tp=2", 2, "'--axes': 'tp=2' has sizes"),
    (f"{SWEEP} --axes tp", 2, "'--axes' needs '--on' or '--devices'"),
    (f"{SWEEP} --devices 8", 2, "--devices and --axes for all factorizations"),
    (f"{SWEEP} --devices 0 --axes tp", 2, "'--devices': 0 is not in the range x>=1"),
    (f"{SWEEP} -m tp=2 --try batch=8", 2, "'--try' and '-r' / '--rules' exclude each other"),
    ("sweep model.json -m tp=2", 2, "model.json: a model needs --rules; without them SOURCE is a step"),
    ("sweep step:no_step -m tp=2 -m tp=4", 2, "--mesh: of a step give one"),
    ("sweep step:no_step -m tp=2 --gradients same", 2, "a step has its own rules, gradients and optimizer"),
    ("prove step:no_step -m tp=2 --budget total=90", 2, "'--budget': total=90: the value is '90': a unit is missing; write '90GB'"),
    ("solve step:no_plan", 2, "give the devices: --on v5p:8x8x8, or --mesh and"),
    ("solve step:no_plan -m fsdp=4", 2, "give the devices: --hardware v5p"),
    (f"{SOLVE} --axes a,b", 2, "'--axes' exclude each other"),
    (f"{SOLVE} --on v5p:2x2x2", 2, "'--on' and '--hardware' exclude each other"),
    (f"{SOLVE} --hbm much", 2, "there are no figures for 'much'"),
    (SOLVE, 2, "none of the arguments is a Plan"),
    ("solve step:no_step -m fsdp=4 --hardware v5p", 2, "this gives 3"),
    ("solve step:no_plan -m fsdp=4 --hardware v99", 2, "figures for 'v99'"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, content in FILES.items():
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    yield tmp_path
    for name in ("step", "own_rules", "my_model", "m"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("words", "code", "told"), SAID)
def test_what_a_command_says_and_how_it_exits(words, code, told):
    *before, last = words.split("; ")
    assert [run(*each.split()).exit_code for each in before] == [0] * len(before)
    done = run(*last.split())
    assert (done.exit_code, told in done.output) == (code, True), done.output
    if code == 2:
        assert (done.stdout, done.stderr[:7]) == ("", "error: ")
        assert done.stderr.count("\n") == 1 + ("\nExample: " in done.stderr)
        assert "bug in shardrules" not in done.stderr


def test_plan_as_text_and_json():
    words = (*PLAN.split(), "-m", "fsdp=2,tp=4")
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


def test_check_for_programs_and_for_the_root_of_the_checkout(tmp_path, monkeypatch):
    """A step may run in another directory, and GitHub looks from the root."""
    args = ("check", tmp_path / "model.json", "-r", tmp_path / "rules.toml", "-m", "fsdp=2,tp=4", "--format")
    finding = json.loads(run(*args, "json").stdout)["findings"][0]
    assert (finding["kind"], finding["paths"], finding["rule"]) == ("catch-all", ["embed"], 1)
    findings = json.loads(run(*args, "json", "--hbm", "1MB").stdout)["findings"]
    assert {row["kind"]: row["paths"][0] for row in findings}["memory"] == "embed"  # the largest first
    place = ",line=5,title=shardrules catch-all::1 leaf of 4"
    assert run(*args, "github").stdout.startswith(f"::error file={tmp_path / 'rules.toml'}{place}")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for root, file in ((tmp_path.parent, f"{tmp_path.name}/rules.toml"), (elsewhere, "../rules.toml")):
        monkeypatch.setenv("GITHUB_WORKSPACE", str(root))
        from_here = (*args[:3], "../rules.toml", *args[4:], "github")
        assert run(*from_here).stdout.startswith(f"::error file={file}{place}")


def test_meshes_are_sorted():
    given = run(*SWEEP.split(), "-m", "fsdp=2", "-m", "fsdp=4")
    assert [line.split()[0] for line in given.stdout.splitlines()] == ["mesh", "fsdp=4", "fsdp=2"]
    *most, more = run(*SWEEP.split(), "--devices", 64, "--axes", "fsdp,tp,x").stdout.splitlines()
    assert (len(most), more) == (21, "... and 8 more meshes")


def module(text):
    """Writes the module of a model, which is imported anew."""
    Path("my_model.py").write_text(f"import jax\n{text}")
    sys.modules.pop("my_model", None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("types", ["auto", "explicit"])
def test_the_axes_of_a_step_s_mesh_are_of_the_type_that_is_asked_for(types):
    module("def step_on(mesh): raise ValueError({each.name for each in mesh.axis_types})")
    done = run("prove", "my_model:step_on", "-m", "a=2,b=1", "--axis-types", types)
    assert f"ValueError: {{'{types.title()}'}}" in done.stderr, done.stderr


def test_a_module_s_tree_and_rules():
    leaf = "jax.ShapeDtypeStruct((8, 8), 'bfloat16')"
    module(f"RULES = [('w', ('tp',))]\ndef params(): return {{'w': [{leaf}] * 3}}\ndef broken(): raise IOError('gone')")
    Path("m.py").write_text("from my_model import *")
    words = ("-r", "my_model:RULES", "-m", "tp=4")
    for source in ("my_model:params", "m:params"):
        assert "w/{0..2}" in run("plan", source, *words).stdout
    broken = run("plan", "my_model:broken", *words)
    assert (broken.exit_code, "gone" in broken.stderr) == (2, True)


@pytest.mark.parametrize("no_color", [None, "1"])
def test_a_terminal_is_shown_what_a_pipe_gets_but_for_colours(monkeypatch, no_color):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color or "")
    words = (*CHECK.split(), "-m", "fsdp=2,tp=4,dp=2")
    shown, piped = (run(*words, is_terminal=each).stdout for each in (True, False))
    assert ("\x1b[31m" in shown, "\x1b[" in piped) == (no_color is None, False)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == piped


@pytest.mark.parametrize(
    ("dialect", "name", "pattern", "path"),
    [
        ("JAXSeq", "wq/kernel", r"\['wq'\]\['kernel'\]", "['wq']['kernel']"),
        ("nnx", "wq/kernel/value", "kernel$", "wq/kernel"),
    ],
)
def test_a_dialect_takes_the_names_of_a_file_apart(dialect, name, pattern, path):
    Path("m.json").write_text(json.dumps({"params": [[name, [8, 8], "F32"]]}))
    Path("r.json").write_text(json.dumps({"dialect": dialect, "rules": [[pattern, ["tp"]]]}))
    result = run("explain", "m.json", path, "-r", "r.json", "-m", "tp=2")
    assert f"rule 0: {pattern!r} wins" in result.stdout, result.output


def test_quiet_leaves_the_result():
    words = ("model.json", "-r", "rules.toml", "-m", "fsdp=2,tp=4", "-q")
    done = run("plan", *words, "--html", "plan.html")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "<title>small</title>" in Path("plan.html").read_text(encoding="utf-8")
    loud, quiet = run("check", *words[:-1]), run("check", *words)
    assert loud.stdout.splitlines() == [*quiet.stdout.splitlines(), "1 error, 0 warnings, 0 info"]
    assert run("plan", *words, "--hbm", "0").stderr.startswith("error: ")


FIXES = [
    ("toml", '[[rules]]\npattern = "wq"\nspec = ["tp"]\n', "at the end of the list", 'pattern = "embed"'),
    ("toml", '[[rules]]\npattern = ".*"\nspec = []\n', "before rule 0", 'pattern = "embed"'),
    ("json", '[["wq", ["tp"]]]', "at the end of the list", '["embed", ["tp", "fsdp"]],'),
    ("py", 'RULES = [("wq", ("tp",))]', "at the end of the list", "(r'embed', P('tp', 'fsdp')),"),
]


@pytest.mark.parametrize(("suffix", "text", "where", "told"), FIXES)
def test_rules_to_paste(suffix, text, where, told):
    Path(f"own_rules.{suffix}").write_text(text)
    source = "own_rules:RULES" if suffix == "py" else f"own_rules.{suffix}"
    words = ("check", "model.json", "-r", source, "-m", "fsdp=2,tp=2")
    done = run(*words, "--fix")
    assert re.match(rf"# {source}: \d rules? to paste {where}:\n", done.stdout), done.output
    assert (done.exit_code, told in done.stdout) == (1, True)
    assert run(*words, "--fix", "--fail-on", "never").exit_code == 0
    if suffix == "toml" and "before" not in where:
        Path(source).write_text(text + done.stdout)
        fine = run(*words, "--fix")
        assert (run(*words).exit_code, fine.exit_code, fine.stdout) == (0, 0, "")
        assert "no rule is to be added" in fine.stderr


def test_suggested_rules_are_clean_under_check():
    result = run(*SUGGEST.split(), "--devices", 8, "--axes", "fsdp,tp")
    Path("suggested.toml").write_text(result.stdout, encoding="utf-8")
    mesh = result.stdout.split(" on ")[1].split(":")[0]
    checked = run("check", "model.json", "-r", "suggested.toml", "-m", mesh, "--fail-on", "warning")
    assert (result.exit_code, checked.exit_code) == (0, 0), checked.stdout


def test_warnings_of_suggested_rules_are_lines():
    Path("m.json").write_text(json.dumps({"params": [["up/kernel", [4096, 8192], "F32"]]}))
    result = run("suggest", "m.json", "-m", "fsdp=3")
    assert (result.exit_code, result.stderr.partition(":")[0]) == (1, "warning[replicated]")
    assert result.stderr.splitlines()[1] == "    up/kernel"


def test_a_report_that_fails_leaves_nothing_behind(monkeypatch):
    monkeypatch.delattr(sr.Plan, "to_html")
    result = run(*PLAN.split(), "-m", "fsdp=2", "--lock", "plan.lock", "--html", "plan.html")
    assert (result.exit_code, Path("plan.lock").exists(), Path("plan.html").exists()) == (2, False, False)


@pytest.mark.parametrize("target", ["out.json", "out.json.gz", "stream"])
def test_a_manifest_is_written_without_rules(target):
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


def test_a_manifest_in_the_paths_of_nnx_stands_for_the_model():
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


def test_a_manifest_that_is_old_is_told():
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
