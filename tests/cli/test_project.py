"""Commands that run for each job of a project file."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

import shardrules as sr
from shardrules._base.io import FileError
from shardrules._cli.project import find_project, find_table, parameters, read_jobs, stranger
from tests.support import project_schema
from tests.support.command_line import invoke
from tests.tpu.marks import needs_libtpu

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
def as_root():
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can give files away")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The folder of a project with a job that has no findings, and one that has."""
    folder = tmp_path / "project"
    (folder / "deep" / "folder").mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "rules.toml").write_text(RIGHT)
    (folder / "dead.toml").write_text(DEAD)
    (folder / "shardrules.toml").write_text(PROJECT)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(folder / "deep" / "folder")
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


def test_the_table_of_pyproject_is_one_too(project):
    text = (project / "shardrules.toml").read_text()
    (project / "shardrules.toml").unlink()
    text = text.replace("[jobs", "[tool.shardrules.jobs").replace(
        "\nmesh", "[tool.shardrules]\nmesh"
    )
    (project / "pyproject.toml").write_text(text)
    assert invoke("check").exit_code == 1
    (project / "shardrules.toml").write_text(PROJECT)
    done = invoke("check")
    assert done.exit_code == 2
    assert "has [tool.shardrules] too; keep one" in done.stderr


def test_formats_name_the_job(project):
    done = invoke("check", "--format", "json")
    jobs = json.loads(done.stdout)["jobs"]
    assert jobs["clean"] == {"version": 1, "scope": "2 leaves, 2 rules, on tp=2", "findings": []}
    assert [finding["kind"] for finding in jobs["dead"]["findings"]] == ["dead"]
    assert invoke("check", "-q").stdout.startswith("dead:\nwarning[dead]")
    done = invoke("check", "--format", "github")
    assert "::warning file=dead.toml,line=8,title=dead shardrules dead::rule 2" in done.stdout
    assert "clean:\nnothing found" in done.stdout
    (project.parent / ".git").mkdir()
    done = invoke("check", "--format", "github")
    assert "::warning file=project/dead.toml,line=8," in done.stdout


NO_PROJECT = "the following arguments are required: SOURCE; or a project file"


@pytest.mark.parametrize("end", ["repository", "worktree", "home", "linked home", "mount point"])
def test_the_search_goes_no_higher_than(end, project, monkeypatch):
    """It went up to the root of the disk, into folders of others."""
    deep = project / "deep"
    if end == "repository":
        (deep / ".git").mkdir()
    elif end == "worktree":
        (deep / ".git").write_text("gitdir: elsewhere")
    elif end == "home":
        monkeypatch.setenv("HOME", str(deep))
    elif end == "linked home":
        (project / "link").symlink_to(deep)
        monkeypatch.setenv("HOME", str(project / "link"))
    else:
        monkeypatch.setattr("os.path.ismount", lambda path: path == deep)
    done = invoke("check")
    assert (done.exit_code, NO_PROJECT in done.stderr) == (2, True), done.stderr
    (project / "shardrules.toml").rename(deep / "shardrules.toml")  # the end itself is searched
    done = invoke("check")
    assert done.stderr.startswith(f"project file: {deep / 'shardrules.toml'}\n")


