"""`shardrules check --fix`: rules that are missing, as a patch of TOML or as text to paste."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

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
ADDED = """\
# hidden 512 by tp, residual 512 by fsdp
[[rules]]
pattern = 'layers/\\d+/wo'
spec = ["tp", "fsdp"]

# vocabulary 4096 by tp, residual 512 by fsdp
[[rules]]
pattern = "embed"
spec = ["tp", "fsdp"]

# vector 512
[[rules]]
pattern = "norm"
spec = []

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
    checked = json.loads(check(where, name, "--format", "json", *more).stdout)["findings"]
    assert not {finding["kind"] for finding in checked} & {"unmatched", "catch-all"}
    again = check(where, name, "--fix")
    assert again.stdout == ""


@pytest.fixture
def where(tmp_path, monkeypatch):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tool", [("patch", "-p1"), ("git", "apply")])
def test_rules_are_added_above_the_catch_all(where, tool):
    (where / "rules.toml").write_text(TOML)
    patch, after = mend(where, "rules.toml", tool)
    assert patch.startswith("--- a/rules.toml\n+++ b/rules.toml\n@@ ")
    assert after == TOML.replace('[[rules]]\npattern = ".*"', f'{ADDED}[[rules]]\npattern = ".*"')
    assert_right(where, "rules.toml")


@pytest.mark.parametrize(
    "text",
    [
        TOML.replace("\n", "\r\n"),
        TOML.partition("\n[correction]")[0].rstrip(),
        TOML.replace('pattern = ".*"', 'pattern = "gone"'),
        '[[rules]]\npattern = ".*"\nspec = []',
        '# ours\n\n[[rules]]\npattern = "gone"\nspec = []\n[[rules]]\npattern = "wq"\nspec = ["tp"]',
        'data_axes = [\n  "dp",\n]\n[[rules]]\npattern = "wq"\nspec = ["tp"]\n# the end\n\n',
    ],
    ids=["crlf", "no line end", "no catch-all", "a catch-all alone", "no keys", "a comment last"],
)
def test_other_layouts(where, text):
    (where / "rules.toml").write_bytes(text.encode())
    _, after = mend(where, "rules.toml")
    assert after.count("\n") == after.count("\r\n") or "\r\n" not in text
    lines = iter(after.splitlines())
    assert all(line in lines for line in text.splitlines())  # in their order
    assert_right(where, "rules.toml")


JSON = '{"rules": [["wq", ["fsdp", "tp"]],\n [".*", []]]}'
PYTHON = """\
from jax.sharding import PartitionSpec as P
RULES = [
    ("wq", P("fsdp", "tp")),
]
"""


@pytest.mark.parametrize(
    ("name", "text", "where_to", "line"),
    [
        ("r.json", JSON, "before rule 1", '["embed", ["tp", "fsdp"]],'),
        ("r.json", '[["wq", ["tp"]]]', "at the end of the list", '["norm", []],'),
        ("r.toml", 'rules = [["wq", ["tp"]], [".*", []]]', "before rule 1 (line 1)", '["norm", []],'),
        ("r.json", "[]", "at the end of the list", '["norm", []],'),
        ("r.py", PYTHON, "at the end of the list", '(r"embed", P("tp", "fsdp")),'),
    ],
)  # fmt: skip
def test_other_forms_get_text_to_paste(where, monkeypatch, name, text, where_to, line):
    (where / name).write_text(text)
    monkeypatch.syspath_prepend(str(where))
    sys.modules.pop("r", None)
    source = "r:RULES" if name == "r.py" else name
    result = check(where, source, "--fix")
    assert result.exit_code == 1, result.output
    head, *lines = result.stdout.splitlines()
    assert head.startswith(f"{source}: ")
    assert head.endswith(f" rules to paste {where_to}:")
    assert line in lines
    assert (where / name).read_text() == text
    if name == "r.json":
        rules = json.loads(text)
        rules = rules["rules"] if isinstance(rules, dict) else rules
        at = 1 if "before" in where_to else len(rules)
        rules[at:at] = json.loads(f"[{' '.join(lines).removesuffix(',')}]")
        (where / name).write_text(json.dumps(rules))
        assert_right(where, name)


