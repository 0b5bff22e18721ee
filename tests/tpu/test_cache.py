"""What was compiled for described devices is kept, and only what is the same is taken from there."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
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


def proof_of(mesh, step=step, on=None, **options):
    plan = sr.plan(params(), RULES, mesh)
    jitted = jax.jit(step, donate_argnums=0)
    return sr.prove(
        jitted, plan, batch(mesh), on=on or mesh, outputs=plan, large=2**16, time=True, **options
    )


def answers(proof):
    return proof.findings, str(proof.program), proof.time, proof.program.lock(), proof.target


def is_compiled_again(mesh, **options):
    return not proof_of(mesh, **options).is_cached


def check_the_second(first, second):
    assert (first.is_cached, second.is_cached) == (False, True)
    assert first.compiled is not None
    assert second.compiled is None
    assert answers(first) == answers(second)
    assert first.seconds == second.seconds
    assert "s, earlier: its code is in the cache" in str(second)
    assert second.to_json() == first.to_json() | {"is_cached": True}


def test_the_same_step_is_compiled_once(folder, monkeypatch):
    mesh = cpu_mesh()
    compiled = []
    real = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self, *a, **k: compiled.append(1) or real(self, *a, **k),
    )
    first, second = proof_of(mesh), proof_of(mesh)
    check_the_second(first, second)
    assert len(compiled) == len(entries(folder)) == 1
    with pytest.raises(sr.FindingsError) as ours:
        second.raise_for("info")
    with pytest.raises(sr.FindingsError) as theirs:
        first.raise_for("info")
    assert str(ours.value) == str(theirs.value)


@needs_libtpu
def test_the_same_step_for_a_topology_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDRULES_CACHE", str(tmp_path))
    topology = sr.Topology("v5e:2x4")
    mesh = topology.mesh(SIZES)
    first = proof_of(mesh, on=topology)
    check_the_second(first, proof_of(mesh, on=topology))
    assert first.time is not None
    assert len(entries(tmp_path)) == 1


def with_constant(value):
    def changed(params, x):
        return step(params, x * jnp.asarray(np.full((512, 256), value, np.float32)))

    return changed


def test_what_differs_is_compiled_again(folder, monkeypatch):
    mesh = cpu_mesh()
    reversed_mesh = jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    assert is_compiled_again(mesh)
    assert is_compiled_again(reversed_mesh)
    assert is_compiled_again(mesh, step=with_constant(2))
    assert is_compiled_again(mesh, step=with_constant(3))
    with monkeypatch.context() as changed:
        changed.setattr(cache, "version", lambda _: "0.0.1")
        assert is_compiled_again(mesh)
    with monkeypatch.context() as changed:
        changed.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_some=1")
        assert is_compiled_again(mesh)
    with monkeypatch.context() as changed:
        changed.setattr(cache, "device_identity", lambda _: "v5e:4x4")
        assert is_compiled_again(mesh)
    assert not is_compiled_again(mesh)
    assert len(entries(folder)) == 7


def proved(mesh, function, *args, **options):
    return sr.prove(jax.jit(function, **options), *args, on=mesh, time=True)


def test_how_a_function_is_jitted_is_a_part_of_it(folder):
    """The text of the lowered function is the same in each pair."""
    mesh = cpu_mesh()
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    flags = {"xla_cpu_enable_fast_math": True}
    for options in ({}, {"compiler_options": flags}):
        assert not proved(mesh, lambda x: x * 2, x, **options).is_cached

    def pick(pair, number):
        return pair[number] * 2

    for number in (0, 1):
        proof = proved(mesh, lambda pair, number=number: pick(pair, number), (x, x))
        assert not proof.is_cached
        assert [s is None for s in proof.program._executable.inputs.shardings].index(
            False
        ) == number
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("tp"))
    for sharding in (whole, cut):
        proof = proved(mesh, lambda x: x + 1, x, out_shardings=sharding)
        assert not proof.is_cached
        assert proof.program._executable.outputs.shardings == [sharding]


def test_dropped_and_donated_arguments_come_back(folder):
    mesh = cpu_mesh()
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp", "tp")))
    spec = P("fsdp", "tp")

    def use(dropped, state, *, batch):
        return {"state": state * batch, "loss": jnp.sum(batch)}

    def read():
        lowered = jax.jit(use, donate_argnums=1).lower(x, x, batch=x)
        return lowered, cache.compiled_result(lowered, mesh)

    _, first = read()
    _, second = read()
    assert (first.is_cached, second.is_cached) == (False, True)
    planned = ((spec, spec, {"batch": spec}), {"state": spec, "loss": P()})
    findings = sr.verify(first.content, *planned)
    assert findings == sr.verify(second.content, *planned)
    assert "dropped" in str(findings)


def test_a_refusal_is_kept(folder, monkeypatch):
    mesh = cpu_mesh()
    lowered = jax.jit(lambda x: x * 2).lower(batch(mesh))
    refusal = cache.Refusal(20 * 10**9, 16 * 10**9, "")
    monkeypatch.setattr(cache, "compile_whole", lambda *_: refusal)
    results = [cache.compiled_result(lowered, mesh) for _ in range(2)]
    assert [result.content for result in results] == [refusal, refusal]
    assert [result.is_cached for result in results] == [False, True]


def damaged(data):
    head, _, text = gzip.decompress(data).decode().partition("\n")
    facts = json.loads(head)

    def packed(facts, text=text):
        head = facts if isinstance(facts, str) else json.dumps(facts)
        return gzip.compress(f"{head}\n{text}".encode())

    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    yield "empty", b""
    yield "cut", data[: len(data) // 2]
    yield "one bit", bytes(changed)
    yield "not gzip", b"HloModule"
    yield "a pickle", gzip.compress(b"\x80\x04\x95")
    yield "not JSON", packed("{")
    yield "a list", packed([])
    yield "nested", packed("[" * 100_000)
    yield "no text", packed(facts, "")
    yield "text that ends too early", packed(facts, text[:-200])
    for name in facts:
        yield f"no {name}", packed({key: facts[key] for key in facts if key != name})
        yield f"{name} of another type", packed(facts | {name: "many"})
    for size in (-1, 10**400, 2**63, 1.5, None, True):
        yield f"{size} bytes", packed(facts | {"memory": [*facts["memory"][:-1], size]})
    for seconds in (-1.0, float("inf"), float("nan"), 10**400):
        yield f"{seconds} seconds", packed(facts | {"seconds": seconds})
    yield "a sharding from the end", packed(facts | {"outputs": [-1] * len(facts["outputs"])})
    yield (
        "a refusal of less than nothing",
        packed(facts | {"refusal": [-1, 5], "characters": 0}, ""),
    )
    yield "a refusal without a module", packed(facts | {"refusal": [5, 1], "characters": 1}, "x")
    yield "fewer arguments", packed(facts | {"inputs": facts["inputs"][1:]})
    yield "an unknown sharding", packed(facts | {"outputs": [99] * len(facts["outputs"])})
    yield "an unknown axis", packed(facts | {"shardings": [[["ep"], "device"]] * 9})
    yield "sizes that are texts", packed(facts | {"memory": ["1"] * 6})
    yield "a bomb", gzip.compress(b"{" + b" " * 2**20)


def test_a_damaged_entry_is_made_anew(folder, monkeypatch):
    mesh = cpu_mesh()
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    whole = NamedSharding(mesh, P())

    def double(x):
        return x * 2

    def prove():  # traced once: the lines of its callers would be a part of it, too
        return sr.prove(jax.jit(double, out_shardings=whole), x, on=mesh, time=True)

    first = prove()
    (path,) = entries(folder)
    good = path.read_bytes()
    monkeypatch.setattr(cache, "_MOST_UNPACKED", len(gzip.decompress(good)) + 100)
    cases = dict(damaged(good))
    assert len(cases) == 40
    for name, data in cases.items():
        path.write_bytes(data)
        proof = prove()
        assert not proof.is_cached, name
        assert answers(proof) == answers(first)
        assert prove().is_cached, name  # it was replaced
    assert entries(folder) == [path]


def test_the_oldest_entries_go(folder, monkeypatch):
    mesh = cpu_mesh()
    folder.mkdir()
    other = folder / "notes.txt"
    other.write_bytes(bytes(10**5))

    steps = {number: lambda x, number=number: x * number for number in range(2, 12)}

    def prove(number):
        return sr.prove(steps[number], batch(mesh), on=mesh, time=True)

    prove(2)
    (oldest,) = entries(folder)
    size = oldest.stat().st_size
    monkeypatch.setattr(cache, "_LIMIT", 4 * size)
    for age, number in enumerate((3, 4, 5)):
        prove(number)
        for path in entries(folder):
            os.utime(path, (time.time() - 100 + age,) * 2) if path != oldest else None
    os.utime(oldest, (1, 1))
    assert prove(2).is_cached  # it is in use
    for number in range(6, 12):
        prove(number)
        assert sum(path.stat().st_size for path in entries(folder)) <= 4 * size
        assert prove(2).is_cached
    assert not prove(3).is_cached
    assert other.stat().st_size == 10**5  # is no entry


@pytest.mark.parametrize("name", ["", "off"])
def test_it_can_be_off(folder, monkeypatch, name):
    monkeypatch.setenv("SHARDRULES_CACHE", name)
    assert is_compiled_again(cpu_mesh())
    assert is_compiled_again(cpu_mesh())
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


def test_only_described_devices_have_one(folder, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("SHARDRULES_CACHE", str(folder))
    assert is_compiled_again(cpu_mesh())
    assert not folder.exists()


def test_what_is_to_be_dumped_is_compiled(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_dump_to={tmp_path}")
    assert is_compiled_again(cpu_mesh())
    assert is_compiled_again(cpu_mesh())


def test_a_folder_that_cannot_be_written_is_no_failure(folder, monkeypatch):
    mesh = cpu_mesh()

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as without_right:
        without_right.setattr(cache, "replace_file", refuse)
        assert is_compiled_again(mesh)
    assert entries(folder) == []
    folder.rmdir()
    folder.write_text("a file is in its place")
    assert is_compiled_again(mesh)
    folder.unlink()
    assert is_compiled_again(mesh)
    monkeypatch.setattr(os, "utime", refuse)  # a disk that can only be read
    assert not is_compiled_again(mesh)


def kept_step(mesh):
    """Return a function that proves one step, and says whether it came from the cache."""
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp")))
    jitted = jax.jit(lambda x: x * 2)  # its lines are a part of the entry's name
    return lambda: sr.prove(jitted, x, on=mesh, time=True).is_cached


def test_an_entry_is_not_written_through_a_link(folder, tmp_path):
    """The file behind a link with an entry's name was replaced by the entry, or made."""
    is_kept = kept_step(cpu_mesh())
    assert not is_kept()
    (path,) = entries(folder)
    good = path.read_bytes()
    precious, absent = tmp_path / "precious", tmp_path / "absent"
    precious.write_bytes(good)  # a link to a whole entry is not read either
    for target in (precious, absent):
        path.unlink()
        path.symlink_to(target)
        assert not is_kept()
        assert (path.is_symlink(), precious.read_bytes(), absent.exists()) == (False, good, False)
        assert is_kept()
    os.utime(precious, (1, 1))
    (folder / f"{'0' * 64}.gz").symlink_to(precious)
    cache._remove_oldest(folder)
    assert precious.stat().st_mtime == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