def test_the_search_ends_at_a_real_mount_point(monkeypatch):
    if not os.path.ismount("/dev/shm"):
        pytest.skip("/dev/shm is no mount point here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.chdir(folder)
        looked_at = []
        monkeypatch.setattr(
            "shardrules._cli.project._table_of", lambda path: looked_at.append(path.parent)
        )
        assert find_table(Path(folder)) is None
    assert set(looked_at) == {Path(folder), Path("/dev/shm")}


PLANTED = """
[jobs.planted]
model = "planted_code:tree"
rules = "rules.toml"
mesh = "tp=2"
"""


@pytest.fixture
def planted(project, monkeypatch):
    """The folder of a project whose job names a module that tells that it ran."""
    (project / "shardrules.toml").write_text(PLANTED)
    (project / "planted_code.py").write_text(
        "from pathlib import Path\nPath('ran').touch()\ndef tree(): return {}"
    )
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield project
    sys.modules.pop("planted_code", None)


def test_the_project_file_of_another_user_runs_no_code(planted, as_root, monkeypatch):
    """A file of the current folder, or above it, had its module imported, whoever had put it there."""
    file = planted / "shardrules.toml"

    def is_refused(why):
        done = invoke("check")
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr == (
            f"error: {file}: {why}, and its jobs may import code; if you trust it, give --project {file}\n"
        )
        assert not (planted / "ran").exists()

    os.chown(file, NOBODY, -1)
    is_refused(f"it belongs to the user {NOBODY}")
    os.chown(file, 0, -1)
    os.chown(planted, NOBODY, -1)
    is_refused(f"its folder belongs to the user {NOBODY}")
    os.chown(planted, 0, -1)
    # A link of another user's to a file of one's own.
    file.rename(planted / "own.toml")
    file.symlink_to("own.toml")
    os.chown(file, NOBODY, -1, follow_symlinks=False)
    is_refused(f"it belongs to the user {NOBODY}")
    monkeypatch.chdir(planted)  # as of an archive that another user has unpacked there
    is_refused(f"it belongs to the user {NOBODY}")
    done = invoke("check", "--project", "shardrules.toml")
    assert (planted / "ran").exists(), done.output


def test_a_project_file_that_all_may_write_runs_no_code(planted):
    file = planted / "shardrules.toml"
    file.chmod(0o666)
    assert f"{file}: all users may write it, and" in invoke("check").stderr
    file.chmod(0o664)
    planted.chmod(0o1777)
    assert f"{file}: all users may write its folder, and" in invoke("check").stderr
    assert not (planted / "ran").exists()
    planted.chmod(0o775)
    invoke("check")
    assert (planted / "ran").exists()


def test_a_disk_of_windows_whose_files_all_may_write_is_one_to_work_on(planted, monkeypatch):
    for path in (planted, planted / "shardrules.toml"):
        path.chmod(0o777)
    monkeypatch.chdir(planted)
    invoke("check")
    assert (planted / "ran").exists()


def test_a_lock_is_not_updated_where_no_job_has_one(project):
    """It said nothing, and wrote nothing."""
    (project / "shardrules.toml").write_text('[jobs.a]\nfunction = "m:f"\nmesh = "tp=2"\n')
    done = invoke("prove", "--update-lock")
    assert (
        done.exit_code,
        "--update-lock: no job has lock; write it into job a" in done.stderr,
    ) == (2, True)


def test_who_owns_a_project_file_that_is_used(planted, as_root, monkeypatch):
    file, here = planted / "shardrules.toml", Path.cwd()
    for owned in (file, planted, here):
        os.chown(owned, NOBODY, -1)
    assert stranger(file, here) is None  # root works in another user's project
    monkeypatch.setattr("os.geteuid", lambda: NOBODY)
    assert stranger(file, here) is None
    os.chown(file, 0, -1)
    assert stranger(file, here) is None
    monkeypatch.setattr("os.geteuid", lambda: NOBODY - 1)
    assert stranger(file, here) == f"its folder belongs to the user {NOBODY}"
    assert stranger(file, planted) == f"its folder belongs to the user {NOBODY}"


def test_init_is_not_kept_from_its_work_by_a_file_of_another_user(planted, as_root):
    os.chown(planted / "shardrules.toml", NOBODY, -1)
    done = invoke("init", str(planted / "model.json"), "--mesh", "tp=2")
    assert done.exit_code == 0, done.output
    assert "wrote shardrules.toml" in done.stdout


def test_a_project_file_is_named(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (project / "shardrules.toml").rename(project / "other.toml")
    done = invoke("check", "--project", "project/other.toml")
    assert done.stderr == f"project file: {project / 'other.toml'}\n"
    assert (done.exit_code, done.stdout.startswith("clean:\nnothing found")) == (1, True)


def test_diff_compares_the_lock_of_each_job(project, monkeypatch):
    monkeypatch.chdir(project)
    lines = 'before = "plan.lock"\n'  # fail-on there is a level of findings, and not of diff
    (project / "shardrules.toml").write_text(lines + PROJECT)
    assert (
        invoke(
            "plan", "model.json", "-r", "rules.toml", "-m", "tp=2", "--lock", "plan.lock"
        ).exit_code
        == 0
    )
    done = invoke("diff")
    assert done.exit_code == 1
    assert done.stdout.startswith("clean:\nno differences\ndead:\nrules:\n+ 'gone' -> P()\n")
    assert invoke("check").exit_code == 1


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("mesh = 'tp=2'", "there are no jobs; write [jobs.NAME]"),
        ("jobs = 3", "there are no jobs"),
        ("[job.a]\nmodel = 'm'", "key 'job' is unknown; did you mean 'jobs'?"),
        ("[jobs.a]\nmodel = 3", "job a: model is 3 (an int); write a text"),
        ("[jobs.a]\nmodel = ''", "job a: model is '' (a str); write a text"),
        ("[jobs.a]\nrules = 'r'", "job a: it has neither a model to check nor a function to prove"),
        ("[jobs.a]\nmodel = 'm'\nmehs = 'tp=2'", "job a: key 'mehs' is unknown; did you mean 'mesh'?"),
        ("[jobs.a]\nmodel = 'm'\nfail_on = 'info'", "key 'fail_on' is unknown; did you mean 'fail-on'?"),
        ("[jobs.a]\nmodel = 'm'\nzzzzzz = 1", "key 'zzzzzz' is unknown; the keys are model"),
        ("quiet = true\n[jobs.a]\nmodel = 'm'", "key 'quiet' is unknown"),
        ("[jobs.a]\nmodel = 'm'\nmesh = 2", "job a: mesh is 2 (an int); write a table, as { fsdp = 8, tp = 4 } or a text"),
        ("[jobs.a]\nmodel = 'm'\nmesh = ['tp']", "job a: mesh is ['tp'] (a list); write a table"),
        ("[jobs.a]\nmodel = 'm'\nmesh = {tp = 1.5}", "error: a: mesh: the size of the mesh axis 'tp' is 1.5"),
        ("[jobs.a]\nmodel = 'm'\ndata-axes = ['a', 2]", "job a: data-axes has 2 (an int); write a list of texts"),
        ("[jobs.a]\nmodel = 'm'\nrules = [1]", "job a: rules has 1 (an int); write a list of texts"),
        ("[jobs.a]\nmodel = 'm'\nstacked = [['layers']]", "job a: stacked has ['layers'] (a list); write a list"),
        ("[jobs.a]\nmodel = 'm'\nmin-size = true", "job a: min-size is True (a bool); write a number or a text"),
        ("[jobs.a]\nmodel = 'm'\nno-fallbacks = 1", "job a: no-fallbacks is 1 (an int); write true or false"),
        ("[jobs.a]\nmodel = 'm'\nlevel = {ded = 'off'}", "job a: level: there is no finding 'ded' (did you mean dead?)"),
        ("[jobs.a]\nmodel = 'm'\nhbm = '1'", "error: a: hbm: 1 is 1 bytes; write 1GB"),
        ("[jobs]\na = 1", "job a: it is 1 (an int); write a table"),
        ("[jobs.a]\nfunction = 'a:b'", "no job is for check, which needs model"),
        ("[jobs.a]\nmodel = 'm'", "error: a: the following arguments are required: --rules/-r, --mesh/-m"),
        ("[jobs.a]\nmodel = 'm'\nrules='r'\nmesh='tp=2'\nmin-size=-1", "error: a: min-size: -1 is not in the range x>=0"),
        ("[jobs.a]\nmodel = 'm'\noptimizer = 'adam'", "error: a: optimizer needs --hbm or --budget"),
        # What no command of a job reads was ignored, and who wrote it believed that it holds.
        ("[jobs.a]\nmodel = 'm'\nlock = 'step.lock'", "job a: lock is of prove, which needs function"),
        ("lock = 'step.lock'\n[jobs.a]\nmodel = 'm'", "shardrules.toml: lock is of prove, which needs function"),
        ("[jobs.a]\nmodel = 'm'\nbudget = {peak='1kB'}", "job a: budget: peak is of prove; what is planned is of device"),
        ("[jobs.a]\nfunction = 'a:b'\nbudget = {device='1kB'}", "job a: budget: device is of check, which counts"),
        ("[jobs.a]\nfunction = 'a:b'\nlevel = {dead = 'off'}", "job a: level is of check, which needs model"),
        ("[jobs.", "this is not TOML"),
    ],
)  # fmt: skip
def test_wrong_files_are_told(project, lines, told):
    (project / "shardrules.toml").write_text(lines)
    done = invoke("check")
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr


