"""Locks of programs: what is written is read again; growth fails; anything else is a FileError."""

import json
import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules as sr
from tests.support.compiled import array, constrained, devices

MESH = devices(fsdp=4, tp=2)
placed = partial(constrained, MESH)


def inspected(step, specs, mesh=MESH):
    args = [array(mesh, (64, 64), *spec) for spec in specs]
    return sr.inspect(jax.jit(step).lower(*args).compile(), (None,) * len(args))


def gathers(count, mesh=MESH):
    """A program that gathers an array over fsdp, and so many over tp."""

    def step(x, *more):
        return constrained(mesh, jnp.sin(x)), [constrained(mesh, jnp.cos(y)) for y in more]

    return inspected(step, [P("fsdp"), *[P("tp")] * count], mesh)


@pytest.fixture(scope="module")
def one():
    return gathers(1)


def locked(program, change):
    """The program's lock, with its content changed."""
    content = json.loads(program.lock())
    change(content)
    return json.dumps(content)


WRONG = {
    "format": (lambda c: c.update(format="shardrules lock 3"), "not a lock of a program: .* is .shardrules lock 3"),
    "no format": (lambda c: c.pop("format"), "not a lock of a program"),
    "no mesh": (lambda c: c.pop("mesh"), "mesh is missing; write"),
    "more": (lambda c: c.update(more=1), "key 'more' is unknown"),
    "peak": (lambda c: c.update(peak="3 GB"), "'3 GB'.*; write numbers of bytes"),
    "peak by": (lambda c: c.update(peak_by="me"), "peak_by is 'me'"),
    "a version": (lambda c: c["versions"].update(jax=12), "versions is "),
    "mesh": (lambda c: c.update(mesh={"fsdp": 0, "tp": 2}), "fsdp.*write a table of axes and their sizes"),
    "no table": (lambda c: c.update(sent=[3]), r"sent is \[3\].*; write numbers of bytes"),
    "bytes": (lambda c: c["sent"].update({"all-gather over tp": 1.5}), r"1\.5.*; write numbers of bytes"),
    "negative": (lambda c: c["sent"].update({"all-gather over tp": -5}), "-5.*; write numbers of bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_lock_is_a_file_error_with_its_place_and_the_fix(one, name, tmp_path):
    change, told = WRONG[name]
    (tmp_path / "step.lock").write_text(text := locked(one, change))
    for lock, begin in ((text, "the lock: "), (tmp_path / "step.lock", f"{tmp_path}/step.lock: ")):
        with pytest.raises(sr.FileError, match=f"^{re.escape(begin)}.*{told}") as caught:
            one.diff(lock)
        assert str(caught.value).endswith("make the lock again: Program.lock, or shardrules prove --update-lock")


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
    with pytest.raises(sr.FileError, match="its format is 'shardrules program lock 2'"):
        sr.Plan.from_lock(one.lock())
    with pytest.raises(sr.FileError, match=r"neither a lock nor a file.*Program\.lock\(path\)"):
        one.diff(tmp_path / "none.lock")
    for wrong in (True, "2 %", -0.1, float("nan"), float("inf"), None):
        with pytest.raises((TypeError, ValueError), match="tolerance"):
            one.diff(one, tolerance=wrong)
    with pytest.raises(TypeError, match="path"):
        one.lock(3)


def test_a_lock_is_stable_and_has_a_line_for_each_number(one, tmp_path):
    text = one.lock(tmp_path / "step.lock")
    assert (tmp_path / "step.lock").read_text() == text == gathers(1).lock() == pickle.loads(pickle.dumps(one)).lock()
    content = json.loads(text)
    assert (content["mesh"], content["versions"]) == ({"fsdp": 4, "tp": 2}, {"jax": jax.__version__, "devices": "cpu"})
    # A device sends three quarters, or the half, of an array of 16 KiB.
    assert content["sent"] == {"all-gather over fsdp": 12288, "all-gather over tp": 8192}
    assert '\n  "all-gather over tp": 8192\n' in text
    assert content["peak"] > 2 * 16384


def test_nothing_differs_from_its_own_lock(one, tmp_path):
    for before in (one, one.lock(tmp_path / "a.lock"), tmp_path / "a.lock", str(tmp_path / "a.lock")):
        diff = one.diff(before)
        assert not diff
        assert str(diff).startswith("nothing found: 2 sums of bytes and the peak")


def test_growth_fails_and_names_the_collectives(one):
    two = gathers(2)
    diff = two.diff(one)
    sent, peak = sorted(diff, key=lambda finding: finding.bytes)
    assert {(finding.level, finding.kind) for finding in diff} == {("error", "budget")}
    assert (sent.bytes, peak.bytes > 16384) == (8192, True)
    assert "all-gather over tp: each device sends 16.4 kB in a step, 8.19 kB before (+100 %)" in str(sent)
    assert sent.message.count("8.19 kB by all-gather of f32[64,64]") == 2
    assert peak.message.startswith("peak: each device needs ")
    assert "make the lock again" in sent.fix
    assert two.diff(one.lock()) == diff


def test_what_is_new_is_growth_and_what_is_gone_is_told(one):
    new, gone = one.diff(gathers(0)), gathers(0).diff(one)
    assert "8.19 kB in a step, 0 B before" in str(new)
    assert {finding.level for finding in new} == {"error"}
    assert {finding.level for finding in gone} == {"info"}
    assert "0 B in a step, 8.19 kB before (-100 %)" in str(gone)
    assert "make the lock again" in str(gone)


@pytest.mark.parametrize(
    ("factor", "options", "levels"),
    [(1.019, {}, []), (1.021, {}, ["error"] * 2), (1.021, {"tolerance": 0.03}, []),
     (1.001, {"tolerance": 0}, ["error"] * 2), (0.9, {}, ["info"] * 2)],
)  # fmt: skip
def test_growth_within_the_tolerance_is_none(one, factor, options, levels):
    before = locked(one, lambda c: c.update(sent={key: round(size / factor) for key, size in c["sent"].items()}))
    assert [finding.level for finding in one.diff(before, **options)] == levels


def test_another_mesh_is_not_compared(one):
    other = gathers(1, devices(fsdp=2, tp=4))
    (finding,) = other.diff(one)
    assert finding.level == "error"
    assert "fsdp=4,tp=2 -> fsdp=2,tp=4" in finding.message


def test_other_versions_are_told_beside_what_has_changed(one):
    assert not one.diff(locked(one, lambda c: c["versions"].update(jax="0.4.1")))
    changed = one.diff(locked(one, lambda c: c.update(versions={"jax": "0.4.1"}, sent={})))
    assert f"jax 0.4.1 -> {jax.__version__}" in str(changed)


def test_a_trip_count_that_is_not_known_any_more_fails():
    body = lambda x: placed(placed(jnp.sin(x)) * 2, "fsdp")  # noqa: E731
    known = inspected(lambda x: jax.lax.fori_loop(0, 3, lambda _, x: body(x), x), [P("fsdp")])
    unknown = inspected(lambda x: jax.lax.while_loop(lambda x: x.sum() < 1e9, body, x), [P("fsdp")])
    assert "per iteration" not in known.lock()
    assert not unknown.diff(unknown.lock())
    assert "all-gather per iteration over fsdp" in str(unknown.diff(known).at_least("error"))


@pytest.mark.parametrize("change", [{"peak": None}, {"peak": 1, "peak_by": "assigned"}])
def test_a_peak_that_is_not_told_or_counted_otherwise_is_not_compared(one, change):
    (finding,) = one.diff(locked(one, lambda c: c.update(change)))
    assert finding.level == "warning"
    assert f"in the lock {change['peak']} by " in finding.message
