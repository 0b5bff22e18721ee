"""`shardrules check --fix`: a patch that `patch` applies, after which the rules are right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

import shardrules as sr
from shardrules import demo
from shardrules._suggest.rule_patch import Amendment, json_changed, toml_changed
from tests.support.command_line import invoke as run

MESH = "fsdp=2,tp=4"
MODEL = {
    "params": [
        *([f"layers/{n}/{name}", [512, 512], "BF16"] for n in range(3) for name in ("wq", "wo")),
        ["layers/0/norm", [512], "F32"],
        ["embed", [4096, 512], "F32"],
    ]
}
TOML = """\
# Our rules.
dialect = "eformer"  # as in EasyDeL
replicated = ["final_norm"]

# --- attention ---

# The queries.
[[rules]]
pattern = "wq"   # all of them
spec = [
  ["fsdp"],
  "tp",
]

# Stacked experts.
[[rules]]
pattern = "experts/w1"
[rules.spec]
fsdp = "fsdp"

# --- all else ---

[[rules]]
pattern = ".*"
spec = []

[correction]
indivisible = "prefix"
"""
FIXED = """\
# Our rules.
dialect = "eformer"  # as in EasyDeL
replicated = ["norm", "final_norm"]

# --- attention ---

# The queries.
[[rules]]
pattern = "wq"   # all of them
spec = [
  ["fsdp"],
  "tp",
]

# not understood: layers/{0..2}/wo
[[rules]]
pattern = 'layers/\\d+/wo'
spec = ["tp", "fsdp"]
"""


def check(where, name, *more, mesh=MESH):
    return run("check", where / "model.json", "-r", name, "-m", mesh, *more)


def mend(where, name, tool=("patch", "-p1")):
    """Applies the patch of a rule file; (the patch, the file after it)."""
    result = check(where, name, "--fix")
    assert result.exit_code == 1, result.output
    if shutil.which(tool[0]) is None:
        pytest.skip(f"there is no {tool[0]}")
    subprocess.run(tool, input=result.stdout_bytes, cwd=where, check=True, capture_output=True)
    return result.stdout, (where / name).read_bytes().decode()


def assert_right(where, name, *more):
    checked = check(where, name, "--fail-on", "warning", *more)
    assert checked.exit_code == 0, checked.output
    again = check(where, name, "--fix")
    assert (again.exit_code, again.stdout) == (0, "")


@pytest.fixture
def where(tmp_path, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tool", [("patch", "-p1"), ("git", "apply")])
def test_what_stays_keeps_its_text(where, tool):
    (where / "rules.toml").write_text(TOML)
    patch, after = mend(where, "rules.toml", tool)
    assert patch.startswith("--- a/rules.toml\n+++ b/rules.toml\n@@ ")
    assert after.startswith(FIXED)
    assert after.endswith('\n# --- all else ---\n\n[correction]\nindivisible = "prefix"\n')
    for gone in ("Stacked experts", "experts/w1", "[rules.spec]", '".*"'):
        assert gone not in after
    assert_right(where, "rules.toml")


@pytest.mark.parametrize(
    "text",
    [
        TOML.replace("\n", "\r\n"),
        TOML.partition("\n[correction]")[0].rstrip(),
        '[[rules]]\npattern = ".*"\nspec = []',
        '# ours\n\n[[rules]]\npattern = "gone"\nspec = []\n[[rules]]\npattern = "wq"\nspec = ["tp"]',
        'replicated = []\ndata_axes = [\n  "dp",\n]\n[[rules]]\npattern = "wq"\nspec = ["tp"]',
    ],
    ids=["crlf", "no line end", "a catch-all alone", "no keys", "empty lists"],
)
def test_other_layouts(where, text):
    (where / "rules.toml").write_bytes(text.encode())
    _, after = mend(where, "rules.toml")
    assert ("\r\n" in text) == ("\r\n" in after)
    assert after.count("\n") == after.count("\r\n") or "\r\n" not in after
    assert_right(where, "rules.toml")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "rules",
    [
        [["wq", ["fsdp", "tp"]], ["experts", ["tp"]], [".*", []]],
        [["experts", ["tp"]], {"pattern": "wq", "spec": ["tp"], "flags": "i"}],
        [["gone", []]],
    ],
)
@pytest.mark.parametrize("more", [{}, {"replicated": ["final_norm"]}])
def test_json_keeps_its_layout(where, indent, rules, more):
    text = json.dumps({**more, "rules": rules}, indent=indent)
    (where / "rules.json").write_text(text)
    _, after = mend(where, "rules.json")
    assert (after.count("\n") == 0) == (indent is None)
    kept = [rule for rule in rules if "wq" in rule or isinstance(rule, dict)]
    assert json.loads(after)["rules"][: len(kept)] == kept
    assert "norm" in json.loads(after)["replicated"]
    assert_right(where, "rules.json")


def test_the_rules_of_the_demo(where):
    """EasyDeL's rules expect stacked experts, and its lines of JSON stay as they are."""
    shutil.copy(demo.MODEL, where / "model.json.gz")
    lines = demo.RULES.read_text(encoding="utf-8").splitlines()
    rules = json.loads("\n".join(lines))["rules"]
    tables = [
        f"[[rules]]\npattern = {pattern!r}\nspec = {[axis or [] for axis in spec]}\n"
        for pattern, spec in rules
    ]
    (where / "rules.toml").write_text("\n".join(["# EasyDeL's\n", *tables]))
    shutil.copy(demo.RULES, where / "rules.json")
    for name in ("rules.toml", "rules.json"):
        command = ("check", "model.json.gz", "-r", name, "-m", "fsdp=64,sp=1,tp=8")
        result = run(*command, "--fix")
        assert result.exit_code == 1, result.output
        gone = [
            line
            for line in result.stdout.splitlines()
            if line.startswith("-") and "mlp/exp" in line
        ]
        assert len(gone) == 2
        assert "(gate|up)_proj/kernel" in result.stdout
        if shutil.which("patch"):
            subprocess.run(["patch", "-p1"], input=result.stdout_bytes, check=True)
            assert run(*command, "--fail-on", "warning").exit_code == 0


