"""Locks of programs: what is written is read again; growth fails; anything else is a FileError."""

from __future__ import annotations

import json
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr

X = ((64, 64), ("fsdp", None))


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))


@pytest.fixture(scope="module")
def gathers(mesh):
    """gathers(count): a program that gathers an array over fsdp, and more of them over tp."""

    def program(count, mesh=mesh):
        def step(x, *more):
            x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P()))
            parts = [jax.lax.with_sharding_constraint(jnp.cos(y), NamedSharding(mesh, P())) for y in more]
            return x, parts

        specs = [P("fsdp"), *[P("tp")] * count]
        args = [jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, spec)) for spec in specs]
        return sr.inspect(jax.jit(step).lower(*args).compile(), (None,) * len(args))

    return program


@pytest.fixture(scope="module")
def one(gathers):
    return gathers(1)


def locked(program, change):
    """The program's lock, with its content changed."""
    content = json.loads(program.lock())
    change(content)
    return json.dumps(content)


WRONG = {
    "format": (lambda c: c.update(format="shardrules lock 2"), "not a lock of a program"),
    "no format": (lambda c: c.pop("format"), "not a lock of a program"),
    "no mesh": (lambda c: c.pop("mesh"), "mesh is missing; write"),
    "more": (lambda c: c.update(more=1), "key 'more' is unknown"),
    "peak": (lambda c: c.update(peak="3 GB"), "'3 GB'"),
    "a version": (lambda c: c["versions"].update(jax=12), "write a table of texts"),
    "mesh": (lambda c: c.update(mesh={"fsdp": 0, "tp": 2}), "fsdp"),
    "entry": (lambda c: c["sent"].append(3), r"sent\[2\]: it is 3"),
    "bytes": (lambda c: c["sent"][0].update(bytes=1.5), r"sent\[0\]: .*1.5"),
    "negative": (lambda c: c["sent"][1].update(bytes=-5), r"sent\[1\]: bytes is -5"),
    "kind": (lambda c: c["sent"][0].update(kind="gather"), r"sent\[0\]: kind is 'gather'"),
    "axes": (lambda c: c["sent"][0].update(axes="fsdp"), r"sent\[0\]: axes is .*; write a list of strings"),
    "axis": (lambda c: c["sent"][0].update(axes=["fdsp"]), r"sent\[0\]: .*fdsp, of fsdp, tp"),
    "order": (lambda c: c["sent"][0].update(axes=["tp", "fsdp"]), r"sent\[0\]: .*mesh order"),
    "axis twice": (lambda c: c["sent"][0].update(axes=["tp", "tp"]), r"sent\[0\]: .*once"),
    "twice": (lambda c: c["sent"].append(c["sent"][0]), r"sent\[2\]: .*twice"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_lock_is_a_file_error_with_its_place_and_the_fix(one, name, tmp_path):
    change, told = WRONG[name]
    text = locked(one, change)
    with pytest.raises(sr.FileError, match=told) as caught:
        one.diff(text)
    assert str(caught.value).startswith("the lock: ")
    assert str(caught.value).endswith("make the lock again: Program.lock, or shardrules prove --update-lock")
    file = tmp_path / "step.lock"
    file.write_text(text)
    for path in (file, str(file)):
        with pytest.raises(sr.FileError, match=f"{re.escape(str(file))}: .*{told}"):
            one.diff(path)


@pytest.mark.parametrize("text", ["{", "{}", "[]", "null", '{"format": 1}', "{" * 10**5])
def test_text_that_is_no_lock(one, text, tmp_path):
    (tmp_path / "step.lock").write_text(text)
    with pytest.raises(sr.FileError, match=r"step.lock: "):
        one.diff(tmp_path / "step.lock")


def test_what_is_no_lock_nor_program(one, tmp_path):
    plan = sr.plan({"w": np.ones((8, 8))}, [("w", "tp")], {"tp": 2})
    for wrong in (None, 3, plan, b"{}", [one]):
        with pytest.raises(TypeError, match="other is .* a Program, a lock's text, or the path"):
            one.diff(wrong)
    with pytest.raises(sr.FileError, match=r"but of a plan, which Plan\.diff compares"):
        one.diff(plan.lock())
    with pytest.raises(sr.FileError, match=r"that of a program, which Program\.diff compares"):
        sr.Plan.from_lock(one.lock())
    with pytest.raises(sr.FileError, match=r"neither a lock nor a file.*Program\.lock\(path\)"):
        one.diff(tmp_path / "none.lock")
    for wrong in (True, "2 %", -0.1, float("nan"), float("inf"), None):
        with pytest.raises((TypeError, ValueError), match="tolerance"):
            one.diff(one, tolerance=wrong)
    with pytest.raises(TypeError, match="path"):
        one.lock(3)


def test_a_lock_is_small_stable_and_has_a_line_for_each_entry(one, gathers, tmp_path):
    text = one.lock(tmp_path / "step.lock")
    assert (tmp_path / "step.lock").read_text() == text == gathers(1).lock()
    content = json.loads(text)
    assert content["mesh"] == {"fsdp": 4, "tp": 2}
    assert content["versions"]["jax"] == jax.__version__
    # A device sends three quarters, or the half, of an array of 16 KiB.
    assert content["sent"] == [
        {"axes": ["fsdp"], "kind": "all-gather", "bytes": 12288},
        {"axes": ["tp"], "kind": "all-gather", "bytes": 8192},
    ]
    for entry in content["sent"]:
        assert f"  {json.dumps(entry)}" in text.replace(",\n", "\n").splitlines()
    memory = content["peak"]
    assert memory > 2 * 16384
    assert len(text.splitlines()) < 12


def test_nothing_differs_from_its_own_lock(one, tmp_path):
    for before in (one, one.lock(), tmp_path / "a.lock", str(tmp_path / "a.lock")):
        one.lock(tmp_path / "a.lock")
        diff = one.diff(before)
        assert not diff
        assert str(diff).startswith("nothing found: 2 sums of bytes and the peak")


def test_growth_fails_and_names_the_collectives(one, gathers):
    two = gathers(2)
    diff = two.diff(one)
    sent, peak = sorted(diff, key=lambda finding: finding.bytes)
    assert [finding.level for finding in diff] == ["error"] * 2
    assert {finding.kind for finding in diff} == {"budget"}
    assert (sent.bytes, peak.bytes > 16384) == (8192, True)
    assert "all-gather over tp: each device sends 16.4 kB in a step, 8.19 kB before (+100 %)" in str(sent)
    assert sent.message.count("8.19 kB by all-gather of f32[64,64]") == 2
    assert "peak" in peak.message
    assert "make the lock again" in sent.fix
    with pytest.raises(sr.FindingsError):
        two.diff(one.lock()).raise_for("error")
    assert not two.diff(one, tolerance=1.0).at_least("error")


def test_what_is_new_is_growth_and_what_is_gone_is_told(one, gathers):
    (sent, *_) = one.diff(gathers(0)).at_least("error")[::-1]
    assert "8.19 kB in a step, 0 B before" in str(one.diff(gathers(0)))
    assert sent.level == "error"
    diff = gathers(0).diff(one)
    assert diff
    assert {finding.level for finding in diff} == {"info"}
    assert "0 B in a step, 8.19 kB before (-100 %)" in str(diff)
    assert "make the lock again" in str(diff)


def test_growth_within_the_tolerance_is_none(one):
    def of(factor):
        return locked(one, lambda c: [e.update(bytes=round(e["bytes"] / factor)) for e in c["sent"]])

    assert not one.diff(of(1.019))
    assert len(one.diff(of(1.021)).at_least("error")) == 2
    assert not one.diff(of(1.021), tolerance=0.03)
    assert len(one.diff(of(1.001), tolerance=0)) == 2
    assert {f.level for f in one.diff(of(0.9))} == {"info"}


def test_a_copied_program_has_the_same_lock(one, gathers):
    copied = pickle.loads(pickle.dumps(one))
    assert copied.lock() == one.lock()
    assert str(gathers(2).diff(copied)) == str(gathers(2).diff(one))


def test_another_mesh_is_not_compared(one, gathers):
    other = gathers(1, Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tp")))
    (finding,) = other.diff(one)
    assert finding.level == "error"
    assert "fsdp=4,tp=2 -> fsdp=2,tp=4" in finding.message


def test_other_versions_are_told_beside_what_has_changed(one):
    old = lambda c: c["versions"].update(jax="0.4.1")  # noqa: E731
    assert not one.diff(locked(one, old))

    def changed(content):
        old(content)
        content["sent"].pop()

    text = str(one.diff(locked(one, changed)))
    assert f"jax 0.4.1 -> {jax.__version__}" in text


def test_a_trip_count_that_is_not_known_any_more_fails(mesh):
    def program(loop):
        def step(x):
            def body(x):
                y = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P()))
                return jax.lax.with_sharding_constraint(y * 2, NamedSharding(mesh, P("fsdp")))

            return loop(body, x)

        x = jax.ShapeDtypeStruct((64, 64), "float32", sharding=NamedSharding(mesh, P("fsdp")))
        return sr.inspect(jax.jit(step).lower(x).compile(), (None,))

    known = program(lambda body, x: jax.lax.fori_loop(0, 3, lambda _, x: body(x), x))
    unknown = program(lambda body, x: jax.lax.while_loop(lambda x: x.sum() < 1e9, body, x))
    assert "all-gather per iteration" in unknown.lock()
    assert "per iteration" not in known.lock()
    assert not unknown.diff(unknown.lock())
    text = str(unknown.diff(known).at_least("error"))
    assert "all-gather per iteration over fsdp" in text


def test_a_peak_that_is_not_told(one):
    text = locked(one, lambda c: c.update(peak=None))
    (finding,) = one.diff(text)
    assert finding.level == "warning"
    assert "the peak is not known in the lock" in finding.message