ONE_JOB = "is of one job, and there are clean, dead: write shardrules check --job clean"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("check -r x", f"--rules {ONE_JOB}"),
        ("check --fix", f"--fix {ONE_JOB}"),
        ("check --job daed", "--job: there is no job 'daed' (did you mean dead?)"),
        ("diff --job dead", "job dead is not for diff, which needs before and model"),
        ("check --project none.toml", "none.toml: it is no file, or has no [tool.shardrules]"),
        ("check --project .", "folder: it is no file, or has no [tool.shardrules]"),
        ("check m --project x.toml", "--project and SOURCE exclude each other"),
    ],
)
def test_words_that_are_of_no_job_are_refused(project, words, told):
    done = invoke(*words.split())
    assert (done.exit_code, told in done.stderr) == (2, True), done.stderr


def test_a_job_is_named_and_takes_all_options(project, monkeypatch):
    """There was no such option, and --fix was refused though its hint had advised it."""
    done = invoke("check", "--job", "dead")
    monkeypatch.chdir(project)
    words = ("model.json", "-r", "dead.toml", "-m", "tp=2", "--fail-on", "warning")
    assert (done.exit_code, done.stdout) == (1, invoke("check", *words).stdout)
    document = json.loads(invoke("check", "--job", "dead", "--format", "json").stdout)
    assert [finding["kind"] for finding in document["findings"]] == ["dead"]
    assert invoke("check", "--job", "dead", "-r", "rules.toml").exit_code == 0


