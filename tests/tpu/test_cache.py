"""What was compiled to its end for described devices is kept, and only what is the same is taken from there."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program import cache
from tests.tpu.marks import needs_libtpu
from tests.tpu.test_prove import RULES, SIZES, batch, cpu_mesh, params, step


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Set the folder of the cache, which is for the CPU devices of tests, too."""
    monkeypatch.setenv("SHARDRULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "topology_of", lambda _: True)
    return tmp_path / "cache"


def entries(folder):
    return sorted(folder.glob("*.gz"))


def double(x):
    return x * 2


def lowered(mesh, function=double, spec=P("fsdp"), **options):
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, spec))
    return jax.jit(function, **options).lower(x)


def is_kept(mesh, function=double, **options):
    """Finish a step, and say whether the cache has had it."""
    result = cache.finished(lowered(mesh, function, **options), mesh, is_kept=True)
    assert result.text.startswith("HloModule")
    return result.compiled is None


@needs_libtpu
def test_the_same_step_for_a_topology_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDRULES_CACHE", str(tmp_path))
    topology = sr.Topology("v5e:2x4")
    mesh = topology.mesh(SIZES)
    plan = sr.plan(params(), RULES, mesh)
    jitted = jax.jit(step, donate_argnums=0)

    def prove():
        return sr.prove(jitted, plan, batch(mesh), on=topology, outputs=plan, time=True)

    first, second = prove(), prove()
    assert (first.is_cached, second.is_cached) == (False, True)
    assert (first.compiled is not None, second.compiled) == (True, None)
    assert first.time.computing > 0
    assert "s, as its code was in the cache" in str(second)
    assert second.to_json() == first.to_json() | {"is_cached": True, "seconds": second.seconds}
    assert len(entries(tmp_path)) == 1


def with_constant(value):
    return lambda x: x * jnp.asarray(np.full((8, 8), value, np.float32))


def test_what_differs_is_compiled_again(folder, monkeypatch):
    mesh = cpu_mesh()
    assert not is_kept(mesh)
    assert is_kept(mesh)
    assert not is_kept(Mesh(mesh.devices[::-1], mesh.axis_names))
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("tp"))
    for other in (
        {"function": with_constant(2)}, {"function": with_constant(3)}, {"donate_argnums": 0},
        {"out_shardings": whole}, {"out_shardings": cut}, {"spec": P("tp")},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ):  # fmt: skip
        assert not is_kept(mesh, **other), other
    for change in (
        lambda m: m.setattr(cache, "version", lambda _: "0.0.1"),
        lambda m: m.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_some=1"),
        lambda m: m.setattr(cache, "device_identity", lambda _: "v5e:4x4"),
    ):
        with monkeypatch.context() as changed:
            change(changed)
            assert not is_kept(mesh)
    assert is_kept(mesh)
    assert len(entries(folder)) == 12


