"""`shardrules solve --on`: the mesh of those that exist on a slice, and the compiler's proof."""

from __future__ import annotations

import sys

import pytest

import shardrules as sr
from tests.cli.test_solve_command import MODULE
from tests.support.command_line import invoke
from tests.tpu.marks import needs_libtpu

pytestmark = needs_libtpu


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "mlp_to_solve.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mlp_to_solve", None)


def test_a_slice_is_all_that_is_needed():
    done = invoke("solve", "mlp_to_solve:step_on", "--on", "v5e:2x4")
    assert done.exit_code == 0, done.stderr
    assert "[[rules]]" in done.stdout
    assert "a step on fsdp=" in done.stderr


def test_a_mesh_that_does_not_exist_there_is_refused():
    done = invoke("solve", "mlp_to_solve:step_on", "--on", "v5e:2x4", "-m", "fsdp=3,tp=2")
    assert done.exit_code == 2
    assert "fsdp=3" in done.stderr


def test_the_compiler_sends_what_was_predicted():
    from mlp_to_solve import step_on

    topology = sr.Topology("v5e:2x4")
    step, arguments = step_on(topology.mesh(fsdp=8))
    solution = sr.solve(sr.trace(step, *arguments), topology)
    best = solution.candidates[0]
    assert best.predicted.sent == pytest.approx(best.compiled.sent, rel=0.2)
    assert best.compiled.seconds <= min(row.compiled.seconds for row in solution.candidates if not row.refusal) * (
        1 + 1e-2
    )
