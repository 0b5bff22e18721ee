"""Commands that run for each job of a project file."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tests.support.command_line import invoke

MODEL = {"params": [["wq", [512, 512], "F32"], ["norm", [512], "F32"]]}
RIGHT = '[[rules]]\npattern = "wq"\nspec = ["tp"]\n\n[[rules]]\npattern = "norm"\nspec = []\n'
DEAD = RIGHT + '[[rules]]\npattern = "gone"\nspec = []\n'
PROJECT = """
mesh = { tp = 2 }
model = "model.json"
fail-on = "warning"
[jobs.clean]
rules = "rules.toml"
[jobs.dead]
rules = "dead.toml"
"""
NOBODY = 65534


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a project with a job that has no findings, and one that has."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "rules.toml").write_text(RIGHT)
    (folder / "dead.toml").write_text(DEAD)
    (folder / "shardrules.toml").write_text(PROJECT)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(folder)
    return folder


def test_check_runs_all_jobs_and_exits_as_the_worst(project):
    done = invoke("check")
    told = f"project file: {project / 'shardrules.toml'}\n"
    assert (done.exit_code, done.stderr) == (1, told)
    assert invoke("check", "-q").stderr == ""
    clean, dead = done.stdout.split("dead:\n")
    assert clean == "clean:\nnothing found: 2 leaves, 2 rules, on tp=2\n"
    assert "warning[dead]: rule 2 'gone'" in dead
    assert invoke("check", "--fail-on", "error").exit_code == 0
    (project / "rules.toml").unlink()
    done = invoke("check")
    assert done.exit_code == 2
    assert done.stderr == (
        f"{told}error: clean: rules.toml: No such file or directory; check the name and the permissions\n"
    )
    assert "warning[dead]" in done.stdout


def test_annotations_name_the_job(project, monkeypatch):
    done = invoke("check", "--format", "github")
    assert "::warning file=dead.toml,line=8,title=dead shardrules dead::rule 2" in done.stdout
    monkeypatch.setenv("GITHUB_WORKSPACE", str(project.parent))
    assert "::warning file=project/dead.toml,line=8," in invoke("check", "--format", "github").stdout
    for name in ("::error::x", "##[error]x", "a\nb\x1b[1m"):
        text = f'model = "model.json"\nmesh = "tp=2"\n[jobs.{json.dumps(name)}]\nrules = "dead.toml"\n'
        (project / "shardrules.toml").write_text(text)
        head, annotation = invoke("check", "--format", "github").stdout.splitlines()
        assert annotation.startswith("::warning file=project/dead.toml,line=8,title=")
        assert not head.startswith("::")
        assert ("##[" in head, "\x1b" in head + annotation) == (False, False)


@pytest.fixture
def planted(project, monkeypatch):
    """The folder of a project whose job names a module that tells that it ran."""
    job = '[jobs.planted]\nmodel = "planted_code:tree"\nrules = "rules.toml"\nmesh = "tp=2"\n'
    (project / "shardrules.toml").write_text(job)
    (project / "planted_code.py").write_text("open('ran', 'w')\ndef tree(): return {}")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield project
    sys.modules.pop("planted_code", None)


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away")
def test_the_project_file_of_another_user_runs_no_code(planted, monkeypatch):
    file, ran = planted / "shardrules.toml", planted / "ran"
    refusal = f"error: {file}: it belongs to the user {NOBODY}, and its jobs may import code"

    os.chown(file, NOBODY, -1)
    assert invoke("check").stderr.startswith(refusal)
    os.chown(file, 0, -1)
    # A link of another user's to a file of one's own.
    file.rename(planted / "own.toml")
    file.symlink_to("own.toml")
    os.chown(file, NOBODY, -1, follow_symlinks=False)
    assert invoke("check").stderr.startswith(refusal)
    assert not ran.exists()
    invoke("check", "--project", "shardrules.toml")
    assert ran.exists()
    ran.unlink()
    sys.modules.pop("planted_code")
    os.chown(file, 0, -1, follow_symlinks=False)
    os.chown(planted, NOBODY, -1)  # root works in another user's project
    invoke("check")
    assert ran.exists()
    monkeypatch.setattr("os.geteuid", lambda: NOBODY - 1)
    assert f"its folder belongs to the user {NOBODY}, and" in invoke("check").stderr


def test_a_project_file_is_named(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = invoke("check")
    assert (done.exit_code, "Or write a project file here, shardrules.toml" in done.stderr) == (2, True)
    (project / "shardrules.toml").rename(project / "other.toml")
    done = invoke("check", "--project", "project/other.toml")
    assert done.stderr == f"project file: {project / 'other.toml'}\n"
    assert (done.exit_code, done.stdout.startswith("clean:\nnothing found")) == (1, True)


def test_diff_compares_the_lock_of_each_job(project):
    lines = 'before = "plan.lock"\n'  # fail-on there is a level of findings, and not of diff
    (project / "shardrules.toml").write_text(lines + PROJECT)
    invoke("plan", "model.json", "-r", "rules.toml", "-m", "tp=2", "--lock", "plan.lock")
    done = invoke("diff")
    assert done.exit_code == 1
    assert done.stdout.startswith("clean:\nno differences\ndead:\nrules:\n+ 'gone' -> P()\n")
    assert invoke("check").exit_code == 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("mesh = 'tp=2'", "there are no jobs; write [jobs.NAME]"),
        ("[jobs]\na = 1", "job a: it is 1 (an int); write a table"),
        ("modle = 'm'\n[jobs.a]\nmodel = 'm'", "shardrules.toml: key 'modle' is unknown; did you mean 'model'?"),
        ("rules = 'r'", "job a: it has neither a model to check nor a function to prove"),
        ("model = 'm'\nmehs = 'tp=2'", "job a: key 'mehs' is unknown; did you mean 'mesh'?"),
        ("model = 'm'\nquiet = true", "key 'quiet' is unknown; the keys are"),
        ("model = 'm'\nrules = 'r'\nmesh = 2", "'--mesh': mesh '2': '2' is not an axis; write it as tp=4"),
        ("model = 'm'\nrules = 'r'\nmesh = {tp = 1.5}", "'-m' / '--mesh': mesh 'tp=1.5': the size of 'tp' is not an"),
        ("model = 'm'\nrules = 'r'\nmesh = 'tp=2'\nhead-dim = true", "'--head-dim': 'True' is not a valid number"),
        ("model = ['m']", "a: model is ['m'] (a list); write a text"),
        # Each was read as the text of it, so that nothing was replicated, and no lock compared.
        ("model = 'm'\nreplicated = [1]", "replicated is [1] (a list); write a text or a list of texts"),
        ("model = 'm'\noptional-axes = ['sp', 1]", "a: optional-axes is ['sp', 1] (a list); write"),
        ("model = 'm'\ndata-axes = {dp = 2}", "data-axes is {'dp': 2} (a dict); write a text or a list"),
        ("model = 'm'\nrules = [{a = 'b'}]", "a: rules is [{'a': 'b'}] (a list); write a text or a list"),
        ("model = 'm'\nrules = ''", "a: rules is '' (a str); write a text or a list"),
        ("model = 'm'\nlevel = {ded = 'off'}", "job a: level: there is no finding 'ded'; near it: dead"),
        ("function = 'a:b'", "there is no job for check, which needs model; there are a"),
        ("model = 'm'", "error: a: Missing option '-r' / '--rules'"),
        ("model = 'm'\nrules = 'r'\nmesh = 'tp=2'\noptimizer = 'adam'", "a: --gradients and --optimizer are counted for --hbm"),
        # What no command of a job reads was ignored, and who wrote it believed that it holds.
        ("model = 'm'\nlock = 'step.lock'", "job a: lock is of prove, which needs function"),
        ("model = 'm'\nbudget = {peak='1kB'}", "job a: budget: peak is of prove; what is planned is of device"),
        ("function = 'a:b'\nbudget = {device='1kB'}", "job a: budget: device is of check, which counts"),
        ("[jobs.", "this is not TOML"),
    ],
)  # fmt: skip
def test_wrong_files_are_told(project, lines, told):
    is_whole = "jobs" in lines or "no jobs" in told
    (project / "shardrules.toml").write_text(lines if is_whole else f"[jobs.a]\n{lines}")
    done = invoke("check")
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr


ONE_JOB = "is of one job, and there are clean, dead: write shardrules check --job clean"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("check -r x", f"'--rules' {ONE_JOB}"),
        ("check --format json", f"'--format' {ONE_JOB}"),
        ("check --job daed", "there is no job 'daed' for check, which needs model; there are clean, dead"),
        ("diff --job dead", "there is no job 'dead' for diff, which needs before and model"),
        ("check --project none.toml", "none.toml: No such file or directory"),
        ("prove --update-lock --job dead", "there is no job 'dead' for prove, which needs function"),
        ("check m -r r -m tp=2 --project x.toml", "'--project' and 'SOURCE' exclude each other"),
    ],
)
def test_words_that_are_of_no_job_are_refused(project, words, told):
    done = invoke(*words.split())
    assert (done.exit_code, told in done.stderr.replace("'-r' / ", "")) == (2, True), done.stderr


def test_a_job_is_named_and_takes_all_options(project):
    """There was no such option, and --fix was refused though its hint had advised it."""
    done = invoke("check", "--job", "dead")
    words = ("model.json", "-r", "dead.toml", "-m", "tp=2", "--fail-on", "warning")
    assert (done.exit_code, done.stdout) == (1, invoke("check", *words).stdout)
    assert '"kind": "dead"' in invoke("check", "--job", "dead", "--format", "json").stdout
    assert invoke("check", "--job", "dead", "-r", "rules.toml").exit_code == 0


def test_a_job_is_mended(project):
    (project / "rules.toml").write_text('[[rules]]\npattern = "wq"\nspec = ["tp"]\n')
    done = invoke("check", "--fix")
    assert done.exit_code == 1
    assert done.stdout.startswith("clean:\n# rules.toml: 1 rule to paste at the end of the list:\n")
    assert 'pattern = "norm"\nspec = []' in done.stdout


@pytest.mark.parametrize(("size", "code"), [("2.2MB", 0), ("2.1MB", 1)])
def test_a_budget_is_of_what_is_planned_and_of_what_is_sent(project, size, code):
    """It was for compiled steps alone, so that nothing told that the plan grew."""
    (project / "shardrules.toml").write_text(
        'model = "model.json"\nrules = "rules.toml"\nmesh = "tp=2"\noptimizer = "adam"\ngradients = "same"\n'
        f'[jobs.a]\nfunction = "some:step"\nbudget = {{device = "{size}", peak = "90GB"}}\n'
    )
    done = invoke("check")
    assert (done.exit_code, "error[budget]: " in done.stdout) == (code, bool(code)), done.output


def test_each_form_of_a_value_is_an_option(project):
    (project / "shardrules.toml").write_text(
        'mesh = "tp=8"\n[jobs.a]\nmodel = "model.json"\nrules = "rules.toml"\nmesh = {tp = 2, dp = 2}\n'
        'data-axes = ["dp"]\nlevel = {dead = "off"}\nreplicated = ["norm", "-x"]\nlarge = 2000\n'
        'hbm = "1GB"\nfail-on = "info"\n'
    )
    done = invoke("check")
    told = "a:\nnothing found: 2 leaves, 2 rules, on tp=2,dp=2; not looked for: dead\n"
    assert (done.exit_code, done.stdout) == (0, told)