def damaged(data):
    changed, text = bytearray(data), gzip.decompress(data)
    changed[len(data) // 2] ^= 1
    yield "empty", b""
    yield "cut", data[: len(data) // 2]
    yield "one bit", bytes(changed)
    yield "not gzip", b"HloModule"
    yield "a pickle", gzip.compress(b"\x80\x04\x95")
    yield "no text", gzip.compress(b"")
    yield "text that ends too early", gzip.compress(text[:40])
    yield "a bomb", gzip.compress(b"{" + b" " * 2**20)


def test_a_damaged_entry_is_made_anew(folder, monkeypatch):
    mesh = cpu_mesh()
    assert not is_kept(mesh)
    (path,) = entries(folder)
    good = path.read_bytes()
    monkeypatch.setattr(cache, "_MOST_UNPACKED", len(gzip.decompress(good)) + 100)
    cases = dict(damaged(good))
    for name, data in cases.items():
        path.write_bytes(data)
        assert not is_kept(mesh), name
        assert is_kept(mesh), name  # it was replaced
    assert entries(folder) == [path]


def test_the_oldest_entries_go(folder, monkeypatch):
    mesh = cpu_mesh()
    folder.mkdir()
    other = folder / "notes.txt"
    other.write_bytes(bytes(10**5))
    steps = {number: with_constant(number) for number in range(2, 12)}
    assert not is_kept(mesh, steps[2])
    (oldest,) = entries(folder)
    size = oldest.stat().st_size
    monkeypatch.setattr(cache, "_LIMIT", 4 * size + 100)
    for age, number in enumerate((3, 4, 5)):
        assert not is_kept(mesh, steps[number])
        for path in entries(folder):
            os.utime(path, (time.time() - 100 + age,) * 2) if path != oldest else None
    os.utime(oldest, (1, 1))
    assert is_kept(mesh, steps[2])  # it is in use
    for number in range(6, 12):
        assert not is_kept(mesh, steps[number])
        assert sum(path.stat().st_size for path in entries(folder)) <= 4 * size + 100
        assert is_kept(mesh, steps[2])
    assert not is_kept(mesh, steps[3])
    assert other.stat().st_size == 10**5  # is no entry


@pytest.mark.parametrize("name", ["", "off"])
def test_it_can_be_off(folder, monkeypatch, name):
    monkeypatch.setenv("SHARDRULES_CACHE", name)
    assert [is_kept(cpu_mesh()), is_kept(cpu_mesh())] == [False, False]
    assert not folder.exists()


def test_where_it_is(folder, monkeypatch, tmp_path):
    assert cache._folder() == folder
    monkeypatch.delenv("SHARDRULES_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert cache._folder() == tmp_path / ".cache" / "shardrules"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache._folder() == tmp_path / "xdg" / "shardrules"


def test_what_is_not_kept(folder, monkeypatch, tmp_path):
    mesh = cpu_mesh()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_dump_to={tmp_path}")
    assert [is_kept(mesh), is_kept(mesh)] == [False, False]  # what is to be dumped has to be made
    monkeypatch.delenv("LIBTPU_INIT_ARGS")
    assert cache.finished(lowered(mesh), mesh, is_kept=False).compiled is not None
    refusal = cache.Refusal(20 * 10**9, 16 * 10**9, "")
    with monkeypatch.context() as refused:
        refused.setattr(cache, "compile_whole", lambda *_: refusal)
        assert cache.finished(lowered(mesh), mesh, is_kept=True) == refusal
    monkeypatch.undo()
    monkeypatch.setenv("SHARDRULES_CACHE", str(folder))
    assert cache.finished(lowered(mesh), mesh, is_kept=True).compiled is not None  # not described
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_no_failure(folder, monkeypatch):
    mesh = cpu_mesh()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as without_right:
        without_right.setattr(cache, "replace_file", refuse)
        assert not is_kept(mesh)
    assert entries(folder) == []
    folder.rmdir()
    folder.write_text("a file is in its place")
    assert not is_kept(mesh)
    folder.unlink()
    assert not is_kept(mesh)
    monkeypatch.setattr(os, "utime", refuse)  # a disk that can only be read
    assert is_kept(mesh)


def test_a_folder_that_is_not_the_user_s_alone_is_neither_read_nor_written(folder):
    mesh, nobody = cpu_mesh(), 65534
    assert not is_kept(mesh)
    (path,) = entries(folder)
    before = path.stat()
    folder.chmod(0o1777)
    assert not is_kept(mesh)
    folder.chmod(0o770)
    assert is_kept(mesh)
    if getattr(os, "geteuid", lambda: 1)() == 0:  # only root gives files away
        os.chown(folder, nobody, -1)
        assert not is_kept(mesh)
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_an_entry_is_not_written_through_a_link(folder, tmp_path):
    mesh = cpu_mesh()
    assert not is_kept(mesh)
    (path,) = entries(folder)
    path.unlink()
    path.symlink_to(tmp_path / "absent")
    assert not is_kept(mesh)
    assert (path.is_symlink(), (tmp_path / "absent").exists()) == (False, False)


PROGRAM = """
import jax, shardrules as sr
mesh = sr.Topology("v5e:2x2").mesh(fsdp=4)
plan = sr.plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, [("w", "fsdp")], mesh)
print(sr.prove(lambda p: p["w"] * 2, plan, on=mesh, time=True).is_cached)
"""


@needs_libtpu
def test_processes_share_it(tmp_path):
    environment = {**os.environ, "SHARDRULES_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    script = tmp_path / "script.py"  # the lines of the program are a part of an entry
    script.write_text(PROGRAM)

    def start():
        return subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True)

    for process in [start(), start()]:  # at once
        assert process.communicate(timeout=300)[0] in ("False\n", "True\n")
        assert process.returncode == 0
    assert len(entries(tmp_path)) == 1
    assert start().communicate(timeout=300)[0] == "True\n"
