"""`compiling`: XLA's warnings are caught, all else reaches stderr, and they are told where they cost."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules._program.compiling import CompileLog, Reshard, _reshard

SENT = (16 * 16 * 16 // 2 + 8 * 16 * 16 * 3 // 4) * 4


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture(scope="module")
def build(mesh):
    """build(is_mended): a step that XLA cannot reshard, unless it goes in two steps."""
    before, between, after = (
        NamedSharding(mesh, spec)
        for spec in (P("y", None, "x"), P("y", "x", None), P(None, ("x", "y"), None))
    )

    def build(is_mended=False):
        def step(a, c):
            b = a + a
            for sharding in (between, after) if is_mended else (after,):
                b = jax.lax.with_sharding_constraint(b, sharding)
            return b + c

        a, c = (
            jax.ShapeDtypeStruct((16, 16, 16), "float32", sharding=sharding)
            for sharding in (before, after)
        )
        return jax.jit(step, out_shardings=after).lower(a, c).compile()

    return build


@pytest.fixture(scope="module")
def built(build):
    with sr.compiling() as log:
        compiled = build()
    return compiled, log


def test_a_log_that_is_still_open(build):
    compiled = build(True)
    with sr.compiling() as log:
        assert "open" in str(log)
        with pytest.raises(ValueError, match="when its with block ends"):
            _ = log.reshards
        with pytest.raises(ValueError, match="when its with block ends"):
            sr.verify(compiled, (None, None), log=log)
    assert log.reshards == ()
    for wrong in (sr.compiling(), sr.compiling, "log", [], 3):
        with pytest.raises(TypeError, match=r"log is .* shardrules\.compiling"):
            sr.verify(compiled, (None, None), log=wrong)


def test_a_warning_is_caught_with_the_whole_shape_and_both_shardings(built, capfd):
    log = built[1]
    assert capfd.readouterr().err == ""
    assert {reshard.shape for reshard in log.reshards} == {"f32[16,16,16]"}
    text = str(log)
    assert text.startswith("XLA cannot reshard 1 array\nf32[16,16,16] (")
    (reshard,) = log.reshards
    assert (reshard.source, reshard.target) in {
        ("P('y', None, 'x')", "P(None, ('x', 'y'), None)"),
        ("{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}"),
    }


def unexpected(compiled, log, large):
    findings = sr.verify(compiled, (None, None), log=log, large=large)
    return [finding for finding in findings if finding.kind == "unexpected"]


def test_it_is_told_where_it_costs_with_bytes_and_line(built):
    compiled, log = built
    (finding,) = unexpected(compiled, log, SENT)
    assert (finding.level, finding.bytes) == ("warning", SENT)
    assert "XLA cannot reshard f32[16,16,16] from " in finding.message
    assert "test_compiling.py:" in finding.message
    assert "two steps" in finding.fix
    assert unexpected(compiled, log, SENT + 1) == []
    assert unexpected(compiled, None, SENT) == []


def test_its_mend_mends(build):
    with sr.compiling() as log:
        compiled = build(is_mended=True)
    assert log.reshards == ()
    assert "XLA cannot reshard 0 arrays" in str(log)
    assert unexpected(compiled, log, 1) == []


def test_a_warning_of_another_program_or_of_no_collective_is_not_told(build, built):
    compiled = build(is_mended=True)
    assert unexpected(compiled, built[1], 1) == []
    small = Reshard("f32[4,4]", "P('x', None)", "P(None, 'y')", "jit(step)/jit(main)/add")
    assert unexpected(built[0], CompileLog((small,)), 1) == []


def test_collectives_that_a_warning_explains_are_told_once(build, monkeypatch):
    from shardrules._program import program

    monkeypatch.setattr(program, "SMALL", 0)
    with sr.compiling() as log:
        compiled = build()
    (with_log,) = unexpected(compiled, log, 1)
    without = unexpected(compiled, None, 1)
    assert all("XLA cannot" not in finding.message for finding in without)
    assert sum(finding.bytes for finding in without) <= with_log.bytes


def test_all_else_reaches_stderr(capfd, build):
    with sr.compiling() as log:
        os.write(2, b"before\n")
        build()
        os.write(2, b"without an end")
    raw = capfd.readouterr().err
    assert raw.startswith("before\n")
    assert raw.endswith("without an end")
    assert "Involuntary" not in raw
    assert len(log.reshards) >= 1
    os.write(2, b"behind\n")
    assert capfd.readouterr().err == "behind\n"


def failing(logs):
    with sr.compiling() as log:
        logs.append(log)
        os.write(2, b"before\n")
        raise ZeroDivisionError


def test_an_error_in_the_block_is_raised_and_stderr_is_there_again(capfd):
    before = set(Path(tempfile.gettempdir()).glob("shardrules-*.stderr"))
    logs = []
    with pytest.raises(ZeroDivisionError):
        failing(logs)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before\nafter\n"
    assert logs[0].reshards == ()
    assert set(Path(tempfile.gettempdir()).glob("shardrules-*.stderr")) == before


def test_nested_blocks_and_threads(capfd, build):
    files = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    with sr.compiling() as outer:
        with sr.compiling() as inner:
            build()
        with sr.compiling() as empty:
            os.write(2, b"between\n")
    assert len(outer.reshards) == len(inner.reshards) >= 1
    assert empty.reshards == ()
    assert capfd.readouterr().err == "between\n"

    # Blocks that end in the order in which they began.
    first_is_open, second_is_open, first_has_ended = (threading.Event() for _ in range(3))

    def first():
        with sr.compiling():
            os.write(2, b"first\n")
            first_is_open.set()
            second_is_open.wait(10)
        first_has_ended.set()

    def second():
        first_is_open.wait(10)
        with sr.compiling():
            second_is_open.set()
            first_has_ended.wait(10)
            os.write(2, b"second\n")

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    os.write(2, b"both ended\n")
    assert capfd.readouterr().err == "first\nsecond\nboth ended\n"
    if files is not None:
        assert len(os.listdir("/proc/self/fd")) == files


def test_the_order_of_what_python_and_others_write():
    code = (
        "import os, sys; import shardrules as sr\n"
        "sys.stderr.write('1'); os.write(2, b'2')\n"
        "with sr.compiling(): sys.stderr.write('3\\n'); os.write(2, b'4\\xff')\n"
        "sys.stderr.write('5')"
    )
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=True)
    assert done.stderr.replace(b"12", b"21") == b"213\n4\xff5"


def test_a_closed_stderr_does_not_stop_the_block():
    code = (
        "import os, sys; import shardrules as sr\n"
        "with sr.compiling() as log: os.write(2, b'x' * 10**6)\n"
        "print(log.reshards)"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], stderr=write, stdout=subprocess.PIPE, check=True
    )
    os.close(write)
    assert done.stdout == b"()\n"


HEAD = "W1123 18:32:58.5 20190 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. "
LINES = {
    "new": (
        HEAD + "The compiler cannot go from sharding {mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]} to "
        "{mesh['x'=4,'y'=2], [{}, {'x', 'y'}, {}]} efficiently for HLO operation %add.0 = "
        "f32[8,16,4]{2,1,0} add(%param, %param), sharding={mesh['x'=4,'y'=2], [{'y'}, {}, {'x'}]}"
        ', metadata={op_name="jit(f)/add" stack_frame_id=2}. As the last resort, SPMD will',
        Reshard(
            "f32[16,16,16]", "P('y', None, 'x')", "P(None, ('x', 'y'), None)", "jit(f)/add"
        ),
    ),
    "parts of axes": (
        HEAD + "The compiler cannot go from sharding {mesh['a'=8], [{'a':(1)2}, {}]} to "
        "{mesh['a'=8], [{}, {'a':(2)4}]} efficiently for HLO operation %x = bf16[8,16]{1,0} "
        "copy(%y)",
        Reshard("bf16[16,16]", "P('a', None)", "P(None, 'a')", ""),
    ),
    "old": (
        "2026-11-23 18:32:59: E external/xla/spmd_partitioner.cc:614] [spmd] Involuntary full "
        "rematerialization. The compiler was not able to go from sharding "
        "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate} to {devices=[1,8,1]<=[8]} without "
        "doing a full rematerialization of the tensor for HLO operation: %get-tuple-element = "
        "f32[8,16,4]{2,1,0} get-tuple-element((s32[], f32[8,16,4]{2,1,0}) %param), index=1",
        Reshard(
            "f32[16,16,8]", "{devices=[2,1,2,2]<=[8]T(1,0) last_tile_dim_replicate}",
            "{devices=[1,8,1]<=[8]}", "",
        ),
    ),
    "one device": (
        HEAD + "The compiler was not able to go from sharding {maximal device=0} to "
        "{devices=[4,1]<=[4]} without doing a full rematerialization of the tensor for HLO "
        "operation: %g = f32[257152,2048]{1,0} get-tuple-element(%t)",
        Reshard("f32[257152,2048]", "{maximal device=0}", "{devices=[4,1]<=[4]}", ""),
    ),
    "a number": (
        HEAD + "The compiler cannot go from sharding {replicated} to {maximal device=0} "
        "efficiently for HLO operation %c = s32[] constant(3)",
        Reshard("s32[]", "{replicated}", "{maximal device=0}", ""),
    ),
    "before it named the operation": (
        HEAD + "The compiler was not able to go from sharding {devices=[2,1,4]<=[4,2]T(1,0)} to "
        "{devices=[1,8,1]<=[8]} without doing a full rematerialization of the tensor. You",
        None,
    ),
    "unknown sharding": (HEAD + "The compiler cannot go from sharding {cubes=3} to {replicated} "
        "efficiently for HLO operation %c = s32[4] constant(3)", None),
    "unknown axis": (HEAD + "The compiler cannot go from sharding {mesh['x'=4], [{'z'}]} to "
        "{replicated} efficiently for HLO operation %c = s32[4] constant(3)", None),
    "a tuple": (HEAD + "The compiler cannot go from sharding {replicated} to {replicated} "
        "efficiently for HLO operation %c = (s32[4], s32[4]) tuple(%a, %b)", None),
    "fewer tiles": (HEAD + "The compiler cannot go from sharding {devices=[2]<=[2]} to "
        "{replicated} efficiently for HLO operation %c = s32[4,4] add(%a, %b)", None),
    "words": ("Involuntary full rematerialization", None),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_forms_of_the_warning(name):
    """What is of no known form is no warning to us: it goes to stderr as it is."""
    line, reshard = LINES[name]
    assert _reshard(line) == reshard


def test_a_warning_of_an_unknown_form_reaches_stderr(capfd):
    text = LINES["before it named the operation"][0] + "\n"
    with sr.compiling() as log:
        os.write(2, (text + LINES["new"][0] + "\n").encode())
    assert capfd.readouterr().err == text
    assert log.reshards == (LINES["new"][1],)


def test_a_hostile_line_is_read_in_no_time():
    line = HEAD + "The compiler cannot go from sharding {" + "} to {" * 20_000
    assert _reshard(line) is None