def test_a_file_elsewhere_and_a_name_with_a_space(where, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "my rules.toml"
    other.write_text(TOML)
    patch = check(where, other, "--fix").stdout
    assert patch.startswith(f"--- a{other.as_posix()}\t\n+++ b{other.as_posix()}\t\n")


@pytest.mark.parametrize("runner", ["GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION", None])
@pytest.mark.parametrize("comment", ["# ##[error]forged", "# of a colleague"])
def test_a_ci_runner_is_given_no_command_of_the_rule_file(where, monkeypatch, runner, comment):
    for name in ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION"):
        monkeypatch.delenv(name, raising=False)
    (where / "rules.toml").write_text(TOML.replace("# Our rules.", comment))
    exact = check(where, "rules.toml", "--fix")
    assert (exact.exit_code, exact.stdout.count(f" {comment}\n")) == (1, 1)
    if runner is None:
        return
    monkeypatch.setenv(runner, "1")
    done = check(where, "rules.toml", "--fix")
    if "##" in comment:
        assert (done.exit_code, done.stdout) == (2, "")
        assert "a line of the patch, ' # \\u0023#[error]forged'; write the patch to" in done.stderr
    else:
        assert (done.exit_code, done.stdout) == (1, exact.stdout)
    words = [sys.executable, "-m", "shardrules", "check", "model.json", "-r", "rules.toml"]
    with (where / "fix.patch").open("wb") as file:
        code = subprocess.run([*words, "-m", MESH, "--fix"], stdout=file, check=False).returncode
    assert (code, (where / "fix.patch").read_text()) == (1, exact.stdout)


def test_a_list_that_is_right_has_no_patch_and_findings_that_stay_decide_the_exit_code(where):
    (where / "rules.toml").write_text(TOML)
    mend(where, "rules.toml")
    text = (where / "rules.toml").read_text()
    (where / "rules.toml").write_text(text.replace('"fsdp"', '"fdsp"'))
    result = check(where, "rules.toml", "--fix")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no rule is to be removed or added" in result.stderr
    assert check(where, "rules.toml", "--fix", "--fail-on", "never").exit_code == 0


def test_axes_for_data_alone_are_declared_if_no_rule_uses_them(where):
    (where / "rules.toml").write_text(TOML)
    patch = check(where, "rules.toml", "--fix", mesh=f"dp=2,{MESH}").stdout
    assert '\n+data_axes = ["dp"]\n' in patch
    (where / "rules.toml").write_text(TOML.replace('["fsdp"],', '["fsdp", "dp"],'))
    assert "data_axes" not in check(where, "rules.toml", "--fix", mesh=f"dp=2,{MESH}").stdout


def test_units_of_heads_are_in_the_patch(where):
    params = [["attn/q_proj/kernel", [512, 512], "F32"], ["attn/o_proj/kernel", [512, 512], "F32"]]
    params += [["embed", [4096, 512], "F32"]]
    (where / "model.json").write_text(json.dumps({"params": params}))
    for name, text in (
        ("r.toml", '[[rules]]\npattern = "gone"\nspec = []\n'),
        ("r.json", '{"rules": [["gone", []]]}'),
    ):
        (where / name).write_text(text)
        result = check(where, name, "--fix", "--head-dim", 64)
        assert result.exit_code == 1, result.output
        assert "units" in result.stdout


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("r.toml", 'rules = [["wq", ["tp"]], [".*", []]]', "each has a [[rules]] table"),
        (
            "r.toml",
            '[[rules]]\nspec = ["tp"]\npattern = """\n[[rules]]\n"""\n',
            "each has a [[rules]] table",
        ),
        ("r.json", '[["wq", ["tp"]], [".*", []]]', 'write {"replicated": [], "rules": [...]}'),
        ("r.toml", 'stacked = ["layers"]\n' + TOML, "some leaves follow others"),
        ("tests.suggesting.test_rule_patch:RULES", None, "rules of a module are code"),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_what_cannot_be_patched_is_refused(where, name, text, told):
    if text is not None:
        (where / name).write_text(text)
    result = check(where, name, "--fix")
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert result.stdout == ""


RULES = [("wq", ("tp",)), (".*", ())]


def test_a_compressed_file_is_refused(where):
    import gzip

    (where / "r.json.gz").write_bytes(gzip.compress(b'{"rules": [[".*", []]]}'))
    result = check(where, "r.json.gz", "--fix")
    assert result.exit_code == 2
    assert "it is no plain text" in result.stderr


def test_logical_rules_are_refused(where):
    model = {
        **MODEL,
        "logical_axes": {path: [None] * len(shape) for path, shape, _ in MODEL["params"]},
    }
    (where / "model.json").write_text(json.dumps(model))
    (where / "r.toml").write_text('kind = "logical"\n[[rules]]\nname = "embed"\naxes = ["tp"]\n')
    result = check(where, "r.toml", "--fix")
    assert result.exit_code == 2, result.output
    assert "logical axis names" in result.stderr
    assert "--fix" in result.stderr


def test_another_format_is_refused(where):
    (where / "rules.toml").write_text(TOML)
    result = check(where, "rules.toml", "--fix", "--format", "json")
    assert result.exit_code == 2
    assert "leave out --format" in result.stderr


@pytest.mark.parametrize("pattern", ["a/##[x]", 'q"\\d', "it's", "\u202e", "é"])
def test_patterns_of_names_stay_text(pattern):
    change = Amendment(
        1, [], [(pattern, (None, ("fsdp", "tp")), "note")], {"replicated": [pattern]}
    )
    found = json_changed('{"rules": [["gone", []]]}', change)
    assert json.loads(found) == {
        "replicated": [pattern],
        "rules": [[pattern, [[], ["fsdp", "tp"]]]],
    }
    assert "##[" not in found
    table = sr._files.rules.parse_toml  # type: ignore[attr-defined]
    text = toml_changed('[[rules]]\npattern = "gone"\n', change)
    assert table("x", text.encode())["rules"][0]["pattern"] == pattern