def test_what_is_no_file_is_no_entry(folder):
    """`prove` waited for ever for a writer of a FIFO with an entry's name."""
    is_kept = kept_step(cpu_mesh())
    assert not is_kept()
    (path,) = entries(folder)
    path.unlink()
    os.mkfifo(path)
    assert not is_kept()
    assert path.is_file()  # replaced
    assert is_kept()
    path.unlink()
    path.mkdir()
    assert not is_kept()
    assert path.is_dir()


def test_what_all_can_write_is_not_believed(folder):
    is_kept = kept_step(cpu_mesh())
    assert not is_kept()
    (path,) = entries(folder)
    for place, bad, good in ((folder, 0o1777, 0o770), (path, 0o666, 0o664)):
        place.chmod(bad)
        before = path.stat()
        assert not is_kept()
        assert os.path.samestat(before, path.stat()) == (
            place == folder
        )  # nothing is written there
        place.chmod(good)
        assert is_kept()


@pytest.mark.skipif(getattr(os, "geteuid", lambda: 1)() != 0, reason="only root gives files away")
def test_what_another_user_has_written_is_not_believed(folder):
    nobody = 65534
    is_kept = kept_step(cpu_mesh())
    assert not is_kept()
    (path,) = entries(folder)
    os.chown(path, nobody, -1)
    assert not is_kept()
    assert path.stat().st_uid == 0  # replaced
    assert is_kept()
    os.chown(folder, nobody, -1)
    path.unlink()
    assert [is_kept(), is_kept(), entries(folder)] == [False, False, []]


