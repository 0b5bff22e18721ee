"""`make demo` ends with the proof of the step of 405B for 512 devices, by whatever compiler is there."""

from pathlib import Path

import jax

import shardrules as sr
from examples import prove_405b
from tests.tpu.marks import needs_libtpu

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pod.md").read_text(encoding="utf-8")


@needs_libtpu
def test_it_proves_405b(capsys):
    prove_405b.main()
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith("it fits: ")
    assert " of 103 GB, on v5p:8x8x8, fsdp=64,tp=8 (" in first
    (sent,) = (line for line in rest if line.startswith("each device sends "))
    if jax.__version_info__ >= (0, 12):
        assert first.partition(", in ")[0] in PAGE
        assert sent in PAGE
    assert not any(line.startswith("error") for line in rest)


def test_without_the_compiler_xla_for_cpu_is_asked(capsys, monkeypatch):
    def missing(*_):
        raise ImportError("libtpu is not installed")

    monkeypatch.setattr(sr.Topology, "mesh", missing)
    prove_405b.main()
    hint, first, *rest = capsys.readouterr().out.splitlines()
    assert hint == "libtpu is not installed"
    assert " on fsdp=64,tp=8 by XLA for CPU: a TPU's partitioner may choose otherwise" in first
    (sent,) = (line for line in rest if line.startswith("each device sends "))
    assert jax.__version_info__ < (0, 12) or f"{' '.join(sent.split()[3:5])} for the step above" in PAGE


def test_it_is_what_make_demo_runs_last():
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert recipe.splitlines()[-1].endswith("examples/prove_405b.py")
