"""The compiler in a child process: what it answers, and what is left of it, however it ends."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._base.text import Place
from shardrules._program import child, compiler
from shardrules._program.hlo import Collective
from shardrules._program.verify.unexpected import unexpected
from tests.support.compiled import array, compiled_on, devices
from tests.support.folders import ROOT
from tests.support.process_worker import enable_x64

SIZES = {"fsdp": 4, "tp": 2}
RULES = [("up", P("fsdp", "tp")), ("down", P("tp", "fsdp"))]
TREE = {"up": jax.ShapeDtypeStruct((256, 512), "float32"), "down": jax.ShapeDtypeStruct((512, 256), "float32")}


def train(params, x):
    def loss(params):
        def layer(x, _):
            y = jax.lax.with_sharding_constraint(x @ params["up"], P("fsdp", "tp"))
            return x + jnp.tanh(y) @ params["down"], None

        return jnp.mean(jax.lax.scan(layer, x, None, length=3)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


STEP = jax.jit(train, donate_argnums=0)
HERE = devices(fsdp=4, tp=2)
ABSTRACT = AbstractMesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
X = jax.ShapeDtypeStruct((8,), "float32")


def proved(on=SIZES, step=STEP, **options):
    return sr.prove(step, sr.plan(TREE, RULES, SIZES), array(ABSTRACT, (64, 256), "fsdp"), on=on, **options)


def text_of(proof):
    return proof.program._executable.hlo.text


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary directory of the test's own, of this process and of children."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


# What it answers


@pytest.mark.parametrize("on", [SIZES, ABSTRACT, HERE])
def test_a_proof_without_devices_is_that_of_the_program_that_is_compiled_to_its_end(on):
    plan = sr.plan(TREE, RULES, HERE)
    whole = compiled_on(STEP, plan, array(HERE, (64, 256), "fsdp"), on=HERE)
    program, proof = sr.inspect(whole, (plan, None)), proved(on)
    assert proof.program.sent == program.sent
    rows = [[row._replace(name="") for row in each.collectives] for each in (proof, program)]
    assert rows[0] == rows[1]
    assert proof.memory.peak == pytest.approx(program.memory.peak, rel=0.01)
    assert proof.memory.totals.arguments == program.memory.totals.arguments
    assert 0 < proof.memory.buffers[0].bytes <= proof.memory.alive <= proof.memory.peak
    assert (proof.compiled, proof.time) == (None, None)
    assert [str(one) for one in proof.findings] == [str(one) for one in sr.verify(whole, (plan, None))]


def test_it_says_whose_compiler_was_asked_and_whether_it_fits():
    fits, refused, unknown = proved(hbm=10**9), proved(hbm=10**5), proved(HERE, time=True)
    assert [str(each).partition(": ")[0] for each in (fits, refused)] == ["it fits", "it does not fit"]
    assert " of 1.00 GB, on fsdp=4,tp=2 by XLA for CPU: a TPU's partitioner may choose" in str(fits)
    assert (fits.fits, refused.fits, unknown.fits) == (True, False, None)
    assert str(unknown).startswith("it needs ")
    assert "no time: " in str(unknown)
    assert unknown.compiled.memory_analysis() is not None
    with pytest.raises(ValueError, match="time=True compiles for devices: give on= a Topology"):
        proved(time=True)


def test_an_argument_without_a_sharding_is_one_program_however_it_is_given():
    rows = np.ones((64, 256), np.float32)
    given = (rows, jnp.asarray(rows), jax.ShapeDtypeStruct(rows.shape, rows.dtype))
    proofs = [sr.prove(STEP, sr.plan(TREE, RULES, SIZES), x, on=SIZES) for x in given]
    assert proofs[0].program.sent == proofs[1].program.sent == proofs[2].program.sent
    shardings = proofs[0].program._executable.inputs.shardings
    assert shardings[-1].is_fully_replicated


def test_options_and_settings_reach_the_compiler():
    with pytest.raises(RuntimeError, match="xla_cpu_no_such_option") as caught:
        proved(step=jax.jit(train, compiler_options={"xla_cpu_no_such_option": True}))
    assert caught.value.__notes__[-1].startswith("shardrules compiled the step")
    with enable_x64(True):
        wide = sr.prove(lambda x: x * 2, jax.ShapeDtypeStruct((8,), "float64"), on={"x": 1})
    assert wide.memory.totals.arguments == 64


FUSIONS = """
import jax, shardrules as sr
step = jax.jit(lambda x: jax.numpy.sin(x) + jax.numpy.cos(x), compiler_options={options})
x = jax.ShapeDtypeStruct((8,), "float32")
print(sr.prove(step, x, on={{"x": 1}}).program._executable.hlo.text.count(" fusion("))
"""


def test_flags_in_the_environment_are_those_of_compiler_options():
    """In processes of their own, as XLA reads its flags once."""

    def fusions(options, flags):
        done = subprocess.run(
            [sys.executable, "-c", FUSIONS.format(options=options)], check=True, cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True,
        )  # fmt: skip
        return int(done.stdout)

    option = {"xla_disable_hlo_passes": "fusion"}
    without = fusions(None, "")
    assert fusions(option, "") == fusions(None, "--xla_disable_hlo_passes=fusion") != without


def test_a_warning_of_xla_is_told_where_it_costs():
    def step(a, c):
        b = jax.lax.with_sharding_constraint(a + a, P(None, ("fsdp", "tp"), None))
        return b + c

    specs = ("tp", None, "fsdp"), (None, ("fsdp", "tp"), None)
    found = sr.prove(step, *(array(ABSTRACT, (16, 16, 16), *spec) for spec in specs), on=ABSTRACT, large=1).findings
    (finding,) = [one for one in found if "XLA cannot reshard" in one.message]
    assert "f32[16,16,16]" in finding.message


HEAD = "W1123 18:32:58.5 20190 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler "
OPERATION = (
    "for HLO operation %add.0 = f32[8,16,4]{2,1,0} add(%param, %param), "
    'metadata={op_name="jit(f)/add" stack_frame_id=2}. As the last resort, SPMD will'
)
NEW = "{mesh['x'=4,'y'=2], device_ids=(0), [{'y'}, {}, {'x':(1)2}]}"
OLD = "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate}"
LINES = {
    "new": (f"cannot go from sharding {NEW} to {NEW} efficiently {OPERATION}", f"from {NEW} to {NEW}"),
    "old": (
        f"was not able to go from sharding {OLD} to {{maximal device=0}} without doing a full "
        f"rematerialization of the tensor {OPERATION}",
        f"from {OLD} to {{maximal device=0}}",
    ),
    "without the operation": ("was not able to go from sharding {replicated} to {devices=[8]<=[8]} without ...", None),
    "a hostile line": ("cannot go from sharding {" + "} to {" * 20_000, None),
}


@pytest.mark.parametrize("name", LINES)
def test_forms_of_the_warning(name):
    """What is of no known form is no warning to us."""
    line, way = LINES[name]
    row = Collective("all-gather", ("x",), "f32[8]", 32, 1, 28, "activation", "", "", True, "jit(f)/add", None, "")
    program = SimpleNamespace(collectives=[row], sent={}, axis_sizes={"x": 8}, batch_axes={"x"})
    found = list(unexpected(program, 9, f"first\n{HEAD}{line}\n"))
    assert [f"XLA cannot reshard it {way}, and" in one.message for one in found] == [True] * bool(way)


# A step that asks where it is, or calls Python


def test_a_step_that_asks_is_answered_for_the_mesh_and_told():
    def step(x):
        count = jax.device_count()
        if jax.default_backend() != "cpu" or jax.devices()[0].platform != "cpu":
            raise ValueError("elsewhere")
        return x * count

    functions = jax.devices, jax.device_count, jax.default_backend
    proof = sr.prove(step, X, on={"x": 64})
    line, there = step.__code__.co_firstlineno, "answered as on the devices of the mesh"
    assert proof.notes == (
        f"the step asks jax.device_count() at {Place(__file__, line + 1)}: {there}",
        f"the step asks jax.default_backend() at {Place(__file__, line + 2)}: {there}",
        f"the step asks jax.devices() at {Place(__file__, line + 2)}: answered as here: the program may be another",
    )
    assert "multiply(" in text_of(proof)
    assert (jax.devices, jax.device_count, jax.default_backend) == functions
    with pytest.raises(ZeroDivisionError):
        sr.prove(lambda x: 1 / 0, jnp.ones(8), on={"x": 64})
    assert (jax.devices, jax.device_count, jax.default_backend) == functions


@pytest.mark.parametrize("has_devices", [True, False])
def test_a_step_that_reads_the_mesh_of_with_mesh_is_told(has_devices):
    """As eformer's and haliax's constraints do: they were left out, without a word."""
    resources = pytest.importorskip("jax._src.mesh").thread_resources
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))

    def step(x):
        found = resources.env.physical_mesh
        return x * (1 if found.empty else found.size)

    before = resources.env
    proof = sr.prove(step, X, on=mesh if has_devices else {"x": 8})
    (note,) = proof.notes
    place = Place(__file__, step.__code__.co_firstlineno + 1)
    assert note.startswith(f"the step asks the mesh of `with mesh:` at {place}: answered as ")
    assert note.endswith("on the devices of the mesh") == has_devices
    assert ("multiply(" in text_of(proof)) == has_devices
    assert resources.env is before


def test_other_threads_are_answered_as_ever():
    counts = []

    def step(x):
        thread = threading.Thread(target=lambda: counts.append(jax.device_count()))
        thread.start()
        thread.join()
        return x * jax.device_count()

    sr.prove(step, X, on={"x": 64})
    assert counts == [len(jax.devices())]


def test_a_step_that_calls_python_is_proved_without_these_calls():
    def step(params, x):
        jax.debug.print("{}", x.sum())
        noise = jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return train(params, x + noise)

    proof = proved(step=jax.jit(step, donate_argnums=0))
    (note,) = proof.notes
    assert note.startswith("left out, as it is lowered without devices: jax.debug.print at ")
    assert "jax.pure_callback at tests/program/test_compiler.py:" in note
    assert proof.program.sent
    with_calls = proved(HERE, step=jax.jit(step, donate_argnums=0))  # which has devices
    assert with_calls.notes == ()
    assert "custom-call" in text_of(with_calls)


def test_what_only_this_process_has_code_for_is_proved():
    """Custom calls that the user has registered here: generating their code fails in the child."""

    def step(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("nobody_has_this", shape)(x) + jnp.linalg.eigvals(x).real

    proof = sr.prove(step, jax.ShapeDtypeStruct((8, 8), "float32"), on={"x": 1})
    assert 'custom_call_target="nobody_has_this"' in text_of(proof)


def test_a_pallas_kernel_needs_the_compiler_for_tpus():
    pallas, shape = pytest.importorskip("jax.experimental.pallas"), jax.ShapeDtypeStruct((128, 128), "float32")

    def kernel(source, target):
        target[...] = source[...] * 2

    with pytest.raises(ValueError, match=r"XLA for CPU has none of: give on= a Topology of TPUs"):
        sr.prove(pallas.pallas_call(kernel, shape), shape, on={"x": 1})


# What is left of it


def test_nothing_of_this_process_changes_also_of_several_at_once(temporary):
    before = dict(os.environ), jax.config.values, threading.active_count()
    with ThreadPoolExecutor(4) as pool:
        proofs = list(pool.map(lambda _: proved(), range(4)))
    assert all(proof.program.sent == proofs[0].program.sent for proof in proofs)
    assert (dict(os.environ), jax.config.values, threading.active_count()) == before
    assert list(temporary.iterdir()) == []


def test_a_step_that_only_the_whole_compiler_refuses_is_refused(monkeypatch):
    def refuse(*_):
        raise RuntimeError(
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (18.14G) exceeds available HBM (15.75G). HLO module: f"
        )

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(sr.OutOfMemory, match=r"needs 19\.5 GB .* has 16\.9 GB; XLA does not") as caught:
        proved(HERE, time=True)
    refusal = caught.value
    assert refusal.required > refusal.available == int(15.75 * 2**30)
    assert str(pickle.loads(pickle.dumps(refusal))) == str(refusal)


def test_what_the_user_dumps_is_not_mixed_with_it(temporary, tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("dumps")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_pass_re=.*"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert proved().program.sent
    assert list(folder.iterdir()) == []


PROVE = """
import signal, tempfile, jax, shardrules as sr
signal.signal(signal.SIGINT, signal.default_int_handler)  # which jobs in the background ignore
tempfile.tempdir = {folder!r}
x = jax.ShapeDtypeStruct((8, 8), "float32")
def slow(x):
    for _ in range(300):
        x = jax.numpy.sin(x @ x)
    return x