def test_one_job_is_mended_as_its_hint_says(project):
    (project / "rules.toml").write_text('[[rules]]\npattern = "wq"\nspec = ["tp"]\n')
    text = 'model = "model.json"\nmesh = "tp=2"\n[jobs.a]\nrules = "rules.toml"\n'
    (project / "shardrules.toml").write_text(text)
    assert invoke("check").stdout.endswith("--fix prints the missing rules\n")
    done = invoke("check", "--fix")
    assert (done.exit_code, done.stdout.startswith("--- a/rules.toml\n")) == (1, True), done.output
    assert "+pattern = 'norm'" in done.stdout.replace('"', "'")


def test_a_budget_is_of_what_is_planned_and_of_what_is_sent(project):
    """It was for compiled steps alone, so that nothing told that the plan grew."""
    text = 'model = "model.json"\nrules = "rules.toml"\nmesh = "tp=2"\noptimizer = "adam"\n'
    for size, code in (("2.2MB", 0), ("2.1MB", 1)):
        lines = f'gradients = "same"\n[jobs.a]\nbudget = {{device = "{size}", peak = "90GB"}}\n'
        function = 'function = "some:step"\n'
        (project / "shardrules.toml").write_text(text + lines + function)
        done = invoke("check")
        assert (done.exit_code, "error[budget]: " in done.stdout) == (code, bool(code)), done.output


