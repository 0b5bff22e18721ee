"""What a process of the command line imports: no more than what it is asked for needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.entered import entered_by_command

HEAVY = ("numpy", "jax", "plotly")


PLANNING = "shardrules._plan."
COMMAND_LINE = "from shardrules._cli import main; main()"


def imported_by(code, *words):
    """The modules of a process that runs this code with these arguments."""
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
    command = [sys.executable, "-c", told + code, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stderr.splitlines()[-1].split())


def ours(modules):
    return {name for name in modules if name.startswith("shardrules.")}


def test_the_help_imports_no_command_and_no_library():
    modules = imported_by(COMMAND_LINE, "--help")
    assert not modules.intersection(HEAVY)
    assert not modules & {"rich", "typer"}
    own = {name for name in ours(modules) if name.startswith("shardrules._cli")}
    assert ours(modules) - own == {"shardrules._base", "shardrules._base.io", "shardrules._base.text"}
    one = ours(imported_by(COMMAND_LINE, "plan", "--help"))
    assert {name for name in one if "commands." in name} == {"shardrules._cli.commands.plan"}
    assert one <= ours(modules)


def test_the_package_imports_what_is_asked_for():
    """Nothing of it at first; for matching neither JAX nor planning."""
    modules = imported_by("import shardrules")
    assert ours(modules) == {"shardrules._base"}
    assert not modules.intersection((*HEAVY, "click"))
    modules = imported_by("import shardrules as sr; sr.Rules([('a', None)])")
    assert "shardrules._rules.rules" in modules
    assert not [name for name in modules if name == "jax" or ".files" in name or "_plan" in name]


def test_a_plan_imports_no_other_command_and_no_suggestion(tmp_path):
    model, rules = tmp_path / "model.json", tmp_path / "rules.json"
    model.write_text('{"params": [["a/w", [8, 8], "F32"]]}')
    rules.write_text('{"rules": [["w", ["tp"]]]}')
    words = ["plan", str(model), "-r", str(rules), "-m", "tp=2"]
    modules = imported_by(COMMAND_LINE, *words)
    others = ("_plan.suggest", "_program.verify", "_checkpoint", "compat")
    assert not [name for name in ours(modules) if name.startswith(tuple(map("shardrules.".__add__, others)))]
    unasked = ("check", "sweep", "lock", "roles")
    assert not [name for name in modules if name.startswith(tuple(map(PLANNING.__add__, unasked)))]
    # numpy.unique imports numpy.ma, for 10 ms; the others are for other files and questions.
    assert not modules & {"jax", "plotly", "rich", "numpy.ma", "tomllib", "fractions"}


def test_a_check_of_three_arrays_is_a_short_walk(tmp_path):
    """Calls of functions and classes of the package, imports included: they were 1,373."""
    (tmp_path / "model.json").write_text(
        '{"params": [["wq", [64, 64], "F32"], ["wk", [64, 64], "F32"], ["b", [64], "F32"]]}'
    )
    (tmp_path / "rules.json").write_text('{"rules": [["w", ["fsdp", "tp"]], [".*", []]]}')
    words = ["check", "model.json", "-r", "rules.json", "-m", "fsdp=2,tp=2"]
    calls = [name for _, name in entered_by_command(tmp_path, *words) if name != "<module>"]
    most = 700 if sys.version_info >= (3, 12) else 900  # where comprehensions are calls
    assert 0 < len(calls) <= most


def test_a_compiler_is_no_reason_to_look_for_a_tpu(tmp_path):
    """With libtpu in the environment, and no TPU, JAX would look for one and libtpu write lines."""
    (tmp_path / "libtpu.py").touch()
    (tmp_path / "own.py").write_text("import os\ndef tree(): raise ValueError(os.environ.get('JAX_PLATFORMS'))")
    environment = {name: text for name, text in os.environ.items() if name != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def platforms(**more):
        command = [sys.executable, "-c", COMMAND_LINE, "manifest", "own:tree"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment | more
        )
        return done.stderr

    devices = [path for name in ("accel*", "vfio/*", "nvidia*", "kfd") for path in Path("/dev").glob(name)]
    expected = "None" if devices else "cpu"
    assert f"has raised ValueError: {expected};" in platforms()
    assert "has raised ValueError: cuda;" in platforms(JAX_PLATFORMS="cuda")
    (tmp_path / "libtpu.py").unlink()
    assert "has raised ValueError: None;" in platforms()
