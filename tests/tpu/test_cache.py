"""What was compiled to its end for described devices is kept, and only what is the same is taken from there."""

import gzip
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program import compiler
from tests.support.compiled import lowered_on
from tests.support.contexts import needs_libtpu
from tests.tpu.test_prove import RULES, SIZES, batch, params, step

pytestmark = needs_libtpu


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDRULES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def is_kept(monkeypatch):
    """is_kept(function, ...): finish a step, which is not compiled in truth, and say whether the cache has had it."""

    class Whole:
        def as_text(self):
            return "HloModule m, is_scheduled=true\n\nENTRY e () -> f32[] {\n}\n"

    monkeypatch.setattr(compiler, "compile_whole", lambda *_: Whole())

    def is_kept(function=lambda x: x * 2, spec=P("x"), name="v5e:2x2", **options):
        mesh = sr.Topology(name).mesh(x=4)
        x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, spec))
        with ThreadPoolExecutor(1) as thread:  # where no line of a test is a part of the program
            lowered = thread.submit(lowered_on, mesh, jax.jit(function, **options), x).result()
        return compiler.compile_or_read(lowered, mesh)[1] is None

    return is_kept


def double(x):
    return x * 2


def test_the_same_step_for_a_topology_is_compiled_once(folder):
    mesh = sr.Topology("v5e:2x4").mesh(SIZES)
    plan = sr.plan(params(), RULES, mesh)
    first, second = (sr.prove(jax.jit(step), plan, batch(mesh), on=mesh, time=True) for _ in range(2))
    assert (first.compiled is not None, second.compiled) == (True, None)
    assert first.time.computing > 0
    assert second.to_json() == first.to_json() | {"seconds": second.seconds}
    assert (len([*folder.iterdir()]), folder.stat().st_mode & 0o077) == (1, 0)


def with_constant(value):
    return lambda x: x * jnp.asarray(np.full((8, 8), value, np.float32))


def test_what_differs_is_compiled_again(folder, is_kept, monkeypatch):
    assert [is_kept(double), is_kept(double)] == [False, True]
    whole = NamedSharding(sr.Topology("v5e:2x2").mesh(x=4), P())
    for function, other in (
        (with_constant(2), {}), (with_constant(3), {}), (double, {"donate_argnums": 0}), (double, {"spec": P()}),
        (double, {"out_shardings": whole}), (double, {"compiler_options": {"xla_tpu_scoped_vmem_limit_kib": "9"}}),
        (double, {"name": "v5p:2x2x1"}),
    ):  # fmt: skip
        assert not is_kept(function, **other), other
    with monkeypatch.context() as changed:
        changed.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_some=1")
        assert not is_kept(double)
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    assert not is_kept(double)
    assert len([*folder.iterdir()]) == 10


@pytest.mark.parametrize("damage", [
    lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:20] + b"\0" + data[21:],
    lambda data: b"HloModule", lambda data: gzip.compress(b"\x80\x04\x95"), lambda data: gzip.compress(b""),
])  # fmt: skip
def test_a_damaged_entry_is_made_anew(folder, is_kept, damage):
    assert not is_kept(double)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert [is_kept(double), is_kept(double)] == [False, True]


def test_the_oldest_entries_go(folder, is_kept, monkeypatch):
    monkeypatch.setattr(compiler, "_CACHE_ENTRIES", 2)
    assert not is_kept(with_constant(2))
    (folder / "data.gz").write_text("of the user, older than all")
    os.utime(folder / "data.gz", (0, 0))
    kept = [is_kept(with_constant(value)) for value in (3, 4, 4, 3, 2)]
    assert kept == [False, False, True, True, False]
    assert len([*folder.iterdir()]) == 3
    assert (folder / "data.gz").exists()


def test_what_is_not_kept(folder, is_kept, monkeypatch, tmp_path):
    for name, value in (("SHARDRULES_CACHE", ""), ("SHARDRULES_CACHE", "off"), ("LIBTPU_INIT_ARGS", "--xla_dump_to=x")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert [is_kept(double), is_kept(double)] == [False, False]
    assert not folder.exists()
    folder.write_text("a file is in its place")
    assert not is_kept(double)
    monkeypatch.delenv("SHARDRULES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert [is_kept(double), is_kept(double)] == [False, False]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert not is_kept(double)
    assert len([*(tmp_path / "xdg" / "shardrules").iterdir()]) == 1


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such modes")
def test_a_folder_that_others_may_write_is_neither_read_nor_written(folder, is_kept):
    assert [is_kept(double), is_kept(double)] == [False, True]
    folder.chmod(0o1777)
    assert [is_kept(double), is_kept(lambda x: x * 3)] == [False, False]
    assert len([*folder.iterdir()]) == 1
    folder.chmod(0o770)
    assert is_kept(double)
    if os.geteuid() == 0:
        os.chown(folder, 65534, -1)
        assert not is_kept(double)


PROGRAM = """
import jax, shardrules as sr
mesh = sr.Topology("v5e:2x2").mesh(fsdp=4)
plan = sr.plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, [("w", "fsdp")], mesh)
print(sr.prove(lambda p: p["w"] * 2, plan, on=mesh, time=True).compiled is None)
"""


def test_processes_share_it(tmp_path):
    environment = {**os.environ, "SHARDRULES_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    script = tmp_path / "script.py"  # the lines of the program are a part of an entry
    script.write_text(PROGRAM)

    for is_cached in (False, True):
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == f"{is_cached}\n"