def test_each_form_of_a_value_is_an_option(project):
    (project / "shardrules.toml").write_text(
        '[jobs.a]\nmodel = "model.json"\nrules = "rules.toml"\nmesh = {tp = 2, dp = 2}\n'
        'data-axes = ["dp"]\nlevel = {dead = "off"}\nreplicated = ["norm", "-x"]\nlarge = 100\n'
        'hbm = "1GB"\nno-fallbacks = true\nfail-on = "info"\n'
    )
    done = invoke("check")
    assert (done.exit_code, done.stdout) == (
        0,
        "a:\nnothing found: 2 leaves, 2 rules, on tp=2,dp=2; not looked for: dead\n",
    )


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A folder with a model alone."""
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_init_writes_a_project_that_is_checked(bare):
    done = invoke("init", "model.json", "--mesh", "fsdp=2,tp=2", "--hbm", "16GB")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("wrote rules.toml\nwrote shardrules.toml\n")
    assert (bare / "shardrules.toml").read_text() == (
        '[jobs.model]\nmodel = "model.json"\nrules = "rules.toml"\nmesh = "fsdp=2,tp=2"\nhbm = 16000000000\n'
    )
    done = invoke("check", "--fail-on", "warning")
    assert (done.exit_code, done.stdout) == (
        0,
        "model:\nnothing found: 2 leaves, 2 rules, on fsdp=2,tp=2\n",
    )


def test_init_of_a_function(bare, monkeypatch):
    (bare / "own_tree.py").write_text(
        "class A: shape, dtype = (512, 512), 'float32'\ndef ünder(): return {'wq': A()}"
    )
    monkeypatch.syspath_prepend(str(bare))
    assert invoke("init", "own_tree:ünder", "--devices", "4").exit_code == 0
    assert invoke("check").stdout.startswith("ünder:\n")


@pytest.mark.parametrize("name", ["rules.toml", "shardrules.toml", "pyproject.toml"])
def test_init_replaces_nothing(bare, name):
    text = (
        '[tool.shardrules.jobs.a]\nmodel = "m"\n'
        if name == "pyproject.toml"
        else '[jobs.a]\nmodel = "m"\n'
    )
    (bare / name).write_text(text)
    done = invoke("init", "model.json", "--mesh", "tp=2")
    assert (done.exit_code, name in done.stderr) == (2, True)
    assert {path.name for path in bare.iterdir()} == {".git", "model.json", name}
    assert (bare / name).read_text() == text


@pytest.mark.parametrize(
    ("place", "reason"), [("here", "Is a directory"), ("none/model.json", "No such file")]
)
def test_a_place_that_takes_no_file_is_named(bare, place, reason):
    (bare / "here").mkdir()
    done = invoke("manifest", "model.json", "-o", place)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {place}: {reason}")
    assert done.stderr.endswith("; check the name and the permissions\n")


STEP = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import shardrules as sr

TREE = {
    "up": jax.ShapeDtypeStruct((512, 2048), "bfloat16"),
    "down": jax.ShapeDtypeStruct((2048, 512), "bfloat16"),
}


def step_on(mesh, rules=((".*", ()),)):
    plan = sr.plan(TREE, rules, mesh)
    cut = P("fsdp")

    def train(params, x):
        def loss(params):
            x1 = jax.nn.relu(x @ params["up"]) @ params["down"]
            return jnp.mean(jnp.square(x1))
        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    x = jax.ShapeDtypeStruct((2**14, 512), "bfloat16", sharding=NamedSharding(mesh, cut))
    return jax.jit(train, donate_argnums=0, out_shardings=plan.shardings()), (plan, x), plan


def needs_rules(mesh, rules):
    return step_on(mesh, rules)


def own_rules(mesh):
    return step_on(mesh)
"""


@pytest.fixture
def step(bare, monkeypatch):
    """A folder with the module of a step."""
    (bare / "step_to_start.py").write_text(STEP)
    monkeypatch.syspath_prepend(str(bare))
    yield bare
    sys.modules.pop("step_to_start", None)


@needs_libtpu
def test_init_of_a_step_takes_its_mesh_and_rules(step):
    done = invoke("init", "step_to_start:needs_rules", "--on", "v5e:2x2", "--mesh", "fsdp=2,tp=2")
    assert done.exit_code == 0, done.output
    assert 'mesh = "fsdp=2,tp=2"\n' in (step / "shardrules.toml").read_text()
    assert invoke("check", "--fail-on", "warning").exit_code == 0


def test_init_of_a_step_on_its_mesh_needs_no_compiler(step, monkeypatch):
    def absent(_):
        raise ImportError("libtpu is not installed: pip install 'jax[tpu]'")

    monkeypatch.setattr(sr.Topology, "devices", property(absent))
    words = ("init", "step_to_start:needs_rules", "--on", "v5e:2x2", "--mesh")
    assert "fsdp=8 are 8 devices, and v5e:2x2 has 4" in invoke(*words, "fsdp=8").stderr
    done = invoke(*words, "fsdp=2,tp=2")
    assert done.exit_code == 0, done.output
    assert "links count as whole, since libtpu is not installed: pip install" in done.stderr
    assert 'mesh = "fsdp=2,tp=2"\n' in (step / "shardrules.toml").read_text()