def test_a_table_of_names_is_refused(where):
    params = {"params": [["up", [512, 2048], "F32"]], "logical_axes": {"up": ["embed", "mlp"]}}
    (where / "model.json").write_text(json.dumps(params))
    (where / "r.toml").write_text('kind = "logical"\n[[rules]]\nname = "embed"\naxes = ["fsdp"]\n')
    result = check(where, "r.toml", "--fix")
    assert result.exit_code == 2
    assert "it is for logical axis names, whose axes only you know" in result.stderr


def test_a_rule_is_that_of_its_siblings(where):
    shapes = {"q": [512, 1024], "k": [512, 1024], "v": [512, 1024], "o": [1024, 512]}
    params = [[f"layers/{n}/attn/{name}_proj/kernel", shape, "F32"]
              for n in range(2) for name, shape in shapes.items()]  # fmt: skip
    (where / "model.json").write_text(json.dumps({"params": params}))
    (where / "r.json").write_text('[["(q|k)_proj/kernel", [[], ["fsdp", "sp"]]]]')
    lines = check(where, "r.json", "--fix", mesh="fsdp=2,sp=1,tp=4").stdout.splitlines()[1:]
    added = dict(json.loads(line.removesuffix(",")) for line in lines)
    assert added["attn/v_proj/kernel"] == [[], ["fsdp", "sp"]]
    assert added["attn/o_proj/kernel"] == ["tp", ["fsdp", "sp"]]


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
    (where / "rules.toml").write_text(TOML.replace("# --- all else ---", comment))
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
    assert "no rule is to be added" in result.stderr
    assert check(where, "rules.toml", "--fix", "--fail-on", "never").exit_code == 0


def test_tables_that_cannot_be_found_get_tables_to_paste(where):
    (where / "r.toml").write_text('[["rules"]]\npattern = "gone"\nspec = []\n')
    head, *lines = check(where, "r.toml", "--fix").stdout.splitlines()
    assert head == "r.toml: 4 rules to paste at the end of the list:"
    assert lines[1:4] == ["[[rules]]", "pattern = 'layers/\\d+/wq'", 'spec = ["fsdp", "tp"]']


def test_leaves_that_follow_others_are_refused(where):
    (where / "r.toml").write_text('stacked = ["layers"]\n' + TOML)
    result = check(where, "r.toml", "--fix")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "some leaves follow others: leave out its companions" in result.stderr


def test_no_rule_stands_beside_a_catch_all_where_only_one_may_match(where):
    (where / "r.json").write_text('{"dialect": "keras", "rules": [[".*", []]]}')
    result = check(where, "r.json", "--fix")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rule 0 matches all, and only one rule may: leave it out" in result.stderr


def test_another_format_is_refused(where):
    (where / "rules.toml").write_text(TOML)
    result = check(where, "rules.toml", "--fix", "--format", "json")
    assert result.exit_code == 2
    assert "--fix and --format exclude each other" in result.stderr


@pytest.mark.parametrize("name", ["a##[x]", "it's", 'q"x', "é"])
@pytest.mark.parametrize("file", ["r.json", "r.toml"])
def test_patterns_of_names_stay_text(where, name, file):
    (where / "model.json").write_text(json.dumps({"params": [[f"{name}/w", [64, 512], "F32"]]}))
    (where / "r.json").write_text('{"rules": [["gone", []]]}')
    (where / "r.toml").write_text('[[rules]]\npattern = "gone"\nspec = []\n')
    result = check(where, file, "--fix")
    assert result.exit_code == 1, result.output
    assert "##[" not in result.stdout
    if file == "r.toml" and shutil.which("patch"):
        subprocess.run(["patch", "-p1"], input=result.stdout_bytes, check=True)
        assert_right(where, "r.toml")
