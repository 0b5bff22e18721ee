"""The GitHub action and the pre-commit hook: parsed, and run as their runners would run them."""

import os
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from tests.support.folders import ROOT

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
MODEL = '{"params": [["wq", [8, 8], "F32"], ["norm", [8], "F32"]]}'
RIGHT = '[[rules]]\npattern = "wq"\nspec = ["tp"]\n\n[[rules]]\npattern = "norm"\nspec = []\n'
DEAD = RIGHT + '[[rules]]\npattern = "gone"\nspec = []\n'
# Our own Python in the place of the job's; its pip writes down what it is to install.
PYTHON = f"""#!/bin/sh
exec {shlex.quote(sys.executable)} "$@"
"""
PIP = "import sys; open('pip.log', 'a').write('\\n'.join(sys.argv[1:]))"
ENTRY = "import shardrules._cli\nshardrules._cli.main()\n"


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A directory with a model, and `python` and `shardrules` on the path."""
    (tmp_path / "model.json").write_text(MODEL)
    (tmp_path / "rules.toml").write_text(RIGHT)
    tools = tmp_path / "bin"
    tools.mkdir()
    entry = tools / "entry.py"
    entry.write_text(ENTRY)
    for name, text in (("python", PYTHON), ("shardrules", PYTHON.replace('"$@"', f'{shlex.quote(str(entry))} "$@"'))):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "pip.py").write_text(PIP)
    # What is relative would be another folder in the job, such as its own.
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    absolute = os.pathsep.join([str(libraries), *map(os.path.abspath, paths)])
    monkeypatch.setenv("PYTHONPATH", absolute)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setenv("GITHUB_ACTION_PATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def given(**inputs):
    """The inputs with defaults, as GitHub has them."""
    known = ACTION["inputs"]
    named = {name.replace("_", "-"): value for name, value in inputs.items()}
    assert named.keys() <= known.keys()
    required = {name for name, one in known.items() if one.get("required")}
    assert required <= named.keys()
    return {name: one.get("default", "") for name, one in known.items()} | named


def run_step(step, inputs):
    """A step of the action as GitHub runs it: `bash -e`, with the inputs in the environment."""

    def filled(text):
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)

    environment = os.environ | {name: filled(text) for name, text in step.get("env", {}).items()}
    assert step["shell"] == "bash"
    assert "${{" not in step["run"]  # an input would be code for the shell
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


INSTALL, CHECK = ACTION["runs"]["steps"]
CASE = {"model": "model.json", "rules": "rules.toml", "mesh": "tp=2"}


def test_the_action_is_composite_and_uses_no_other():
    assert ACTION["runs"]["using"] == "composite"
    assert not [step for step in ACTION["runs"]["steps"] if "uses" in step]
    assert all(one["description"] for one in ACTION["inputs"].values())


def test_the_action_installs_its_own_sources(job):
    result = run_step(INSTALL, given(**CASE))
    assert result.returncode == 0, result.stderr
    assert (job / "pip.log").read_text().splitlines()[-1] == f"{ROOT}[yaml]"


def test_no_text_advises_to_install_a_name_that_no_index_has():
    """Until it is ours there, anybody may take it."""
    texts = [
        *(ROOT / "python").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.py"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "action.yml")),
    ]  # fmt: skip
    advised = set()
    for file in texts:
        joined = re.sub(r'"\s*\n\s*f?"', "", file.read_text(encoding="utf-8"))
        advised |= set(re.findall(r"pip install (?:-\S+ |--\S+ )*['\"]?([\w.$/-]+)", joined))
    assert {"jax", "pyyaml", ".", "$GITHUB_ACTION_PATH"} <= advised
    assert not [name for name in advised if "shardrules" in name]


PROJECT = """model = "model.json"
mesh = { tp = 2 }
fail-on = "warning"
[jobs.small]
rules = "rules.toml"
"""


@pytest.mark.parametrize(("rules", "code"), [(RIGHT, 0), (DEAD, 1)])
def test_the_action_and_the_hook_run_the_project_file(job, rules, code):
    (job / "shardrules.toml").write_text(PROJECT)
    (job / "rules.toml").write_text(rules)
    result = run_step(CHECK, given())
    assert result.returncode == code, result.stderr
    dead = "::warning file=rules.toml,line=8,title=small shardrules dead::rule 2 'gone'"
    assert (dead in result.stdout) is bool(code)
    assert run_step(CHECK, given(fail_on="error")).returncode == 0
    hook = subprocess.run(shlex.split(HOOK["entry"]), capture_output=True, check=False)
    assert hook.returncode == code


def test_the_action_needs_a_model_or_a_project(job):
    result = run_step(CHECK, given())
    assert result.returncode == 2
    assert "Missing argument 'SOURCE'. Or write a project file here" in result.stderr


def test_modules_of_the_checkout_do_not_run_instead(job):
    """A pull request with a shardrules.py would otherwise pass its own check."""
    for name in ("shardrules", "pip", "json", "tomllib", "numpy", "argparse"):
        (job / f"{name}.py").write_text(f"open('{name}.ran', 'w').close(); raise SystemExit(0)")
    (job / "rules.toml").write_text(DEAD)
    assert run_step(INSTALL, given(**CASE)).returncode == 0
    assert (job / "pip.log").read_text().startswith("install\n")
    assert run_step(CHECK, given(**CASE, fail_on="warning")).returncode == 1
    hook = [*shlex.split(HOOK["entry"]), "model.json", "--rules=rules.toml", "--mesh=tp=2"]
    hook += ["--fail-on=warning"]
    assert subprocess.run(hook, capture_output=True, check=False).returncode == 1
    assert not list(job.glob("*.ran"))


def test_a_model_of_the_checkout_is_imported_where_it_is_named(job):
    (job / "models.py").write_text(
        "class A: shape, dtype = (8, 8), 'float32'\ndef tree(): return {'wq': A(), 'norm': A()}"
    )
    result = run_step(CHECK, given(**{**CASE, "model": "models:tree"}))
    assert result.returncode == 0, result.stderr


def test_inputs_of_the_action_are_no_code(job):
    (job / "$(touch hacked)").write_text(MODEL)
    hostile = {**CASE, "model": "$(touch hacked)", "options": "--data-axes `touch` --replicated *"}
    result = run_step(CHECK, given(**hostile))
    assert not (job / "hacked").exists()
    assert "--replicated" not in result.stderr
    assert "replicated[0]" in result.stderr  # the star is the pattern, not the files


def test_the_hook_has_what_the_extra_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert (HOOK["language"], HOOK["id"]) == ("python", "shardrules-check")
    assert HOOK["pass_filenames"] is False  # the arguments are those of the user's configuration
    assert HOOK["additional_dependencies"] == extras["yaml"]
    assert HOOK["entry"].split()[0] in project["scripts"]


def test_actions_of_others_are_pinned_by_commit():
    """Their tags can be moved, in a job that may publish."""
    texts = [path.read_text() for path in (ROOT / ".github").glob("*/*.yml")]
    texts.append((ROOT / "docs" / "ci.md").read_text(encoding="utf-8"))
    used = re.findall(r"uses: (\S+)(.*)", "\n".join(texts))
    others = [(name, note) for name, note in used if not name.startswith("OWNER/")]
    assert len(others) == len(used) - 1 > 1
    for name, note in others:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name), name
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", note), name


def test_the_page_uses_inputs_and_hooks_that_exist():
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    workflow, config = (yaml.safe_load(block) for block in re.findall(r"```yaml[^\n]*\n(.*?)```", page, re.S))
    (step,) = [s for s in workflow["jobs"]["check"]["steps"] if "shardrules@" in s["uses"]]
    assert given(**{name.replace("-", "_"): value for name, value in step["with"].items()})
    assert [hook["id"] for repo in config["repos"] for hook in repo["hooks"]] == [HOOK["id"]]