print("begins", flush=True)
{call}
"""
CALLS = {
    "prove": 'sr.prove(slow, x, on={"x": 8})',
    "rehearse": 'sr.rehearse(lambda mesh: (jax.jit(slow), (x,)), {"x": 8})',
}


def children_of(folder):
    """The command lines of children that have this folder."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            commands.append(file.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if "child.py" in command and str(folder) in command]


@pytest.mark.skipif(sys.platform != "linux", reason="by signals, and /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", CALLS)
def test_neither_child_nor_folder_is_left_when_the_parent_ends(temporary, call, number):
    process = subprocess.Popen(
        [sys.executable, "-c", PROVE.format(folder=str(temporary), call=CALLS[call])],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT,
    )  # fmt: skip
    process.stdout.readline()
    until = time.monotonic() + 60
    while not list(temporary.glob("*/request")) and time.monotonic() < until:
        time.sleep(0.01)
    (folder,) = temporary.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    while not (children := children_of(folder.name)) and time.monotonic() < until:
        time.sleep(0.01)
    assert children
    process.send_signal(number)
    assert process.wait(60) != 0
    process.stdout.close()
    while (folder.exists() or children_of(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not folder.exists()
    assert children_of(folder) == []


@pytest.mark.parametrize("call", CALLS)
def test_a_module_of_the_current_folder_is_not_one_of_the_child(tmp_path, call):
    for name in ("json", "threading", "numpy", "scipy"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')")
    script = PROVE.format(folder=None, call=CALLS[call]).replace("range(300)", "range(3)")
    late = f"import sys, os; os.chdir({str(tmp_path)!r}); sys.path.insert(0, '')\n"
    script = script.replace('print("begins", flush=True)\n', late)
    env = os.environ | {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


CHILDREN = {
    "import os, sys; print('abort it', file=sys.stderr, flush=True); os.abort()": (
        RuntimeError, r"the compiler has crashed, by signal 6. Its last words:\nabort it",
    ),
    "import os; os.kill(os.getpid(), 9)": (RuntimeError, "the system may have had no memory left"),
    "import nothing_of_this_name": (RuntimeError, "exit code 1. Its last words:\n(.*\n)*.*No module named"),
    "": (OSError, "XLA has not written all that it makes of the step to .*: is there room"),
    "import time; time.sleep(60)": (TimeoutError, "has not ended in 2 s, and was stopped"),
    "import pathlib, sys, os; (pathlib.Path(sys.argv[1]) / 'error.txt').write_text("
    "'RESOURCE_EXHAUSTED: Used 18.14G of 15.75G hbm. Exceeded'); os._exit(3)": (
        sr.OutOfMemory, "needs 19.5 GB .* has 16.9 GB; XLA does not say",
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", CHILDREN)
def test_a_compiler_that_fails_is_told(code, temporary, tmp_path_factory, monkeypatch):
    error, match = CHILDREN[code]
    script = tmp_path_factory.mktemp("child") / "child.py"
    script.write_text(code)
    monkeypatch.setattr(child, "__file__", str(script))
    monkeypatch.setattr(compiler, "LIMIT", 2)
    with pytest.raises(error, match=match):
        proved()
    assert list(temporary.iterdir()) == []


def test_a_full_disk_is_told(temporary, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "module.bc")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        proved()
    monkeypatch.undo()
    assert list(temporary.iterdir()) == []


def test_a_child_whose_pipe_is_closed_ends_though_its_parent_lives(temporary, tmp_path_factory):
    """As on Windows, where the number of a parent that is gone stays."""
    modules = tmp_path_factory.mktemp("modules")
    (modules / "sleeps.py").write_text("import time\ndef main(folder): time.sleep(60)")
    asked = compiler.Child("sleeps", os.environ | {"PYTHONPATH": str(modules)})
    asked._process.stdin.close()
    until = time.monotonic() + 30
    while asked.folder.exists() and time.monotonic() < until:
        time.sleep(0.05)
    is_left = asked.folder.exists()
    asked.close()
    assert not is_left


@pytest.mark.skipif(jax.__version_info__ < (0, 8), reason="JAX 0.7 lowers Explicit axes for devices alone")
def test_explicit_axes_and_the_name_of_a_slice():
    mesh = AbstractMesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2)
    w = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("fsdp", "tp")))

    def step(w):
        assert jax.typeof(w).sharding.spec == P("fsdp", "tp")
        return jax.sharding.reshard(w, P("fsdp", None))

    proof = sr.prove(step, w, on=mesh)
    assert list(proof.program.sent) == [(("tp",), "all-gather")]
    with pytest.raises(ValueError, match="there is no topology of 'v5q'"):
        sr.prove(step, w, on="v5q:8x8x8")