PROGRAM = textwrap.dedent(
    """
    import jax, shardrules as sr
    mesh = sr.Topology("v5e:2x2").mesh(fsdp=4)
    plan = sr.plan({"w": jax.ShapeDtypeStruct((64, 64), "bfloat16")}, [("w", "fsdp")], mesh)
    print(sr.prove(lambda p: p["w"] * 2, plan, on=mesh, time=True).is_cached)
    """
)


@needs_libtpu
def test_processes_share_it(tmp_path):
    environment = {**os.environ, "SHARDRULES_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    # From a file: the lines of the program are a part of it.
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)

    def start():
        return subprocess.Popen(
            [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True
        )

    for process in [start(), start()]:  # at once
        assert process.communicate(timeout=120)[0] in ("False\n", "True\n")
        assert process.returncode == 0
    assert len(entries(tmp_path)) == 1
    assert start().communicate(timeout=120)[0] == "True\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*(path.name for path in entries(tmp_path)), "script.py"]
    )


@needs_libtpu
def test_steps_of_nnx_jit_are_kept(folder):
    nnx = pytest.importorskip("flax.nnx")
    mesh = sr.Topology("v5e:2x4").mesh(SIZES)
    layer = nnx.eval_shape(lambda: nnx.Linear(256, 512, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    plan = sr.plan(state, [("kernel", P("fsdp", "tp")), ("bias", P("tp"))], mesh)

    def apply(state, x):
        return nnx.merge(graph, state)(x).sum()

    first, second = (
        sr.prove(nnx.jit(apply), plan, batch(mesh), on=mesh, time=True) for _ in range(2)
    )
    check_the_second(first, second)


def test_a_step_of_filter_jit_comes_back_as_it_was(folder):
    eqx = pytest.importorskip("equinox")
    mesh = cpu_mesh()
    model = eqx.nn.Linear(64, 128, key=jax.random.key(0))
    plan = sr.plan(model, [("weight", P("tp", "fsdp")), ("bias", "tp")], mesh)

    def prove(donate, factor=2):
        def train(x, model):
            return eqx.apply_updates(
                model, eqx.filter_grad(lambda m: factor * jax.vmap(m)(x).sum())(model)
            )

        step, x = eqx.filter_jit(train, donate=donate), batch(mesh, width=64)
        return sr.prove(step, x, plan, on=mesh, outputs=plan, large=1, time=True)

    first, second = (prove("all") for _ in range(2))
    check_the_second(first, second)
    assert "donation" not in {one.kind for one in first.findings}
    assert not prove("none").is_cached
    assert not prove("all", 3).is_cached