@needs_libtpu
def test_init_of_a_step_writes_what_check_and_prove_run(step):
    name = "step_on"
    done = invoke("init", f"step_to_start:{name}", "--on", "v5e:2x2", "--hbm", "16GB")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("wrote model.json.gz\nwrote rules.toml\nwrote shardrules.toml\n")
    assert "a step on fsdp=" in done.stderr
    _, jobs = find_project(None)
    assert jobs.keys() == {name}
    assert (
        jobs[name].items()
        >= {"model": "model.json.gz", "function": f"step_to_start:{name}"}.items()
    )
    assert {"rules", "on", "mesh"} <= jobs[name].keys()
    done = invoke("check", "--fail-on", "warning")
    assert (done.exit_code, "2 leaves" in done.stdout) == (0, True), done.output
    done = invoke("prove")
    assert (done.exit_code, "it fits" in done.stdout) == (0, True), done.output
    assert "2 of 3 inputs planned" in done.stdout or "0 errors" in done.stdout
    text = (step / "rules.toml").read_text()
    (step / "rules.toml").write_text(re.sub("spec = .*", 'spec = ["gone"]', text))
    assert invoke("prove").exit_code == 2  # the rules are those of the file


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("step_to_start:own_rules --on v5e:2x2", "own_rules(mesh, rules=RULES): prove then"),
        ("step_to_start:step_on --mesh fsdp=4", "as a step does; for a step give --on v5p:8x8x8"),
        ("step_to_start:TREE --on v5e:2x2", "it must take the mesh and the rules"),
        ("step_to_start:step_on --on v5e:2x2 --devices 4", "--on and --devices exclude"),
        ("step_to_start:step_on --on v5e:2x2 --head-dim 64", "--on and --head-dim exclude"),
        ("model.json --mesh tp=2 --slices 2", "--slices needs --on"),
        ("model.json", "give a mesh with --mesh, or --devices"),
        ("model.json --mesh tp=2 --devices 2", "--mesh and --devices exclude each other: leave out either"),
        ("model.json --on v5e:2x2", "write package.module:name"),
    ],
)  # fmt: skip
def test_init_refuses(step, words, told):
    done = invoke("init", *words.split())
    assert (done.exit_code, told in done.stderr, done.stdout) == (2, True, ""), done.output
    assert not (step / "rules.toml").exists()


VALUES = [True, 3, 1.5, "adam", "", ["a"], {"dead": "off"}, {}]


def test_the_schema_for_editors_agrees_with_the_reader(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(project_schema.SCHEMA.read_text(encoding="utf-8"))
    assert schema == project_schema.schema(), (
        "python -m tests.support.project_schema writes it anew"
    )
    checker = jsonschema.Draft7Validator(schema)
    checker.check_schema(schema)

    def accepted(table):
        try:
            read_jobs(tmp_path / "shardrules.toml", table)
        except FileError:
            return False
        return True

    arguments = {"model": "m", "function": "a:b", "before": "p.lock"}
    keys = [*parameters(), "unknown", "quiet"]
    tables = [{"jobs": {"a": {**arguments, key: value}}} for key in keys for value in VALUES]
    tables += [{key: value, "jobs": {"a": arguments}} for key in keys for value in VALUES]
    tables += [{}, {"jobs": {}}, {"jobs": 3}, {"jobs": {"a": 3}}]
    assert [table for table in tables if accepted(table) != checker.is_valid(table)] == []
    assert {accepted(table) for table in tables} == {True, False}


def test_names_of_jobs_are_no_commands_of_a_runner(project):
    for name in ("::error::x", "##[error]x", "a\nb\x1b[1m"):
        (project / "shardrules.toml").write_text(
            f'model = "model.json"\nmesh = "tp=2"\n[jobs.{json.dumps(name)}]\nrules = "dead.toml"\n'
        )
        done = invoke("check", "--format", "github")
        assert done.exit_code == 0
        head, annotation = done.stdout.splitlines()
        assert not head.startswith("::")
        assert "##[" not in head
        assert annotation.startswith("::warning file=dead.toml,line=8,title=")
        assert "\x1b" not in done.stdout
